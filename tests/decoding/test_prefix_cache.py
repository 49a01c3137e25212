"""The prefix cache: rows of exactly these tokens, within a limit, and texts that do not change by it."""

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.low_bit_model import random_model
from helpers.models import ROPE_SWITCH, build, prompt
from helpers.runs import RUNS
from selfspec import Engine, Generation
from selfspec.decoding.kept_texts import Scope
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.errors import InvalidParameterError
from selfspec.model.cache import KeyValueCache
from selfspec_lab.testing import verifies_exactly

LAYERS, SLOT = 2, 16
"""Layers, and bytes of a slot: two layers, keys and values, one float32 each."""


def some_target() -> Any:
    return SimpleNamespace(slot_bytes=SLOT, version=1)


def new_cache(capacity: int) -> KeyValueCache:
    return KeyValueCache(LAYERS, 1, capacity, 1, dtype=torch.float32, device=torch.device("cpu"))


def row_of(text: Sequence[int]) -> float:
    """What a slot holds after a text: a function of all its tokens."""
    return zlib.crc32(bytes(text)) / 2**32


def read(text: Sequence[int], cache: KeyValueCache) -> KeyValueCache:
    """A cache of a text, whose committed slots need not be read."""
    for place in range(cache.length, len(text)):
        value = row_of(text[: place + 1])
        rows = torch.tensor([[layer + value, -value] for layer in range(LAYERS)])
        cache.append(rows[:, :, None, None, None])
    return cache


def check(cache: KeyValueCache, text: Sequence[int]) -> None:
    """Every committed slot holds the row of the text up to it."""
    expected = read(text[: cache.length], new_cache(len(text) + 1))
    assert torch.equal(cache.rows(0, cache.length), expected.rows(0, cache.length))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@given(st.lists(st.tuples(TEXT, st.integers(0, 9), st.integers(1, 3)), max_size=25))
