"""Steps over several sequences: each generates what it generates alone, while others come and go."""

import functools
import random
import time
from typing import Any

import pytest
import torch

from helpers.models import LAYERS, build, plain_text, prompt
from helpers.runs import RUNS
from selfspec import Engine, Generation, SamplingParams
from selfspec.decoding.output import Output
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Advanced, Event, Failed, Finished, Prefilled, Request, Started
from selfspec.decoding.scheduler import Scheduler
from selfspec.errors import NonFiniteLogitsError
from selfspec.loading import load_model
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Coupled, Greedy, Rule
from selfspec_lab.testing import verifies_exactly

LENGTHS = (1, 40, 7, 64, 18, 3, 70)
"""Of the prompts of a batch."""
TREES: dict[str, Any] = {"context_window": 6, "confidence_threshold": 0.1, "max_draft_length": 5}


def request(method: Method, prompt_ids: list[int], new_tokens: int = 24, rule: Rule | None = None) -> Request:
    processor = ScoreProcessor()
    return Request(prompt_ids, new_tokens, rule or Greedy(), processor, Output(max_new_tokens=new_tokens), method)


def play(scheduler: Scheduler) -> list[list[Event]]:
    """All events to come, step by step."""
    steps = []
    while scheduler.busy:
        steps.append(scheduler.step())
    return steps


def rounds(events: list[list[Event]]) -> list[Any]:
    return [event.round for step in events for event in step if isinstance(event, Advanced)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope", "mixtral-window"])
@pytest.mark.parametrize("runtime", ["eager", "fused", "auto"])
def test_a_batch_writes_what_each_prompt_gives_alone(name: str, runtime: str) -> None:
    """Trees, different lengths, arrivals and ends in the middle: at most three of seven prompts run at a time."""
    lengths = [length for length in LENGTHS if name != "phi3-longrope" or length < 40]
    engine = Engine(build(name), method="swift", settings=TREES, max_batch=3, prefill_chunk=16, runtime=runtime)
    results = engine.generate([prompt(length, length) for length in lengths], max_new_tokens=24, ignore_eos=True)
    for length, result in zip(lengths, results, strict=True):
        assert result.token_ids == plain_text(name, prompt(length, length), 24)
    assert sum(result.accepted for result in results) > 0
    assert any(record.candidates > record.drafted for result in results for record in result.rounds)


GREEDY, SEEDED = SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, temperature=0.9, seed=3)


@functools.cache
def alone(params: SamplingParams, length: int) -> tuple[int, ...]:
    """What plain decoding writes after a prompt of the batch."""
    plain = Engine(build("llama"), method="autoregressive")
    return plain.generate(prompt(length, length), params, ignore_eos=True).token_ids


@pytest.mark.parametrize("method", sorted(RUNS))
def test_every_method_in_a_batch(method: str) -> None:
    settings = RUNS[method][-1].settings
    engine = Engine(build("llama"), method=method, settings=settings, max_batch=4)
    for params in (GREEDY, SEEDED):
        results = engine.generate([prompt(length, length) for length in LENGTHS], params, ignore_eos=True)
        assert [result.token_ids for result in results] == [alone(params, length) for length in LENGTHS]
        if not params.samples and method != "autoregressive":
            assert sum(result.drafted for result in results) > 0


