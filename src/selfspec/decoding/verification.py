"""What the target computes in a round: the verification of drafts, with one wait for the device; or a run of rounds."""

import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from selfspec.decoding.draft import Draft, Follow, Later, MtpDraft, NoDraft, Proposal, RunDraft, RunRound
from selfspec.decoding.request import Sequence, run_path, verification_path
from selfspec.errors import NonFiniteLogitsError
from selfspec.model import transfer
from selfspec.runtimes.chain import (
    NATIVE,
    PROBE,
    DraftRequest,
    HeadDraft,
    NextRows,
    Path,
    Probed,
    VerifiedRows,
    VerifyRequest,
)
from selfspec.runtimes.costs.rows import MOST_PROBES, MOST_SIBLINGS
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.mtp_head import MtpText, RunHead
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import EMPTY_TREE, Acceptance, DraftedTree, Verdict, accept_matching
from selfspec.sampling.rules import accept_choices
from selfspec.types import PhaseClock

LONGEST_SECONDS = 0.03
"""How long a run goes on. Pieces of text come together, and new requests wait, hardly longer than this."""

MOST_TOKENS = 64
"""Most tokens of a run."""

Planned: TypeAlias = RunDraft | Later | None
"""The next round of a run; ``None`` where it ends."""


@dataclass(frozen=True)
class Verified:
    """A verified draft of ``n`` tokens.

    ``scores`` gives the target's processed scores of every row, float32 ``[n + 1, vocab]``. ``logits`` are its own,
    ``None`` after a run. ``hidden_states`` are those that the drafter watches, ``[n + 1, hidden]`` by sublayer.
    ``probed`` are the logits after the proposal's probes, if it has any. ``run`` are the rounds of a run.
    """

    proposal: Proposal
    acceptance: Acceptance
    scores: Callable[[], torch.Tensor]
    logits: Logits | None
    hidden_states: Mapping[int, torch.Tensor]
    path: Path
    probed: Logits | None = None
    run: tuple[RunRound, ...] = ()


def verify(
    target: Target,
    sequences: Many[Sequence],
    proposals: Many[Proposal],
    watched: Many[Collection[int]],
    clock: PhaseClock | None = None,
) -> list[Verified | None]:
    """Verifies the drafts of all sequences in one forward; ``watched`` names the sublayers whose states it returns.

    A drafted row that is not a number spoils the rows before it too, through attention weights of 0 times NaN, so a
    sequence whose logits are not numbers is verified once more without its draft. If they still are not, its result is
    ``None``.
    """
    clock = clock or PhaseClock()
    native = target.at(None).native
    path = verification_path(proposals, 0 if native is None else native.most_rows, target.at(None).path())
    verified = _verify(target, sequences, proposals, watched, path, clock)
    if spoiled := [index for index, each in enumerate(verified) if each is None]:
        empty = [replace(_without_tokens(proposals[i]), token_ids=sequences[i].no_tokens) for i in spoiled]
        again = _verify(target, [sequences[i] for i in spoiled], empty, [watched[i] for i in spoiled], path, clock)
        for index, each in zip(spoiled, again, strict=True):
            verified[index] = each
    return verified


def _verify(
    target: Target,
    sequences: Many[Sequence],
    proposals: Many[Proposal],
    watched: Many[Collection[int]],
    path: Path,
    clock: PhaseClock,
) -> list[Verified | None]:
    clock.switch("verify")
    requests = [_request(*each) for each in zip(sequences, proposals, watched, strict=True)]
    rows = target.at(None).verify(requests, native=path.native)
    if not any(proposal.probes for proposal in proposals):
        return judge(sequences, proposals, rows, clock, path)
    known, probed = zip(*map(_without_probes, rows, proposals), strict=True)
    verified = judge(sequences, proposals, known, clock, path)
    return [None if own is None else replace(own, probed=of) for own, of in zip(verified, probed, strict=True)]


