"""``sparse``, and ``auto`` on long texts: drafts that see a part of the text, and the text of plain decoding."""

import functools
from typing import Any

import pytest
import torch

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import build, prompt
from selfspec import Engine, SamplingParams
from selfspec.errors import UnsupportedModelError
from selfspec.methods.auto import long_texts
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.method import Auto
from selfspec.planning.allowance import Allowance
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.seen_text import Reach
from selfspec.types import Generation

pytestmark = needs_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SETTINGS = {"latest": 40, "strongest": 64, "joint_confidence": 0.0, "draft_length": 4}
LENGTHS = (400, 170, 290)


@functools.cache
@torch.inference_mode(mode=False)
def model(dtype: torch.dtype) -> Any:
    return random_model(dtype, max_position_embeddings=4096, num_key_value_heads=2)


def engine(dtype: torch.dtype, method: str = "sparse", **options: Any) -> Engine:
    settings = SETTINGS if method == "sparse" else None
    return Engine(model(dtype), method=method, settings=settings, prefix_cache=0, **options)


def drafted(results: list[Generation]) -> tuple[int, int]:
    return sum(each.drafted for each in results), sum(each.accepted for each in results)


@DTYPES
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
@pytest.mark.parametrize("cache_bits", [None, 8])
def test_the_text_is_that_of_plain_decoding(
    cache_bits: int | None, sampling: dict[str, Any], dtype: torch.dtype
) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
    prompts = [prompt(length, length) for length in LENGTHS]
    plain = engine(dtype, "autoregressive", cache_bits=cache_bits)
    expected = [plain.generate(each, params).token_ids for each in prompts]
    own = engine(dtype, cache_bits=cache_bits, max_batch=3)
    together = own.generate(prompts, params)
    alone = [own.generate(each, params) for each in prompts]
    assert [each.token_ids for each in together] == expected
    assert [each.token_ids for each in alone] == expected
    assert drafted(together) == drafted(alone), "a draft depends on those beside it"
    tried, accepted = drafted(alone)
    assert 0 < accepted < tried, "drafts were right, and wrong where they saw too little"


@DTYPES
def test_drafts_at_few_bits_may_see_a_part_too(dtype: torch.dtype) -> None:
    settings = {**SETTINGS, "draft_bits": 8}
    own = Engine(model(dtype), method="sparse", settings=settings)
    result = own.generate(prompt(400), max_new_tokens=40)
    assert result.token_ids == engine(dtype, "autoregressive").generate(prompt(400), max_new_tokens=40).token_ids
    assert result.accepted > 0


@pytest.mark.parametrize("penalty", [1.1, 1.0 + 1e-7])
def test_drafts_whose_tokens_python_chooses_see_the_same(penalty: float) -> None:
    """As where there are penalties. One that changes nothing shows that drafts are those of the kernels."""
    params = SamplingParams(max_new_tokens=40, repetition_penalty=penalty, ignore_eos=True)
    expected = engine(torch.float32, "autoregressive").generate(prompt(400), params)
    result = engine(torch.float32).generate(prompt(400), params)
    assert result.token_ids == expected.token_ids
    assert 0 < result.accepted < result.drafted
    if penalty < 1.1:
        own = engine(torch.float32).generate(prompt(400), max_new_tokens=40, ignore_eos=True)
        assert own.token_ids == result.token_ids
        assert (own.drafted, own.accepted) == (result.drafted, result.accepted)


def test_a_short_text_is_decoded_plainly() -> None:
    result = engine(torch.float32).generate(prompt(50), max_new_tokens=30)
    assert result.drafted == 0
    assert result.token_ids == engine(torch.float32, "autoregressive").generate(prompt(50), max_new_tokens=30).token_ids


def test_a_model_without_native_forwards_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a part of the text need the model's own kernels"):
        Engine(build("llama"), method="sparse", runtime="eager")


@pytest.fixture
def short_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "REACH", Reach(40, 64))


@DTYPES
@pytest.mark.usefixtures("short_reach")
def test_auto_takes_them_on_long_texts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is a good part of a step by the costs; the text is that of plain decoding."""
    monkeypatch.setattr(LiveCosts, "note_kinds", lambda *_: None)
    seen, plan = [], AutoDrafter.plan

    def planned(drafter: AutoDrafter) -> Any:
        draft = plan(drafter)
        seen.append(getattr(draft, "seen", None))
        return draft

    monkeypatch.setattr(AutoDrafter, "plan", planned)
    monkeypatch.setattr(Allowance, "longest", lambda _, step: 100 * step)  # whatever went wrong before
    own = engine(dtype, "auto")
    result = own.generate(prompt(3000), max_new_tokens=200)
    assert result.token_ids == engine(dtype, "autoregressive").generate(prompt(3000), max_new_tokens=200).token_ids
    assert any(each is not None for each in seen)
    layered = [each for each in result.rounds if "104 tokens seen" in str(each.drafted_by)]
    assert sum(each.drafted for each in layered) > 0, "of a random model they are hardly ever right"
    method = own.method
    assert isinstance(method, Auto)
    texts = method._ready.long_texts["greedy"]
    assert texts.of(3000) is texts.of(texts.of(3000).end - 1)
    assert texts.of(3000) is not texts.of(texts.of(3000).end)


@pytest.mark.usefixtures("short_reach")
@pytest.mark.parametrize("count", [1, 2])
def test_auto_takes_them_where_an_answer_becomes_long(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where on other costs count; runs of rounds end there."""
    monkeypatch.setattr(LiveCosts, "note_kinds", lambda *_: None)
    monkeypatch.setattr(long_texts, "_LEAST_SHARE", 0.02)
    changes, follow = list[int](), AutoDrafter.follow_length

    def followed(drafter: AutoDrafter) -> None:
        before = drafter.verify_costs
        follow(drafter)
        if drafter.verify_costs is not before:
            changes.append(drafter._length)

    monkeypatch.setattr(AutoDrafter, "follow_length", followed)
    own = engine(torch.float32, "auto", max_batch=count)
    method = own.method
    assert isinstance(method, Auto)
    texts = method._ready.long_texts["greedy"]
    prompts = [prompt(int(texts.least) - 40 - index, index) for index in range(count)]
    params = SamplingParams(max_new_tokens=int(texts.of(int(texts.least)).end - texts.least) + 100, ignore_eos=True)
    plain = engine(torch.float32, "autoregressive")
    results = own.generate(prompts, params)
    assert [each.token_ids for each in results] == [plain.generate(each, params).token_ids for each in prompts]
    ends = [texts.least, texts.of(int(texts.least)).end]
    assert len(changes) == 2 * count
    assert changes[:count] == pytest.approx([ends[0]] * count, abs=64)
    assert changes[count:] == pytest.approx([ends[1]] * count, abs=64)
    if count == 1:
        layered = [each for each in results[0].rounds if "104 tokens seen" in str(each.drafted_by)]
        assert sum(each.drafted for each in layered) > 0


def test_what_auto_expects_of_a_long_text_rises_with_its_length() -> None:
    target = engine(torch.float32).target
    share = long_texts.attention_share
    assert share(target, 2000) == pytest.approx(2 * share(target, 1000))
    method = engine(torch.float32, "auto").method
    assert isinstance(method, Auto)
    long = method._ready.long_texts["greedy"].of(3000)
    assert long.verify(1) > 1.2 * method._ready.verify(1)
    assert long.verify(32) > long.verify(1)
    assert long.layers.costs(1) < long.verify(1)
