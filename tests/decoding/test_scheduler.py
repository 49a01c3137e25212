"""Admission, memory, turns: who runs when, who waits, and that everything is given back."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import build, plain_text, prompt
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache
from selfspec.decoding.prompt import Chunks, ReadingPace, chunks_of
from selfspec.decoding.request import Event, Failed, Finished, Prefilled, Request, Sequence, Started
from selfspec.decoding.scheduler import Scheduler
from selfspec.errors import RequestTooLargeError
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy

TARGET = Target(build("llama"))
PLAIN = make_method("autoregressive", TARGET)
DRAFTING = [
    PLAIN,
    make_method("suffix", TARGET),
    make_method("layerskip", TARGET, {"exit_layer": 3, "draft_length": 4}),
    make_method("swift", TARGET, {"context_window": 6, "confidence_threshold": 0.1, "max_draft_length": 5}),
    make_method("token-recycling", TARGET, {"candidates": 4, "tree_size": 12}),
]
CHUNKS = Chunks(16, 1)


def request(prompt_ids: list[int], new_tokens: int = 10, method: Method = PLAIN) -> Request:
    processor = ScoreProcessor()
    return Request(prompt_ids, new_tokens, Greedy(), processor, Output(max_new_tokens=new_tokens), method)


def scheduler_with(limit: int | None = None, prefixes: int = 0, max_batch: int = 4, **options: Any) -> Scheduler:
    cache = PrefixCache(TARGET, prefixes) if prefixes else None
    memory = CacheMemory(TARGET, CHUNKS.grain, limit, cache)
    return Scheduler(TARGET, chunks=CHUNKS, max_batch=max_batch, memory=memory, **options)


def play(scheduler: Scheduler) -> list[Event]:
    return list(itertools.chain.from_iterable(iter(lambda: scheduler.step() if scheduler.busy else None, None)))


# Chunks and pace


@given(st.integers(1, 40), st.booleans(), st.integers(1, 200), st.lists(st.integers(1, 60), min_size=1))
def test_chunks_cover_a_prompt_and_end_where_they_may(longest: int, free: bool, length: int, wanted: list[int]) -> None:
    chunks, start = Chunks(longest, 1 if free else longest), 0
    for most in itertools.cycle(wanted):
        end = chunks.end(start, length, most)
        assert start < end <= length
        assert end - start <= longest
        assert end == length or end % chunks.grain == 0
        assert not free or end - start <= most
        start = end
        if start == length:
            break


def test_chunks_suit_the_model() -> None:
    assert chunks_of(TARGET) == Chunks(256, 1)
    assert chunks_of(TARGET, 100) == Chunks(100, 1)
    independent = max(64, TARGET.independent_rows)
    assert chunks_of(TARGET, independent).grain == 1


def test_a_pace_follows_what_reading_takes() -> None:
    pace = ReadingPace(0.1)
    assert pace.tokens(False) == float("inf")
    assert pace.tokens(True) == 64
    pace.note(64, 0.4)
    assert pace.tokens(True) == 16
    for _ in range(20):
        pace.note(16, 0.016)
    assert 95 <= pace.tokens(True) <= 100
    pace.note(100, 0.2)
    assert pace.tokens(True) == 50
    pace.note(3, 10.0)  # too few to tell
    assert pace.tokens(True) == 50
    assert ReadingPace(None).tokens(True) == float("inf")
    assert pace.tokens(True, scored=True) == 64, "of prompts that are scored it is learned apart"
    pace.note(64, 0.64, scored=True)
    assert pace.tokens(True, scored=True) == 16
    assert pace.tokens(True) == 50


class Clocked(ReadingPace):
    """A pace to which reading takes a hundredth of a second a token, and three times that where it is scored."""

    def __init__(self, most_seconds: float) -> None:
        super().__init__(most_seconds)
        self.read: list[tuple[int, bool]] = []

    def note(self, tokens: int, seconds: float, scored: bool = False) -> None:
        self.read.append((tokens, scored))
        super().note(tokens, tokens * (0.03 if scored else 0.01), scored)


def test_outputs_do_not_wait_longer_than_the_pace_allows() -> None:
    scheduler, read = scheduler_with(pace=Clocked(0.2), max_batch=3), []
    short, others = request(prompt(4), 40), [request(prompt(120, seed), 3) for seed in (1, 2)]
    scheduler.add(short)
    scheduler.step()
    for each in others:
        scheduler.add(each)
    while not all(each.output.token_ids for each in others):
        before, written = unread(scheduler), len(short.output.token_ids)
        events = scheduler.step()
        assert len(short.output.token_ids) == written + 1
        read.append((before or 240) - unread(scheduler))
        assert not any(isinstance(event, Failed) for event in events)
    assert max(read[1:]) <= 20
    assert sum(read) == 240
    play(scheduler)
    assert [tuple(each.output.token_ids) for each in others] == [
        plain_text("llama", prompt(120, seed), 3) for seed in (1, 2)
    ]


def test_a_step_reads_scored_prompts_or_others_at_their_own_pace() -> None:
    pace = Clocked(0.4)
    scheduler = Scheduler(TARGET, chunks=Chunks(100, 1), max_batch=3, memory=CacheMemory(TARGET, 1, None), pace=pace)
    scheduler.add(request(prompt(4), 60))
    scheduler.step()
    other, scored = request(prompt(200, 1), 3), dataclasses.replace(request(prompt(200, 2), 3), prompt_logprobs=0)
    scheduler.add(other)
    scheduler.step()
    scheduler.add(scored)
    pace.read.clear()
    while not (other.output.token_ids and scored.output.token_ids):
        scheduler.step()
    read = {kind: [tokens for tokens, of in pace.read if of == kind and tokens] for kind in (False, True)}
    assert sum(read[True]) == 200, "each step reads one kind"
    assert read[True][:2] == [64, 16], "64 to learn from, then what 0.4 s suffice for, and 16 at least"
    assert max(read[False]) == 40
    assert len(scored.output.prompt_logprobs) == 199


def unread(scheduler: Scheduler) -> int:
    return sum(each.unread for each in scheduler._running)


def test_prompts_take_turns() -> None:
    scheduler = scheduler_with()
    long, short = request(prompt(200), 2), request(prompt(20), 2)
    scheduler.add(long)
    scheduler.step()
    scheduler.add(short)
    order = [event.request for event in play(scheduler) if isinstance(event, Prefilled)]
    assert order == [short, long]


# Memory


def test_a_request_says_what_it_holds() -> None:
    for method in DRAFTING:
        each = request(prompt(30), 10, method)
        scheduler = scheduler_with()
        scheduler.add(each)
        scheduler.step()
        sequence = scheduler._running[0]
        held = sequence.cache.size_in_bytes + sequence.ids.nbytes
        needs = method.needs
        states = min(needs.prompt_rows, 30) * len(needs.prompt_states) * TARGET.hidden_size * 4
        assert each.bytes(TARGET) == scheduler.held == held + states


def test_a_request_waits_for_memory_and_none_overtakes_it() -> None:
    needed = request(prompt(20)).bytes(TARGET)
    scheduler = scheduler_with(limit=2 * needed)
    requests = [request(prompt(20, 1)), request(prompt(20, 2)), request(prompt(20, 3), 20), request([1], 1)]
    for each in requests:
        scheduler.add(each)
    scheduler.step()
    assert scheduler.running == 2
    events = play(scheduler)
    started = [event.request for event in events if isinstance(event, Started)]
    assert started == requests[2:]
    assert tuple(requests[2].output.token_ids) == plain_text("llama", prompt(20, 3), 20)
    assert scheduler.held == 0


def test_a_request_that_can_never_fit_is_refused_with_what_would() -> None:
    limit = request(prompt(20), 10).bytes(TARGET)
    scheduler, memory = scheduler_with(limit), CacheMemory(TARGET, CHUNKS.grain, limit)
    memory.check(request(prompt(20), 10))
    with pytest.raises(RequestTooLargeError, match="ask for at most 10 new tokens"):
        memory.check(request(prompt(20), 11))
    with pytest.raises(RequestTooLargeError, match="shorten the prompt"):
        memory.check(request(prompt(30), 1))
    scheduler.add(request(prompt(20), 11))
    scheduler.add(request(prompt(20), 10))
    events = play(scheduler)
    assert [type(event) for event in events if isinstance(event, Failed | Finished)] == [Failed, Finished]


def test_the_prefix_cache_makes_room_for_requests() -> None:
    small = request(prompt(20)).bytes(TARGET)
    scheduler = scheduler_with(limit=2 * small, prefixes=2 * small)
    prefixes = scheduler._memory.prefixes
    assert prefixes is not None
    for seed in (1, 2, 3):
        scheduler.add(request(prompt(20, seed)))
        play(scheduler)
        assert 0 < prefixes.bytes <= 2 * small
    scheduler.add(request(prompt(45), 10))
    scheduler.step()
    assert prefixes.bytes + scheduler.held <= 2 * small
    play(scheduler)


def test_prompts_that_arrive_together_share_what_is_read() -> None:
    scheduler = scheduler_with(prefixes=2**20)
    requests = [request([*prompt(100), seed, 1, 2, 3, 4], 4) for seed in range(4)]
    for each in requests:
        scheduler.add(each)
    events = play(scheduler)
    cached = {id(e.request): e.request.cached_tokens for e in events if isinstance(e, Prefilled)}
    read = [len(each.prompt_ids) - cached[id(each)] for each in requests]
    assert sum(read) == 100 + 4 * 5, "each part is read once"
    for seed, each in enumerate(requests):
        assert tuple(each.output.token_ids) == plain_text("llama", [*prompt(100), seed, 1, 2, 3, 4], 4)


@pytest.mark.parametrize("grows", [False, True])
@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_any_arrivals_and_cancellations(grows: bool, seed: int) -> None:
    """Texts are those of plain decoding, the limits hold at every step, no request is lost, memory is given back."""
    with pytest.MonkeyPatch.context() as patch:
        if grows:  # caches take memory as they are written, a few tokens at a time
            patch.setattr("selfspec.model.cache.LARGE", 0)
            patch.setattr("selfspec.decoding.request.STEP_TOKENS", 2)
            patch.setattr("selfspec.decoding.request.ROUND_TOKENS", 1)
        ended, cancelled = _arrive_and_cancel(random.Random(seed), 10)
    assert ended + cancelled == 10


def _arrive_and_cancel(draw: random.Random, count: int) -> tuple[int, int]:
    """How many of some requests end, and how many are cancelled; the rest is checked here."""
    limit = draw.choice([None, *(slots * TARGET.slot_bytes for slots in (150, 300, 450))])
    prefixes = draw.choice([0, 100, 1000]) * TARGET.slot_bytes
    scheduler = scheduler_with(limit, prefixes, draw.randint(1, 5), pace=draw.choice([None, Clocked(0.2)]))
    cache = scheduler._memory.prefixes
    coming = [
        dataclasses.replace(
            request(prompt(50, draw.randint(0, 1))[: draw.randint(1, 50)], draw.randint(1, 16), draw.choice(DRAFTING)),
            prompt_logprobs=draw.choice([None, None, 0]),
        )
        for _ in range(count)
    ]
    live: list[Request] = []
    ended: list[Request] = []
    cancelled = 0
    while coming or scheduler.busy:
        for _ in range(draw.randint(0, 2)):
            if coming:
                live.append(coming.pop())
                scheduler.add(live[-1])
        if live and draw.random() < 0.1:
            scheduler.cancel(live.pop(draw.randrange(len(live))))
            cancelled += 1
        events = scheduler.step()
        ended += [event.request for event in events if isinstance(event, Finished)]
        live = [each for each in live if each not in ended]
        assert not any(isinstance(event, Failed) for event in events)
        assert limit is None or scheduler.held + (cache.bytes if cache else 0) <= limit
        assert cache is None or cache.bytes <= prefixes
    assert scheduler.held == 0
    for each in ended:
        assert tuple(each.output.token_ids) == expected(tuple(each.prompt_ids), each.max_new_tokens)
        assert len(each.output.prompt_logprobs) == (0 if each.prompt_logprobs is None else len(each.prompt_ids) - 1)
    return len(ended), cancelled


TEXTS: dict[tuple[int, ...], tuple[int, ...]] = {}


def expected(prompt_ids: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    """The first tokens of what plain decoding alone writes."""
    if prompt_ids not in TEXTS:
        alone = request(list(prompt_ids), 16)
        scheduler = scheduler_with()
        scheduler.add(alone)
        play(scheduler)
        TEXTS[prompt_ids] = tuple(alone.output.token_ids)
    return TEXTS[prompt_ids][:new_tokens]


def test_a_step_that_fails_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that had failed earlier in the same step: its client would wait without end."""
    scheduler = scheduler_with(max_batch=3)
    asked = [request(prompt(4), 4) for _ in range(2)]
    for each in asked:
        scheduler.add(each)
    made = iter([ValueError("no sequence")])

    def fail_once(target: object, asked: Request) -> Sequence:
        for error in made:
            raise error
        return Sequence(TARGET, asked)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("selfspec.decoding.scheduler.Sequence", fail_once)
    monkeypatch.setattr(scheduler._prompts, "read", fail)
    scheduler.step()
    assert [each.ended for each in asked] == [True, True]
    assert not scheduler.running
