"""How long answers are."""

import threading

_FIRST_LENGTH = 256.0
"""Tokens that the first answer is expected to have."""

_FADING = 0.9
"""Share that is kept of what was counted, with each answer."""


class AnswerLengths:
    """The mean length of the latest answers of all requests. May be used by several threads."""

    def __init__(self) -> None:
        self._answers, self._tokens = 1.0, _FIRST_LENGTH
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Counts a further answer; returns how many tokens those before it have had in the mean."""
        with self._lock:
            mean = self._tokens / self._answers
            self._answers, self._tokens = _FADING * self._answers + 1, _FADING * self._tokens
        return round(mean)

    def note(self, tokens: int) -> None:
        """Counts tokens that were written."""
        with self._lock:
            self._tokens += tokens
