"""What the text of an answer has to be: OpenAI's ``response_format``, and the fields that vLLM has for it."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from selfspec.constraint import Constraint, as_lark
from selfspec.serve.api_errors import invalid
from selfspec.serve.capacity import Limits
from selfspec.serve.strict import Strict

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1)]


class JsonSchema(Strict):
    """A schema with the name that OpenAI's API requires."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the text has to be: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema is needed for the type json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema has no meaning for the type {self.type}")
        return self


def schema_format(name: str, schema: dict[str, Any]) -> ResponseFormat:
    """The format of JSON of a schema."""
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name=name, schema=schema))


class StructuredOutputs(Strict):
    """One of several forms, as vLLM spells them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = Field(default=None, description="In llguidance's Lark, or in GBNF.")
    json_object: bool | None = None


class Formed(Strict):
    """The fields of a request that say what form its text has."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    guided_decoding_backend: str | None = Field(default=None, description="Has no effect.")


class Ignored(Strict):
    """Fields that clients send and that change no text: they have no effect."""

    user: Any = Field(default=None, description="Has no effect.")
    metadata: Any = Field(default=None, description="Has no effect.")
    store: Any = Field(default=None, description="Has no effect: nothing is stored.")
    service_tier: Any = Field(default=None, description="Has no effect.")
    safety_identifier: Any = Field(default=None, description="Has no effect.")
    prompt_cache_key: Any = Field(default=None, description="Has no effect: every prompt is looked up.")
    prompt_cache_retention: Any = Field(default=None, description="Has no effect.")
    cache_control: Any = Field(default=None, description="Has no effect: every prompt is looked up.")
    cache_prompt: Any = Field(default=None, description="Has no effect: every prompt is looked up.")
    prediction: Any = Field(default=None, description="Has no effect: the server drafts by itself.")
    priority: Any = Field(default=None, description="Has no effect.")


_ANY_OBJECT = Constraint("json_schema", '{"type": "object"}')


def asked_form(request: Formed) -> tuple[Constraint, str] | None:
    """What the text has to be, and the field that says so; refuses several such fields."""
    found = list(_forms(request))
    if len(found) > 1:
        text = f"{found[0][1]} and {found[1][1]}: the text can have one form; drop one of them"
        raise invalid(text, found[1][1])
    return found[0] if found else None


def _forms(request: Formed) -> Iterator[tuple[Constraint, str]]:
    wanted = request.response_format
    if wanted is not None and wanted.type != "text":
        given = wanted.json_schema
        if given is None:
            yield _ANY_OBJECT, "response_format"
        else:
            field = "response_format.json_schema.schema"
            yield _schema(given.schema_, field), field
    outputs = request.structured_outputs or StructuredOutputs()
    for field, schema, regex, choice, grammar in (
        ("guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar),
        ("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar),
    ):
        if schema is not None:
            yield _schema(schema, f"{field}json"), f"{field}json"
        if regex is not None:
            yield Constraint("regex", regex), f"{field}regex"
        if choice is not None:
            yield Constraint("grammar", "start: " + " | ".join(map(json.dumps, choice))), f"{field}choice"
        if grammar is not None:
            yield _grammar(grammar, f"{field}grammar"), f"{field}grammar"
    if outputs.json_object:
        yield _ANY_OBJECT, "structured_outputs.json_object"


def _grammar(text: str, field: str) -> Constraint:
    """The constraint of a grammar in either notation."""
    if len(text) > Limits.schema_chars:  # for which it is refused later, before anything reads it
        return Constraint("grammar", text)
    try:
        return Constraint("grammar", as_lark(text))
    except ImportError:  # llguidance is not installed, which the engine says
        return Constraint("grammar", text)
    except ValueError as error:
        raise invalid(f"{field} cannot be read: {error}", field) from error


def _schema(schema: object, field: str) -> Constraint:
    """The constraint of a schema, which may be given as its JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        is_object = not isinstance(schema, str) or isinstance(json.loads(schema), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise invalid(f"{field} is not the JSON of an object", field)
    return Constraint("json_schema", text)
