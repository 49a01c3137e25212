"""How long an answer may be whose request names no length: one rule for all interfaces."""

from typing import Any

import pytest
from tokenizers import AddedToken

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import ROPE_SWITCH, build, prompt
from helpers.serving import ScriptedEngine, make_client
from selfspec import AsyncEngine, Engine
from selfspec.errors import RequestTooLargeError
from selfspec.serve.capacity import Limits
from selfspec.serve.served_engine import ServedEngine

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HI,
    RESPONSES: {"input": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/infill": {"input_prefix": "Hi"},
    "/v1/messages": {**HI, "max_tokens": 77},
}


def asked(path: str, limits: Limits | None = None, context: int = 8192, memory: int = 8192, **fields: Any) -> Any:
    """The lengths of prompt and answer of a request."""
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    fill = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in fill], special_tokens=True)
    engine = ScriptedEngine("b", tokenizer=tokenizer)
    engine.context, engine.memory = context, memory
    with make_client(engine, limits) as client:
        answer = client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    token_ids, params, _ = engine.asked[0]
    return len(token_ids), params.max_new_tokens


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_what_is_left_of_the_context(path: str) -> None:
    used, new = asked(path, context=4096, memory=10**6)
    assert used + new == 4096


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_no_more_than_a_quarter_of_the_memory(path: str) -> None:
    used, new = asked(path, context=10**5, memory=40_000)
    assert used + new == 10_000
    used, new = asked(path, context=10**5, memory=2000)  # of which a quarter is little
    assert new == 1024
    used, new = asked(path, context=10**5, memory=1000)
    assert used + new == 1000


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_servers_limits(path: str) -> None:
    assert asked(path, Limits(max_new_tokens=50))[1] == 50
    assert asked(path, Limits(default_new_tokens=60))[1] == 60
    assert asked(path, Limits(default_new_tokens=60, max_new_tokens=50))[1] == 50
    used, new = asked(path, Limits(default_new_tokens=5000), context=4096, memory=10**6)
    assert used + new == 4096
    used, new = asked(path, Limits(default_new_tokens=5000), memory=4000)
    assert used + new == 4000


def test_log_probabilities_fit() -> None:
    """What was not asked for is no reason to refuse a request."""
    fields = {"logprobs": True, "top_logprobs": 9, "n": 2}
    assert asked(CHAT, Limits(max_logprobs=1000), **fields)[1] == 50


@pytest.mark.parametrize(("path", "length"), [("/v1/completions", 16), ("/infill", 128), ("/v1/messages", 77)])
def test_interfaces_that_have_a_length_of_their_own(path: str, length: int) -> None:
    assert asked(path)[1] == length
    if path == "/v1/messages":
        return
    assert asked(path, Limits(default_new_tokens=5000))[1] == length
    assert asked(path, Limits(max_new_tokens=5))[1] == 5
    used, new = asked(path, context=20, memory=10**6)
    assert new == min(length, 20 - used)


def test_messages_have_to_name_a_length() -> None:
    """As in Anthropic's interface."""
    with make_client(ScriptedEngine()) as client:
        answer = client.post("/v1/messages", json=HI)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]


def test_what_memory_leaves_is_taken() -> None:
    slots = 60
    engine = Engine(build("llama"), method="autoregressive", memory_limit=slots * 10**4)
    served = AsyncEngine(engine)
    room = served.room(20)
    assert room > 0
    served.prepare(prompt(20), max_new_tokens=room)
    with pytest.raises(RequestTooLargeError, match=f"at most {room} new tokens"):
        served.prepare(prompt(20), max_new_tokens=room + 1)
    assert served.room(20, 0.5) < room


def test_an_answer_ends_where_the_models_frequencies_switch() -> None:
    """A request that crossed that would be refused, though it had not asked to."""
    engine = Engine(build("phi3-longrope"), make_tokenizer(chat_template=CHAT_TEMPLATE), "autoregressive")
    with make_client(ServedEngine(lambda: engine)) as client:
        answer = client.post(CHAT, json={**HI, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == ROPE_SWITCH + 1
