"""KnapSpec: the draft is what an integer knapsack over attention and MLP latencies says is worth its time."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from selfspec.decoding.draft import Draft
from selfspec.decoding.drafter import Drafter, Needs, Prefill
from selfspec.decoding.probe import Probe
from selfspec.errors import StateError
from selfspec.methods.base import Method
from selfspec.methods.budget import most_skipped
from selfspec.methods.knapsack import Candidates, Selection, best_candidate
from selfspec.methods.knapspec_candidates import PAPER_SKIP_RATIO, selection_rows
from selfspec.methods.knapspec_choice import Choice, Ground, read_selection, selection_values
from selfspec.methods.knapspec_drafter import KnapSpecDrafter
from selfspec.methods.knapspec_schedule import OurSchedule, PaperSchedule, Schedule
from selfspec.methods.knapspec_settings import KnapSpecSettings
from selfspec.methods.payoff import Payoff, Record
from selfspec.methods.registry import register
from selfspec.methods.sharing import share_kept_set
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile, device_name, measure_latencies
from selfspec.runtimes.latency_check import LatencyCheck
from selfspec.runtimes.latency_store import keep_latencies, kept_latencies, read_latencies
from selfspec.runtimes.target import Target

__all__ = ["KnapSpec", "KnapSpecDrafter", "KnapSpecSettings"]

_PROFILE = "latency_profile"
_LARGE_MODEL = 10_000_000_000
_TOKENS = 40
"""Output tokens before the first selection of our schedule."""


@register
class KnapSpec(Method):
    """Drafts with the sublayers and the length that promise the most tokens per time (KnapSpec, algorithm 1).

    With ``schedule=paper`` the whole model drafts ``recent_rounds`` rounds, which takes no longer than plain decoding.
    Then a selection uses all tokens of these rounds, and so does one every ``interval`` rounds. The paper does not say
    what drafts before the first selection; this is what the authors' code does, except that it does not count the first
    round.

    With ``schedule=ours`` the first request drafts nothing until its output has ``recent_tokens`` tokens (40). A
    selection uses rows spread over the last 40, as many as a 64th of the hidden size (at least 8), which bounds the
    memory; a row sees the target's keys, as the first token of a draft does. Later requests start with the last
    selection, and there is another one where it pays (``selfspec.methods.payoff``), at least ``interval`` rounds after
    the last. A set whose live acceptance promises less than plain decoding is declined.

    Candidates skip at most half as much again as ``selfspec.methods.budget`` gives a model of this size (a half in the
    paper), and once drafts have been tested the choice among them is made again (``Calibration``).

    On SmolLM2-135M (six chat messages, 256 output tokens each) the paper's schedule accepts 0.80 of the tokens that a
    part of the model drafts and spends 41 % of the time on selections. Ours spends 3 %, and finds that no set is faster
    than plain decoding.

    The latencies are minima of repeated measurements, and are remembered in the user's cache folder, so that selections
    do not depend on what else the machine does. They are measured again if live rounds are clearly faster than they
    predict (``LatencyCheck``).

    A selection's branches go through a sublayer in one forward of at most ``selection_rows`` rows, or in several where
    they have more. Memory above plain decoding: cache slots for that many rows (0.5 % of the weights, or 96 rows if
    that is more), logits of 0.5 % of the weights, and three tables of ``(K / 2 + 1) · rows · hidden`` numbers, one
    of them float32, where ``rows`` are the tokens of a selection; pruned states are not in them.

    With ``draft_bits`` branches, acceptance and the latencies of drafts are those of the copies; the branches start
    from the target's ``h[2]``. The whole model is a draft then, too.

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
        self.tokens = settings.recent_tokens or _TOKENS
        self.rows = min(self.tokens, max(8, target.hidden_size // 64))
        ours = settings.schedule == "ours"
        most_tokens = self.rows if ours else settings.recent_rounds * (settings.max_draft_length + 1)
        self.selection_rows = selection_rows(target, most_tokens)
        self.skip_ratio = most_skipped(target) if ours else PAPER_SKIP_RATIO
        self.payoff = Payoff()
        self._choice: Choice | None = None
        self._check = LatencyCheck()
        self._lock = threading.Lock()
        self._profile: LatencyProfile | None = None
        self._draft_profile: LatencyProfile | None = None

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

    @property
    def draft_profile(self) -> LatencyProfile:
        """The latencies of the weights that draft: kept ones, or else measured when first needed and kept."""
        precision = self.draft_precision
        if precision is None:
            return self.profile
        with self._lock:
            if self._draft_profile is None:
                self._draft_profile = kept_latencies(self.target, precision)
            return self._draft_profile

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
            draft_profile = self._draft_profile or profile
        if profile is not None and draft_profile is not None:
            drafting = drafted * draft_profile.draft_step(kept, context) if kept is not None else 0.0
            self._check.note(drafting + profile.target_step(context), seconds)

    def schedule(self, probe: Probe) -> Schedule:
        """The schedule of a request."""
        if self.settings.schedule == "paper":
            return PaperSchedule(probe, self.interval, self.settings.recent_rounds)
        return OurSchedule(probe, self.interval, self.tokens, self.rows)

    @property
    def last_choice(self) -> Choice | None:
        """The last selection of any request, and what came of it; ``None`` before the first."""
        with self._lock:
            return self._choice

    def best_of(self, candidates: Candidates, context: int) -> Selection:
        """The second stage: the set and the length that promise most.

        Args:
            candidates: of the first stage.
            context: tokens in the cache.
        """
        return best_candidate(
            candidates,
            self.profile,
            context,
            self.settings.max_draft_length,
            with_head=self.settings.tpt == "with_head",
            draft_profile=self.draft_profile,
        )

    def adopt(self, selection: Selection, context: int, ground: Ground | None = None) -> Choice:
        """Takes a selection as the last one.

        Args:
            selection: the selection.
            context: tokens in the cache.
            ground: what it was selected from, where that can be looked at again.
        """
        with_head, profile = self.settings.tpt == "with_head", self.profile
        step = self.draft_profile.draft_step(selection.kept, context, with_head=with_head)
        cost = step / profile.target_step(context, with_head=with_head)
        drafts = bool(selection.kept.skipped) or self.draft_precision is not None
        record = Record(self.payoff, cost if drafts else None)
        choice = Choice(selection, record, ground)
        with self._lock:
            self._choice = choice
        return choice

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Makes the copies that draft, and measures the latencies unless they are saved."""
        super().prepare(progress)
        progress("latencies of attention and MLP")
        _ = self.profile, self.draft_profile

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return KnapSpecDrafter(self, prefill)

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One kept set for the drafts of a batch, unless ``share_kept_set`` is off."""
        return share_kept_set(drafts) if self.settings.share_kept_set else list(drafts)

    def state(self) -> LearnedState:
        """The latency profile and the last selection, if there are any yet."""
        with self._lock:
            profile, choice = self._profile, self._choice
        values = {_PROFILE: None if profile is None else profile.to_dict()}
        return LearnedState({**values, **selection_values(None if choice is None else choice.selection)})

    def restore(self, state: LearnedState) -> None:
        """Loads a latency profile, so that none is measured, and a selection.

        Args:
            state: from ``state``.

        Raises:
            StateError: it is damaged, or the latencies were measured on another device or in another dtype.
        """
        profile = _read_profile(state, self.target)
        selection = read_selection(state, self.target, self.settings.max_draft_length)
        self._check.reset()
        with self._lock:
            self._profile, self._choice = profile, None
        if profile is not None and selection is not None:
            self.adopt(selection, context=0)


def _default_interval(target: Target) -> int:
    return 64 if target.parameter_count < _LARGE_MODEL else 128


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