def _without_probes(rows: VerifiedRows, proposal: Proposal) -> tuple[VerifiedRows, Logits | None]:
    """The rows of tokens, and the logits of the probes after them."""
    if not proposal.probes:
        return rows, None
    count = 1 + len(proposal.tree)
    logits, probed = rows.logits.split([count, len(proposal.probes)])
    return VerifiedRows(logits, {index: states[:count] for index, states in rows.captured.items()}), probed


def _request(sequence: Sequence, proposal: Proposal, watched: Collection[int]) -> VerifyRequest:
    """Row 0 is the pending token, row ``i + 1`` node ``i`` of the draft's tree; probes come last."""
    tree, pending = proposal.rows, sequence.pending
    probes = [pending.new_full((len(proposal.probes),), PROBE)] if proposal.probes else []
    return VerifyRequest(
        sequence.state,
        torch.cat([pending, proposal.token_ids, *probes]) if len(tree) else pending,
        drawing=sequence.drawing,
        depths=None if tree.is_chain else tree.depths,
        visible=None if tree.is_chain else tree.visibility(pending.device),
        capture=watched,
        shares=sequence.drafter.attention_shares,
        mask_embedding=sequence.drafter.mask_embedding if proposal.probes else None,
    )


def run(
    target: Target,
    sequences: Many[Sequence],
    drafts: Many[Draft],
    watched: Many[Collection[int]],
    clock: PhaseClock,
) -> list[Verified | None] | None:
    """Runs several rounds in one native call, if all sequences need no more than tokens, and their drafts are followed.

    They are a chain of the whole model, whose tokens are those of plain decoding. A head of the checkpoint drafts in
    the call. What the host does between two rounds is done once for all of them; between them there is a call back,
    which plans the next one and looks for the end.

    Returns:
        As ``verify``; ``None`` alone if the sequences run single rounds.
    """
    room = [min(MOST_TOKENS, sequence.draft_limit + 1) for sequence in sequences]
    if max(room) < 2:
        return None
    runner, every = target.at(None), tuple(range(target.sublayer_count))
    model, until = runner.path(), _Time()
    runs: list[_Run] = []
    requests: list[DraftRequest] = []
    for sequence, draft, own, limit in zip(sequences, drafts, watched, room, strict=True):
        if not isinstance(draft, RunDraft) or (follow := draft.follow) is None:
            return None
        own = set(own) - _followed(sequence.drafter.mtp_text, target.sublayer_count)
        if not run_path(sequence, own, model).native:
            return None
        assert runner.native is not None
        steps = _Run(sequence, draft, _timed(follow, clock), until, limit, runner.native.most_rows)
        runs.append(steps)
        requests.append(
            DraftRequest(
                sequence.state,
                sequence.pending,
                every,
                limit,
                mask_embedding=sequence.drafter.mask_embedding,
                steps=steps,
                drawing=sequence.drawing,
                shares=sequence.drafter.attention_shares,
            )
        )
    texts = [sequence.drafter.mtp_text for sequence in sequences]
    heads = {text.native for text in texts if text is not None}
    if len(heads) > 1:
        return None
    head = next((RunHead(each, texts, room) for each in heads if each is not None), None)
    drafted = runner.draft(requests, head)
    if head is not None:
        clock.move(head.finish(), "verify", "draft")
    return [
        _of_run(sequence, own.rounds(tokens.token_ids[: tokens.finite].tolist()))
        for sequence, own, tokens in zip(sequences, runs, drafted, strict=True)
    ]


def _followed(text: MtpText | None, sublayers: int) -> set[int]:
    """The states that a run gives to the text of a head."""
    return set() if text is None or text.native is None else {sublayers}


def _timed(follow: Follow, clock: PhaseClock) -> Follow:
    """Planning inside a run counts as selection."""

    def timed(played: RunRound) -> Planned:
        clock.switch("select")
        planned = follow(played)
        clock.switch("verify")
        return partial(timed_later, planned) if callable(planned) else planned

    def timed_later(later: Later) -> RunDraft | None:
        clock.switch("select")
        draft = later()
        clock.switch("verify")
        return draft

    return timed


