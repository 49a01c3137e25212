"""``/v1/completions``, ``/v1/models``, ``/tokenize`` and ``/detokenize``, of an engine that says what it is told."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from helpers.checkpoints import EOS, make_tokenizer
from helpers.serving import NAME, ScriptedEngine, events, make_client


def post(scripted: ScriptedEngine, path: str, **fields: Any) -> Any:
    with make_client(scripted) as client:
        answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


def complete(scripted: ScriptedEngine, **fields: Any) -> Any:
    return post(scripted, "/v1/completions", **fields)


def test_a_completion() -> None:
    scripted = ScriptedEngine(" there.")
    answer = complete(scripted, prompt="Hello")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": " there.", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 7
    assert scripted.asked[0][1].max_new_tokens == 16


def test_prompts_in_every_form() -> None:
    encode = make = ScriptedEngine().tokenizer.encode
    for prompt, expected in (
        ("ab", [make("ab")]),
        (["ab", "c"], [make("ab"), make("c")]),
        (encode("ab"), [make("ab")]),
        ([encode("ab"), encode("c")], [make("ab"), make("c")]),
    ):
        scripted = ScriptedEngine()
        answer = complete(scripted, prompt=prompt, n=2)
        assert [asked for asked, *_ in scripted.asked] == [each for each in expected for _ in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_echoed(stream: bool) -> None:
    answer = complete(ScriptedEngine(" there."), prompt=["Hello", "Hi"], echo=True, stream=stream)
    texts = ["", ""]
    for body in answer[:-1] if stream else [answer]:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Hello there.", "Hi there."]


def test_a_text_is_echoed_as_it_was_given() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    scripted = ScriptedEngine(" there.", tokenizer=tokenizer)
    assert complete(scripted, prompt="Hello", echo=True)["choices"][0]["text"] == "Hello there."
    ids, *_ = scripted.asked[0]
    assert ids[0] == 0
    assert complete(scripted, prompt=ids, echo=True)["choices"][0]["text"] == f"{EOS}Hello there."


def test_log_probabilities_of_the_prompt_and_the_answer() -> None:
    scripted = ScriptedEngine("c")
    choice = complete(scripted, prompt="ab", echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"b": -1.0}, {"c": -0.5, "<eos>": -2.0}],
        "text_offset": [0, 1, 2],
    }
    assert (scripted.asked[0][1].logprobs, scripted.asked[0][1].prompt_logprobs) == (2, 2)


def test_log_probabilities_in_a_stream() -> None:
    chunks = complete(ScriptedEngine("cd"), prompt="ab", logprobs=0, stream=True)[:-1]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [each["tokens"] for each in found] == [["c"], ["d"]]
    assert [each["text_offset"] for each in found] == [[0], [1]]
    assert all(each["top_logprobs"] is None for each in found)


def test_models() -> None:
    with make_client(ScriptedEngine()) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert client.get(f"/v1/models/{NAME}").json() == card
        missing = client.get("/v1/models/other/model")
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 1024)
    assert card["selfspec"] == {"methods": ["auto", "autoregressive", "suffix"], "method": "auto"}
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_texts_and_chats_are_tokenized() -> None:
    scripted = ScriptedEngine()
    tokenizer = scripted.tokenizer
    answer = post(scripted, "/tokenize", prompt="a b", return_token_strs=True)
    assert answer == {
        "count": 3,
        "max_model_len": 1024,
        "tokens": tokenizer.encode("a b"),
        "token_strs": ["a", "Ġ", "b"],
    }
    chat = post(scripted, "/tokenize", messages=[{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert tokenizer.decode(chat["tokens"]) == "user: a\n"
    assert post(scripted, "/tokenize", prompt="")["tokens"] == []
    assert post(scripted, "/detokenize", tokens=tokenizer.encode("a b")) == {"prompt": "a b"}
    assert post(scripted, "/detokenize", tokens=[]) == {"prompt": ""}
