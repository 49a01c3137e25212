"""Greedy text in float32 is token for token what transformers' own ``generate`` writes, with every method."""

from typing import Any

import pytest
import torch

from helpers.drafts import FINDERS
from helpers.models import FAMILY_NAMES, ROPE_SWITCH, VARIANTS, VOCABULARY, build, plain_text, prompt
from helpers.runs import DEFAULT_RUNS, RUNS, Run
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec.engine import Engine
from selfspec.types import Generation

EVERY_KIND = ("autoregressive", "clasp", "layerskip", "swift", "uniform")
"""Methods that together run a model in every way there is: chains, trees, early exits, rows between rounds."""

EVERY_RUN = ("llama", "gemma3", "qwen3-moe-window")
"""Variants on which each method does all of its runs: on the others it does one of them, each on some."""


CASES = [(name, method) for name in VARIANTS for method in (METHODS if name in FAMILY_NAMES else EVERY_KIND)]
LONG_PROMPTS = (300, 700)


def new_tokens(name: str, run: Run) -> int:
    """As many as asked for, but not past the point where a model changes its rope."""
    if name == "phi3-longrope" and run.length <= ROPE_SWITCH:
        return min(run.new_tokens, ROPE_SWITCH + 1 - run.length)
    return run.new_tokens


def expected_text(name: str, run: Run) -> tuple[int, ...]:
    """The beginning of the longest text that any run wants of this prompt, so that a prompt is generated for once."""
    alike = [other for runs in (*RUNS.values(), DEFAULT_RUNS) for other in runs if other.length == run.length]
    longest = max(new_tokens(name, other) for other in (*alike, run))
    return plain_text(name, prompt(run.length), longest)[: new_tokens(name, run)]


def generate(name: str, method: str, run: Run, **engine_options: Any) -> Generation:
    """Generates and compares."""
    engine = Engine(build(name), method=method, settings=run.settings, **engine_options)
    result = engine.generate(prompt(run.length), max_new_tokens=new_tokens(name, run))
    assert result.token_ids == expected_text(name, run), f"{name}, {method}, {run}"
    assert result.finish_reason == "length"
    return result


def assert_drafts_stand(result: Generation, method: str) -> None:
    """Text that is right because nothing was drafted, or nothing accepted, proves nothing."""
    drafts = method != "autoregressive"
    assert (result.drafted > 0, result.accepted > 0) == (drafts, drafts), result.settings


@pytest.mark.parametrize(("name", "method"), CASES)
def test_text_is_the_models_own(name: str, method: str) -> None:
    """All methods on one variant of each family, some methods on the others."""
    runs = RUNS.get(method, DEFAULT_RUNS)
    if name not in FAMILY_NAMES:
        runs = runs[-1:]
    elif name not in EVERY_RUN and method not in FINDERS:
        runs = (runs[FAMILY_NAMES.index(name) % len(runs)],)
    results = [generate(name, method, run) for run in runs]
    if method in FINDERS:
        results = [max(results, key=lambda result: result.accepted)]
    for result in results:
        assert_drafts_stand(result, method)


PARTLY_FUSED = ("glm4-moe", "stablelm-head-norms")
"""Variants of which some sublayers stay with transformers' modules, where there are no kernels or everywhere."""

RUNTIME_CASES = [
    *((name, runtime, method) for name in ("llama", "gemma3") for runtime in ("eager", "fused") for method in METHODS),
    *((name, "compiled", method) for name in ("llama", "gemma3") for method in EVERY_KIND),
    *((name, runtime, method) for name in PARTLY_FUSED for runtime in ("eager", "fused") for method in EVERY_KIND),
]


