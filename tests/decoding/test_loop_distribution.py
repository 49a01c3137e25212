"""The distribution of the whole loop: drafting, verification and acceptance around a model that is a table."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.scripted import Script
from helpers.table import DRAWS, KEPT, VOCAB, p_value, speculative
from selfspec.decoding.draft import Draft, LayerDraft, TokenDraft
from selfspec.sampling.acceptance import Acceptance, DraftedTree, TokenTree, Verdict
from selfspec.sampling.rules import Coupled, Speculative, seeded_generator

FEWER_DRAWS = 5_000
"""As many as show a wrong rule."""


def chain(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KEPT, 3)


def tree(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KEPT, 2, widths=lambda confidence: 2 if confidence > 0.5 else 3)


def found(written: tuple[int, ...]) -> Draft:
    return TokenDraft(((written[-1] + 1) % VOCAB, 2, 3, 0), TokenTree((-1, -1, 0, 0)))


@pytest.mark.parametrize(
    ("script", "draws"),
    [
        (tree, FEWER_DRAWS),
        (chain, FEWER_DRAWS),
        (found, FEWER_DRAWS),
        pytest.param(tree, DRAWS, marks=pytest.mark.slow),
    ],
)
def test_speculative_sampling_writes_the_targets_distribution(script: Script, draws: int) -> None:
    value, accepted = p_value(script, speculative, draws)
    assert accepted > draws / 10
    assert value > 1e-3


def test_coupled_sampling_writes_the_targets_distribution() -> None:
    value, accepted = p_value(tree, Coupled, FEWER_DRAWS)
    assert accepted > FEWER_DRAWS / 10
    assert value > 1e-3


class BonusFromTheDraft(Speculative):
    """Wrong on purpose: what follows the last accepted token is drawn as if the first row had been rejected there."""

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        acceptance = super().accept(drafted, target_scores, positions).read()
        drawn = int(target_scores[0].softmax(-1).multinomial(1, generator=self.generator))
        return Verdict((), lambda: Acceptance(acceptance.rows, (*acceptance.token_ids[:-1], drawn)))


class NoResidual(Speculative):
    """Wrong on purpose: after a rejection the next token is drawn from the whole target distribution."""

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        acceptance = super().accept(drafted, target_scores, positions).read()
        row = target_scores[acceptance.rows[-1]]
        drawn = int(row.softmax(-1).multinomial(1, generator=self.generator))
        return Verdict((), lambda: Acceptance(acceptance.rows, (*acceptance.token_ids[:-1], drawn)))


class AcceptsTooMuch(Speculative):
    """Wrong on purpose: verifies against the draft's own scores."""

    def accept(self, drafted: DraftedTree, target_scores: torch.Tensor, positions: Sequence[int]) -> Verdict:
        if drafted.scores is None:
            return super().accept(drafted, target_scores, positions)
        mixed = (target_scores[: len(drafted.scores)] + drafted.scores) / 2
        return super().accept(replace(drafted, scores=mixed), target_scores, positions)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [BonusFromTheDraft, NoResidual, AcceptsTooMuch], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("script", [chain, tree], ids=lambda script: script.__name__)
def test_the_test_notices_a_wrong_rule(script: Script, wrong: type[Speculative]) -> None:
    value, _ = p_value(script, lambda run: wrong(seeded_generator(run, "cpu")), FEWER_DRAWS)
    assert value < 1e-6
