"""The whole loop by distribution: drafting, verification and acceptance around a model that is a table.

The table gives the next token's distribution from the last token alone, one for the target and another for the draft,
so that the output is a Markov chain whose transitions are known exactly. Everything but the model is the real thing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList

from scripted import Script, Scripted
from selfspec.decoding.draft import Draft, LayerDraft, TokenDraft
from selfspec.decoding.loop import decode
from selfspec.decoding.output import Output
from selfspec.decoding.request import Request
from selfspec.methods.base import Needs
from selfspec.model.cache import KeyValueCache
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import SequenceState, StackOutput
from selfspec.sampling.acceptance import Acceptance, Verdict
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Coupled, Rule, Speculative, seeded_generator
from selfspec.sampling.tree import TokenTree

VOCAB = 5
SUBLAYERS = 4
DRAWS = 100_000
FEWER_DRAWS = 10_000
"""Many more than show a wrong rule."""
DRAWS_OF_A_WRONG_RULE = 5_000
KEPT = KeptSet((1, 2), SUBLAYERS)

_random = torch.Generator().manual_seed(0)
TARGET = torch.softmax(1.2 * torch.randn(VOCAB, VOCAB, generator=_random), -1)
TARGET[:, 4] *= torch.tensor([0, 1, 1, 0, 1])  # some tokens cannot follow some others, whatever the draft thinks
TARGET /= TARGET.sum(-1, keepdim=True)
DRAFT = torch.softmax(TARGET.clamp_min(1e-3).log() + 0.8 * torch.randn(VOCAB, VOCAB, generator=_random), -1)


class TableTarget:
    """Stands in for ``Target``: a full run looks up the target's table, a partial one the draft's."""

    device, dtype, hidden_size = torch.device("cpu"), torch.float32, VOCAB
    sublayer_count = SUBLAYERS

    def new_sequence(self, prompt_length: int, capacity: int, last_length: int) -> SequenceState:
        return SequenceState(KeyValueCache(1, 1, capacity, 1, dtype=torch.float32, device=self.device))

    def begin(self, *_: Any, **__: Any) -> None:
        return None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(token_ids, VOCAB).float()

    def run(
        self,
        hidden_states: torch.Tensor,
        sublayers: Iterable[int],
        step: None,
        capture: Collection[int] = (),
        through: None = None,
        copies: Mapping[int, torch.Tensor] | None = None,
    ) -> StackOutput:
        return StackOutput(hidden_states if len(list(sublayers)) == SUBLAYERS else -hidden_states)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        full = hidden_states.sum(-1, keepdim=True) > 0
        return torch.where(full, hidden_states @ TARGET, -hidden_states @ DRAFT).clamp_min(1e-30).log()


def chain(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KEPT, 3)


def tree(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KEPT, 2, widths=lambda confidence: 2 if confidence > 0.5 else 3)


def found(written: tuple[int, ...]) -> Draft:
    return TokenDraft(((written[-1] + 1) % VOCAB, 2, 3, 0), TokenTree((-1, -1, 0, 0)))


def speculative(run: int) -> Rule:
    return Speculative(seeded_generator(run, "cpu"))


def p_value(script: Script, make_rule: Callable[[int], Rule], draws: int, length: int = 5000) -> tuple[float, int]:
    """Writes outputs until there are enough transitions; the χ² test of them against the table, and accepted drafts."""
    counts = np.zeros((VOCAB, VOCAB))
    accepted = 0
    for run in range(draws // length):
        tokens, rounds = write(script, make_rule(run), length)
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        accepted += sum(record.accepted for record in rounds)
    expected = TARGET.double().numpy() * counts.sum(1, keepdims=True)
    possible = expected > 0
    if counts[~possible].any():  # a token was written that the target never writes
        return 0.0, accepted
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(stats.chi2.sf(statistic, possible.sum() - VOCAB)), accepted


def write(script: Script, rule: Rule, length: int) -> tuple[list[int], list[Any]]:
    target: Any = TableTarget()
    method = Scripted(target, script, Needs(sibling_rows=8))
    processor = ScoreProcessor(LogitsProcessorList())
    request = Request(target, [0], max_new_tokens=length, rule=rule, processor=processor, sibling_rows=8)
    output = Output([0], max_new_tokens=length)
    rounds = [record for record in decode(target, method, request, output, 16) if record is not None]
    return output.token_ids, rounds


@pytest.mark.parametrize(("script", "draws"), [(tree, DRAWS), (chain, FEWER_DRAWS), (found, FEWER_DRAWS)])
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

    def accept(self, tree: TokenTree, *arguments: Any) -> Verdict:
        acceptance = super().accept(tree, *arguments).read()
        target_scores = arguments[3]
        drawn = int(target_scores[0].softmax(-1).multinomial(1, generator=self.generator))
        return Verdict((), lambda: Acceptance(acceptance.rows, (*acceptance.token_ids[:-1], drawn)))


class NoResidual(Speculative):
    """Wrong on purpose: after a rejection the next token is drawn from the whole target distribution."""

    def accept(self, tree: TokenTree, *arguments: Any) -> Verdict:
        acceptance = super().accept(tree, *arguments).read()
        row = arguments[3][acceptance.rows[-1]]
        drawn = int(row.softmax(-1).multinomial(1, generator=self.generator))
        return Verdict((), lambda: Acceptance(acceptance.rows, (*acceptance.token_ids[:-1], drawn)))


class AcceptsTooMuch(Speculative):
    """Wrong on purpose: verifies against the draft's own scores."""

    def accept(self, tree: TokenTree, *arguments: Any) -> Verdict:
        tokens, draft_scores, draft_rows, target_scores, positions = arguments
        if draft_scores is None:
            return super().accept(tree, *arguments)
        mixed = target_scores.clone()
        mixed[: len(draft_scores)] = (target_scores[: len(draft_scores)] + draft_scores) / 2
        return super().accept(tree, tokens, mixed[: len(draft_scores)], draft_rows, target_scores, positions)


@pytest.mark.parametrize("wrong", [BonusFromTheDraft, NoResidual, AcceptsTooMuch], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("script", [chain, tree], ids=lambda script: script.__name__)
def test_the_test_notices_a_wrong_rule(script: Script, wrong: type[Speculative]) -> None:
    value, _ = p_value(script, lambda run: wrong(seeded_generator(run, "cpu")), DRAWS_OF_A_WRONG_RULE)
    assert value < 1e-6