def test_the_longest_known_beginning_is_found(texts: list[tuple[list[int], int, int]]) -> None:
    prefixes, stored = PrefixCache(some_target(), 10**6), []
    for text, read_already, grain in texts:
        cache = read(text[: read_already // grain * grain], new_cache(10))
        before = cache.length
        filled = prefixes.fill(cache, text, grain=grain)
        longest = max((common(text, each) for each in stored), default=0) // grain * grain
        assert filled == max(0, longest - before)
        check(cache, text)
        prefixes.store(read(text, cache), text, version=1)
        stored.append(text)
    distinct = {tuple(text[:end]) for text, *_ in texts for end in range(1, len(text) + 1)}
    assert prefixes.bytes == SLOT * len(distinct)


@given(st.integers(0, 12), st.lists(st.tuples(TEXT, st.none() | st.integers(0, 12), st.booleans()), max_size=25))
def test_a_limit_holds_and_what_is_found_is_right(limit: int, texts: list[tuple[list[int], int | None, bool]]) -> None:
    prefixes = PrefixCache(some_target(), limit * SLOT)
    for text, room, shrinks in texts:
        cache = new_cache(10)
        prefixes.fill(cache, text)
        check(cache, text)
        bytes_of_room = None if room is None else room * SLOT
        prefixes.store(read(text, cache), text, version=1, room=bytes_of_room)
        assert prefixes.bytes <= limit * SLOT
        again = new_cache(10)
        prefixes.fill(again, text)
        check(again, text)
        if room is None:
            assert again.length == min(limit, len(text)), "what was stored last is there"
        if shrinks and room is not None:
            prefixes.shrink(room * SLOT)
            assert prefixes.bytes <= room * SLOT
    prefixes.clear()
    assert prefixes.bytes == prefixes.stats.entries == 0


def test_what_was_used_longest_ago_goes_first() -> None:
    prefixes = PrefixCache(some_target(), 10 * SLOT)
    for text in ([0, 1, 1], [0, 2, 2], [0, 3, 3]):
        prefixes.store(read(text, new_cache(4)), text, version=1)
    prefixes.touch([0, 1, 1])
    prefixes.store(read([4] * 5, new_cache(5)), [4] * 5, version=1)
    known = {text[1]: prefixes.fill(new_cache(4), text) for text in ([0, 1, 1], [0, 2, 2], [0, 3, 3])}
    assert known == {1: 3, 2: 1, 3: 3}


def test_keys_of_another_version_or_rope_are_not_found() -> None:
    target, text = some_target(), [1, 2, 3]
    prefixes = PrefixCache(target, 10**6)
    prefixes.store(read(text, new_cache(4)), text, version=1, scope=Scope(long_rope=True))
    assert prefixes.fill(new_cache(4), text) == 0
    assert prefixes.fill(new_cache(4), text, Scope(long_rope=True)) == 3
    target.version = 2
    prefixes.store(read(text, new_cache(4)), text, version=1)
    assert prefixes.fill(new_cache(4), text) == prefixes.fill(new_cache(4), text, Scope(long_rope=True)) == 0
    assert prefixes.bytes == 0


@given(st.lists(st.tuples(TEXT, st.sampled_from(["", "a"]), st.integers(0, 12)), max_size=25))
def test_the_first_in_the_order_is_the_end_of_a_text_used_longest_ago(texts: list[tuple[list[int], str, int]]) -> None:
    """So that nothing has to be searched for it."""
    prefixes = PrefixCache(some_target(), 12 * SLOT)
    for text, salt, limit in texts:
        prefixes.store(read(text, new_cache(10)), text, version=1, scope=Scope(salt))
        prefixes.fill(new_cache(10), text[:4], Scope(salt))
        prefixes.shrink(limit * SLOT)
        order = list(prefixes._order)
        places = {node: place for place, node in enumerate(order)}
        assert [node.used for node in order] == sorted(node.used for node in order)
        assert all(places[child] < places[node] for node in order for child in node.children.values())
        assert {node.parent.scope for node in order if node.parent.scope is not None} == set(prefixes._roots)
        assert sum(len(node.token_ids) for node in order) * SLOT == prefixes.bytes


def test_texts_with_other_salts_are_not_found() -> None:
    prefixes, text = PrefixCache(some_target(), 10**6), [1, 2, 3]
    prefixes.store(read(text, new_cache(4)), text, version=1, scope=Scope("a"))
    assert [prefixes.fill(new_cache(4), text, Scope(salt)) for salt in ("", "a", "b")] == [0, 3, 0]
    prefixes.shrink(0)
    assert not prefixes._roots  # none is left for every salt that was ever used


# With models


def turns(engine: Engine, first: list[int], count: int = 3, tokens: int = 12, **options: Any) -> list[Generation]:
    """The answers of a chat: each prompt is the last one with its answer and some more tokens."""
    results, text = [], list(first)
    for turn in range(count):
        results.append(engine.generate(text, max_new_tokens=tokens, ignore_eos=True, **options))
        text = [*text, *results[-1].token_ids, *prompt(5, turn)]
    return results


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "mixtral", "phi3-longrope"])
@pytest.mark.parametrize("runtime", ["eager", "auto"])
def test_the_turns_of_a_chat_are_read_once(name: str, runtime: str) -> None:
    model, options = build(name), {"method": "uniform", "settings": {"skip_ratio": 0.5, "confidence_threshold": 0.0}}
    with_cache = Engine(model, runtime=runtime, prefix_cache=2**20, **options)
    results = turns(with_cache, prompt(30))
    assert [each.token_ids for each in results] == [
        each.token_ids for each in turns(Engine(model, runtime=runtime, **options), prompt(30))
    ]
    assert [each.cached_prompt_tokens for each in results] == [0, 41, 58]  # all but the last token of each answer
    assert sum(each.accepted for each in results) > 0
    assert with_cache.prefix_cache is not None
    assert with_cache.prefix_cache.stats.hit_tokens == 99
    assert with_cache.prefix_cache.stats.query_tokens == sum(each.prompt_token_count for each in results)


def test_texts_on_both_sides_of_a_rope_switch() -> None:
    engine, plain = (Engine(build("phi3-longrope"), method="suffix", prefix_cache=size) for size in (2**20, 0))
    short, long = prompt(40), [*prompt(40), *prompt(ROPE_SWITCH)]
    for ids, found in ((short, 0), (long, 0), (short, 39), (long, len(long) - 1)):
        result = engine.generate(ids, max_new_tokens=10)
        assert result.token_ids == plain.generate(ids, max_new_tokens=10).token_ids
        assert result.cached_prompt_tokens == found


