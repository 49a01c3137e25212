"""A drafter that records the feedback of every round, and else does what another one does."""

from collections.abc import Collection

import pytest

from selfspec.decoding.draft import Draft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.base import Method


class Recording(Drafter):
    """Delegates to a drafter.

    Args:
        drafter: the drafter.
        feedbacks: takes what it learns from, before it does.
    """

    def __init__(self, drafter: Drafter, feedbacks: list[Feedback]) -> None:
        self.drafter = drafter
        self.feedbacks = feedbacks

    def plan(self) -> Draft:
        return self.drafter.plan()

    @property
    def watched(self) -> Collection[int]:
        return self.drafter.watched

    def learn(self, feedback: Feedback) -> None:
        self.feedbacks.append(feedback)
        self.drafter.learn(feedback)


def record(method_class: type[Method], monkeypatch: pytest.MonkeyPatch) -> list[Feedback]:
    """From now on records all rounds of a method's requests."""
    feedbacks: list[Feedback] = []
    begin = method_class.begin

    def recorded(method: Method, prefill: Prefill) -> Drafter:
        return Recording(begin(method, prefill), feedbacks)

    monkeypatch.setattr(method_class, "begin", recorded)
    return feedbacks
