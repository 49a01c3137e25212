"""``/v1/responses``, read by OpenAI's own client."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from helpers.dialects import tokenizer_of
from helpers.serving import NAME, ScriptedEngine, listening, make_client
from selfspec.errors import InvalidParameterError, OutOfMemoryError
from selfspec.serve.bodies import SentEvent
from selfspec.serve.interfaces.response_bodies import ResponseBodies

openai = pytest.importorskip("openai", reason="the package openai is not installed: pip install '.[dev]'")

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nLet me add. {CALL}"


def scripted(text: str = "Hello.") -> ScriptedEngine:
    return ScriptedEngine(text, tokenizer=tokenizer_of("qwen"))


@pytest.fixture
def connect() -> Iterator[Callable[[ScriptedEngine], Any]]:
    """Makes a client that refuses what does not fit its types."""
    with ExitStack() as stack:

        def make(engine: ScriptedEngine) -> Any:
            url = stack.enter_context(listening(engine))
            options = {"max_retries": 0, "_strict_response_validation": True}
            return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **options)

        yield make


def prompt(engine: ScriptedEngine) -> str:
    return str(engine.tokenizer.decode(engine.asked[-1][0]))


def test_a_text(connect: Any) -> None:
    engine = scripted()
    response = connect(engine).responses.create(
        model=NAME, input="Hi", instructions="Be brief.", store=True, metadata={"a": "b"}, temperature=0.5
    )
    assert (response.output_text, response.status, response.object) == ("Hello.", "completed", "response")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (response.store, response.tool_choice, response.tools) == (False, "auto", [])
    assert response.usage.input_tokens == len(engine.asked[0][0])
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert prompt(engine) == "system: Be brief.user: Hiassistant:"


def test_reasoning_text_and_a_call(connect: Any) -> None:
    response = connect(scripted(TEXT)).responses.create(model=NAME, input="Hi", tools=[TOOL])
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "Let me add. ")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_the_clients_own_accumulation_of_a_stream(connect: Any) -> None:
    with connect(scripted(TEXT)).responses.stream(model=NAME, input="Hi", tools=[TOOL]) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"response.{kind}.done" in kinds
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        assert len(deltas) > 2
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in response.output]
    assert response.output[2].arguments == '{"a": 1}'
    assert response.output_text == "Let me add. "


def test_an_answer_that_is_cut_off(connect: Any) -> None:
    client = connect(scripted())
    response = client.responses.create(model=NAME, input="Hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    *_, last = client.responses.create(model=NAME, input="Hi", max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "Hel")


def test_a_conversation_is_sent_back(connect: Any) -> None:
    engine = scripted(TEXT)
    client = connect(engine)
    first = client.responses.create(model=NAME, input=[{"role": "user", "content": "Add."}], tools=[TOOL])
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Add."},
        *first.output,
        {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "2"},
    ]
    client.responses.create(model=NAME, input=items)
    expected = 'system: Be brief.user: Add.assistant: Let me add. [add {"a": 1}]tool: 2assistant:'
    assert prompt(engine) == expected


def test_forms_and_tools_that_are_wanted(connect: Any) -> None:
    engine = scripted()
    client = connect(engine)
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    response = client.responses.create(model=NAME, input="Hi", text=form, reasoning={"effort": "none"})
    assert json.loads(response.text.model_dump_json(by_alias=True))["format"]["schema"] == {"type": "object"}
    assert engine.asked[-1][1].constraint is not None
    assert prompt(engine).endswith("</think>\n\n")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    for choice in ("required", {"type": "function", "name": "add"}, allowed):
        client.responses.create(model=NAME, input="Hi", tools=[TOOL], tool_choice=choice)
        assert engine.asked[-1][1].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "x" * 2000}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with make_client(scripted()) as client:
        answer = client.post("/v1/responses", json={"input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_tools_of_a_namespace_and_searches_of_a_server(connect: Any) -> None:
    """As Codex offers them."""
    engine = scripted('<tool_call>\n{"name": "team.add", "arguments": {"a": 1}}\n</tool_call>')
    client = connect(engine)
    space = {"type": "namespace", "name": "team", "description": "a team", "tools": [TOOL]}
    fields = {"tools": [space, {"type": "web_search", "external_web_access": True}]}
    [call] = client.responses.create(model=NAME, input="Hi", **fields).output
    assert (call.name, call.namespace, call.arguments) == ("add", "team", '{"a": 1}')
    with client.responses.stream(model=NAME, input="Hi", **fields) as stream:
        [streamed] = stream.get_final_response().output
    assert (streamed.name, streamed.namespace) == ("add", "team")
    said = {"type": "function_call", "call_id": "c", "name": "add", "namespace": "team", "arguments": "{}"}
    client.responses.create(model=NAME, input=[{"role": "user", "content": "Hi"}, said], **fields)
    assert '"name": "team.add"' in prompt(engine)
    assert "[team.add {}]" in prompt(engine)
    assert "web_search" not in prompt(engine)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(OutOfMemoryError("no memory is left"), "server_error"), (InvalidParameterError("too complex"), "invalid_prompt")],
)
def test_a_stream_that_fails_ends_with_the_response_so_far(connect: Any, failure: Exception, code: str) -> None:
    engine = scripted(TEXT)
    engine.fails_at, engine.error = 40, failure
    *_, error, last = connect(engine).responses.create(model=NAME, input="Hi", tools=[TOOL], stream=True)
    assert (error.type, error.message) == ("error", str(failure))
    assert (last.type, last.sequence_number) == ("response.failed", error.sequence_number + 1)
    assert (last.response.status, last.response.error.code) == ("failed", code)
    assert last.response.error.message == str(failure)
    reasoning, message = last.response.output
    assert (reasoning.status, reasoning.content[0].text) == ("completed", "Hm.")
    assert (message.status, message.content[0].text) == ("incomplete", last.response.output_text)
    assert "Let me add. ".startswith(last.response.output_text)
    assert last.response.output_text


def test_a_client_that_collects_a_stream_takes_its_pings(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ping = ResponseBodies.chunk

    def pinged(self: ResponseBodies, *arguments: Any) -> Any:
        """Begins each step with a ping."""
        [data] = [line for line in self.ping().splitlines() if line.startswith("data: ")]
        fields = json.loads(data.removeprefix("data: "))
        yield SentEvent(fields, fields["type"])
        yield from ping(self, *arguments)

    monkeypatch.setattr(ResponseBodies, "chunk", pinged)
    with connect(scripted(TEXT)).responses.stream(model=NAME, input="Hi", tools=[TOOL]) as stream:
        numbers = [event.sequence_number for event in stream]
        response = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize(
    ("fields", "name", "send"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the whole conversation"),
        ({"conversation": {"id": "c"}}, "conversation", "the whole conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference", "the item itself"),
    ],
)
def test_nothing_is_stored_to_be_named(fields: dict[str, Any], name: str, send: str) -> None:
    with make_client(scripted()) as client:
        error = client.post("/v1/responses", json={"input": "Hi", **fields}).json()["error"]
    assert error["message"] == f"{name} is not supported: nothing is stored; send {send} in input"
    assert error["code"] == "unsupported_parameter"


def test_what_is_no_text_in_an_output_is_left_out() -> None:
    """As Codex gives the model an image to see."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,xx", "detail": "high"}
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image, {"type": "input_text", "text": "2"}]}
    engine = scripted()
    with make_client(engine) as client:
        items = [{"role": "user", "content": "Hi"}, call, output]
        assert client.post("/v1/responses", json={"input": items}).status_code == 200
    assert "tool: [an image was left out: this model reads text]\n2" in prompt(engine)


def test_the_length_is_named_as_it_was_sent() -> None:
    with make_client(scripted()) as client:
        error = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 5000}).json()["error"]
    assert error["message"].startswith("input length and `max_output_tokens` exceed context limit: ")
