"""Selections that read no weights of their own: their rows ride through the sublayers with a verification.

A dynamic program over the layers (CLaSp's, KnapSpec's) needs of every sublayer only the states behind the one before
and the cached keys. Carried out alone it reads all weights once more; beside the rows of a verification, which pass the
same sublayers in the same order, it reads none. Its outcome is there one round later.
"""

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import torch

from selfspec.decoding.probe import Branches
from selfspec.runtimes.target import Step

T = TypeVar("T")

Passage = Generator[tuple[int, torch.Tensor], torch.Tensor, T]
"""A computation that asks for one sublayer after the other, in ascending order, and then returns its outcome.

Yields a sublayer and states ``[count, rows, hidden]`` before it, independent branches of the same tokens, and is sent
those behind it.
"""


def carry_out(passage: Passage[T], run: Callable[[int, torch.Tensor], torch.Tensor]) -> T:
    """Runs a passage at once, by forwards of its own.

    Args:
        passage: not started yet.
        run: runs one sublayer on independent states, as ``Branches.run`` does.

    Returns:
        Its outcome.
    """
    try:
        sublayer, states = next(passage)
        while True:
            sublayer, states = passage.send(run(sublayer, states))
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


class Rider(Generic[T]):
    """A passage on its way through a verification.

    Args:
        passage: not started yet.
        branches: at its tokens, which are committed already.
    """

    def __init__(self, passage: Passage[T], branches: Branches) -> None:
        self._passage = passage
        self._branches = branches
        self._outcome: list[T] = []
        self._wanted: tuple[int, torch.Tensor] | None = None
        self._advance(None)

    @property
    def outcome(self) -> T:
        """What the passage returned, once a verification has carried it."""
        assert self._wanted is None, f"nothing has carried it through sublayer {self._wanted[0]}"
        return self._outcome[0]

    def through(self, sublayer: int, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """Runs a sublayer over the rows of a forward, and over those of the passage if it has come to this sublayer.

        Args:
            sublayer: its index.
            hidden_states: ``[rows, hidden]``, the forward's residual stream before it.
            step: the layout of the forward's rows.

        Returns:
            ``[rows, hidden]``, the forward's residual stream behind it.
        """
        if self._wanted is None or self._wanted[0] != sublayer:
            return self._branches.target.run(hidden_states, (sublayer,), step).hidden_states
        hidden_states, behind = self._branches.run_beside(sublayer, self._wanted[1], hidden_states, step)
        self._advance(behind)
        return hidden_states

    def _advance(self, behind: torch.Tensor | None) -> None:
        try:
            self._wanted = next(self._passage) if behind is None else self._passage.send(behind)
        except StopIteration as ended:
            self._wanted = None
            self._outcome.append(ended.value)
