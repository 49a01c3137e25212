"""KnapSpec: the draft is what an integer knapsack over attention and MLP latencies says is worth its time."""

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.fused_selection import Passage, Rider, carry_out
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import StateError
from selfspec.methods.base import Drafter, Feedback, Method, Needs, Prefill
from selfspec.methods.knapsack import (
    MAX_WEIGHT,
    Candidates,
    Selection,
    backtrack,
    best_candidate,
    fill_table,
    integer_weights,
)
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.latency_store import read_latencies
from selfspec.runtimes.target import Target

_PROFILE = "latency_profile"
_LARGE_MODEL = 10_000_000_000
_SCRATCH_SHARE = 200
"""Cache slots for a selection, and its logits, may each take this part of the weights' memory."""
_FEWEST_ROWS, _MOST_ROWS = 96, 1024


@dataclass(frozen=True)
class KnapSpecSettings(MethodSettings):
    """Settings of ``knapspec``."""

    interval: int | None = setting(
        None, "rounds between two selections; none is 64 under 10 billion parameters and 128 above", minimum=1
    )
    recent_rounds: int = setting(5, "rounds whose tokens a selection looks at", minimum=1, maximum=64)
    recent_tokens: int = setting(
        16,
        "of these the last so many at most, which bounds the memory; as many of the prompt serve first",
        minimum=1,
        maximum=128,
    )
    similarity_threshold: float = setting(
        0.5, "give up states whose mean cosine to the target's falls below", minimum=-1.0, maximum=1.0
    )
    max_draft_length: int = setting(10, "longest draft, in the objective too", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.7, "stop drafting behind a token less confident; 0 drafts the selected length", minimum=0.0, maximum=1.0
    )
    riding: bool = setting(
        False,
        "selections ride on the next verification, which reads the weights anyway, and count from the round after",
    )
    tpt: str = setting(
        "paper", "objective: paper counts attention and MLP, with_head all of a step", choices=("paper", "with_head")
    )


