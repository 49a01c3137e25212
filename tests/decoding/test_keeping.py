"""What ends is kept in parts: no step copies more than one, and what was kept is used as if it had come at once."""

import asyncio
from typing import Any

import pytest
import torch

from helpers.models import build, plain_text, prompt
from selfspec import AsyncEngine, Engine
from selfspec.decoding import prefix_cache
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.methods import make_method
from selfspec.model.cache import KeyValueCache
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy

TARGET = Target(build("llama"))
PLAIN = make_method("autoregressive", TARGET)
CHUNK, PART = 16, 8
"""Tokens of a chunk of a prompt, and of a part that is copied at a time."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PART_BYTES", PART * TARGET.slot_bytes)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many tokens are copied out of the caches of requests."""
    counts: list[int] = []
    rows = KeyValueCache.rows

    def counted(cache: KeyValueCache, start: int, count: int) -> torch.Tensor:
        counts.append(count)
        return rows(cache, start, count)

    monkeypatch.setattr(KeyValueCache, "rows", counted)
    return counts


def request(prompt_ids: list[int], new_tokens: int) -> Request:
    return Request(prompt_ids, new_tokens, Greedy(), ScoreProcessor(), Output(max_new_tokens=new_tokens), method=PLAIN)


def scheduler_with(limit: int | None = None) -> tuple[Scheduler, PrefixCache]:
    prefixes = PrefixCache(TARGET, 2**20 if limit is None else limit)
    memory = CacheMemory(TARGET, 1, limit, prefixes)
    return Scheduler(TARGET, chunks=Chunks(CHUNK, 1), max_batch=4, memory=memory), prefixes


def written(each: Request) -> list[int]:
    """The tokens of a request whose keys and values are known."""
    return [*each.prompt_ids, *each.output.token_ids][: len(each.prompt_ids) + len(each.output.token_ids) - 1]


def begun(scheduler: Scheduler, *requests: Request) -> None:
    """Steps until the prompts are read."""
    for each in requests:
        scheduler.add(each)
    while not all(each.output.token_ids for each in requests):
        scheduler.step()


@pytest.mark.parametrize("ends", ["finished", "cancelled", "dropped meanwhile"])
def test_no_step_copies_more_than_a_part(copied: list[int], ends: str) -> None:
    """Also where others took the place of the prompt, so that all of it is copied again."""
    scheduler, prefixes = scheduler_with()
    other, long = request(prompt(4, 1), 60), request(prompt(50), 400 if ends == "cancelled" else 30)
    begun(scheduler, other, long)
    while len(long.output.token_ids) < 20:
        scheduler.step()
    if ends == "dropped meanwhile":
        prefixes.clear()
    if ends == "cancelled":
        scheduler.cancel(long)
        assert scheduler.busy
    while not long.ended or scheduler.leaving:
        copied.clear()
        tokens = len(other.output.token_ids)
        scheduler.step()
        assert sum(copied) <= PART
        assert len(other.output.token_ids) == tokens + 1, "the other one goes on"
    assert not other.ended
    text = written(long)
    assert prefixes.known(text) == len(text)
    copied.clear()
    again = request([*text, 3, 1, 2], 5)
    begun(scheduler, again)
    assert again.cached_tokens == len(text)
    while scheduler.busy:
        scheduler.step()
    assert tuple(again.output.token_ids) == plain_text("llama", [*text, 3, 1, 2], 5)
    assert tuple(other.output.token_ids) == plain_text("llama", prompt(4, 1), 60)


def test_short_outputs_that_end_together_are_kept_together() -> None:
    scheduler, prefixes = scheduler_with()
    other, short = request(prompt(4, 1), 60), [request(prompt(20, seed), 3) for seed in (2, 3, 4)]
    begun(scheduler, other, *short)
    while not all(each.ended for each in short):
        scheduler.step()
    scheduler.step()
    assert not scheduler.leaving
    assert all(prefixes.known(written(each)) == len(written(each)) for each in short)


def test_nobody_waits_where_nothing_is_written(copied: list[int]) -> None:
    scheduler, prefixes = scheduler_with()
    long = request(prompt(50), 30)
    begun(scheduler, long)
    while not long.ended:
        scheduler.step()
    scheduler.step()
    assert not scheduler.busy
    assert max(copied) <= CHUNK
    assert prefixes.known(written(long)) == len(written(long))


def test_memory_of_what_is_being_kept_is_given_to_nobody() -> None:
    """It is taken until the last part of it is kept, and no more is kept than there is room for."""
    limit = request(prompt(50), 30).bytes(TARGET) + request(prompt(4, 1), 60).bytes(TARGET)
    scheduler, prefixes = scheduler_with(limit)
    other, long, next_ = request(prompt(4, 1), 60), request(prompt(50), 30), request(prompt(50, 2), 30)
    begun(scheduler, other, long)
    scheduler.add(next_)
    seen = 0
    while next_.started_at is None:
        scheduler.step()
        seen += scheduler.leaving
        assert not scheduler.leaving or next_.started_at is None
        assert scheduler.held + prefixes.bytes <= limit
    assert seen > 2
    while scheduler.busy:
        scheduler.step()
        assert scheduler.held + prefixes.bytes <= limit
    assert tuple(next_.output.token_ids) == plain_text("llama", prompt(50, 2), 30)


def test_what_cannot_be_kept_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, prefixes = scheduler_with()
    other, short = request(prompt(4, 1), 60), request(prompt(20, 2), 3)
    begun(scheduler, other, short)
    while not short.ended:
        scheduler.step()

    def fail(*_: Any, **__: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(prefixes, "store", fail)
    scheduler.step()
    assert not scheduler.leaving
    while scheduler.busy:
        scheduler.step()
    assert tuple(other.output.token_ids) == plain_text("llama", prompt(4, 1), 60)


@pytest.mark.parametrize("drain", [True, False])
def test_a_closed_engine_has_kept_what_was_finished(drain: bool) -> None:
    """Also where another stream kept it from being kept at once."""
    engine = Engine(build("llama"), method="autoregressive", prefix_cache=2**20)

    async def scenario() -> list[int]:
        served = AsyncEngine(engine)
        served.start()
        other = served.submit(prompt(4, 1), max_new_tokens=900 if not drain else 90, ignore_eos=True)
        await anext(other)
        result = await served.generate(prompt(50), max_new_tokens=30, ignore_eos=True)
        await served.close(drain=drain)
        return [*prompt(50), *result.token_ids][:-1]

    text = asyncio.run(scenario())
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.known(text) == len(text)
