"""Memory of drafting, counted tensor by tensor: at most 2 % over plain decoding, no copy of the cache in a round."""

import functools
import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers.allocations import AllocationCounter
from helpers.clock import Always
from helpers.models import SUBLAYERS, VOCABULARY, build, prompt
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from helpers.scripted import Scripted
from selfspec.decoding.draft import LayerDraft
from selfspec.decoding.drafter import Needs
from selfspec.engine import Engine
from selfspec.methods.base import Method
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

PROMPT_LENGTH, NEW_TOKENS, CHUNK = 900, 16, 64


@functools.cache
def count(name: str, method: str | Method) -> tuple[int, int]:
    """Peak of a whole request, and the largest allocation of its rounds, in bytes."""
    settings = SMALL_SETTINGS.get(method) if isinstance(method, str) else None
    return count_engine(Engine(build(name), method=method, settings=settings, prefill_chunk=CHUNK), PROMPT_LENGTH)


def count_engine(engine: Engine, prompt_length: int, new_tokens: int = NEW_TOKENS) -> tuple[int, int]:
    if hasattr(engine.method, "payoff"):
        engine.method.payoff = Always()  # with all selections of the paper's schedule
    engine.generate(prompt(4), max_new_tokens=4)  # what is made once, like a latency profile, is made here
    gc.collect()
    with AllocationCounter() as counter:
        stream = engine.stream(prompt(prompt_length), max_new_tokens=new_tokens)
        next(stream)
        counter.restart()
        result = stream.result
    if engine.method.name == "knapspec":
        assert engine.method.last_choice is not None, "it has not selected"  # what it finds is that nothing pays
    else:
        assert result.drafted > 0 or engine.method.name in ("autoregressive", "del")
    return counter.peak, counter.largest


def weight_bytes(name: str) -> int:
    return sum(parameter.nbytes for parameter in build(name).parameters())


def cache_bytes(name: str) -> int:
    target = Target(build(name))
    length = PROMPT_LENGTH + NEW_TOKENS
    return target.new_sequence(PROMPT_LENGTH, capacity=length, last_length=length).cache.size_in_bytes


def test_the_counter_counts() -> None:
    with AllocationCounter() as counter:
        kept = torch.zeros(1000)
        view = kept[10:].view(-1, 10)
        kept.add_(1)
        del view
        for _ in range(3):
            dropped = torch.ones(500)
            del dropped
    assert (counter.peak, counter.largest) == (6000, 4000)


SMALL_SETTINGS = {
    "knapspec": {"recent_tokens": 2},
    "token-recycling": {"tree_size": 16},
}
"""Settings under which the states and logits of a method are small even beside a tiny model's cache."""

MODELS = ["llama-ungrouped", "mistral-window", "mixtral"]
UNGROUPED = "llama-ungrouped"
"""Where several query heads share a key head, transformers repeats a layer's keys in every step, plain or drafted."""


@pytest.mark.parametrize("name", MODELS)
def test_drafting_takes_two_percent_more_than_plain_decoding_at_most(name: str) -> None:
    weights, (plain, _) = weight_bytes(name), count(name, "autoregressive")
    assert plain > cache_bytes(name), "the cache was not counted"
    for method in ("uniform", "layerskip", "layerskip-fs", "layerskip-dv"):
        peak, _ = count(name, method)
        assert weights + peak <= 1.02 * (weights + plain), f"{method}: {peak:,} against {plain:,} bytes"


@functools.cache
def wide_model() -> PreTrainedModel:
    """Random weights in about the proportions of a model in use: a layer's weights outweigh any states or slots."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:  # branches that write little, so that drafts are worth their time
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    return model


LATE = ("clasp", "knapspec", "swift")
"""Methods whose first or second selection comes after some 32 output tokens."""


@functools.cache
def peak_of_wide_model(method: str, new_tokens: int) -> int:
    """Weights and all that a request has alive at once, in bytes; the prefill's rows are as many as a selection's."""
    weights = sum(parameter.nbytes for parameter in wide_model().parameters())
    return weights + count_engine(Engine(wide_model(), method=method), 256, new_tokens)[0]


FIRST = ("clasp", "layerskip", "swift", "suffix")
"""Methods that together allocate in every way there is."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in METHODS]
)
def test_every_method_takes_two_percent_more_than_plain_decoding_at_most(method: str) -> None:
    new_tokens = 48 if method in LATE else 16
    peak, plain = peak_of_wide_model(method, new_tokens), peak_of_wide_model("autoregressive", new_tokens)
    assert peak <= 1.02 * plain, f"{method}: {peak:,} against {plain:,} bytes, {peak / plain - 1:.1%} more"


@pytest.mark.parametrize("method", METHODS)
def test_a_round_allocates_nothing_like_the_cache(method: str) -> None:
    """No clone, no concatenation: the largest tensor of a round is a small part of even one layer's keys."""
    layer_keys = cache_bytes(UNGROUPED) // SUBLAYERS
    _, largest = count(UNGROUPED, method)
    assert largest < layer_keys / 4, f"{largest:,} bytes at once, a layer's keys are {layer_keys:,}"


def test_a_tree_is_kept_by_moving_its_rows_only() -> None:
    target = Target(build(UNGROUPED))
    draft = LayerDraft(KeptSet.early_exit(2, SUBLAYERS), 4, widths=lambda _: 3)
    method = Scripted(target, lambda _: draft, Needs(sibling_rows=8))
    _, largest = count(UNGROUPED, method)
    moved = [rows for feedback in method.feedbacks if (rows := feedback.acceptance.rows)[-1] >= len(rows)]
    assert moved, "no tree path had to be gathered"
    assert largest < cache_bytes(UNGROUPED) // SUBLAYERS / 4
