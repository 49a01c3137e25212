"""One step of decoding: plan, draft, verify, accept, commit, learn. The same for every method and any batch."""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import fields, replace

import torch

from selfspec.decoding.draft import Draft, LayerDraft
from selfspec.decoding.drafter import Drafter, DraftingMethod, Feedback
from selfspec.decoding.drafting import propose, run_plain
from selfspec.decoding.events import Advanced, Event, Failed, Finished
from selfspec.decoding.phases import clocked, phase
from selfspec.decoding.prompt import Chunk, read_chunks
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.verification import Verified, not_finite, verify
from selfspec.runtimes.target import Target
from selfspec.types import PhaseSeconds, Round


@torch.inference_mode()
def read(target: Target, chunks: Many[Chunk]) -> list[Event]:
    """Reads parts of prompts in one forward. A sequence that fails ends alone.

    Args:
        target: the model.
        chunks: as ``read_chunks`` takes them.

    Returns:
        What happened.
    """
    try:
        return read_chunks(target, chunks)
    except Exception as error:  # raised before anything was committed
        if len(chunks) == 1:
            return [Failed.by(chunks[0].sequence.request, error)]
    return [event for chunk in chunks for event in read(target, [chunk])]


def play(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """Plays a round for sequences together, or several plain ones. A sequence that fails ends alone.

    Args:
        target: the model.
        sequences: at least one, their prompts read, none of them finished.
        alone: no others wait for their turn after a round.

    Returns:
        What happened.
    """
    try:
        return play_round(target, sequences, alone=alone)
    except Exception as error:  # raised before anything was committed
        if len(sequences) == 1:
            return [Failed.by(sequences[0].request, error)]
    return [event for sequence in sequences for event in play(target, [sequence], alone=alone)]


def _share(total: PhaseSeconds, count: int) -> PhaseSeconds:
    """One of ``count`` equal parts."""
    if count == 1:
        return total
    return PhaseSeconds(**{field.name: getattr(total, field.name) / count for field in fields(PhaseSeconds)})


@torch.inference_mode()
def play_round(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """Plays one round for sequences whose prompts are read, or several if all of them are plain.

    Args:
        target: the model.
        sequences: at least one, none of them finished.
        alone: no others wait for their turn after a round.

    Returns:
        For each sequence that it advanced, and that it finished where it did; or that it failed.

    Raises:
        Exception: anything that went wrong before a token was committed, of whichever sequence.
    """
    with clocked() as clock:
        drafts = plan(sequences)
        watched = [sequence.drafter.watched for sequence in sequences]
        run = run_plain(target, sequences, drafts, watched) if alone else None
        proposals = propose(target, sequences, drafts, watched) if run is None else run
        verified = verify(target, sequences, proposals, watched)
        seconds = _share(clock.seconds, len(sequences))
        concluded = [_conclude(*each, seconds) for each in zip(sequences, drafts, verified, strict=True)]
    seconds = _share(clock.seconds, len(sequences))
    events: list[Event] = []
    for sequence, conclusion in zip(sequences, concluded, strict=True):
        if isinstance(conclusion, Failed):
            events.append(conclusion)
            continue
        events += [Advanced(sequence, record) for record in _records(*conclusion, seconds)]
        events += [Finished(sequence)] if sequence.finished else []
    return events


def _conclude(
    sequence: Sequence, planned: Draft, verified: Verified | None, seconds: PhaseSeconds
) -> tuple[Draft, Verified, tuple[int, ...]] | Failed:
    """Commits what was accepted, and lets the drafter learn; returns the round and the committed tokens."""
    if verified is None:
        return Failed(sequence.request, not_finite(sequence))
    try:
        committed = commit(sequence, verified)
        learn(sequence, planned, verified, seconds)
    except Exception as error:  # of a stopping criterion, or of the drafter
        return Failed.by(sequence.request, error)
    return planned, verified, committed


@phase("select")
def plan(sequences: Many[Sequence]) -> list[Draft]:
    """What drafts the round of each sequence; a method plans for all of its sequences at once."""
    of_method: dict[DraftingMethod, dict[int, Drafter]] = defaultdict(dict)
    for index, sequence in enumerate(sequences):
        of_method[sequence.request.method][index] = sequence.drafter
    drafts: dict[int, Draft] = {}
    for method, drafters in of_method.items():
        drafts.update(zip(drafters, method.plan(list(drafters.values())), strict=True))
    return [drafts[index] for index in range(len(sequences))]


@phase("other")
def commit(sequence: Sequence, verified: Verified) -> tuple[int, ...]:
    """Hands the accepted tokens to the output and keeps their rows; returns the tokens that it took."""
    return sequence.commit(verified.acceptance, verified.logits, others="draft" if verified.proposal.tree else "target")


@phase("select")
def learn(sequence: Sequence, planned: Draft, verified: Verified, seconds: PhaseSeconds) -> None:
    """Lets the drafter learn from the round."""
    proposal, acceptance = verified.proposal, verified.acceptance
    sequence.drafter.learn(Feedback(planned, proposal, acceptance, verified.scores, verified.hidden_states, seconds))


def _records(planned: Draft, verified: Verified, committed: tuple[int, ...], seconds: PhaseSeconds) -> list[Round]:
    """The round, or each step of a run of plain ones."""
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
        drafted_by=planned.name,
        forecast=planned.forecast,
        drafting=proposal.path,
        verification=verified.path,
    )
    if proposal.tree or len(committed) == 1:
        return [whole]
    each = _share(seconds, len(committed))
    return [replace(whole, token_ids=(token_id,), seconds=each) for token_id in committed]
