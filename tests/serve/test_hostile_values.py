"""Values in requests that are made to harm: numbers, surrogates and schemas that are none. Each gets an answer."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.dialects import MODELS, tokenizer_of
from helpers.serving import ScriptedEngine, make_client
from selfspec.serve.limits import Limits

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


def scripted(text: str = "Hello.", model: str = "qwen") -> TestClient:
    return make_client(ScriptedEngine(text, tokenizer=tokenizer_of(model)))


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_numbers_that_json_has_not(number: str) -> None:
    """Some interfaces repeat what they were sent."""
    body = json.dumps({"input": "Hi"})[:-1] + f', "metadata": {{"a": {number}}}}}'
    with scripted() as client:
        assert client.post("/v1/responses", content=body, headers=JSON).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "metadata": {"a": "\ud800"}}),
        ("/v1/messages", {**HI, "max_tokens": 100, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ],
)
def test_lone_surrogates_are_answered(path: str, body: dict[str, Any]) -> None:
    """They are no UTF-8: in a field that is repeated, and in arguments that a model writes."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    with scripted(call) as client:
        whole = client.post(path, content=json.dumps(body), headers=JSON)
        streamed = client.post(path, content=json.dumps({**body, "stream": True}), headers=JSON)
    assert whole.status_code == 200
    assert json.loads(whole.content.decode())
    assert [json.loads(line[6:]) for line in streamed.content.decode().splitlines() if line.startswith("data: ")]


WRONG_SCHEMAS: list[dict[str, Any]] = [
    {"properties": 1},
    {"properties": [1]},
    {"properties": {"a": 1}},
    {"properties": {"a": {"type": "string", "enum": 1}}},
    {"properties": {"a": {"type": "string"}}, "required": 1},
    {"properties": {"a": {"type": "string"}}, "required": [["a"]]},
]


@pytest.mark.parametrize("model", MODELS)
def test_tools_whose_parameters_are_no_schema(model: str) -> None:
    """Formats of calls write grammars of their own from what is in a schema."""
    with scripted(model=model) as client:
        for schema in WRONG_SCHEMAS:
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            for choice in ("auto", "required"):
                answer = client.post(CHAT, json={**HI, "tools": [tool], "tool_choice": choice})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), schema


@pytest.mark.parametrize("schema", ["{", "1", "[" * 100_000])
def test_a_schema_that_is_no_json(schema: str) -> None:
    with scripted() as client:
        answer = client.post(CHAT, json={**HI, "guided_json": schema})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")


def test_schemas_of_tools_are_limited_where_a_call_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "schema_chars", 500)
    schema = {"type": "object", "properties": {"a": {"const": "x" * 500}}}
    body = {**HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    with make_client(ScriptedEngine(tokenizer=tokenizer_of("qwen")), Limits()) as client:
        assert client.post(CHAT, json=body).status_code == 200
        answer = client.post(CHAT, json={**body, "tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
