"""Chunks that add text to an answer."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from helpers.serving import ScriptedEngine, ScriptedStream
from selfspec.serve.answer import Answer, Block, Growth
from selfspec.serve.bodies import Bodies, ChatBodies, CompletionBodies
from selfspec.serve.reader import Prepared
from selfspec.serve.requests import ChatRequest, CompletionRequest
from selfspec.types import SamplingParams, TextPiece

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


class OneAnswer:
    """What bodies read of an answer to which text is added."""

    index, prompt, blocks = 3, "", [Block("text")]


def chunks(bodies: Bodies, text: str) -> list[Any]:
    growth = Growth(0, OneAnswer.blocks[0], text, False)
    return list(bodies.chunk(OneAnswer(), [TextPiece(text, 5, "target", None)], [growth]))  # type: ignore[arg-type]


def chat_bodies(**fields: Any) -> ChatBodies:
    request = ChatRequest.model_validate({"model": "m\0", **CHAT, "stream": True, **fields})
    return ChatBodies(Prepared(request, [[1]], 1), "m\0", None)  # type: ignore[arg-type]


def completion_bodies(**fields: Any) -> CompletionBodies:
    request = CompletionRequest.model_validate({"model": "m\0", "prompt": "a", "stream": True, **fields})
    return CompletionBodies(Prepared(request, [[1]], 1), "m\0", None)  # type: ignore[arg-type]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_a_chunk_of_a_chat_has_its_text_and_the_fields_of_all_chunks(text: str) -> None:
    bodies = chat_bodies()
    for said in (text, "next"):
        (chunk,) = chunks(bodies, said)
        event = bodies.event(chunk)
        assert event.startswith("data: ")
        assert event.endswith("}\n\n")
        assert "\n" not in event[:-2]
        (first,) = bodies.first(OneAnswer())  # type: ignore[arg-type]
        choice = {"index": 3, "delta": {"content": said}, "logprobs": None, "finish_reason": None}
        assert json.loads(event.removeprefix("data: ")) == {**json.loads(first.to_json()), "choices": [choice]}


@given(TEXTS)
def test_a_chunk_of_a_completion_has_its_text(text: str) -> None:
    bodies = completion_bodies()
    (chunk,) = chunks(bodies, text)
    body = json.loads(chunk.to_json())
    assert body["choices"] == [{"index": 3, "text": text, "logprobs": None, "finish_reason": None}]
    assert (body["object"], body["model"]) == ("text_completion", "m\0")


def test_reasoning_is_no_text() -> None:
    growth = Growth(0, Block("reasoning"), "hm", False)
    (chunk,) = chat_bodies().chunk(OneAnswer(), [TextPiece("hm", 5, "target", None)], [growth])  # type: ignore[arg-type]
    assert json.loads(chunk.to_json())["choices"][0]["delta"] == {"reasoning_content": "hm"}


def test_a_block_keeps_the_pieces_of_its_text() -> None:
    """Joined anew with each of them, a long text would be copied as often."""
    engine = ScriptedEngine("Hello")
    stream: Any = ScriptedStream(engine, [1], SamplingParams(max_new_tokens=9), "auto")
    answer = Answer(0, stream, ChatRequest.model_validate(CHAT), engine, "auto")
    for letter in "Hello":
        [growth] = answer.add([TextPiece(letter, 5, "target", None)])
        assert growth.text == letter
    assert (answer.blocks[0].pieces, answer.text) == (list("Hello"), "Hello")