@pytest.mark.parametrize("method", sorted(RUNS))
def test_every_method_begins_as_without_a_prefix_cache(method: str) -> None:
    """Prompt rows whose states a method needs are read again, so that it drafts the same."""
    settings = RUNS[method][-1].settings
    results, plain = (
        turns(Engine(build("llama"), method=method, settings=settings, prefix_cache=size), prompt(64), tokens=20)
        for size in (2**20, 0)
    )
    assert [each.token_ids for each in results] == [each.token_ids for each in plain]
    if method not in ("clasp", "del", "knapspec", "swift"):  # what they draft depends on times
        assert [each.drafted for each in results] == [each.drafted for each in plain]
    assert results[2].cached_prompt_tokens > 0


def test_sampling_with_a_seed_does_not_depend_on_what_is_known() -> None:
    sampled = {"temperature": 0.9, "seed": 7}
    with_cache, without = (Engine(build("llama"), method="suffix", prefix_cache=size) for size in (2**20, 0))
    assert [each.token_ids for each in turns(with_cache, prompt(20), **sampled)] == [
        each.token_ids for each in turns(without, prompt(20), **sampled)
    ]


def keys_of(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """What an engine's prefix cache holds of a text."""
    assert engine.prefix_cache is not None
    cache = engine.target.new_sequence(len(token_ids), len(token_ids), len(token_ids)).cache
    found = engine.prefix_cache.fill(cache, token_ids)
    return cache.rows(0, found)


def test_bits_are_those_of_reading_where_rows_are_independent() -> None:
    """In bfloat16 in the kernels: rows of drafts and of any chunks are those of one long chunk."""
    if not verifies_exactly(torch.bfloat16):
        pytest.skip("there are no kernels for this many rows on this machine")
    model = random_model(torch.bfloat16)
    engine = Engine(model, method="suffix", prefix_cache=2**20, prefill_chunk=16)
    assert engine.chunks.grain == 1
    results = turns(engine, [token % 100 for token in prompt(50)], tokens=30)
    text = [*(token % 100 for token in prompt(50)), *results[0].token_ids, *prompt(5, 0), *results[1].token_ids]
    assert sum(each.drafted for each in results) > 0
    whole = Engine(model, method="autoregressive", prefix_cache=2**20)
    whole.generate(text, max_new_tokens=1)
    known = keys_of(engine, text)
    assert known.shape[3] >= len(text) - 1
    assert torch.equal(known, keys_of(whole, text)[:, :, :, : known.shape[3]])


def test_whole_chunks_are_reused_where_rows_depend_on_each_other() -> None:
    model = random_model(torch.bfloat16)
    engine = Engine(model, method="suffix", prefix_cache=2**20, prefill_chunk=16, runtime="eager")
    assert engine.chunks.grain == 16
    results = turns(engine, [token % 100 for token in prompt(50)], tokens=10)
    assert [each.cached_prompt_tokens for each in results] == [0, 48, 64]  # of the prompts, but not of the answers
    plain = turns(
        Engine(model, method="suffix", prefill_chunk=16, runtime="eager"),
        [token % 100 for token in prompt(50)],
        tokens=10,
    )
    assert [each.token_ids for each in results] == [each.token_ids for each in plain]


def test_another_model_in_the_same_modules_is_read_anew() -> None:
    model = type(build("llama"))(build("llama").config).eval()
    model.load_state_dict(build("llama").state_dict())
    engine = Engine(model, method="suffix", prefix_cache=2**20)
    engine.generate(prompt(20), max_new_tokens=5)
    with torch.no_grad():
        projection = model.model.layers[0].self_attn.o_proj
        projection.weight = torch.nn.Parameter(torch.zeros_like(projection.weight))
    result = engine.generate(prompt(20), max_new_tokens=5)
    assert result.cached_prompt_tokens == 0
    assert result.token_ids == Engine(model, method="autoregressive").generate(prompt(20), max_new_tokens=5).token_ids


def test_a_prefix_cache_belongs_to_a_model() -> None:
    first = Engine(build("llama"), method="suffix", prefix_cache=2**20)
    with pytest.raises(InvalidParameterError, match="of another model"):
        Engine(build("llama"), prefix_cache=first.prefix_cache)
    with pytest.raises(InvalidParameterError, match="at least 0"):
        Engine(build("llama"), prefix_cache=-1)
    second = Engine(
        build("llama"), method=type(first.method)(first.target, first.method.settings), prefix_cache=first.prefix_cache
    )
    first.generate(prompt(20), max_new_tokens=2)
    assert second.generate(prompt(20), max_new_tokens=2).cached_prompt_tokens == 19
