"""How a list of sublayers runs over a forward: in one native call, or one by one; and which states are kept."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from selfspec.model.forward import Forward
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.native import NativeForward


@dataclass
class StackOutput:
    """What a run of sublayers gives.

    Attributes:
        hidden_states: ``[rows, hidden]``, the residual stream after the last sublayer that ran.
        captured: by sublayer ``i`` the residual stream before it, ``h[i]``, ``[rows, hidden]``.
        logits: of the rows, where they were asked for.
    """

    hidden_states: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: Logits | None = None


@dataclass(frozen=True)
class Kept:
    """Which states ``h[i]`` of a run to keep; ``i`` from 0 to ``2L``. A skipped sublayer leaves the state as it is.

    Attributes:
        capture: sublayers ``i`` whose ``h[i]`` is returned.
        copies: by sublayer ``i`` a tensor ``[k, hidden]`` that receives the last ``k`` rows of ``h[i]``, so that the
            others need not be held.
    """

    capture: Collection[int] = ()
    copies: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def indices(self) -> set[int]:
        """All ``i``."""
        return {*self.capture, *self.copies}


_Run: TypeAlias = Callable[[torch.Tensor, Forward, Kept], StackOutput]


def run_one_by_one(
    blocks: Sequence[Sublayer],
    graphs: Graphs | None,
    hidden_states: torch.Tensor,
    sublayers: Sequence[int],
    forward: Forward,
    kept: Kept,
) -> StackOutput:
    """Runs sublayers one after the other.

    Args:
        blocks: all sublayers of the target.
        graphs: replays of them, used if they take the forward.
        hidden_states: ``[rows, hidden]``, the residual stream before the first.
        sublayers: ascending indices of those to run.
        forward: the rows.
        kept: the states to keep.
    """
    if graphs is not None and not graphs.takes(forward):
        graphs = None
    captured: dict[int, torch.Tensor] = {}
    wanted = sorted(kept.indices, reverse=True)
    stream = hidden_states if graphs is None else graphs.load(hidden_states, forward)

    def keep(index: int) -> None:
        """Keeps the residual stream before a sublayer, in the ways asked for."""
        if index in kept.capture:
            captured[index] = stream if graphs is None else stream.clone()
        if index in kept.copies:
            _copy_last(stream, kept.copies[index])

    for index in sublayers:
        while wanted and wanted[-1] <= index:
            keep(wanted.pop())
        stream = blocks[index](stream, forward) if graphs is None else graphs.advance(index, stream, forward)
    for index in wanted:
        keep(index)
    return StackOutput(stream if graphs is None else stream.clone(), captured)


def run_natively(
    native: NativeForward,
    hidden_states: torch.Tensor,
    sublayers: tuple[int, ...],
    forward: Forward,
    kept: Kept,
    *,
    logits: bool = False,
    confidence: bool = False,
) -> StackOutput:
    """Runs sublayers in one native call, which takes them; see ``run_one_by_one`` and ``NativeForward.run``."""
    stream = hidden_states.clone(memory_format=torch.contiguous_format)
    # A state is that before the first of these sublayers which runs.
    places = {index: bisect_left(sublayers, index) for index in kept.indices}
    rows = {place: 0 for place in places.values() if place < len(sublayers)}
    for index, place in places.items():
        if place in rows:
            rows[place] = max(rows[place], len(stream) if index in kept.capture else len(kept.copies[index]))
    buffers = {place: stream.new_empty(count, stream.shape[1]) for place, count in rows.items()}
    scored = native.run(stream, sublayers, forward, buffers, logits=logits, confidence=confidence)
    states = {index: buffers.get(place, stream) for index, place in places.items()}
    for index, copy in kept.copies.items():
        _copy_last(states[index], copy)
    return StackOutput(stream, {index: states[index] for index in kept.capture}, scored)


def groups_of(forward: Forward, most_rows: int) -> list[list[int]]:
    """Divides the parts of a forward: those with few rows together, each of the others by itself.

    Args:
        forward: the forward.
        most_rows: most rows of a part that counts as small.

    Returns:
        Lists of indices of parts.
    """
    small = [index for index, part in enumerate(forward.parts) if part.count <= most_rows]
    large = [[index] for index, part in enumerate(forward.parts) if part.count > most_rows]
    return [small, *large] if small else large


def run_in_groups(
    run: _Run, groups: Sequence[Sequence[int]], hidden_states: torch.Tensor, forward: Forward, kept: Kept
) -> StackOutput:
    """Runs groups of a forward's parts one after the other.

    Args:
        run: runs a forward.
        groups: lists of indices of parts.
        hidden_states: ``[rows, hidden]``, the residual stream of all parts.
        forward: all parts.
        kept: the states to keep, of all parts.
    """
    output = StackOutput(torch.empty_like(hidden_states))
    output.captured = {index: torch.empty_like(hidden_states) for index in kept.capture}
    for group in groups:
        places = torch.cat([torch.arange(forward.rows)[forward.slices[index]] for index in group])
        copies = dict(_shares(kept.copies, places, forward.rows))
        ran = run(hidden_states[places], forward.only(group), Kept(kept.capture, copies))
        output.hidden_states[places] = ran.hidden_states
        for index, states in ran.captured.items():
            output.captured[index][places] = states
        for index, copy in copies.items():
            own = places[len(places) - len(copy) :]
            kept.copies[index][own - (forward.rows - len(kept.copies[index]))] = copy
    return output


def _shares(copies: Mapping[int, torch.Tensor], places: torch.Tensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """For each copy of last rows, an empty tensor for those of them that are among some rows."""
    for index, copy in copies.items():
        count = int((places >= rows - len(copy)).sum())
        yield index, copy.new_empty(count, copy.shape[1])


def _copy_last(states: torch.Tensor, copy: torch.Tensor) -> None:
    """Copies the last rows of ``[rows, hidden]`` into ``[k, hidden]``."""
    copy.copy_(states[len(states) - len(copy) :])