class _Time:
    """Says once a round whether the time of a run is over, so that all of its sequences end together."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + LONGEST_SECONDS
        self._rounds, self._is_over = 0, False

    def is_over(self, rounds: int) -> bool:
        """Whether the run ends after this number of rounds."""
        if rounds > self._rounds:
            self._rounds, self._is_over = rounds, time.perf_counter() > self._end
        return self._is_over


class _Run:
    """The rounds of one sequence in a run, as they are planned.

    ``first`` is planned already; ``limit`` are the tokens for which there is room, ``most_rows`` those of a forward.
    """

    def __init__(
        self, sequence: Sequence, first: RunDraft, follow: Follow, until: _Time, limit: int, most_rows: int
    ) -> None:
        self.ends = sequence.output.ends_with()
        self._follow, self._until, self._limit, self._most_rows = follow, until, limit, most_rows
        self._most_beside = sequence.sibling_limit
        self._planned: Planned = first
        self._coming = NextRows()
        self._written = 0  # tokens of the rounds so far
        self._rounds: list[RunRound] = []
        self._began = time.perf_counter()  # the forward of the round

    def note(self, drafted: Many[int], probed: Probed) -> None:
        """Ends a round."""
        self._conclude(drafted, probed)
        self._planned = None if self._until.is_over(len(self._rounds)) else self._follow(self._rounds[-1])

    def next(self) -> NextRows | None:
        """The rows of the next round."""
        draft = self._planned = self._planned() if callable(self._planned) else self._planned
        if draft is None:
            return None
        self._coming = self._rows_of(draft, self._limit - self._written - 1)
        self._began = time.perf_counter()
        return self._coming

    def _rows_of(self, draft: RunDraft, room: int) -> NextRows:
        if isinstance(draft, NoDraft):
            return NextRows()
        if isinstance(draft, MtpDraft):
            limit, stop = min(draft.limit, room, self._most_rows - 1), draft.stop
            return NextRows(head=HeadDraft(limit, None if stop is None else stop.stops) if limit > 0 else None)
        chained, most = draft.tree.chained, min(room, self._most_rows - 1)
        known, siblings = draft.token_ids[: min(chained, most)], draft.token_ids[chained:] if most > 0 else ()
        probes = draft.probes[:MOST_PROBES] if chained <= most and room > 0 else ()
        beside = len(siblings) + len(probes)
        if beside > self._most_beside or len(siblings) > MOST_SIBLINGS or len(known) + beside >= self._most_rows:
            return NextRows(known)
        return NextRows(known, siblings, probes)

    def _conclude(self, drafted: Many[int], probed: Probed) -> None:
        """Notes the round that has ended, if there was one."""
        seconds = time.perf_counter() - self._began
        if isinstance(self._planned, RunDraft) and len(drafted) > self._written:
            coming, token_ids = self._coming, tuple(drafted[self._written :])
            head = coming.head or HeadDraft(0)
            known, siblings = (*coming.known, *head.token_ids), tuple(coming.siblings)
            rest = tuple(coming.probes), tuple(probed), tuple(head.confidences), seconds, siblings
            self._rounds.append(RunRound(self._planned, known, token_ids, *rest))
        self._written = len(drafted)

    def rounds(self, token_ids: list[int]) -> tuple[RunRound, ...]:
        """The rounds that gave these tokens, the first ones of those that were drafted."""
        self._conclude(token_ids, ())
        left, found = len(token_ids), list[RunRound]()
        for each in self._rounds:
            own = each if left >= len(each.token_ids) else replace(each, token_ids=each.token_ids[:left])
            left -= len(own.token_ids)
            found += [own] if own.token_ids else []
        return tuple(found)


def _of_run(sequence: Sequence, rounds: tuple[RunRound, ...]) -> Verified | None:
    """The tokens of a run; ``None`` where the logits of the first are not all numbers."""
    token_ids = tuple(token_id for each in rounds for token_id in each.token_ids)
    if not token_ids:
        return None
    acceptance = Acceptance(tuple(range(len(token_ids))), token_ids)
    empty = Proposal(sequence.no_tokens, EMPTY_TREE)
    return Verified(empty, acceptance, _no_scores, None, {}, NATIVE, run=rounds)


def _no_scores() -> torch.Tensor:
    raise AssertionError("a run keeps no logits; plan single steps")


def _without_tokens(proposal: Proposal) -> Proposal:
    return replace(proposal, tree=EMPTY_TREE, scores=None, confidences=(), guessed=0, probes=())


def judge(
    sequences: Many[Sequence],
    proposals: Many[Proposal],
    rows: Many[VerifiedRows],
    clock: PhaseClock,
    path: Path = NATIVE,
) -> list[Verified | None]:
    """Which drafted tokens are accepted, and the token after them; ``None`` where a logit is NaN or infinite.

    Whether logits are numbers is read together with the acceptance, which is meaningless where they are not.
    """
    clock.switch("other")
    each = list(zip(sequences, proposals, (own.logits for own in rows), strict=True))
    scores = [_Scores(*one) for one in each]
    verdicts = [_verdict(*one, processed, path) for one, processed in zip(each, scores, strict=True)]
    clock.switch("verify")  # the wait is for the device, which has been verifying
    acceptances = _read(verdicts, [own.logits for own in rows])
    clock.switch("other")
    return [
        None if acceptance is None else Verified(proposal, acceptance, processed, own.logits, own.captured, path)
        for proposal, acceptance, processed, own in zip(proposals, acceptances, scores, rows, strict=True)
    ]


class _Scores:
    """The processed scores of a sequence's rows, computed at the first call."""

    def __init__(self, sequence: Sequence, proposal: Proposal, logits: Logits) -> None:
        self._processor, self._logits = sequence.processor, logits
        self._row_contexts = _unread if sequence.processor.keeps_scores else sequence.row_contexts(proposal)
        self._computed: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """Float32 ``[n + 1, vocab]``."""
        if self._computed is None:
            try:
                self._computed = self._processor(self._logits.values, self._row_contexts)
            except Exception:
                if all(transfer.read(self._logits.finite)[0]):
                    raise
                return self._logits.values.float()  # a processor need not accept NaN; these scores are not used
        return self._computed


