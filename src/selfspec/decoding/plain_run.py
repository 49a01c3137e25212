"""Runs of plain decoding: several steps in one native call, which the host does not interrupt.

A step of a small model takes milliseconds, and what the host does between two of them some tenths of one. In a run that
is done once for all of its steps; between them there is a call back, which looks for the end of the output.
"""

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch

from selfspec.decoding.draft import Draft, NoDraft, PartDraft, empty_proposal
from selfspec.decoding.outcome import Outcome
from selfspec.decoding.phases import phase
from selfspec.decoding.sequence import Sequence
from selfspec.runtimes.chain import ChainOutput, ChainRequest
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance

MOST_STEPS = 16
"""Most steps of a run. Where the host's share of their time is small, ``LONGEST_SECONDS`` ends it before."""

LONGEST_SECONDS = 0.03
"""How long a run goes on. Pieces of text arrive together, and new requests wait, for no longer than this and a step."""


@dataclass(frozen=True)
class PlainRun:
    """The steps of plain decoding that some sequences may take in one call.

    Args:
        sequences: at least one.
        drafts: what each plans.
        steps: most steps of each.
    """

    sequences: Many[Sequence]
    drafts: Many[Draft]
    steps: tuple[int, ...]

    @phase("verify")
    def play(self, target: Target) -> list[Outcome | None]:
        """Runs it; nothing is committed.

        Args:
            target: the model.

        Returns:
            For each sequence its tokens, 1 or more, as the outcome of an empty draft; ``None`` where the logits of the
            first are not all numbers.
        """
        assert target.native is not None
        until = time.perf_counter() + LONGEST_SECONDS
        requests = [_request(target, *each, until) for each in zip(self.sequences, self.steps, strict=True)]
        outputs = target.native.chain(requests, range(target.sublayer_count))
        return [_outcome(*each) for each in zip(self.sequences, self.drafts, outputs, strict=True)]


def find_run(target: Target, sequences: Many[Sequence], drafts: Many[Draft]) -> PlainRun | None:
    """The run that the coming rounds of sequences may be.

    Args:
        target: the model.
        sequences: at least one, none of them finished.
        drafts: what each plans for its coming round.

    Returns:
        ``None`` if any of them drafts, or wants to be asked after each step.
    """
    steps = [_steps(*each) for each in zip(sequences, drafts, strict=True)]
    if max(steps) < 2 or min(steps) < 1 or not target.takes_chains(1):
        return None
    return PlainRun(sequences, drafts, tuple(steps))


def _steps(sequence: Sequence, draft: Draft) -> int:
    """Most steps that a sequence may take without being asked between them; 0 where it wants to hear of each."""
    plain = draft.draft if isinstance(draft, PartDraft) else draft
    if not isinstance(plain, NoDraft) or plain.steps == 1:
        return 0
    if not sequence.tokens_suffice or not sequence.context.follows_from_logits:
        return 0
    return min(plain.steps, sequence.context.draft_limit + 1)


def _request(target: Target, sequence: Sequence, steps: int, until: float) -> ChainRequest:
    context, ends = sequence.context, sequence.output.ends_with

    def go_on(token_id: int, confidence: float, asks: bool) -> tuple[int, ...] | None:
        return None if ends(token_id) or time.perf_counter() > until else ()

    layout = target.lay_out(context.state, steps, drawing=context.drawing)
    return ChainRequest(layout, context.pending_id, (), go_on)


def _outcome(sequence: Sequence, draft: Draft, output: ChainOutput) -> Outcome | None:
    count, proposal = output.finite, empty_proposal(sequence.context)
    if not count:
        return None
    if isinstance(draft, PartDraft):
        proposal = replace(proposal, drafted_by=draft.part, forecast=draft.forecast)
    acceptance = Acceptance(tuple(range(count)), output.token_ids[:count])
    return Outcome(proposal, acceptance, _no_scores, None, {})


def _no_scores() -> torch.Tensor:
    raise AssertionError("a run keeps no logits; plan single steps")
