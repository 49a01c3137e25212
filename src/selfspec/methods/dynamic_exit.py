"""DEL: early exit at a layer and for a draft length chosen by what every layer would have drafted."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import InvalidSettingError, NoGainWarning, StateError
from selfspec.methods.objective import tokens_per_layer
from selfspec.methods.payoff import Record, draft_cost
from selfspec.methods.registry import register
from selfspec.methods.selecting import SelectingDrafter, SelectingMethod, SelectingSettings
from selfspec.methods.settings import fraction, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target

LOGITS_SHARE = 0.005
"""Largest memory of the logits of shadow tokens, as a share of the model's weights."""

JUDGED_ROUNDS, LEAST_GAIN = 64, 1.15
"""Rounds after which it warns, and the factor in layers per token below which it does. LM head and choices cost too."""


@dataclass(frozen=True)
class DelSettings(SelectingSettings):
    """Settings of ``del``."""

    d_max: int = setting(18, "longest draft, in tokens", minimum=1, maximum=64)
    omega: float = fraction(0.95, "factor by which a round's counts decay each round (ω)")
    context_window: int = setting(32, "last prompt tokens that the first choice is based on", minimum=1, maximum=1024)
    keep_prompt: bool = setting(False, "later choices count the prompt's tokens too (authors' code)")
    allow_no_draft: bool = setting(True, "draft nothing where the best draft length is 0 (ours)")
    carry_over: bool = setting(False, "with schedule=paper too, start with the counts of earlier requests")


