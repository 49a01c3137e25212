"""Memory of what has ended, and of the prefix cache, goes in parts: no step gives back more than one."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import build_with_large_cache, prompt
from selfspec.decoding import prefix_cache
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.memory import release_freed_memory
from selfspec.methods import make_method
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy

MIB = 2**20
PART = 4 * MIB
TARGET = Target(build_with_large_cache())
PLAIN = make_method("autoregressive", TARGET)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PART_BYTES", PART)


@pytest.fixture
def nothing_else_is_freed() -> Iterator[None]:
    """Nothing of earlier tests is freed meanwhile, by the collector or at the heap's end: it would count for a step."""
    release_freed_memory()
    gc.disable()
    yield
    gc.enable()


def request(prompt_ids: list[int], new_tokens: int, most: int = 1024) -> Request:
    output = Output(max_new_tokens=new_tokens)
    return Request(prompt_ids, new_tokens, Greedy(), Stepwise(most), output, method=PLAIN)


def scheduler_of(limit: int | None = None) -> tuple[Scheduler, PrefixCache | None]:
    prefixes = None if limit is None else PrefixCache(TARGET, limit)
    memory = CacheMemory(TARGET, 1, limit, prefixes)
    return Scheduler(TARGET, chunks=Chunks(256, 1), max_batch=4, memory=memory), prefixes


def resident() -> int:
    """Bytes of memory that this process has now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


class Stepwise(ScoreProcessor):
    """Makes every token a step of its own, and fails after a number of tokens."""

    def __init__(self, most: int = 1024) -> None:
        super().__init__()
        self.most, self.keeps_scores, self.temperature = most, False, None

    def __call__(self, logits: Any, contexts: Any) -> torch.Tensor:
        if contexts(0).shape[1] > self.most:
            raise ValueError("no further")
        return super().__call__(logits, contexts)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take memory back as a whole")
@pytest.mark.usefixtures("nothing_else_is_freed")
@pytest.mark.parametrize("ends", ["finished", "cancelled", "failed"])
def test_no_step_gives_back_more_than_a_part(ends: str) -> None:
    scheduler, _ = scheduler_of()
    other = request(prompt(4, 1), 900)
    long = request(prompt(600), 8 if ends == "finished" else 300, most=605 if ends == "failed" else 1024)
    for each in (other, long):
        scheduler.add(each)
    while len(long.output.token_ids) < 4:
        scheduler.step()
    if ends == "cancelled":
        scheduler.cancel(long)
    taken = lowest = resident()
    assert scheduler.busy
    while not long.ended or scheduler.leaving:
        tokens = len(other.output.token_ids)
        scheduler.step()
        before, lowest = lowest, resident()
        assert before - lowest < 2.5 * PART
        assert len(other.output.token_ids) == tokens + 1, "the other one goes on"
    assert taken - lowest > 8 * PART
    assert scheduler.held == other.first_bytes(TARGET)
    assert (long.error is not None) == (ends == "failed")
    assert not other.ended


def test_the_prefix_cache_gives_way_in_parts() -> None:
    """While others write; its oldest texts go first, and never that with which the new request begins."""
    limit = 1000 * TARGET.slot_bytes
    scheduler, prefixes = scheduler_of(limit)
    assert prefixes is not None
    for seed in range(8):
        scheduler.add(request(prompt(90, seed), 2))
        while scheduler.busy:
            scheduler.step()
    other, long = request(prompt(4, 9), 60), request([*prompt(90, 0), *prompt(500, 10)], 2)
    scheduler.add(other)
    while not other.output.token_ids:
        scheduler.step()
    scheduler.add(long)
    text = 91 * TARGET.slot_bytes
    held, dropped = [prefixes.bytes], 0
    while long.started_at is None:
        tokens = len(other.output.token_ids)
        scheduler.step()
        held.append(prefixes.bytes)
        dropped += held[-1] < held[-2]
        assert held[-2] - held[-1] <= PART + text
        assert len(other.output.token_ids) == tokens + 1
    assert dropped > 1
    assert scheduler.held + prefixes.bytes <= limit
    while not long.output.token_ids:
        scheduler.step()
    assert long.cached_tokens == 90


def test_where_nothing_is_written_room_is_made_at_once() -> None:
    scheduler, prefixes = scheduler_of(1000 * TARGET.slot_bytes)
    assert prefixes is not None
    for seed in range(8):
        scheduler.add(request(prompt(90, seed), 2))
        while scheduler.busy:
            scheduler.step()
    long = request(prompt(590, 10), 2)
    scheduler.add(long)
    scheduler.step()
    assert long.started_at is not None
