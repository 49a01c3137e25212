"""The bundled checkpoints are what their cards say: small, trained, and good at drafting for themselves."""

import ast
import functools
import itertools
import json
import re
from typing import Any

import pytest

from selfspec import METHODS, Engine, SamplingParams, load_model
from selfspec.loading import bundled_models
from selfspec_lab.checkpoints import TINY, TINY_MTP
from selfspec_lab.prompts import PROMPTS

pytestmark = pytest.mark.trained
WHOLE = ("tiny", "tiny-early-exit")
PARAMS = SamplingParams(max_new_tokens=64)


@functools.cache
def loaded(checkpoint: str) -> Any:
    """The model and the tokenizer, in float32. Shared by all tests, which must not change them."""
    return load_model(checkpoint, dtype="float32", device="cpu")


def engine(checkpoint: str, method: str = "autoregressive", **settings: object) -> Engine:
    return Engine(*loaded(checkpoint), method, settings=settings)


@pytest.mark.parametrize("name", WHOLE)
def test_size_and_shape(name: str) -> None:
    model, tokenizer = load_model(name)
    folder = bundled_models()[name]
    assert len((folder / "model.safetensors").read_bytes()) <= 32 * 2**20
    assert 10e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 16e6
    assert model.config.num_hidden_layers >= 16
    assert model.config.max_position_embeddings >= 2048
    assert 4096 <= len(tokenizer) <= 8192


@pytest.mark.parametrize("name", WHOLE)
def test_the_card_tells_the_measured_figures(name: str) -> None:
    folder = bundled_models()[name]
    card = (folder / "README.md").read_text(encoding="utf-8")
    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert figures["held_out"]["math"]["bits_per_byte"]["1024"] <= 1.20
    if name == "tiny":
        assert all(chosen["agreement"][domain] >= 0.78 for domain, chosen in figures["skip_half"].items())
    else:
        assert all(exits["6"] >= 0.60 for exits in figures["exit_agreement"].values())
    for domain in figures["held_out"].values():
        assert f"{domain['bits_per_byte']['1024']:.3f}" in card


@pytest.mark.parametrize("name", WHOLE)
def test_the_samples_continue_prompts_of_ours(name: str) -> None:
    folder = bundled_models()[name]
    card = (folder / "README.md").read_text(encoding="utf-8")
    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    writer = engine(name)
    assert set(figures["samples"]) == set(figures["held_out_form"]) == set(PROMPTS)
    for domain, samples in figures["samples"].items():
        assert [sample["prompt"] for sample in samples] == list(PROMPTS[domain][: len(samples)])
        assert f"{samples[0]['prompt']}>>>{samples[0]['completion']}\n" in card
        assert samples[0]["completion"].startswith(writer.generate(samples[0]["prompt"], max_new_tokens=8).text)
    for form in figures["held_out_form"].values():
        assert form["well_formed"] >= form["documents"] / 2
        assert f"{form['well_formed']} of {form['documents']}" in card


@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny-early-exit", marks=pytest.mark.slow)])
def test_every_method_writes_the_plain_text(name: str) -> None:
    written = engine(name).generate([texts[0] for texts in PROMPTS.values()], max_new_tokens=24)
    expected = dict(zip(PROMPTS, written, strict=True))
    methods = [name for name in METHODS if name not in ("mtp", "sparse")]  # they need a head, and a long text
    for method, domain in zip(methods, itertools.cycle(PROMPTS), strict=False):
        settings = {"recent_tokens": 4} if method == "knapspec" else {}  # so that short outputs have a draft
        result = engine(name, method, **settings).generate(PROMPTS[domain][0], max_new_tokens=24)
        assert result.token_ids == expected[domain].token_ids, method
        assert method == "autoregressive" or result.drafted > 0, method


def test_a_head_is_beside_its_model() -> None:
    """``tiny-mtp`` is ``tiny`` and a head, whose card has the measured figures."""
    index = json.loads((TINY_MTP / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert {(TINY_MTP / file).resolve() for file in index.values()} == {
        TINY / "model.safetensors",
        TINY_MTP / "mtp.safetensors",
    }
    assert sum(file.stat().st_size for file in TINY_MTP.iterdir()) < 4 * 2**20
    assert (TINY_MTP / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
    card = (TINY_MTP / "README.md").read_text(encoding="utf-8")
    figures = json.loads((TINY_MTP / "evaluation.json").read_text(encoding="utf-8"))
    for shares in figures.values():
        assert min(shares) > 0.5
        assert all(f"{share:.3f}" in card for share in shares)


@pytest.mark.parametrize("domain", list(PROMPTS))
def test_a_head_drafts_well(domain: str) -> None:
    prompts = PROMPTS[domain][:4]
    results = engine(str(TINY_MTP), "mtp").generate(list(prompts), PARAMS)
    expected = engine("tiny").generate(list(prompts), PARAMS)
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    assert sum(result.accepted for result in results) > 0.6 * sum(result.drafted for result in results)


@pytest.mark.parametrize(("domain", "least"), [("code", 0.5), ("math", 0.6), ("prose", 0.5)])
def test_early_exits_draft_well(domain: str, least: float) -> None:
    drafting = engine("tiny-early-exit", "layerskip", exit_layer=6, draft_length=5)
    results = drafting.generate(list(PROMPTS[domain][:4]), PARAMS)
    assert sum(result.accepted for result in results) > least * sum(result.drafted for result in results)


def test_answers_have_the_form_of_gsm8k() -> None:
    writer = engine("tiny")
    results = writer.generate(list(PROMPTS["math"][:4]), PARAMS, max_new_tokens=120)
    answers = [result.text for result in results]
    assert all(re.search(r"<<[^<>]+=[\d.]+>>", answer) for answer in answers)
    assert any(re.search(r"\n#### -?[\d.,]+\s*$", answer) for answer in answers)  # greedy text may loop instead


def test_code_mostly_parses() -> None:
    writer = engine("tiny")
    prompts, parses = PROMPTS["code"][:4], 0
    results = writer.generate(list(prompts), PARAMS, max_new_tokens=120)
    for prompt, result in zip(prompts, results, strict=True):
        lines = (prompt + result.text).rstrip().splitlines()
        parses += any(_parses("\n".join(lines[: len(lines) - cut])) for cut in range(4))
    assert parses >= 2


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
