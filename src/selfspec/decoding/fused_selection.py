"""Selections that read no weights of their own: their rows go through the sublayers with a verification.

A dynamic program over the layers (CLaSp's, KnapSpec's) needs of every sublayer only the states after the one before and
the cached keys. Run alone it reads all weights once more; beside the rows of a verification, which pass the same
sublayers in the same order, it reads none. Its outcome is available one round later.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from selfspec.decoding.probe import Branches
from selfspec.model.forward import Forward, SequenceState
from selfspec.runtimes.target import StackOutput, Target

T = TypeVar("T")

SelectionSteps: TypeAlias = Generator[tuple[int, torch.Tensor], torch.Tensor, T]
"""A selection as a coroutine: it asks for one sublayer after the other, in ascending order, and returns its outcome.

Yields a sublayer and states ``[count, rows, hidden]`` before it, independent branches of the same tokens, and is sent
the states after it.
"""


def run_selection(steps: SelectionSteps[T], run: Callable[[int, torch.Tensor], torch.Tensor]) -> T:
    """Runs a selection at once, by forwards of its own.

    Args:
        steps: not started yet.
        run: runs one sublayer on independent states, as ``Branches.run`` does.

    Returns:
        Its outcome.
    """
    try:
        sublayer, states = next(steps)
        while True:
            sublayer, states = steps.send(run(sublayer, states))
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


class FusedSelection(Generic[T]):
    """A selection whose sublayers run together with those of a verification.

    Args:
        steps: not started yet.
        branches: at its tokens, which are committed already.
    """

    def __init__(self, steps: SelectionSteps[T], branches: Branches) -> None:
        self.branches = branches
        self._steps = steps
        self._outcome: list[T] = []
        self._request: tuple[int, torch.Tensor] | None = None
        self._advance(None)

    @property
    def outcome(self) -> T:
        """What the selection returned, once a verification has run all its sublayers."""
        assert self._request is None, f"sublayer {self._request[0]} has not run"
        return self._outcome[0]

    @property
    def next_sublayer(self) -> int | None:
        """The sublayer that it asks for; ``None`` once it has ended."""
        return None if self._request is None else self._request[0]

    @property
    def states(self) -> torch.Tensor:
        """``[count, rows, hidden]``, the states before that sublayer."""
        assert self._request is not None
        return self._request[1]

    def send(self, states: torch.Tensor) -> None:
        """Gives it the states after that sublayer, ``[count, rows, hidden]``."""
        self._advance(states)

    def _advance(self, states: torch.Tensor | None) -> None:
        try:
            self._request = next(self._steps) if states is None else self._steps.send(states)
        except StopIteration as ended:
            self._request = None
            self._outcome.append(ended.value)


class FusedRun:
    """Runs sublayers as ``Target.run`` does, and takes selections through them on the way.

    Args:
        target: the model.
        selections: of sequences whose rows are in every forward, at most one of each sequence.
    """

    def __init__(self, target: Target, selections: Iterable[FusedSelection[Any]]) -> None:
        self._target = target
        self._selections = list(selections)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        sublayers: Sequence[int],
        forward: Forward,
        capture: Collection[int] = (),
        *,
        logits: bool = False,
    ) -> StackOutput:
        """Runs sublayers over the rows of a forward; see ``Target.run``. No logits after a selection in the last."""
        if not self._selections:
            return self._target.run(hidden_states, sublayers, forward, capture, logits=logits)
        output = StackOutput(hidden_states)
        rest = list(sublayers)
        while rest:
            asked = [index for each in self._selections if (index := each.next_sublayer) is not None and index in rest]
            alone = rest[: rest.index(min(asked))] if asked else rest
            part = alone or rest[:1]
            rest = rest[len(part) :]
            wanted = {index for index in capture if part[0] <= index <= part[-1] or (not rest and index > part[-1])}
            ran = (
                self._target.run(output.hidden_states, part, forward, wanted, logits=logits and not rest)
                if alone
                else self._run_one(output.hidden_states, part[0], forward, wanted)
            )
            output = StackOutput(ran.hidden_states, {**output.captured, **ran.captured}, ran.logits)
        return output

    def _run_one(
        self, hidden_states: torch.Tensor, sublayer: int, forward: Forward, capture: Collection[int]
    ) -> StackOutput:
        """One sublayer over the forward's rows and over the first part of every selection that asks for it."""
        rows = len(hidden_states)
        asking = [each for each in self._selections if each.next_sublayer == sublayer]
        parts = [each.branches.split(each.states) for each in asking]
        ends = [_end_of(each.branches.sequence, forward) for each in asking]
        layouts = [
            each.branches.lay_out(len(part[0]), end) for each, part, end in zip(asking, parts, ends, strict=True)
        ]
        together = torch.cat([hidden_states, *(part[0].flatten(0, 1) for part in parts)])
        ran = self._target.run(together, (sublayer,), Forward.join([forward, *layouts])).hidden_states
        first_row = rows
        for each, (first, *others), end in zip(asking, parts, ends, strict=True):
            count = first.shape[0] * first.shape[1]
            states = [ran[first_row : first_row + count].view_as(first)]
            states += [each.branches.run_at(sublayer, part, end) for part in others]
            first_row += count
            each.send(torch.cat(states))
        before = {index: hidden_states for index in capture if index <= sublayer}
        after = {index: ran[:rows] for index in capture if index > sublayer}
        return StackOutput(ran[:rows], {**before, **after})


def _end_of(sequence: SequenceState, forward: Forward) -> int:
    """The cache slot after the last row that a sequence has in a forward."""
    return max(part.end for part in forward.parts if part.sequence is sequence)
