"""Verification with its outcome, and again without the draft where the draft spoiled it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.decoding.draft import empty_proposal
from selfspec.decoding.judging import judge
from selfspec.decoding.phases import phase
from selfspec.decoding.proposal import Proposal
from selfspec.decoding.sequence import Sequence as Generated
from selfspec.decoding.verification import Verified, verify, verify_chains
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance


@dataclass(frozen=True)
class Outcome:
    """A draft that was verified.

    Attributes:
        proposal: the draft.
        acceptance: the accepted rows and the tokens they give.
        scores: gives float32 ``[n + 1, vocab]``, the target's processed scores of every row.
        logits: the target's own, of every row; ``None`` where nothing needs them.
        hidden_states: by sublayer the states that the drafter watches, ``[n + 1, hidden]``.
    """

    proposal: Proposal
    acceptance: Acceptance
    scores: Callable[[], torch.Tensor]
    logits: Logits | None
    hidden_states: Mapping[int, torch.Tensor]


@phase("verify")
def verify_drafts(
    target: Target, sequences: Sequence[Generated], proposals: Sequence[Proposal]
) -> list[Outcome | None]:
    """Verifies the drafts of all sequences in one forward.

    A drafted row that is not a number spoils the rows before it too, through attention weights of 0 times NaN, so a
    sequence whose logits are not numbers is verified once more without its draft.

    Args:
        target: the model.
        sequences: whose drafts they are.
        proposals: one of each sequence.

    Returns:
        For each sequence the outcome; ``None`` where the target's own logits are not all numbers.
    """
    watched = [sequence.drafter.watched for sequence in sequences]
    selections = [each for sequence in sequences if (each := sequence.drafter.fused_selection) is not None]
    contexts = [sequence.context for sequence in sequences]
    outputs = None if any(watched) or selections else verify_chains(target, contexts, proposals)
    if outputs is None:
        outputs = verify(target, contexts, proposals, watched, selections)
    outcomes = _judged(target, sequences, proposals, outputs)
    spoiled = [index for index, outcome in enumerate(outcomes) if outcome is None]
    if spoiled:
        again = [sequences[index] for index in spoiled]
        empty = [_without_tokens(proposals[index], sequences[index]) for index in spoiled]
        outputs = verify(target, [each.context for each in again], empty, [watched[index] for index in spoiled])
        for index, outcome in zip(spoiled, _judged(target, again, empty, outputs), strict=True):
            outcomes[index] = outcome
    return outcomes


def _judged(
    target: Target, sequences: Sequence[Generated], proposals: Sequence[Proposal], outputs: Sequence[Verified]
) -> list[Outcome | None]:
    judgements = judge([each.context for each in sequences], proposals, [output.logits for output in outputs])
    return [
        None
        if judgement is None
        else Outcome(proposal, judgement.acceptance, judgement.scores, judgement.logits, output.captured)
        for proposal, judgement, output in zip(proposals, judgements, outputs, strict=True)
    ]


def _without_tokens(proposal: Proposal, sequence: Generated) -> Proposal:
    empty = empty_proposal(sequence.context)
    named = replace(empty, drafted_by=proposal.drafted_by, forecast=proposal.forecast)
    return replace(named, kept=proposal.kept, threshold=proposal.threshold)