def _unread(row: int) -> torch.Tensor:
    raise AssertionError("no processor reads the tokens before a row")


def _verdict(
    sequence: Sequence, proposal: Proposal, logits: Logits, scores: Callable[[], torch.Tensor], path: Path
) -> Verdict:
    tree, draft = proposal.tree, DraftedTree(proposal.tree, proposal.token_ids, proposal.scores)
    if sequence.takes_best_of(logits, path):
        if (chosen := logits.chosen) is None:
            return accept_choices(draft, logits.best)
        drafted: list[int] = proposal.token_ids.tolist()
        return Verdict((), lambda: accept_matching(tree, drafted, chosen.token_ids))
    positions = [sequence.length + depth for depth in tree.depths]
    return sequence.rule.accept(draft, scores(), positions)


def _read(verdicts: Many[Verdict], logits: Many[Logits]) -> list[Acceptance | None]:
    """The acceptances; ``None`` where a logit is not a number. Waits once, for what the host does not know yet."""
    unknown = [rows.finite for rows in logits if rows.chosen is None]
    numbers = [number for verdict in verdicts for number in verdict.numbers]
    values = transfer.read(*unknown, *numbers) if unknown or numbers else []
    finite, read = iter(values[: len(unknown)]), iter(values[len(unknown) :])
    acceptances = []
    for verdict, rows in zip(verdicts, logits, strict=True):
        own = [next(read) for _ in verdict.numbers]
        holds = all(next(finite) if rows.chosen is None else rows.chosen.finite)
        acceptances.append(verdict.interpret(*own) if holds else None)
    return acceptances


def not_finite(sequence: Sequence) -> NonFiniteLogitsError:
    """The error of a target whose own logits are not all numbers."""
    return NonFiniteLogitsError(
        f"the model computed NaN or infinite logits for new token {sequence.length - sequence.prompt_length + 1} "
        f"(position {sequence.length}); try another dtype (bfloat16 or float32) or check the weights"
    )
