"""When layer drafts end: found once for all requests, and again where costs or texts differ."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from selfspec.methods.auto.layer_drafts import DraftPolicies
from selfspec.planning.acceptance_tables import CONFIDENCE, AcceptanceRate
from selfspec.planning.plans import MOST_DRAFTED, DraftPolicy
from selfspec.runtimes.costs.rows import RowCosts

VERIFY = RowCosts((1, 2, 4, 8, 16, 32), (1.0, 1.05, 1.2, 1.5, 2.1, 3.3)).table()
DRAFT = RowCosts((1, 8), (0.3, 0.5)).table()


@contextmanager
def counted() -> Iterator[list[int]]:
    """The limits of the policies that are computed meanwhile."""
    limits, init = list[int](), DraftPolicy.__init__

    def counting(self: DraftPolicy, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        limits.append(self.limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftPolicy, "__init__", counting)
        yield limits


def test_a_request_takes_the_policies_of_those_before_it() -> None:
    confident, policies = AcceptanceRate(CONFIDENCE), DraftPolicies()
    first_request, second_request = (confident.of_request(30.0, 100.0).outlook() for _ in range(2))
    with counted() as found:
        first = policies.fastest(first_request, DRAFT[1], VERIFY, MOST_DRAFTED, 1)
        assert found
        found.clear()
        assert policies.fastest(second_request, DRAFT[1], VERIFY, MOST_DRAFTED, 1) is first
        assert not found
        slow = [1.3 * seconds for seconds in VERIFY]
        assert policies.fastest(second_request, DRAFT[1], slow, MOST_DRAFTED, 1) is not first
        dear = [*VERIFY[:20], *(1.5 * seconds for seconds in VERIFY[20:])]
        assert policies.fastest(second_request, DRAFT[1], dear, MOST_DRAFTED, 1) is not first


@pytest.mark.parametrize("times", [0.4, 1.7])
def test_a_machine_that_is_slowed_takes_the_same_policy(times: float) -> None:
    """What it brings is what a policy found for the slower machine does."""
    policies, outlook = DraftPolicies(), AcceptanceRate(CONFIDENCE).outlook()
    verify, draft = ([times * seconds for seconds in costs] for costs in (VERIFY, DRAFT))
    first = policies.fastest(outlook, DRAFT[1], VERIFY, MOST_DRAFTED, 1)
    with counted() as found:
        slowed = policies.fastest(outlook, draft[1], verify, MOST_DRAFTED, 1)
        assert not found
    anew = DraftPolicy.fastest(first.outlook, slowed.draft, verify, MOST_DRAFTED)
    assert slowed.least_survival == first.least_survival == pytest.approx(anew.least_survival, rel=0.02)
    assert slowed.plan == pytest.approx(anew.plan, rel=0.02)
    assert (slowed.rate, slowed.draft) == pytest.approx((anew.rate, anew.draft), rel=0.02)
    assert slowed.plan.seconds == pytest.approx(times * first.plan.seconds)


def test_a_shorter_draft_is_planned_from_the_rate_of_a_longer_one() -> None:
    policies, outlook = DraftPolicies(), AcceptanceRate(CONFIDENCE).outlook()
    with counted() as found:
        longest = policies.fastest(outlook, DRAFT[1], VERIFY, MOST_DRAFTED, 1)
        alone = len(found)
        found.clear()
        shorter = policies.fastest(outlook, DRAFT[1], VERIFY, 16, 1)
        assert set(found) == {16}
        assert len(found) < alone
    assert shorter.rate == pytest.approx(longest.rate, rel=0.02)


def test_texts_that_differ_do_not_take_each_others_policies_away() -> None:
    confident, policies = AcceptanceRate(CONFIDENCE), DraftPolicies()
    sure, unsure = (confident.of_request(30.0, 100.0) for _ in range(2))
    for _ in range(100):
        sure.note(True, 0.999)
        unsure.note(False, 0.35)
    with counted() as found:
        first = [policies.fastest(each.outlook(), DRAFT[1], VERIFY, 8, 1) for each in (sure, unsure)]
        assert first[0] is not first[1]
        found.clear()
        for _ in range(5):
            assert [policies.fastest(each.outlook(), DRAFT[1], VERIFY, 8, 1) for each in (sure, unsure)] == first
        assert not found
