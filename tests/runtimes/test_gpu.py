"""The same guarantees on a CUDA device. Skipped where there is none."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch

from helpers.models import FAMILY_NAMES, SUBLAYERS, build, prompt
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec import Engine, SamplingParams
from selfspec.runtimes.arena import FEWEST_SLOTS
from selfspec.runtimes.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [5, 17, 3, 99, 42, 8]


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_generate(name: str, method: str) -> None:
    model = copy.deepcopy(build(name)).cuda()
    expected = model.generate(torch.tensor([PROMPT], device="cuda"), max_new_tokens=40, do_sample=False)
    result = Engine(model, method=method).generate(PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == expected[0, len(PROMPT) :].tolist()


def test_a_trial_finds_more_than_transformers_modules() -> None:
    target = Target(copy.deepcopy(build("llama")).cuda())
    assert target.trial is not None
    assert {"eager", "fused", "graphs"} <= set(target.trial.order), target.trial.table()


@pytest.mark.parametrize("method", METHODS)
def test_the_text_depends_on_the_seed_alone(method: str) -> None:
    model = copy.deepcopy(build("llama")).cuda()
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    plain = Engine(model, method="autoregressive").generate(PROMPT, params)
    assert Engine(model, method=method).generate(PROMPT, params).token_ids == plain.token_ids
    assert plain.peak_memory_bytes > 0


GRAPH_METHODS = {
    "layerskip": {"exit_layer": 3, "draft_length": 4},
    "uniform": {"skip_ratio": 0.5, "draft_length": 5, "confidence_threshold": 0.0},
    "swift": {"context_window": 8, "confidence_threshold": 0.0, "max_draft_length": 3, "max_siblings": 5},
}


@pytest.fixture
def _graphs_work() -> Iterator[None]:
    """Falling back to the fused blocks is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the graphs runtime")
        yield


graphs_work = pytest.mark.usefixtures("_graphs_work")


def recorded(target: Target) -> int:
    graphs = target.at(None).graphs
    assert graphs is not None
    return len(graphs.recordings)


@graphs_work
@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("method", GRAPH_METHODS)
def test_graphs_write_the_models_own_text(name: str, method: str) -> None:
    """Behind prompts that the fused blocks prefill and that replays do, one after the other on one arena."""
    model = copy.deepcopy(build(name)).cuda()
    engine = Engine(model, method=method, settings=GRAPH_METHODS[method], runtime="graphs")
    results = []
    for length in (90, 17, 250):
        expected = model.generate(torch.tensor([prompt(length)], device="cuda"), max_new_tokens=24, do_sample=False)
        results.append(engine.generate(prompt(length), max_new_tokens=24))
        assert list(results[-1].token_ids) == expected[0, length:].tolist()
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    assert recorded(engine.target) > 0


@graphs_work
@pytest.mark.parametrize("method", GRAPH_METHODS)
def test_graphs_write_the_text_of_the_seed(method: str) -> None:
    model = copy.deepcopy(build("gemma3")).cuda()
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    plain = Engine(model, runtime="fused", method="autoregressive").generate(PROMPT, params)
    result = Engine(model, method=method, settings=GRAPH_METHODS[method], runtime="graphs").generate(PROMPT, params)
    assert result.token_ids == plain.token_ids
    assert result.drafted > 0
    assert result.accepted > 0


@graphs_work
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@torch.inference_mode()
def test_replays_compute_what_the_fused_blocks_do(dtype: torch.dtype, tolerance: float) -> None:
    """At places other than those they were recorded at, with other memory taken and given back in between."""
    model = copy.deepcopy(build("llama")).to("cuda", dtype)
    found = []
    for runtime in ("graphs", "fused"):
        target = Target(model, runtime)
        state = target.new_sequence(1, capacity=400, last_length=400)
        streams = []
        for start in range(0, 360, 3):
            ids = torch.tensor(prompt(3, seed=start), device="cuda")
            step = target.lay_out(state, 3)
            streams.append(target.run(target.embed(ids), range(SUBLAYERS), step).hidden_states)
            state.cache.commit(range(3))
            torch.full((1 + start, 1000), torch.nan, device="cuda")
        found.append(torch.cat(streams))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@graphs_work
def test_a_warm_engine_records_nothing_in_a_request_and_a_longer_request_all_anew() -> None:
    model = copy.deepcopy(build("llama")).cuda()
    model.config.max_position_embeddings = 4 * FEWEST_SLOTS
    settings = GRAPH_METHODS["layerskip"]
    engine = Engine(model, method="layerskip", settings=settings, runtime="graphs")
    engine.warmup()
    assert recorded(engine.target) > 0
    first = engine.generate(prompt(300), max_new_tokens=16)
    warm = recorded(engine.target)
    assert engine.generate(prompt(300), max_new_tokens=16).token_ids == first.token_ids
    assert recorded(engine.target) == warm > 0
    for length in (2 * FEWEST_SLOTS, 300):  # the pool of the first graphs ends with them
        plain = Engine(model, runtime="fused", method="autoregressive").generate(prompt(length), max_new_tokens=16)
        result = engine.generate(prompt(length), max_new_tokens=16)
        assert result.token_ids == plain.token_ids
    assert result.token_ids == first.token_ids
    assert 0 < recorded(engine.target) < warm
