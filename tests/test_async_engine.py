"""Many requests at once: each writes what it writes alone, while others begin, end or fail beside it."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.low_bit_model import random_model
from helpers.models import VOCABULARY, build, plain_text, prompt
from selfspec import AsyncEngine, Engine, Generation, RequestStream, engine_thread
from selfspec.decoding.output import Output
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine_thread import EngineThread
from selfspec.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    InvalidParameterError,
    InvalidPromptError,
    InvalidSettingError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    UnknownMethodError,
)

DRAFTING: dict[str, dict[str, Any]] = {
    "uniform": {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0},
    "swift": {"context_window": 6, "confidence_threshold": 0.1, "max_draft_length": 5},
    "suffix": {},
    "clasp": {"skipped_layers": 2, "update_interval": 2},
    "autoregressive": {},
}


SHORT: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
LONG: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True}


def make_engine(method: str = "uniform", **options: Any) -> Engine:
    settings = DRAFTING.get(method)
    return Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), method, settings=settings, **options)


def run(scenario: Callable[[AsyncEngine], Awaitable[Any]], engine: Engine | None = None, **options: Any) -> Any:
    """What a coroutine returns that is given a started engine."""

    async def main() -> Any:
        async with AsyncEngine(engine or make_engine(), **options) as served:
            return await asyncio.wait_for(scenario(served), 60)

    return asyncio.run(main())


def told(result: Generation) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.prompt_token_count


# Texts


def test_requests_of_every_kind_write_what_they_write_alone() -> None:
    """Methods, settings, seeds, penalties and stop strings beside each other, more requests than places."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 5},
        {"repetition_penalty": 1.3},
        {"stop": ("e",), "temperature": 0.8, "seed": 1},
        {"max_new_tokens": 1},
    ]
    requests = [
        (prompt(length, index), method, {"max_new_tokens": 20, "ignore_eos": True, **kinds[index % len(kinds)]})
        for index, (length, method) in enumerate((length, method) for length in (1, 30, 9) for method in DRAFTING)
    ]

    async def scenario(served: AsyncEngine) -> list[Generation]:
        return await asyncio.gather(
            *(
                served.generate(ids, method=method, settings=DRAFTING[method], **params)
                for ids, method, params in requests
            )
        )

    results = run(scenario, max_batch=4)
    for (ids, method, params), result in zip(requests, results, strict=True):
        assert told(result) == told(make_engine(method).generate(ids, **params))
        assert result.method == method
    greedy = [result for (*_, params), result in zip(requests, results, strict=True) if "seed" not in params]
    assert sum(result.drafted for result in greedy) > 0
    assert sum(result.accepted for result in greedy) > 0


def test_a_stream_gives_the_pieces_of_the_output() -> None:
    async def scenario(served: AsyncEngine) -> tuple[RequestStream, list[Any], list[str]]:
        stream = served.submit("def half(", max_new_tokens=12, ignore_eos=True, request_id="mine")
        states = [stream.status]
        pieces = []
        async for piece in stream:
            pieces.append(piece)
        states.append(stream.status)
        return stream, pieces, states

    engine = make_engine()
    stream, pieces, states = run(scenario, engine)
    expected = engine.generate("def half(", max_new_tokens=12, ignore_eos=True)
    assert told(stream.result) == told(expected)
    assert [piece.token_id for piece in pieces] == list(expected.token_ids)
    assert "".join(piece.text for piece in pieces) == expected.text
    assert states == ["waiting", "finished"]
    assert stream.request_id == "mine"
    assert stream.result_with("known").text == "known"
    assert [each.token_ids for each in stream.rounds] == [each.token_ids for each in expected.rounds]
    started, first, ended = stream.started_at, stream.first_token_at, stream.ended_at
    assert started is not None
    assert first is not None
    assert ended is not None
    assert started <= first <= ended


def test_a_chat_and_an_engine_of_another_thread_beside() -> None:
    engine = make_engine("suffix")
    chat = [{"role": "user", "content": "hi"}]

    async def scenario(served: AsyncEngine) -> list[Generation]:
        beside = asyncio.to_thread(engine.generate, prompt(20), max_new_tokens=20)
        return await asyncio.gather(served.generate(chat, max_new_tokens=20), beside)

    chatted, generated = run(scenario, engine)
    assert told(chatted) == told(engine.generate(chat, max_new_tokens=20))
    assert generated.token_ids == plain_text("llama", prompt(20), 20)


# What is refused