@pytest.mark.parametrize(("name", "runtime", "method"), RUNTIME_CASES)
def test_text_is_the_same_on_every_runtime(name: str, runtime: str, method: str) -> None:
    """All that a CPU has; ``test_graphs`` has the one of CUDA, and all other tests have ``auto``."""
    runs = RUNS.get(method, DEFAULT_RUNS)
    results = [generate(name, method, run, runtime=runtime) for run in (runs if method in FINDERS else runs[-1:])]
    assert_drafts_stand(max(results, key=lambda result: result.accepted), method)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_text_after_long_prompts(name: str) -> None:
    """Every method on half of the families, on prompts far longer than the windows, prefilled in chunks."""
    for index, method in list(enumerate(METHODS))[FAMILY_NAMES.index(name) % 2 :: 2]:
        run = RUNS.get(method, DEFAULT_RUNS)[-1]
        length = LONG_PROMPTS[index // 2 % 2]
        long_run = Run(length, run.settings, new_tokens=16)
        result = generate(name, method, long_run, prefill_chunk=(128, 1024)[index // 2 % 2])
        if method in FINDERS:
            assert result.drafted > 0
        else:
            assert_drafts_stand(result, method)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "phi3-longrope"])
def test_text_does_not_depend_on_the_chunks_of_the_prefill(name: str) -> None:
    for chunk in (1, 7, 64, 300):
        result = generate(name, "layerskip", Run(300, {"exit_layer": 2}, new_tokens=8), prefill_chunk=chunk)
        assert_drafts_stand(result, "layerskip")


def test_several_outputs_of_one_engine() -> None:
    """An engine that has generated before generates the same again."""
    engine = Engine(build("llama"), method="layerskip-fs", settings={"exit_layer": 3})
    for length in (17, 64, 2, 17):
        assert engine.generate(prompt(length), max_new_tokens=24).token_ids == plain_text("llama", prompt(length), 24)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens(count: int) -> None:
    for method in METHODS:
        engine = Engine(build("gemma3"), method=method)
        result = engine.generate(prompt(64), max_new_tokens=count)
        assert result.token_ids == plain_text("gemma3", prompt(64), count)
        assert result.drafted <= max(0, count - 2), "drafted more than can be committed"


def ends_within_rounds(method: str, name: str, **parameters: Any) -> list[Generation]:
    """Runs cut at each of the first tokens of a text, so that the end falls everywhere in a round."""
    text = plain_text(name, prompt(17), 24)
    results = []
    for cut in range(12):
        if text[cut] in text[:cut]:
            continue
        engine = Engine(build(name), method=method, settings={"exit_layer": 4, "draft_length": 5})
        result = engine.generate(
            prompt(17), max_new_tokens=24, **{key: value(text[cut]) for key, value in parameters.items()}
        )
        assert result.token_ids == text[: cut + 1]
        results.append(result)
    assert len(results) > 5
    return results


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_stop_tokens_cut_inside_a_round(name: str) -> None:
    results = ends_within_rounds("layerskip", name, stop_token_ids=lambda token: (token,))
    assert {result.finish_reason for result in results} == {"stop_token"}
    assert any(result.origins[-1] == "draft" for result in results), "no cut fell on a drafted token"
    assert any(result.origins[-1] == "target" for result in results)


@pytest.mark.parametrize("name", ["mistral-window", "qwen3"])
@pytest.mark.parametrize("several", [False, True])
def test_end_of_sequence_ids_cut_where_transformers_cuts(
    name: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = build(name), plain_text(name, prompt(17), 24)
    unused = next(token for token in range(VOCABULARY) if token not in text)
    middle = next(token for index, token in enumerate(text) if index > 6 and token not in text[:index])
    later = text[-1]
    ids = [unused, later, middle] if several else middle
    monkeypatch.setattr(model.generation_config, "eos_token_id", ids)
    wanted = model.generate(
        torch.tensor([prompt(17)]),
        attention_mask=torch.ones(1, 17, dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )[0, 17:].tolist()
    assert 1 < len(wanted) < 24
    for method in METHODS:
        engine = Engine(model, method=method)
        result = engine.generate(prompt(17), max_new_tokens=24)
        assert list(result.token_ids) == wanted, method
        assert result.finish_reason == "eos"
        assert engine.generate(prompt(17), max_new_tokens=24, ignore_eos=True).token_ids == text


@pytest.mark.parametrize("method", METHODS)
def test_the_counts_add_up(method: str) -> None:
    result = Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=24)
    assert result.origins[0] == "prefill"
    assert result.token_ids[1:] == tuple(token for record in result.rounds for token in record.token_ids)
    assert result.origins.count("draft") == result.accepted
    for record in result.rounds:
        assert record.accepted <= record.drafted <= record.candidates
        assert len(record.token_ids) in (record.accepted, record.accepted + 1)
