"""When KnapSpec selects, and on which rows: as published, or only where it pays, on rows spread over the output."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch

from selfspec.decoding.probe import Branches, Probe
from selfspec.runtimes.precision import AnyPrecision


class Schedule(ABC):
    """One request's schedule. ``plan`` and then ``watching`` are asked for in every round, ``learn`` ends it.

    Args:
        probe: of the request.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    @abstractmethod
    def is_due(self, pays: bool) -> bool:
        """Whether to select before the coming round.

        Args:
            pays: whether a selection would be worth its time.
        """

    @property
    @abstractmethod
    def watching(self) -> bool:
        """Whether the states of the coming round are needed."""

    @abstractmethod
    def note_round(self, states: torch.Tensor | None, rows: int) -> None:
        """Counts a round.

        Args:
            states: ``[2L - 1, rows, hidden]``, the target's states of the tokens that it committed, if they were
                watched.
            rows: how many these are.
        """

    @abstractmethod
    def restart(self) -> None:
        """Drops the states kept so far, as after rounds that this request did not draft."""

    @abstractmethod
    def take(self, most_rows: int, precision: AnyPrecision | None) -> tuple[torch.Tensor, Branches]:
        """The rows of a selection, which is made now.

        Args:
            most_rows: of one forward, all branches together.
            precision: of the weights that run them; ``None`` for the target's own.

        Returns:
            The target's states, ``[2L - 1, rows, hidden]``, and what runs branches of these rows.
        """


class PaperSchedule(Schedule):
    """After ``recent_rounds`` rounds and then every ``interval``, on all tokens of the last ``recent_rounds``.

    Args:
        probe: of the request.
        interval: rounds between two selections.
        recent_rounds: rounds whose tokens a selection uses.
    """

    def __init__(self, probe: Probe, interval: int, recent_rounds: int) -> None:
        super().__init__(probe)
        self._interval = interval
        self._recent_rounds = recent_rounds
        self._recent: deque[torch.Tensor] = deque(maxlen=recent_rounds)
        self._rounds_left = min(recent_rounds, interval)

    def is_due(self, pays: bool) -> bool:
        """By the number of rounds alone."""
        return bool(self._recent) and self._rounds_left <= 0

    @property
    def watching(self) -> bool:
        """In the last rounds before a selection."""
        return self._rounds_left <= self._recent_rounds

    def note_round(self, states: torch.Tensor | None, rows: int) -> None:
        """Keeps the states of all its tokens."""
        self._rounds_left -= 1
        if states is not None:
            self._recent.append(states)

    def take(self, most_rows: int, precision: AnyPrecision | None) -> tuple[torch.Tensor, Branches]:
        """All tokens of the last rounds, as windows in which each branch sees its own keys."""
        references = torch.cat(list(self._recent), dim=1)
        self._rounds_left = self._interval
        if self._rounds_left >= self._recent_rounds:  # otherwise the next one uses some of them again
            self.restart()
        return references, self.probe.branches(references.shape[1], most_rows, precision)

    def restart(self) -> None:
        """Drops the states kept so far."""
        self._recent.clear()


class OurSchedule(Schedule):
    """Where it pays, on rows spread evenly over the last output tokens.

    States are kept from the round on in which a selection begins to pay, at most ``interval`` rounds after the last
    one, and it is made once there are ``tokens`` of them. A row sees the target's keys, so rows need not be neighbours:
    spread ones differ more, and so say more about the text than as many in a row.

    Args:
        probe: of the request.
        interval: rounds from one selection to the next, at least.
        tokens: output tokens over which rows are spread.
        rows: how many there are, at most ``tokens``.
    """

    def __init__(self, probe: Probe, interval: int, tokens: int, rows: int) -> None:
        super().__init__(probe)
        self._interval = interval
        self._tokens = tokens
        self._stride = tokens // rows
        self._rows: deque[tuple[int, torch.Tensor]] = deque(maxlen=rows)
        self._seen = 0
        self._rounds = interval
        self._collects = False

    def is_due(self, pays: bool) -> bool:
        """Where it pays and there are enough tokens."""
        self._collects = pays and self._rounds >= self._interval - self._tokens
        if not self._collects:
            self.restart()
        return self._collects and self._rounds >= self._interval and self._seen >= self._tokens

    @property
    def watching(self) -> bool:
        """Once it pays."""
        return self._collects

    def note_round(self, states: torch.Tensor | None, rows: int) -> None:
        """Keeps the states of every n-th token."""
        self._rounds += 1
        if states is None:
            return
        first = self.probe.committed - rows
        for row in range(rows):
            if (self._seen + row) % self._stride == 0:
                self._rows.append((first + row, states[:, row].clone()))
        self._seen += rows

    def take(self, most_rows: int, precision: AnyPrecision | None) -> tuple[torch.Tensor, Branches]:
        """The rows that were kept."""
        places: Sequence[int] = [place for place, _ in self._rows]
        references = torch.stack([states for _, states in self._rows], dim=1)
        self._rounds = 0
        self.restart()
        return references, self.probe.points(places, most_rows, precision)

    def restart(self) -> None:
        """Drops the states kept so far."""
        self._rows.clear()
        self._seen = 0
