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
@pytest.mark.parametrize(("template", "late"), [(STRICT, "user"), (SILENT, "user"), (LENIENT, "system")])
def test_those_at_the_beginning_are_one_and_later_ones_are_kept(path: str, template: str, late: str) -> None:
    engine = ScriptedEngine(chat_template=template)
    with make_client(engine) as client:
        answer = client.post(path, json=REQUESTS[path])
    assert answer.status_code == 200, answer.text
    text = engine.tokenizer.decode(engine.asked[0][0])
    assert text == f"system: One.\n\nTwo.|user: Hi|assistant: Yes?|{late}: Three.|user: Go|"


def test_one_system_message_stays_as_it_is() -> None:
    engine = ScriptedEngine(chat_template=STRICT)
    with make_client(engine) as client:
        for messages in (turns()[1:4], turns()[:2]):
            assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    texts = [engine.tokenizer.decode(ids) for ids, *_ in engine.asked]
    assert texts == ["system: Two.|user: Hi|assistant: Yes?|", "system: One.\n\nTwo.|"]
