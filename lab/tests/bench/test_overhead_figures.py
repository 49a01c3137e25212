"""Figures of one repeat, computed by hand."""

import pytest

from helpers.models import SUBLAYERS, build
from round_makers import output, record
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.types import PhaseSeconds
from selfspec_lab.bench.benchmark import Sample
from selfspec_lab.bench.cost import decoding_bytes
from selfspec_lab.bench.overhead_figures import method_figures, plain_figures
from selfspec_lab.measuring import StepBytes


def test_figures_of_a_repeat_by_hand() -> None:
    costs = StepBytes(Target(build("llama")))
    seconds = PhaseSeconds(select=0.1, draft=0.6, verify=0.8, other=0.3)
    drafted = output(record(4, 3, KeptSet.early_exit(2, SUBLAYERS), seconds))
    plain = output(*[record(0, 0)] * 4)
    method = [Sample(drafted.token_ids, 2.0, 70, drafted)]
    baseline = [Sample(plain.token_ids, 4.0, 60, plain)]
    figures = method_figures(method, baseline, costs)
    assert figures["tokens_per_second"] == 2.0
    assert figures["speedup"] == 2.0
    ideal = decoding_bytes(costs, [drafted]).ideal_speedup
    assert figures["ideal_speedup"] == ideal
    assert figures["efficiency"] == 2.0 / ideal
    assert figures["acceptance_rate"] == 0.75
    assert figures["mean_generated_length"] == 4.0
    assert figures["cost_coefficient"] == pytest.approx((0.6 / 4) / (4.0 / 4))
    shares = [figures[f"{name}_share"] for name in ("selection", "draft", "verify", "other")]
    assert shares == pytest.approx([0.05, 0.3, 0.4, 0.25])
    assert figures["peak_memory_bytes"] == 70

    step_bytes = decoding_bytes(costs, [plain]).plain / 4
    assert plain_figures(baseline, costs, 1e6)["bandwidth_fraction"] == step_bytes * 1.0 / 1e6
