"""Early exits for a model of one's own: low-rank changes of its layers, by LayerSkip's layer dropout and exit loss.

LayerSkip (arXiv 2404.16710) trains on next tokens. Here the frozen model itself is the teacher, of the exit and of the
last layer, so that few texts are enough and the model's own behaviour is kept.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
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
    """A change of a linear layer's weight ``[outputs, inputs]``: ``up @ down``, which is zero before the first update.

    The layer's output has it added, in the layer's dtype; ``up`` and ``down`` are float32.
    """

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.on = True
        self._hook = layer.register_forward_hook(self._add)

    def _add(self, _: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return output
        reduced = functional.linear(given[0], self.down.to(output.dtype))
        return output + functional.linear(reduced, self.up.to(output.dtype))

    @torch.no_grad()
    def merge(self, layer: nn.Linear) -> None:
        """Adds the change to the layer's weight, and leaves its output alone from then on."""
        layer.weight.copy_(layer.weight.float() + self.up @ self.down)
        self._hook.remove()


class EarlyExit:
    """A model whose layers can change.

    Args:
        model: its layers are its decoder's ``layers``, followed by ``norm``. It is changed in place.
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
        inside = set(self._layers.modules())
        self._changed = {
            name: part for name, part in model.named_modules() if part in inside and type(part) is nn.Linear
        }
        if not self._changed:
            raise UnsupportedModelError("the layers have no ordinary linear layers; load the model unquantised")
        self.changes = {name: LowRank(part, training.rank, generator) for name, part in self._changed.items()}
        self._weights = [weight for change in self.changes.values() for weight in change.parameters()]
        self._optimizer = torch.optim.AdamW(self._weights, lr=training.rate, weight_decay=0.0, betas=(0.9, 0.95))
        self.done = 0
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
        """The model as it was, with all layers, without gradients."""
        drops, self._drops = self._drops, frozenset()
        for change in self.changes.values():
            change.on = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._drops = drops
            for change in self.changes.values():
                change.on = True

    def train(self, tokens: torch.Tensor, report: Callable[[int, float], None]) -> None:
        """Trains on rows of a text, long ``[tokens]``, up to the last step; ``report`` gets each step and its loss."""
        training = self.training
        for step in range(self.done, training.steps):
            chooser = random.Random(f"{training.seed} {step}")
            self._drops = self._draw_drops(chooser)
            self._optimizer.zero_grad()
            loss = 0.0
            for _ in range(training.rows):
                start = chooser.randrange(len(tokens) - training.length)
                loss += self._learn(tokens[None, start : start + training.length]) / training.rows
            self._drops = frozenset()
            for group in self._optimizer.param_groups:
                group["lr"] = training.rate * min(1.0, (step + 1) / 20) * (1 - step / training.steps)
            self._optimizer.step()
            self.done = step + 1
            report(step, loss)

    def _learn(self, inputs: torch.Tensor) -> float:
        """Adds the gradients of one row ``[1, length]`` to those of the step; returns its loss."""
        with self.unchanged():
            wanted = self.model(input_ids=inputs, use_cache=False).logits.float().log_softmax(-1)
        last, early = self.logits(inputs)
        loss = _divergence(wanted, last) + _divergence(wanted, early)
        (loss / self.training.rows).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _draw_drops(self, chooser: random.Random) -> frozenset[int]:
        """Layers to skip in a step; their probabilities rise exponentially from 0 (LayerSkip, section 4.1)."""
        last, most = len(self._layers) - 1, self.training.dropout
        rising = [most * (2 ** (index / last) - 1) for index in range(last + 1)]
        return frozenset(index for index, share in enumerate(rising) if chooser.random() < share)

    def state(self) -> dict[str, Any]:
        """What ``restore`` continues from: tensors and numbers, for ``torch.save``."""
        return {
            "done": self.done,
            "weights": self._weights,
            "optimizer": self._optimizer.state_dict(),
            "training": asdict(self.training),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from the state of an earlier training of this model with these settings, but for ``steps``."""
        if [part.shape for part in state["weights"]] != [part.shape for part in self._weights]:
            raise InvalidParameterError("the training to continue is of another model or --rank; name another --work")
        own = asdict(self.training)
        if other := [name for name, value in state["training"].items() if name != "steps" and own[name] != value]:
            raise InvalidParameterError(f"the training to continue has another {', '.join(other)}; name another --work")
        with torch.no_grad():
            for weight, saved in zip(self._weights, state["weights"], strict=True):
                weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    @torch.no_grad()
    def measure(self, tokens: torch.Tensor) -> dict[str, float]:
        """Perplexity of a text, and the share of tokens at which the exit chooses the last layer's token."""
        rows = tokens[: len(tokens) // self.training.length * self.training.length].view(-1, self.training.length)
        loss, agreed = 0.0, 0
        for inputs in torch.split(rows, 1):
            last, early = self.logits(inputs)
            loss += float(functional.cross_entropy(last[0, :-1].float(), inputs[0, 1:], reduction="sum"))
            agreed += int((last.argmax(-1) == early.argmax(-1)).sum())
        return {"perplexity": math.exp(loss / (rows.numel() - len(rows))), "agreement": agreed / rows.numel()}

    def merge(self) -> PreTrainedModel:
        """Makes the changes part of the weights; the model is an ordinary one afterwards."""
        for name, part in self._changed.items():
            self.changes[name].merge(part)
        for hook in self._hooks:
            hook.remove()
        return self.model


def _divergence(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean Kullback-Leibler divergence of distributions from wanted ones, given as logarithms."""
    divergence: torch.Tensor = (wanted.exp() * (wanted - logits.float().log_softmax(-1))).sum(-1).mean()
    return divergence
