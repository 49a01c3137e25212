"""When drafts stop: the rules by hand, and the draft lengths of the methods that use them."""

import itertools
import operator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import LAYERS, build, plain_text, prompt
from helpers.scripted import Scripted
from selfspec.decoding.draft import ConfidenceThreshold, DraftVerifyThreshold, JointConfidence, LayerDraft, Proposal
from selfspec.decoding.drafter import Feedback
from selfspec.engine import Engine
from selfspec.errors import InvalidSettingError
from selfspec.methods import make_method
from selfspec.methods.skipping import evenly_skipped
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance, TokenTree
from selfspec.types import Generation
from selfspec_lab.testing import read_text

NEW_TOKENS = 60


def test_a_confidence_threshold_stops_below_itself() -> None:
    rule = ConfidenceThreshold(0.7)
    assert [rule.stops(confidence) for confidence in (0.0, 0.6999, 0.7, 1.0)] == [True, True, False, False]


def test_joint_confidence_by_hand() -> None:
    rule = JointConfidence(0.5)
    assert [rule.stops(confidence) for confidence in (0.9, 0.8, 0.7, 0.99, 1.0)] == [False, False, False, True, True]


def test_each_draft_has_a_joint_confidence_of_its_own() -> None:
    """Drafts end where the product of their own confidences falls below the threshold, round after round."""
    target, room = Target(build("llama")), 60
    method = Scripted(target, lambda _: LayerDraft(KeptSet.full(target.sublayer_count), 8, JointConfidence(0.2)))
    Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=room)
    lengths = set()
    for feedback in method.feedbacks[:-1]:
        products = list(itertools.accumulate(feedback.proposal.confidences, operator.mul))
        assert all(product >= 0.2 for product in products[:-1])
        assert products[-1] < 0.2 or len(products) == 8
        lengths.add(len(products))
    assert len(lengths) > 1, "the threshold never mattered"


def test_draft_verify_threshold_by_hand() -> None:
    rule = DraftVerifyThreshold(0.6, target_acceptance=0.9, step=0.01)
    rule.update(4, 2, reached_limit=False)  # smoothed acceptance 0.25, too low: up to 0.61, of which a tenth
    assert rule.threshold == pytest.approx(0.601)
    rule.update(5, 5, reached_limit=True)  # 0.625, still too low
    assert rule.threshold == pytest.approx(0.602)
    rule.update(3, 3, reached_limit=False)  # 0.8125
    assert rule.threshold == pytest.approx(0.603)
    rule.update(3, 3, reached_limit=False)  # 0.90625: down
    assert rule.threshold == pytest.approx(0.602)
    rule.update(8, 8, reached_limit=True)  # the limit, not the threshold, ended this draft
    assert rule.threshold == pytest.approx(0.602)
    rule.update(0, 0, reached_limit=False)  # nothing drafted, nothing learned
    assert rule.threshold == pytest.approx(0.602)
    rule.update(2, 0, reached_limit=False)  # 0.4766
    assert rule.threshold == pytest.approx(0.603)
    assert rule.stops(0.6029)
    assert not rule.stops(0.6031)


def test_draft_verify_acceptance_at_the_target_is_enough() -> None:
    rule = DraftVerifyThreshold(0.5, target_acceptance=0.5)
    rule.update(2, 2, reached_limit=False)
    assert rule.threshold == pytest.approx(0.499)


def test_draft_verify_acceptance_is_smoothed_from_zero() -> None:
    """Zhang et al.'s rule written out. However good the first rounds are, the threshold rises at first."""
    rule = DraftVerifyThreshold(0.6)
    smoothed, threshold, moves = 0.0, 0.6, []
    for drafted, accepted in [(4, 4)] * 5 + [(4, 3), (2, 0), (4, 4)]:
        rule.update(drafted, accepted, reached_limit=False)
        smoothed = 0.5 * smoothed + 0.5 * accepted / drafted
        moved = threshold + 0.01 if smoothed < 0.9 else threshold - 0.01
        moves.append(moved > threshold)
        threshold = 0.9 * threshold + 0.1 * moved
        assert rule.threshold == pytest.approx(threshold)
    assert moves == [True, True, True, False, False, True, True, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans())), st.floats(0, 1), st.floats(0, 1))
def test_draft_verify_threshold_stays_a_probability(
    rounds: list[tuple[int, bool, bool]], start: float, step: float
) -> None:
    rule = DraftVerifyThreshold(start, step=step)
    for drafted, accepted, reached_limit in rounds:
        rule.update(drafted, drafted * accepted, reached_limit=reached_limit)
        assert 0.0 <= rule.threshold <= 1.0


def run(method: str, name: str = "llama", **settings: object) -> Generation:
    result = Engine(build(name), method=method, settings=settings).generate(prompt(17), max_new_tokens=NEW_TOKENS)
    assert result.token_ids == plain_text(name, prompt(17), NEW_TOKENS)
    return result


def room(result: Generation) -> list[int]:
    """For each round how many draft tokens could still have been committed."""
    left, rooms = NEW_TOKENS - 1, []
    for record in result.rounds:
        rooms.append(left - 1)
        left -= len(record.token_ids)
    return rooms


