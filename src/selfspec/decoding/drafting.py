"""Carries out the drafts of several sequences: what they ask of the model, and what they make of it."""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from selfspec.decoding.draft import Draft, LayerDraft, MtpDraft, Proposal, TokenDraft
from selfspec.decoding.request import CHOOSER, MTP, WIDTHS, Sequence, draft_path
from selfspec.model import transfer
from selfspec.runtimes.chain import Drafted, DraftedToken, DraftRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.mtp import MtpHead
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import EMPTY_TREE, ROOT, TokenTree
from selfspec.sampling.rules import best, next_best, possible


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
        if draft.widths is None and sequence.takes_best_of(logits):
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
            return replace(_known(self._sequence, draft), forwards=drafted.forwards, path=self._path)
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
