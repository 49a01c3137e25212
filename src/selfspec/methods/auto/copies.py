"""Tokens copied from where the text repeats itself, with the probability that they are right."""

from collections.abc import Sequence

from selfspec.methods.auto.acceptance import Acceptance
from selfspec.methods.copying import Match, continuation
from selfspec.methods.suffix_automaton import SuffixAutomaton

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
        """By number of copied tokens the probability that all of them are right, as long as it is worth a row.

        Args:
            match: after which they are copied.
            count: most copied tokens.

        Returns:
            At most ``count`` numbers, never rising; none without a match.
        """
        likely: list[float] = []
        if match.length:
            rates, probability = self._acceptance.rates(match.length, count), 1.0
            for rate in rates:
                probability *= rate
                if probability < _UNLIKELY:
                    break
                likely.append(probability)
        return likely

    def tokens(self, match: Match, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The copied tokens.

        Args:
            match: after which they are copied; there is one.
            count: how many, at least 1.
            drafted: tokens after the text that the match ends with.
        """
        return continuation(self._automaton.tokens, match.end, count, drafted)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text, and learns from each whether the copy was right."""
        text = self._automaton
        for token_id in token_ids:
            if text.match_length:
                self._acceptance.note(text.tokens[text.match_end] == token_id, text.match_length)
            text.extend((token_id,))
