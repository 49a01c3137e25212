"""``custom_generate`` from ``pipeline``, from a repository in the hub's form, and with arguments of other drafts."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils, pipeline

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build, plain_text, prompt
from selfspec import custom_generate
from selfspec.errors import InvalidParameterError, UnknownMethodError
from selfspec.hf.custom_generate import CustomGenerate

HUB = Path(__file__).parents[2] / "examples" / "custom_generate_hub"
UNIFORM = {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0}
TEXT, LENGTH = prompt(12), 20
HELLO, BYE = ([{"role": "user", "content": content}] for content in ("hello", "good bye"))


@pytest.fixture(scope="module")
def model() -> Any:
    return copy.deepcopy(build("llama"))


@pytest.fixture
def pipe(model: Any) -> Any:
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    return pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=LENGTH, do_sample=False)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("hello there", {}),
        ("hello there", {"return_full_text": False}),
        (["a b c", "hello you there", "x"], {"batch_size": 2}),
        (HELLO, {}),
        ([HELLO, BYE], {"batch_size": 2}),
    ],
    ids=["text", "new text", "batch", "chat", "batch of chats"],
)
def test_a_pipeline_gives_the_same_text(pipe: Any, text: Any, options: dict[str, Any]) -> None:
    loop = custom_generate("uniform", UNIFORM)
    assert isinstance(loop, CustomGenerate)
    assert pipe(text, custom_generate=loop, **options) == pipe(text, **options)
    assert loop._engine is not None
    assert loop._engine.generate(TEXT, max_new_tokens=LENGTH).accepted > 0


def test_a_pipeline_is_made_with_it(model: Any, pipe: Any) -> None:
    own = pipeline("text-generation", model=model, tokenizer=pipe.tokenizer, custom_generate=custom_generate)
    assert own("hello there", max_new_tokens=LENGTH, do_sample=False) == pipe("hello there")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens .* use custom_generate\('prompt-lookup'\)"),
        (
            {"assistant_early_exit": 2},
            r"assistant_early_exit .* use custom_generate\('layerskip', \{'exit_layer': N\}\)",
        ),
        ({"use_mtp": True}, r"use_mtp .* use custom_generate\('mtp'\)"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is another way to choose tokens"),
        ({"dola_layers": "low"}, "dola_generation is another way to choose tokens"),
        ({"assistant_model": build("llama")}, "an assistant_model drafts instead of the model's own layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_drafts_and_choices_are_refused(pipe: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        pipe("hello", custom_generate=custom_generate, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"num_assistant_tokens": 3}, {"assistant_confidence_threshold": 0.3}, {"max_matching_ngram_size": 2}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_tunes_an_assistant_changes_nothing(pipe: Any, arguments: dict[str, Any]) -> None:
    assert pipe("hello", custom_generate=custom_generate, **arguments) == pipe("hello")


# A repository in the hub's form


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of ``generate`` that run the example's folder, which transformers copies to a folder of the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    ids = torch.tensor([TEXT])
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    return {"inputs": ids, **common, "custom_generate": str(HUB), "trust_remote_code": True}


def test_the_folder_generates_the_same_text(hub: dict[str, Any]) -> None:
    model = copy.deepcopy(build("llama"))
    expected = plain_text("llama", TEXT, LENGTH)
    for options in ({}, {"method": "uniform", "settings": UNIFORM}, {"method": "uniform", "settings": UNIFORM}):
        assert tuple(model.generate(**hub, **options)[0, len(TEXT) :].tolist()) == expected
    loops = model._selfspec_hub_loops
    assert list(loops) == [("auto", "None", None), ("uniform", repr(UNIFORM), None)]
    assert loops["uniform", repr(UNIFORM), None]._engine.generate(TEXT, max_new_tokens=LENGTH).accepted > 0


def test_the_folder_refuses_what_cannot_be_done(hub: dict[str, Any], model: Any) -> None:
    with pytest.raises(UnknownMethodError, match="did you mean 'uniform'"):
        model.generate(**hub, method="unifrm")
    with pytest.raises(InvalidParameterError, match="assistant_model"):
        model.generate(**hub, assistant_model=model)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**{**hub, "trust_remote_code": False})


def test_the_folder_works_in_a_pipeline(hub: dict[str, Any], pipe: Any) -> None:
    own = {name: hub[name] for name in ("custom_generate", "trust_remote_code")}
    assert pipe(["hello", "hello you two"], **own) == pipe(["hello", "hello you two"])


def test_the_folder_needs_what_its_readme_says() -> None:
    readme = (HUB / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("---\nlibrary_name: transformers\ntags:\n  - custom_generate\n---\n")
    assert (HUB / "custom_generate" / "requirements.txt").read_text(encoding="utf-8").split(">=")[0] == "selfspec"
    for name in ("method", "settings", "seed"):
        assert re.search(rf"^\| `{name}` \|", readme, re.MULTILINE)