@register
class KnapSpec(Method):
    """Drafts with the sublayers and the length that promise the most tokens per time (KnapSpec, algorithm 1).

    The paper does not say what drafts before the first selection; the authors' code lets the whole model do so for
    five rounds. Here the last tokens of the prompt serve for a first choice. The others follow as in that code: one
    after ``recent_rounds`` rounds, then one every ``interval`` rounds.

    A selection's branches go through a sublayer in one forward of up to ``_selection_rows`` rows, or in several where
    that is too little for all of them. Memory above plain decoding: cache slots for that many rows (0.5 % of the
    weights, or 96 rows where those are more), logits of 0.5 % of the weights, and three tables of
    ``(K / 2 + 1) · recent_tokens · hidden`` numbers, one of them float32.
    """

    name = "knapspec"
    summary = "attention and MLP selected apart by a knapsack over measured latencies, for tokens per time"
    source = "KnapSpec (Cha et al. 2026)"
    Settings = KnapSpecSettings
    settings: KnapSpecSettings
    learns = True

    def __init__(self, target: Target, settings: KnapSpecSettings) -> None:
        super().__init__(target, settings)
        self.interval = settings.interval or _default_interval(target)
        # The first and the last layer are never skipped (authors' code), so the program starts behind the first.
        self.has_choice = target.layer_count > 2
        self.watched = range(2, target.sublayer_count + 1) if self.has_choice else range(0)
        self.selection_rows = _selection_rows(target, settings.recent_tokens)
        self._lock = threading.Lock()
        self._profile: LatencyProfile | None = None

    @property
    def needs(self) -> Needs:
        """The states of the prompt's last tokens, and room for the branches."""
        if not self.has_choice:
            return Needs()
        return Needs(
            probe_rows=self.selection_rows,
            prompt_rows=self.settings.recent_tokens,
            prompt_states=frozenset(self.watched),
        )

    @property
    def profile(self) -> LatencyProfile:
        """The latencies: those that ``selfspec profile`` keeps for this model, else measured when first needed."""
        with self._lock:
            if self._profile is None:
                self._profile = read_latencies(self.target) or measure_latencies(self.target)
            return self._profile

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Measures the latencies unless they are kept."""
        progress("latencies of attention and MLP")
        _ = self.profile

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return KnapSpecDrafter(self, prefill)

    def state(self) -> LearnedState:
        """The latency profile, if there is one yet."""
        with self._lock:
            profile = self._profile
        return LearnedState({_PROFILE: None if profile is None else profile.to_dict()})

    def restore(self, state: LearnedState) -> None:
        """Takes a latency profile instead of measuring one.

        Args:
            state: from ``state``.

        Raises:
            StateError: it is damaged, or was measured on another device or in another dtype.
        """
        profile = _read_profile(state, self.target)
        with self._lock:
            self._profile = profile


class KnapSpecDrafter(Drafter):
    """One request's selections.

    Attributes:
        selection: the last one; ``None`` where nothing can be skipped.
    """

    def __init__(self, method: KnapSpec, prefill: Prefill) -> None:
        self.selection: Selection | None = None
        self._method = method
        self._settings = method.settings
        self._probe = prefill.probe
        self._recent: deque[torch.Tensor] = deque(maxlen=self._settings.recent_rounds)
        self._rounds_left = min(self._settings.recent_rounds, method.interval)
        self._draft: Draft = NoDraft()
        self._rider: Rider[Candidates] | None = None
        if method.has_choice:
            self._select(torch.stack([prefill.hidden_states[index] for index in method.watched]))

    def plan(self) -> Draft:
        """Selects anew where it is time to, then drafts with what was selected last."""
        if self._recent and self._rounds_left <= 0:
            self._select(torch.cat(list(self._recent), dim=1))
            self._rounds_left = self._method.interval
            if self._rounds_left >= self._settings.recent_rounds:  # else the next one looks at some of them again
                self._recent.clear()
        return self._draft

    @property
    def watched(self) -> Collection[int]:
        """Every state from the first layer's end on, in the last rounds before a selection."""
        return self._method.watched if self._rounds_left <= self._settings.recent_rounds else ()

    @property
    def rider(self) -> Rider[Candidates] | None:
        """The selection, where it rides."""
        return self._rider

    def learn(self, feedback: Feedback) -> None:
        """Keeps the states of the tokens that were committed."""
        self._rounds_left -= 1
        if self._rider is not None:
            self._take(self._rider.outcome)
            self._rider = None
        if feedback.hidden_states:
            rows = len(feedback.acceptance.rows)
            states = [feedback.hidden_states[index][:rows] for index in self._method.watched]
            self._recent.append(torch.stack(states))

    def _select(self, references: torch.Tensor) -> None:
        """Chooses set and length from the target's states ``[2L - 1, rows, hidden]`` of the last committed tokens."""
        method, settings = self._method, self._settings
        profile, context = method.profile, self._probe.committed
        references = references[:, -settings.recent_tokens :]
        branches = self._probe.branches(references.shape[1], method.selection_rows)
        passage = find_candidates(
            method.target,
            references,
            weights=integer_weights(profile.attention(context), profile.mlp),
            similarity_threshold=settings.similarity_threshold,
        )
        if settings.riding:
            self._rider = Rider(passage, branches)
        else:
            self._take(carry_out(passage, branches.run))

    def _take(self, candidates: Candidates) -> None:
        """Drafts with the best of the candidates from now on."""
        settings = self._settings
        self.selection = best_candidate(
            candidates,
            self._method.profile,
            self._probe.committed,
            settings.max_draft_length,
            with_head=settings.tpt == "with_head",
        )
        self._draft = self._as_draft(self.selection)

    def _as_draft(self, selection: Selection) -> Draft:
        """The selection at work; the whole model as its own draft gains nothing, so it becomes plain decoding."""
        settings = self._settings
        if not selection.kept.skipped:
            return NoDraft()
        if settings.confidence_threshold == 0:
            return LayerDraft(selection.kept, selection.draft_length)
        # Section 3.5, dynamic drafting exit: confidence decides instead of the selected length.
        stop = ConfidenceThreshold(settings.confidence_threshold)
        return LayerDraft(selection.kept, settings.max_draft_length, stop)


