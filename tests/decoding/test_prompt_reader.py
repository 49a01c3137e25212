"""Prompts that are read together: as few forwards as may be, and the bits of each prompt alone."""

import itertools
from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from helpers.low_bit_model import random_model
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache
from selfspec.decoding.prompt import FORWARD_ROWS, MOST_ROWS, Chunks, chunks_of
from selfspec.decoding.request import Event, Failed, Finished, Prefilled, Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.methods import make_method
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy
from selfspec_lab.testing import verifies_exactly

needs_independent_rows = pytest.mark.skipif(
    not verifies_exactly(torch.bfloat16), reason="rows depend on each other on this machine"
)
TARGET = Target(random_model(torch.bfloat16))


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 128, (length,), generator=generator).tolist()


def request(
    prompt_ids: list[int], method: str = "autoregressive", *processors: LogitsProcessor, **options: Any
) -> Request:
    processor = ScoreProcessor(processors)
    made = make_method(method, options.pop("target", TARGET))
    return Request(prompt_ids, 3, Greedy(), processor, Output(max_new_tokens=3), made, **options)


def scheduler_of(
    requests: Many[Request], target: Target = TARGET, chunks: Chunks | None = None, **options: Any
) -> Scheduler:
    chunks = chunks or chunks_of(target)
    memory = CacheMemory(target, chunks.grain, None, options.get("prefixes"))
    scheduler = Scheduler(target, chunks=chunks, max_batch=len(requests), memory=memory)
    for each in requests:
        scheduler.add(each)
    return scheduler


def play(scheduler: Scheduler) -> list[Event]:
    return list(itertools.chain.from_iterable(iter(lambda: scheduler.step() if scheduler.busy else None, None)))


class Forwards:
    """Notes the rows of each part of the forwards that read prompts, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Target, most_parts: int = 100) -> None:
        self.parts: list[list[int]] = []
        run = target.run

        def noted(states: torch.Tensor, sublayers: Any, forward: Any, *arguments: Any, **options: Any) -> Any:
            if options.get("last_rows") is not None:
                self.parts.append([part.count for part in forward.parts])
                if len(forward.parts) > most_parts:
                    raise RuntimeError("too many at once")
            return run(states, sublayers, forward, *arguments, **options)

        monkeypatch.setattr(target, "run", noted)


def read(requests: Many[Request], **options: Any) -> list[torch.Tensor]:
    """Keys and values of each prompt once it is read; outputs are written meanwhile."""
    scheduler = scheduler_of(requests, **options)
    rows: dict[int, torch.Tensor] = {}
    while scheduler.busy:
        for event in scheduler.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Prefilled):
                (each,) = (each for each in scheduler._running if each.request is event.request)
                rows[id(each.request)] = each.cache.rows(0, each.prompt_length).clone()
    return [rows[id(each)] for each in requests]


@needs_independent_rows
@settings(max_examples=20)
@given(st.lists(st.integers(1, 70), min_size=2, max_size=7), st.integers(1, 64), st.booleans())
def test_keys_values_and_texts_are_those_of_each_prompt_alone(lengths: list[int], longest: int, shared: bool) -> None:
    beginning = text(FORWARD_ROWS + 5, 99) if shared else []
    prompts = [[*beginning, *text(length, seed)] for seed, length in enumerate(lengths)]
    together = [request(each) for each in prompts]
    prefixes = PrefixCache(TARGET, 2**20) if shared else None
    states = read(together, chunks=Chunks(longest, 1), prefixes=prefixes)
    for prompt_ids, each, rows in zip(prompts, together, states, strict=True):
        alone = request(prompt_ids)
        assert torch.equal(rows.view(torch.int16), read([alone])[0].view(torch.int16))
        assert each.output.token_ids == alone.output.token_ids


@needs_independent_rows
def test_short_prompts_share_a_forward_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch, TARGET)
    play(scheduler_of([request(text(20, seed)) for seed in range(16)]))
    assert forwards.parts == [[20] * 6, [20] * 6, [20] * 4]
    assert all(sum(parts) <= MOST_ROWS for parts in forwards.parts)


@needs_independent_rows
def test_no_forward_is_spent_on_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch, TARGET)
    scheduler = scheduler_of([request(text(20, seed)) for seed in range(4)], chunks=Chunks(50, 1))
    scheduler.step()
    assert forwards.parts == [[20, 20]]
    scheduler.step()
    assert forwards.parts == [[20, 20], [20, 20]]


@needs_independent_rows
def test_prompts_that_begin_alike_wait_for_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, beginning = Forwards(monkeypatch, TARGET), text(40, 0)
    prompts = [[*beginning, *text(5, seed)] for seed in (1, 2, 3)]
    play(scheduler_of([request(each) for each in prompts], prefixes=PrefixCache(TARGET, 2**20)))
    assert forwards.parts == [[45], [5, 5]]
    forwards.parts.clear()
    little = [[*beginning[: FORWARD_ROWS - 1], *text(5, seed)] for seed in (4, 5)]
    play(scheduler_of([request(each) for each in little], prefixes=PrefixCache(TARGET, 2**20)))
    assert forwards.parts == [[20, 20]]
    forwards.parts.clear()
    play(scheduler_of([request(each) for each in prompts], chunks=Chunks(150, 1)))
    assert forwards.parts == [[45, 45], [45]]


@needs_independent_rows
def test_prompts_whose_states_are_kept_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["autoregressive", "token-recycling", "autoregressive", "suffix"]
    alone = [request(text(20, seed), method) for seed, method in enumerate(methods)]
    for each in alone:
        play(scheduler_of([each]))
    forwards = Forwards(monkeypatch, TARGET)
    together = [request(text(20, seed), method) for seed, method in enumerate(methods)]
    play(scheduler_of(together))
    assert forwards.parts == [[20, 20, 20], [20]]
    assert [each.output.token_ids for each in together] == [each.output.token_ids for each in alone]


def test_prompts_are_read_one_by_one_where_rows_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(random_model(torch.bfloat16), "eager")
    forwards = Forwards(monkeypatch, target)
    play(scheduler_of([request(text(20, seed), target=target) for seed in range(3)], target))
    assert forwards.parts == [[20]] * 3


class Breaks(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")


@needs_independent_rows
def test_a_request_that_fails_leaves_those_read_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch, TARGET)
    requests = [request(text(9, 0)), request(text(9, 1), "autoregressive", Breaks()), request(text(9, 2))]
    events = play(scheduler_of(requests))
    assert forwards.parts == [[9, 9, 9]]
    assert [event.request for event in events if isinstance(event, Failed)] == [requests[1]]
    assert {id(e.request) for e in events if isinstance(e, Finished)} == {id(requests[0]), id(requests[2])}


@needs_independent_rows
def test_a_forward_that_fails_is_repeated_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch, TARGET, most_parts=1)
    requests = [request(text(9, seed)) for seed in range(3)]
    events = play(scheduler_of(requests))
    assert forwards.parts == [[9, 9, 9], [9], [9], [9]]
    assert not any(isinstance(event, Failed) for event in events)
    assert all(len(each.output.token_ids) == 3 for each in requests)


@needs_independent_rows
def test_log_probabilities_of_prompts_read_together() -> None:
    alone, together = ([request(text(20, seed), prompt_logprobs=2) for seed in range(3)] for _ in range(2))
    for each in alone:
        play(scheduler_of([each]))
    play(scheduler_of(together))
    assert [each.output.prompt_logprobs for each in together] == [each.output.prompt_logprobs for each in alone]
    assert all(len(each.output.prompt_logprobs) == 19 for each in together)
