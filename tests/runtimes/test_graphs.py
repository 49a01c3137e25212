"""The graphs runtime, with a recorder that does on the CPU what CUDA graphs do: the same operations, same addresses."""

import copy
import functools
import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import SUBLAYERS, build, plain_text, prompt
from helpers.recorder import StrictRecorder
from selfspec.engine import Engine
from selfspec.errors import NonFiniteLogitsError
from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.runtimes import arena, graphs
from selfspec.runtimes.arena import FEWEST_SLOTS, Arena, LeasedCache
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.graphs import MOST_ROWS, SHORTEST_SPAN, Graphs
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import Generation, SamplingParams

FAMILY_NAMES = ("llama", "mistral-window", "olmo2", "gemma2", "gemma3", "mixtral", "stablelm")
"""One of each way in which sublayers of families differ: the others are tested on the runtimes that are chosen."""

ALSO = ("gemma2", "olmo2", "stablelm")
"""Families of which fast tests compare the text alone."""

CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture
def _recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs runtime works, and says so if it does not."""
    monkeypatch.setattr(graphs, "find_recorder", lambda device: StrictRecorder())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the graphs runtime")
        yield


recording = pytest.mark.usefixtures("_recording")


@functools.cache
def own(name: str) -> PreTrainedModel:
    """A model of ours without hooks: transformers leaves some on the shared one when it is asked for hidden states."""
    model = copy.deepcopy(build(name))
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return model


def graphs_of(target: Target) -> Graphs:
    made = target.at(None).graphs
    assert made is not None
    return made


@torch.inference_mode()
def run(target: Target, state: SequenceState, token_ids: list[int], **layout: Any) -> torch.Tensor:
    """Logits of all rows, ``[rows, vocab]``."""
    step = target.lay_out(state, len(token_ids), **layout)
    hidden_states = target.run(target.embed(torch.tensor(token_ids)), range(target.sublayer_count), step).hidden_states
    return target.logits(hidden_states)


def random_tree(size: int, seed: int) -> TokenTree:
    draw = random.Random(seed)
    return TokenTree(tuple(draw.randint(max(-1, node - 4), node - 1) for node in range(size)))


def layouts(prefix: int) -> list[dict[str, Any]]:
    """Chains, trees, branches and gaps, twice each, so that what was recorded for one place is replayed at another."""
    found: list[dict[str, Any]] = []
    for shift in (0, 5):
        for tree in (random_tree(12, shift + 1), random_tree(30, shift + 2)):
            found.append({"rows": len(tree) + 1, "depths": list(tree.depths), "visible": tree.visibility()})
        found += [{"rows": rows, "start": prefix + shift} for rows in (1, 2, 5, 40, 64, 70)]
        found += [
            {"rows": 3, "start": prefix + shift + 3, "prefix": 30},
            {"rows": 40, "start": prefix + shift + 3, "prefix": 1 + shift},
            {"rows": 6, "depths": [0, 1, 2] * 2, "visible": branches(2, 3)},
        ]
    return found


def outputs(target: Target, prefix: int) -> list[torch.Tensor]:
    """Logits behind a prefix for every layout, in changing order, with those of the prefix itself before them."""
    state = target.new_sequence(prefix, capacity=prefix + 100, last_length=prefix + 1)
    found = [run(target, state, prompt(prefix))]
    state.cache.commit(range(prefix))
    for layout in layouts(prefix):
        options = {key: value for key, value in layout.items() if key != "rows"}
        if options.get("start", prefix) > options.get("prefix", prefix):  # the slots between are not written
            options.setdefault("prefix", prefix)
        found.append(run(target, state, prompt(layout["rows"], seed=3), **options))
    return found


@recording
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALSO)) for name in FAMILY_NAMES]
)
def test_replays_compute_what_the_modules_do(name: str) -> None:
    """In any layout, at several lengths, on two sequences one after the other."""
    ours, generic = Target(own(name), "graphs"), Target(own(name), "eager")
    for prefix in (50, 230):
        wanted = outputs(generic, prefix)
        for index, (found, expected) in enumerate(zip(outputs(ours, prefix), wanted, strict=True)):
            torch.testing.assert_close(
                found, expected, **CLOSE, msg=lambda text, i=index, n=prefix: f"layout {i} behind {n}: {text}"
            )
    assert len(graphs_of(ours).recordings) > 0
    assert graphs_of(ours).problem is None


METHODS: dict[str, dict[str, Any]] = {
    "layerskip": {"exit_layer": 3, "draft_length": 4},
    "del": {},
    "knapspec": {"interval": 5, "recent_tokens": 4},
    "clasp": {"skipped_layers": 2, "update_interval": 1, "draft_exit_threshold": 0.2, "draft_length": 4},
    "swift": {"context_window": 8, "confidence_threshold": 0.0, "max_draft_length": 3, "max_siblings": 5},
}


def assert_drafts_stand(result: Generation) -> None:
    assert result.drafted > 0
    assert result.accepted > 0


CHAINS_AND_TREES = [*zip(FAMILY_NAMES, itertools.cycle(["layerskip", "swift"]), strict=False), ("llama", "swift")]
"""Each family with one of the two."""


@recording
@pytest.mark.parametrize(("name", "method"), CHAINS_AND_TREES)
def test_text_is_the_models_own(name: str, method: str) -> None:
    """Behind a prompt that the fused blocks prefill and one that replays do, on the same arena."""
    engine = Engine(own(name), method=method, settings=METHODS[method], runtime="graphs")
    results = []
    assert 17 <= MOST_ROWS < 90
    for length in (90, 17):
        results.append(engine.generate(prompt(length), max_new_tokens=24))
        assert results[-1].token_ids == plain_text(name, prompt(length), 24)
    assert_drafts_stand(max(results, key=lambda result: result.accepted))
    assert len(graphs_of(engine.target).recordings) > 0


@recording
@pytest.mark.parametrize("method", ["del", "knapspec", "clasp"])
def test_text_of_methods_that_run_more_between_rounds(method: str) -> None:
    engine = Engine(own("gemma3"), method=method, settings=METHODS[method], runtime="graphs")
    result = engine.generate(prompt(64), max_new_tokens=24)
    assert result.token_ids == plain_text("gemma3", prompt(64), 24)
    assert_drafts_stand(result)


@recording
@pytest.mark.parametrize("method", ["layerskip", "swift"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral-window", "gemma2"))]
)
def test_coupled_text_depends_on_the_seed_alone(name: str, method: str) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=40)
    plain = Engine(own(name), runtime="fused", method="autoregressive").generate(prompt(17), params)
    result = Engine(own(name), method=method, settings=METHODS[method], runtime="graphs").generate(prompt(17), params)
    assert result.token_ids == plain.token_ids
    assert_drafts_stand(result)


@recording
def test_text_grows_from_one_span_into_the_next() -> None:
    length = SHORTEST_SPAN - 8
    engine = Engine(own("gemma3"), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    result = engine.generate(prompt(length), max_new_tokens=24)
    assert result.token_ids == plain_text("gemma3", prompt(length), 24)
    assert_drafts_stand(result)
    assert {span for _, _, span in graphs_of(engine.target).recordings} - {0} == {SHORTEST_SPAN, 2 * SHORTEST_SPAN}


@recording
def test_a_kept_set_is_replayed_by_sublayers_until_it_comes_again_and_again() -> None:
    target = Target(own("llama"), "graphs")
    state = target.new_sequence(20, capacity=60, last_length=60)
    run(target, state, prompt(20))
    state.cache.commit(range(20))

    @torch.inference_mode()
    def drafted(*kept: int) -> set[tuple[int, ...]]:
        step = target.lay_out(state, 1)
        target.run(target.embed(torch.tensor([1])), kept, step)
        return {sublayers for sublayers, rows, _ in graphs_of(target).recordings if rows == 1}

    whole = tuple(range(SUBLAYERS))
    assert drafted(*whole) == {whole}, "the whole model is one graph from the first time on"
    assert drafted(0, 1, 4) == {whole, (0,), (1,), (4,)}
    assert drafted(0, 4) == drafted(0, 1) == {whole, (0,), (1,), (4,)}, "another kept set records nothing anew"
    assert (0, 1, 4) not in drafted(0, 1, 4) | drafted(0, 1, 4)
    assert (0, 1, 4) in drafted(0, 1, 4)


@recording
def test_a_warm_target_records_nothing_in_a_request() -> None:
    engine = Engine(own("gemma3"), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    engine.warmup()
    warm = graphs_of(engine.target).recordings
    spans = [SHORTEST_SPAN << power for power in range(8) if SHORTEST_SPAN << power <= FEWEST_SLOTS]
    assert engine.target.recorded == len(warm) == 7 * (SUBLAYERS // 2) * (1 + len(spans)) + 7 * len(spans)
    for length in (17, 300):
        result = engine.generate(prompt(length), max_new_tokens=16)
        assert result.token_ids == plain_text("gemma3", prompt(length), 16)
    added = {sublayers for sublayers, *_ in graphs_of(engine.target).recordings - warm}
    assert (engine.target.recorded > len(warm)) == bool(added)
    assert added <= {tuple(range(6)), tuple(range(6, SUBLAYERS))}, "but what comes again and again"


@recording
def test_what_a_run_returns_is_not_overwritten_by_the_next() -> None:
    target = Target(own("llama"), "graphs")
    state = target.new_sequence(8, capacity=20, last_length=20)
    with torch.inference_mode():
        rows = target.embed(torch.tensor([1, 2, 3]))
        first = target.run(rows, range(SUBLAYERS), target.lay_out(state, 3), {0, 3, SUBLAYERS})
        last = torch.empty_like(rows[1:])
        target.run(rows, range(SUBLAYERS), target.lay_out(state, 3), last_rows={3: last})
        kept = {index: states.clone() for index, states in first.captured.items()}
        output = first.hidden_states.clone()
        target.run(2 * rows, range(SUBLAYERS), target.lay_out(state, 3), {0, 3, SUBLAYERS})
    assert torch.equal(kept[0], rows)
    assert torch.equal(last, kept[3][1:])
    assert torch.equal(first.hidden_states, output)
    assert all(torch.equal(first.captured[index], states) for index, states in kept.items())


@recording
def test_two_steps_may_take_turns() -> None:
    """A step of one forward, one of another, then the first one goes on."""
    ours, generic = Target(own("gemma3"), "graphs"), Target(own("gemma3"), "eager")
    found = []
    for target in (ours, generic):
        state = target.new_sequence(20, capacity=60, last_length=60)
        run(target, state, prompt(20))
        state.cache.commit(range(20))
        with torch.inference_mode():
            one, other = target.lay_out(state, 2), target.lay_out(state, 2, start=22, prefix=20)
            streams = [target.embed(torch.tensor([5, 6])), target.embed(torch.tensor([7, 8]))]
            for sublayer in range(SUBLAYERS):
                for index, step in enumerate((one, other)):
                    streams[index] = target.run(streams[index], (sublayer,), step).hidden_states
        found.append(streams)
    for ours_stream, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours_stream, wanted, **CLOSE)


@recording
def test_rows_of_several_sequences_run_without_graphs() -> None:
    """The sequence that has the arena, and one with a cache of its own."""
    target, streams = Target(own("gemma3"), "graphs"), []
    states = [target.new_sequence(20, capacity=60, last_length=60) for _ in range(2)]
    for state, token in zip(states, (5, 6), strict=True):
        run(target, state, prompt(20, seed=token))
        state.cache.commit(range(20))
        streams.append(run(target, state, [token]))
    recorded = len(graphs_of(target).recordings)
    with torch.inference_mode():
        forward = Forward.join([target.lay_out(state, 1) for state in states])
        together = target.run(target.embed(torch.tensor([5, 6])), range(SUBLAYERS), forward).hidden_states
        logits = target.logits(together, widest=1)
    assert len(graphs_of(target).recordings) == recorded > 0
    torch.testing.assert_close(logits, torch.cat(streams), **CLOSE)


@recording
def test_what_comes_while_the_arena_is_lent_runs_on_a_cache_of_its_own() -> None:
    engine = Engine(own("llama"), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    first = engine.stream(prompt(17), max_new_tokens=24)
    next(first)
    recorded = len(graphs_of(engine.target).recordings)
    second = engine.generate(prompt(64), max_new_tokens=24)
    assert len(graphs_of(engine.target).recordings) == recorded > 0
    assert first.result.token_ids == plain_text("llama", prompt(17), 24)
    assert second.token_ids == plain_text("llama", prompt(64), 24)
    state = engine.target.new_sequence(4, capacity=8, last_length=8)
    assert isinstance(state.cache, LeasedCache), "a finished request kept the arena"


@recording
def test_an_arena_comes_back_whatever_became_of_its_sequence() -> None:
    engine = Engine(own("llama"), runtime="graphs", method="autoregressive")
    abandoned = engine.stream(prompt(17), max_new_tokens=24)
    next(abandoned)
    del abandoned
    gc.collect()
    state = engine.target.new_sequence(4, capacity=8, last_length=8)
    assert isinstance(state.cache, LeasedCache)
    assert not isinstance(engine.target.new_sequence(4, capacity=8, last_length=8).cache, LeasedCache)


@recording
def test_threads_do_not_disturb_each_other() -> None:
    engine = Engine(own("llama"), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    lengths = [17, 64, 90, 2] * 2
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda length: engine.generate(prompt(length), max_new_tokens=16), lengths))
    for length, result in zip(lengths, results, strict=True):
        assert result.token_ids == plain_text("llama", prompt(length), 16)


@recording
def test_a_longer_request_gets_a_larger_arena_after_the_smaller_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "FEWEST_SLOTS", SHORTEST_SPAN)
    engine = Engine(own("llama"), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    engine.generate(prompt(17), max_new_tokens=24)
    old = weakref.ref(graphs_of(engine.target).arenas.current.slots.untyped_storage())
    found: list[tuple[int, bool]] = []

    def make_alone(make_slots: Callable[[int], torch.Tensor], capacity: int) -> Arena:
        alone = old() is None
        made = Arena(make_slots, capacity)
        found.append((made.capacity, alone))
        return made

    monkeypatch.setattr(arena, "Arena", make_alone)
    engine.generate(prompt(SHORTEST_SPAN - 8), max_new_tokens=12)
    assert found == [(2 * SHORTEST_SPAN, True)]
    assert engine.generate(prompt(17), max_new_tokens=24).token_ids == plain_text("llama", prompt(17), 24)
    assert len(found) == 1


@recording
def test_a_changed_model_is_recorded_anew() -> None:
    model = copy.deepcopy(own("llama"))
    engine = Engine(model, method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    before = engine.generate(prompt(17), max_new_tokens=12).token_ids
    first = weakref.ref(graphs_of(engine.target))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(-3 * model.model.layers[1].mlp.down_proj.weight)
    after = engine.generate(prompt(17), max_new_tokens=12).token_ids
    assert first() is None, "the graphs of the model as it was, and their arena, were kept"
    assert len(graphs_of(engine.target).recordings) > 0
    assert (
        after
        == Engine(model, runtime="eager", method="autoregressive").generate(prompt(17), max_new_tokens=12).token_ids
        != before
    )


@recording
def test_what_is_not_fused_runs_between_the_replays() -> None:
    model = copy.deepcopy(own("llama"))
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    engine = Engine(model, method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    assert engine.target.fused_count == SUBLAYERS - 2
    assert engine.generate(prompt(17), max_new_tokens=24).token_ids == plain_text("llama", prompt(17), 24)
    recorded = {index for sublayers, *_ in graphs_of(engine.target).recordings for index in sublayers}
    assert recorded == set(range(SUBLAYERS)) - {2, 5}


@recording
def test_a_draft_that_is_no_number_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves behind in hidden slots is read by recorded attention, with a weight of zero."""
    target = Target(own("llama"), "graphs")
    state = target.new_sequence(20, capacity=60, last_length=60)
    run(target, state, prompt(20))
    state.cache.commit(range(20))
    expected = run(target, state, [1])
    with torch.inference_mode():
        step = target.lay_out(state, 6)
        target.run(torch.full((6, target.hidden_size), torch.nan), range(SUBLAYERS), step)
    assert graphs_of(target).arenas.current.slots.isnan().any()
    assert torch.equal(run(target, state, [1]), expected)


