"""Drafting with a part of the target's sublayers: a path extended token by token, candidates beside it."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.decoding.request import Request
from selfspec.model.transfer import Arrival
from selfspec.runtimes.target import Step, Target
from selfspec.sampling.rules import best, next_best, possible
from selfspec.sampling.tree import ROOT, TokenTree

HEAD_START = 4
"""Sublayers of the next draft step that a device is given before the host looks at the last step's confidence.

They keep it busy while the confidence travels and the host launches the rest, some tens of microseconds. More would
hide nothing more, and a draft that stops has run them in vain.
"""


def head_start(device: torch.device) -> int:
    """Sublayers of the next draft step to begin early; none on a CPU, which does not run ahead of its host."""
    return HEAD_START if device.type == "cuda" else 0


@dataclass
class _DraftStep:
    """One forward of a single row under way, behind its first ``done`` kept sublayers."""

    layout: Step
    hidden_states: torch.Tensor
    done: int = 0
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class _Position:
    """One position of the path: its token, and what the draft knew there."""

    def __init__(self, token: torch.Tensor, preferences: torch.Tensor | None, arrival: Arrival | None) -> None:
        self.token = token
        self._preferences = preferences  # kept where there may be candidates beside the token
        self._arrival = arrival
        self._looked_at: tuple[float, ...] | None = None

    @property
    def confidence(self) -> float:
        """The draft's largest probability, awaited when first asked for."""
        return self._look()[0]

    @property
    def possible(self) -> int:
        """How many tokens may be candidates here."""
        return int(self._look()[1])

    def siblings(self, count: int) -> torch.Tensor:
        """The candidates beside the token, long ``[count]``."""
        assert self._preferences is not None, "candidates had not been wanted"
        return next_best(self._preferences, self.token, count)

    def _look(self) -> tuple[float, ...]:
        assert self._arrival is not None, "nobody had wanted to know"
        if self._looked_at is None:
            self._looked_at = tuple(self._arrival.wait())
        return self._looked_at


class LayerDrafting:
    """One draft in progress.

    Where the draft may stop early, the next step is begun before the confidence of the last one is looked at. A begun
    step that turns out not to be wanted leaves keys and values behind the draft, in slots that the verification and
    later drafts write anew before anything reads them, and nothing else.

    Args:
        target: the model.
        request: the request, whose pending token the draft continues.
        draft: what drafts.
        capture: sublayers whose hidden states the method will want of this round.
    """

    def __init__(self, target: Target, request: Request, draft: LayerDraft, capture: Collection[int]) -> None:
        self.target = target
        self.request = request
        self.draft = draft
        self.shared_prefix = draft.kept.shared_prefix
        below = {index for index in capture if index < self.shared_prefix}
        self.capture = {self.shared_prefix} | below if self.shared_prefix else set()
        self.positions: list[_Position] = []
        self.scores: list[torch.Tensor] = []
        self.states: dict[int, list[torch.Tensor]] = {index: [] for index in self.capture}

    def run(self, limit: int) -> Proposal:
        """Drafts at most ``limit`` tokens, 1 or more."""
        stop, everything = self.draft.stop, len(self.draft.kept.sublayers)
        ahead = 0 if stop is None else head_start(self.target.device)
        token, begun = self.request.pending, None
        for step in range(limit):
            forward = begun or self._begin(token, step, everything)
            position = self._position(self._finish(forward), step)
            self.positions.append(position)
            token = position.token
            begun = self._begin(token, step + 1, ahead) if ahead and step + 1 < limit else None
            if stop is not None and stop.stops(position.confidence):
                break
            self.request.note_draft(step, token)
        return self._proposal()

    def _begin(self, token: torch.Tensor, step: int, count: int) -> _DraftStep:
        """Takes a ``[1]`` token through the first ``count`` kept sublayers, behind the committed slots."""
        layout = self.target.begin(self.request.state, 1, start=self.request.state.cache.length + step)
        forward = _DraftStep(layout, self.target.embed(token))
        self._advance(forward, count)
        return forward

    def _advance(self, forward: _DraftStep, until: int) -> None:
        """Runs the kept sublayers up to number ``until``, and captures what is certain by then."""
        kept, capture = self.draft.kept.sublayers, self.capture
        sublayers = kept[forward.done : until]
        if forward.captured:
            capture = capture - forward.captured.keys()
        if until < len(kept):
            capture = {index for index in capture if index <= sublayers[-1]}
        output = self.target.run(forward.hidden_states, sublayers, forward.layout, capture)
        forward.hidden_states, forward.done = output.hidden_states, until
        forward.captured.update(output.captured)

    def _finish(self, forward: _DraftStep) -> torch.Tensor:
        """Takes a begun step to its ``[1, vocab]`` logits."""
        if forward.done < len(self.draft.kept.sublayers):
            self._advance(forward, len(self.draft.kept.sublayers))
        for index, hidden_states in forward.captured.items():
            self.states[index].append(hidden_states)
        return self.target.logits(forward.hidden_states)

    def _position(self, logits: torch.Tensor, step: int) -> _Position:
        """Chooses the token of a position, and sends on its way what somebody wants to know there."""
        request, draft = self.request, self.draft
        scores = request.processor(logits, lambda _: request.path_context(step))
        if request.rule.needs_draft_probs:
            # Whatever a draft computes, its probabilities have to be numbers for the acceptance to be exact.
            scores = scores.nan_to_num(nan=0.0, neginf=-torch.inf)
            self.scores.append(scores)
        preferences = request.rule.preferences(scores[0], request.length + step)
        if draft.stop is None and draft.widths is None:
            return _Position(best(preferences), None, None)
        confidence = torch.softmax(logits[0].float(), dim=-1).amax()
        if draft.widths is None:
            return _Position(best(preferences), None, Arrival(confidence))
        return _Position(best(preferences), preferences, Arrival(confidence, possible(preferences)))

    def _proposal(self) -> Proposal:
        path_length = len(self.positions)
        parents = list(range(ROOT, path_length - 1))
        tokens = [position.token for position in self.positions]
        room = self.request.sibling_room
        for depth, position in enumerate(self.positions):
            if count := self._sibling_count(position, room):
                tokens.append(position.siblings(count))
                parents += [depth - 1] * count
                room -= count
        looked = self.draft.stop is not None or self.draft.widths is not None
        return Proposal(
            token_ids=torch.cat(tokens),
            tree=TokenTree(tuple(parents)),
            scores=torch.cat(self.scores) if self.scores else None,
            confidences=tuple(position.confidence for position in self.positions) if looked else (),
            shared_prefix=self.shared_prefix,
            shared_states={index: torch.cat(rows) for index, rows in self.states.items() if rows},
        )

    def _sibling_count(self, position: _Position, room: int) -> int:
        """Candidates beside the path's token: as many as are wanted, possible, and have a cache slot."""
        if self.draft.widths is None:
            return 0
        return max(0, min(self.draft.widths(position.confidence), position.possible, 1 + room) - 1)
