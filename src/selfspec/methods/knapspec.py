"""KnapSpec: the draft is what an integer knapsack over attention and MLP latencies says is worth its time."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.decoding.fused_selection import FusedSelection, run_selection
from selfspec.decoding.layer_draft import LayerDraft
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import StateError
from selfspec.methods.base import Method
from selfspec.methods.knapsack import (
    Candidates,
    Selection,
    best_candidate,
    integer_weights,
)
from selfspec.methods.knapspec_candidates import find_candidates, selection_rows
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.sharing import SHARE_HELP, share_kept_set
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.latency_check import LatencyCheck
from selfspec.runtimes.latency_store import keep_latencies, read_latencies
from selfspec.runtimes.target import Target

_PROFILE = "latency_profile"
_LARGE_MODEL = 10_000_000_000
_TOKENS = 40
"""Output tokens before the first selection of our schedule."""
_HELD_OUT = 4
"""One in this many rows of a selection, the last ones, measures acceptance instead of choosing sets."""


@dataclass(frozen=True)
class KnapSpecSettings(MethodSettings):
    """Settings of ``knapspec``."""

    interval: int | None = setting(
        None, "rounds between two selections; none is 64 below 10 billion parameters and 128 from there", minimum=1
    )
    schedule: str = setting(
        "ours",
        "when and on what it selects: ours, first after recent_tokens output tokens, on the last recent_tokens ones; "
        "paper, first after recent_rounds rounds drafted by the whole model, on all tokens of the last recent_rounds",
        choices=("ours", "paper"),
    )
    recent_rounds: int = setting(5, "with schedule=paper, rounds whose tokens a selection uses", minimum=1, maximum=64)
    recent_tokens: int | None = setting(
        None,
        "with schedule=ours, output tokens before the first selection, and the last ones that a selection uses; none "
        "is 40, of which it uses a 64th of the hidden size, at least 8, to bound the memory",
        minimum=1,
        maximum=128,
    )
    similarity_threshold: float = setting(
        0.5, "prune states whose mean cosine to the target's is lower", minimum=-1.0, maximum=1.0
    )
    max_draft_length: int = setting(10, "longest draft, in the objective too", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.7,
        "stop drafting after a token less confident than this; 0 drafts the selected length",
        minimum=0.0,
        maximum=1.0,
    )
    fused_selection: bool = setting(
        False,
        "run a selection in the same forward as the next verification, so that weights are read once; its set drafts "
        "one round later",
    )
    tpt: str = setting(
        "paper",
        "time of a step in the objective: paper counts attention and MLP, with_head adds embedding, norm and LM head",
        choices=("paper", "with_head"),
    )
    share_kept_set: bool = setting(True, SHARE_HELP)


@register
class KnapSpec(Method):
    """Drafts with the sublayers and the length that promise the most tokens per time (KnapSpec, algorithm 1).

    With ``schedule=paper`` the whole model drafts ``recent_rounds`` rounds, which takes no longer than plain decoding.
    Then a selection uses all tokens of these rounds, and so does one every ``interval`` rounds. The paper does not say
    what drafts before the first selection; this is what the authors' code does, except that it does not count the first
    round.

    With ``schedule=ours`` nothing is drafted until the output has ``recent_tokens`` tokens (40). A selection uses the
    last 40, or in a model of hidden size below 2560 a 64th of that size, which bounds the memory. The last quarter of
    these chooses no set: it only measures the acceptance of sets that the others chose.

    The latencies are minima of repeated measurements, and are remembered in the user's cache folder, so that selections
    do not depend on what else the machine does. They are measured again if live rounds are clearly faster than they
    predict (``LatencyCheck``).

    A selection's branches go through a sublayer in one forward of at most ``selection_rows`` rows, or in several where
    they have more. Memory above plain decoding: cache slots for that many rows (0.5 % of the weights, or 96 rows if
    that is more), logits of 0.5 % of the weights, and three tables of ``(K / 2 + 1) · rows · hidden`` numbers, one
    of them float32, where ``rows`` are the tokens of a selection; pruned states are not in them.

    In a batch the layer drafts share one kept set, as ``selfspec.methods.sharing`` says, unless ``share_kept_set`` is
    off. Each request still makes its own selections.
    """

    name = "knapspec"
    summary = "skips the attention and MLP sublayers that a knapsack over measured latencies selects"
    source = "KnapSpec (Cha et al. 2026)"
    Settings = KnapSpecSettings
    settings: KnapSpecSettings
    learns = True

    def __init__(self, target: Target, settings: KnapSpecSettings) -> None:
        super().__init__(target, settings)
        self.interval = settings.interval or _default_interval(target)
        # The first and the last layer are never skipped (authors' code), so the program starts after the first.
        self.has_choice = target.layer_count > 2
        self.watched = range(2, target.sublayer_count + 1) if self.has_choice else range(0)
        self.first_selection = settings.recent_tokens or _TOKENS
        self.window = settings.recent_tokens or min(_TOKENS, max(8, target.hidden_size // 64))
        ours = settings.schedule == "ours"
        most_tokens = self.window if ours else settings.recent_rounds * (settings.max_draft_length + 1)
        self.selection_rows = selection_rows(target, most_tokens)
        self.clock: Callable[[], float] = time.perf_counter
        self._check = LatencyCheck()
        self._lock = threading.Lock()
        self._profile: LatencyProfile | None = None

    @property
    def needs(self) -> Needs:
        """Cache slots for the branches."""
        return Needs(probe_rows=self.selection_rows if self.has_choice else 0)

    @property
    def profile(self) -> LatencyProfile:
        """The latencies of this model: kept ones, or else measured when first needed and kept.

        They are measured again where live rounds contradict them.
        """
        with self._lock:
            if self._profile is None:
                self._profile = read_latencies(self.target) or self._measure()
            elif self._check.fails:
                self._profile = self._measure()
            return self._profile

    def _measure(self) -> LatencyProfile:
        latencies = measure_latencies(self.target)
        self._check.reset()
        keep_latencies(self.target, latencies)
        return latencies

    def note_round(self, kept: KeptSet | None, drafted: int, context: int, seconds: float) -> None:
        """Compares the time of a round with the latencies.

        Args:
            kept: what drafted; ``None`` where nothing did.
            drafted: its draft tokens.
            context: tokens in the cache.
            seconds: what the round took. In a batch this is the time of all requests' rounds.
        """
        with self._lock:
            profile = self._profile
        if profile is not None:
            drafting = drafted * profile.draft_step(kept, context) if kept is not None else 0.0
            self._check.note(drafting + profile.target_step(context), seconds)

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Measures the latencies unless they are saved."""
        progress("latencies of attention and MLP")
        _ = self.profile

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return KnapSpecDrafter(self, prefill)

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """What drafts the next round of several requests, with one kept set unless ``share_kept_set`` is off."""
        drafts = super().plan(drafters)
        return share_kept_set(drafts) if self.settings.share_kept_set else drafts

    def state(self) -> LearnedState:
        """The latency profile, if there is one yet."""
        with self._lock:
            profile = self._profile
        return LearnedState({_PROFILE: None if profile is None else profile.to_dict()})

    def restore(self, state: LearnedState) -> None:
        """Loads a latency profile, so that none is measured.

        Args:
            state: from ``state``.

        Raises:
            StateError: it is damaged, or was measured on another device or in another dtype.
        """
        profile = _read_profile(state, self.target)
        self._check.reset()
        with self._lock:
            self._profile = profile


