"""DEL: early exit whose layer and draft length follow what every layer would have drafted."""

import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import InvalidSettingError, NoGainWarning, StateError
from selfspec.methods.base import Drafter, Feedback, Method, Needs, Prefill
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.objective import tokens_per_layer
from selfspec.target.kept import KeptSet
from selfspec.target.stack import Target

LOGITS_SHARE = 0.005
"""Memory that the logits of one head call may take, as a share of the model's weights."""

JUDGED_ROUNDS, LEAST_GAIN = 64, 1.15
"""Warns if so many rounds have saved less than that factor in layers: the LM head costs too, and so does choosing."""


@dataclass(frozen=True)
class DelSettings(MethodSettings):
    """Settings of ``del``."""

    d_max: int = setting(18, "longest draft, in tokens", minimum=1, maximum=64)
    omega: float = setting(0.95, "weight of a round's counts in the next round", minimum=0.0, maximum=1.0)
    context_window: int = setting(
        32, "last tokens of the prompt that the first choice is made on", minimum=1, maximum=1024
    )
    keep_prompt: bool = setting(False, "later choices count the prompt's tokens too, as the oldest round")
    carry_over: bool = setting(False, "a request starts with the counts of those before it (the paper starts afresh)")


def shadow_tokens(
    target: Target, hidden_states: Sequence[torch.Tensor], rows_at_once: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What final norm and LM head read off intermediate hidden states: DEL's shadow tokens (section 4.2).

    All layers' rows go through the head together, in one call unless that would take too much memory.

    Args:
        target: the model.
        hidden_states: for each layer the residual stream behind it, ``[rows, hidden]``.
        rows_at_once: most rows of a head call.

    Returns:
        The greedy tokens, long ``[layers, rows]``, and their probabilities, float32 ``[layers, rows]``.
    """
    tokens, confidences = [], []
    for part in torch.split(torch.cat(list(hidden_states)), rows_at_once):
        logits = target.logits(part)
        tokens.append(logits.argmax(-1))
        confidences.append(torch.softmax(logits, -1, dtype=torch.float32).amax(-1))
    shape = len(hidden_states), -1
    return torch.cat(tokens).view(shape), torch.cat(confidences).view(shape)


def count_matches(tokens: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
    """A round's ``c``, ``u - c``, ``tcs`` and ``fcs`` for every exit layer (sections 4.2 and 4.4).

    Args:
        tokens: long ``[L, rows]``, the shadow tokens of the valid rows; the last layer's are the target's own.
        confidences: float32 ``[L, rows]``.

    Returns:
        float64 ``[2, 2, L - 1]`` on the CPU: (how many, sum of confidences) × (matched, mismatched) × layer.
    """
    matched = tokens[:-1] == tokens[-1]
    kinds = torch.stack([matched, ~matched]).to(confidences.dtype)
    return torch.stack([kinds.sum(-1), (kinds * confidences[:-1]).sum(-1)]).cpu().double()


@dataclass(frozen=True)
class Statistics:
    """The decayed sums ``S(a) = Σ ω^(r-i-1) a[i]`` over the rounds so far, as running sums.

    Attributes:
        sums: as ``count_matches`` gives them for one round.
    """

    sums: torch.Tensor

    @classmethod
    def empty(cls, layer_count: int) -> "Statistics":
        """Before any round."""
        return cls(torch.zeros(2, 2, layer_count - 1, dtype=torch.float64))

    def then(self, counts: torch.Tensor, omega: float) -> "Statistics":
        """With one more round."""
        return Statistics(omega * self.sums + counts)

    @property
    def acceptance(self) -> torch.Tensor:
        """Expected acceptance rate ``α`` of every exit layer (equation 2), float64 ``[L - 1]``."""
        matched, mismatched = self.sums[0, 0], self.sums[0, 1]
        return matched / (matched + mismatched)

    @property
    def thresholds(self) -> torch.Tensor:
        """Midpoint of mean matched and mean mismatched confidence, ``τ`` (equation 3), float64 ``[L - 1]``.

        A mean over no token counts as 0 (ours; the paper leaves it open).
        """
        counts, confidences = self.sums[0], self.sums[1]
        return torch.where(counts > 0, confidences / counts, torch.zeros_like(counts)).mean(0)


@dataclass(frozen=True)
class Choice:
    """What is to draft the next round.

    Attributes:
        exit_layer: ``E``, layers of the draft.
        draft_length: ``γ``, the draft length of highest objective; 0 says that no draft is worth its time.
        threshold: ``τ`` of that layer: the confidence under which the draft ends.
    """

    exit_layer: int
    draft_length: int
    threshold: float


def choose(statistics: Statistics, d_max: int) -> Choice:
    """Exit layer and draft length of highest TPL, over all layers but the last and all lengths (section 4.3).

    Args:
        statistics: with at least one round.
        d_max: longest draft.
    """
    alphas = statistics.acceptance
    layer_count = len(alphas) + 1
    layers = torch.arange(1, layer_count)
    lengths = torch.arange(d_max + 1)
    objective = tokens_per_layer(alphas[:, None], layers[:, None], lengths, layer_count)
    index, length = divmod(int(objective.argmax()), d_max + 1)
    return Choice(int(layers[index]), length, float(statistics.thresholds[index]))


@register
class Del(Method):
    """Chooses exit layer and draft length anew for every round, from the shadow tokens of all layers.

    Drafting goes on up to ``d_max`` tokens while the draft's confidence reaches the layer's threshold. Where the best
    draft length is 0 the round drafts nothing (ours; Algorithm 1 never looks at the length), and learns all the same.
    The token at which the draft ends is verified with the others (ours; Algorithm 1 drops it).
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
        self._rows_at_once = _rows_at_once(target)
        self._lock = threading.Lock()
        self._carried = Statistics.empty(layers)
        self._worth = _Worth(layers)

    @property
    def needs(self) -> Needs:
        """The states behind every layer, of the prompt's last tokens."""
        return Needs(prompt_rows=self.settings.context_window, prompt_states=frozenset(self.boundaries))

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        rows = len(prefill.hidden_states[self.boundaries[0]])
        with self._lock:
            carried = self._carried
        return _DelDrafter(self, carried, self.count(prefill.hidden_states, rows))

    def count(self, hidden_states: Mapping[int, torch.Tensor], rows: int) -> torch.Tensor:
        """What the first rows of a forward teach; see ``count_matches``.

        Args:
            hidden_states: the residual stream behind every layer, by sublayer.
            rows: the valid ones.
        """
        states = [hidden_states[boundary][:rows] for boundary in self.boundaries]
        return count_matches(*shadow_tokens(self.target, states, self._rows_at_once))

    def note(self, counts: torch.Tensor, feedback: Feedback) -> None:
        """Takes notice of a round of any request, and warns when drafting turns out to gain nothing.

        Args:
            counts: what it taught.
            feedback: what came of it.
        """
        layers = len(feedback.draft.kept.sublayers) // 2 if isinstance(feedback.draft, LayerDraft) else 0
        with self._lock:
            if self.settings.carry_over:
                self._carried = self._carried.then(counts, self.settings.omega)
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
        """Takes up the counts that an equal method has learned.

        Raises:
            StateError: they are none, or ``carry_over`` is off.
        """
        self._require_carry_over()
        sums, like = state.tensors.get("sums"), self._carried.sums
        if sums is None or sums.shape != like.shape or sums.dtype != like.dtype:
            raise StateError(f"the state has no counts for {self.target.layer_count - 1} exit layers; learn it anew")
        if not bool(torch.isfinite(sums).all()) or bool((sums < 0).any()):
            raise StateError("the state's counts are not all numbers of at least 0; learn it anew")
        with self._lock:
            self._carried = Statistics(sums.clone())

    def _require_carry_over(self) -> None:
        if not self.settings.carry_over:
            raise StateError("del starts every request afresh, so it has no state; set carry_over=true to keep one")


class _DelDrafter(Drafter):
    """One request: its statistics and the choice for the coming round."""

    def __init__(self, method: Del, carried: Statistics, prompt: torch.Tensor) -> None:
        self._method = method
        with_prompt = carried.then(prompt, method.settings.omega)
        # Algorithm 1 empties its lists after the first choice.
        self._statistics = with_prompt if method.settings.keep_prompt else carried
        self.choice = choose(with_prompt, method.settings.d_max)

    def plan(self) -> Draft:
        """Drafts up to the chosen exit layer, as long as it is confident; nothing where drafts are not worth it."""
        choice = self.choice
        if not choice.draft_length:
            return NoDraft()
        kept = self._method.kept[choice.exit_layer - 1]
        return LayerDraft(kept, self._method.settings.d_max, stop=ConfidenceThreshold(choice.threshold))

    @property
    def watched(self) -> Collection[int]:
        """The states behind every layer, of which the shadow tokens are read."""
        return self._method.boundaries

    def learn(self, feedback: Feedback) -> None:
        """Counts the round's matches and chooses anew."""
        # The valid rows: all that stand on committed tokens, the first one that the draft got wrong included.
        counts = self._method.count(feedback.hidden_states, feedback.accepted + 1)
        self._statistics = self._statistics.then(counts, self._method.settings.omega)
        self.choice = choose(self._statistics, self._method.settings.d_max)
        self._method.note(counts, feedback)


class _Worth:
    """What drafting has been worth over all requests: tokens per loaded layer, the paper's eTPL (appendix B.4)."""

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._rounds = self._tokens = self._layers = self._drafted = self._accepted = 0
        self._told = False

    def after(self, exit_layer: int, drafted: int, accepted: int) -> str | None:
        """Counts a round; returns the complaint, once, where drafting turns out to be worth little."""
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


def _rows_at_once(target: Target) -> int:
    """Rows of a head call whose logits, and their probabilities in float32, take no more than ``LOGITS_SHARE``."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
    row = target.vocab_size * (target.dtype.itemsize + torch.float32.itemsize)
    return max(1, int(LOGITS_SHARE * weights) // row)
