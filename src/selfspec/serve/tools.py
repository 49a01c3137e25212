"""Cuts calls of tools (JSON between tags, as Hermes and Qwen models write them) and stop strings out of a text."""

import json
from collections.abc import Sequence

from selfspec.serve.responses import CalledFunction

TAG, END = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Separates calls of tools from the rest of a growing text.

    Text from a tag on is held back until its call is complete. What is between the tags and is no call stays text, and
    so does a call that is never completed.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> tuple[str, list[CalledFunction]]:
        """Takes more of the text; returns text that belongs to no call, and the calls that are complete now."""
        self._held += text
        content = ""
        calls: list[CalledFunction] = []
        while (start := self._held.find(TAG)) >= 0:
            content, self._held = content + self._held[:start], self._held[start:]
            end = self._held.find(END)
            if end < 0:
                return content, calls
            inside = self._held[len(TAG) : end]
            call = parse_call(inside)
            if call is None:
                content += self._held[: end + len(END)]
            else:
                calls.append(call)
            self._held = self._held[end + len(END) :]
        keep = overlap(self._held, TAG)
        content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return content, calls

    def flush(self) -> tuple[str, list[CalledFunction]]:
        """What is still held back, as the text ends here: a last call whose end tag is missing, or text."""
        held, self._held = self._held, ""
        call = parse_call(held[len(TAG) :]) if held.startswith(TAG) else None
        return (held, []) if call is None else ("", [call])


class StopText:
    """Cuts a growing text where its first stop string begins.

    Text that may be the beginning of a stop string is held back. The stop string that ends first counts, as where the
    engine stops. With ``include``, the text ends after it.
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


def parse_call(text: str) -> CalledFunction | None:
    """The call that a text is; ``None`` if it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):  # some models write the object as a string
        arguments = json.dumps(arguments, ensure_ascii=False)
    return CalledFunction(name=value["name"], arguments=arguments)


def overlap(text: str, searched: str) -> int:
    """Length of the longest end of a text that ``searched`` begins with, shorter than all of it."""
    for length in range(min(len(text), len(searched) - 1), 0, -1):
        if searched.startswith(text[-length:]):
            return length
    return 0
