"""Drafting with a part of the target's sublayers: a path extended token by token, candidates beside it."""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from selfspec.decoding.context import Context
from selfspec.decoding.draft import Draft, empty_proposal
from selfspec.decoding.guess import Guess
from selfspec.decoding.proposal import DraftChain, DraftForward, Drafting, DraftOutput, Proposal
from selfspec.decoding.stopping import StoppingRule, TreeWidths
from selfspec.model import transfer
from selfspec.model.forward import Forward
from selfspec.model.kept import KeptSet
from selfspec.model.transfer import AsyncCopy
from selfspec.runtimes.chain import ChainOutput, ChainRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.precision import AnyPrecision
from selfspec.sampling.rules import best, next_best, possible
from selfspec.sampling.tree import ROOT, TokenTree

HEAD_START = 4
"""Sublayers of the next draft step that a device is given before the host reads the last step's confidence.

They keep the device busy while the confidence is copied and the host launches the rest, some tens of microseconds. More
would hide nothing more, and a draft that stops has run them in vain.
"""


def head_start(device: torch.device) -> int:
    """Sublayers of the next draft step to run early; none on a CPU, which does not run ahead of its host."""
    return HEAD_START if device.type == "cuda" else 0


@dataclass(frozen=True)
class LayerDraft:
    """Draft with a part of the target's own sublayers.

    Attributes:
        kept: the sublayers to run.
        limit: most tokens on the path, 0 or more.
        stop: ends the draft earlier; ``None`` drafts ``limit`` tokens without reading their confidence.
        widths: candidates to verify at each position, by confidence; ``None`` is one, a chain.
        precision: of the weights that draft; ``None`` is the target's own, others are low-bit copies of them.
        guess: guesses what this draft drafts next. Guesses are rows of the forward that drafts the token before them;
            those that turn out to be the draft's own choices save a forward each, and the drafted tokens are the same.
    """

    kept: KeptSet
    limit: int
    stop: StoppingRule | None = None
    widths: TreeWidths | None = None
    precision: AnyPrecision | None = None
    guess: Guess | None = None

    @cached_property
    def shared_prefix(self) -> int:
        """Number of leading sublayers that compute what the target computes: kept, from its own weights."""
        if self.precision is None:
            return self.kept.shared_prefix
        by_sublayer = self.precision.by_sublayer(self.kept.total)
        low = (index for index in range(self.kept.total) if by_sublayer.of_sublayer(index) is not None)
        return min(self.kept.shared_prefix, next(low, self.kept.total))

    @property
    def threshold(self) -> float | None:
        """The confidence below which it stops; ``None`` without such a rule."""
        return None if self.stop is None else self.stop.threshold

    def propose(self, context: Context, watched: Collection[int] = ()) -> Drafting:
        """Extends a path by one forward of the kept sublayers a token, or fewer with guesses; see ``Draft.propose``."""
        limit = min(self.limit, context.draft_limit)
        if limit <= 0:
            return _nothing(self, context)
        if self.widths is None and context.follows_from_logits:
            layout = context.target.lay_out(context.state, limit, drawing=context.drawing)
            native = context.target.at(self.precision).native
            if native is not None and native.takes_chains(self.kept.sublayers, layout.rope):
                return _ChainDrafting(self, context, watched, layout).run()
        return _LayerDrafting(self, context, watched, limit).run()


def with_precision(draft: Draft, precision: AnyPrecision | None) -> Draft:
    """A layer draft from weights of another precision, unless it has named one itself; other drafts as they are.

    Args:
        draft: the draft.
        precision: of the weights; ``None`` for the target's own.
    """
    if isinstance(draft, LayerDraft) and draft.precision is None and precision is not None:
        return replace(draft, precision=precision)
    return draft


def _nothing(draft: LayerDraft, context: Context) -> Drafting:
    yield from ()
    empty = empty_proposal(context)
    return Proposal(empty.tokens, empty.tree, kept=draft.kept, precision=draft.precision, threshold=draft.threshold)


@dataclass
class _DraftStep:
    """One forward of the last token and of guesses after it, after its first ``done`` kept sublayers."""

    layout: Forward
    hidden_states: torch.Tensor
    guesses: tuple[int, ...] = ()
    done: int = 0
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: Logits | None = None


