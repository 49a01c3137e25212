"""The model's one forward over the drafts of several sequences, from where their states stop being the model's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from selfspec.model.forward import Forward
from selfspec.runtimes.chain import VerifyRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.stack import Stack, StackOutput


@dataclass(frozen=True)
class VerifiedRows:
    """What the model computed of a sequence's rows.

    Attributes:
        logits: of each row.
        captured: by sublayer ``i`` its state ``h[i]``, ``[rows, hidden]``.
    """

    logits: Logits
    captured: Mapping[int, torch.Tensor]


def verify(runner: Stack, requests: Sequence[VerifyRequest], *, native: bool) -> list[VerifiedRows]:
    """Runs the whole model over the last tokens and the drafts of several sequences; see ``Runner.verify``."""
    if native:
        assert runner.native is not None
        logits = runner.native.verify(requests, runner.rope)
        return [VerifiedRows(own, {}) for own in logits.split([len(each.token_ids) for each in requests])]
    return _verify_ranges(runner, [_Rows(runner, each) for each in requests])


def _verify_ranges(runner: Stack, parts: Sequence["_Rows"]) -> list[VerifiedRows]:
    """Runs ranges of sublayers one after the other; rows that a draft has computed enter where these states end."""
    last, logits = len(runner.sublayers), None
    for first, end in pairwise(sorted({0, last, *(part.shared_prefix for part in parts)})):
        for part in parts:
            part.enter(first)
        # A draft with all sublayers has computed its rows to the end, which are added there.
        scored = end == last and all(part.shared_prefix < last for part in parts)
        states = parts[0].states if len(parts) == 1 else torch.cat([part.states for part in parts])
        forward = Forward.join([part.forward for part in parts]) if len(parts) > 1 else parts[0].forward
        capture = {index for part in parts for index in part.wanted(first, end)}
        output = runner.run(states, range(first, end), forward, capture, logits=scored)
        logits = output.logits
        for part, own in zip(parts, output.split([len(part.states) for part in parts]), strict=True):
            part.take(own, first, end)
    for part in parts:
        part.enter(last)
    counts = [len(part.states) for part in parts]
    if logits is None:
        logits = Logits(runner.logits(torch.cat([part.states for part in parts]), max(counts)))
    return [VerifiedRows(own, part.captured) for part, own in zip(parts, logits.split(counts), strict=True)]


class _Rows:
    """The rows of one sequence on their way through the sublayers."""

    def __init__(self, runner: Stack, request: VerifyRequest) -> None:
        state, tokens, length = request.state, request.token_ids, request.state.cache.length
        depths, visible = request.depths, request.visible
        self._whole = runner.lay_out(state, len(tokens), depths=depths, visible=visible, drawing=request.drawing)
        self._shared = request.shared_states
        self._captures = frozenset(request.capture)
        self.shared_prefix = request.shared_prefix if self._shared else 0
        self.captured: dict[int, torch.Tensor] = {}
        if not self._shared:
            self.forward, self.states = self._whole, runner.embed(tokens)
            return
        known = len(self._shared[self.shared_prefix])
        self.states = runner.embed(tokens[known:])
        self.forward = runner.lay_out(
            state,
            len(tokens) - known,
            start=length + known,
            prefix=None if visible is None else length,
            depths=None if depths is None else depths[known:],
            visible=None if visible is None else visible[known:],
        )

    def wanted(self, first: int, end: int) -> set[int]:
        """Sublayers of ``first`` to ``end`` whose states to capture; the first was the last of the range before."""
        wanted = self._captures | (self._shared.keys() if first < self.shared_prefix else frozenset())
        return {index for index in wanted if first < index <= end or index == first == 0}

    def take(self, output: StackOutput, first: int, end: int) -> None:
        """Takes what a range of sublayers gave."""
        self.states = output.hidden_states
        self.captured.update({index: output.captured[index] for index in self.wanted(first, end)})

    def enter(self, sublayer: int) -> None:
        """Adds the rows that the draft has computed, where this sublayer is the end of the shared prefix."""
        if not self._shared or sublayer != self.shared_prefix:
            return
        states = {index: torch.cat([rows, self.captured[index]]) for index, rows in self._shared.items()}
        self.forward, self.states = self._whole, states[sublayer]
        self.captured = {index: states[index] for index in self._captures & states.keys()}
