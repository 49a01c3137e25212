"""Claims are decided by paired tests: what they decide, their power against simulation, and what is not compared."""

import numpy as np
import pytest

from selfspec_lab.checks import Check, compare, conclude, not_applicable, shown
from selfspec_lab.decide import (
    LEAST_PAIRS,
    MOST_PARTS,
    POWER,
    describe_test,
    detectable_difference,
    mean_interval,
    paired_test,
)
from selfspec_lab.decide import t_test_power as power


def sample(mean: float, count: int = 40, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, 1.0, count).tolist()


@pytest.mark.parametrize(("mean", "status"), [(1.0, "holds"), (-1.0, "refuted"), (0.02, "undecided")])
def test_the_interval_decides(mean: float, status: str) -> None:
    test = paired_test(sample(mean))
    assert test.status == status
    assert test.low < test.mean < test.high


def test_a_bound_moves_the_decision() -> None:
    values = sample(1.0)
    assert paired_test(values, bound=2.0).status == "refuted"
    assert paired_test(values, bound=0.2).status == "holds"
    assert "to be above +2.000" in describe_test(paired_test(values, bound=2.0))


def test_few_pairs_decide_nothing_however_clear_they_are() -> None:
    assert paired_test([5.0] * (LEAST_PAIRS - 1)).status == "undecided"
    assert paired_test([5.0] * LEAST_PAIRS).status == "holds"
    one = paired_test([5.0], effect=1.0)
    assert (one.status, one.detectable, one.power) == ("undecided", None, None)
    assert "fewer than" in describe_test(one)


@pytest.mark.parametrize("values", [[0.0] * 29 + [1.0], [0.0, 1.0] * 15, [3.0] * 30])
def test_intervals_are_finite(values: list[float]) -> None:
    low, high = mean_interval(values)
    assert np.isfinite([low, high]).all()
    assert low <= np.mean(values) <= high


def test_intervals_contain_the_true_mean_as_often_as_they_say() -> None:
    found = [mean_interval(np.random.default_rng(seed).exponential(1.0, 30).tolist()) for seed in range(60)]
    assert sum(low <= 1.0 <= high for low, high in found) / 60 > 0.85


@pytest.mark.parametrize("effect", [0.2, 0.5, 20.0])
def test_power_is_how_often_the_t_test_finds_an_effect(effect: float) -> None:
    from scipy import stats

    draws = np.random.default_rng(0).normal(effect, 1.0, (3000, 25))
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05) & (draws.mean(1) > 0)
    assert power(effect, 1.0, 25) == pytest.approx(found.mean(), abs=0.03)


def test_the_detectable_difference_has_the_power_that_it_says() -> None:
    assert power(detectable_difference(2.0, 40), 2.0, 40) == pytest.approx(POWER, abs=0.02)
    assert power(0.0, 0.0, 30) == 0.0
    assert power(0.1, 0.0, 30) == 1.0


def test_a_claim_is_all_of_its_parts() -> None:
    holds, refuted, open_ = (Check("a", status, "1") for status in ("holds", "refuted", "undecided"))
    assert conclude([holds, holds]) == "holds"
    assert conclude([holds, open_]) == "undecided"
    assert conclude([holds, open_, refuted]) == "refuted"
    assert conclude([holds, not_applicable("b", "c")]) == "holds"


def test_the_more_parts_the_surer_one_has_to_be_refuted() -> None:
    spread = np.linspace(-1.0, 1.0, 30).tolist()  # its mean has a standard error of 0.11
    clear, barely = (compare("a", [each - shift for each in spread]) for shift in (1.0, 0.26))
    holds, clock = compare("b", sample(1.0)), shown("c", True, "1")
    assert clear.test is not None
    assert clear.test.refuted_among == MOST_PARTS
    assert barely.test is not None
    among = barely.test.refuted_among
    assert 1 < among < 8
    assert conclude([*[holds] * 20, clear]) == "refuted"
    assert conclude([*[holds] * (among - 1), barely, *[clock] * 9]) == "refuted"
    assert conclude([*[holds] * among, barely]) == "undecided"


def test_chance_refutes_a_true_claim_of_many_parts_no_more_often_than_of_one() -> None:
    def draw(seed: int) -> Check:
        return compare("a", np.random.default_rng(seed).normal(0.0, 1.0, 40).tolist())

    claims = [[draw(10 * claim + part) for part in range(10)] for claim in range(60)]
    alone = sum(any(part.status == "refuted" for part in parts) for parts in claims)
    assert alone / len(claims) > 0.1, "parts are refuted by chance"
    assert sum(conclude(parts) == "refuted" for parts in claims) / len(claims) < 0.06


def test_parts_that_do_not_count_decide_nothing() -> None:
    theorem, clock = shown("a", True, "1"), compare("b", sample(-1.0), counts=False)
    assert clock.status == "refuted"
    assert conclude([theorem, clock]) == "not applicable"
    assert conclude([theorem, clock, Check("c", "holds", "1")]) == "holds"


def test_settings_that_ran_the_same_rounds_are_not_compared() -> None:
    check = compare("a is faster than b", [], same=30)
    assert check.status == "not applicable"
    assert not check.counts
    assert "30 prompts left out" in check.figure
    assert "2 prompts left out" in compare("a", sample(1.0), same=2).figure