class _Position:
    """One position of the path: its token, and the draft's confidence there."""

    def __init__(self, token: torch.Tensor, preferences: torch.Tensor | None, copy: AsyncCopy | None) -> None:
        self.token = token
        self._preferences = preferences
        self._copy = copy
        self._numbers: tuple[float, ...] | None = None

    @property
    def token_id(self) -> int:
        """The token on the host; waits for it."""
        return int(self.token)

    @property
    def confidence(self) -> float:
        """The draft's largest probability; waits for it when first read."""
        return self._read()[0]

    @property
    def possible(self) -> int:
        """How many tokens may be candidates here."""
        return int(self._read()[1])

    def siblings(self, count: int) -> torch.Tensor:
        """The candidates beside the token, long ``[count]``."""
        assert self._preferences is not None, "candidates were not requested"
        return next_best(self._preferences, self.token, count)

    def _read(self) -> tuple[float, ...]:
        assert self._copy is not None, "the confidence was not requested"
        if self._numbers is None:
            self._numbers = tuple(self._copy.wait())
        return self._numbers


class _ChainDrafting:
    """A draft in progress whose tokens follow from the logits, so that its forwards run in a single call."""

    def __init__(self, draft: LayerDraft, context: Context, watched: Collection[int], layout: Forward) -> None:
        self.draft = draft
        self.context = context
        self.layout = layout
        self.capture = _captured(draft, watched)
        self.drafted: list[int] = []

    def run(self) -> Drafting:
        """Drafts at most as many tokens as there are rows, 1 or more."""
        draft, context = self.draft, self.context
        output: ChainOutput = yield DraftChain(
            ChainRequest(self.layout, context.pending_id, self._guesses(), self._follow, self.capture),
            draft.kept.sublayers,
            draft.precision,
        )
        return Proposal(
            tokens=output.token_ids,
            tree=TokenTree.chain(len(output.token_ids)),
            confidences=output.confidences if draft.stop is not None else (),
            shared_prefix=draft.shared_prefix,
            shared_states=output.captured,
            kept=draft.kept,
            precision=draft.precision,
            threshold=draft.threshold,
            guessed=output.guessed,
        )

    def _follow(self, token_id: int, confidence: float, asks: bool) -> Sequence[int] | None:
        self.drafted.append(token_id)
        if self.draft.stop is not None and self.draft.stop.stops(confidence):
            return None
        return self._guesses() if asks else ()

    def _guesses(self) -> Sequence[int]:
        return _guesses_after(self.draft, self.drafted, self.layout.rows)


def _captured(draft: LayerDraft, watched: Collection[int]) -> set[int]:
    """The sublayers whose states a verification, or a drafter that watches them, takes over from a draft."""
    shared = draft.shared_prefix
    return {shared} | {index for index in watched if index < shared} if shared else set()


def _guesses_after(draft: LayerDraft, drafted: Sequence[int], limit: int) -> tuple[int, ...]:
    """Guesses of the tokens after the one that the coming forward drafts, as many as may still be drafted."""
    room = limit - len(drafted) - 1
    return () if draft.guess is None or room <= 0 else tuple(draft.guess(drafted))[:room]