@pytest.mark.parametrize(
    ("given", "options", "error"),
    [
        ([VOCABULARY], {}, InvalidPromptError),
        ([], {}, InvalidPromptError),
        ([[1], [2]], {}, InvalidPromptError),
        ([1], {"temperature": -1.0}, InvalidParameterError),
        ([1], {"temprature": 1.0}, InvalidParameterError),
        ([1], {"max_new_tokens": 2000}, ContextLengthError),
        ([1], {"method": "unknown"}, UnknownMethodError),
        ([1], {"method": "uniform", "settings": {"skip": 1}}, InvalidSettingError),
        ([1], {"settings": {"draft_length": 0}}, InvalidSettingError),
    ],
)
def test_a_request_that_does_not_fit_is_refused_at_once(given: Any, options: Any, error: type[Exception]) -> None:
    async def scenario(served: AsyncEngine) -> Generation:
        with pytest.raises(error):
            served.submit(given, **options)
        assert served.stats().running + served.stats().waiting == 0
        return await served.generate([1], max_new_tokens=3)

    assert run(scenario).new_token_count == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_waiting": -1},
        {"memory_limit": 0},
        {"max_read_seconds": 0.0},
    ],
)
def test_an_engine_refuses_what_makes_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        AsyncEngine(make_engine(), **options)


def test_the_options_of_the_engine_are_kept_or_changed() -> None:
    engine = make_engine(max_waiting=3, memory_limit=2**20, prefix_cache=2**10)
    assert AsyncEngine(engine).memory_limit == 2**20
    assert AsyncEngine(engine, memory_limit=2**21).memory_limit == 2**21
    assert AsyncEngine(engine).stats().prefix_cache.limit == 2**10
    assert AsyncEngine(make_engine(memory_limit=2**20)).stats().prefix_cache.limit == 2**19
    assert AsyncEngine(make_engine(prefix_cache=0)).stats().prefix_cache.limit == 0
    with pytest.raises(InvalidParameterError, match="there is no option of AsyncEngine 'runtime'"):
        AsyncEngine(engine, runtime="eager")