@recording
def test_logits_that_are_no_numbers_are_refused_as_ever() -> None:
    model = copy.deepcopy(own("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(torch.inf)
    engine = Engine(model, runtime="graphs", method="autoregressive")
    with pytest.raises(NonFiniteLogitsError):
        engine.generate(prompt(17), max_new_tokens=4)


class RaisingRecorder:
    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        raise RuntimeError("this operation is not permitted when the stream is capturing")


class WrongRecorder:
    """Its replays spoil the stream and the cache."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        def twice() -> None:
            function()
            function()

        return twice


class LateRaisingRecorder(StrictRecorder):
    """Fails in the middle of a request, when others have been recorded."""

    def __init__(self) -> None:
        self.left = 9

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.left -= 1
        if not self.left:
            function()
            raise RuntimeError("out of memory")
        return super().record(function)


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (RaisingRecorder, "recording failed: this operation is not permitted"),
        (WrongRecorder, "a replay does not compute what was recorded"),
        (LateRaisingRecorder, "recording failed: out of memory"),
    ],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_recorder_that_fails_is_given_up_with_one_warning(
    name: str, recorder: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "find_recorder", lambda device: recorder())
    engine = Engine(own(name), method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            result = engine.generate(prompt(17), max_new_tokens=24)
            assert result.token_ids == plain_text(name, prompt(17), 24)
            assert_drafts_stand(result)
    fallbacks = [str(warning.message) for warning in caught if "graphs runtime" in str(warning.message)]
    assert len(fallbacks) == 1, fallbacks
    assert reason in fallbacks[0]
    assert graphs_of(engine.target).arenas.current is None, "an arena without a use was kept"


def test_without_a_device_for_it_the_fused_blocks_run_with_one_warning() -> None:
    model = copy.deepcopy(own("llama"))
    with pytest.warns(RuntimeWarning, match="falls back to fused blocks: there are no CUDA graphs on .* 'cpu'"):
        engine = Engine(model, method="layerskip", settings=METHODS["layerskip"], runtime="graphs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.warmup()
        result = engine.generate(prompt(17), max_new_tokens=24)
        model.double()  # taken apart anew, without another warning
        engine.generate(prompt(17), max_new_tokens=4)
    assert result.token_ids == plain_text("llama", prompt(17), 24)
    assert {type(sublayer) for sublayer in engine.target.sublayers} == {FusedAttention, FusedMLP}


@recording
def test_auto_does_not_choose_graphs() -> None:
    assert Target(own("llama")).at(None).graphs is None
