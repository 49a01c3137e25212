"""Chats with several system messages, as agents send them, over all interfaces, and templates that take one alone."""

from typing import Any

import pytest

from helpers.serving import ScriptedEngine, make_client

LINE = "{{ message.role }}: {{ message.content }}|"
STRICT = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + LINE + "{% endfor %}"
)
SILENT = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}" + LINE + "{% endif %}{% endfor %}"
)
LATEST = (
    "{% set ns = namespace(said='') %}{% for message in messages if message.role == 'system' %}"
    "{% set ns.said = message.content %}{% endfor %}system: {{ ns.said }}|"
    "{% for message in messages if message.role != 'system' %}" + LINE + "{% endfor %}"
)
"""As DeepSeek R1's, the last system message alone."""
LENIENT = "{% for message in messages %}" + LINE + "{% endfor %}"
SAID = [
    ("system", "One."),
    ("system", "Two."),
    ("user", "Hi"),
    ("assistant", "Yes?"),
    ("system", "Three."),
    ("user", "Go"),
]


def turns(first: str = "system") -> list[dict[str, str]]:
    return [{"role": first if text == "One." else role, "content": text} for role, text in SAID]


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": turns("developer")},
    "/v1/messages": {"messages": turns()[1:], "system": [{"type": "text", "text": "One."}], "max_tokens": 20},
    "/v1/responses": {"input": turns("developer")[1:], "instructions": "One."},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("template", "late"), [(STRICT, "user"), (SILENT, "user"), (LATEST, "user"), (LENIENT, "system")]
)
def test_those_at_the_beginning_are_one_and_later_ones_are_kept(path: str, template: str, late: str) -> None:
    engine = ScriptedEngine(chat_template=template)
    with make_client(engine) as client:
        answer = client.post(path, json=REQUESTS[path])
    assert answer.status_code == 200, answer.text
    text = engine.tokenizer.decode(engine.asked[0][0])
    assert text == f"system: One.\n\nTwo.|user: Hi|assistant: Yes?|{late}: Three.|user: Go|"


ALTERNATING = (
    "{% set ns = namespace(users=0) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and not message.tool_calls %}{% set ns.users = 0 %}"
    "{% elif message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}"
    "{% if ns.users > 1 or (message.role == 'system' and not loop.first) %}{{ raise_exception('no') }}{% endif %}"
    + LINE
    + "{% endfor %}"
)
"""As Mistral's: calls and what tools found do not count."""


@pytest.mark.parametrize("path", REQUESTS)
def test_messages_of_the_user_in_a_row_are_one_where_the_template_takes_no_more(path: str) -> None:
    """As Codex begins its chats; and system messages on the way are the user's."""
    engine = ScriptedEngine(chat_template=ALTERNATING)
    with make_client(engine) as client:
        answer = client.post(path, json=REQUESTS[path])
    assert answer.status_code == 200, answer.text
    text = engine.tokenizer.decode(engine.asked[0][0])
    assert text == "system: One.\n\nTwo.|user: Hi|assistant: Yes?|user: Three.\n\nGo|"


def test_a_system_message_is_the_users_where_the_template_takes_none() -> None:
    """As Gemma 2's."""
    engine = ScriptedEngine(chat_template=ALTERNATING.replace(" and not loop.first", ""))
    with make_client(engine) as client:
        assert client.post("/v1/chat/completions", json={"messages": turns()}).status_code == 200
    text = engine.tokenizer.decode(engine.asked[0][0])
    assert text == "user: One.\n\nTwo.\n\nHi|assistant: Yes?|user: Three.\n\nGo|"


def test_a_template_for_chats_with_tools_alone_takes_a_system_message() -> None:
    """As the one of two that Hermes has."""
    engine = ScriptedEngine(chat_template="{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + LENIENT)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with make_client(engine) as client:
        assert client.post("/v1/chat/completions", json={"messages": turns()[1:3], "tools": tools}).status_code == 200
    assert engine.tokenizer.decode(engine.asked[0][0]) == "system: Two.|user: Hi|"


def test_what_claude_code_adds_to_a_result_is_of_the_tool_where_the_template_takes_no_more() -> None:
    engine = ScriptedEngine(chat_template=ALTERNATING)
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    found = [{"type": "tool_result", "tool_use_id": "t", "content": "2"}, {"type": "text", "text": "Be brief."}]
    messages = [("user", "Hi"), ("assistant", [use]), ("user", found), ("assistant", "Two."), ("user", "Thanks")]
    body = {"max_tokens": 9, "messages": [{"role": role, "content": content} for role, content in messages]}
    with make_client(engine) as client:
        answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    text = engine.tokenizer.decode(engine.asked[0][0])
    assert text == "user: Hi|assistant: |tool: 2\n\nBe brief.|assistant: Two.|user: Thanks|"


def test_one_system_message_stays_as_it_is() -> None:
    engine = ScriptedEngine(chat_template=STRICT)
    with make_client(engine) as client:
        for messages in (turns()[1:4], turns()[:2]):
            assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    texts = [engine.tokenizer.decode(ids) for ids, *_ in engine.asked]
    assert texts == ["system: Two.|user: Hi|assistant: Yes?|", "system: One.\n\nTwo.|"]
