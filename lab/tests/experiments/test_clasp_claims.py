"""Claims 4, 5 and 8: their computations against slow references, verdicts both ways, and small runs."""

import copy
import itertools
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from helpers.checkpoints import save_checkpoint
from helpers.models import LAYERS, SUBLAYERS, build, prompt
from judging import as_read, drawn, holding
from selfspec import Engine
from selfspec.errors import UnsupportedModelError
from selfspec.methods.api import KeptSet, Needs
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.target import Target
from selfspec_lab.experiments import clasp_interval, reading
from selfspec_lab.experiments.base import Data, Experiment
from selfspec_lab.experiments.clasp_interval import Amounts as IntervalAmounts
from selfspec_lab.experiments.clasp_interval import ClaspInterval
from selfspec_lab.experiments.clasp_interval_checks import find_peak, lies_inside, replay_with_selections
from selfspec_lab.experiments.clasp_program import Amounts as ProgramAmounts
from selfspec_lab.experiments.clasp_program import ClaspProgram, final_states, jaccard, middle
from selfspec_lab.experiments.clasp_program_checks import chance_similarity
from selfspec_lab.experiments.cosine_bound import Amounts as BoundAmounts
from selfspec_lab.experiments.cosine_bound import CosineBound
from selfspec_lab.experiments.cosine_pairs import (
    EDGES,
    Pairs,
    TargetStates,
    bins,
    histogram,
    nearness,
    norm_range,
    set_figures,
)
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.ranks import rank_correlation
from selfspec_lab.experiments.reading import Reading, read_own_text, read_own_texts
from selfspec_lab.experiments.sampled import TEMPERATURE, by_prompt, prompt_means, sampling, seeds_of, write_in_turn
from selfspec_lab.experiments.trials import count, trial
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.testing import read_text

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "gguf"
LENGTH = 24


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=2, max_size=12))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, float]]) -> None:
    one, other = zip(*pairs, strict=True)
    if min(len(set(one)), len(set(other))) < 2:
        assert rank_correlation(one, other) == 0.0
    else:
        assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic, abs=1e-9)


@pytest.fixture(params=["llama", "gemma3", "mistral-window"])
def text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reading:
    monkeypatch.setattr(reading, "ROWS", 7)  # several forwards, the last one not full
    with torch.inference_mode():
        return Reading(Target(build(request.param)), prompt(LENGTH))


def alone(target: Target, kept: KeptSet, position: int) -> torch.Tensor:
    """The state after a kept set at one token, from a forward of one row after the tokens before it."""
    context, _ = read_text(target, prompt(LENGTH), Needs())
    context.state.cache.length = position
    token = torch.tensor([prompt(LENGTH)[position]])
    return target.run(target.embed(token), kept.sublayers, target.lay_out(context.state, 1)).hidden_states[0]


