"""Calls of tools, reasoning, prefilled answers and forms of text in ``/v1/chat/completions``."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.dialects import MODELS, tokenizer_of
from helpers.models import build
from helpers.serving import ScriptedEngine, events, make_client
from selfspec.engine import Engine
from selfspec.serve.served_engine import ServedEngine

HELLO = [{"role": "user", "content": "Hi"}]
ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def scripted(text: str = "Hello.", name: str = "qwen") -> ScriptedEngine:
    return ScriptedEngine(text, tokenizer=tokenizer_of(name))


def ask(engine: ScriptedEngine, status: int = 200, **fields: Any) -> Any:
    with make_client(engine) as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == status, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


def prompt(engine: ScriptedEngine) -> str:
    return str(engine.tokenizer.decode(engine.asked[-1][0]))


def deltas(chunks: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk["choices"]]


def test_an_answer_with_reasoning_text_and_calls() -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me add. {CALL}\n{CALL}"
    answer = ask(scripted(text), tools=TOOLS)
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me add. ", "Hm.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("\nHm.\n") + 1

    parts = deltas(ask(scripted(text), tools=TOOLS, stream=True))
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "Hm."
    assert "".join(part.get("content") or "" for part in parts) == "Let me add. "
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"], call["type"]) for call in begun] == [
        (0, "add", "function"),
        (1, "add", "function"),
    ]
    for index in (0, 1):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(pieces) == '{"a": 1}'
        assert len(pieces) > 5


def test_a_call_alone_has_no_content() -> None:
    message = ask(scripted(CALL), tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    assert ask(scripted(CALL))["choices"][0]["message"]["content"] == CALL


def test_a_call_that_is_cut_off_ends_for_its_length() -> None:
    choice = ask(scripted(CALL), tools=TOOLS, max_tokens=37)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_one_call_where_they_are_not_parallel() -> None:
    message = ask(scripted(f"{CALL}\n{CALL}"), tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_text_and_reasoning_of_a_call_where_the_template_takes_one() -> None:
    """As that of gpt-oss: otherwise the chat could not go on."""
    is_both = "message.tool_calls and message.thinking and message.content"
    both = "{% if " + is_both + " %}{{ raise_exception('both') }}{% endif %}"
    said = "{{ message.role }} {{ message.content }} {{ message.thinking }}"
    engine = ScriptedEngine(chat_template="{% for message in messages %}" + both + said + "{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said_before = {"role": "assistant", "content": "I add.", "reasoning_content": "Hm."}
    ask(engine, messages=[{**said_before, "tool_calls": [call]}])
    assert prompt(engine) == "assistant  Hm."
    ask(engine, messages=[said_before])
    assert prompt(engine) == "assistant I add. Hm."


@pytest.mark.parametrize("otherwise", ["{{ raise_exception('one') }}", ""])
def test_one_call_where_the_template_takes_no_more(otherwise: str) -> None:
    """Llama 3's refuse a message with two, so that the chat could not go on; others write the first alone."""
    call = '{"name": "add", "parameters": {"a": 1}}'
    one = "{% if message.tool_calls | length > 1 %}" + otherwise + "{% endif %}{{ message.tool_calls[0] }}"
    each = "{{ message.role }}{% if message.tool_calls %}" + one + "{% endif %}"
    words = '{# {"name": name, "parameters": dictionary} #}'
    engine = scripted(f"{call}; {call}", "llama")
    engine.tokenizer.chat_template = "{% for message in messages %}" + each + "{% endfor %}{{ tools }}" + words
    message = ask(engine, tools=TOOLS)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    ask(engine, messages=[*HELLO, message, {"role": "tool", "content": "3"}], tools=TOOLS)


def test_tools_their_calls_and_results_reach_the_template() -> None:
    engine = scripted()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    ask(engine, messages=messages, tools=TOOLS)
    assert '"name": "add"' in prompt(engine)
    assert 'assistant: [add {"a": 1}]tool: 2' in prompt(engine)
    ask(engine, messages=messages, tools=TOOLS, tool_choice="none")
    assert "Tools" not in prompt(engine)


