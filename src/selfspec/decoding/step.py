"""One step of decoding: plan, draft, verify, accept, commit, learn. The same for every method and any batch."""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import fields, replace

import torch

from selfspec.decoding.draft import Draft
from selfspec.decoding.drafter import Drafter, DraftingMethod, Feedback
from selfspec.decoding.events import Advanced, Event, Failed, Finished
from selfspec.decoding.judging import not_finite
from selfspec.decoding.outcome import Outcome, verify_drafts
from selfspec.decoding.phases import clocked, phase
from selfspec.decoding.plain_run import find_run
from selfspec.decoding.prompt import Chunk, read_chunks
from selfspec.decoding.proposal import Proposal
from selfspec.decoding.run_drafts import run_drafts
from selfspec.decoding.sequence import Sequence
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
        run = find_run(target, sequences, drafts) if alone else None
        outcomes = _draft_and_verify(target, sequences, drafts) if run is None else run.play(target)
        seconds = _share(clock.seconds, len(sequences))
        concluded = [_conclude(*each, seconds) for each in zip(sequences, drafts, outcomes, strict=True)]
    seconds = _share(clock.seconds, len(sequences))
    events: list[Event] = []
    for sequence, conclusion in zip(sequences, concluded, strict=True):
        if isinstance(conclusion, Failed):
            events.append(conclusion)
            continue
        events += [Advanced(sequence, record) for record in _records(*conclusion, seconds)]
        events += [Finished(sequence)] if sequence.finished else []
    return events


def _draft_and_verify(target: Target, sequences: Many[Sequence], drafts: Many[Draft]) -> list[Outcome | None]:
    return verify_drafts(target, sequences, draft(target, sequences, drafts))


def _conclude(
    sequence: Sequence, planned: Draft, outcome: Outcome | None, seconds: PhaseSeconds
) -> tuple[Feedback, tuple[int, ...]] | Failed:
    """Commits what was accepted, and lets the drafter learn; returns what it was told, and the committed tokens."""
    if outcome is None:
        return Failed(sequence.request, not_finite(sequence.context))
    feedback = Feedback(planned, outcome.proposal, outcome.acceptance, outcome.scores, outcome.hidden_states, seconds)
    try:
        committed = commit(sequence, outcome)
        learn(sequence, feedback)
    except Exception as error:  # of a stopping criterion, or of the drafter
        return Failed.by(sequence.request, error)
    return feedback, committed


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


@phase("draft")
def draft(target: Target, sequences: Many[Sequence], drafts: Many[Draft]) -> list[Proposal]:
    """The tokens to verify, drafted side by side."""
    pairs = zip(sequences, drafts, strict=True)
    return run_drafts(target, [planned.propose(each.context, each.drafter.watched) for each, planned in pairs])


@phase("other")
def commit(sequence: Sequence, outcome: Outcome) -> tuple[int, ...]:
    """Hands the accepted tokens to the output and keeps their rows; returns the tokens that it took."""
    return sequence.commit(outcome.acceptance, outcome.logits, others="draft" if outcome.proposal.tree else "target")


@phase("select")
def learn(sequence: Sequence, feedback: Feedback) -> None:
    """Tells the drafter what came of the round."""
    sequence.drafter.learn(feedback)


def _records(feedback: Feedback, committed: tuple[int, ...], seconds: PhaseSeconds) -> list[Round]:
    """The round, or each step of a run of plain ones."""
    proposal = feedback.proposal
    whole = Round(
        drafted=proposal.drafted,
        candidates=len(proposal.tree),
        accepted=min(feedback.accepted, len(committed)) if proposal.tree else 0,
        token_ids=committed,
        kept=proposal.kept,
        threshold=proposal.threshold,
        precision=proposal.precision,
        seconds=seconds,
        guessed=proposal.guessed,
        drafted_by=proposal.drafted_by,
        forecast=proposal.forecast,
    )
    if proposal.tree or len(committed) == 1:
        return [whole]
    each = _share(seconds, len(committed))
    return [replace(whole, token_ids=(token_id,), seconds=each) for token_id in committed]
