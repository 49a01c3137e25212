"""How much of prompts a step reads, so that outputs that are being written do not wait long for it."""

import math

_FEWEST = 16
_FIRST = 64
_SMOOTHING = 0.5


class Pace:
    """Follows how fast prompts are read.

    Args:
        most_seconds: that reading may take in a step while outputs are written; ``None`` for any time. A chunk that
            cannot be made shorter may take longer, and so may the first chunks, from which the speed is learned.
    """

    def __init__(self, most_seconds: float | None) -> None:
        self._most_seconds = most_seconds
        self._per_token: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether times matter."""
        return self._most_seconds is not None

    def tokens(self, writing: bool) -> float:
        """Tokens to read in the coming step.

        Args:
            writing: whether outputs are being written.
        """
        if self._most_seconds is None or not writing:
            return math.inf
        if self._per_token is None:
            return _FIRST
        return max(_FEWEST, int(self._most_seconds / self._per_token))

    def note(self, tokens: int, seconds: float) -> None:
        """Counts what was read. Later tokens of a prompt take longer, since they see more.

        Args:
            tokens: how many.
            seconds: the time that they took.
        """
        if tokens >= _FEWEST:  # fewer take about as long as that many
            now = seconds / tokens
            before = now if self._per_token is None else self._per_token
            self._per_token = max(now, _SMOOTHING * now + (1 - _SMOOTHING) * before)