@pytest.mark.parametrize("written", ["{{ a | tojson }}", "{{ 'x' + a + 'x' }}", "{{ 'x' ~ a ~ 'x' }}", "{{ a }}"])
def test_templates_write_arguments_as_they_like(written: str) -> None:
    body = written.replace("a ", "message.tool_calls[0].function.arguments ", 1)
    template = "{% for message in messages %}{% if message.tool_calls %}" + body + "{% endif %}{% endfor %}"
    engine = ScriptedEngine(chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "b"}'}}
    ask(engine, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert json.loads(prompt(engine).strip("x")) == {"a": "b"}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": 1}', "a=1"), ("", ""), ("[1]", "arguments=[1]"), ('{"a": 1', 'arguments={"a": 1'), ("1", "arguments=1")],
)
def test_arguments_that_are_no_object_end_no_chat(arguments: str, written: str) -> None:
    """A client sends a call back as the model wrote it, and templates go through its arguments."""
    each = "{% for name, value in message.tool_calls[0].function.arguments | items %}{{ name }}={{ value }}{% endfor %}"
    said = "{{ message.role }} {% if message.tool_calls %}" + each + "{% endif %}"
    engine = ScriptedEngine(chat_template="{% for message in messages %}" + said + "{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    ask(engine, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert prompt(engine) == f"user assistant {written}"


def test_ids_are_short_where_templates_take_no_others() -> None:
    engine = scripted(name="mistral")
    engine.tokenizer.chat_template += "{{ messages[1].tool_calls[0].id }}={{ messages[2].tool_call_id }}"
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answered = {"role": "tool", "content": "2", "tool_call_id": "call_0123456789"}
    ask(engine, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, answered])
    first, second = re.findall(r"assistant:(\w{9})=(\w{9})$", prompt(engine))[0]
    assert first == second


def test_reasoning_goes_where_the_template_takes_it() -> None:
    engine = scripted()
    engine.tokenizer.chat_template += "{{ messages[0].reasoning_content }}"
    ask(engine, messages=[{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, *HELLO])
    assert prompt(engine).endswith("assistant:Hm.")
    ask(engine, messages=[{"role": "assistant", "reasoning": "Hm."}, *HELLO])
    assert prompt(engine).endswith("assistant:Hm.")


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, "", "True"),
        ({"reasoning_effort": "none"}, "low", "False"),
        ({"reasoning_effort": "high"}, "high", "True"),
        ({"reasoning_effort": "max"}, "high", "True"),
        ({"thinking": {"type": "disabled"}}, "", "False"),
        ({"thinking": True, "reasoning_effort": "low"}, "low", "True"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high", "False"),
    ],
)
def test_how_much_is_reasoned(fields: dict[str, Any], effort: str, thinks: str) -> None:
    engine = ScriptedEngine(chat_template="{{ reasoning_effort }} {{ enable_thinking | default(true) }}")
    ask(engine, **fields)
    assert prompt(engine) == f"{effort} {thinks}"


def test_an_answer_that_begins_within_reasoning() -> None:
    engine = scripted("Hm.</think>Yes.")
    engine.tokenizer.chat_template += "<think>\n"
    message = ask(engine)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.parametrize("fields", [{"continue_final_message": True}, {}])
def test_an_answer_continues_what_was_given(fields: dict[str, Any]) -> None:
    engine = scripted("lo.")
    last: dict[str, Any] = {"role": "assistant", "content": "Hel"}
    if not fields:
        last["prefix"] = True
    assert ask(engine, messages=[*HELLO, last], **fields)["choices"][0]["message"]["content"] == "lo."
    assert prompt(engine) == "user: Hiassistant: Hel"
    thought = {"role": "assistant", "content": "<think>Hm", "prefix": True}
    assert ask(engine, messages=[*HELLO, thought])["choices"][0]["message"]["reasoning_content"] == "lo."


