"""Calls whose arguments are a JSON object: ``{"name": ..., "arguments": {...}}``, or a name followed by the object."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.serve.formats.calls import CallFormat
from selfspec.serve.formats.lark import Rules, object_schema
from selfspec.serve.formats.scanner import NotACall, Scanner, Steps, Tools

_ARGUMENTS = ("arguments", "parameters")
_MOST_ID = 64
"""Characters that may stand between a name and its arguments, beside what the format has there."""


@dataclass(frozen=True)
class JsonCalls(CallFormat):
    """Calls as JSON objects, between tags (Hermes, Qwen), in a list after a tag (Granite, Mistral), or bare (Llama).

    Attributes:
        listed: whether calls are in a JSON list.
        key: the key of the arguments.
        tagged: whether calls that are forced have ``begin`` and ``end``.
    """

    listed: bool = False
    key: str = "arguments"
    tagged: bool = True

    @property
    def bare(self) -> bool:
        """An answer can begin with a call without tags, also in a Markdown fence, as some models write it."""
        return True

    def read(self, scan: Scanner, opener: str) -> Steps[None]:
        """Reads calls, after what they begin with."""
        offered = not opener
        yield from scan.space()
        fenced = offered and (yield from scan.accept("```json\n", "```\n"))
        listed = bool((yield from scan.accept("[")))
        yield from scan.space()
        yield from _read_object(scan, offered=offered)
        yield from scan.space()
        while (listed or offered) and (yield from scan.accept("," if listed else ";")):
            yield from self._read_next(scan, offered=offered)
        if listed:
            yield from scan.accept("]")
            yield from scan.space()
        if fenced:
            yield from scan.accept("```")
        elif self.end and opener:
            yield from scan.accept(self.end)

    def _read_next(self, scan: Scanner, *, offered: bool) -> Steps[None]:
        scan.hold()
        yield from scan.space()
        yield from _read_object(scan, offered=offered)
        yield from scan.space()

    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of one call, or of several, with what is around them."""
        one = rules.one_of(
            f"{rules.text(json.dumps({'name': name})[:-1] + f', {json.dumps(self.key)}: ')} "
            f"{rules.json(object_schema(schema))} {rules.text('}')}"
            for name, schema in tools.items()
        )
        begin, end = rules.text(self.begin), rules.text(self.end)
        if self.listed:
            more = f'(", " {one})*' if parallel else ""
            return rules.add(f'{begin} "[" {one} {more} "]" {end}')
        if not self.tagged:
            return one
        return rules.repeated(rules.add(f'{begin} "\\n" {one} "\\n" {end}'), parallel=parallel)


def _read_object(scan: Scanner, *, offered: bool) -> Steps[None]:
    """Reads the object of one call; its keys may have any order."""
    yield from scan.expect("{")
    name, arguments, begun = "", "", False
    while True:
        yield from scan.space()
        if (yield from scan.accept("}")):
            break
        key = yield from scan.json_string()
        yield from scan.space()
        yield from scan.expect(":")
        yield from scan.space()
        if key == "name" and not name:
            name = yield from scan.json_string()
        elif key in _ARGUMENTS and not begun and not arguments:
            if name and (yield from scan.peek()) == "{":
                scan.begin_call(name, offered=offered)
                begun = True
                yield from scan.json_value(scan.arguments)
            else:
                arguments = yield from _read_arguments(scan)
        else:
            yield from scan.json_value(lambda _: None)
        yield from scan.space()
        if not (yield from scan.accept(",")):
            yield from scan.space()
            yield from scan.expect("}")
            break
    if not begun:
        if offered and not arguments:  # an object with a name is no call yet
            raise NotACall
        scan.begin_call(name, offered=offered)
        scan.arguments(arguments or "{}")


def _read_arguments(scan: Scanner) -> Steps[str]:
    """Reads arguments as a whole; some models write the object as a string, or null for none."""
    if (yield from scan.peek()) == '"':
        return (yield from scan.json_string())
    parts: list[str] = []
    yield from scan.json_value(parts.append)
    text = "".join(parts)
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotACall
    return text


@dataclass(frozen=True)
class NamedCalls(CallFormat):
    """Calls that name the tool before the JSON of its arguments (DeepSeek, Mistral since 2025, Kimi).

    Attributes:
        before: what may stand before the name.
        after: what follows the name.
        close: what follows the arguments.
        section: what the first call begins with and the last one ends with.
    """

    before: str = ""
    after: str = ""
    close: str = ""
    section: tuple[str, str] = ("", "")

    @property
    def silent(self) -> Sequence[str]:
        """What is around calls and no text."""
        return tuple(filter(None, self.section))

    def read(self, scan: Scanner, opener: str) -> Steps[None]:
        """Reads a call, after what it begins with."""
        yield from scan.accept(self.before)
        name = yield from scan.word()
        between = yield from scan.taken("{")  # ``after``, and perhaps an id or an index of the call
        if len(between) > len(self.after) + _MOST_ID:
            raise NotACall
        scan.move(-1)
        scan.begin_call(name.removeprefix("functions."))
        yield from scan.json_value(scan.arguments)
        yield from scan.accept(self.close)
        yield from scan.space()
        yield from scan.accept(self.end)

    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of one call, or of several, with what is around them."""
        one = rules.one_of(
            f"{rules.text(self.begin + self.before + name + self.after)} {rules.json(object_schema(schema))} "
            f"{rules.text(self.close + self.end)}"
            for name, schema in tools.items()
        )
        first, last = (rules.text(text) for text in self.section)
        return rules.add(f"{first} {one}{'+' if parallel else ''} {last}")
