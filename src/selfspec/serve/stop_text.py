"""Cuts a growing text where a stop string begins."""

from collections.abc import Sequence

from selfspec.serve.formats.scanner import overlap


class StopText:
    """Cuts a growing text where its first stop string begins.

    Text that may be the beginning of a stop string is held back. The stop string that ends first counts, as where the
    engine stops. With ``include``, the text ends after it. ``found`` is the stop string.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes more of the text, and returns what is certain to be before a stop string."""
        if not self._stop or self.found is not None:
            return text if self.found is None else ""
        self._held += text
        found = [(place + len(stop), place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            end, place, self.found = min(found)
            return self._held[: end if self._include else place]
        keep = max(overlap(self._held, stop) for stop in self._stop)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain

    def flush(self) -> str:
        """What is held back, as the text ends here without a stop string."""
        held, self._held = self._held, ""
        return held if self.found is None else ""