@torch.inference_mode()
def test_drafts_anywhere_in_a_text_are_drafts_that_start_there(text: Reading) -> None:
    kept = KeptSet((0, 1, 4, 6, 7, 11), SUBLAYERS)
    positions = [0, 1, 5, 5, *range(12, LENGTH)]
    drafts = text.draft(kept, positions)
    for position, state in zip(positions, drafts, strict=True):
        torch.testing.assert_close(state, alone(text.target, kept, position), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        text.draft(KeptSet.full(SUBLAYERS), range(LENGTH)), text.states[-1], rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_the_programs_state_is_that_of_the_set_it_picks(text: Reading) -> None:
    for position, skips in ((3, 1), (17, 3), (LENGTH - 1, 5)):
        skipped = text.choose_skipped(position, range(LAYERS), skips)
        assert len(skipped) == skips
        expected = text.draft(without_layers(skipped), [position])[0]
        torch.testing.assert_close(text.program_state(position, skips), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_brute_force_tries_every_set(text: Reading) -> None:
    for free, skips in ((range(1, 6), 2), (range(0, LAYERS), 4)):
        sets, states = final_states(text, 9, free, skips)
        assert sorted(sets) == sorted(itertools.combinations(free, skips))
        for skipped, state in zip(sets, states, strict=True):
            expected = text.draft(without_layers(skipped), [9])[0]
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def without_layers(skipped: tuple[int, ...]) -> KeptSet:
    return KeptSet.skipping([sublayer for layer in skipped for sublayer in (2 * layer, 2 * layer + 1)], SUBLAYERS)


def test_free_layers_are_in_the_middle() -> None:
    assert middle(16, 12) == range(2, 14)
    assert middle(32, 12) == range(10, 22), "as in the paper"
    assert middle(33, 12) == range(11, 22)
    assert middle(6, 12) == range(1, 5)
    with pytest.raises(UnsupportedModelError, match="3"):
        middle(3, 12)


def test_similarity_of_sets() -> None:
    assert jaccard({1, 2}, {2, 3}) == pytest.approx(1 / 3)
    for total, size in ((5, 2), (6, 4), (4, 4)):
        sets = [set(each) for each in itertools.combinations(range(total), size)]
        expected = fmean(jaccard(one, other) for one in sets for other in sets)
        assert chance_similarity(total, size) == pytest.approx(expected)


def pairs(**changes: list[float]) -> Pairs:
    values = {"cosines": [0.99995, 0.95, 0.5], "bounds": [0.9999, 0.999, 0.4], "norms": [1.0, 1.1, 0.8]} | changes
    cosines, bounds, norms = (torch.tensor(each, dtype=torch.float64) for each in values.values())
    return Pairs(cosines, bounds, torch.tensor([True, True, False]), norms)


def test_pairs_are_counted() -> None:
    figures = set_figures([pairs(), pairs(bounds=[0.99999, 0.95, 0.6])])
    assert figures["cosine"] == pytest.approx(0.81665)
    del figures["cosine"]
    # Covered are the first and the last, which is a counterexample, and then the second, just.
    assert figures == {"pairs": 6, "accepted": 4, "covered": 3, "counterexamples": 1}
    counted = bins([pairs(), pairs()])
    assert counted["pairs"] == [2, 0, 0, 0, 0, 0, 2, 0, 2]
    assert counted["accepted"] == [2, 0, 0, 0, 0, 0, 2, 0, 0]
    assert histogram(torch.tensor([-1e-12, 2.0 + 1e-12]))[:: len(EDGES) - 2] == [1, 1]
    assert norm_range([pairs()])[1] == 1.0


@torch.inference_mode()
def test_states_of_pairs_go_into_the_head(text: Reading) -> None:
    target_states = TargetStates(text, range(LENGTH))
    itself = target_states.pairs(text.states[-1])
    assert bool(itself.same.all())
    assert bool(itself.covered.all())
    torch.testing.assert_close(itself.cosines, torch.ones_like(itself.cosines))
    drafted = text.draft(KeptSet.early_exit(4, SUBLAYERS), range(LENGTH))
    greedy = text.target.logits(drafted).argmax(-1) == text.target.logits(text.states[-1]).argmax(-1)
    assert torch.equal(target_states.pairs(drafted).same, greedy)
    assert 0 < int(greedy.sum()) < LENGTH


def program_data(**changes: Any) -> Data:
    text = {
        "domain": "code",
        "cosine": {"program": 0.98, "best": 0.981, "random": 0.9},
        "agreement": {"program": 1.0, "best": 1.0, "random": 0.8},
        "beaten": 0.98,
        "band": [0.85, 0.95],
        "similarity": [0.9, 0.7, 0.6, 0.5],
    }
    return {
        "layers": 16,
        "skipped_layers": 8,
        "free_layers": 12,
        "free_skipped_layers": 6,
        "sets": 924,
        "tokens": 12,
        "distances": [1, 2, 4, 8],
        "texts": [{**copy.deepcopy(text), **changes} for _ in range(3)],
    }


def test_what_claim_4_comes_to() -> None:
    experiment = ClaspProgram()
    assert holding(experiment, program_data()) == [True] * 5
    breaking = [
        {"cosine": {"program": 0.96, "best": 0.981, "random": 0.9}},
        {"beaten": 0.85},
        {"agreement": {"program": 0.9, "best": 1.0, "random": 0.8}},
        {"similarity": [0.3, 0.25, 0.2, 0.15]},
        {"similarity": [0.8, 0.9, 0.85, 0.9]},
    ]
    for index, changes in enumerate(breaking):
        assert holding(experiment, program_data(**changes)) == [place != index for place in range(5)]
    no_gap = {"agreement": {"program": 1.0, "best": 1.0, "random": 1.0}}
    assert holding(experiment, program_data(**no_gap))[2] is False, "nothing to close"
    mixed = program_data()
    mixed["texts"][0]["similarity"].reverse()
    assert holding(experiment, mixed)[4] is False, "a fall that one text of three does not show may be noise"
    assert len(drawn(experiment, program_data())) == 2


def test_texts_of_a_prompt_are_one_observation_of_claim_4() -> None:
    """The mean over the seeds is compared: each prompt has a text that is below, and is above on the mean."""
    data = program_data()
    data["texts"] = [copy.deepcopy(data["texts"][0]) for _ in range(6)]
    for text in data["texts"][1::2]:
        text |= {"beaten": 0.83, "similarity": [0.5, 0.6, 0.7, 0.85]}
        text["cosine"]["program"] = 0.97
    apart, together = (ClaspProgram().judge({**data, **seeds}) for seeds in ({}, {"seeds": 2}))
    assert [check.status for check in apart] == ["undecided", "undecided", "holds", "holds", "undecided"]
    assert [check.test.pairs for check in together if check.test] == [3] * 5
    assert [check.status for check in together] == ["holds"] * 5
    assert together[1].test is not None
    assert together[1].test.mean == pytest.approx((0.98 + 0.83) / 2)
    panels = drawn(ClaspProgram(), {**data, "seeds": 2})
    assert len(panels[1].get_xticklabels()) == 3


def sweep(**speedups: list[float]) -> dict[str, Any]:
    return {
        name.removeprefix("at"): {
            "trials": [{"trace": f"{name} {text}"} for text in range(len(values))],
            "machine": [2 * value for value in values],
            "speedups": values,
            "rounds": [20, 256],
            "mean_generated_lengths": [(3.0, 2.5)[text % 2] - 0.1 * index for text in range(len(values))],
            "drafted": 100,
            "acceptance_rate": 0.9,
            "selection_share": 0.4 / (1 + index),
        }
        for index, (name, values) in enumerate(speedups.items())
    }


def interval_data(intervals: dict[str, Any], skipped: dict[str, Any]) -> Data:
    return {"layers": 16, "intervals": intervals, "skipped": skipped}


def test_what_claim_5_comes_to() -> None:
    """Parts: best over smallest and largest interval, on the machine and by the clock; length; the same for layers."""
    experiment = ClaspInterval()
    inside = sweep(at1=[0.7, 0.8], at16=[1.1, 1.2], at128=[1.0, 1.1])
    at_an_end = sweep(at1=[0.7, 0.8], at16=[1.1, 1.2], at128=[1.2, 1.3])
    in_noise = sweep(at1=[0.7, 0.8], at16=[1.15, 1.1], at128=[1.0, 1.12])
    assert holding(experiment, interval_data(inside, inside)) == [True] * 9
    assert holding(experiment, interval_data(at_an_end, inside)) == [True, False, True, False, *[True] * 5]
    assert holding(experiment, interval_data(inside, in_noise)) == [*[True] * 6, False, True, False]
    checks = experiment.judge(interval_data(inside, in_noise))
    assert "other half of the prompts: 16;" in checks[6].figure, "an end is not compared with itself"
    assert [check.counts for check in checks] == [True, True, False, False, True, True, True, False, False]
    unharmed = copy.deepcopy(inside)
    unharmed["128"]["mean_generated_lengths"] = [3.1, 2.4]
    assert holding(experiment, interval_data(unharmed, inside))[4] is False
    assert len(drawn(experiment, interval_data(inside, in_noise))) == 4


def test_intervals_longer_than_the_texts_are_the_same_program() -> None:
    same = sweep(at1=[0.7, 0.8], at64=[1.3, 1.4], at128=[1.2, 1.3])
    same["128"]["trials"] = same["64"]["trials"]
    checks = ClaspInterval().judge(interval_data(same, same))
    assert [checks[index].status for index in (1, 3)] == ["not applicable"] * 2
    assert "2 prompts left out" in checks[1].figure


def test_short_texts_cannot_show_that_speed_falls_with_the_interval() -> None:
    swept = sweep(at1=[0.7, 0.8], at16=[1.1, 1.2], at64=[1.1, 1.2])
    for figures in swept.values():
        figures["rounds"] = [20, 255]
    checks = ClaspInterval().judge(interval_data(swept, swept))
    assert [checks[index].status for index in (1, 3)] == ["not applicable"] * 2
    told = "in the paper speed falls past 128 rounds, which takes texts of 256; these have up to 255; best"
    assert checks[1].figure.startswith(told)
    assert checks[6].status != "not applicable", "layers"


def test_the_clock_has_texts_of_its_own() -> None:
    """Short ones, of other prompts, which may run the same rounds where the counted ones do not."""
    counted = sweep(at1=[0.7, 0.8], at16=[1.1, 1.2], at128=[1.0, 1.1])
    timed = sweep(at1=[0.9, 0.8, 0.9], at16=[0.7, 0.6, 0.7], at128=[0.7, 0.6, 0.7])
    timed["128"]["trials"] = timed["16"]["trials"]
    for figures in timed.values():
        figures["rounds"] = [20, 30, 20]
    data = {**interval_data(counted, counted), "clock": interval_data(timed, timed)}
    statuses = [check.status for check in ClaspInterval().judge(data)]
    assert statuses[:4] == ["holds", "holds", "refuted", "not applicable"]
    assert statuses[5:] == ["holds", "holds", "refuted", "not applicable"]
    assert len(drawn(ClaspInterval(), data)) == 4


def test_texts_of_a_prompt_are_one_observation_of_claim_5() -> None:
    """Two prompts with two seeds each: a prompt's speed is the geometric mean, its length the mean."""
    swept = sweep(at1=[0.5, 0.5, 0.5, 0.5], at16=[2.0, 0.9, 0.9, 2.0], at128=[1.0, 1.0, 1.0, 1.0])
    swept["128"]["mean_generated_lengths"] = [2.0, 2.6, 2.0, 2.6]
    swept["1"]["trials"][0] = swept["128"]["trials"][0]  # a prompt is left out only if all its texts ran the same
    apart, together = (
        ClaspInterval().judge({**interval_data(swept, swept), **seeds, "clock": interval_data(swept, swept)})
        for seeds in ({}, {"seeds": 2})
    )
    assert [apart[index].status for index in (1, 4)] == ["undecided"] * 2, "seeds as prompts: two of four are slower"
    assert [together[index].status for index in (1, 4)] == ["holds"] * 2
    for index, mean in ((1, math.log(4 * 0.45) / 2), (4, (3.0 + 2.5 - 2.0 - 2.6) / 2)):
        test = together[index].test
        assert test is not None
        assert (test.pairs, test.mean) == (2, pytest.approx(mean))
    assert [check.test.pairs for check in together if check.test] == [2, 2, 4, 4, 2, 2, 2, 4, 4], (
        "the clock has no seeds"
    )
    same = copy.deepcopy(swept)
    same["16"]["trials"][:2] = same["128"]["trials"][:2]
    left = ClaspInterval().judge({**interval_data(same, same), "seeds": 2})[1]
    assert "1 prompts left out" in left.figure


def test_the_peak_of_a_sweep() -> None:
    values = sweep(at128=[1.0, 1.0], at1=[0.5, 0.5], at16=[2.0, 2.5])
    peak = find_peak({value: figures["speedups"] for value, figures in values.items()})
    assert (peak.best, peak.picks, peak.ends) == ("16", ("16", "16"), ("1", "128"))


def test_a_peak_is_tested_on_prompts_that_did_not_choose_it() -> None:
    at1, at16, at64, at128 = [0.5] * 4, [1.6, 1.1, 1.6, 1.1], [1.1, 1.5, 1.1, 1.5], [1.2] * 4
    values = sweep(at1=at1, at16=at16, at64=at64, at128=at128)
    peak = find_peak({value: figures["speedups"] for value, figures in values.items()})
    assert peak.picks == ("64", "16", "64", "16")  # each half of the prompts is best at the other interval
    largest = lies_inside(interval_data(values, values), "intervals", "interval", "rounds")[3]
    assert largest.status == "refuted", "on the prompts that chose it, each would be ahead"


def test_selections_cost_steps_of_the_papers_machine() -> None:
    engine = Engine(build("llama"), method="clasp", settings={"skipped_layers": 2})
    written = engine.generate(prompt(17), max_new_tokens=40)
    speeds = [replay_with_selections(trial(written), interval) for interval in (1, 4, 1000)]
    assert speeds[0] < speeds[1] < speeds[2]


def bound_data(accepted: tuple[int, ...] = (30, 29, 27, 20), **changes: int) -> Data:
    figures = {"pairs": 60, "accepted": 50, "covered": 4, "counterexamples": 0} | changes
    far_bins = [0] * (len(EDGES) - 1 - len(accepted))
    return {
        "edges": list(EDGES),
        "tokens": 60,
        "bounds": [20, 20, 20, 0, 0, 0, 0, 0, 0],
        "norm_ratio": [0.9, 1.0, 1.1],
        "texts": [{"pairs": [30] * len(accepted) + far_bins, "accepted": [*accepted, *far_bins]} for _ in range(2)],
        "nearness": [0.8, 0.9],
        "sets": {
            "uniform, 2": {**figures, "cosine": 0.99},
            "clasp, 4": {**figures, "cosine": 0.95, "accepted": 40},
            "exit after layer 8": {**figures, "cosine": 0.7, "accepted": 10, "covered": 0},
        },
    }


def test_how_much_nearer_accepted_drafts_are() -> None:
    """Within each kind of set, as one that skips more is both farther and accepted less."""

    def drafts(cosines: list[float], same: list[bool]) -> Pairs:
        values = torch.tensor(cosines, dtype=torch.float64)
        return Pairs(values, torch.ones_like(values), torch.tensor(same), torch.ones_like(values))

    near, far = drafts([0.9, 0.8, 0.95], [True, True, True]), drafts([0.1, 0.2, 0.05], [False, False, False])
    assert nearness([near, far]) == 0.5, "no set has drafts of both sorts"
    assert nearness([near, drafts([0.9, 0.8, 0.7, 0.6], [True, False, True, False])]) == 0.75
    assert nearness([drafts([0.9, 0.1], [True, False]), drafts([0.1, 0.9], [True, False])]) == 0.5


def test_what_claim_8_comes_to() -> None:
    experiment = CosineBound()
    assert holding(experiment, bound_data()) == [True] * 3
    assert holding(experiment, bound_data(counterexamples=1))[0] is False
    assert holding(experiment, bound_data(covered=0))[0] is False, "none of none says nothing"
    assert holding(experiment, {**bound_data(), "nearness": [0.5, 0.5]}) == [True, False, True]
    assert holding(experiment, {**bound_data(), "nearness": [0.4, 0.9]})[1] is False, "one text of two shows nothing"
    reversed_sets = bound_data(accepted=(30, 29, 27, 20))
    reversed_sets["sets"]["exit after layer 8"]["accepted"] = 60
    assert holding(experiment, reversed_sets) == [True, True, False]
    assert len(drawn(experiment, bound_data())) == 2


def test_texts_of_a_prompt_are_one_observation_of_claim_8() -> None:
    data = {**bound_data(), "nearness": [0.4, 0.9, 0.9, 0.4]}
    apart, together = (CosineBound().judge({**data, **seeds})[1] for seeds in ({}, {"seeds": 2}))
    assert (apart.status, together.status) == ("undecided", "holds")
    assert together.test is not None
    assert (together.test.pairs, together.test.mean) == (2, pytest.approx(0.65))


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(quick=True)


def measured(experiment: Experiment, lab: Lab) -> Data:
    """What an experiment measures, as it will be read again, judged and drawn once."""
    data = as_read(experiment.measure(lab))
    holding(experiment, data)
    drawn(experiment, data)
    return data


@pytest.mark.trained
def test_a_small_run_of_claim_4(lab: Lab) -> None:
    amounts = ProgramAmounts(prompts=1, seeds=2, written_tokens=8, searched_tokens=2, free_layers=6, longest_distance=4)
    data = measured(ClaspProgram(amounts), lab)
    assert [text["domain"] for text in data["texts"]] == ["code", "code", "math", "math", "prose", "prose"]
    assert (data["sets"], data["tokens"], data["distances"]) == (math.comb(6, 3), 12, [1, 2, 4])
    assert data["texts"][0]["cosine"] != data["texts"][1]["cosine"], "each seed writes its own text"
    assert all(check.test is None or check.test.pairs == 3 for check in ClaspProgram().judge(data))
    program, random = (fmean(text["cosine"][name] for text in data["texts"]) for name in ("program", "random"))
    assert program > random
    assert fmean(text["beaten"] for text in data["texts"]) > 0.5
    for text in data["texts"]:
        cosine = text["cosine"]
        assert text["band"][0] <= cosine["random"] < cosine["best"] < 1
        assert cosine["program"] <= cosine["best"]
        assert 0 <= text["beaten"] <= 1
        assert len(text["similarity"]) == 3
        assert all(0 < similarity <= 1 for similarity in text["similarity"])


@pytest.mark.trained
def test_a_small_run_of_claim_8(lab: Lab) -> None:
    data = measured(CosineBound(BoundAmounts(1, 2, 6, uniform=(0.05, 0.5), exits=(0.5,), clasp=(0.0625, 0.5))), lab)
    assert len(data["sets"]) == 5
    assert data["tokens"] == sum(data["bounds"]) == 36
    for figures in data["sets"].values():
        assert figures["pairs"] == 36
        assert 0 < figures["accepted"] <= 36
        assert figures["covered"] <= figures["accepted"]
    assert sum(figures["covered"] for figures in data["sets"].values()) > 0
    assert sum(sum(text["pairs"]) for text in data["texts"]) == 5 * 36
    cosines = [figures["cosine"] for figures in data["sets"].values()]
    assert cosines[0] > cosines[1] > cosines[2], "one sublayer skipped, half of them spread evenly, an exit half-way"
    assert cosines[3] > cosines[4]


def test_a_quantised_file_is_measured_in_its_own_numbers() -> None:
    lab = Lab(str(FIXTURES / "Q8_0.gguf"), device="cpu")
    assert isinstance(lab.load("tiny")[0].get_output_embeddings(), LowBitLinear)
    data = measured(CosineBound(BoundAmounts(1, 1, 8, uniform=(), exits=(0.5,), clasp=(0.5,))), lab)
    assert data["tokens"] == 3 * 8
    for figures in data["sets"].values():
        assert figures["counterexamples"] == 0
        assert 0 < figures["accepted"] < figures["pairs"] == 24
        assert 0.5 < figures["cosine"] < 1


def test_a_small_run_of_claim_5(tmp_path: Path) -> None:
    lab = Lab(str(save_checkpoint(tmp_path)), quick=True)
    amounts = IntervalAmounts(1, 2, 24, 16, 1, 12, intervals=(1, 3, 9), skipped=(0.2, 0.5, 0.8), widening=1)
    data = measured(ClaspInterval(amounts), lab)
    assert (data["layers"], data["prompts"], data["seeds"]) == (LAYERS, 3, 2)
    for sweep, values, length in (("intervals", ["1", "3", "9"], 24), ("skipped", ["1", "3", "5"], 16)):
        assert list(data[sweep]) == list(data["clock"][sweep]) == values
        for figures in data[sweep].values():
            assert figures["drafted"] > 0
            assert len(figures["machine"]) == len(figures["trials"]) == 6
            for each in figures["trials"]:
                assert sum(row[-1] for row in each["rounds"]) == length - 1
                assert "tokens_per_second" not in each, "it would be that of a batch"
        assert any(figures["acceptance_rate"] > 0 for figures in data[sweep].values())
        for figures in data["clock"][sweep].values():
            assert len(figures["speedups"]) == len(figures["trials"]) == 3
            assert all(speedup > 0 for speedup in figures["speedups"])
            assert 0 < figures["selection_share"] < 1
    assert [check.test.pairs for check in ClaspInterval().judge(data) if check.test and check.counts] == [3] * 4


@pytest.mark.parametrize("settings", [{"update_interval": 1}, {"update_interval": 4}, {"update_interval": 1000}])
def test_rounds_of_a_batch_are_those_alone(settings: dict[str, int]) -> None:
    """CLaSp as claim 5 counts it, more texts than fit into a batch."""
    model = build("llama")
    engine = Engine(model, method="clasp", settings={**clasp_interval._settings(1, 3), **settings}, max_batch=4)
    requests = [(prompt(5 + 3 * (index // 3)), sampling(30, seed=index)) for index in range(9)]
    counted = count(Lab(), {"clasp": engine}, requests)["clasp"]
    alone = [trial(engine.generate(*request)) for request in requests]
    assert [each["trace"] for each in counted] == [each["trace"] for each in alone]
    assert [each["rounds"] for each in counted] == [each["rounds"] for each in alone]
    assert len({each["trace"] for each in counted}) == 9
    assert sum(each["drafted"] for each in counted) > sum(each["accepted"] for each in counted) > 0


def test_what_is_counted_writes_the_same_texts() -> None:
    engines = {
        name: Engine(build(name), method="clasp", settings=clasp_interval._settings(4, 3))
        for name in ("llama", "qwen2")
    }
    with pytest.raises(AssertionError, match="qwen2 writes another text than llama"):
        count(Lab(), engines, [(prompt(5), sampling(12, seed=0))])


def test_seeds_of_a_prompt_are_its_own() -> None:
    assert [list(seeds_of(index, 5, 3)) for index in range(2)] == [[5, 6, 7], [8, 9, 10]]
    assert by_prompt("abcdef", 3) == ["abc", "def"]
    assert prompt_means([1.0, 2.0, 6.0, 0.0, 0.0, 3.0], 3) == [3.0, 1.0]
    assert prompt_means([1.0, 2.0], 1) == [1.0, 2.0]
    with pytest.raises(AssertionError):
        prompt_means([1.0, 2.0, 3.0], 2)


def test_candidates_write_the_same_texts(tmp_path: Path) -> None:
    lab = Lab(str(save_checkpoint(tmp_path)), quick=True)
    engines = lab.engines("tiny", {"plain": ("autoregressive", {}), "clasp": ("clasp", {"skipped_layers": 2})})
    written = write_in_turn(lab, engines, ["One", "Two", "Two"], 20, seeds=[5, 6, 6])
    texts = {name: [each.token_ids for each in outputs] for name, outputs in written.items()}
    assert texts["plain"] == texts["clasp"]
    assert [len(each) for each in texts["plain"]] == [20, 20, 20]
    assert texts["plain"][0] != texts["plain"][1] == texts["plain"][2]
    assert sum(each.accepted for each in written["clasp"]) > 0
    other = write_in_turn(lab, engines, ["Two"], 20, seeds=[7])
    assert other["plain"][0].token_ids != texts["plain"][1]


def test_the_model_reads_what_it_wrote(tmp_path: Path) -> None:
    engine = Lab(str(save_checkpoint(tmp_path))).engine("tiny")
    with torch.inference_mode():
        (text, positions), (other, _) = read_own_text(engine, "Once", 10, seeds=[3, 4])
    assert positions == range(len(engine.encode("Once")) - 1, text.states.shape[1] - 1)
    assert len(positions) == 10
    written = engine.generate("Once", max_new_tokens=10, temperature=TEMPERATURE, seed=3, ignore_eos=True)
    embedded = engine.target.embed(torch.tensor(written.token_ids))
    assert torch.equal(text.states[0, -10:], embedded)
    assert not torch.equal(other.states[0, -10:], embedded)


def test_the_model_reads_texts_of_every_domain(tmp_path: Path) -> None:
    told: list[str] = []
    lab = Lab(str(save_checkpoint(tmp_path)), seed=3, progress=told.append)
    engine = lab.engine("tiny")
    told.clear()
    with torch.inference_mode():
        read = list(read_own_texts(lab, engine, 2, 6, "a look", seeds=2))
        second, last = read_own_text(engine, lab.prompts("code")[1], 6, seeds=[5, 6])
    assert [domain for domain, *_ in read] == [domain for domain in PROMPTS for _ in range(2 * 2)]
    assert told == [f"a look on {domain} prompt {index} of 2" for domain in PROMPTS for index in (1, 2)]
    for found, expected in ((read[2], second), (read[3], last)):
        assert torch.equal(found[1].states, expected[0].states)
        assert found[2] == expected[1]