class _LayerDrafting:
    """One draft in progress.

    Where the draft may stop early, the next step is begun before the confidence of the last one is read. A begun step
    that is not needed leaves keys and values in slots after the draft, which the verification and later drafts
    overwrite before anything reads them. Rows of wrong guesses do the same.
    """

    def __init__(self, draft: LayerDraft, context: Context, watched: Collection[int], limit: int) -> None:
        self.draft = draft
        self.context = context
        self.limit = limit
        self.target = context.target
        self.shared_prefix = draft.shared_prefix
        self.capture = _captured(draft, watched)
        self.positions: list[_Position] = []
        self.scores: list[torch.Tensor] = []
        self.states: dict[int, list[torch.Tensor]] = {index: [] for index in self.capture}
        self.guessed = 0
        self.stopped = False

    def run(self) -> Drafting:
        """Drafts at most ``limit`` tokens, 1 or more."""
        whole = len(self.draft.kept.sublayers)
        runs_ahead = self.draft.stop is not None and self.draft.guess is None
        ahead = head_start(self.target.device) if runs_ahead else 0
        begun = None
        while self._has_room and not self.stopped:
            step = begun or self._step(self._guesses())
            yield from self._advance(step, whole)
            begun = None
            for row in range(1 + len(step.guesses)):
                self._take(step, row)
                if ahead and self._has_room:
                    begun = self._step(())
                    yield from self._advance(begun, ahead)
                self.stopped = self.draft.stop is not None and self.draft.stop.stops(self.positions[-1].confidence)
                if self.stopped or not self._confirms(step, row):
                    break
        return self._proposal()

    @property
    def _has_room(self) -> bool:
        return len(self.positions) < self.limit

    def _guesses(self) -> tuple[int, ...]:
        if self.draft.guess is None:
            return ()
        return _guesses_after(self.draft, [position.token_id for position in self.positions], self.limit)

    def _step(self, guesses: tuple[int, ...]) -> _DraftStep:
        """The forward of the last token and guesses, in the slots after the drafted tokens before it."""
        token = self.positions[-1].token if self.positions else self.context.pending
        start = self.context.cache.length + len(self.positions)
        layout = self.target.lay_out(self.context.state, 1 + len(guesses), start=start)
        if guesses:
            token = torch.cat([token, transfer.send(guesses, token.device)])
        return _DraftStep(layout, self.target.embed(token), guesses)

    def _take(self, step: _DraftStep, row: int) -> None:
        """Takes the token that a row chooses; the rows before it are confirmed."""
        index = len(self.positions)
        position = self._position(step, row, index)
        for sublayer, hidden_states in step.captured.items():
            self.states[sublayer].append(hidden_states[row : row + 1])
        self.positions.append(position)
        self.guessed += row > 0
        if not self.context.processor.keeps_scores:
            self.context.write_draft(index, position.token)

    def _confirms(self, step: _DraftStep, row: int) -> bool:
        """Whether the token just taken is what was guessed, so that the next row is valid; ``False`` for the last."""
        return row < len(step.guesses) and self.positions[-1].token_id == step.guesses[row]

    def _advance(self, step: _DraftStep, until: int) -> Generator[DraftForward, DraftOutput, None]:
        """Runs the kept sublayers up to number ``until``, and captures what is certain by then."""
        kept = self.draft.kept.sublayers
        sublayers, ends = kept[step.done : until], until >= len(kept)
        capture = {index for index in self.capture - step.captured.keys() if ends or index <= sublayers[-1]}
        output = yield DraftForward(step.hidden_states, step.layout, sublayers, capture, ends, self.draft.precision)
        step.hidden_states, step.logits, step.done = output.hidden_states, output.scored, until
        step.captured.update(output.captured)

    def _position(self, step: _DraftStep, row: int, index: int) -> _Position:
        """Chooses the token of a position, and starts an asynchronous copy of the confidence where it is needed.

        Rows are processed one by one, in order and only up to the first wrong guess, so that processors see the calls,
        and the generator of a request makes the draws, that they would without guesses.
        """
        context, draft = self.context, self.draft
        assert step.logits is not None
        logits = step.logits.row(row) if step.guesses else step.logits
        confident = draft.stop is not None or draft.widths is not None
        if context.chooses_best and draft.widths is None:
            return _Position(logits.best, None, AsyncCopy(logits.confidence[0]) if confident else None)
        scores = context.processor(logits.values, lambda _: context.drafted_context(index))
        if context.rule.needs_draft_probs:
            # Whatever a draft computes, its probabilities have to be numbers for the acceptance to be exact.
            scores = scores.nan_to_num(nan=0.0, neginf=-torch.inf)
            self.scores.append(scores)
        preferences = context.rule.preferences(scores[0], context.length + index)
        token = best(preferences)
        if draft.widths is not None:
            return _Position(token, preferences, AsyncCopy(logits.confidence[0], possible(preferences)))
        return _Position(token, None, AsyncCopy(logits.confidence[0]) if confident else None)

    def _proposal(self) -> Proposal:
        path_length = len(self.positions)
        parents = list(range(ROOT, path_length - 1))
        tokens = [position.token for position in self.positions]
        room = self.context.sibling_limit
        for depth, position in enumerate(self.positions):
            if count := self._sibling_count(position, room):
                tokens.append(position.siblings(count))
                parents += [depth - 1] * count
                room -= count
        with_confidence = self.draft.stop is not None or self.draft.widths is not None
        return Proposal(
            tokens=torch.cat(tokens),
            tree=TokenTree(tuple(parents)),
            scores=torch.cat(self.scores) if self.scores else None,
            confidences=tuple(position.confidence for position in self.positions) if with_confidence else (),
            shared_prefix=self.shared_prefix,
            shared_states={index: torch.cat(rows) for index, rows in self.states.items() if rows},
            kept=self.draft.kept,
            precision=self.draft.precision,
            threshold=self.draft.threshold,
            guessed=self.guessed,
        )

    def _sibling_count(self, position: _Position, room: int) -> int:
        """Candidates beside the path's token: as many as are requested, possible, and have a cache slot."""
        if self.draft.widths is None:
            return 0
        return max(0, min(self.draft.widths(position.confidence), position.possible, 1 + room) - 1)
