"""Known tokens after a layer draft: they are verified with it, and the text is the model's own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import prompt
from helpers.scripted import Scripted
from selfspec import Engine, SamplingParams
from selfspec.decoding.draft import Append, ConfidenceThreshold, LayerDraft
from selfspec.errors import InvalidParameterError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

TARGET = Target(random_model())
LENGTH = 3
UNTIL_LENGTH = ConfidenceThreshold(0.0)
DRAFTS = {
    "low-bit": LayerDraft(KeptSet.full(SUBLAYERS), LENGTH, UNTIL_LENGTH, precision=Precision.of(8)),
    "skipped middle": LayerDraft(KeptSet.skipping((4, 6), SUBLAYERS), LENGTH, UNTIL_LENGTH),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3},
    "seed": {"temperature": 0.8, "seed": 3},
}
TOKENS = 41


def written(draft: LayerDraft, append: Append | None, params: SamplingParams) -> tuple[tuple[int, ...], Scripted]:
    """The text of rounds that are all drafted so, and what the method was told of them."""
    method = Scripted(TARGET, lambda _: replace(draft, append=append))
    generation = Engine(TARGET.model, method=method).generate(prompt(24), params)
    return generation.token_ids, method


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_the_text_is_the_models_own(name: str, sampling: str, right: bool) -> None:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, **SAMPLING[sampling])
    expected = Engine(TARGET.model, method="autoregressive").generate(prompt(24), params).token_ids
    asked: list[tuple[Sequence[int], Sequence[float]]] = []
    so_far = [expected[0]]

    def append(drafted: Sequence[int], confidences: Sequence[float]) -> Sequence[int]:
        asked.append((drafted, confidences))
        start = len(so_far) + len(drafted)
        following = expected[start : start + 4]
        return following if right else [(token + 1) % TARGET.vocab_size for token in following]

    def script(output: tuple[int, ...]) -> LayerDraft:
        so_far[:] = output
        return replace(DRAFTS[name], append=append)

    method = Scripted(TARGET, script)
    generation = Engine(TARGET.model, method=method).generate(prompt(24), params)
    assert generation.token_ids == expected
    assert all(len(drafted) == len(confidences) for drafted, confidences in asked)
    rounds = [(each.proposal, each.accepted) for each in method.feedbacks]
    assert max(len(proposal.tree) for proposal, _ in rounds) == LENGTH + 4
    assert all(len(proposal.confidences) <= LENGTH for proposal, _ in rounds)
    beyond = [accepted - LENGTH for _, accepted in rounds if accepted > LENGTH]
    assert bool(beyond) == right, "appended tokens are accepted where they are right, and only there"


def test_none_follow_where_tokens_are_drawn_from_the_scores_of_the_draft() -> None:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, temperature=0.8, acceptance="speculative")
    _, method = written(DRAFTS["low-bit"], lambda *_: pytest.fail("asked"), params)
    assert max(each.proposal.drafted for each in method.feedbacks) == LENGTH


def test_no_more_follow_than_can_be_committed() -> None:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    text, method = written(DRAFTS["low-bit"], lambda *_: [5] * 99, params)
    assert text == written(DRAFTS["low-bit"], None, params)[0]
    left = TOKENS - 1
    for each in method.feedbacks:
        assert len(each.proposal.tree) == left - 1
        left -= len(each.acceptance.token_ids)


@pytest.mark.parametrize("given", [{"stop": None}, {"widths": lambda _: 2}], ids=["without confidences", "with a tree"])
def test_drafts_that_nothing_can_follow_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match="give stop, and leave widths out"):
        replace(DRAFTS["low-bit"], append=lambda *_: (), **given)
