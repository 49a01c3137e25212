"""What an output has to be. Imports no torch, so that a small process can make one."""

from typing import Literal, NamedTuple

from selfspec.errors import first_line

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""What may stand between the tokens of JSON. Without a bound, a model may write spaces until its output is full."""


class Constraint(NamedTuple):
    """A JSON schema, a regular expression or a grammar that an output follows, and its text."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str


def as_lark(grammar: str) -> str:
    """A grammar in Lark's notation, which may be in llama.cpp's.

    Raises:
        ValueError: it cannot be read.
    """
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # its parser raises what it likes
        raise ValueError(first_line(error)) from error
