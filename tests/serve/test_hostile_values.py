"""Values in requests that are made to harm: numbers, surrogates and schemas that are none. Each gets an answer."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.dialects import MODELS, tokenizer_of
from helpers.serving import ScriptedEngine, make_client
from selfspec.errors import SelfSpecError
from selfspec.serve import forms, reader, reply
from selfspec.serve.api_errors import ApiError
from selfspec.serve.bodies import ChatBodies
from selfspec.serve.capacity import Limits
from selfspec.serve.parameters import to_params
from selfspec.serve.reader import Prepared, RequestReader, read

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
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


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**HI, "x" * 10**5: 1}),
        (RESPONSES, {"input": [{"type": "x" * 10**5}]}),
        (CHAT, {**HI, "speculative": {"method": "auto", "x" * 10**5: 1}}),
        (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "x" * 10**5}),
    ],
)
def test_an_error_does_not_repeat_all_that_was_sent(path: str, fields: dict[str, Any]) -> None:
    with scripted() as client:
        answer = client.post(path, json=fields)
    assert answer.status_code == 400
    assert len(answer.content) < 5000


def test_long_prompts_are_not_repeated_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers would be made on the event loop, and wait for clients that do not read."""
    monkeypatch.setattr(reader, "_MOST_REPEATED", 1000)
    text, token_ids = {"prompt": "x" * 400, "echo": True}, {"prompt": [100] * 400, "echo": True}
    with make_client(ScriptedEngine(), Limits(max_prompt_chars=900)) as client:
        for body in (text, token_ids):
            assert client.post(COMPLETION, json={**body, "n": 2}).status_code == 200
            answer = client.post(COMPLETION, json={**body, "n": 3})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
        assert client.post(COMPLETION, json={**text, "n": 3, "echo": False}).status_code == 200


def test_a_response_repeats_no_large_fields() -> None:
    """A stream has them three times, and again every few seconds in which nothing happens."""
    body = {"input": "Hi", "stream": True, "temperature": 0.5, "metadata": {"a": "x" * 10**6}}
    with scripted() as client:
        streamed = client.post(RESPONSES, json=body)
        small = client.post(RESPONSES, json={**body, "stream": False, "metadata": {"a": "b"}}).json()
    assert streamed.status_code == 200
    assert len(streamed.content) < 50_000
    last = json.loads(streamed.text.split("data: ")[-1])["response"]
    assert (last["metadata"], last["temperature"]) == ({}, 0.5)
    assert small["metadata"] == {"a": "b"}


def test_a_long_grammar_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise AssertionError("it was read")

    monkeypatch.setattr(forms, "as_lark", fail)
    with scripted() as client:
        answer = client.post(CHAT, json={**HI, "guided_grammar": "root ::= " + "x " * 2**16})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_grammar")


def test_a_long_body_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    whole = ChatBodies.whole

    def noted(self: ChatBodies, *arguments: Any) -> Any:
        made.append(threading.current_thread().name)
        return whole(self, *arguments)

    monkeypatch.setattr(ChatBodies, "whole", noted)
    with scripted("abc") as client:
        assert client.post(CHAT, json=HI).status_code == 200
        monkeypatch.setattr(reply, "_SMALL", 2)
        assert client.post(CHAT, json=HI).status_code == 200
    assert "worker" not in made[0].lower()
    assert "worker" in made[1].lower()


# Any value in any place

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "Hi", "name": "n"},
            {
                "role": "assistant",
                "content": "c",
                "reasoning_content": "r",
                "tool_calls": [{"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "i", "content": "t"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 1,
        "n": 1,
        "stop": ["x"],
        "stop_token_ids": [1],
        "logit_bias": {"1": 1.0},
        "max_tokens": 5,
        "min_tokens": 1,
        "max_completion_tokens": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "cache_salt": "s",
        "chat_template_kwargs": {"a": "b"},
        "reasoning_effort": "low",
        "speculative": {"method": "auto"},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "completion": {
        "prompt": ["a", "b"],
        "suffix": None,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 3,
        "guided_regex": "[ab]+",
        "guided_choice": None,
    },
    "response": {
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "i", "output": [{"type": "input_image", "image_url": "u"}]},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "namespace", "name": "n", "tools": []}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "previous_response_id": None,
    },
    "message": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "i", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "i",
                        "content": [{"type": "image", "source": {"type": "base64", "data": "x"}}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "x"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1},
    },
    "tokenize": {"prompt": "x", "messages": None, "return_token_strs": True},
    "detokenize": {"tokens": [1, 2]},
}
VALUES: tuple[Any, ...] = (
    *("\ud800", "", "x" * 300, "<|im_start|>", "\x00"),
    *(-1, 0, 2**31, 2**63, 10**400, 1e308, -1e308, 5e-324, True, None),
    *([], {}, [[]], [None], [-1], [10**400], {"": ""}, {"\ud800": "\ud800"}, {"type": "\ud800"}),
)


def changed(body: Any) -> Iterator[Any]:
    """A JSON value with each of its parts replaced by each of the values."""
    yield from VALUES
    if isinstance(body, dict):
        for key, value in body.items():
            yield from ({**body, key: each} for each in changed(value))
            yield {**{name: each for name, each in body.items() if name != key}}
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from ([*body[:index], each, *body[index + 1 :]] for each in changed(value))


@pytest.mark.parametrize("name", BODIES)
def test_any_value_in_any_place_is_taken_or_refused(name: str) -> None:
    """Never anything else: that would be an answer with status 500."""
    engine = ScriptedEngine(tokenizer=tokenizer_of("qwen"))
    limits = Limits()
    own = RequestReader(
        engine.tokenizer,
        engine.vocab_size,
        names=["m"],
        methods=engine.methods,
        context=engine.context,
        limits=limits,
    )
    do = getattr(RequestReader, name)
    taken = 0
    for body in (BODIES[name], *changed(BODIES[name])):
        text = json.dumps(body).encode()
        try:
            prepared = read(own, do, text)
            if isinstance(prepared, Prepared):
                to_params(prepared, engine, limits, None)
            taken += 1
        except (ApiError, SelfSpecError):
            continue
        except Exception as error:
            raise AssertionError(f"{text[:500]!r}") from error
    assert taken > 1, "the body itself, and others"
