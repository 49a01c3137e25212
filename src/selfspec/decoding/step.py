"""One step of decoding: plan, draft, verify, accept, commit, learn. The same for every method and any batch."""

import warnings
from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import astuple, fields, replace
from functools import cache

import torch

from selfspec.decoding.draft import Draft, LayerDraft, MtpDraft
from selfspec.decoding.drafter import Drafter, DraftingMethod, Feedback
from selfspec.decoding.drafting import propose
from selfspec.decoding.request import Advanced, Event, Failed, Finished, Sequence
from selfspec.decoding.verification import Verified, not_finite, run, verify
from selfspec.errors import DeviceMemoryWarning, RanksError
from selfspec.limits import is_out_of_memory
from selfspec.model.ranks import Ranks, is_lost_rank
from selfspec.runtimes.chain import NATIVE
from selfspec.runtimes.target import Target
from selfspec.types import PhaseClock, PhaseSeconds, Round


def play(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """``play_round``; if it raises, each sequence plays by itself, so that one that fails ends alone."""
    try:
        return play_round(target, sequences, alone=alone)
    except Exception as error:  # raised before anything was committed
        if len(sequences) == 1 or is_lost_rank(error) or isinstance(error, RanksError):
            return [Failed.by(sequence.request, error) for sequence in sequences]
        if is_out_of_memory(error):
            warn_of_memory(str(target.device))
    return [event for sequence in sequences for event in play(target, [sequence], alone=alone)]


@cache
def warn_of_memory(device: str) -> None:
    """Says once that a device has no memory for all requests at a time."""
    warnings.warn(
        f"'{device}' has not enough memory for a round of all requests of a batch, which run one by one then; lower "
        "max_batch, or draft without low-bit copies (memory_limit=0)",
        DeviceMemoryWarning,
        stacklevel=3,
    )


@torch.inference_mode()
def play_round(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """Plays one round for sequences whose prompts are read, or several where all of their drafts are followed.

    Args:
        target: the model.
        sequences: at least one, none of them finished.
        alone: no others wait for their turn after a round.

    Returns:
        For each sequence that it advanced, and that it finished where it did; or that it failed.

    Raises:
        Exception: anything that went wrong before a token was committed, of whichever sequence.
    """
    drafters = [sequence.drafter for sequence in sequences]  # one that begins reads its prompt: no part of a round
    clock = PhaseClock("select")
    drafts = plan(sequences)
    watched = [drafter.watched for drafter in drafters]
    clock.switch("verify")
    verified = run(target, sequences, drafts, watched, clock) if alone else None
    if verified is None:
        clock.switch("draft")
        proposals = propose(target, sequences, drafts)
        verified = verify(target, sequences, proposals, watched, clock)
    seconds = _share(_led(target.ranks, clock.seconds), len(sequences))
    committed = [_conclude(*each, seconds, clock) for each in zip(sequences, drafts, verified, strict=True)]
    target.ranks.compare("the tokens of a round", [None if isinstance(own, Failed) else own for own in committed])
    seconds = _share(clock.seconds, len(sequences))
    events: list[Event] = []
    for sequence, draft, own, tokens in zip(sequences, drafts, verified, committed, strict=True):
        if isinstance(tokens, Failed):
            events.append(tokens)
            continue
        assert own is not None
        events += [Advanced(sequence.request, record) for record in _records(draft, own, tokens, seconds)]
        events += [Finished(sequence.request)] if sequence.finished else []
    return events


def plan(sequences: Many[Sequence]) -> list[Draft]:
    """What drafts the round of each sequence; a method plans for all of its sequences at once."""
    of_method: dict[DraftingMethod, dict[int, Drafter]] = defaultdict(dict)
    for index, sequence in enumerate(sequences):
        of_method[sequence.request.method][index] = sequence.drafter
    drafts: dict[int, Draft] = {}
    for method, drafters in of_method.items():
        drafts.update(zip(drafters, method.plan(list(drafters.values())), strict=True))
    return [drafts[index] for index in range(len(sequences))]


def _conclude(
    sequence: Sequence, planned: Draft, verified: Verified | None, seconds: PhaseSeconds, clock: PhaseClock
) -> tuple[int, ...] | Failed:
    """Commits what was accepted, and lets the drafter learn from it; returns the committed tokens."""
    if verified is None:
        return Failed(sequence.request, not_finite(sequence))
    proposal, acceptance = verified.proposal, verified.acceptance
    try:
        clock.switch("other")
        committed = sequence.commit(acceptance, verified.logits, verified.run)
        clock.switch("select")
        states, probed, rounds = verified.hidden_states, verified.probed, verified.run
        sequence.drafter.learn(
            Feedback(planned, proposal, acceptance, verified.scores, states, seconds, probed, rounds)
        )
    except Exception as error:  # of a stopping criterion, or of the drafter
        return Failed.by(sequence.request, error)
    finally:
        clock.switch("other")
    return committed


def _led(ranks: Ranks, seconds: PhaseSeconds) -> PhaseSeconds:
    """The seconds of rank 0, from which all ranks learn."""
    return seconds if ranks.count == 1 else PhaseSeconds(*ranks.lead(astuple(seconds)))


def _share(total: PhaseSeconds, count: int) -> PhaseSeconds:
    """One of ``count`` equal parts."""
    if count == 1:
        return total
    return PhaseSeconds(**{field.name: getattr(total, field.name) / count for field in fields(PhaseSeconds)})


def _records(planned: Draft, verified: Verified, committed: tuple[int, ...], seconds: PhaseSeconds) -> list[Round]:
    """The round, or each one of a run."""
    proposal, layers = verified.proposal, planned if isinstance(planned, LayerDraft) else None
    whole = Round(
        drafted=proposal.drafted,
        candidates=len(proposal.tree),
        accepted=min(len(verified.acceptance.rows) - 1, len(committed)) if proposal.tree else 0,
        token_ids=committed,
        kept=None if layers is None else layers.kept,
        threshold=proposal.threshold,
        precision=None if layers is None else layers.precision,
        seconds=seconds,
        guessed=proposal.guessed,
        probes=len(proposal.probes),
        drafted_by=planned.name,
        forecast=planned.forecast,
        drafting=proposal.path,
        verification=verified.path,
    )
    if not verified.run:
        return [whole]
    each = _share(seconds, len(verified.run))
    return [
        replace(
            whole,
            drafted=len(own.drafted),
            candidates=len(own.drafted),
            accepted=own.accepted,
            token_ids=own.token_ids,
            probes=len(own.probes),
            seconds=each,
            threshold=own.draft.threshold if isinstance(own.draft, MtpDraft) else None,
            drafted_by=own.draft.name,
            forecast=own.draft.forecast,
            drafting=NATIVE if isinstance(own.draft, MtpDraft) else None,
        )
        for own in verified.run
    ]
