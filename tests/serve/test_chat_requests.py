"""``/v1/chat/completions``: bodies and streams, with an engine that says what it is told to."""

import json
from typing import Any

import pytest

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.serving import NAME, ScriptedEngine, contents, events, make_client
from selfspec.decoding.text import REPLACEMENT

HELLO = [{"role": "user", "content": "Hi"}]


def chat(scripted: ScriptedEngine, **fields: Any) -> Any:
    with make_client(scripted) as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


def test_an_answer() -> None:
    scripted = ScriptedEngine("Hello there.")
    answer = chat(scripted, model=NAME)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == NAME
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = len(scripted.asked[0][0])
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "selfspec" not in answer
    assert scripted.tokenizer.decode(scripted.asked[0][0]) == "user: Hi\nassistant:"


def test_a_stream_says_what_the_body_says() -> None:
    *chunks, usage, done = chat(ScriptedEngine(), stream=True, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(contents(chunks)) == "Hello there."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


def test_a_stream_with_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = chat(ScriptedEngine(), stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(13), 12]  # a chunk with the role, one a token, and one with the reason
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 12


def test_a_stream_has_no_usage_unless_asked() -> None:
    chunks = chat(ScriptedEngine(), stream=True)
    assert all("usage" not in chunk and "selfspec" not in chunk for chunk in chunks[:-1])


def test_the_report_of_a_stream() -> None:
    chunks = chat(ScriptedEngine(), stream=True, speculative={"method": "suffix", "report": True})[:-1]
    tokens = [token for chunk in chunks for token in chunk.get("selfspec", {}).get("tokens", [])]
    assert "".join(token["text"] for token in tokens) == "Hello there."
    assert [(token["origin"], token["drafted_by"]) for token in tokens[:3]] == [
        ("prefill", None),
        ("draft", "suffix"),
        ("target", None),
    ]
    assert chunks[-1]["selfspec"] == {
        "method": "suffix",
        "rounds": 6,
        "drafted_tokens": 6,
        "accepted_tokens": 6,
        "acceptance_rate": 1.0,
        "tokens_per_second": 10.0,
        "speedup_estimate": 2.0,
    }


def test_the_report_of_a_body() -> None:
    assert chat(ScriptedEngine(), speculative={"report": True})["selfspec"]["speedup_estimate"] == 2.0


def test_methods_are_passed_on() -> None:
    scripted = ScriptedEngine()
    for speculative in ({}, {"method": "suffix"}, {"enabled": False}, {"method": "suffix", "enabled": False}):
        chat(scripted, speculative=speculative)
    assert [method for *_, method in scripted.asked] == [None, "suffix", "autoregressive", "autoregressive"]


def test_parameters_are_passed_on() -> None:
    scripted = ScriptedEngine()
    chat(
        scripted,
        **{"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"3": -100}, "min_tokens": 2},
        **{"stop": "x", "stop_token_ids": [5], "ignore_eos": True, "max_completion_tokens": 20, "n": 2},
    )
    first, second = (params for _, params, _ in scripted.asked)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.seed) == (0.5, 0.9, 0, 0.1, 7)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.1, 0.5, -0.5)
    assert (first.logit_bias, first.min_tokens, first.stop, first.stop_token_ids) == ({3: -100.0}, 2, ("x",), (5,))
    assert (first.ignore_eos, first.max_new_tokens) == (True, 20)
    assert second.seed == 8


def test_without_parameters_it_samples_as_openai_does() -> None:
    scripted = ScriptedEngine()
    chat(scripted)
    params = scripted.asked[0][1]
    assert (params.temperature, params.top_p, params.seed) == (1.0, 1.0, None)
    assert params.max_new_tokens == 1024 - len(scripted.asked[0][0])  # less than the default fits


def test_several_choices_side_by_side() -> None:
    answer = chat(ScriptedEngine(), n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == chat(ScriptedEngine())["usage"]["prompt_tokens"]
    *chunks, _ = chat(ScriptedEngine(), n=3, stream=True)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(contents(own)) == "Hello there."
        assert own[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_before_a_stop_string(include: bool) -> None:
    expected = "Hello there" if include else "Hello "
    fields: dict[str, Any] = {"stop": ["there"], "include_stop_str_in_output": include}
    assert chat(ScriptedEngine("Hello there. More"), **fields)["choices"][0]["message"]["content"] == expected
    chunks = chat(ScriptedEngine("Hello there. More"), **fields, stream=True)[:-1]
    assert "".join(contents(chunks)) == expected


def test_length_is_said() -> None:
    answer = chat(ScriptedEngine(), max_tokens=5)
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["message"]["content"]) == ("length", "Hello")


def test_log_probabilities() -> None:
    scripted = ScriptedEngine("Hi")
    answer = chat(scripted, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"], each["bytes"]) for each in content] == [
        ("H", -0.5, [72]),
        ("i", -0.5, [105]),
    ]
    assert [each["token"] for each in content[0]["top_logprobs"]] == ["H", "<eos>"]
    chunks = chat(scripted, logprobs=True, top_logprobs=2, stream=True)[:-1]
    streamed = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    named = chat(scripted, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert named[0]["token"] == f"token_id:{scripted.tokenizer.encode('H')[0]}"
    assert named[0]["top_logprobs"] == []


def test_bytes_of_tokens_join_to_those_of_the_text() -> None:
    scripted = ScriptedEngine("\N{EURO SIGN}", tokenizer=make_tokenizer(300, chat_template=CHAT_TEMPLATE))
    content = chat(scripted, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [REPLACEMENT] * 3
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "\N{EURO SIGN}"


def test_messages_in_parts_and_of_developers() -> None:
    scripted = ScriptedEngine()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(scripted, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    text = scripted.tokenizer.decode(scripted.asked[0][0])
    assert text == "system: Be brief.\nuser: one\ntwo\nassistant:"


def test_an_answer_can_be_sent_back() -> None:
    scripted = ScriptedEngine()
    message = chat(scripted)["choices"][0]["message"]
    chat(scripted, messages=[*HELLO, message, *HELLO])
    assert message["content"]
    assert message["content"] in scripted.tokenizer.decode(scripted.asked[1][0])


def test_variables_of_the_template() -> None:
    scripted = ScriptedEngine(chat_template="{{ mood }} {{ messages[0]['content'] }}")
    chat(scripted, chat_template_kwargs={"mood": "gay"})
    assert scripted.tokenizer.decode(scripted.asked[0][0]) == "gay Hi"


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}, {"type": "string"}),
    ],
)
def test_formats_of_the_answer(response_format: Any, expected: Any) -> None:
    scripted = ScriptedEngine()
    chat(scripted, response_format=response_format)
    schema = scripted.asked[0][1].json_schema
    assert (json.loads(schema) if isinstance(schema, str) else schema) == expected
