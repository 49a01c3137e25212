"""Calls with a tag for each argument (Qwen3-Coder, GLM): their values become JSON by the schemas of the tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.serve.formats.calls import CallFormat
from selfspec.serve.formats.lark import Rules, argument_schema
from selfspec.serve.formats.scanner import NotACall, Scanner, Steps, Tools

_PYTHON = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}
"""Values as templates write them into earlier calls, and models after them, with their types."""

_JSON: Mapping[type, str] = {str: "string", dict: "object", list: "array"}
"""Types of JSON that are meant as such where a schema takes them and strings."""


@dataclass(frozen=True)
class TaggedCalls(CallFormat):
    """Calls as a name with tags for keys and values.

    Attributes:
        name: what is around the tool's name.
        key: what is around the key of an argument.
        value: what is around its value.
        close: what may follow the last argument.
    """

    name: tuple[str, str] = ("", "")
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    close: str = ""

    @property
    def openers(self) -> Sequence[str]:
        """What a call begins with; some models leave the first tag out where another one follows."""
        return (self.begin, self.name[0]) if self.name[0] else (self.begin,)

    def read(self, scan: Scanner, opener: str) -> Steps[None]:
        """Reads a call, after what it begins with."""
        yield from scan.space()
        if opener != self.name[0]:
            yield from scan.expect(self.name[0])
        name = yield from scan.word()
        yield from scan.expect(self.name[1].rstrip())
        yield from scan.space()
        if not name or (yield from scan.peek()) not in (self.key[0][0], (self.close or self.end)[0]):
            raise NotACall
        scan.begin_call(name)
        properties = _properties(scan.tools.get(name, {}))
        before = "{"
        while (yield from scan.accept(self.key[0])):
            key = yield from scan.taken((self.key[1],))
            scan.arguments(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            if tag := self.value[0].strip():
                yield from scan.space()
                yield from scan.accept(tag)
            else:
                yield from scan.accept(self.value[0])
            yield from self._read_value(scan, properties.get(key.strip(), {}))
            yield from scan.space()
            before = ", "
        if not (yield from scan.peek()):  # cut off
            raise NotACall
        scan.arguments("{}" if before == "{" else "}")
        if self.close:
            yield from scan.accept(self.close)
            yield from scan.space()
        yield from scan.accept(self.end)

    def _read_value(self, scan: Scanner, schema: Mapping[str, Any]) -> Steps[None]:
        """Reads a value up to its end tag, a line break before which is not part of it."""
        ends = (self.value[1], self.value[1].lstrip()) if self.value[1][0].isspace() else (self.value[1],)
        if not _is_text(schema):
            text = yield from scan.taken(ends)
            scan.arguments(json.dumps(_value(text, schema)))
            return
        scan.arguments('"')
        if not (yield from scan.until(ends, lambda text: scan.arguments(_escaped(text)))):
            raise NotACall
        scan.arguments('"')

    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of one call, or of several, with what is around them."""
        one = rules.one_of(self._call(rules, name, schema) for name, schema in tools.items())
        line = "\n" if self.begin and self.name[0] else ""
        call = rules.add(f"{rules.text(self.begin + line)} {one} {rules.text(self.end)}")
        return rules.repeated(call, parallel=parallel)

    def _call(self, rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
        required = schema.get("required", ())
        parts = [rules.text(self.name[0] + name + self.name[1])]
        for key, kind in _properties(schema).items():
            head = rules.text(self.key[0] + key + self.key[1] + self.value[0])
            if _is_text(kind) and "enum" not in kind:
                value = rules.up_to(self.value[1])
            elif _is_text(kind):
                value = f"({' | '.join(rules.text(str(each)) for each in kind['enum'])}) {rules.text(self.value[1])}"
            else:
                value = f"{rules.json(argument_schema(kind, schema))} {rules.text(self.value[1])}"
            argument = rules.add(f'{head} {value} "\\n"')
            parts.append(argument if key in required else f"{argument}?")
        if self.close:
            parts.append(rules.text(self.close + "\n"))
        return rules.add(" ".join(parts))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return {key: kind for key, kind in found.items() if isinstance(kind, dict)} if isinstance(found, dict) else {}


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether values of a schema are strings and nothing else."""
    return schema.get("type") == "string"


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """What the text of an argument stands for: JSON, unless it is none, or the schema takes strings but not that.

    Calls that are forced have JSON wherever the schema takes more than strings.
    """
    kinds = _kinds(schema)
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        kind, value = _PYTHON.get(text.strip(), ("", text))
        return value if kind in kinds else text
    if "string" in kinds and value is not None and _JSON.get(type(value), "") not in kinds:
        return text
    return value


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types of a schema, those of its alternatives included."""
    alternatives = [schema, *(each for key in ("anyOf", "oneOf") for each in _listed(schema.get(key)))]
    return [kind for each in alternatives if isinstance(each, dict) for kind in _listed(each.get("type"))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _escaped(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
