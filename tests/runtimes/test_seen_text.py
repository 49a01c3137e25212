"""Drafts that see a part of a text: what the kernels attend to, what verifications note, which blocks are chosen."""

import functools
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers.kernels import needs_kernels
from helpers.models import build
from selfspec.model.forward import SequenceState
from selfspec.runtimes.chain import DraftRequest, VerifyRequest
from selfspec.runtimes.formats import SEEN
from selfspec.runtimes.seen_text import AttentionShares, Reach, SeenText
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

LENGTH, LAYERS, KEY_HEADS, GROUP, VOCABULARY = 430, 3, 2, 3, 64
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@functools.cache
@torch.inference_mode(mode=False)
def target(dtype: torch.dtype, cache_bits: int | None = None) -> Target:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=KEY_HEADS * GROUP,
        num_key_value_heads=KEY_HEADS,
        head_dim=32,
        max_position_embeddings=1024,
        attn_implementation="eager",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "embed" in name:
                parameter.mul_(12)  # attention that differs from slot to slot
    return Target(model, "compiled", cache_bits=cache_bits)


def tokens(count: int = LENGTH) -> torch.Tensor:
    draw = random.Random(4)
    return torch.tensor([draw.randrange(VOCABULARY) for _ in range(count)])


@torch.inference_mode()
def read(own: Target, capacity: int = LENGTH + 20) -> SequenceState:
    """A sequence whose text is read."""
    state = own.new_sequence(LENGTH, capacity=capacity, last_length=capacity)
    every = range(own.sublayer_count)
    own.run(own.embed(tokens(), own.lay_out(state, LENGTH)), every, own.lay_out(state, LENGTH))
    state.cache.commit(range(LENGTH))
    return state


def compact(own: Target, state: SequenceState, seen: SeenText) -> SequenceState:
    """A sequence that has nothing but what is seen, head by head."""
    count = seen.blocks.shape[-1]
    small = own.new_sequence(LENGTH, capacity=LENGTH + 20, last_length=LENGTH + 20)
    for ours, theirs in ((small.cache.keys, state.cache.keys), (small.cache.values, state.cache.values)):
        for layer in range(LAYERS):
            for head in range(KEY_HEADS):
                places = [SEEN * int(block) + slot for block in seen.blocks[layer, head] for slot in range(SEEN)]
                places += range(seen.latest, LENGTH)
                ours[layer][0, head, : len(places)] = theirs[layer][0, head, places]
    small.cache.length = count * SEEN + LENGTH - seen.latest
    return small


@DTYPES
@pytest.mark.parametrize("cache_bits", [None, 8])
@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_a_draft_attends_to_what_is_seen_and_to_nothing_else(
    count: int, cache_bits: int | None, dtype: torch.dtype
) -> None:
    """Bit for bit as over a cache that has nothing else, with rows at the positions that they have in the text."""
    own = target(dtype, cache_bits)
    draw = random.Random(count)
    latest = 6 * SEEN
    chosen = [[sorted(draw.sample(range(6), count)) for _ in range(KEY_HEADS)] for _ in range(LAYERS)]
    seen = SeenText(torch.tensor(chosen), latest)
    state, every = read(own), tuple(range(own.sublayer_count))
    small = compact(own, state, seen)
    pending, limit = tokens()[-1:], 6
    drafted = own.at(None).draft([DraftRequest(state, pending, every, limit, seen=seen)])[0]
    whole = own.at(None).draft([DraftRequest(state, pending, every, limit)])[0]
    token = pending
    for step in range(limit):
        start = small.cache.length
        layout = own.lay_out(
            small, 1, start=start, depths=[LENGTH + step - start], visible=torch.ones(1, 1, dtype=torch.bool)
        )
        output = own.run(own.embed(token, layout), every, layout, logits=True, confidence=True)
        assert output.logits is not None
        token = output.logits.best
        assert int(token) == int(drafted.token_ids[step])
        assert float(output.logits.confidence[0]) == drafted.numbers[step][0]
        small.cache.commit(range(1))
    assert [each[0] for each in whole.numbers] != [each[0] for each in drafted.numbers], "it saw all of the text"


@DTYPES
@torch.inference_mode()
def test_a_verification_notes_how_its_first_row_attends(dtype: torch.dtype) -> None:
    """As the attention weights of transformers' own modules; the next one counts as much as all before it."""
    own, state = target(dtype), read(target(dtype))
    shares = own.attention_shares(state.cache.capacity)
    assert shares is not None
    assert not shares.noted
    assert shares.strongest(LENGTH, Reach(64, 64)) is None, "nothing was noted"
    ids = torch.cat([tokens(), torch.tensor([5, 9])])
    wanted = torch.zeros_like(shares.values)
    for _ in range(2):
        own.at(None).verify([VerifyRequest(state, ids[-2:], shares=shares)], native=True)
        weights: Any = own.model(ids[None, : LENGTH + 1], output_attentions=True).attentions
        for layer, each in enumerate(weights):
            rows = torch.nn.functional.pad(each[0, :, -1].float(), (0, SEEN * shares.values.shape[-1] - LENGTH - 1))
            wanted[layer] = 0.5 * (wanted[layer] + rows.unflatten(-1, (-1, SEEN)).sum(-1))
    assert shares.noted
    assert wanted.std(dim=-1).mean() > 0.01, "attention is even"
    torch.testing.assert_close(shares.values, wanted, atol=1e-4 if dtype == torch.float32 else 0.03, rtol=0.0)


def test_the_strongest_blocks_of_each_key_head_are_seen() -> None:
    shares = AttentionShares(LAYERS, KEY_HEADS * GROUP, KEY_HEADS, 1000)
    generator = torch.Generator().manual_seed(3)
    shares.values.copy_(torch.rand(shares.values.shape, generator=generator))
    seen = shares.strongest(1000, Reach(latest=100, strongest=4 * SEEN))
    assert seen is not None
    blocks = (1000 - 100) // SEEN
    assert seen.latest == blocks * SEEN
    assert (seen.structure.count, seen.structure.key_heads, seen.structure.latest) == (4, KEY_HEADS, seen.latest)
    for layer in range(LAYERS):
        for head in range(KEY_HEADS):
            own = shares.values[layer, head * GROUP : (head + 1) * GROUP, :blocks].sum(0).tolist()
            best = sorted(range(1, blocks), key=lambda block: -own[block])[:3]
            assert seen.blocks[layer, head].tolist() == sorted([0, *best]), "the first block is always seen"


@pytest.mark.parametrize(("length", "sees_all"), [(100, True), (100 + 4 * SEEN, True), (100 + 5 * SEEN, False)])
def test_where_all_of_a_text_is_seen_nothing_is_chosen(length: int, sees_all: bool) -> None:
    shares = AttentionShares(LAYERS, KEY_HEADS * GROUP, KEY_HEADS, 1000)
    shares.values += 1.0
    assert (shares.strongest(length, Reach(100, 4 * SEEN)) is None) == sees_all


@pytest.mark.parametrize(("variant", "runtime"), [("llama", "eager"), ("llama", "fused")])
def test_without_native_forwards_there_are_none(variant: str, runtime: str) -> None:
    assert Target(build(variant), runtime).attention_shares(100) is None
