"""DEL: early exit at a layer and for a draft length chosen by what every layer would have drafted."""

import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import InvalidSettingError, NoGainWarning, StateError
from selfspec.methods.base import Method
from selfspec.methods.dynamic_exit_choice import Choice, Statistics, choose, count_matches, shadow_tokens
from selfspec.methods.payoff import SCHEDULE_HELP, Payoff, Record, draft_cost
from selfspec.methods.precision_settings import PrecisionSettings
from selfspec.methods.registry import register
from selfspec.methods.settings import setting
from selfspec.methods.sharing import SHARE_HELP, share_kept_set
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target

__all__ = [
    "Choice",
    "Del",
    "DelDrafter",
    "DelSettings",
    "Statistics",
    "choose",
    "count_matches",
    "shadow_tokens",
]

LOGITS_SHARE = 0.005
"""Largest memory of the logits of shadow tokens, as a share of the model's weights."""

JUDGED_ROUNDS, LEAST_GAIN = 64, 1.15
"""Rounds after which it warns, and the factor in layers per token below which it does. LM head and choices cost too."""


@dataclass(frozen=True)
class DelSettings(PrecisionSettings):
    """Settings of ``del``."""

    schedule: str = setting("ours", f"when it counts matches: {SCHEDULE_HELP}, every round", choices=("ours", "paper"))
    d_max: int = setting(18, "longest draft, in tokens", minimum=1, maximum=64)
    omega: float = setting(0.95, "factor by which a round's counts decay each round (ω)", minimum=0.0, maximum=1.0)
    context_window: int = setting(
        32, "last tokens of the prompt that the first choice is based on", minimum=1, maximum=1024
    )
    keep_prompt: bool = setting(
        False, "later choices count the prompt's tokens too, as the oldest round (authors' code)"
    )
    allow_no_draft: bool = setting(
        True, "draft nothing in a round whose best draft length is 0 (ours); off, every round drafts"
    )
    carry_over: bool = setting(
        False,
        "with schedule=paper too, a request starts with the counts of those before it (in the paper, without counts)",
    )
    share_kept_set: bool = setting(True, SHARE_HELP)


