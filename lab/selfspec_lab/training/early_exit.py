"""Early exits for a model of one's own: low-rank changes of its layers, by LayerSkip's layer dropout and exit loss.

LayerSkip (arXiv 2404.16710) trains on next tokens. Here the frozen model itself is the teacher, of the exit and of the
last layer, so that few texts are enough and the model's own behaviour is kept.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from selfspec.errors import InvalidParameterError, UnsupportedModelError


@dataclass(frozen=True)
class ExitTraining:
    """What is trained and for how long.

    Attributes:
        exit_layer: layers that draft, counted from the first.
        steps: updates.
        rows: texts of a step.
        length: tokens of each.
        rank: of the changes of each weight matrix.
        rate: learning rate, which falls to zero.
        dropout: probability that the last layer is skipped in a step; earlier ones are skipped less often.
        seed: of the changes and of what is read.
    """

    exit_layer: int
    steps: int = 400
    rows: int = 8
    length: int = 128
    rank: int = 16
    rate: float = 2e-3
    dropout: float = 0.1
    seed: int = 0


class LowRank(nn.Module):
    """A change of a weight matrix ``[outputs, inputs]``: ``up @ down``, which is zero before the first update."""

    def __init__(self, weight: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.on = True

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The changed weight."""
        return weight + self.up @ self.down if self.on else weight


class EarlyExit:
    """A model whose layers can change.

    Args:
        model: in float32; its layers are its decoder's ``layers``, followed by ``norm``. It is changed in place.
        training: what to do.
    """

    def __init__(self, model: PreTrainedModel, training: ExitTraining) -> None:
        self.model, self.training = model, training
        untyped: Any = model
        body = untyped.get_decoder()
        if getattr(body, "layers", None) is None or getattr(body, "norm", None) is None:
            raise UnsupportedModelError(
                f"a '{model.config.model_type}' model has no list of layers with a norm after it, which exits need"
            )
        self._layers: Any = body.layers
        self._norm: nn.Module = body.norm
        self._head: nn.Module = untyped.get_output_embeddings()
        count = len(self._layers)
        if not 0 < training.exit_layer < count:
            raise InvalidParameterError(
                f"no exit after {training.exit_layer} layers; choose 1 to {count - 1} of {count}"
            )
        generator = torch.Generator().manual_seed(training.seed)
        model.requires_grad_(requires_grad=False)
        self._changed = [part for part in self._layers.modules() if type(part) is nn.Linear]
        if not self._changed:
            raise UnsupportedModelError("the layers have no ordinary linear layers; load the model unquantised")
        self._changes = [LowRank(part.weight, training.rank, generator) for part in self._changed]
        for part, change in zip(self._changed, self._changes, strict=True):
            parametrize.register_parametrization(part, "weight", change)
        self._chooser = random.Random(training.seed)
        self._drops: frozenset[int] = frozenset()
        self._state: torch.Tensor
        self._hooks = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(self._layers)]

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], Any]:
        def after(_: nn.Module, given: tuple[torch.Tensor, ...], output: Any) -> Any:
            result = given[0] if index in self._drops else output
            if index == self.training.exit_layer - 1:
                self._state = result[0] if isinstance(result, tuple) else result
            return result

        return after

    def logits(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer and of the exit, ``[rows, length, vocabulary]`` each, after tokens ``[rows, length]``."""
        last = self.model(input_ids=inputs, use_cache=False).logits
        return last, self._head(self._norm(self._state))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """The model as it was, without gradients."""
        for change in self._changes:
            change.on = False
        with torch.no_grad():
            yield
        for change in self._changes:
            change.on = True

    def train(self, tokens: torch.Tensor, report: Callable[[int, float], None]) -> None:
        """Trains on rows of a text, long ``[tokens]``; ``report`` gets each step and its loss."""
        training = self.training
        weights = [weight for change in self._changes for weight in change.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=training.rate, weight_decay=0.0, betas=(0.9, 0.95))
        for step in range(training.steps):
            starts = [self._chooser.randrange(len(tokens) - training.length) for _ in range(training.rows)]
            inputs = torch.stack([tokens[start : start + training.length] for start in starts])
            with self.unchanged():
                wanted = self.model(input_ids=inputs, use_cache=False).logits.log_softmax(-1)
            self._drops = self._draw_drops()
            last, early = self.logits(inputs)
            self._drops = frozenset()
            loss = _divergence(wanted, last) + _divergence(wanted, early)
            for group in optimizer.param_groups:
                group["lr"] = training.rate * min(1.0, (step + 1) / 20) * (1 - step / training.steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            report(step, float(loss.detach()))

    def _draw_drops(self) -> frozenset[int]:
        """Layers to skip in a step; their probabilities rise exponentially from 0 (LayerSkip, section 4.1)."""
        last, most = len(self._layers) - 1, self.training.dropout
        rising = [most * (2 ** (index / last) - 1) for index in range(last + 1)]
        return frozenset(index for index, share in enumerate(rising) if self._chooser.random() < share)

    @torch.no_grad()
    def measure(self, tokens: torch.Tensor) -> dict[str, float]:
        """Perplexity of a text, and the share of tokens at which the exit chooses the last layer's token."""
        rows = tokens[: len(tokens) // self.training.length * self.training.length].view(-1, self.training.length)
        loss, agreed = 0.0, 0
        for inputs in torch.split(rows, self.training.rows):
            last, early = self.logits(inputs)
            loss += float(
                functional.cross_entropy(last[:, :-1].flatten(0, 1), inputs[:, 1:].flatten(), reduction="sum")
            )
            agreed += int((last.argmax(-1) == early.argmax(-1)).sum())
        return {"perplexity": math.exp(loss / (rows.numel() - len(rows))), "agreement": agreed / rows.numel()}

    def merge(self) -> PreTrainedModel:
        """Makes the changes part of the weights; the model is an ordinary one afterwards."""
        for part in self._changed:
            parametrize.remove_parametrizations(part, "weight")
        for hook in self._hooks:
            hook.remove()
        return self.model


def _divergence(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean Kullback-Leibler divergence of distributions from wanted ones, given as logarithms."""
    divergence: torch.Tensor = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
    return divergence
