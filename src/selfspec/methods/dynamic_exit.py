"""DEL: early exit at a layer and for a draft length chosen by what every layer would have drafted.

``Statistics`` are the decayed sums of the shadow tokens that matched, by which ``choose_exit`` finds the exit layer and
the length of most tokens per layer.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.decoding.draft import ConfidenceThreshold, Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.errors import InvalidSettingError, NoGainWarning, StateError
from selfspec.methods.objective import tokens_per_layer
from selfspec.methods.payoff import Record
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
    allow_no_draft: bool = setting(
        True, "draft nothing where the best draft length is 0 (ours; Algorithm 1 drafts in every round)"
    )
    least_length: int | None = setting(
        None,
        "shortest length in the choice of the exit layer: 0 in section 4.3; none is 0 where a round may draft nothing, "
        "1 where it always drafts",
        minimum=0,
        maximum=1,
    )
    drop_unsure: bool = setting(
        False, "do not verify a token below the threshold (Algorithm 1, lines 9 to 12); false verifies it too (ours)"
    )
    no_mean: str = setting(
        "zero",
        "where no token matched, or none did not: that mean is 0 (zero, ours), or the draft does not stop (never: 0 "
        "/ 0 in equation 3)",
        choices=("zero", "never"),
    )
    dynamic_length: bool = setting(
        True, "drafts end below the confidence threshold; false drafts the chosen length (the ablation DEL-ℰ)"
    )
    fixed_exit: int | None = setting(
        None, "the exit layer of every draft; none chooses one (fixed: the ablation DEL-γ)", minimum=1
    )
    shallowest_exit: int = setting(1, "the first exit layer to choose from (4 in the ablation DEL-ℰ-lim)", minimum=1)
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
        """Expected acceptance rate ``α`` of every exit layer (equation 2), float64 ``[L - 1]``.

        ``S(u)`` is the number of rows that were compared, as in the port of KnapSpec's authors. Taken literally
        ``u_r`` is the index of the first mismatch, one less than the ``u_r + 1`` rows that ``c_r`` counts, so that
        rates would pass 1.
        """
        matched, mismatched = self.sums[0, 0], self.sums[0, 1]
        return matched / (matched + mismatched)

    def thresholds(self, defined: bool = False) -> torch.Tensor:
        """Midpoint of mean matched and mean mismatched confidence, ``τ`` (equation 3), float64 ``[L - 1]``.

        A mean over no token counts as 0 (ours). Equation 3 is 0 / 0 there, which no confidence is below: with
        ``defined`` the threshold is then 0, so that drafts do not stop.
        """
        counts, confidences = self.sums[0], self.sums[1]
        means = torch.where(counts > 0, confidences / counts, torch.zeros_like(counts)).mean(0)
        return torch.where((counts > 0).all(0), means, torch.zeros_like(means)) if defined else means


@dataclass(frozen=True)
class Exit:
    """The next round's layers ``E``, draft length ``γ`` (0: no draft is worth its time), and the layers' ``τ``."""

    exit_layer: int
    draft_length: int
    threshold: float


def choose_exit(
    statistics: Statistics, d_max: int, shortest: int = 0, exits: Sequence[int] = (), *, defined: bool = False
) -> Exit:
    """Exit layer and draft length of highest TPL (equation 1), over some exit layers and all lengths.

    The lengths of section 4.3 start at 0, where TPL is ``1 / L`` for every layer. So the paper does not define the exit
    layer where 0 is best; it is the first one here. With ``shortest`` 1 it is the best one for a draft (ours).

    ``exits`` are the layers to choose from, ascending; by default all but the last. ``defined`` as in ``thresholds``.
    """
    alphas = statistics.acceptance
    layer_count = len(alphas) + 1
    layers = torch.tensor(exits or range(1, layer_count))
    lengths = torch.arange(shortest, d_max + 1)
    objective = tokens_per_layer(alphas[layers - 1, None], layers[:, None], lengths, layer_count)
    place, length_index = divmod(int(objective.argmax()), len(lengths))
    layer = int(layers[place])
    return Exit(layer, int(lengths[length_index]), float(statistics.thresholds(defined)[layer - 1]))


@register
class Del(SelectingMethod):
    """Chooses exit layer and draft length for every round, by the shadow tokens of all layers.

    A draft has at most ``d_max`` tokens and ends below the layer's confidence threshold. The token at which it ends is
    verified with the others (ours); Algorithm 1 drops it, as ``drop_unsure`` does.

    Where the best draft length is 0 the round drafts nothing, and still counts (ours). Algorithm 1 does not use the
    length and always drafts; so does ``allow_no_draft=false``, with the best length from ``least_length`` on.

    The ablations of figure 3(a): DEL-ℰ is ``dynamic_length=false``, which drafts the chosen length, 0 included; DEL-γ
    is ``fixed_exit``; DEL-ℰ-lim is ``shallowest_exit``.

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
        self.exits = _exits(settings, layers)
        self.kept = tuple(KeptSet.early_exit(layer, target.sublayer_count) for layer in range(1, layers))
        self.head = ShadowHead(target, int(LOGITS_SHARE * sum(each.nbytes for each in target.model.parameters())))
        self._carried = Statistics.empty(layers)
        self._worth = _Worth(layers)
        self._records = [self.new_record(kept) for kept in self.kept]

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
        settings = self.settings
        shortest = int(not settings.allow_no_draft) if settings.least_length is None else settings.least_length
        return choose_exit(statistics, settings.d_max, shortest, self.exits, defined=settings.no_mean == "never")

    def stop(self, threshold: float) -> ConfidenceThreshold | None:
        """What ends a draft; ``None`` where it has the chosen length."""
        return ConfidenceThreshold(threshold) if self.settings.dynamic_length else None

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
        """Drafts with the chosen exit layer; nothing where the best draft length is 0, if that may be."""
        method, settings, length = self.method, self.method.settings, self.exit.draft_length
        if not length and (settings.allow_no_draft or not settings.dynamic_length):
            return NoDraft()
        kept = method.kept[self.exit.exit_layer - 1]
        limit = settings.d_max if settings.dynamic_length else length
        return LayerDraft(kept, limit, stop=method.stop(self.exit.threshold), drop_unsure=settings.drop_unsure)

    def adapted(self, draft: Draft) -> Draft:
        """A draft with the exit layer of another request, and this request's own threshold of it."""
        if not isinstance(draft, LayerDraft) or len(draft.kept.sublayers) == 2 * self.exit.exit_layer:
            return draft
        method = self.method
        thresholds = self._chosen_by.thresholds(defined=method.settings.no_mean == "never")
        return replace(draft, stop=method.stop(float(thresholds[len(draft.kept.sublayers) // 2 - 1])))

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


def _exits(settings: DelSettings, layer_count: int) -> tuple[int, ...]:
    """The exit layers to choose from; refuses those that the model does not have."""
    fixed, first = settings.fixed_exit, settings.shallowest_exit
    if fixed is not None and first > 1:
        raise InvalidSettingError("fixed_exit leaves nothing to choose; leave shallowest_exit out")
    for name, layer in (("fixed_exit", fixed), ("shallowest_exit", first)):
        if layer is not None and layer >= layer_count:
            raise InvalidSettingError(
                f"{name} {layer} is not below the {layer_count} layers of this model; give 1 to {layer_count - 1}"
            )
    return tuple(range(first, layer_count)) if fixed is None else (fixed,)


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