def find_candidates(
    target: Target, references: torch.Tensor, *, weights: tuple[int, int], similarity_threshold: float
) -> Passage[Candidates]:
    """The first stage of KnapSpec (section 3.4): one set for every skipped weight up to ``K / 2``.

    ``K`` is the weight of all ``2L`` sublayers. First and last layer always run (authors' code).

    Args:
        target: the model.
        references: ``X``, ``[2L - 1, rows, hidden]``: the target's states ``h[2] … h[2L]`` at the recent tokens.
        weights: integer latencies of attention and MLP.
        similarity_threshold: ``τ``.

    Returns:
        The sets that were not pruned, the whole model first.
    """
    layers = target.layer_count
    items: list[int | None] = [*weights * (layers - 2), None, None]
    budget = min(layers * sum(weights) // 2, (layers - 2) * sum(weights))
    table = yield from fill_table(references, items, budget, similarity_threshold, first=2)
    # All that Python has to know of the table, in one transfer.
    decided = torch.cat([table.similarities[None], table.skips.float()]).cpu()
    found = (decided[0] > -math.inf).nonzero().flatten()
    found = torch.cat([torch.zeros(1, dtype=torch.long), found[found > 0]])
    skipped = backtrack(decided[1:] > 0, items)[found]
    return Candidates(
        kept=tuple(_keeping(left_out, target.sublayer_count) for left_out in skipped.tolist()),
        similarities=decided[0, found].double(),
        acceptance=_acceptance(target, table.states[found.to(references.device)]).cpu().double(),
    )


def _acceptance(target: Target, states: torch.Tensor) -> torch.Tensor:
    """``α̂`` (equation 9) of states ``[n, rows, hidden]`` before the final norm, the target's own first: ``[n]``."""
    logits_bytes = target.vocab_size * states.element_size()
    at_once = max(states.shape[1], _weight_bytes(target) // _SCRATCH_SHARE // logits_bytes)
    parts = torch.split(states.flatten(0, 1), at_once)
    choices = torch.cat([target.logits(part).argmax(-1) for part in parts]).view(states.shape[:2])
    return (choices == choices[0]).float().mean(-1)


def _keeping(left_out: Sequence[bool], total: int) -> KeptSet:
    """The kept set of a candidate, whose decisions start at sublayer 2."""
    return KeptSet.skipping((index for index, skip in enumerate(left_out, start=2) if skip), total)


def _weight_bytes(target: Target) -> int:
    return sum(parameter.nbytes for parameter in target.model.parameters())


def _default_interval(target: Target) -> int:
    return 64 if sum(parameter.numel() for parameter in target.model.parameters()) < _LARGE_MODEL else 128


def _selection_rows(target: Target, recent_tokens: int) -> int:
    """Most rows of one forward: all branches where their cache slots take 0.5 % of the weights' memory at most.

    Never less than 96, which take about as much in a model of 0.6 billion parameters and less in larger ones, and never
    more than 1024, from where on a forward is bound by arithmetic on any device and a larger one saves nothing.
    """
    most_branches = max(1, min(target.layer_count * (MAX_WEIGHT + 1) // 2, (target.layer_count - 2) * (MAX_WEIGHT + 1)))
    slot = target.new_sequence(1, 1, 1).cache.size_in_bytes
    affordable = _weight_bytes(target) // _SCRATCH_SHARE // slot
    rows = min(max(affordable, _FEWEST_ROWS), _MOST_ROWS, most_branches * recent_tokens)
    return max(rows, recent_tokens)


def _read_profile(state: LearnedState, target: Target) -> LatencyProfile | None:
    values: Any = state.values.get(_PROFILE, {})
    if values is None:  # the method had not run yet
        return None
    try:
        profile = LatencyProfile.from_dict(values)
    except ValueError as error:
        raise StateError(f"the state holds no latency profile: {error}; learn it anew") from error
    if not profile.fits(target):
        raise StateError(
            f"the latencies were measured on {profile.device} with {profile.layers} layers in {profile.dtype}, which "
            f"this model on {device_name(target.device)} is not; learn them anew"
        )
    return profile
