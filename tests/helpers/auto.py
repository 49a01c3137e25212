"""``auto`` on the tiny models of tests: what it would find out about them is noise, so it is given, and stays."""

from collections.abc import Callable, Sequence

import pytest

from selfspec.methods.auto.preparation import Assignment, AutoSettings, Preparation, TriedAssignment
from selfspec.model.kept import KeptSet
from selfspec.planning.allowance import HostTime
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.target import Target


class GivenCosts(LiveCosts):
    """Costs that live rounds do not move."""

    def note_kinds(self, timed: Sequence[tuple[Sequence[int], float]]) -> None:
        """Counts nothing."""


def after_plain_rounds() -> HostTime:
    """Of batches that have been decoded plainly before, so that drafts are looked for."""
    host = HostTime()
    for requests in range(2, 9):
        host.allowance.note(requests, 1, 0.0)
    return host


def give(
    monkeypatch: pytest.MonkeyPatch, preparation: Preparation | Callable[[Target, AutoSettings], Preparation]
) -> None:
    """Gives ``auto`` a preparation, instead of what it would estimate or find out."""

    def given(target: Target, settings: AutoSettings, *_: object) -> Preparation:
        return preparation if isinstance(preparation, Preparation) else preparation(target, settings)

    monkeypatch.setattr("selfspec.methods.auto.method.prepare", given)
    monkeypatch.setattr("selfspec.methods.auto.method.expect", given)
    monkeypatch.setattr("selfspec.methods.auto.method.LiveCosts", GivenCosts)


def eager_preparation(target: Target, settings: AutoSettings) -> Preparation:
    """Rows cost nothing and layers next to nothing, so that every round drafts."""
    verify = RowCosts((1, 64), (1.0, 1.001))
    if target.layer_count < 2:
        return Preparation(verify, None)
    kept = KeptSet.early_exit(target.layer_count - 1, target.sublayer_count)
    return Preparation(verify, TriedAssignment(Assignment(kept), 0.9, RowCosts((1, 64), (0.001, 0.002))))
