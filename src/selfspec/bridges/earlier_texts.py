"""Texts that have ended, in which later texts are looked up."""

from collections.abc import Sequence

from selfspec.decoding.suffixes import SEPARATOR, SuffixAutomaton


class EarlierTexts:
    """The latest texts in one suffix automaton, each with a separator after it: ``most`` tokens or more, up to twice.

    ``automaton`` grows with each text. It is replaced when it has become too large; texts that use the one before may
    go on doing so.
    """

    def __init__(self, most: int) -> None:
        self.automaton = SuffixAutomaton()
        self._most = most

    def keep(self, token_ids: Sequence[int]) -> None:
        """Keeps the end of a text."""
        text = (*token_ids[-self._most :], SEPARATOR) if self._most and token_ids else ()
        if len(self.automaton.tokens) + len(text) > 2 * self._most:
            latest = self.automaton.tokens[-self._most :]
            self.automaton = SuffixAutomaton()
            self.automaton.extend(latest)
        self.automaton.extend(text)
