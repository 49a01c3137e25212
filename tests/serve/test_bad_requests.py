"""Every field out of range, of the wrong type or unknown is answered in OpenAI's form, with the field named."""

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings

from helpers.serving import ScriptedEngine, make_client
from selfspec.errors import EngineFailedError, OutOfMemoryError, QueueFullError
from selfspec.serve.api_errors import as_invalid
from selfspec.serve.capacity import Limits
from selfspec.serve.requests import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
LIMITS = Limits(max_body=0.1, max_prompt_tokens=200, max_new_tokens=100, max_choices=4)
SCHEMA = {"name": "n", "schema": {}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with make_client(ScriptedEngine(), LIMITS) as client:
        yield client


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    """The error of an answer."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def test_more_choices_than_ever_have_room_are_refused_for_good() -> None:
    """Status 429 would be tried again for ever."""
    with make_client(ScriptedEngine(), Limits(max_batch=1, max_waiting=2)) as client:
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json={**body, "n": 3}).status_code == 200
        error = refused(client.post("/v1/chat/completions", json={**body, "n": 4}))
    assert (error["param"], error["code"]) == ("n", "too_many_choices")


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 101}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"speculative": {"method": "no-such-method"}}, "speculative.method"),
    ({"speculative": {"method": "os:system"}}, "speculative.method"),
    ({"speculative": {"enabled": "no"}}, "speculative.enabled"),
    ({"speculative": "suffix"}, "speculative"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format"),
    ({"logprobs": "many"}, "logprobs"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"guided_grammar": "start: A", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"min_tokens": 3, "max_tokens": 5, "guided_choice": ["a"]}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 101}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"verbosity": "low"}, "verbosity"),
    ({"reasoning_effort": "immense"}, "reasoning_effort"),
    ({"continue_final_message": True}, "messages"),
    ({"functions": []}, "functions"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [1, 128]}, "prompt"),
    ({"prompt": [[1], [2, 500]]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": "x" * 300}, "prompt"),
    ({"prompt": ["a"] * 5}, "prompt"),
    ({"best_of": 3}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"suffix": "x", "prompt": [1]}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), [*COMMON, *CHAT])
def test_a_field_of_a_chat_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    error = refused(client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param == "messages" or param.rpartition(".")[2].partition("[")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), [*COMMON, *COMPLETION])
def test_a_field_of_a_completion_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    error = refused(client.post("/v1/completions", json={"prompt": "Hi", **fields}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_unknown_and_missing_fields_have_codes_of_their_own(client: TestClient) -> None:
    assert refused(client.post("/v1/completions", json={"prompt": "x", "foo": 1}))["code"] == "unknown_parameter"
    assert refused(client.post("/v1/completions", json={}))["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"prompt": ', "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"prompt": "\xff"}', None),
        (b"[" * 50_000, None),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", None),
        (b'{"prompt": "x", "temperature": NaN}', None),
        (b'{"prompt": "\\ud800"}', "invalid_value"),
        (b'{"prompt": "x", "\\ud800": 1}', "invalid_value"),
    ],
)
def test_bodies_that_are_no_request(client: TestClient, body: bytes, code: str | None) -> None:
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(answer)["code"] in (code, "invalid_value") if code is None else refused(answer)["code"] == code


def test_lone_surrogates_in_free_objects_are_refused() -> None:
    with make_client(ScriptedEngine(chat_template="{{ mood }} {{ messages[0]['content'] }}")) as client:
        body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"mood": "\\ud800"}}'
        answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(answer)["param"] == "messages"


def test_a_template_that_refuses() -> None:
    with make_client(ScriptedEngine(chat_template="{{ raise_exception('no chats') }}")) as client:
        error = refused(client.post("/v1/chat/completions", json={"messages": MESSAGES}))
    assert error["param"] == "messages"
    assert "no chats" in error["message"]


def test_a_model_without_a_template_completes_only() -> None:
    with make_client(ScriptedEngine(chat_template=None)) as client:
        assert "chat template" in refused(client.post("/v1/chat/completions", json={"messages": MESSAGES}))["message"]
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_tools_that_cannot_be_called_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with make_client(ScriptedEngine(chat_template="{{ tools }}{{ messages[0]['content'] }}")) as client:
        for choice in (
            {"type": "function", "function": {"name": "g"}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
        ):
            fields = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
            error = refused(client.post("/v1/chat/completions", json=fields))
            assert error["param"] == "tool_choice"
            assert "'g'" in error["message"]


def test_a_prompt_over_the_context() -> None:
    with make_client(ScriptedEngine()) as client:
        for fields, message in (
            ({"prompt": "x" * 1024}, "prompt is too long: 1024 tokens > 1023 maximum; "),
            ({"prompt": [1] * 2000}, "prompt is too long: 2000 tokens > 1024 maximum; "),
            (
                {"prompt": "x" * 1000, "max_tokens": 25},
                "input length and `max_tokens` exceed context limit: 1000 + 25 > 1024, ",
            ),
        ):
            error = refused(client.post("/v1/completions", json=fields))
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(message)
        assert client.post("/v1/completions", json={"prompt": "x" * 1000, "max_tokens": 24}).status_code == 200


NEUTRAL: dict[str, Any] = {
    **{"skip_special_tokens": True, "length_penalty": 1, "use_beam_search": False, "ignore_eos": None},
    **{"include_stop_str_in_output": None, "return_tokens_as_token_ids": None, "no_such_field": None},
    **{"speculative": None, "stream_options": None, "spaces_between_special_tokens": True},
}


def test_what_changes_nothing_is_taken(client: TestClient) -> None:
    """Clients send nulls and defaults for what their users did not set."""
    message = {"role": "user", "content": "Hi", "mood": None}
    for path, fields in (
        ("/v1/chat/completions", {"messages": [message], "echo": False, "functions": None}),
        ("/v1/completions", {"prompt": "Hi", "add_special_tokens": None}),
        ("/v1/messages", {"messages": [message], "max_tokens": 4, "no_such_field": None}),
        ("/v1/responses", {"input": [message], "no_such_field": None, "previous_response_id": None}),
        ("/infill", {"input_prefix": "a", "no_such_field": None}),
    ):
        more = NEUTRAL if "completions" in path else {}
        answer = client.post(path, json={"max_tokens": 4, **fields, **more} if more else fields)
        if path != "/infill" or answer.status_code != 400:  # the tokenizer cannot fill
            assert answer.status_code == 200, (path, answer.text)
        else:
            assert answer.json()["error"]["param"] == "suffix"


@pytest.mark.parametrize(
    "fields", [{"skip_special_tokens": False}, {"length_penalty": 1.5}, {"use_beam_search": True}, {"echo": True}]
)
def test_what_is_not_neutral_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert [refused(answer)["param"]] == list(fields)


def test_a_null_of_a_field_that_is_needed_is_named(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": None})
    assert refused(answer)["param"] == "prompt"


def test_a_model_that_is_not_served(client: TestClient) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = refused(client.post(path, json={"model": "gpt-5", **fields}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_tokens_out_of_the_vocabulary(client: TestClient) -> None:
    assert refused(client.post("/detokenize", json={"tokens": [128]}))["param"] == "tokens"
    assert refused(client.post("/tokenize", json={}))["message"] == "give either prompt or messages"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (QueueFullError("too many"), 429, "queue_full"),
        (OutOfMemoryError("no memory"), 503, "out_of_memory"),
        (EngineFailedError("it died"), 503, "engine_failed"),
        (RuntimeError("broken"), 500, None),
    ],
)
def test_what_the_engine_refuses(failure: Exception, status: int, code: str | None) -> None:
    scripted = ScriptedEngine()
    scripted.refuses = failure
    with make_client(scripted) as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
    assert refused(answer, status)["code"] == code
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


def test_a_body_with_very_many_problems_is_answered_soon() -> None:
    """Comparing all of them with each other would take hours, in which the server answers no request."""
    errors = [
        {"type": "model_type", "loc": ("messages", index), "msg": "Input should be an object"}
        for index in range(100_000)
    ]
    refusal = as_invalid(errors, {"messages": [1] * len(errors)})
    assert refusal.param == "messages[0]"
    assert refusal.message.endswith("messages[3]: input should be an object (and 99996 more)")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "x"]), VALUES, max_size=3))
def test_no_chat_fails_the_server(client: TestClient, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4, **fields})
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        refused(answer, answer.status_code)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*CompletionRequest.model_fields, "x"]), VALUES, max_size=3))
def test_no_completion_fails_the_server(client: TestClient, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, **fields})
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        refused(answer, answer.status_code)
