"""Texts that have ended, from which later texts copy."""

from collections import deque
from collections.abc import Sequence

from selfspec.decoding.suffixes import SEPARATOR, SuffixAutomaton


class EarlierTexts:
    """The latest texts in one suffix automaton: at least the last ``most`` tokens, at most twice as many.

    ``automaton`` grows with each text. It is replaced when it has become too large; texts that use the one before may
    go on doing so.
    """

    def __init__(self, most: int) -> None:
        self.automaton = SuffixAutomaton()
        self._most = most
        self._texts: deque[tuple[int, ...]] = deque()
        self._tokens = 0

    def keep(self, token_ids: Sequence[int]) -> None:
        """Keeps the end of a text."""
        text = tuple(token_ids[-self._most :]) if self._most else ()
        if not text:
            return
        self._texts.append(text)
        self._tokens += len(text)
        while self._tokens - len(self._texts[0]) >= self._most:
            self._tokens -= len(self._texts.popleft())
        if len(self.automaton.tokens) + len(text) + 1 <= 2 * self._most:
            self.automaton.extend((*text, SEPARATOR))
            return
        self.automaton = SuffixAutomaton()
        for each in self._texts:
            self.automaton.extend((*each, SEPARATOR))
