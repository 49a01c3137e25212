"""Requests hold memory as their outputs grow: more of them fit, each comes to its end, and the limit always holds."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import VOCABULARY, build, build_with_large_cache, prompt
from selfspec import Engine
from selfspec.decoding.growth import grow, room_beside
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.methods import make_method
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy

TARGET = Target(build_with_large_cache())
PLAIN = make_method("autoregressive", TARGET)


@dataclass(eq=False)
class Growing:
    """A sequence that needs ``step`` more bytes for each round, and ends when it has had ``end``."""

    bytes: int
    most_bytes: int
    step: int
    end: int

    @property
    def growth(self) -> int:
        return min(self.step, self.most_bytes - self.bytes)


@given(st.integers(0, 10**6))
def test_all_come_to_their_ends_within_the_limit(seed: int) -> None:
    draw = random.Random(seed)
    limit = draw.randint(20, 200)
    waiting: list[Any] = []
    for _ in range(draw.randint(1, 12)):
        most = draw.randint(1, limit)
        end = draw.randint(1, most)
        waiting.append(Growing(min(draw.randint(1, 8), end), most, draw.randint(1, 9), end))
    would_fit = sum(each.most_bytes for each in waiting) <= limit
    running: list[Any] = []
    while waiting or running:
        while waiting and waiting[0].bytes <= room_beside(running, limit):
            running.append(waiting.pop(0))
        assert running, "the first of those that wait fits alone"
        going = grow(running, limit)
        assert sum(each.bytes for each in running) <= limit
        assert going[0] is running[0], "the one that was admitted first never waits"
        assert not would_fit or (going == running and not waiting), "where there is room for all, none waits"
        if draw.random() < 0.1:
            running.remove(draw.choice(running))  # cancelled
        running = [each for each in running if not (each in going and each.bytes >= each.end)]


def request(prompt_ids: list[int], new_tokens: int, stop_ids: frozenset[int] = frozenset()) -> Request:
    output = Output(max_new_tokens=new_tokens, stop_ids=stop_ids)
    return Request(prompt_ids, new_tokens, Greedy(), ScoreProcessor(), output, method=PLAIN)


def scheduler_of(limit: int) -> tuple[Scheduler, PrefixCache]:
    prefixes = PrefixCache(TARGET, limit)
    memory = CacheMemory(TARGET, 1, limit, prefixes)
    return Scheduler(TARGET, chunks=Chunks(256, 1), max_batch=8, memory=memory), prefixes


def test_requests_that_may_write_much_but_write_little_do_not_wait() -> None:
    """The memory would be enough for two requests, if each took from the start what it may need."""
    long = [request(prompt(20, seed), 1000) for seed in range(2)]
    short = [request(prompt(20, seed), 1000, frozenset(range(VOCABULARY))) for seed in range(2, 6)]
    scheduler, _ = scheduler_of(int(2.5 * long[0].bytes(TARGET)))
    for each in (*long, *short):
        scheduler.add(each)
    while not all(each.ended for each in short):
        scheduler.step()
        assert not any(each.ended for each in long)


def test_where_all_write_much_they_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.decoding.request.STEP_TOKENS", 16)
    asked = [(prompt(20, 1), 400), (prompt(30, 2), 350), (prompt(25, 3), 380), (prompt(9, 4), 12)]
    engine = Engine(build_with_large_cache(), method="autoregressive")
    alone = [engine.generate(ids, max_new_tokens=most, ignore_eos=True).token_ids for ids, most in asked]
    requests = [request(*each) for each in asked]
    scheduler, prefixes = scheduler_of(int(1.5 * requests[0].bytes(TARGET)))
    for each in requests:
        scheduler.add(each)
    paused, together = 0, 0
    while scheduler.busy:
        writing = [bool(each.output.token_ids) and not each.ended for each in requests]
        before = [len(each.output.token_ids) for each in requests]
        scheduler.step()
        grew = [len(each.output.token_ids) > old for each, old in zip(requests, before, strict=True)]
        paused += any(writes and not grows for writes, grows in zip(writing, grew, strict=True))
        together += sum(writing) > 1
        assert not any(writing) or grew[writing.index(True)], "the first of them goes on"
        assert scheduler.held + prefixes.bytes <= int(1.5 * requests[0].bytes(TARGET))
    assert paused
    assert together
    assert [tuple(each.output.token_ids) for each in requests] == alone


def test_a_cache_that_is_allocated_as_a_whole_is_held_as_a_whole() -> None:
    target = Target(build("llama"))
    each = request(prompt(20), 900)
    assert each.first_bytes(target) == each.bytes(target)
    assert each.first_bytes(TARGET) < each.bytes(TARGET)
