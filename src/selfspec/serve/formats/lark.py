"""Grammars in llguidance's Lark notation, of which those of calls and of whole answers are put together."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from selfspec.constraint import WHITESPACE
from selfspec.serve.formats.marks import Marks


class Rules:
    """The rules of a grammar. ``add`` names a rule; names cannot clash."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._rules: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """Adds a rule, and returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def one_of(self, bodies: Iterable[str]) -> str:
        """Adds a rule that is one of several."""
        return self.add(" | ".join(bodies))

    def repeated(self, call: str, between: str = "\n", *, parallel: bool) -> str:
        """One call, or several with a text between them."""
        return self.add(f"{call} ({json.dumps(between)} {call})*") if parallel else call

    def text(self, text: str) -> str:
        """What matches exactly a text with marks."""
        return self._marks.lark(text)

    def json(self, schema: Mapping[str, Any]) -> str:
        """What matches JSON of a schema."""
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})

    def up_to(self, end: str) -> str:
        """Adds a rule of any text up to an end, which is part of it."""
        if any(self._marks.is_mark(char) for char in end):
            return self.add(f"{self.any()} {self.text(end)}")
        return self.add(r"/(.|\n)*/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def whole(self, body: str) -> str:
        """The grammar whose texts are those of a rule's body."""
        return "\n".join([f"start: {body}", *self._rules, ""])

    def any(self) -> str:
        """Adds a rule of any text without tokens of the tokenizer's own."""
        return self.regex(r"(.|\n)*")

    def space(self) -> str:
        """Adds a rule of whitespace."""
        return self.regex(r"\s{0,8}")

    def regex(self, regex: str) -> str:
        """Adds a rule of a regular expression."""
        name = f"T{len(self._rules)}"
        escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
        self._rules.append(f"{name}: /{escaped.replace(chr(10), chr(92) + 'n')}/")
        return name


def object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object always."""
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}


def argument_schema(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an argument, with what those of a tool's arguments share."""
    return {**kind, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}