@pytest.mark.parametrize(("exit_layer", "start", "longest"), [(5, 1, 18), (2, 6, 7), (1, 3, 18), (4, 9, 4)])
def test_finite_state_draft_lengths(exit_layer: int, start: int, longest: int) -> None:
    result = run("layerskip-fs", exit_layer=exit_layer, draft_length=start, max_draft_length=longest)
    length, moves = min(start, longest), set()
    for record, limit in zip(result.rounds, room(result), strict=True):
        assert record.drafted == min(length, limit)
        move = 1 if record.accepted == record.drafted else -1
        moves.add(move)
        length = min(longest, max(1, length + move))
    assert moves == {1, -1}


def test_fixed_draft_lengths() -> None:
    result = run("layerskip", exit_layer=2, draft_length=5)
    assert [record.drafted for record in result.rounds] == [min(5, limit) for limit in room(result)]


def test_drafts_end_behind_the_first_unsure_token() -> None:
    target = Target(build("llama"))
    draft = LayerDraft(KeptSet.early_exit(3, target.sublayer_count), 8, stop=ConfidenceThreshold(0.5))
    method = Scripted(target, lambda _: draft)
    result = Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=NEW_TOKENS)
    lengths = set()
    for feedback, limit in zip(method.feedbacks, room(result), strict=True):
        confidences = feedback.proposal.confidences
        assert len(confidences) == feedback.drafted
        assert all(confidence >= 0.5 for confidence in confidences[:-1])
        if confidences:
            assert confidences[-1] < 0.5 or len(confidences) == min(8, limit)
        lengths.add(len(confidences))
    assert len(lengths) > 2, "the threshold never mattered"


def test_draft_verify_shortens_drafts_that_fail() -> None:
    result = run("layerskip-dv", exit_layer=1, threshold=0.0, target_acceptance=1.0, step=1.0)
    drafted = [record.drafted for record in result.rounds]
    assert drafted[0] == 12, "a threshold of zero stops nothing"
    limits = [min(12, limit) for limit in room(result)]
    assert any(length < limit for length, limit in zip(drafted, limits, strict=True)), "the threshold never rose"


def test_draft_verify_lengthens_drafts_that_stand() -> None:
    eager = run("layerskip-dv", exit_layer=5, threshold=1.0, target_acceptance=0.0, step=1.0)
    drafted = [record.drafted for record in eager.rounds]
    assert drafted[0] == 1, "a threshold of one stops at once"
    assert max(drafted) > 2


def test_draft_verify_starts_every_request_afresh() -> None:
    settings = {"exit_layer": 1, "threshold": 0.3, "target_acceptance": 1.0, "step": 1.0}
    engine = Engine(build("llama"), method="layerskip-dv", settings=settings)
    first, second = (engine.generate(prompt(17), max_new_tokens=NEW_TOKENS) for _ in range(2))
    assert [record.drafted for record in first.rounds] == [record.drafted for record in second.rounds]


@given(st.integers(1, 80), st.floats(0, 1))
def test_evenly_skipped(layers: int, ratio: float) -> None:
    skipped = evenly_skipped(layers, ratio)
    kinds = {
        kind: [index // 2 for index in skipped if index % 2 == kind] for kind in (0, 1)
    }  # layers whose attention or MLP is skipped
    assert len(set(skipped)) == len(skipped) == int(2 * max(0, layers - 2) * ratio)
    assert list(skipped) == sorted(skipped)
    assert all(0 < index // 2 < layers - 1 for index in skipped), "the first or the last layer is skipped"
    assert len(kinds[0]) - len(kinds[1]) in (0, 1)
    for chosen in kinds.values():
        gaps = [later - earlier for earlier, later in pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        if chosen:
            widest = (layers - 2) / len(chosen) + 1
            assert chosen[0] <= widest
            assert layers - 1 - chosen[-1] <= widest


def test_evenly_skipped_by_hand() -> None:
    assert evenly_skipped(6, 0.5) == (4, 5, 8, 9)
    assert evenly_skipped(6, 1.0) == (2, 3, 4, 5, 6, 7, 8, 9)
    assert evenly_skipped(2, 0.9) == ()


def test_uniform_keeps_the_rest_in_every_round() -> None:
    result = run("uniform", skip_ratio=0.5)
    kept = KeptSet.skipping(evenly_skipped(LAYERS, 0.5), 2 * LAYERS)
    assert {(record.attention_share, record.mlp_share) for record in result.rounds} == {
        (kept.attention_share, kept.mlp_share)
    }


def test_uniform_that_skips_nothing_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match=r"skip_ratio 0\.05 skips none of the 8 sublayers"):
        run("uniform", skip_ratio=0.05)


def test_a_round_without_a_draft_teaches_finite_state_nothing() -> None:
    target = Target(build("llama"))
    drafter = make_method("layerskip-fs", target).begin(read_text(target, [1])[1])
    before = drafter.plan()
    empty = Proposal(torch.empty(0, dtype=torch.long), TokenTree(()))
    drafter.learn(Feedback(before, empty, Acceptance((0,), (3,)), lambda: torch.zeros(1, 8)))
    assert drafter.plan() == before
