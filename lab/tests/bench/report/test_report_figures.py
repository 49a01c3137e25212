"""Figures of a run by hand, and against what the overhead benchmark counts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import LAYERS, SUBLAYERS, build, prompt
from selfspec import Engine
from selfspec.runtimes.costs.parts import measure_latencies
from selfspec_lab.bench.benchmark import Sample
from selfspec_lab.bench.cost import DecodingBytes
from selfspec_lab.bench.overhead_figures import method_figures
from selfspec_lab.bench.report import write_report
from selfspec_lab.bench.report.figures import FIGURES
from selfspec_lab.bench.report.medians import median_interval
from selfspec_lab.bench.report.rounds import accepted_by_position, predicted_tokens_per_second
from selfspec_lab.bench.run.measurement import Measurement, output_fields
from selfspec_lab.measuring import StepBytes
from selfspec_lab.replay import play, tokens_per_layer
from written_runs import LATENCIES, PLAIN_ROUNDS, THREE_ROUNDS, failed, measured, played, summary_of, three_prompts


def test_figures_of_rounds_by_hand() -> None:
    # Two drafts of 2 and 1 tokens through one layer, three verifications through two; 4 tokens are committed.
    assert tokens_per_layer(play(THREE_ROUNDS), 2) == 4 / (3 * 1 + 3 * 2)
    assert tokens_per_layer(play([played(5, 4, None)]), 2) == 5 / 2
    # A second token was drafted once, and never accepted.
    assert accepted_by_position(THREE_ROUNDS) == [1 / 2, 0.0]
    assert accepted_by_position([played(3, 3), played(3, 1), played(1, 1)]) == [1.0, 1 / 2, 1 / 2]
    assert accepted_by_position([played(0, 0)]) == []


def test_predicted_speed_is_knapspecs_objective_by_hand() -> None:
    # The rounds begin at contexts 10, 12 and 13; a draft token runs one attention and one MLP beside what is outside.
    target = 2 * (0.001 * 12 + 1) + 2 * 2 + 4
    draft = (0.001 * 12 + 1) + 2 + 4
    expected = (1 - (1 / 3) ** 2) / (1 - 1 / 3) / (1 * draft + target)
    assert predicted_tokens_per_second([measured("x", records=THREE_ROUNDS)], LATENCIES) == pytest.approx(expected)
    plain = [measured("autoregressive", records=[played(0, 0, None)] * 4)]
    assert predicted_tokens_per_second(plain, LATENCIES) == pytest.approx(1 / (2 * (0.001 * 12 + 1) + 8))
    found = [measured("suffix", records=[played(3, 3, None)])]
    assert predicted_tokens_per_second(found, LATENCIES) == pytest.approx(4 / (2 * (0.001 * 10 + 1) + 8))


def test_figures_of_a_run_by_hand(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, three_prompts())
    figures = summary["candidates"]["layerskip"]["overall"]
    assert set(figures) == set(FIGURES)
    # By prompt 2.5 (of 2 and 3), 4 and 3; tokens a second 1.75 (of 2 and 1.5), 4 and 3.
    assert figures["speedup"] == pytest.approx(3)
    assert figures["tokens_per_second"] == pytest.approx(3)
    low, high = figures["speedup_interval"]
    assert 2.5 <= low <= 3 <= high <= 4
    # (1 + 4) seconds of plain decoding over 1 + 2, 1 + 1 and 1 + 4/3; in the second repeat 9 over 3 + 8/3.
    assert figures["speedup_with_prefill"] == pytest.approx(5 / (7 / 3))
    assert figures["speedup_over_transformers"] == pytest.approx((8 + 16) / 2)
    assert (figures["identical"], figures["compared"], figures["differing"]) == (3, 4, 1)
    assert figures["acceptance_rate"] == pytest.approx(1 / 3)
    assert figures["mean_generated_length"] == pytest.approx(4 / 3)
    assert figures["mean_draft_length"] == 1
    assert figures["accepted_by_position"] == [1 / 2, 0]
    assert figures["etpl"] == pytest.approx(4 / 9)
    assert figures["measured_tpt"] == pytest.approx(16 / (2 + 1 + 4 / 3 + 8 / 3))
    assert figures["ideal_speedup"] == 2
    assert figures["efficiency"] == pytest.approx(3 / 2)
    assert figures["time_to_first_token"] == 1
    assert figures["peak_memory_bytes"] == 1300
    assert figures["memory_above_plain"] == pytest.approx(0.1)
    seconds = 2 + 1 + 4 / 3 + 8 / 3
    assert figures["draft_share"] == pytest.approx(12 * 0.2 / seconds)
    assert figures["verify_share"] == pytest.approx(12 * 0.5 / seconds)
    assert figures["selection_share"] == pytest.approx(12 * 0.1 / seconds)
    assert sum(figures[f"{name}_share"] for name in ("draft", "verify", "selection")) > 1
    assert figures["other_share"] == 0
    assert (figures["rounds"], figures["tokens"], figures["prompts"], figures["failures"]) == (12, 20, 3, 0)


def test_plain_decoding_and_peers(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, three_prompts())
    candidates = summary["candidates"]
    assert list(candidates) == ["autoregressive", "layerskip", "transformers"]
    assert [each["kind"] for each in candidates.values()] == ["baseline", "method", "peer"]
    assert candidates["layerskip"]["settings"] == {"exit_layer": 1}
    assert candidates["transformers"]["settings"] is None
    plain, peer = (candidates[name]["overall"] for name in ("autoregressive", "transformers"))
    assert (plain["speedup"], plain["speedup_interval"], plain["etpl"]) == (1, [1, 1], 1 / 2)
    assert plain["acceptance_rate"] is None
    assert (peer["speedup"], peer["speedup_over_transformers"]) == (1 / 4, 1)
    for name in ("acceptance_rate", "etpl", "predicted_tpt", "ideal_speedup", "efficiency", "draft_share", "rounds"):
        assert peer[name] is None
    assert peer["measured_tpt"] == 8 / 32
    assert summary["plain_over"] == {"transformers": {"speedup": 4, "speedup_interval": [4, 4]}}
    assert summary["auto_over"] == {}


def test_auto_beside_each_other_candidate_prompt_by_prompt(tmp_path: Path) -> None:
    seconds = {"autoregressive": (4.0, 4.0, 4.0), "suffix": (1.0, 2.0, 4.0), "auto": (2.0, 1.0, 5.0)}
    measurements = [
        measured(name, key, each[place], PLAIN_ROUNDS, position=position)
        for place, key in enumerate("abc")
        for position, (name, each) in enumerate(seconds.items())
    ]
    over = summary_of(tmp_path, measurements)["auto_over"]
    assert list(over) == ["autoregressive", "suffix"]
    assert (over["autoregressive"]["speedup"], over["autoregressive"]["worst"]) == (2, 0.8)
    assert (over["suffix"]["speedup"], over["suffix"]["worst"]) == (0.8, 0.5)
    low, high = over["suffix"]["speedup_interval"]
    assert low <= 0.8 <= high


def test_categories_have_figures_of_their_own(tmp_path: Path) -> None:
    both = [
        measured(name, key, seconds, records, category=category, position=position)
        for position, (key, category, factor) in enumerate([("a", "math", 2), ("b", "code", 4)])
        for name, seconds, records in (("autoregressive", 4.0, PLAIN_ROUNDS), ("layerskip", 4 / factor, THREE_ROUNDS))
    ]
    candidate = summary_of(tmp_path, both)["candidates"]["layerskip"]
    assert [each["speedup"] for each in candidate["categories"].values()] == [2, 4]
    assert list(candidate["categories"]) == ["math", "code"]
    assert candidate["overall"]["speedup"] == 3


def test_only_prompts_and_repeats_of_both_are_compared(tmp_path: Path) -> None:
    measurements = [
        measured("autoregressive", "a", 4.0),
        measured("autoregressive", "b", 400.0),
        measured("layerskip", "a", 2.0),
        measured("layerskip", "a", 0.001, repeat=1),
        failed("layerskip", "b"),
        failed("layerskip", "b", repeat=1),
    ]
    candidate = summary_of(tmp_path, measurements)["candidates"]["layerskip"]
    assert candidate["overall"]["speedup"] == 2
    assert (candidate["overall"]["prompts"], candidate["overall"]["failures"]) == (1, 2)
    assert candidate["errors"] == ["RuntimeError: no luck (2 times)"]


def test_who_never_succeeded_has_no_figures(tmp_path: Path) -> None:
    measurements = [measured("autoregressive"), failed("layerskip")]
    summary = summary_of(tmp_path, measurements, failures={"swift": "InvalidSettingError: too few layers"})
    counts = {"identical", "compared", "differing", "tokens", "prompts", "failures"}
    for name, failures in (("layerskip", 1), ("swift", 0)):
        candidate = summary["candidates"][name]
        for figures in (candidate["overall"], candidate["categories"]["math"]):
            assert {figure for figure, value in figures.items() if value is not None} == counts
            assert figures["failures"] == failures
    assert summary["candidates"]["swift"]["errors"] == ["InvalidSettingError: too few layers"]


def test_outputs_of_one_token_have_no_speed(tmp_path: Path) -> None:
    nothing = DecodingBytes(0, 0, 0, 0, 0)
    names = ("autoregressive", "layerskip", "transformers")
    measurements = [measured(name, seconds=1e-4, records=[], bytes=nothing) for name in names]
    figures = summary_of(tmp_path, measurements)["candidates"]["layerskip"]["overall"]
    assert figures["speedup"] is figures["tokens_per_second"] is figures["ideal_speedup"] is figures["etpl"] is None
    assert figures["measured_tpt"] is None
    assert (figures["rounds"], figures["prompts"], figures["time_to_first_token"]) == (0, 1, 1)
    write_report(tmp_path)


def test_samples_of_peers_are_not_compared(tmp_path: Path) -> None:
    measurements = [measured("autoregressive"), measured("transformers", identical=None, bytes=None)]
    figures = summary_of(tmp_path, measurements)["candidates"]["transformers"]["overall"]
    assert (figures["identical"], figures["compared"], figures["differing"]) == (0, 0, 0)


def test_what_an_engine_did_is_what_the_overhead_benchmark_counts(tmp_path: Path) -> None:
    model: Any = build("llama")
    engines = {name: Engine(model, None, name) for name in ("autoregressive", "uniform", "prompt-lookup")}
    costs = StepBytes(engines["uniform"].target)
    outputs = {name: engine.generate(prompt(12), max_new_tokens=30) for name, engine in engines.items()}
    measurements = [
        Measurement("a", "x", name, repeat=0, turn=0, position=0, **output_fields(each, costs, 5))
        for name, each in outputs.items()
    ]
    latencies = measure_latencies(engines["uniform"].target, contexts=[8, 16], repeats=1)
    fields = {"sublayers": SUBLAYERS, "latencies": latencies.to_dict()}
    candidates = summary_of(tmp_path, measurements, **fields)["candidates"]
    samples = {
        name: [Sample(each.token_ids, each.seconds - each.prefill_seconds, 5, each)] for name, each in outputs.items()
    }
    assert outputs["uniform"].accepted > 0
    for name, output in outputs.items():
        figures = candidates[name]["overall"]
        expected = method_figures(samples[name], samples["autoregressive"], costs)
        for figure in ("speedup", "ideal_speedup", "efficiency", "acceptance_rate", "mean_generated_length"):
            assert figures[figure] == (None if expected[figure] is None else pytest.approx(expected[figure])), figure
        for share in ("selection_share", "draft_share", "verify_share", "other_share"):
            assert figures[share] == pytest.approx(expected[share], abs=1e-3)
        assert figures["rounds"] == output.round_count
    assert candidates["autoregressive"]["overall"]["etpl"] == pytest.approx(1 / LAYERS)
    assert candidates["uniform"]["overall"]["predicted_tpt"] > 0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_intervals_contain_the_median_and_are_always_the_same(values: list[float]) -> None:
    low, high = median_interval(values) or (math.nan, math.nan)
    assert min(values) <= low <= np.median(values) <= high <= max(values)
    assert median_interval(list(values)) == [low, high]


def test_intervals_narrow_with_more_prompts() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        low, high = median_interval(list(generator.normal(1, 0.1, count))) or (0.0, 0.0)
        widths.append(high - low)
    # The median of a thousand normal values has a standard error of 1.253 · 0.1 / √1000.
    assert widths[1] == pytest.approx(2 * 1.96 * 0.1253 / math.sqrt(1000), rel=0.4)
    assert widths[0] > 3 * widths[1]
    assert median_interval([]) is None
