"""bfloat16: text differs from plain only where the target cannot tell its two best tokens apart; in kernels nowhere."""

import copy
import functools

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import FAMILY_NAMES, SUBLAYERS, build, prompt
from selfspec.engine import Engine
from selfspec.loading import load_model
from selfspec.methods import METHODS as METHODS_BY_NAME
from selfspec.methods import make_method
from selfspec.runtimes.kernels import row_limit
from selfspec.runtimes.target import Target
from selfspec_lab.bench.suites.mini import MINI
from selfspec_lab.prompts import PROMPTS as PROMPTS_BY_DOMAIN

MOST_VERIFIED = 100
"""No method verifies more rows at its defaults."""
NEW_TOKENS = 32
PROMPTS = ((5, 1), (80, 3))
METHODS = {
    "uniform": {"skip_ratio": 0.5, "draft_length": 5, "confidence_threshold": 0.0},
    "layerskip": {"exit_layer": 3, "draft_length": 7},
}


EARLY_EXITS = ("autoregressive", "layerskip", "layerskip-fs", "layerskip-dv", "del")
"""What is tried on the checkpoint that is trained for it."""


@functools.cache
def in_bfloat16(name: str) -> PreTrainedModel:
    return copy.deepcopy(build(name)).to(torch.bfloat16)


@torch.inference_mode()
def target_logits(target: Target, token_ids: list[int], rows: int) -> torch.Tensor:
    """The target's logits of every position, float32 ``[length, vocab]``, computed ``rows`` at a time."""
    length = len(token_ids)
    state = target.new_sequence(length, capacity=length, last_length=length)
    logits = []
    for start in range(0, length, rows):
        chunk = torch.tensor(token_ids[start : start + rows])
        step = target.lay_out(state, len(chunk))
        logits.append(target.logits(target.run(target.embed(chunk), range(SUBLAYERS), step).hidden_states).float())
        state.cache.commit(range(len(chunk)))
    return torch.cat(logits)


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def largest_noise(name: str) -> float:
    """As a share of the logits' spread; where rounding can choose another expert, it moves them much further."""
    return 1.0 if "num_experts_per_tok" in build(name).config.to_dict() else 0.1


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_bfloat16_text_differs_only_within_rounding_noise(name: str) -> None:
    model = in_bfloat16(name)
    target = Target(model)
    for length, seed in PROMPTS:
        prompt_ids = prompt(length, seed)
        plain = Engine(model, method="autoregressive").generate(prompt_ids, max_new_tokens=NEW_TOKENS).token_ids
        token_ids = [*prompt_ids, *plain]
        one_row, several = target_logits(target, token_ids, rows=1), target_logits(target, token_ids, rows=8)
        # Two logits move by the noise, and each in its own direction.
        noise = 2 * float((one_row - several).abs().max())
        assert noise < largest_noise(name) * float(one_row.std()), "this much is no rounding"
        for method, settings in METHODS.items():
            result = Engine(model, method=method, settings=settings).generate(prompt_ids, max_new_tokens=NEW_TOKENS)
            assert result.accepted > 0
            where = first_difference(plain, result.token_ids)
            if where is None:
                continue
            logits = one_row[length + where - 1]
            gap = float(logits[plain[where]] - logits[result.token_ids[where]])
            assert gap <= noise, f"{method}, prompt of {length}, token {where}: gap {gap:.3g}, noise {noise:.3g}"


@pytest.mark.trained
@pytest.mark.parametrize("checkpoint", ["tiny", pytest.param("tiny-early-exit", marks=pytest.mark.slow)])
def test_bfloat16_text_is_exactly_plain_where_kernels_verify(checkpoint: str) -> None:
    """A row's result does not depend on the others then, so that a verification is as exact as single steps."""
    model, tokenizer = load_model(checkpoint, dtype="bfloat16", device="cpu")
    target = Target(model)
    if target.independent_rows == 0 or row_limit(torch.bfloat16, attends=True) < MOST_VERIFIED:
        pytest.skip("there are no kernels for this many rows on this machine")
    prompts = [PROMPTS_BY_DOMAIN["math"][0], MINI["prose"][0]]  # the second one is longer than any verification
    assert len(tokenizer(prompts[1])["input_ids"]) > 128
    plain = Engine(model, tokenizer, make_method("autoregressive", target))
    wanted = [plain.generate(text, max_new_tokens=NEW_TOKENS).token_ids for text in prompts]
    for name in (
        (each for each in METHODS_BY_NAME if each not in ("mtp", "sparse")) if checkpoint == "tiny" else EARLY_EXITS
    ):
        settings = {"exit_layer": 6} if name.startswith("layerskip") else {}
        settings |= {"recent_tokens": 4} if name == "knapspec" else {}  # so that short outputs have a draft
        engine = Engine(model, tokenizer, make_method(name, target, settings))
        results = [engine.generate(text, max_new_tokens=NEW_TOKENS) for text in prompts]
        assert [result.token_ids for result in results] == wanted, name
        assert name == "autoregressive" or sum(result.drafted for result in results) > 0


@pytest.mark.parametrize("name", ["llama", "olmo2", "gemma3"])
def test_bfloat16_logits_are_those_of_transformers_but_for_rounding(name: str) -> None:
    model, token_ids = in_bfloat16(name), prompt(60)
    with torch.inference_mode():
        wanted = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
        exact = build(name)(torch.tensor([token_ids]), use_cache=False).logits[0]
    logits = target_logits(Target(model), token_ids, rows=60)
    rounding = (wanted - exact).abs().mean()
    assert (logits - wanted).abs().mean() <= 0.5 * rounding
    assert 0 < rounding < 0.1 * exact.std()


def test_a_cache_has_the_models_dtype() -> None:
    target = Target(in_bfloat16("llama"))
    cache = target.new_sequence(3, capacity=3, last_length=3).cache
    assert {tensor.dtype for tensor in (*cache.keys, *cache.values)} == {torch.bfloat16}
