"""A layer draft with guesses drafts bit for bit what it drafts without them, in fewer forwards where they are right."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from helpers.drafts import counted_forwards
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import prompt
from selfspec.decoding.draft import ConfidenceThreshold, Guess, LayerDraft, Proposal
from selfspec.decoding.drafter import Needs
from selfspec.decoding.request import Sequence as Generated
from selfspec.decoding.round import propose
from selfspec.decoding.verification import verify
from selfspec.model.kept import KeptSet
from selfspec.runtimes.chain import NATIVE
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import build_processors
from selfspec.sampling.rules import Coupled, Greedy, Rule, Speculative, seeded_generator
from selfspec.types import SamplingParams
from selfspec_lab.testing import read_text

TARGET = Target(random_model())
VOCABULARY = TARGET.vocab_size
LENGTH = 8
FULL = KeptSet.full(SUBLAYERS)
DRAFTS = {
    "low-bit": LayerDraft(FULL, LENGTH, precision=Precision.of(4)),
    "low-bit, stopping": LayerDraft(FULL, LENGTH, ConfidenceThreshold(0.1), precision=Precision.of(8)),
    "early exit": LayerDraft(KeptSet.early_exit(2, SUBLAYERS), LENGTH),
    "skipped middle": LayerDraft(KeptSet((0, 1, 2, 5, 7), SUBLAYERS), LENGTH, ConfidenceThreshold(0.05)),
    "tree": LayerDraft(KeptSet((0, 1, 2, 5, 7), SUBLAYERS), LENGTH, widths=lambda _: 3),
    "skipped start": LayerDraft(KeptSet((1, 4, 6), SUBLAYERS), LENGTH),
}
RULES: dict[str, Callable[[], Rule]] = {
    "greedy": Greedy,
    "seed": lambda: Coupled(3),
    "rejection": lambda: Speculative(seeded_generator(3, "cpu")),
}
PENALTY = SamplingParams(temperature=0.8, logits_processors=(RepetitionPenaltyLogitsProcessor(1.3),))
WATCHED = (0, 1, 2, SUBLAYERS)


def context_for(rule: Rule, room: int = 20) -> Generated:
    """A text of 24 tokens; processors depend on the drafted tokens."""
    processor, needs = build_processors(PENALTY), Needs(sibling_rows=12)
    return read_text(TARGET, prompt(24), needs, max_new_tokens=room, rule=rule, processor=processor)[0]


def drafted(draft: LayerDraft, context: Generated) -> tuple[Proposal, list[int]]:
    """The draft, and the rows of its forwards."""
    with torch.inference_mode(), counted_forwards() as forwards:
        (proposal,) = propose(TARGET, [context], [draft])
    assert list(proposal.forwards) == forwards
    return proposal, forwards


def assert_same(proposal: Proposal, expected: Proposal) -> None:
    assert torch.equal(proposal.token_ids, expected.token_ids)
    assert proposal.tree == expected.tree
    assert proposal.confidences == expected.confidences
    assert (proposal.scores is None) == (expected.scores is None)
    if proposal.scores is not None and expected.scores is not None:
        assert torch.equal(proposal.scores, expected.scores)


def path(proposal: Proposal) -> list[int]:
    """The extended path, which comes first."""
    return proposal.token_ids[: proposal.drafted].tolist()


def guess_from(tokens: Sequence[int], most: int = LENGTH) -> Guess:
    """Guesses that the draft is these tokens."""
    return lambda drafted: tokens[len(drafted) : len(drafted) + most]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTS)
def test_right_guesses_take_one_forward(name: str, rule: str) -> None:
    draft = DRAFTS[name]
    expected, before = drafted(draft, context_for(RULES[rule]()))
    proposal, after = drafted(replace(draft, guess=guess_from([*path(expected), 0])), context_for(RULES[rule]()))
    assert_same(proposal, expected)
    assert (len(before), len(after)) == (expected.drafted, 1)
    assert (expected.guessed, proposal.guessed) == (0, expected.drafted - 1)
    assert expected.drafted > 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTS)
def test_wrong_guesses_change_nothing(name: str, rule: str) -> None:
    draft = DRAFTS[name]
    expected, before = drafted(draft, context_for(RULES[rule]()))
    wrong = [(token + 1) % VOCABULARY for token in path(expected)]
    proposal, after = drafted(replace(draft, guess=guess_from([*wrong, 0, 0])), context_for(RULES[rule]()))
    assert_same(proposal, expected)
    assert len(after) == len(before)
    assert proposal.guessed == 0
    assert max(after) > 1


@given(data=st.data())
def test_any_guesses_change_nothing(data: st.DataObject) -> None:
    """Right up to somewhere, then wrong, for a while; also near the end of the output, and after it."""
    draft = DRAFTS[data.draw(st.sampled_from(sorted(DRAFTS)), label="draft")]
    rule = RULES[data.draw(st.sampled_from(sorted(RULES)), label="rule")]
    room = data.draw(st.integers(2, 12), label="room")
    expected, before = drafted(draft, context_for(rule(), room))
    truth = [*path(expected), 1, 2, 3]
    right = data.draw(st.lists(st.booleans(), min_size=len(truth), max_size=len(truth)), label="right")
    mixed = [token if is_right else (token + 7) % VOCABULARY for token, is_right in zip(truth, right, strict=True)]
    guess = guess_from(mixed, data.draw(st.integers(0, LENGTH), label="most"))
    proposal, after = drafted(replace(draft, guess=guess), context_for(rule(), room))
    assert_same(proposal, expected)
    assert len(after) == len(before) - proposal.guessed


def rows_of_forwards(right: Sequence[bool], most: int) -> list[int]:
    """The rows of the forwards that draft as many tokens, of each of which a guess is right or not."""
    rows, drafted_tokens = list[int](), 0
    while drafted_tokens < len(right):
        guessed = min(most, len(right) - drafted_tokens - 1)
        rows.append(1 + guessed)
        confirmed = list(takewhile(bool, right[drafted_tokens : drafted_tokens + guessed]))
        drafted_tokens += 1 + len(confirmed)
    return rows


@needs_kernels
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
@pytest.mark.parametrize("most", [0, 1, 8])
def test_native_forwards_are_counted_to_the_last(limit: int, most: int) -> None:
    """The forward for which there is no room for guesses, too."""
    target = Target(random_model(torch.bfloat16), "compiled")
    draft = LayerDraft(FULL, limit, precision=Precision.of(4))

    def propose_with(guess: Guess | None) -> Proposal:
        context = read_text(target, prompt(24), Needs(), max_new_tokens=20, rule=Greedy())[0]
        with torch.inference_mode():
            return propose(target, [context], [replace(draft, guess=guess)])[0]

    alone = propose_with(None)
    assert alone.path == NATIVE
    assert alone.forwards == (1,) * limit
    truth = path(alone)
    for right in ([False] * limit, [index % 2 == 0 for index in range(limit)], [True] * limit):
        mixed = [token if is_right else (token + 7) % VOCABULARY for token, is_right in zip(truth, right, strict=True)]
        proposal = propose_with(guess_from(mixed, most))
        assert path(proposal) == truth
        assert list(proposal.forwards) == rows_of_forwards(right, most)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_generator_has_made_the_same_draws(name: str) -> None:
    """What is drawn next, for the acceptance, does not depend on the guesses."""
    states = []
    for guess in (None, lambda _: [5] * 4):
        rule = Speculative(seeded_generator(3, "cpu"))
        drafted(replace(DRAFTS[name], guess=guess), context_for(rule))
        states.append(rule.generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_verification_is_the_same(name: str) -> None:
    """Rows of wrong guesses leave keys and values that nothing reads."""
    outputs: list[Any] = []
    for guess in (None, lambda drafted: [len(drafted)] * 5):
        context = context_for(Greedy())
        proposal, _ = drafted(replace(DRAFTS[name], guess=guess), context)
        with torch.inference_mode():
            (output,) = verify(TARGET, [context], [proposal], [WATCHED])
        assert output is not None
        assert output.logits is not None
        slots = context.cache.length + len(proposal.token_ids) + 1
        written = [buffer[:, :, :slots].clone() for buffer in (*context.cache.keys, *context.cache.values)]
        outputs.append([output.logits.values, *output.hidden_states.values(), *written])
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


def test_guesses_beside_each_other() -> None:
    """Drafts of several sequences run together, with different numbers of rows."""
    draft = DRAFTS["low-bit"]
    alone = [drafted(draft, context_for(Greedy()))[0] for _ in range(3)]
    guesses: list[Guess | None] = [None, guess_from(path(alone[0]), 2), guess_from(path(alone[0]))]
    contexts = [context_for(Greedy()) for _ in guesses]
    drafts = [replace(draft, guess=guess) for guess in guesses]
    with torch.inference_mode():
        together = propose(TARGET, contexts, drafts)
    for proposal, expected in zip(together, alone, strict=True):
        assert path(proposal) == path(expected)
    assert [proposal.guessed for proposal in together] == [0, 5, 7]
