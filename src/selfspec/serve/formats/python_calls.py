"""Calls in Python's notation: ``[add(a=1, b=2)]`` (Llama 4, LFM2), or one a line between tags (Olmo)."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.serve.formats.calls import CallFormat
from selfspec.serve.formats.lark import Rules, argument_schema
from selfspec.serve.formats.scanner import NotACall, Scanner, Steps, Tools

_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
MOST_DEPTH = 32
"""Brackets within each other in the arguments of a call."""


@dataclass(frozen=True)
class PythonCalls(CallFormat):
    """Calls in a Python list.

    Attributes:
        listed: whether the calls are in brackets, which ``begin`` and ``end`` leave out; otherwise one a line.
    """

    listed: bool = True

    def read(self, scan: Scanner, opener: str) -> Steps[None]:
        """Reads calls, after what they begin with."""
        yield from scan.space()
        if self.listed:
            yield from scan.expect("[")
        while True:
            yield from scan.space()
            yield from self._read_call(scan, offered=not opener)
            scan.hold()
            blank = yield from scan.space()
            if not (yield from scan.accept(",")) and (self.listed or "\n" not in blank):
                break
            if self.end and (yield from scan.accept(self.end)):
                return
        if self.listed:
            yield from scan.expect("]")
        yield from scan.space()
        yield from scan.accept(self.end)

    def _read_call(self, scan: Scanner, *, offered: bool) -> Steps[None]:
        name = yield from scan.word()
        if not name or (offered and name not in scan.tools):
            raise NotACall
        yield from scan.expect("(")
        source = yield from _bracketed(scan)
        arguments = _parsed(source, list(scan.tools.get(name, {}).get("properties") or ()))
        scan.begin_call(name, offered=offered)
        scan.arguments(arguments)

    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of one call, or of several, with what is around them."""
        one = rules.one_of(_call(rules, name, schema) for name, schema in tools.items())
        calls = rules.repeated(one, ", " if self.listed else "\n", parallel=parallel)
        begin, end = ("[", "]") if self.listed else ("\n", "\n")
        return rules.add(f"{rules.text(self.begin + begin)} {calls} {rules.text(end + self.end)}")


def _call(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """The rule of a call with its arguments by name; JSON is Python but for three names."""
    required, properties = schema.get("required", ()), schema.get("properties") or {}
    ordered = sorted(properties.items(), key=lambda item: item[0] not in required)
    parts, depth = [], 0
    for index, (key, kind) in enumerate(ordered):
        head = rules.text((", " if index else "") + key + "=")
        argument = f"{head} {rules.json(argument_schema(kind, schema) if isinstance(kind, dict) else {})}"
        if key not in required:  # an optional one only after all before it
            argument, depth = f"({argument}", depth + 1
        parts.append(argument)
    return rules.add(f"{rules.text(name + '(')} {' '.join(parts)}{')?' * depth} {rules.text(')')}")


def _bracketed(scan: Scanner) -> Steps[str]:
    """Reads up to the bracket that closes the one before."""
    parts, depth, quote = [""], 1, ""
    while True:
        piece = yield from scan.taken(("\\", "'", '"', "(", ")", "[", "]", "{", "}"))
        char = scan.last
        parts += [piece, char]
        if char == "\\":
            parts.append((yield from scan.peek()))
            scan.move(len(parts[-1]))
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += 1 if char in "([{" else -1
            if depth > MOST_DEPTH:
                raise NotACall
            if not depth:
                return "".join(parts[:-1])


def _parsed(source: str, names: Sequence[str]) -> str:
    """The arguments of a call as JSON, by name; those without a name are the tool's first ones."""
    try:
        call = ast.parse(f"f({source}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None
    if not isinstance(call, ast.Call) or len(call.args) > len(names):
        raise NotACall
    found = {name: _literal(value) for name, value in zip(names, call.args, strict=False)}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise NotACall
        found[keyword.arg] = _literal(keyword.value)
    try:
        return json.dumps(found, allow_nan=False)
    except ValueError:
        raise NotACall from None


def _literal(node: ast.expr) -> Any:
    """The JSON value that an expression is."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    raise NotACall
