"""``/v1/messages`` as Anthropic's API has it: translated to chats and back, and read by Anthropic's own client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.dialects import tokenizer_of
from helpers.serving import NAME, ScriptedEngine, listening, make_client
from selfspec.errors import EngineFailedError, QueueFullError
from selfspec.serve.capacity import Limits

TOOL = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nLet me add. {CALL}"
BODY: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}


def scripted(text: str = "Hello.") -> ScriptedEngine:
    return ScriptedEngine(text, tokenizer=tokenizer_of("qwen"))


def ask(engine: ScriptedEngine, status: int = 200, path: str = "/v1/messages", **fields: Any) -> Any:
    with make_client(engine) as client:
        answer = client.post(path, json={**BODY, **fields})
    assert answer.status_code == status, answer.text
    return read_events(answer.text) if fields.get("stream") and status == 200 else answer.json()


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named as its type."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt(engine: ScriptedEngine) -> str:
    return str(engine.tokenizer.decode(engine.asked[-1][0]))


def test_blocks_of_an_answer() -> None:
    engine = scripted(TEXT)
    answer = ask(engine, tools=[TOOL])
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (text["type"], text["text"]) == ("text", "Let me add. ")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert (answer["stop_reason"], answer["stop_sequence"], answer["role"]) == ("tool_use", None, "assistant")
    length = len(engine.asked[0][0])
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == length


def test_a_stream_says_what_the_body_says() -> None:
    events = ask(scripted(TEXT), tools=[TOOL], stream=True)
    assert [event["type"] for event in events][:2] == ["message_start", "ping"]
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in begun] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    ended = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert ended == [0, 1, 2]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for index, delta in deltas if index == 0) == "Hm."
    assert "".join(delta["text"] for index, delta in deltas if index == 1) == "Let me add. "
    assert "".join(delta["partial_json"] for index, delta in deltas if index == 2) == '{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["lo", "x"]}, "stop_sequence", "lo"),
    ],
)
def test_why_an_answer_ended(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = ask(scripted(), **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_a_conversation_with_tools_reaches_the_template() -> None:
    engine = scripted()
    engine.tokenizer.chat_template += "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    ask(engine, messages=messages, system=[{"type": "text", "text": "Be brief."}], tools=[TOOL])
    written = prompt(engine).partition("}}] ")[2] or prompt(engine)
    expected = 'system: Be brief.user: Add.assistant: I add.[add {"a": 1}]tool: 2tool: Error: nouser: And?assistant:Hm.'
    assert written.endswith(expected)


def test_the_line_that_claude_code_begins_with_is_left_out() -> None:
    """It is different in each request, and no prompt would begin like an earlier one."""
    engine = scripted()
    line = "x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=cli; cch={};"
    blocks = [[{"type": "text", "text": line.format(cch)}, {"type": "text", "text": "Be brief."}] for cch in "ab"]
    systems = [*blocks, f"{line.format('c')}\nBe brief.", "Be brief."]
    counts = set()
    with make_client(engine) as client:
        for system in systems:
            assert client.post("/v1/messages", json={**BODY, "system": system}).status_code == 200
            body = {"messages": BODY["messages"], "system": system}
            counts.add(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])
    first, *others = (ids for ids, _, _ in engine.asked)
    assert others == [first] * 3
    assert counts == {len(first)}
    ask(engine, system=line.format("d"))
    assert prompt(engine) == "user: Hiassistant:"
    ask(engine, system=f"Be brief.\n{line}")  # in a text about it
    assert line in prompt(engine)


def test_what_is_no_text_in_a_result_is_left_out() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * 5000}}
    document = {"type": "document", "source": {"type": "base64", "data": "x"}, "title": "a", "citations": None}
    found = {"type": "search_result", "source": "a.test", "title": "A", "content": [{"type": "text", "text": "b"}]}
    text = {"type": "text", "text": "2"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text, image, document, found]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]}
    engine = scripted()
    ask(engine, messages=[*BODY["messages"], use, {"role": "user", "content": [result]}])
    for said in (
        "tool: 2",
        "[an image was left out: this model reads text]",
        "[a document was left out",
        "A\na.test\nb",
    ):
        assert said in prompt(engine)
    for block in (image, document, found):
        refusal = ask(engine, 400, messages=[{"role": "user", "content": [block]}])
        assert refusal["error"]["param"] == "messages[0].content[0]"


def test_errors_say_in_anthropics_words_what_is_too_long() -> None:
    """Agents shorten a chat, or ask for less, where they find these words."""
    engine = scripted()
    body = ask(engine, 400, messages=[{"role": "user", "content": "x" * 2000}])
    assert re.fullmatch(r"prompt is too long: (\d+) tokens > 1023 maximum; .*", body["error"]["message"])
    body = ask(engine, 400, messages=[{"role": "user", "content": "x" * 20_000}])
    assert re.match(r"prompt is too long: 200\d\d characters > 16384 maximum; ", body["error"]["message"])
    body = ask(engine, 400, max_tokens=5_000)
    found = re.match(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ 5000 > 1024", body["error"]["message"]
    )
    assert found
    assert "maximum context length is 1024 tokens" in body["error"]["message"]
    assert body["error"]["param"] == "max_tokens"


def test_ids_of_requests_have_anthropics_names() -> None:
    with make_client(scripted()) as client:
        fine = client.post("/v1/messages", json=BODY)
        wrong = client.post("/v1/messages", json={})
        other = client.post("/v1/chat/completions", json={})
    assert fine.headers["request-id"] == fine.headers["x-request-id"]
    assert wrong.json()["request_id"] == wrong.headers["request-id"]
    assert "request-id" not in other.headers
    assert other.json().keys() == {"error"}


def test_a_tool_is_offered_once_it_was_found() -> None:
    """As Claude Code offers the tools that its search finds."""
    late = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    hello = {"role": "user", "content": "Hi"}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "s", "name": "add", "input": {}}]}
    found = [{"type": "tool_reference", "tool_name": "later"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "s", "content": found}]}
    for messages, offered in (([hello], False), ([hello, use, result], True)):
        engine = scripted()
        ask(engine, messages=messages, tools=[TOOL, late])
        assert ('"name": "later"' in prompt(engine)) is offered
    assert "tool: The tool later can be called now." in prompt(engine)


def test_parameters_are_passed_on() -> None:
    engine = scripted()
    ask(engine, temperature=0.5, top_k=7, top_p=0.5, stop_sequences=["x"], metadata={"user_id": "me"})
    params = engine.asked[0][1]
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.5, 7, 0.5, ("x",))
    assert params.max_new_tokens == 200


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "none"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
def test_which_tools_are_called(choice: dict[str, Any], forced: bool) -> None:
    engine = scripted()
    ask(engine, tools=[TOOL], tool_choice=choice)
    assert (engine.asked[0][1].grammar is not None) == forced
    assert ("Tools" in prompt(engine)) == (choice["type"] != "none")


def test_an_answer_continues_the_assistants_last_message() -> None:
    engine = scripted("lo.")
    answer = ask(engine, messages=[*BODY["messages"], {"role": "assistant", "content": "Hel"}])
    assert prompt(engine) == "user: Hiassistant: Hel"
    assert answer["content"][0]["text"] == "lo."


def test_thinking_and_forms() -> None:
    engine = scripted("{}")
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    ask(engine, thinking={"type": "disabled"}, output_config={"effort": "low", "format": schema})
    assert prompt(engine).endswith("</think>\n\n")
    assert engine.asked[0][1].constraint is not None


def test_tokens_are_counted() -> None:
    engine = scripted()
    body = {"messages": BODY["messages"], "system": "Be brief.", "tools": [TOOL]}
    ask(engine, **body)
    with make_client(engine) as client:
        counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(engine.asked[0][0])}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    body = ask(scripted(), 404 if "model" in fields else 400, **fields)
    assert (body["type"], body["error"]["param"]) == ("error", param)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (QueueFullError("full"), 429, "rate_limit_error"),
        (EngineFailedError("it died"), 503, "overloaded_error"),
        (RuntimeError("broken"), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_types(failure: Exception, status: int, kind: str) -> None:
    engine = scripted()
    engine.fails_at, engine.error = 3, failure
    assert ask(engine, stream=True)[-1]["error"]["type"] == kind
    engine.refuses = failure
    assert ask(engine, status)["error"]["type"] == kind


def test_what_is_refused_before_it_is_read_has_anthropics_types() -> None:
    for options, status, kind in (
        ({"limits": Limits(max_body=0.001)}, 413, "request_too_large"),
        ({"hosts": ["other"]}, 403, "permission_error"),
        ({"api_keys": ["secret"]}, 401, "authentication_error"),
    ):
        with make_client(scripted(), **options) as client:
            answer = client.post("/v1/messages", json={**BODY, "system": "x" * 2000})
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_the_key_of_anthropics_clients() -> None:
    with make_client(scripted(), api_keys=["secret"]) as client:
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
            answer = client.post("/v1/messages", json=BODY, headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (status, "message" if status == 200 else "error")


class TestClient:
    """With ``anthropic``, if that is installed."""

    @pytest.fixture
    def client(self) -> Iterator[Any]:
        anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
        with listening(scripted(TEXT)) as url:
            options = {"max_retries": 0, "_strict_response_validation": True}
            yield anthropic.Anthropic(base_url=url, api_key="none", **options)

    def test_create(self, client: Any) -> None:
        answer = client.messages.create(model=NAME, tools=[TOOL], **BODY)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"a": 1}

    def test_stream(self, client: Any) -> None:
        with client.messages.stream(model=NAME, tools=[TOOL], **BODY) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_message()
        assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"a": 1}
        assert (answer.stop_reason, answer.usage.output_tokens > 0) == ("tool_use", True)

    def test_errors_and_counts(self, client: Any) -> None:
        import anthropic

        assert client.messages.count_tokens(model=NAME, messages=BODY["messages"]).input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(model=NAME, **{**BODY, "max_tokens": 5_000})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", **BODY)