def test_a_full_queue_refuses_and_takes_again() -> None:
    async def scenario(served: AsyncEngine) -> None:
        streams = [served.submit(prompt(5), max_new_tokens=30) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests run or wait"):
            served.submit(prompt(5))
        streams[2].cancel()
        for stream in streams[:2]:
            async for _ in stream:
                pass
        assert (await served.generate(prompt(5), max_new_tokens=3)).new_token_count == 3

    run(scenario, max_batch=1, max_waiting=2)


def test_of_several_requests_all_are_queued_or_none() -> None:
    async def scenario(served: AsyncEngine) -> None:
        requests = [served.prepare(prompt(5), max_new_tokens=3) for _ in range(4)]
        with pytest.raises(QueueFullError):
            served.enqueue(requests, list("abcd"))
        served.check_room(3)  # none of them took a place
        for stream in served.enqueue(requests[:3], list("abc")):
            assert len([piece async for piece in stream]) == 3

    run(scenario, max_batch=1, max_waiting=2)


def test_an_engine_whose_thread_ends_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(BaseException): ...

    def fail(_: Scheduler) -> None:
        raise Broken("out of order")

    async def scenario(served: AsyncEngine) -> None:
        assert served.failure is None
        stream = served.submit(prompt(1), **LONG)
        await stream.__anext__()
        monkeypatch.setattr(Scheduler, "step", fail)
        with pytest.raises(EngineFailedError, match="Broken: out of order"):
            async for _ in stream:
                pass
        assert isinstance(served.failure, Broken)
        with pytest.raises(EngineFailedError, match="make another engine"):
            served.submit(prompt(2))

    run(scenario)


def test_an_engine_that_does_not_run_says_so() -> None:
    async def main() -> None:
        served = AsyncEngine(make_engine())
        with pytest.raises(EngineClosedError, match=r"call start\(\) first"):
            served.submit([1])
        served.start()
        await served.close()
        with pytest.raises(EngineClosedError, match="is closed"):
            served.submit([1])
        with pytest.raises(EngineClosedError, match="make another"):
            served.start()
        await served.close()

    asyncio.run(main())


# Ends


def test_a_cancelled_request_ends_and_the_others_go_on() -> None:
    async def scenario(served: AsyncEngine) -> tuple[RequestStream, list[Generation]]:
        victim = served.submit(prompt(7), max_new_tokens=500, ignore_eos=True)
        others = [asyncio.create_task(served.generate(prompt(length), **SHORT)) for length in (4, 40)]
        await anext(victim)
        victim.cancel()
        with pytest.raises(RequestCancelledError):
            async for _ in victim:
                pass
        results = await asyncio.gather(*others)
        assert served.stats().running == 0
        assert served.stats().cancelled == 1
        return victim, results

    victim, results = run(scenario)
    assert victim.status == "cancelled"
    with pytest.raises(RequestCancelledError):
        _ = victim.result
    for length, result in zip((4, 40), results, strict=True):
        assert result.token_ids == plain_text("llama", prompt(length), 25)


def test_a_cancelled_task_cancels_its_request() -> None:
    async def scenario(served: AsyncEngine) -> None:
        task = asyncio.create_task(served.generate(prompt(7), **LONG))
        waiting = asyncio.create_task(served.generate(prompt(8), **LONG))
        while not served.stats().running:
            await asyncio.sleep(0)
        for each in (task, waiting):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
        assert (await served.generate(prompt(4), **SHORT)).token_ids == plain_text("llama", prompt(4), 25)
        stats = served.stats()
        assert (stats.cancelled, stats.finished) == (2, 1)

    run(scenario, max_batch=1)


def test_closing_waits_for_requests_or_ends_them() -> None:
    async def main(tokens: int = 900, **how: Any) -> list[Any]:
        served = AsyncEngine(make_engine(), max_batch=1)
        served.start()
        streams = [
            served.submit(prompt(7), **{**LONG, "max_new_tokens": tokens}),
            served.submit(prompt(8), **{**LONG, "max_new_tokens": tokens}),
        ]
        await anext(streams[0])
        await served.close(**how)
        ends = []
        for stream in streams:
            try:
                ends.append(sum([1 async for _ in stream]))
            except EngineClosedError as error:
                ends.append(error)
        assert not served.stats().alive
        assert served.stats().running == served.stats().waiting == 0
        return ends

    assert asyncio.run(main(90)) == [89, 90]
    for how in ({"drain": False}, {"timeout": 0.0}):
        assert all(isinstance(end, EngineClosedError) for end in asyncio.run(main(**how)))


def test_a_close_that_drains_does_not_undo_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, step = threading.Event(), Scheduler.step

    def held(scheduler: Scheduler) -> Any:
        may_go_on.wait(60)
        return step(scheduler)

    async def main() -> None:
        served = AsyncEngine(make_engine())
        served.start()
        stream = served.submit(prompt(7), **LONG)
        await anext(stream)
        monkeypatch.setattr(Scheduler, "step", held)
        closing = [asyncio.create_task(served.close(drain=False))]
        while not served._thread._stopped:
            await asyncio.sleep(0.001)
        closing.append(asyncio.create_task(served.close()))
        await asyncio.sleep(0.1)
        may_go_on.set()
        await asyncio.gather(*closing)
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass

    asyncio.run(main())


def test_an_exception_in_the_block_ends_the_requests() -> None:
    async def main() -> RequestStream:
        with contextlib.suppress(ZeroDivisionError):
            async with AsyncEngine(make_engine()) as served:
                stream = served.submit(prompt(7), **LONG)
                raise ZeroDivisionError
        return stream

    assert asyncio.run(main()).status == "failed"


def test_a_stream_whose_loop_is_closed_frees_its_place() -> None:
    served = AsyncEngine(make_engine(), max_batch=1)
    served.start()

    async def leave() -> None:
        served.submit(prompt(7), **LONG)

    async def stay() -> Generation:
        result = await served.generate(prompt(4), **SHORT)
        await served.close()
        return result

    asyncio.run(leave())
    assert asyncio.run(stay()).token_ids == plain_text("llama", prompt(4), 25)
    assert served.stats().cancelled == 1


# Failures


class Breaks(LogitsProcessor, StoppingCriteria):
    """A user's object that raises after some tokens."""

    def __init__(self, error: Exception, after: int) -> None:
        self.error, self.after = error, after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if input_ids.shape[1] > self.after:
            raise self.error
        return False if scores is None else scores


@pytest.mark.parametrize("after", [0, 9, 12], ids=["first token", "first round", "later"])
@pytest.mark.parametrize("kind", ["logits_processors", "stopping_criteria"])
@pytest.mark.parametrize("method", ["uniform", "suffix"])
def test_a_request_that_fails_leaves_the_others_alone(method: str, kind: str, after: int) -> None:
    async def scenario(served: AsyncEngine) -> list[Generation]:
        good = [asyncio.create_task(served.generate(prompt(length), **SHORT)) for length in (4, 40)]
        broken = {kind: [Breaks(ValueError("mine"), after)]}
        with pytest.raises(RequestFailedError, match="ValueError: mine"):
            await served.generate(prompt(9), **SHORT, **broken)
        results = await asyncio.gather(*good)
        assert served.stats().failed == 1
        return results

    results = run(scenario, make_engine(method))
    for length, result in zip((4, 40), results, strict=True):
        assert result.token_ids == plain_text("llama", prompt(length), 25)


@pytest.mark.parametrize("chunk", [None, 2])
def test_an_error_of_the_model_is_that_requests_alone(chunk: int | None) -> None:
    model = build("llama")
    weight = model.get_input_embeddings().weight.detach().clone()
    weight[77] = torch.nan
    broken = type(model)(model.config).eval()
    broken.load_state_dict({**model.state_dict(), "model.embed_tokens.weight": weight})

    async def scenario(served: AsyncEngine) -> None:
        good = asyncio.create_task(served.generate([5, 6], max_new_tokens=10))
        with pytest.raises(NonFiniteLogitsError):
            await served.generate([5, 77, 6], max_new_tokens=10)
        with pytest.raises(OutOfMemoryError, match="a prompt of 2 tokens"):
            await served.generate([1, 2], logits_processors=[Breaks(torch.OutOfMemoryError("CUDA"), 0)])
        assert (await good).new_token_count == 10
        again = await served.generate([5, 6], max_new_tokens=10)  # with what the broken prompt has in common
        assert again.token_ids == good.result().token_ids

    run(scenario, Engine(broken, method="suffix", prefill_chunk=chunk))


@pytest.mark.parametrize("tokens", [1, 25], ids=["in its last step", "before"])
def test_a_request_that_the_tokenizer_ends_counts_as_failed(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Output) -> Any:
        raise ValueError("no text")

    async def scenario(served: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Output, "take_pieces", fail)
            with pytest.raises(RequestFailedError, match="ValueError: no text"):
                await served.generate(prompt(4), max_new_tokens=tokens, ignore_eos=True)
        stats = served.stats()
        assert (stats.running, stats.waiting, stats.finished, stats.failed) == (0, 0, 0, 1)
        assert stats.methods["uniform"].requests == 1
        await served.generate(prompt(4), **SHORT)
        assert (served.stats().finished, served.stats().failed) == (1, 1)

    run(scenario)


@pytest.mark.parametrize("runtime", ["auto", "eager"])
def test_pieces_are_handed_over_as_the_next_step_computes_where_it_is_native(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere at the end of their own step, as those of the last step are."""
    within: list[bool] = []
    stepping = [False]
    step, hand_over = Scheduler.step, EngineThread._hand_over

    def noted_step(scheduler: Scheduler) -> Any:
        stepping[0] = True
        try:
            return step(scheduler)
        finally:
            stepping[0] = False

    def noted_hand_over(served: EngineThread) -> None:
        within.extend([stepping[0]] if served._ready else [])
        hand_over(served)

    monkeypatch.setattr(Scheduler, "step", noted_step)
    monkeypatch.setattr(EngineThread, "_hand_over", noted_hand_over)
    engine = Engine(random_model(torch.bfloat16), method="suffix", runtime=runtime)

    async def scenario(served: AsyncEngine) -> list[Generation]:
        return await asyncio.gather(*(served.generate([1, 2, 3, length], max_new_tokens=length) for length in (3, 9)))

    results = run(scenario, engine)
    assert within[-1] is False, "there is no next step"
    overlaps = engine.target.independent_rows >= engine.chunks.longest
    assert any(within) == overlaps
    assert not overlaps or within.count(False) <= 2, "once at the end, or when the first request ended early"
    for length, result in zip((3, 9), results, strict=True):
        assert result.token_ids == engine.generate([1, 2, 3, length], max_new_tokens=length).token_ids


def test_pieces_come_in_few_parts_where_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one and the last ones do not wait, nor do any while a prompt is read."""
    parts, deliver = list[int](), engine_thread._deliver

    def noted(ready: Any) -> None:
        parts.append(sum(len(pieces) for stream, pieces, _ in ready if stream.request_id == "long"))
        deliver(ready)

    monkeypatch.setattr(engine_thread, "_deliver", noted)

    async def alone(served: AsyncEngine) -> None:
        stream = served.submit(prompt(7), request_id="long", **SHORT)
        assert len([piece async for piece in stream]) == 25

    async def beside_a_prompt(served: AsyncEngine) -> None:
        first = served.submit(prompt(7), request_id="long", **LONG)
        await anext(first)
        await served.generate(prompt(40), max_new_tokens=1)  # read in several steps
        first.cancel()

    engine = make_engine("autoregressive", runtime="eager", prefill_chunk=4)
    for seconds, expected in ((0.0, [1] * 25), (1e6, [1, 24])):
        monkeypatch.setattr(engine_thread, "_BETWEEN", seconds)
        parts.clear()
        run(alone, engine)
        assert [part for part in parts if part] == expected
    parts.clear()
    run(beside_a_prompt, engine)
    assert len(parts) > 5


def test_an_engine_that_fails_goes_on_with_the_next_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(served: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.decoding.scheduler.try_round", lambda *_, **__: 1 / 0)
            with pytest.raises(RequestFailedError, match="the engine failed: division by zero"):
                await served.generate(prompt(4))
        assert served.stats().alive
        assert (await served.generate(prompt(4), **SHORT)).token_ids == plain_text("llama", prompt(4), 25)

    run(scenario)


def test_a_thread_that_fails_ends_the_engine_and_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        served = AsyncEngine(make_engine(), max_batch=1)
        served.start()
        streams = [served.submit(prompt(7), **LONG), served.submit(prompt(8), **LONG)]
        await anext(streams[0])
        assert served.failure is None
        closed = asyncio.create_task(served.wait_closed())
        await asyncio.sleep(0)
        assert not closed.done()
        monkeypatch.setattr(Scheduler, "step", lambda _: 1 / 0)
        await asyncio.wait_for(closed, 60)
        assert isinstance(served.failure, ZeroDivisionError)
        for stream in streams:
            with pytest.raises(EngineClosedError, match="the engine failed: ZeroDivisionError: division by zero"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineClosedError, match="the engine failed: ZeroDivisionError: division by zero"):
            served.submit([1])
        stats = served.stats()
        assert not stats.alive
        assert (stats.running, stats.waiting, stats.failed) == (0, 0, 2)
        await served.wait_closed()
        await served.close()

    asyncio.run(main())


def test_waiting_for_the_end_of_an_engine_that_is_closed() -> None:
    async def main(starts: bool) -> None:
        served = AsyncEngine(make_engine())
        if starts:
            served.start()
        closed = asyncio.create_task(served.wait_closed())
        await asyncio.sleep(0)
        await served.close()
        await asyncio.wait_for(closed, 60)
        assert served.failure is None

    for starts in (False, True):
        asyncio.run(main(starts))


# Counts


def test_stats_count_what_happened() -> None:
    async def scenario(served: AsyncEngine) -> list[Generation]:
        assert served.stats().alive
        jobs = [
            served.generate(prompt(10), max_new_tokens=12),
            served.generate(prompt(5), max_new_tokens=8, method="autoregressive"),
        ]
        results = await asyncio.gather(*jobs)
        stats = served.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, 2)
        assert (stats.prompt_tokens, stats.output_tokens) == (15, 20)
        assert stats.methods["autoregressive"].tokens == 8
        assert stats.methods["autoregressive"].drafted == 0
        uniform = stats.methods["uniform"]
        assert (uniform.requests, uniform.tokens, uniform.rounds) == (1, 12, results[0].round_count)
        assert (uniform.drafted, uniform.accepted) == (results[0].drafted, results[0].accepted)
        assert uniform.accepted > 0
        assert stats.steps > 0
        assert stats.longest_step_seconds > 0
        return results

    run(scenario)


def test_methods_are_made_once_and_keep_what_they_learn() -> None:
    async def scenario(served: AsyncEngine) -> None:
        for _ in range(2):
            await served.generate(prompt(5), max_new_tokens=4, method="swift")
        first, second = (served.submit(prompt(5), max_new_tokens=4, method="swift") for _ in range(2))
        assert first.request.method is second.request.method
        own = served.submit(prompt(5), max_new_tokens=4, method="uniform", settings=DRAFTING["uniform"])
        assert own.request.method is served.engine.method
        changed = served.submit(prompt(5), max_new_tokens=4, settings={"draft_length": 2})
        assert changed.request.method.settings.draft_length == 2
        assert changed.request.method.settings.skip_ratio == served.engine.method.settings.skip_ratio
        for stream in (first, second, own, changed):
            async for _ in stream:
                pass

    run(scenario)
