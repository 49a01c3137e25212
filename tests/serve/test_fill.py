"""Text between a beginning and an end: ``suffix`` of completions, and ``/infill``."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from helpers.checkpoints import make_tokenizer
from helpers.serving import ScriptedEngine, make_client

STYLES = {
    "qwen": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"),
    "deepseek": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>a<｜fim▁hole｜>c<｜fim▁end｜>",
    ),
    "codestral": (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]c[PREFIX]a"),
}


def scripted(*tokens: str, special: bool = True) -> ScriptedEngine:
    tokenizer = make_tokenizer()
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    tokenizer.add_tokens(added, special_tokens=special)
    return ScriptedEngine("b", tokenizer=tokenizer)


def post(engine: ScriptedEngine, path: str, **fields: Any) -> Any:
    with make_client(engine) as client:
        return client.post(path, json=fields)


@pytest.mark.parametrize("style", STYLES)
def test_a_suffix(style: str) -> None:
    tokens, written = STYLES[style]
    engine = scripted(*tokens)
    answer = post(engine, "/v1/completions", prompt="a", suffix="c")
    assert answer.json()["choices"][0]["text"] == "b"
    assert engine.tokenizer.decode(engine.asked[0][0]) == written


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_in_texts_are_text(special: bool) -> None:
    """Qwen's own are not special."""
    engine = scripted(*STYLES["qwen"][0], special=special)
    post(engine, "/v1/completions", prompt="a<|fim_middle|>", suffix="c")
    middle = engine.tokenizer.convert_tokens_to_ids("<|fim_middle|>")
    assert engine.asked[0][0].count(middle) == 1


def test_infill_as_editors_ask_for_it() -> None:
    engine = scripted(*STYLES["qwen"][0], "<|file_sep|>")
    fields = {
        **{"input_prefix": "a", "prompt": "x", "input_suffix": "c", "n_predict": 16, "samplers": ["top_k"]},
        **{"input_extra": [{"filename": "f.py", "text": "1"}], "cache_prompt": True, "t_max_prompt_ms": 500},
    }
    answer = post(engine, "/infill", **fields).json()
    assert (answer["content"], answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == ("b", True, "eos", 1)
    written = "<|file_sep|>f.py\n1\n<|file_sep|>\n<|fim_prefix|>ax<|fim_suffix|>c<|fim_middle|>"
    assert engine.tokenizer.decode(engine.asked[0][0]) == written
    lines = post(engine, "/infill", **fields, stream=True).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [(event["content"], event["stop"]) for event in events] == [("b", False), ("", True)]


def test_it_is_refused_where_the_tokenizer_has_no_tokens_for_it() -> None:
    for path, fields in (("/v1/completions", {"prompt": "a", "suffix": "c"}), ("/infill", {"input_prefix": "a"})):
        answer = post(scripted(), path, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
