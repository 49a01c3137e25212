"""Replays of rounds against sums by hand, the papers' formula, and measured and published costs."""

from dataclasses import dataclass

import pytest

from selfspec.model.kept import KeptSet
from selfspec.types import PhaseSeconds, Round
from selfspec_lab.formulas import ideal_speedup
from selfspec_lab.papers.costs import (
    PAPER_MACHINES,
    SELECTION,
    ProfileCost,
    RuleCost,
    paper_machine,
    roofline_cost,
    with_selection,
)
from selfspec_lab.replay import Played, plain_seconds, play, played, replayed_seconds, replayed_speedup


@dataclass(frozen=True)
class Toy:
    """A branch of attention takes 1 + context, all MLPs 10, a row 0.5, the head 2 seconds."""

    name: str = "toy"
    selection: float = 0.0

    def forward(self, attention: float, mlp: float, rows: int, context: int) -> float:
        return attention * (1 + context) + 10 * mlp + 0.5 * rows + 2


def test_a_round_is_drafts_and_one_verification() -> None:
    rounds = [Played(0.5, 0.25, 2, 3, 3), Played(0.0, 0.0, 0, 1, 1)]
    toy = Toy()
    drafts = toy.forward(0.5, 0.25, 1, 8) + toy.forward(0.5, 0.25, 1, 9)
    assert replayed_seconds(rounds, 7, toy) == drafts + toy.forward(1, 1, 3, 8) + toy.forward(1, 1, 1, 11)
    assert plain_seconds(2, 7, toy) == toy.forward(1, 1, 1, 8) + toy.forward(1, 1, 1, 9)
    assert replayed_seconds(rounds, 7, Toy(selection=0.5)) == 2 * replayed_seconds(rounds, 7, toy)


def test_plain_rounds_are_as_fast_as_plain_decoding() -> None:
    rounds = [Played(0.0, 0.0, 0, 1, 1)] * 9
    for cost in (Toy(), RuleCost(), roofline_cost("A100", "Llama-2-7B")):
        assert replayed_speedup(rounds, 100, cost) == pytest.approx(1.0)


def test_by_the_rule_equal_rounds_have_the_speedup_of_equation_6() -> None:
    rounds = [Played(0.6, 0.4, 5, 6, 4)] * 7  # 3 of 5 accepted, M = 4
    assert replayed_speedup(rounds, 50, RuleCost()) == pytest.approx(float(ideal_speedup(4.0, 0.6, 0.5)))


def test_what_is_stored_of_a_round() -> None:
    kept = KeptSet((0, 3, 4), 8)
    record = Round(4, 6, 2, (7, 7, 7), kept, None, PhaseSeconds(), guessed=1, probes=2)
    assert played(record) == Played(0.5, 0.25, 3, 9, 3)
    assert played(record, dropped=True).steps == 4
    tokens = Round(4, 4, 2, (7, 7, 7), None, None, PhaseSeconds())
    assert played(tokens) == Played(0.0, 0.0, 0, 5, 3)
    assert played(tokens, dropped=True).steps == 0


def test_a_token_is_dropped_where_a_draft_ends_before_it_has_to() -> None:
    kept = KeptSet((0, 1), 8)
    lengths = [(4, 4), (2, 1), (0, 1), (3, 3), (1, 2)]  # drafted and committed; the prefill wrote one more
    rounds = [Round(drafted, drafted, new - 1, (7,) * new, kept, None, PhaseSeconds()) for drafted, new in lengths]
    # The first is as long as any may be, the last as the output allows.
    assert [each.steps for each in play(rounds, new_tokens=12, longest=4)] == [4, 3, 1, 4, 1]
    assert [each.steps for each in play(rounds)] == [4, 2, 0, 3, 1]


def test_a_profile_is_interpolated_between_its_rows() -> None:
    part = {"attention_per_token": 0.01, "attention_base": 1.0, "mlp": 3.0, "head": 4.0, "rest": 1.0}
    rows = {"1": part, "4": {**part, "mlp": 6.0}}
    cost = ProfileCost.from_profile({"layers": 2, "rows": rows})
    assert cost.forward(1, 1, 1, 100) == pytest.approx(2 * (2.0 + 3.0) + 5.0)
    assert cost.forward(0.5, 1, 1, 100) == pytest.approx(2 * (1.0 + 3.0) + 5.0)
    assert cost.forward(1, 1, 2, 0) == pytest.approx(2 * (1.0 + 4.0) + 5.0)


def test_skipping_more_is_faster_on_every_papers_machine_and_selecting_costs_its_share() -> None:
    for method in PAPER_MACHINES:
        cost = paper_machine(method)
        few, many = ([Played(share, share, 4, 5, 5)] * 4 for share in (0.3, 0.9))
        assert replayed_speedup(few, 500, cost) > replayed_speedup(many, 500, cost) > 1 - cost.selection
        assert cost.selection == SELECTION.get(method, 0.0)
    rounds = [Played(0.5, 0.5, 4, 5, 5)] * 4
    free, paid = RuleCost(), with_selection(RuleCost(), "paper(knapspec)")
    ratio = replayed_speedup(rounds, 9, paid) / replayed_speedup(rounds, 9, free)
    assert ratio == pytest.approx(1 - SELECTION["knapspec"])