@pytest.mark.parametrize("seed", range(6))
def test_methods_and_seeds_beside_each_other(seed: int) -> None:
    """A scheduler knows nothing of methods: each sequence may have its own, and come at any step."""
    draw = random.Random(seed)
    target = Target(build("llama"))
    plain = Engine(build("llama"), method="autoregressive")
    methods = [
        make_method("layerskip", target, {"exit_layer": LAYERS // 2, "draft_length": 4}),
        make_method("swift", target, TREES),
        make_method("suffix", target, {}),
        make_method("autoregressive", target),
        make_method("clasp", target, {"skipped_layers": 2, "update_interval": 2}),
    ]
    waiting = []
    for index in range(9):
        length, new_tokens = draw.randint(1, 60), draw.randint(1, 30)
        rule = draw.choice([Greedy(), Coupled(index)])
        waiting.append(request(draw.choice(methods), prompt(length, index), new_tokens, rule))
    all_requests = list(waiting)
    scheduler = Scheduler(target, chunks=Chunks(draw.randint(5, 40), 1), max_batch=draw.randint(2, 5))
    events = []
    while waiting or scheduler.busy:
        for _ in range(draw.randint(0, 2)):
            if waiting:
                scheduler.add(waiting.pop())
        if scheduler.busy:
            events.append(scheduler.step())
    for each in all_requests:
        sampling = {"temperature": 1.0, "seed": each.rule.seed} if isinstance(each.rule, Coupled) else {}
        options = {"max_new_tokens": each.max_new_tokens, "ignore_eos": True, **sampling}
        assert tuple(each.output.token_ids) == plain.generate(list(each.prompt_ids), **options).token_ids
    assert sum(record.accepted for record in rounds(events)) > 0


def test_the_events_of_a_request_in_order() -> None:
    target = Target(build("llama"))
    method = make_method("layerskip", target, {"exit_layer": 3, "draft_length": 3})
    scheduler = Scheduler(target, chunks=Chunks(10, 1), max_batch=2)
    first, second, third = (request(method, prompt(length), 12) for length in (25, 5, 9))
    for each in (first, second, third):
        scheduler.add(each)
    steps = play(scheduler)
    for each in (first, second, third):
        own = [event for step in steps for event in step if not isinstance(event, Failed)]
        own = [event for event in own if event.request is each]
        kinds = [type(event) for event in own]
        assert kinds[:2] == [Started, Prefilled]
        assert kinds[-1] == Finished
        assert set(kinds[2:-1]) == {Advanced}
    started = [event.request for step in steps for event in step if isinstance(event, Started)]
    assert started == [first, second, third]
    waited = next(index for index, step in enumerate(steps) for e in step if isinstance(e, Started) and index)
    ended = next(index for index, step in enumerate(steps) for event in step if isinstance(event, Finished))
    assert waited == ended + 1, "the third request starts once a place is free"


def test_a_long_prompt_is_read_beside_sequences_that_are_written() -> None:
    target = Target(build("llama"))
    method = make_method("autoregressive", target)
    scheduler = Scheduler(target, chunks=Chunks(8, 1), max_batch=2)
    short, long = request(method, prompt(4), 20), request(method, prompt(60), 2)
    scheduler.add(short)
    for _ in range(3):
        scheduler.step()
    scheduler.add(long)
    reading = 0
    while not long.output.token_ids:
        before = len(short.output.token_ids)
        scheduler.step()
        assert len(short.output.token_ids) == before + 1
        reading += 1
    assert reading == 8  # chunks of 60 tokens
    play(scheduler)
    assert tuple(short.output.token_ids) == plain_text("llama", prompt(4), 20)
    assert tuple(long.output.token_ids) == plain_text("llama", prompt(60), 2)


@pytest.mark.parametrize(("grain", "expected"), [(1, [1, 2, 0]), (40, [2, 1, 0])])
def test_prompts_share_the_tokens_of_a_step(grain: int, expected: list[int]) -> None:
    """Of three prompts of 24 tokens, a step reads 40 tokens; or two whole prompts, where none may be cut at 16."""
    target = Target(build("llama"))
    method = make_method("autoregressive", target)
    scheduler = Scheduler(target, chunks=Chunks(40, grain), max_batch=4)
    for _ in range(3):
        scheduler.add(request(method, prompt(24), 4))
    read = [sum(isinstance(event, Prefilled) for event in step) for step in play(scheduler)]
    assert read[:3] == expected


def test_the_seconds_of_a_request_begin_with_its_prompt() -> None:
    engine = Engine(build("llama"), prefill_chunk=16, max_batch=2, method="autoregressive")
    for result in engine.generate([prompt(60), prompt(4), prompt(30)], max_new_tokens=8):
        assert 0 < result.prefill_seconds < result.seconds
        in_rounds = sum(sum(vars(record.seconds).values()) for record in result.rounds)
        assert in_rounds <= result.seconds - result.prefill_seconds
    alone = engine.generate(prompt(60), max_new_tokens=1)
    assert 0 < alone.prefill_seconds <= alone.seconds


def test_a_sequence_that_fails_leaves_the_others_alone() -> None:
    model = build("llama")
    weight = model.get_input_embeddings().weight.detach().clone()
    weight[77] = torch.nan
    broken = type(model)(model.config).eval()
    broken.load_state_dict({**model.state_dict(), "model.embed_tokens.weight": weight})
    target = Target(broken)
    method = make_method("suffix", target, {})
    scheduler = Scheduler(target, chunks=Chunks(100, 1), max_batch=4)
    requests = [request(method, ids, 10) for ids in ([5, 6], [5, 77, 6], [8, 9, 8, 9, 8])]
    for each in requests:
        scheduler.add(each)
    events = [event for step in play(scheduler) for event in step]
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request for event in failed] == [requests[1]]
    assert isinstance(failed[0].error, NonFiniteLogitsError)
    for each in (requests[0], requests[2]):
        assert len(each.output.token_ids) == 10


def test_a_request_that_is_removed_is_gone() -> None:
    target = Target(build("llama"))
    method = make_method("autoregressive", target)
    scheduler = Scheduler(target, chunks=Chunks(100, 1), max_batch=1)
    running, waiting, other = (request(method, prompt(5), 50) for _ in range(3))
    for each in (running, waiting, other):
        scheduler.add(each)
    scheduler.step()
    scheduler.step()
    scheduler.cancel(running)
    scheduler.cancel(waiting)
    play(scheduler)
    assert len(running.output.token_ids) == 2
    assert not waiting.output.token_ids
    assert tuple(other.output.token_ids) == plain_text("llama", prompt(5), 50)


def test_the_seconds_of_a_round_are_shared_by_its_sequences() -> None:
    engine = Engine(build("llama"), method="layerskip", settings={"exit_layer": 3, "draft_length": 3})
    alone = engine.generate(prompt(9), max_new_tokens=12)
    assert min(record.seconds.draft for record in alone.rounds[:-1]) > 0
    assert min(record.seconds.verify for record in alone.rounds) > 0
    results = engine.generate([prompt(9), prompt(9)], max_new_tokens=12)
    assert [record.seconds for record in results[0].rounds] == [record.seconds for record in results[1].rounds]
    spent = sum(sum(vars(record.seconds).values()) for result in results for record in result.rounds)
    assert 0 < spent <= results[0].seconds


def test_reading_the_prompt_is_no_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that begins reads the prompt; the time would count as planning, and drafts would not seem to pay."""
    engine, waited = Engine(build("llama"), method="suffix"), 0.05
    begin = type(engine.method).begin

    def slow(method: Any, prefill: Any) -> Any:
        time.sleep(waited)
        return begin(method, prefill)

    monkeypatch.setattr(type(engine.method), "begin", slow)
    found = engine.generate(prompt(9) * 2, max_new_tokens=12)
    assert found.drafted > 0
    assert sum(record.seconds.select for record in found.rounds) < waited


@pytest.mark.trained
@pytest.mark.parametrize("method", ["autoregressive", "uniform", "swift", "knapspec", "suffix"])
def test_bfloat16_in_a_batch_is_bit_for_bit_alone(method: str) -> None:
    if not verifies_exactly(torch.bfloat16):
        pytest.skip("there are no kernels for this many rows on this machine")
    model, tokenizer = load_model("tiny", dtype="bfloat16", device="cpu")
    settings = {"recent_tokens": 4} if method == "knapspec" else {}  # so that short outputs have a draft
    engine = Engine(model, tokenizer, method, settings=settings, max_batch=3)
    prompts = ["Question: ", "def add(a, b):\n    return", "Once upon a time", "1, 2, 3, 4, 5, 6, 7, 8", "The"]
    results = engine.generate(prompts, max_new_tokens=32, ignore_eos=True)
    plain = Engine(model, tokenizer, method="autoregressive")
    alone: list[Generation] = [plain.generate(each, max_new_tokens=32, ignore_eos=True) for each in prompts]
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
    assert method == "autoregressive" or sum(result.accepted for result in results) > 0
