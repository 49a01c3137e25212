"""Claim 7: what it is measured with against slow forms of it, verdicts both ways, and a small run."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy.stats import pearsonr

from helpers.checkpoints import save_checkpoint
from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from judging import as_read, drawn, holding
from selfspec import load_model
from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError
from selfspec.methods.knapsack import integer_weights
from selfspec.methods.registry import METHODS
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.target import Target
from selfspec_lab.experiments import (
    find_experiment,
    knapspec_context,
    knapspec_interval,
    knapspec_prediction,
    knapspec_sets,
    knapspec_shares,
    knapspec_threshold,
)
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.knapspec_scene import (
    WINDOW,
    knapspec_with,
    last_tokens,
    measure_profile,
    read,
    read_sources,
    select,
)
from selfspec_lab.experiments.lab import Lab


def profile(per_token: float = 0.0, base: float = 1e-3, mlp: float = 1e-3) -> LatencyProfile:
    return LatencyProfile("cpu", "float32", LAYERS, per_token, base, mlp, 0.0, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.trained
def test_sources_are_long_enough_and_windows_share_their_end() -> None:
    _, tokenizer = load_model("tiny")
    sources = read_sources(tokenizer, 8, 1900)
    assert [len(source) for source in sources] == [1900] * 8
    assert len({tuple(source) for source in sources}) == 8
    window = last_tokens(sources[0], 128)
    assert len(window) == 128
    assert window[0] == tokenizer.bos_token_id
    assert window[1:] == sources[0][-127:]
    assert last_tokens(sources[0], 1900) == sources[0]


def test_what_is_selected_at_the_end_of_a_text_is_what_a_request_selects_there() -> None:
    target = Target(build("llama"))
    settings = {"recent_rounds": 1, "max_draft_length": WINDOW - 1, "confidence_threshold": 0.0}
    method = knapspec_with(target, profile(), interval=64, **settings)
    result = Engine(target.model, method=method).generate(prompt(40), max_new_tokens=24)
    assert len(result.rounds[0].token_ids) == WINDOW
    selection = select(method, read(method, prompt(40) + list(result.token_ids[:WINDOW])))
    assert selection.kept.skipped
    assert result.rounds[1].kept == selection.kept


@pytest.mark.parametrize(("latencies", "weights"), [(profile(), (1, 1)), (profile(base=3e-3), (3, 1))])
def test_states_are_counted(latencies: LatencyProfile, weights: tuple[int, int]) -> None:
    """Without pruning there is a state for every skipped weight that the sublayers so far can make."""
    target = Target(build("llama"))
    counts = []
    for threshold in (-1.0, 0.99, 1.0):
        method = knapspec_with(target, latencies, similarity_threshold=threshold)
        prefilled = read(method, prompt(40))
        assert integer_weights(latencies.attention(prefilled.probe.committed), latencies.mlp) == weights
        counts.append(knapspec_threshold.count_states(method, prefilled))
    reachable, expected = {0}, 0
    for sublayer in range(2, SUBLAYERS):
        weight = weights[sublayer % 2] if sublayer < SUBLAYERS - 2 else 0
        reachable |= {used + weight for used in reachable if used + weight <= LAYERS * sum(weights) // 2}
        expected += len(reachable)
    assert counts[0] == expected
    assert expected > counts[1] > counts[2]


def test_estimated_acceptance() -> None:
    target, text = Target(build("llama")), [*prompt(17), *plain_text("llama", prompt(17), 40)]
    sets = [KeptSet.full(SUBLAYERS), KeptSet.skipping([5], SUBLAYERS), KeptSet.early_exit(1, SUBLAYERS)]
    windows = knapspec_sets.estimate_acceptance(target, text, 17, sets)
    assert len(windows) == 2, "the output has two whole windows"
    full, most, few = zip(*windows, strict=True)
    assert full == (1.0, 1.0)
    assert 0 < sum(few) < sum(most) <= 2
    # The first window by a forward over the whole text, which for a full prefix is the same.
    kept = sets[2].sublayers
    sequence = target.new_sequence(len(text), len(text), len(text))
    with torch.inference_mode():
        ids = torch.tensor(text)
        states = target.run(target.embed(ids), kept, target.lay_out(sequence, len(text))).hidden_states
        chosen = target.logits(states).argmax(-1)[:-1] == ids[1:]
    assert few[0] == pytest.approx(float(chosen[16:32].float().mean()))


def test_sets_of_every_kind() -> None:
    target = Target(build("llama"))
    method = knapspec_with(target, profile())
    kinds = [
        knapspec_sets.random_sets(SUBLAYERS, 5, random.Random(0)),
        knapspec_sets.uniform_sets(SUBLAYERS, 3),
        knapspec_sets.knapspec_sets(method, prompt(40), 3),
        knapspec_sets.early_exits(SUBLAYERS, 3),
    ]
    assert [len(set(kind)) for kind in kinds] == [5, 3, 3, 3]
    assert all(kept.skipped for kind in kinds for kept in kind)
    assert [kept.sublayers[-1] for kept in kinds[3]] == [1, 5, 9]
    by_weight = [len(kept.skipped) for kept in kinds[2]]
    assert by_weight == sorted(by_weight)


def test_a_fixed_set_drafts_with_it() -> None:
    target = Target(build("llama"))
    kept = KeptSet.skipping([4, 7], SUBLAYERS)
    method = knapspec_sets.FixedSet(target, knapspec_sets.FixedSetSettings(kept, 3))
    result = Engine(target.model, method=method).generate(prompt(17), max_new_tokens=40)
    assert result.token_ids == plain_text("llama", prompt(17), 40)
    assert {(record.kept, record.drafted) for record in result.rounds[:-2]} == {(kept, 3)}
    assert result.accepted > 0
    assert method.name not in METHODS


def claim_7() -> Data:
    sets = [
        {
            "kind": ("random", "uniform", "knapspec", "early exit")[index % 4],
            "attention_share": 0.5,
            "mlp_share": 0.5,
            "acceptance": 0.5 + 0.04 * (index * 5 % 12),
            "tpt": 20.0 + index,
            "tpt_with_head": 19.0 + index,
            "measured_acceptance": 0.6,
            "tokens_per_second": [22.0 + index, 23.0 + index],
        }
        for index in range(12)
    ]
    intervals = {
        name: {"tokens_per_second": [speed, speed + 1], "selection_share": [share, share]}
        for name, speed, share in (("8", 30.0, 0.5), ("32", 50.0, 0.2), ("128", 45.0, 0.1))
    }
    thresholds = {
        name: {"tpt": [tpt, tpt * 1.1], "acceptance": [0.9, 0.9], "states": [states, states + 1]}
        for name, tpt, states in (("-1.0", 100.0, 80), ("0.5", 100.0, 60), ("0.75", 90.0, 40), ("0.9", 80.0, 20))
    }
    return {
        "shares": {
            "attention_over_mlp": {"128": 0.9, "1900": 2.2, "8192": 6.0},
            "weights": {"128": [1, 1], "1900": [2, 1], "8192": [5, 1]},
            "pretended": {"8192": [[0.9, 0.2], [0.91, 0.2], [0.92, 0.2]]},
            "skipped": {"128": [[0.2, 0.5], [0.3, 0.5], [0.3, 0.4]], "1900": [[0.6, 0.3], [0.7, 0.4], [0.6, 0.4]]},
        },
        "prediction": {"sets": sets, "draft_length": 4},
        "interval": {"plain_tokens_per_second": [40.0, 41.0], "intervals": intervals},
        "threshold": {"thresholds": thresholds},
    }


def test_correlation_is_scipys() -> None:
    data = claim_7()["prediction"]
    speeds = [each["tokens_per_second"][0] + 0.5 for each in data["sets"]]
    for name in ("tpt", "acceptance"):
        expected = pearsonr([each[name] for each in data["sets"]], speeds).statistic
        assert knapspec_prediction.correlation(data, name) == pytest.approx(expected)
    assert knapspec_prediction.correlation(data, "measured_acceptance") == 0.0, "it never changes"


def no_growth(data: Data) -> None:
    data["shares"]["skipped"]["128"] = [[0.9, 0.5], [0.6, 0.5], [0.3, 0.5]]


def mlp_ahead(data: Data) -> None:
    data["shares"]["pretended"]["8192"] = [[0.9, 0.95], [0.91, 0.95], [0.92, 0.97]]


def attention_is_never_slower(data: Data) -> None:
    data["shares"]["attention_over_mlp"]["8192"] = 0.9


def acceptance_as_good(data: Data) -> None:
    for each in data["prediction"]["sets"]:
        each["acceptance"] = each["tpt"] / 100


def useless_objective(data: Data) -> None:
    for each in data["prediction"]["sets"]:
        each["tpt"] = 20.0


def fastest_last(data: Data) -> None:
    data["interval"]["intervals"]["128"]["tokens_per_second"] = [60.0, 61.0]


def fastest_by_noise(data: Data) -> None:
    data["interval"]["intervals"]["128"]["tokens_per_second"] = [30.0, 55.0]


def equal_weights(data: Data) -> None:
    data["shares"]["weights"]["1900"] = [1, 1]


def selection_goes_on(data: Data) -> None:
    data["interval"]["intervals"]["128"]["selection_share"] = [0.2, 0.3]


def threshold_loses(data: Data) -> None:
    data["threshold"]["thresholds"]["0.5"]["tpt"] = [98.0, 108.0]


def threshold_prunes_nothing(data: Data) -> None:
    data["threshold"]["thresholds"]["0.5"]["states"] = [80, 80]  # of 80 and 81, so one text is left, too few to decide


def higher_prunes_nothing(data: Data) -> None:
    """As many states are the same program, whose TPT is compared with itself."""
    data["threshold"]["thresholds"]["0.75"]["states"] = data["threshold"]["thresholds"]["0.5"]["states"]


def higher_loses_nothing(data: Data) -> None:
    data["threshold"]["thresholds"]["0.75"]["tpt"] = [100.0, 110.0]


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        (None, set()),
        (no_growth, {0, 1}),
        (mlp_ahead, {2}),
        (attention_is_never_slower, {2}),
        (equal_weights, {0}),
        (acceptance_as_good, {3}),
        (useless_objective, {3}),
        (fastest_last, {5}),
        (fastest_by_noise, {5}),
        (selection_goes_on, {6}),
        (threshold_loses, {7}),
        (threshold_prunes_nothing, {7, 8}),
        (higher_prunes_nothing, {9}),
        (higher_loses_nothing, {9}),
    ],
)
def test_claim_7_is_judged(change: Callable[[Data], None] | None, failing: set[int]) -> None:
    data = claim_7()
    if change is not None:
        change(data)
    held = holding(find_experiment("knapspec-context")(), data)
    assert len(held) == 10
    assert {index for index, holds in enumerate(held) if not holds} == failing


def test_claim_7_is_drawn() -> None:
    before = claim_7()
    data = copy.deepcopy(before)
    assert len(drawn(find_experiment("knapspec-context")(), data)) == 5 + 1, "one has a second axis"
    assert data == before


def test_claim_7_is_measured(folder: Path) -> None:
    amounts = knapspec_context.Amounts(
        knapspec_shares.Amounts(contexts=(40, 200), documents=2, pretended=(4000,)),
        knapspec_prediction.Amounts(random=2, others=1, domains=1, max_new_tokens=16, repeats=1, widen=1),
        knapspec_interval.Amounts(intervals=(2, 8, 16), domains=1, max_new_tokens=24, widen=1),
        knapspec_threshold.Amounts(thresholds=(-1.0, 0.5, 1.0), prompts=1, documents=1, context=60),
    )
    experiment = knapspec_context.KnapspecContext(amounts)
    data = as_read(experiment.measure(Lab(str(folder))))
    assert [len(shares) for shares in data["shares"]["skipped"].values()] == [2, 2]
    assert any(share for pairs in data["shares"]["skipped"].values() for pair in pairs for share in pair)
    assert len(data["shares"]["pretended"]["4000"]) == 2
    sets = data["prediction"]["sets"]
    assert {each["kind"] for each in sets} == {"random", "uniform", "knapspec", "early exit"}
    assert all(each["tpt"] >= each["tpt_with_head"] > 0 for each in sets)
    assert all(0 <= each["acceptance"] <= 1 and each["tokens_per_second"][0] > 0 for each in sets)
    assert any(each["measured_acceptance"] for each in sets)
    spent = [each["selection_share"][0] for each in data["interval"]["intervals"].values()]
    assert all(0 < share < 1 for share in spent)
    assert len({each["rounds"][0] for each in data["interval"]["intervals"].values()} | {23}) > 1, "nothing accepted"
    states = {name: sum(each["states"]) for name, each in data["threshold"]["thresholds"].items()}
    assert states["-1.0"] >= states["0.5"] > states["1.0"]
    assert len(holding(experiment, data)) == 10
    assert drawn(experiment, data)


def test_models_that_leave_nothing_to_measure_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match="this model ends at 1024"):
        knapspec_shares.measure(Lab(str(folder)), knapspec_shares.Amounts(contexts=(512, 1024), documents=1))
    small = Target(build("llama"))
    monkeypatch.setattr(Target, "layer_count", 2)
    with pytest.raises(InvalidParameterError, match="2 layers leaves nothing to select"):
        measure_profile(small)
