"""Tokens copied from where the text repeats itself, with the probability that they are right."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from selfspec.methods.auto.acceptance import Acceptance
from selfspec.methods.copying import continuation
from selfspec.methods.suffix_automaton import SuffixAutomaton


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

    def survival(self, count: int, drafted: Sequence[int] = ()) -> list[float]:
        """By number of copied tokens the probability that all of them are right; empty without a match.

        Args:
            count: most copied tokens.
            drafted: tokens after the text, which the copied ones follow.
        """
        match = self._automaton.match_after(drafted).length
        return list(accumulate((self._acceptance.rate(match + copied) for copied in range(count if match else 0)), mul))

    def tokens(self, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The copied tokens; there is a match.

        Args:
            count: how many, at least 1.
            drafted: tokens after the text, which the copied ones follow.
        """
        return continuation(self._automaton.tokens, self._automaton.match_after(drafted).end, count, drafted)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text, and learns from each whether the copy was right."""
        text = self._automaton
        for token_id in token_ids:
            if text.match_length:
                self._acceptance.note(text.tokens[text.match_end] == token_id, text.match_length)
            text.extend((token_id,))