class KnapSpecDrafter(Drafter):
    """One request's selections.

    Args:
        method: its method.
        prefill: of the request.

    Attributes:
        selection: the last one; ``None`` if the model is too small to skip anything.
        probe: of the request.
    """

    def __init__(self, method: KnapSpec, prefill: Prefill) -> None:
        self.selection: Selection | None = None
        self._method = method
        self._settings = method.settings
        self.probe = prefill.probe
        ours = self._settings.schedule == "ours"
        self._rounds = method.window if ours else self._settings.recent_rounds
        self._prompt_length = self.probe.committed
        self._recent: deque[torch.Tensor] = deque(maxlen=self._rounds)
        self._rounds_left = self._rounds if ours else min(self._rounds, method.interval)
        self._draft: Draft = NoDraft()
        self._fused: FusedSelection[Candidates] | None = None
        self._started: float | None = None
        if method.has_choice:
            _ = method.profile  # measured before the first round, if at all
            if not ours:
                self._draft = self._draft_with(
                    KeptSet.full(method.target.sublayer_count), self._settings.max_draft_length
                )

    def plan(self) -> Draft:
        """Selects again if it is time to, then drafts with the last selection."""
        if self._is_due():
            self.select(torch.cat(list(self._recent), dim=1))
            self._rounds_left = self._method.interval
            if self._rounds_left >= self._rounds:  # otherwise the next one uses some of them again
                self._recent.clear()
        self._started = self._method.clock()
        return self._draft

    def _is_due(self) -> bool:
        if self.selection is None and self._settings.schedule == "ours":
            written = self.probe.committed - self._prompt_length
            return bool(self._recent) and written >= self._method.first_selection
        return bool(self._recent) and self._rounds_left <= 0

    @property
    def watched(self) -> Collection[int]:
        """Every state after the first layer, in the last rounds before a selection."""
        first = self.selection is None
        return self._method.watched if first or self._rounds_left <= self._rounds else ()

    @property
    def fused_selection(self) -> FusedSelection[Candidates] | None:
        """The selection, where it runs with the verification."""
        return self._fused

    def learn(self, feedback: Feedback) -> None:
        """Keeps the states of the committed tokens."""
        self._rounds_left -= 1
        if self._fused is not None:
            self._choose(self._fused.outcome)
            self._fused = None
        elif self._started is not None:
            kept = feedback.draft.kept if isinstance(feedback.draft, LayerDraft) else None
            seconds = self._method.clock() - self._started
            self._method.note_round(kept, feedback.drafted, self.probe.committed, seconds)
        if feedback.hidden_states:
            rows = len(feedback.acceptance.rows)
            states = [feedback.hidden_states[index][:rows] for index in self._method.watched]
            self._recent.append(torch.stack(states))

    def select(self, references: torch.Tensor) -> None:
        """Selects again, at once or fused.

        Args:
            references: ``[2L - 1, rows, hidden]``, the target's states ``h[2] … h[2L]`` of the last committed tokens.
        """
        method, settings = self._method, self._settings
        profile, context = method.profile, self.probe.committed
        choosing = slice(None)
        if settings.schedule == "ours":
            references = references[:, -method.window :]
            choosing = slice(references.shape[1] - references.shape[1] // _HELD_OUT)
        branches = self.probe.branches(references.shape[1], method.selection_rows)
        steps = find_candidates(
            method.target,
            references,
            weights=integer_weights(profile.attention(context), profile.mlp),
            similarity_threshold=settings.similarity_threshold,
            choosing=choosing,
        )
        if settings.fused_selection:
            self._fused = FusedSelection(steps, branches)
        else:
            self._choose(run_selection(steps, branches.run))

    def _choose(self, candidates: Candidates) -> None:
        """Drafts with the best of the candidates from now on."""
        settings = self._settings
        self.selection = best_candidate(
            candidates,
            self._method.profile,
            self.probe.committed,
            settings.max_draft_length,
            with_head=settings.tpt == "with_head",
        )
        self._draft = self._as_draft(self.selection)

    def _as_draft(self, selection: Selection) -> Draft:
        """What drafts by a selection. The whole model as its own draft gains nothing, so it becomes plain decoding."""
        return self._draft_with(selection.kept, selection.draft_length) if selection.kept.skipped else NoDraft()

    def _draft_with(self, kept: KeptSet, selected_length: int) -> LayerDraft:
        settings = self._settings
        if settings.confidence_threshold == 0:
            return LayerDraft(kept, selected_length)
        # Section 3.5, dynamic drafting exit: confidence decides instead of the selected length.
        stop = ConfidenceThreshold(settings.confidence_threshold)
        return LayerDraft(kept, settings.max_draft_length, stop)


def _default_interval(target: Target) -> int:
    return 64 if sum(parameter.numel() for parameter in target.model.parameters()) < _LARGE_MODEL else 128


def _read_profile(state: LearnedState, target: Target) -> LatencyProfile | None:
    values: Any = state.values.get(_PROFILE, {})
    if values is None:  # it was saved before the method ran
        return None
    try:
        profile = LatencyProfile.from_dict(values)
    except ValueError as error:
        raise StateError(f"the state holds no latency profile: {error}; learn it again") from error
    if not profile.fits(target):
        raise StateError(
            f"the latencies were measured on {profile.device} with {profile.layers} layers in {profile.dtype}, not for "
            f"this model on {device_name(target.device)}; learn them again"
        )
    return profile
