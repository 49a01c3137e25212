"""Reads an answer as it is written: a format is a generator that waits for more text wherever it yields."""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from selfspec.serve.formats.marks import Marks

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields where it needs more text, and returns what it read."""

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the arguments of tools, by name."""

Emit = Callable[[str], None]

MOST_HELD = 2**16
"""Characters of what may still turn out to be no call; more of them are text."""

_NAME = re.compile(r"[\w./:-]{1,128}", re.ASCII)
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BETWEEN = _SCALAR | frozenset(" \t\r\n,:")


class NotACall(Exception):  # noqa: N818 (it is no error of anybody)
    """What was read since a call seemed to begin is no call."""


@dataclass(frozen=True, slots=True)
class ScannedPart:
    """What some text adds to an answer: text, reasoning, the name of a call, or more of its arguments."""

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str


class Scanner:
    """Reads one answer as it grows, by a format, which ``begin`` is given. ``parts`` collects what was read.

    Args:
        marks: of the tokenizer.
        tools: the JSON schemas of the arguments of the tools that are offered, by name.
        parallel: whether an answer may have several calls; otherwise what follows the first one is dropped.
    """

    def __init__(self, marks: Marks, tools: Tools, *, parallel: bool = True) -> None:
        self.tools, self.parts, self.calls, self.last = tools, list[ScannedPart](), 0, ""
        self._marks, self._parallel = marks, parallel
        self._text, self._at, self._ended = "", 0, False
        self._held: int | None = None  # where the text begins that is no call yet
        self._blank: list[str] = []  # whitespace that is given only if something follows it
        self._empty = False  # nothing but whitespace of the call's arguments so far
        self.thinking = False
        self._fresh, self._strip = True, False  # nothing but whitespace so far; drop it

    # The answer as it grows

    def begin(self, steps: Steps[None]) -> None:
        """Begins to read by a format."""
        self._steps = steps
        next(steps)

    def marked(self, token_id: int, text: str) -> str:
        """The text of a token as ``push`` takes it."""
        return self._marks.of_token(token_id, text)

    def push(self, text: str) -> list[ScannedPart]:
        """Takes more of the text, with marks; returns what it adds."""
        if text:
            keep = self._at if self._held is None else self._held
            self._text, self._at = self._text[keep:] + text, self._at - keep
            self._held = None if self._held is None else 0
            if self._held is not None and len(self._text) > MOST_HELD:
                self._steps.throw(NotACall())
            else:
                next(self._steps)
        return self._take()

    def flush(self) -> list[ScannedPart]:
        """What is still held back, as the answer ends here: whitespace, too, if that is all of it."""
        self._ended = True
        next(self._steps, None)
        if self._fresh and not self.calls and not self._strip:
            self._fresh = False
            self._give("text", self._after_blank(""))
        return self._take()

    def _take(self) -> list[ScannedPart]:
        parts, self.parts = self.parts, []
        return parts

    # What the answer is

    def text(self, text: str) -> None:
        """Adds to the answer's text; whitespace alone before and between calls and after reasoning is dropped."""
        if self._fresh:
            if not text.strip():
                self._blank.append(text)
                return
            text = self._after_blank(text)
            self._fresh = False
            text = text.lstrip() if self._strip else text
        self._give("text", text)

    def reasoning(self, text: str) -> None:
        """Adds to the answer's reasoning, without the whitespace around it."""
        self.thinking = self._strip = True
        if not (kept := text.rstrip()):
            self._blank.append(text)
            return
        blank = text[len(kept) :]
        kept = self._after_blank(kept)
        self._blank.append(blank)
        if self._fresh:
            kept, self._fresh = kept.lstrip(), False
        self._give("reasoning", kept)

    def _after_blank(self, text: str) -> str:
        """Text after the whitespace that was held back, which is joined once."""
        whole = "".join((*self._blank, text))
        self._blank.clear()
        return whole

    def end_reasoning(self) -> None:
        """What follows is no reasoning any more."""
        self.thinking = False
        self._fresh, self._strip = True, True
        self._blank.clear()

    def begin_call(self, name: str, *, offered: bool = False) -> None:
        """Begins a call; from here on it is one. With ``offered``, only of a tool that is offered."""
        if not _NAME.fullmatch(name) or (offered and name not in self.tools):
            raise NotACall
        self._held = None
        self._fresh = True
        self._blank.clear()
        self.calls += 1
        self._empty = True
        self._give("call", name)

    def arguments(self, text: str) -> None:
        """Adds to the JSON of the call's arguments."""
        self._empty = self._empty and not text.strip()
        self._give("arguments", text)

    def end_call(self) -> None:
        """Ends a call; the arguments of one that has none are an empty object."""
        if self._empty:
            self.arguments("{}")

    def _give(self, kind: Literal["text", "reasoning", "call", "arguments"], text: str) -> None:
        text = self._marks.plain(text)
        dropped = not self._parallel and (self.calls > 1 or (self.calls == 1 and kind in ("text", "reasoning")))
        if dropped or not text:
            return
        if self.parts and kind == self.parts[-1].kind and kind != "call":
            text = self.parts.pop().text + text
        self.parts.append(ScannedPart(kind, text))

    # How it is read

    def attempt(self, read: Steps[None], begun: str = "") -> Steps[None]:
        """Reads a call, which began with ``begun``. What is none is text."""
        self._held = self._at - len(begun)
        try:
            yield from read
        except NotACall:
            if self._held is not None:
                self.text(self._text[self._held : self._at])
        finally:
            self._held = None

    def hold(self) -> None:
        """Makes what follows text again, unless it is the next call."""
        self._held = self._at

    def move(self, characters: int) -> None:
        """Passes over characters that are there, or makes the last ones the next ones again."""
        self._at += characters

    def peek(self) -> Steps[str]:
        """The next character; none at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def space(self) -> Steps[str]:
        """Reads whitespace."""
        return (yield from self._run(str.isspace))

    def word(self) -> Steps[str]:
        """Reads a name."""
        return (yield from self._run(lambda char: char.isalnum() or char in "_.-"))

    def accept(self, *texts: str) -> Steps[str]:
        """Reads the one of the texts that comes next, the longest; none if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if self._ended or not any(len(rest) < len(text) and text.startswith(rest) for text in texts):
                break
            yield
        found = max((text for text in texts if rest.startswith(text)), key=len, default="")
        self._at += len(found)
        return found

    def expect(self, text: str) -> Steps[None]:
        """Reads a text that has to come here."""
        if text and not (yield from self.accept(text)):
            raise NotACall

    def until(self, ends: Sequence[str], give: Emit) -> Steps[str]:
        """Gives the text up to one of the ends, which is read and returned; none at the end of the answer."""
        while True:
            found = [(place, -len(end)) for end in ends if (place := self._text.find(end, self._at)) >= 0]
            if found:
                place, length = min(found)
                give(self._text[self._at : place])
                self._at = place - length
                return self._text[place : self._at]
            keep = 0 if self._ended else max((overlap(self._text, end) for end in ends), default=0)
            certain = max(self._at, len(self._text) - keep)
            give(self._text[self._at : certain])
            self._at = certain
            if self._ended:
                return ""
            yield

    def taken(self, ends: Sequence[str]) -> Steps[str]:
        """Reads the text up to one of the ends, which has to come; ``last`` is then that end."""
        parts: list[str] = []
        self.last = yield from self.until(ends, parts.append)
        if not self.last:
            raise NotACall
        return self._marks.plain("".join(parts))

    def json_value(self, give: Emit) -> Steps[None]:
        """Gives a JSON value as it is written. Only its end is looked for: it may be wrong inside."""
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            scalar = yield from self._run(_SCALAR.__contains__)
            if not scalar:
                raise NotACall
            give(scalar)
            return
        depth, quoted, escaped = 0, False, False
        while True:
            begin, text = self._at, self._text
            for self._at in range(begin, len(text)):
                char = text[self._at]
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                elif char == '"':
                    quoted = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                elif char not in _BETWEEN:
                    give(text[begin : self._at])
                    raise NotACall
                if not depth and not quoted:
                    self._at += 1
                    give(text[begin : self._at])
                    return
            self._at = len(text)
            give(text[begin:])
            if self._ended:
                raise NotACall
            yield

    def json_string(self) -> Steps[str]:
        """Reads a JSON string."""
        if (yield from self.peek()) != '"':
            raise NotACall
        parts: list[str] = []
        yield from self.json_value(parts.append)
        try:
            return str(json.loads("".join(parts), strict=False)).encode("utf-8", "replace").decode("utf-8")
        except ValueError:
            raise NotACall from None

    def _run(self, wanted: Callable[[str], bool]) -> Steps[str]:
        parts: list[str] = []
        while (char := (yield from self.peek())) and wanted(char):
            parts.append(char)
            self._at += 1
        return "".join(parts)


def overlap(text: str, searched: str) -> int:
    """Length of the longest end of a text that ``searched`` begins with, shorter than all of it."""
    place = max(0, len(text) - len(searched) + 1)
    while (place := text.find(searched[:1], place)) >= 0:  # tells of most texts at once that there is none
        if searched.startswith(text[place:]):
            return len(text) - place
        place += 1
    return 0
