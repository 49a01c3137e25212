"""Stop strings: the text of an answer ends before them, in a stream too."""

from collections.abc import Sequence

from selfspec.serve.tool_calls import overlap


class StopText:
    """Cuts a growing text where its first stop string begins.

    Text that may be the beginning of a stop string is held back. The stop string that ends first counts, as where the
    engine stops.

    Args:
        stop: stop strings.
        include: leave the stop string in the text.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> str:
        """Takes more of the text, and returns what is certain to be before a stop string."""
        if not self._stop or self._stopped:
            return "" if self._stopped else text
        self._held += text
        found = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self._stopped = True
            end, place = min(found)
            return self._held[: end if self._include else place]
        keep = max(overlap(self._held, stop) for stop in self._stop)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain

    def flush(self) -> str:
        """What is held back, as the text ends here without a stop string."""
        held, self._held = self._held, ""
        return "" if self._stopped else held
