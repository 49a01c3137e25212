"""One kept set for the layer drafts of a batch: which one, that it drafts, and that the text does not depend on it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import SUBLAYERS, build, plain_text, prompt
from selfspec import Engine
from selfspec.decoding.draft import ConfidenceThreshold, Draft, LayerDraft, NoDraft
from selfspec.methods.base import Method
from selfspec.methods.dynamic_exit import Del, DelDrafter, DelSettings
from selfspec.methods.registry import find_method
from selfspec.methods.selecting import medoid, share_kept_set
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.target import Target
from selfspec.types import Generation
from selfspec_lab.testing import read_text

NEW_TOKENS = 32
PROMPTS = [prompt(length) for length in (17, 5, 40)]
SETTINGS: dict[str, dict[str, Any]] = {
    "clasp": {"schedule": "paper", "update_interval": 2, "skipped_layers": 2, "draft_exit_threshold": 0.2},
    "knapspec": {"schedule": "paper", "interval": 3, "recent_rounds": 1, "confidence_threshold": 0.3},
    "del": {"schedule": "paper"},
}
"""With choices often enough for contexts to differ. A batch of SWIFT has one set in any case."""


@pytest.fixture(autouse=True)
def one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are compared select with the same latencies."""
    profile = LatencyProfile("cpu", "float32", SUBLAYERS // 2, 0.0, 1e-3, 1e-3, 0.0, 0.0)
    monkeypatch.setattr("selfspec.runtimes.costs.latencies.measure_latencies", lambda _: profile)


KEPT_SETS = st.sets(st.integers(0, SUBLAYERS - 1), min_size=1).map(lambda kept: KeptSet(tuple(sorted(kept)), SUBLAYERS))


@given(st.lists(KEPT_SETS, min_size=1, max_size=6))
def test_the_medoid_differs_least_from_all(kept_sets: list[KeptSet]) -> None:
    def differences(one: KeptSet) -> int:
        return sum((index in one.sublayers) != (index in other.sublayers) for other in kept_sets for index in range(12))

    sums = [differences(kept) for kept in kept_sets]
    assert medoid(kept_sets) == kept_sets[sums.index(min(sums))]


def test_the_medoid_of_exit_layers_is_their_median() -> None:
    exits = [KeptSet.early_exit(layer, SUBLAYERS) for layer in (5, 1, 2, 5, 3)]
    assert medoid(exits) == KeptSet.early_exit(3, SUBLAYERS)


def test_only_layer_drafts_share() -> None:
    kept_sets = [KeptSet.early_exit(layer, SUBLAYERS) for layer in (1, 2, 4)]
    stop = ConfidenceThreshold(0.5)
    drafts: list[Draft] = [LayerDraft(kept_sets[0], 3), NoDraft(), LayerDraft(kept_sets[1], 4, stop)]
    drafts.append(LayerDraft(kept_sets[2], 5))
    kept = kept_sets[1]
    assert share_kept_set(drafts) == [LayerDraft(kept, 3), NoDraft(), LayerDraft(kept, 4, stop), LayerDraft(kept, 5)]
    assert share_kept_set(drafts[:2]) == drafts[:2]
    assert share_kept_set([NoDraft()]) == [NoDraft()]


def plans_of(method: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], list[Draft]]]:
    """From now on records the drafters and the drafts of every plan of a method."""
    plans: list[tuple[list[Any], list[Draft]]] = []
    method_class = find_method(method)
    plan = method_class.plan

    def recorded(self: Method, drafters: Any) -> list[Draft]:
        plans.append((list(drafters), plan(self, drafters)))
        return plans[-1][1]

    monkeypatch.setattr(method_class, "plan", recorded)
    return plans


def generate(method: str, **settings: Any) -> list[Generation]:
    engine = Engine(build("llama"), method=method, settings={**SETTINGS.get(method, {}), **settings})
    return engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)


def numbers_of_sets(plans: list[tuple[list[Any], list[Draft]]]) -> list[int]:
    """For every round with several layer drafts the number of different kept sets."""
    kept_sets = [[draft.kept for draft in drafts if isinstance(draft, LayerDraft)] for _, drafts in plans]
    return [len(set(several)) for several in kept_sets if len(several) > 1]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("method", SETTINGS)
def test_a_batch_shares_a_kept_set_and_writes_the_plain_text(
    method: str, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(method, monkeypatch)
    results = generate(method, share_kept_set=share)
    for ids, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain_text("llama", ids, NEW_TOKENS)
        assert result.drafted > 0
        assert result.accepted > 0
    numbers = numbers_of_sets(plans)
    assert len(numbers) > 4
    assert (max(numbers) == 1) == share


@pytest.mark.parametrize("method", SETTINGS)
def test_one_request_alone_is_as_without_sharing(method: str) -> None:
    shared, own = (
        Engine(build("llama"), method=method, settings={**SETTINGS[method], "share_kept_set": share}).generate(
            prompt(17), max_new_tokens=NEW_TOKENS
        )
        for share in (True, False)
    )
    assert [played.kept for played in shared.rounds] == [played.kept for played in own.rounds]
    assert [played.drafted for played in shared.rounds] == [played.drafted for played in own.rounds]
    assert shared.accepted > 0


@torch.inference_mode()
def test_requests_of_del_draft_with_their_own_threshold_of_the_shared_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Tensor] = []
    count = Del.count
    monkeypatch.setattr(Del, "count", lambda *given: counted.append(count(*given)) or counted[-1])
    method = Del(Target(build("llama")), DelSettings(omega=0.5))
    _, prefill = read_text(method.target, prompt(17), method.needs)
    drafter = method.begin(prefill)
    assert isinstance(drafter, DelDrafter)
    (counts,) = counted
    for exit_layer in range(1, SUBLAYERS // 2):
        matched, mismatched = (float(counts[0, kind, exit_layer - 1]) for kind in (0, 1))
        confidences = [float(counts[1, kind, exit_layer - 1]) for kind in (0, 1)]
        means = [
            total / number if number else 0.0 for total, number in zip(confidences, (matched, mismatched), strict=True)
        ]
        stop = ConfidenceThreshold(drafter.exit.threshold)
        draft = drafter.adapted(LayerDraft(KeptSet.early_exit(exit_layer, SUBLAYERS), 3, stop))
        assert isinstance(draft, LayerDraft)
        assert draft.kept == KeptSet.early_exit(exit_layer, SUBLAYERS)
        assert draft.stop is not None
        assert draft.stop.threshold == pytest.approx(sum(means) / 2)


def test_a_batch_of_del_plans_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of("del", monkeypatch)
    generate("del")
    thresholds = [
        {draft.stop.threshold for draft in drafts if isinstance(draft, LayerDraft) and draft.stop is not None}
        for _, drafts in plans
    ]
    assert sum(len(different) > 1 for different in thresholds) > 4, "all requests had one threshold"


def test_a_batch_of_swift_drafts_with_the_set_after_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of("swift", monkeypatch)
    settings = {
        "schedule": "paper",
        "context_window": 4,
        "max_matchness": 1.0,
        "confidence_threshold": 0.2,
        "skip_ratio": 0.45,
    }
    results = generate("swift", **settings)
    for ids, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain_text("llama", ids, NEW_TOKENS)
        assert result.accepted > 0
    numbers = numbers_of_sets(plans)
    assert len(numbers) > 4
    assert set(numbers) == {1}
    used = [draft.kept for _, drafts in plans for draft in drafts if isinstance(draft, LayerDraft)]
    assert len(set(used)) > 1, "the search never found a better set"
