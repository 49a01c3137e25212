"""Tokens copied from where the text repeats itself, with the probability that they are right."""

from collections.abc import Sequence

from selfspec.methods.auto.acceptance import Acceptance
from selfspec.methods.auto.plans import MOST_GUESSES, best_guesses
from selfspec.methods.copying import Match, continuation
from selfspec.methods.suffix_automaton import SuffixAutomaton
from selfspec.runtimes.costs.rows import CostTable

_UNLIKELY = 0.02
"""Probability below which a copied token is not worth its row on any machine."""


class Copies:
    """What followed the longest suffix of the text that has occurred before, as in ``suffix``.

    The acceptance of a copied token depends on the length of the match before it, in which the copied tokens count.
    Every token of the text scores it, whether it was drafted or not.

    Args:
        token_ids: the text so far.
        acceptance: of a copied token by the length of the match before it; learns.
    """

    def __init__(self, token_ids: Sequence[int], acceptance: Acceptance) -> None:
        self._automaton = SuffixAutomaton(token_ids)
        self._acceptance = acceptance

    @property
    def match_length(self) -> int:
        """Tokens of the match; 0 without one."""
        return self._automaton.match_length

    @property
    def likelihood(self) -> float:
        """The probability that the next token is a copy's; 0 without a match."""
        return self._acceptance.rate(self.match_length) if self.match_length else 0.0

    def match_after(self, drafted: Sequence[int] = ()) -> Match:
        """The match at the end of the text and of tokens drafted after it."""
        return self._automaton.match_after(drafted)

    def survival(self, match: Match, count: int) -> list[float]:
        """By number of copied tokens the probability that all are right; at most ``count``, as long as worth a row."""
        likely: list[float] = []
        if match.length:
            probability = 1.0
            for rate in self._acceptance.rates(match.length, count):
                probability *= rate
                if probability < _UNLIKELY:
                    break
                likely.append(probability)
        return likely

    def tokens(self, match: Match, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The ``count`` tokens copied after a match of the text and ``drafted`` tokens."""
        return continuation(self._automaton.tokens, match.end, count, drafted)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text, and learns from each whether the copy was right."""
        text = self._automaton
        for token_id in token_ids:
            if text.match_length:
                self._acceptance.note(text.tokens[text.match_end] == token_id, text.match_length)
            text.extend((token_id,))


class CopiesToConfirm:
    """Guesses of what a layer draft drafts next: copies, as many as make drafting cheapest.

    Args:
        copies: from where the text repeats itself.
        costs: of the draft's forward.
        most_seconds: that rows of guesses may cost.

    Attributes:
        seconds: what they cost so far.
        forwards: the rows of each forward that guesses were asked for, the drafted token's included.
    """

    def __init__(self, copies: Copies, costs: CostTable, most_seconds: float) -> None:
        self._copies = copies
        self._costs = costs
        self._most_seconds = most_seconds
        self.seconds = 0.0
        self.forwards: list[int] = []

    def __call__(self, drafted: Sequence[int]) -> Sequence[int]:
        """The guesses after the text and the tokens drafted so far."""
        match = self._copies.match_after(drafted)
        count, _ = best_guesses(self._costs, self._copies.survival(match, MOST_GUESSES))
        seconds = self.seconds + self._costs[1 + count] - self._costs[1]
        if not count or seconds > self._most_seconds:
            self.forwards.append(1)
            return ()
        self.seconds = seconds
        self.forwards.append(1 + count)
        return self._copies.tokens(match, count, drafted)