def test_fields_that_change_no_text_are_ignored() -> None:
    fields = {
        **{"user": "me", "metadata": {"a": [1]}, "store": True, "service_tier": "flex", "safety_identifier": "x"},
        **{"prompt_cache_key": "x", "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "x"}},
    }
    control = {"type": "ephemeral"}
    part = {"type": "text", "text": "Hi", "cache_control": control}
    engine = scripted()
    ask(
        engine,
        messages=[{"role": "user", "content": [part], "cache_control": control, "provider_specific_fields": {}}],
        **fields,
    )
    assert prompt(engine) == "user: Hiassistant:"


@pytest.fixture(scope="module", params=["qwen", "llama", "glm", "mistral-named"])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    engine = Engine(build("llama"), tokenizer_of(request.param, 120), "suffix")
    with make_client(ServedEngine(lambda: engine)) as client:
        yield client


def complete(client: TestClient, **fields: Any) -> Any:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 300, **fields}
    if fields.get("chat_template_kwargs") is None:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "add"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
        },
    ],
)
def test_a_random_model_calls_what_it_has_to(client: TestClient, choice: Any) -> None:
    for seed in range(3):
        fields = {"tools": TOOLS, "tool_choice": choice}
        found = complete(client, temperature=1.0, seed=seed, **fields)
        assert found["finish_reason"] == "tool_calls"
        [call] = found["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("add", "now")
        if call["function"]["name"] == "add":
            assert arguments["a"] in (1, 2)
        else:
            assert choice == "required"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "(ab|c){2,5}d"}, "(ab|c){2,5}d"),
        ({"structured_outputs": {"regex": "x/y+z"}}, "x/y+z"),
        ({"guided_choice": ['a "b"', "c\nd"]}, 'a "b"|c\nd'),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"\n'}}, "a[0-9]b"),
        ({"guided_grammar": 'start: "a" B\nB: /[xy]{3}/\n'}, "a[xy]{3}"),
        ({"guided_json": {"enum": [1, 2]}}, "[12]"),
        ({"structured_outputs": {"json_object": True}, "logit_bias": {"94": 9}}, r"\{.*"),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_random_model_writes_what_it_has_to(
    client: TestClient, fields: dict[str, Any], pattern: str, thinks: bool
) -> None:
    if thinks:
        bias = {str(client.app.state.service.engine.tokenizer.convert_tokens_to_ids("</think>")): 30}  # type: ignore[attr-defined]
        if "think" not in client.app.state.service.engine.tokenizer.chat_template:  # type: ignore[attr-defined]
            pytest.skip("this template does not reason")
        fields = {**fields, "logit_bias": bias, "chat_template_kwargs": {"enable_thinking": True}}
    message = complete(client, seed=1, temperature=1.0, **fields)["message"]
    assert re.fullmatch(pattern, message["content"], re.DOTALL), message


def test_a_schema_or_a_call(client: TestClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["x"]}}}
    for seed in range(4):
        message = complete(client, tools=TOOLS, response_format=schema, seed=seed, temperature=1.0)["message"]
        assert message["content"] == '"x"' if message["content"] else message["tool_calls"]


def test_strict_calls_among_text() -> None:
    engine = Engine(build("llama"), tokenizer_of("qwen", 120), "autoregressive")
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    opener = str(engine.tokenizer.convert_tokens_to_ids("<tool_call>"))  # type: ignore[union-attr]
    with make_client(ServedEngine(lambda: engine)) as client:
        fields = {"chat_template_kwargs": {"enable_thinking": False}, "seed": 3, "temperature": 1.0}
        message = complete(client, tools=tools, logit_bias={opener: 5.0}, **fields)["message"]
    assert len(message["tool_calls"]) > 1
    assert all(json.loads(call["function"]["arguments"])["a"] in (1, 2) for call in message["tool_calls"][:-1])


def test_a_form_that_cannot_be_compiled_is_named(client: TestClient) -> None:
    for fields, param in (
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ):
        body = {"messages": HELLO, **fields}
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_every_format_answers_a_chat_with_tools() -> None:
    for name in MODELS:
        assert ask(scripted("Hello there.", name), tools=TOOLS)["choices"][0]["message"]["content"] == "Hello there."