def shadow_tokens(head: ShadowHead, hidden_states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy tokens that final norm and LM head give for intermediate hidden states (section 4.2).

    All layers' rows (``[rows, hidden]`` each) go through the head in a single pass, as in the paper, if the head can be
    sliced. Returns the tokens, long ``[layers, rows]``, and their probabilities, float32 ``[layers, rows]``.
    """
    tokens, confidences = head.read(torch.cat(list(hidden_states)))
    shape = len(hidden_states), -1
    return tokens.view(shape), confidences.view(shape)


def count_matches(tokens: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
    """A round's ``c``, ``u - c``, ``tcs`` and ``fcs`` for every exit layer (sections 4.2 and 4.4).

    ``tokens``, long ``[L, rows]``, are the shadow tokens of the valid rows, the last layer's being the target's own;
    ``confidences`` are float32 ``[L, rows]``. Returns float64 ``[2, 2, L - 1]`` on the CPU: (count, sum of
    confidences) × (matched, mismatched) × layer.
    """
    matched = tokens[:-1] == tokens[-1]
    kinds = torch.stack([matched, ~matched]).to(confidences.dtype)
    return torch.stack([kinds.sum(-1), (kinds * confidences[:-1]).sum(-1)]).cpu().double()


@dataclass(frozen=True)
class Statistics:
    """The decayed sums ``S(a) = Σ ω^(r-i-1) a[i]`` over the rounds so far, in the form of ``count_matches``."""

    sums: torch.Tensor

    @classmethod
    def empty(cls, layer_count: int) -> "Statistics":
        """The sums before the first round."""
        return cls(torch.zeros(2, 2, layer_count - 1, dtype=torch.float64))

    def then(self, counts: torch.Tensor, omega: float) -> "Statistics":
        """The sums after one more round."""
        return Statistics(omega * self.sums + counts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not bool(self.sums[0].any())

    @property
    def acceptance(self) -> torch.Tensor:
        """Expected acceptance rate ``α`` of every exit layer (equation 2), float64 ``[L - 1]``."""
        matched, mismatched = self.sums[0, 0], self.sums[0, 1]
        return matched / (matched + mismatched)

    @property
    def thresholds(self) -> torch.Tensor:
        """Midpoint of mean matched and mean mismatched confidence, ``τ`` (equation 3), float64 ``[L - 1]``.

        A mean over no token counts as 0 (ours; the paper does not define it).
        """
        counts, confidences = self.sums[0], self.sums[1]
        return torch.where(counts > 0, confidences / counts, torch.zeros_like(counts)).mean(0)


@dataclass(frozen=True)
class Exit:
    """The next round's layers ``E``, draft length ``γ`` (0: no draft is worth its time), and the layers' ``τ``."""

    exit_layer: int
    draft_length: int
    threshold: float


def choose_exit(statistics: Statistics, d_max: int, shortest: int = 0) -> Exit:
    """Exit layer and draft length of highest TPL (equation 1), over all layers but the last and all lengths.

    The lengths of section 4.3 start at 0, where TPL is ``1 / L`` for every layer. So the paper does not define the exit
    layer where 0 is best; with ``shortest`` 1 it is the best one for a draft (ours).
    """
    alphas = statistics.acceptance
    layer_count = len(alphas) + 1
    layers = torch.arange(1, layer_count)
    lengths = torch.arange(shortest, d_max + 1)
    objective = tokens_per_layer(alphas[:, None], layers[:, None], lengths, layer_count)
    layer_index, length_index = divmod(int(objective.argmax()), len(lengths))
    return Exit(int(layers[layer_index]), int(lengths[length_index]), float(statistics.thresholds[layer_index]))


@register
class Del(SelectingMethod):
    """Chooses exit layer and draft length for every round, by the shadow tokens of all layers.

    A draft has at most ``d_max`` tokens and ends below the layer's confidence threshold. The token at which it ends is
    verified with the others (ours; Algorithm 1 drops it).

    Where the best draft length is 0 the round drafts nothing, and still counts (ours). Algorithm 1 does not use the
    length and always drafts; so does ``allow_no_draft=false``, which takes the best length from 1 on.

    The first choice uses the prompt's last tokens (appendix B.2). Algorithm 1 starts its lists empty after it, so the
    second choice depends on the first round alone. The authors' code keeps the prompt's counts as the oldest round,
    decayed by ω like any other; so does ``keep_prompt=true``.

    With ``draft_bits`` the shadow tokens still come from the verification's states, which take no forward: acceptance
    rates are those of exits at full precision, and the objective, the paper's, counts layers whatever they cost.

    With ``schedule=ours`` matches are counted only in rounds where that pays: the shadow tokens of all layers take the
    LM head for each of them. Counts are carried from request to request, those of the prompt included. A batch shares
    the median exit layer; each request drafts with its own threshold of that layer.
    """

    name = "del"
    summary = "early exit at the layer and length of most tokens per layer, chosen every round"
    source = "DEL (Entezari Zarch et al. 2025)"
    Settings = DelSettings
    settings: DelSettings

    def __init__(self, target: Target, settings: DelSettings) -> None:
        super().__init__(target, settings)
        layers = target.layer_count
        if layers < 2:
            raise InvalidSettingError("del needs a model of at least 2 layers to exit early from; take another method")
        self.kept = tuple(KeptSet.early_exit(layer, target.sublayer_count) for layer in range(1, layers))
        self.head = ShadowHead(target, int(LOGITS_SHARE * sum(each.nbytes for each in target.model.parameters())))
        self._carried = Statistics.empty(layers)
        self._worth = _Worth(layers)
        self._records = [
            Record(self.payoff, draft_cost(kept, self.draft_precision, target.dtype)) for kept in self.kept
        ]

    @property
    def watched(self) -> tuple[int, ...]:
        """The states after every layer, which give the shadow tokens."""
        return tuple(range(2, self.target.sublayer_count + 1, 2))

    @property
    def needs(self) -> Needs:
        """The hidden states after every layer, of the prompt's last tokens."""
        return Needs(prompt_rows=self.settings.context_window, prompt_states=frozenset(self.watched))

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return DelDrafter(self, prefill)

    def record_of(self, exit_layer: int) -> Record:
        """What came of an exit layer, over all requests; an empty record for 0, which drafts nothing."""
        return self._records[exit_layer - 1] if exit_layer else Record(self.payoff)

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One exit layer for the drafts of a batch, each with its request's own threshold."""
        shared = super().arrange(drafters, drafts)
        pairs = zip(drafters, shared, strict=True)
        return [one.adapted(draft) if isinstance(one, DelDrafter) else draft for one, draft in pairs]

    def count(self, hidden_states: Mapping[int, torch.Tensor], rows: int) -> torch.Tensor:
        """Counts the matches in the first rows of a forward; see ``count_matches``."""
        states = [hidden_states[boundary][:rows] for boundary in self.watched]
        return count_matches(*shadow_tokens(self.head, states))

    def choose(self, statistics: Statistics) -> Exit:
        """The exit of the next round, by statistics and settings."""
        return choose_exit(statistics, self.settings.d_max, shortest=0 if self.settings.allow_no_draft else 1)

    @property
    def carried(self) -> Statistics:
        """The counts of earlier requests; empty if there are none, or if they are not carried over."""
        with self._lock:
            return self._carried

    def carry(self, counts: torch.Tensor) -> None:
        """Adds counts to those that later requests start with, if they do."""
        if self.ours or self.settings.carry_over:
            with self._lock:
                self._carried = self._carried.then(counts, self.settings.omega)

    def note(self, feedback: Feedback) -> None:
        """Counts a round of any request, and warns if drafting turns out to gain nothing."""
        layers = len(feedback.draft.kept.sublayers) // 2 if isinstance(feedback.draft, LayerDraft) else 0
        self.record_of(layers).note_round(feedback.drafted, feedback.accepted)
        with self._lock:
            complaint = self._worth.after(layers, feedback.drafted, feedback.accepted)
        if complaint is not None:
            warnings.warn(complaint, NoGainWarning, stacklevel=2)

    def state(self) -> LearnedState:
        """The decayed counts of all requests so far; a ``StateError`` if they are not carried over."""
        if not self.ours and not self.settings.carry_over:
            raise StateError("del starts every request afresh, so it has no state; set carry_over=true to keep one")
        return LearnedState(tensors={"sums": self.carried.sums.clone()})

    def restore(self, state: LearnedState) -> None:
        """Loads counts saved by a method with the same settings."""
        sums, like = state.tensors.get("sums"), self.state().tensors["sums"]
        if sums is None or sums.shape != like.shape or sums.dtype != like.dtype:
            raise StateError(f"the state has no counts for {self.target.layer_count - 1} exit layers; learn it again")
        if not bool(torch.isfinite(sums).all()) or bool((sums < 0).any()):
            raise StateError("the state's counts are not all numbers of at least 0; learn it again")
        with self._lock:
            self._carried = Statistics(sums.clone())


class DelDrafter(SelectingDrafter):
    """One request: its statistics, and ``exit``, the exit of the coming round."""

    method: Del

    def __init__(self, method: Del, prefill: Prefill) -> None:
        super().__init__(method, prefill)
        self._statistics = self._chosen_by = method.carried
        if self._statistics.is_empty:
            self._count_prompt(prefill)
        else:
            self.exit = method.choose(self._chosen_by)
            if self.pays():
                self._count_prompt(prefill)

    def _count_prompt(self, prefill: Prefill) -> None:
        method = self.method
        with method.payoff.selection():
            counts = method.count(prefill.hidden_states, len(prefill.hidden_states[method.watched[0]]))
        self._chosen_by = self._statistics.then(counts, method.settings.omega)
        if method.ours or method.settings.keep_prompt:
            self._statistics = self._chosen_by
        if method.ours:
            method.carry(counts)
        self.exit = method.choose(self._chosen_by)

    def watches(self) -> bool:
        """In the rounds whose matches are counted."""
        return self.pays()

    @property
    def record(self) -> Record:
        """What came of the exit layer that it would draft with."""
        return self.method.record_of(self.exit.exit_layer if self.exit.draft_length else 0)

    @property
    def declined(self) -> bool:
        """Whether its exit layer promises less than plain decoding, where it may draft nothing."""
        return self.method.settings.allow_no_draft and super().declined

    def draft(self) -> Draft:
        """Drafts with the chosen exit layer; nothing where the best draft length is 0."""
        if not self.exit.draft_length:
            return NoDraft()
        kept = self.method.kept[self.exit.exit_layer - 1]
        return LayerDraft(kept, self.method.settings.d_max, stop=ConfidenceThreshold(self.exit.threshold))

    def adapted(self, draft: Draft) -> Draft:
        """A draft with the exit layer of another request, and this request's own threshold of it."""
        if not isinstance(draft, LayerDraft) or len(draft.kept.sublayers) == 2 * self.exit.exit_layer:
            return draft
        threshold = float(self._chosen_by.thresholds[len(draft.kept.sublayers) // 2 - 1])
        return replace(draft, stop=ConfidenceThreshold(threshold))

    def judge(self, feedback: Feedback, seconds: float) -> None:
        """Counts a round in the record of the exit layer that drafted it, its own or that of its batch."""
        self.method.note(feedback)

    def keep(self, feedback: Feedback) -> None:
        """Counts the round's matches, if they are to be counted, and chooses again."""
        if not feedback.hidden_states:
            return
        method = self.method
        # The valid rows are those whose context is committed, including the first one that the draft got wrong.
        with method.payoff.selection():
            counts = method.count(feedback.hidden_states, feedback.accepted + 1)
        method.carry(counts)
        self._statistics = self._chosen_by = self._statistics.then(counts, method.settings.omega)
        self.exit = method.choose(self._statistics)


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
