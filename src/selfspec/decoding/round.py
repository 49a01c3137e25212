"""A round: plan, draft, verify, accept, commit, learn. The same for every method and any batch."""

import warnings
from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import astuple, fields, replace
from functools import cache

import torch

from selfspec.decoding.draft import Draft, LayerDraft, MtpDraft, Proposal, TokenDraft
from selfspec.decoding.drafter import Drafter, DraftingMethod, Feedback
from selfspec.decoding.request import CHOOSER, MTP, WIDTHS, Advanced, Event, Failed, Finished, Sequence, draft_path
from selfspec.decoding.verification import Verified, not_finite, run, verify
from selfspec.errors import DeviceMemoryWarning, RanksError
from selfspec.limits import is_out_of_memory
from selfspec.model import transfer
from selfspec.model.ranks import Ranks, is_lost_rank
from selfspec.runtimes.chain import NATIVE, Drafted, DraftedToken, DraftRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.mtp_head import MtpHead
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import EMPTY_TREE, ROOT, TokenTree
from selfspec.sampling.rules import best, next_best, possible
from selfspec.types import PhaseClock, PhaseSeconds, Round


def try_round(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """``run_round``; if it raises, each sequence runs its own, so that one that fails ends alone."""
    try:
        return run_round(target, sequences, alone=alone)
    except Exception as error:  # raised before anything was committed
        if len(sequences) == 1 or is_lost_rank(error) or isinstance(error, RanksError):
            return [Failed.by(sequence.request, error) for sequence in sequences]
        if is_out_of_memory(error):
            warn_of_memory(str(target.device))
    return [event for sequence in sequences for event in try_round(target, [sequence], alone=alone)]


@cache
def warn_of_memory(device: str) -> None:
    """Says once that a device has no memory for all requests at a time."""
    warnings.warn(
        f"'{device}' has not enough memory for a round of all requests of a batch, which run one by one then; lower "
        "max_batch, or draft without low-bit weights (memory_limit=0)",
        DeviceMemoryWarning,
        stacklevel=3,
    )


@torch.inference_mode()
def run_round(target: Target, sequences: Many[Sequence], *, alone: bool = True) -> list[Event]:
    """Runs one round for sequences whose prompts are read, or several where all of their drafts are followed.

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
    if target.ranks.count > 1:
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


def propose(target: Target, sequences: Many[Sequence], drafts: Many[Draft]) -> list[Proposal]:
    """Drafts tokens of all sequences side by side: the drafts that were planned."""
    proposals: dict[int, Proposal] = {}
    by_runner: dict[Runner | MtpHead, dict[int, LayerDraft | MtpDraft]] = defaultdict(dict)
    for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        if isinstance(draft, LayerDraft | MtpDraft) and min(draft.limit, sequence.draft_limit) > 0:
            runner = target.at(draft.precision) if isinstance(draft, LayerDraft) else draft.head
            by_runner[runner][index] = draft
        else:
            proposals[index] = _known(sequence, draft)
    for runner, own in by_runner.items():
        made = {i: _Drafting(runner, sequences[i], draft) for i, draft in own.items()}
        drafted = runner.draft([each.request() for each in made.values()])
        proposals |= {i: each.proposal(result) for (i, each), result in zip(made.items(), drafted, strict=True)}
    return [proposals[index] for index in range(len(sequences))]


def _known(sequence: Sequence, draft: Draft) -> Proposal:
    """A draft for which no layers run; without tokens that could not be committed or have no cache slot."""
    if isinstance(draft, TokenDraft):
        draft = draft if sequence.takes_trees else draft.first_path()
        draft = draft.cut(sequence.draft_limit, sequence.draft_limit + sequence.sibling_limit)
        tokens = transfer.send(draft.token_ids, sequence.token_ids.device)
        return Proposal(tokens, draft.tree, probes=draft.probes)
    return Proposal(
        sequence.no_tokens, EMPTY_TREE, threshold=draft.threshold if isinstance(draft, LayerDraft | MtpDraft) else None
    )


class _Drafting:
    """A draft of one sequence: its request, the choice of tokens where kernels do not choose, its proposal."""

    def __init__(self, runner: Runner | MtpHead, sequence: Sequence, draft: LayerDraft | MtpDraft) -> None:
        self._sequence, self._draft = sequence, draft
        self._scores: list[torch.Tensor] = []
        self._preferences: list[torch.Tensor] = []
        self._path = MTP
        if isinstance(draft, LayerDraft) and isinstance(runner, Runner):
            self._path = draft_path(draft, sequence, runner.path(draft.kept.sublayers))
        self._has_confidences = draft.stop is not None or draft.widths is not None

    def request(self) -> DraftRequest:
        """What to draft; not kept, since it refers back to this object, which holds the cache."""
        sequence, draft = self._sequence, self._draft
        limit, stop = min(draft.limit, sequence.draft_limit), None if draft.stop is None else draft.stop.stops
        if isinstance(draft, MtpDraft):
            return DraftRequest(draft.text, sequence.pending, (), limit, stop=stop, choose=self._choose)
        return DraftRequest(
            sequence.state,
            sequence.pending,
            draft.kept.sublayers,
            limit,
            stop=stop,
            guess=draft.guess,
            choose=None if self._path.native else self._choose,
            drawing=None if self._path in (CHOOSER, WIDTHS) else sequence.drawing,
            seen=draft.seen,
        )

    def _choose(self, logits: Logits, index: int) -> DraftedToken:
        """Chooses the token of a row, and names what the host has to read of it."""
        chosen = self._chosen(logits, index)
        if not self._sequence.processor.keeps_scores:
            self._sequence.write_draft(index, chosen.token)
        return chosen

    def _chosen(self, logits: Logits, index: int) -> DraftedToken:
        sequence, draft = self._sequence, self._draft
        numbers = (logits.confidence[0],) if self._has_confidences else ()
        if draft.choose is not None:
            token, last = draft.choose(logits.values[0])
            return DraftedToken(token, numbers, last)
        if draft.widths is None and sequence.takes_best_of(logits, self._path):
            return DraftedToken(logits.best, numbers)
        scores = sequence.processor(logits.values, lambda _: sequence.drafted_context(index))
        if sequence.rule.needs_draft_probs:
            # Whatever a draft computes, its probabilities have to be numbers for the acceptance to be exact.
            scores = scores.nan_to_num(nan=0.0, neginf=-torch.inf)
            self._scores.append(scores)
        preferences = sequence.rule.preferences(scores[0], sequence.length + index)
        token = best(preferences)
        if draft.widths is None:
            return DraftedToken(token, numbers)
        self._preferences.append(preferences)
        return DraftedToken(token, (*numbers, possible(preferences)))

    def proposal(self, drafted: Drafted) -> Proposal:
        """The finished draft."""
        draft = self._draft
        if self._drops_last(drafted):
            drafted = _without_last(drafted)
        count = len(drafted.token_ids)
        if not count:
            proposal = _known(self._sequence, draft)
            return replace(proposal, forwards=drafted.forwards, seconds=drafted.seconds, path=self._path)
        tokens, tree = drafted.token_ids, TokenTree.chain(count)
        if draft.widths is not None:
            tokens, tree = self._with_siblings(drafted)
        elif known := self._known_after(drafted):
            tokens, tree = torch.cat([tokens, transfer.send(known, tokens.device)]), TokenTree.chain(count + len(known))
        return Proposal(
            tokens,
            tree,
            scores=torch.cat(self._scores[:count]) if self._scores else None,
            confidences=tuple(numbers[0] for numbers in drafted.numbers) if self._has_confidences else (),
            threshold=draft.threshold,
            guessed=drafted.guessed,
            forwards=drafted.forwards,
            seconds=drafted.seconds,
            path=self._path,
        )

    def _known_after(self, drafted: Drafted) -> Many[int]:
        """The known tokens that are verified after the draft, as many as could be committed."""
        draft, room = self._draft, self._sequence.draft_limit - len(drafted.token_ids)
        if not isinstance(draft, LayerDraft) or draft.append is None or self._scores or room <= 0:
            return ()
        return draft.append(drafted.token_ids.tolist(), [float(numbers[0]) for numbers in drafted.numbers])[:room]

    def _drops_last(self, drafted: Drafted) -> bool:
        """Whether the last token is not verified. Its confidence decides, not the token, so sampling stays exact."""
        draft = self._draft
        if not isinstance(draft, LayerDraft) or not draft.drop_unsure or draft.threshold is None:
            return False
        return float(drafted.numbers[-1][0]) < draft.threshold

    def _with_siblings(self, drafted: Drafted) -> tuple[torch.Tensor, TokenTree]:
        """The path with candidates beside it: as many as are requested, possible, and have a cache slot."""
        widths, room = self._draft.widths, self._sequence.sibling_limit
        assert widths is not None
        tokens, parents = [drafted.token_ids], list(range(ROOT, len(drafted.token_ids) - 1))
        for depth, (confidence, possible_tokens) in enumerate(drafted.numbers):
            if (count := min(widths(confidence), int(possible_tokens), 1 + room) - 1) > 0:
                tokens.append(next_best(self._preferences[depth], drafted.token_ids[depth : depth + 1], count))
                parents += [depth - 1] * count
                room -= count
        return torch.cat(tokens), TokenTree(tuple(parents))


def _without_last(drafted: Drafted) -> Drafted:
    """A draft without its last token."""
    count = len(drafted.token_ids) - 1
    return replace(
        drafted,
        token_ids=drafted.token_ids[:count],
        numbers=drafted.numbers[:count],
        guessed=min(drafted.guessed, count),
    )


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
            candidates=len(own.drafted) + len(own.siblings),
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