@register
class Del(Method):
    """Chooses exit layer and draft length for every round, by the shadow tokens of all layers.

    A draft has at most ``d_max`` tokens and ends below the layer's confidence threshold. The token at which it ends is
    verified with the others (ours; Algorithm 1 drops it).

    Where the best draft length is 0 the round drafts nothing, and still counts (ours). Algorithm 1 does not use the
    length and always drafts; so does ``allow_no_draft=false``, which takes the best length from 1 on.

    The first choice uses the prompt's last tokens (appendix B.2). Algorithm 1 starts its lists empty after it, so the
    second choice depends on the first round alone. The authors' code keeps the prompt's counts as the oldest round,
    decayed by ω like any other; so does ``keep_prompt=true``. On the bundled ``tiny-early-exit`` (18 prompts, each
    with 128 output tokens) they differ little: without the prompt's counts 0.564 of the draft tokens are accepted and a
    round has 3.22 tokens, with them 0.552 and 3.17. So the default is that of the algorithm.

    With ``draft_bits`` the shadow tokens still come from the verification's states, which take no forward: acceptance
    rates are those of exits at full precision, and the objective, the paper's, counts layers whatever they cost.

    With ``schedule=ours`` matches are counted only in rounds where that pays (``selfspec.methods.payoff``): the shadow
    tokens of all layers take the LM head for each of them. Counts are carried from request to request, those of the
    prompt included. An exit layer whose live acceptance promises less than plain decoding is declined.

    In a batch the drafts share one exit layer, as ``selfspec.methods.sharing`` says, unless ``share_kept_set`` is off:
    the median of the requests' choices. Each request drafts with its own threshold of that layer, and still makes its
    own choices.
    """

    name = "del"
    summary = "early exit at the layer and length of most tokens per layer, chosen every round"
    source = "DEL (Entezari Zarch et al. 2025)"
    Settings = DelSettings
    settings: DelSettings
    learns = True

    def __init__(self, target: Target, settings: DelSettings) -> None:
        super().__init__(target, settings)
        layers = target.layer_count
        if layers < 2:
            raise InvalidSettingError("del needs a model of at least 2 layers to exit early from; take another method")
        self.boundaries = tuple(range(2, target.sublayer_count + 1, 2))
        self.kept = tuple(KeptSet.early_exit(layer, target.sublayer_count) for layer in range(1, layers))
        weights = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
        self.head = ShadowHead(target, int(LOGITS_SHARE * weights))
        self._lock = threading.Lock()
        self._carried = Statistics.empty(layers)
        self._worth = _Worth(layers)
        self.payoff = Payoff()
        self.ours = settings.schedule == "ours"
        self.records = tuple(
            Record(self.payoff, draft_cost(kept, self.draft_precision, target.dtype)) for kept in self.kept
        )

    @property
    def needs(self) -> Needs:
        """The hidden states after every layer, of the prompt's last tokens."""
        return Needs(prompt_rows=self.settings.context_window, prompt_states=frozenset(self.boundaries))

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return DelDrafter(self, prefill)

    @property
    def carried(self) -> Statistics:
        """The counts of earlier requests; empty if there are none, or if they are not carried over."""
        with self._lock:
            return self._carried

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One exit layer for the drafts of a batch, unless ``share_kept_set`` is off."""
        if not self.settings.share_kept_set:
            return list(drafts)
        shared = share_kept_set(drafts)
        for index, (drafter, draft) in enumerate(zip(drafters, shared, strict=True)):
            if isinstance(drafter, DelDrafter) and isinstance(draft, LayerDraft):
                shared[index] = drafter.draft_with(draft.kept)
        return shared

    def count(self, hidden_states: Mapping[int, torch.Tensor], rows: int) -> torch.Tensor:
        """Counts the matches in the first rows of a forward; see ``count_matches``.

        Args:
            hidden_states: the residual stream after every layer, by sublayer.
            rows: number of valid rows.
        """
        states = [hidden_states[boundary][:rows] for boundary in self.boundaries]
        return count_matches(*shadow_tokens(self.head, states))

    def choose(self, statistics: Statistics) -> Choice:
        """The choice for the next round, by statistics and settings."""
        return choose(statistics, self.settings.d_max, shortest=0 if self.settings.allow_no_draft else 1)

    def carry(self, counts: torch.Tensor) -> None:
        """Adds counts to those that later requests start with, if they do."""
        if self.ours or self.settings.carry_over:
            with self._lock:
                self._carried = self._carried.then(counts, self.settings.omega)

    def note(self, feedback: Feedback) -> None:
        """Counts a round of any request, and warns if drafting turns out to gain nothing."""
        layers = len(feedback.draft.kept.sublayers) // 2 if isinstance(feedback.draft, LayerDraft) else 0
        if layers and feedback.drafted:
            self.records[layers - 1].note_round(feedback.drafted, feedback.accepted)
        with self._lock:
            complaint = self._worth.after(layers, feedback.drafted, feedback.accepted)
        if complaint is not None:
            warnings.warn(complaint, NoGainWarning, stacklevel=2)

    def state(self) -> LearnedState:
        """The decayed counts of all requests so far.

        Raises:
            StateError: ``carry_over`` is off.
        """
        self._require_carry_over()
        with self._lock:
            return LearnedState(tensors={"sums": self._carried.sums.clone()})

    def restore(self, state: LearnedState) -> None:
        """Loads counts saved by a method with the same settings.

        Raises:
            StateError: they are none, or ``carry_over`` is off.
        """
        self._require_carry_over()
        sums, like = state.tensors.get("sums"), self._carried.sums
        if sums is None or sums.shape != like.shape or sums.dtype != like.dtype:
            raise StateError(f"the state has no counts for {self.target.layer_count - 1} exit layers; learn it again")
        if not bool(torch.isfinite(sums).all()) or bool((sums < 0).any()):
            raise StateError("the state's counts are not all numbers of at least 0; learn it again")
        with self._lock:
            self._carried = Statistics(sums.clone())

    def _require_carry_over(self) -> None:
        if not self.ours and not self.settings.carry_over:
            raise StateError("del starts every request afresh, so it has no state; set carry_over=true to keep one")


class DelDrafter(Drafter):
    """One request: its statistics and the choice for the coming round.

    Args:
        method: its method.
        prefill: of the request.

    Attributes:
        choice: the choice for the coming round.
    """

    def __init__(self, method: Del, prefill: Prefill) -> None:
        self._method = method
        self._probe = prefill.probe
        self._statistics = self._chosen_by = method.carried
        self._watches = False
        self._started = 0.0
        counted = self._statistics.is_empty
        if counted:
            self._count_prompt(prefill)
        self.choice = method.choose(self._chosen_by)
        if not counted and self._counts_now():
            self._count_prompt(prefill)
            self.choice = method.choose(self._chosen_by)

    def _count_prompt(self, prefill: Prefill) -> None:
        method = self._method
        with method.payoff.selection():
            counts = method.count(prefill.hidden_states, len(prefill.hidden_states[method.boundaries[0]]))
        self._chosen_by = self._statistics.then(counts, method.settings.omega)
        if method.ours or method.settings.keep_prompt:
            self._statistics = self._chosen_by
        if method.ours:
            method.carry(counts)

    def plan(self) -> Draft:
        """Drafts with the chosen exit layer; nothing where the best draft length is 0."""
        choice, method = self.choice, self._method
        self._watches = self._counts_now()
        self._started = method.payoff.clock()
        declined = method.ours and method.settings.allow_no_draft and self._record.declined
        if declined or not choice.draft_length:
            return NoDraft()
        kept = method.kept[choice.exit_layer - 1]
        return LayerDraft(kept, method.settings.d_max, stop=ConfidenceThreshold(choice.threshold))

    @property
    def _record(self) -> Record:
        """What came of the exit layer that it would draft with; an empty one where it drafts nothing."""
        return (
            self._method.records[self.choice.exit_layer - 1]
            if self.choice.draft_length
            else Record(self._method.payoff)
        )

    def _counts_now(self) -> bool:
        method = self._method
        if not method.ours:
            return True
        return method.payoff.pays(self._probe.remaining_tokens, self._record.gain)

    def draft_with(self, kept: KeptSet) -> LayerDraft:
        """Drafts with an exit layer of another request, and this request's own threshold of it.

        Args:
            kept: the kept set of an early exit.
        """
        exit_layer = len(kept.sublayers) // 2
        threshold = self.choice.threshold
        if exit_layer != self.choice.exit_layer:
            threshold = float(self._chosen_by.thresholds[exit_layer - 1])
        return LayerDraft(kept, self._method.settings.d_max, stop=ConfidenceThreshold(threshold))

    @property
    def watched(self) -> Collection[int]:
        """The hidden states after every layer, which give the shadow tokens, in rounds that are counted."""
        return self._method.boundaries if self._watches else ()

    def learn(self, feedback: Feedback) -> None:
        """Counts the round's matches, if they are to be counted, and chooses again."""
        method = self._method
        method.payoff.note_round(method.payoff.clock() - self._started, len(feedback.acceptance.rows))
        method.note(feedback)
        if not feedback.hidden_states:
            return
        # The valid rows are those whose context is committed, including the first one that the draft got wrong.
        with method.payoff.selection():
            counts = method.count(feedback.hidden_states, feedback.accepted + 1)
        method.carry(counts)
        self._statistics = self._chosen_by = self._statistics.then(counts, method.settings.omega)
        self.choice = method.choose(self._statistics)


class _Worth:
    """Tokens per loaded layer over all requests, the paper's eTPL (appendix B.4)."""

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._rounds = self._tokens = self._layers = self._drafted = self._accepted = 0
        self._told = False

    def after(self, exit_layer: int, drafted: int, accepted: int) -> str | None:
        """Counts a round; returns the text of a warning, once, if drafting has gained too little."""
        self._rounds += 1
        self._tokens += accepted + 1
        self._layers += drafted * exit_layer + self._layer_count
        self._drafted += drafted
        self._accepted += accepted
        gain = self._tokens * self._layer_count / self._layers
        if self._told or self._rounds < JUDGED_ROUNDS or gain >= LEAST_GAIN:
            return None
        self._told = True
        return (
            f"del gains nothing on this model: {self._accepted} of {self._drafted} draft tokens were accepted, and a "
            f"token took {self._layers / self._tokens:.1f} layers where plain decoding takes {self._layer_count}. It "
            "needs a model trained for early exit; choose another method for this one"
        )
