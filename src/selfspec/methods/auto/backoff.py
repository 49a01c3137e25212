"""When a request that is held back looks for drafts again: planning takes time, too."""

from selfspec.planning.allowance import PlanningTime

_SHORTEST, _LONGEST = 16, 64
"""Tokens for which nothing is planned, the first time and at most; where that was in vain, next time twice as many."""


class Backoff:
    """Rounds of plain decoding in which a request that is held back plans nothing.

    To plan a round and to learn from it takes a share of a step. Where that is more than the share of plain decoding's
    time that may be lost, a request that plans goes on losing, and could never draft again. So it backs off for some
    tokens, for more while that is in vain; they are looked through afterwards.
    """

    def __init__(self) -> None:
        self._left, self._next = 0, _SHORTEST
        self._rounds, self._tokens = PlanningTime(), PlanningTime()

    @property
    def on(self) -> bool:
        """Whether nothing is planned now."""
        return self._left > 0

    @property
    def round_seconds(self) -> float:
        """Seconds that the host takes in a round of plain decoding in which nothing is planned."""
        return self._rounds.mean

    def begin(self) -> None:
        """Begins one, as the request is held back."""
        self._left, self._next = self._next, min(2 * self._next, _LONGEST)

    def end(self) -> None:
        """Ends it, if there is one: the request may draft, so that the next one is short again."""
        self._left, self._next = 0, _SHORTEST

    def pass_by(self, tokens: int) -> None:
        """Counts tokens that were written."""
        self._left -= tokens

    def note_rounds(self, rounds: int, seconds: float) -> None:
        """Counts rounds in which nothing was planned, and the host's seconds in them."""
        self._rounds.note(seconds / rounds)

    def reading(self, tokens: int, seconds: float) -> float:
        """Counts tokens that were looked through afterwards; returns what that takes in the mean."""
        self._tokens.note(seconds / tokens)
        return tokens * self._tokens.mean
