"""The rows on which KnapSpec selects: all tokens of the last rounds, or rows spread over them; and how many at once."""

from collections import deque

import torch

from selfspec.decoding.drafter import Branches, Probe
from selfspec.methods.knapsack import MAX_WEIGHT, SCRATCH_SHARE, weight_bytes
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target

_FEWEST_ROWS, _MOST_ROWS = 96, 1024


def selection_rows(target: Target, tokens: int) -> int:
    """Most rows of one forward: those whose cache slots take 0.5 % of the weights' memory, or all branches if fewer.

    At least 96, whose slots take that share in a model of 0.6 billion parameters and less in larger ones. At most 1024:
    a larger forward is bound by arithmetic on any device, so it saves nothing.
    """
    most_branches = max(1, target.layer_count * (MAX_WEIGHT + 1) // 2)
    slot = target.new_sequence(1, 1, 1).cache.size_in_bytes
    affordable = weight_bytes(target) // SCRATCH_SHARE // slot
    rows = min(max(affordable, _FEWEST_ROWS), _MOST_ROWS, most_branches * tokens)
    return max(rows, tokens)


class RecentRounds:
    """All tokens of the last ``rounds`` rounds, as windows in which each branch sees its own keys (the paper).

    A forward has at most ``most_rows`` rows.
    """

    def __init__(self, rounds: int, most_rows: int) -> None:
        self.rounds, self._most_rows = rounds, most_rows
        self._recent: deque[torch.Tensor] = deque(maxlen=rounds)

    @property
    def ready(self) -> bool:
        """Whether there are any."""
        return bool(self._recent)

    def add(self, first: int, states: torch.Tensor) -> None:
        """Adds the states ``[n + 1, rows, hidden]`` of a round's tokens, the first of them at a position."""
        self._recent.append(states)

    def take(self, probe: Probe, precision: AnyPrecision | None) -> tuple[torch.Tensor, Branches]:
        """The target's states ``[n + 1, rows, hidden]``, and what runs branches of these rows."""
        references = torch.cat(list(self._recent), dim=1)
        return references, probe.branches(references.shape[1], self._most_rows, precision)

    def clear(self) -> None:
        """Drops all states."""
        self._recent.clear()


class SpreadRows:
    """``rows`` rows spread evenly over the last ``tokens`` tokens (ours).

    A row sees the target's keys, so rows need not be neighbours: spread ones differ more. The members are those of
    ``RecentRounds``.
    """

    def __init__(self, tokens: int, rows: int, most_rows: int | None = None) -> None:
        self.rounds, self._most_rows = tokens, most_rows  # a round has a token at least
        self._stride = tokens // rows
        self._rows: deque[tuple[int, torch.Tensor]] = deque(maxlen=rows)
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough tokens."""
        return self._seen >= self.rounds

    def add(self, first: int, states: torch.Tensor) -> None:
        """Keeps the states of every n-th token."""
        for row in range(states.shape[1]):
            if self._seen % self._stride == 0:
                self._rows.append((first + row, states[:, row].clone()))
            self._seen += 1

    def take(self, probe: Probe, precision: AnyPrecision | None) -> tuple[torch.Tensor, Branches]:
        """The states that were kept, and what runs branches of their rows."""
        references = torch.stack([states for _, states in self._rows], dim=1)
        return references, probe.points([place for place, _ in self._rows], self._most_rows, precision)

    def clear(self) -> None:
        """Drops all states."""
        self._rows.clear()
        self._seen = 0
