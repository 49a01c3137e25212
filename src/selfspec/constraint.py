"""What an output has to be. Imports no torch, so that a small process can make one."""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from selfspec.errors import first_line

if TYPE_CHECKING:
    from llguidance import LLParserLimits

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""What may stand between the tokens of JSON. Without a bound, a model may write spaces until its output is full."""


_STEP_FUEL, _STEP_ITEMS, _STATES = 100_000, 20_000, 20_000
"""Limits of llguidance: some milliseconds for a mask, for which all requests wait, some tens of MiB for a schema."""

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


Kind = Literal["json_schema", "regex", "grammar"]


class Constraint(NamedTuple):
    """A JSON schema, a regular expression or a grammar that an output follows, and its text."""

    kind: Kind
    text: str


def as_lark(grammar: str) -> str:
    """A grammar in Lark's notation, which may be in llama.cpp's.

    Raises:
        ValueError: it cannot be read.
    """
    if _GBNF.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # its parser raises what it likes
        raise ValueError(first_line(error)) from error


def parser_limits() -> "LLParserLimits":
    """The limits of what compiles and follows a constraint."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_STATES)


def definition(constraint: Constraint) -> str:
    """The definition of a constraint that llguidance compiles.

    Raises:
        ValueError, RecursionError: it cannot be read.
    """
    from llguidance import LLMatcher

    if constraint.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(constraint.text, overrides={"whitespace_pattern": WHITESPACE}))
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    if constraint.text.startswith("{"):  # llguidance's own form, of several grammars
        return constraint.text
    return str(LLMatcher.grammar_from_lark(as_lark(constraint.text)))


@lru_cache(32)
def problem_of(constraint: Constraint) -> str:
    """Why a constraint cannot be compiled, whatever the tokenizer; empty if it can.

    Raises:
        ImportError: llguidance is not installed.
    """
    from llguidance import LLMatcher

    try:
        fails, found = LLMatcher.validate_grammar_with_warnings(definition(constraint), limits=parser_limits())
    except (ValueError, RecursionError) as error:
        return first_line(error)
    return first_line(ValueError(found[0])) if fails else ""
