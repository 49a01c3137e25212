"""Final norm and LM head over many rows: the greedy token of each and its probability, without holding whole logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.products import can_join, compile_head, outputs_of, signature
from selfspec.runtimes.target import Target

_FEWEST_OUTPUTS = 64
"""Smallest slice of the vocabulary, however little memory there is."""

_Score = Callable[[torch.Tensor], torch.Tensor]


class ShadowHead:
    """Computes greedy tokens and their probabilities from hidden states, in one pass over the LM head's weights.

    The vocabulary is processed in slices. Each slice of the weights is read once for all rows; of its logits, three
    numbers per row are kept: the largest logit so far, its token, and the logarithm of the sum of exponentials. The
    memory needed is that of rows × slice. Tokens are those of an argmax over whole logits, with the lowest token where
    logits are equal; probabilities are those of a softmax, up to rounding.

    Only an ordinary linear layer can be sliced. With another head (quantised, hooked, adapted) the rows go through
    ``Target.logits`` in parts, whose logits are whole, and the head is read once for each part.

    Logits, and what is computed from them, take at most ``memory`` bytes at a time; but a slice has at least 64 outputs
    and a part at least one row, even if that takes more.
    """

    def __init__(self, target: Target, memory: int) -> None:
        self._target = target
        self._memory = memory
        self._signature: list[Any] | None = None
        self._slices: dict[int, list[_Score]] = {}

    @property
    def one_pass(self) -> bool:
        """Whether the head can be sliced, so that its weights are read once."""
        return can_join([self._head])

    def read(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greedy token after each row, long ``[rows]``, and its probability, float32.

        The rows are the residual stream before the final norm, ``[rows, hidden]``.
        """
        return self._read_slices(hidden_states) if self.one_pass else self._read_parts(hidden_states)

    @property
    def _head(self) -> Any:
        model: Any = self._target.model
        return model.get_output_embeddings()

    def _read_slices(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, target = len(hidden_states), self._target
        normed = target.norm(hidden_states)
        largest = hidden_states.new_full((rows,), -torch.inf)
        tokens = torch.zeros(rows, dtype=torch.long, device=hidden_states.device)
        log_sum = torch.full((rows,), -torch.inf, device=hidden_states.device, dtype=torch.float32)
        size = self._slice_size(rows)
        for index, score in enumerate(self._sliced(size)):
            logits = self._target.decoder.scale_logits(score(normed))
            values, places = logits.max(-1)
            tokens = torch.where(values > largest, places + index * size, tokens)
            largest = torch.maximum(largest, values)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits.float(), -1))
        return tokens, torch.exp(largest.float() - log_sum).clamp_(max=1.0)

    def _slice_size(self, rows: int) -> int:
        """Outputs of a slice: a power of two, so that few different slicings are ever made."""
        element = self._target.dtype.itemsize + 2 * torch.float32.itemsize  # a logit, its float32, its exponential
        fitting = self._memory // (element * max(1, rows))
        return max(_FEWEST_OUTPUTS, 1 << max(0, fitting.bit_length() - 1))

    def _sliced(self, size: int) -> Sequence[_Score]:
        """The head as layers of ``size`` outputs, views of its weights; the last one may have fewer."""
        head = self._head
        now = signature([head])
        if now != self._signature:  # the weights were moved, or the head was replaced
            self._slices, self._signature = {}, now
        slices = self._slices
        if size not in slices:
            parts = [outputs_of(head, first, size) for first in range(0, head.out_features, size)]
            slices[size] = [self._compile(part) for part in parts]
        return slices[size]

    def _compile(self, part: nn.Module) -> _Score:
        if self._target.runtime not in ("auto", "compiled"):
            return part
        try:
            return compile_head(part)
        except KernelBuildError:
            return part

    def _read_parts(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._target.vocab_size * (self._target.dtype.itemsize + torch.float32.itemsize)
        tokens, confidences = [], []
        for part in torch.split(hidden_states, max(1, self._memory // row)):
            logits = self._target.logits(part)
            tokens.append(logits.argmax(-1))
            confidences.append(torch.softmax(logits, -1, dtype=torch.float32).amax(-1))
        return torch.cat(tokens), torch.cat(confidences)
