"""CLaSp: which layers to skip, chosen by dynamic programming over the hidden states of the last accepted token."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.decoding.probe import SelectionSteps, run_selection
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods.base import Method
from selfspec.methods.budget import RATIO_HELP, default_skip_ratio
from selfspec.methods.payoff import SCHEDULE_HELP, Payoff, Record, draft_cost
from selfspec.methods.precision_settings import PrecisionSettings, check_selection
from selfspec.methods.registry import register
from selfspec.methods.settings import setting
from selfspec.methods.sharing import SHARE_HELP, share_kept_set
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class ClaspSettings(PrecisionSettings):
    """Settings of ``clasp``."""

    skipped_layers: int | None = setting(
        None, "layers that drafts skip (M; 44 of 80 in the paper); none takes skip_ratio", minimum=1
    )
    skip_ratio: float | None = setting(
        None, f"the same as a share of all layers (0.5 to 0.6 in the paper); {RATIO_HELP}", minimum=0.0, maximum=1.0
    )
    update_interval: int = setting(
        32, "rounds between two choices of layers, at least (the paper names none; it got slower above 128)", minimum=1
    )
    schedule: str = setting(
        "ours",
        f"when it chooses after the prompt: {SCHEDULE_HELP}, every update_interval rounds",
        choices=("ours", "paper"),
    )
    draft_exit_threshold: float = setting(
        0.7, "stop drafting after a token less confident than this; 0 never stops", minimum=0.0, maximum=1.0
    )
    draft_length: int = setting(12, "most draft tokens of a round (K; the paper names none)", minimum=1, maximum=64)
    fixed_first_layers: int = setting(0, "layers at the start that are never skipped (10 in figure 3b)", minimum=0)
    fixed_last_layers: int = setting(0, "layers at the end that are never skipped (10 in figure 3b)", minimum=0)
    fused_selection: bool = setting(
        False,
        "run a choice in the same forward as the next verification, so that weights are read once; its layers draft "
        "one round later",
    )
    share_kept_set: bool = setting(True, SHARE_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skipped_layers is not None and self.skip_ratio is not None:
            raise InvalidSettingError("skipped_layers and skip_ratio both set the number of layers; give only one")
        check_selection(self, fused=self.fused_selection)


@dataclass(frozen=True)
class Row:
    """Row ``i`` of Algorithm 1, for the numbers ``j`` of skipped layers from which ``M`` can still be reached.

    Attributes:
        lowest: ``j`` of the first state.
        states: ``[n, hidden]``, ``g(i, lowest) … g(i, lowest + n - 1)``.
        first_choice: the smallest ``j`` that can be reached both by running and by skipping layer ``i - 1``.
        runs: bool ``[c]``, for ``first_choice`` and the ``j`` after it: whether running was the better of the two.
    """

    lowest: int
    states: torch.Tensor
    first_choice: int
    runs: torch.Tensor


def program(target_states: torch.Tensor, layers: range, skips: int) -> SelectionSteps[list[Row]]:
    """Algorithm 1 (equation 2), row by row; a row runs its layer once, over all its states.

    ``g(i, j)`` is the nearer to ``h(i)``, in cosine, of ``g(i-1, j-1)`` (skip layer ``i-1``) and ``f(g(i-1, j))`` (run
    it). With no layer skipped it is ``h(i)`` itself, with all skipped ``h(0)``; neither takes a forward. The paper
    computes every ``j`` up to ``M``. Here those from which ``M`` cannot be reached any more are left out, which
    changes no choice.

    Args:
        target_states: ``[n + 1, hidden]``, the target's residual stream before each of the layers and after the last.
        layers: the ``n`` layers to choose from, without a gap.
        skips: ``M``, 1 to ``n``.

    Returns:
        Rows 1 to ``n``.
    """
    rows: list[Row] = []
    lowest, states = 0, target_states[:1]
    for done, layer in enumerate(layers, start=1):
        least = skips - (len(layers) - done)  # with fewer skipped so far M cannot be reached
        first = max(1, least)
        choices = max(0, min(done - 1, skips) + 1 - first)
        aim = target_states[done]
        skipped = states[first - 1 - lowest : min(done, skips) - lowest]
        runs, chosen = states.new_empty(0, dtype=torch.bool), skipped
        if choices:
            ran = yield from _run_layer(layer, states[first - lowest : first - lowest + choices])
            similarity = functional.cosine_similarity(torch.cat([ran, skipped[:choices]]).float(), aim.float(), dim=-1)
            runs = similarity[:choices] > similarity[choices:]
            chosen = torch.cat([torch.where(runs[:, None], ran, skipped[:choices]), skipped[choices:]])
        lowest = max(0, least)
        states = torch.cat([aim[None], chosen]) if lowest == 0 else chosen
        rows.append(Row(lowest, states, first, runs))
    return rows


def _run_layer(layer: int, states: torch.Tensor) -> SelectionSteps[torch.Tensor]:
    """Attention and MLP of a layer: ``[count, hidden]`` in and out."""
    after_attention = yield 2 * layer, states[:, None]
    after_layer = yield 2 * layer + 1, after_attention
    return after_layer[:, 0]


def choose_skipped(target_states: torch.Tensor, layers: range, skips: int) -> SelectionSteps[tuple[int, ...]]:
    """Runs Algorithm 1 and backtracks from ``(L, M)``.

    Args:
        target_states: as for ``program``.
        layers: as for ``program``.
        skips: as for ``program``.

    Returns:
        The ``M`` layers to skip, ascending.
    """
    rows = yield from program(target_states, layers, skips)
    runs: list[bool] = torch.cat([row.runs for row in rows]).tolist()  # the only transfer to the host
    skipped: list[int] = []
    left, end = skips, len(runs)
    for layer, row in zip(reversed(layers), reversed(rows), strict=True):
        end -= len(row.runs)
        choice = left - row.first_choice
        ran = left == 0 or (choice < len(row.runs) and runs[end + choice])
        if not ran:
            skipped.append(layer)
            left -= 1
    return tuple(reversed(skipped))


@register
class Clasp(Method):
    """Skips whole layers, chosen again every ``update_interval`` rounds for the current context.

    A choice uses the hidden states of the last accepted token, which the last verification computed; before the first
    round those of the prompt's last token. A choice costs about one verification. Memory above plain decoding: one
    token's hidden states and, during a choice, one state for each candidate ``j``.

    With ``schedule=ours`` the layers are chosen only where that pays (``selfspec.methods.payoff``), and at least
    ``update_interval`` rounds after the last choice; until then a request drafts with the last choice of any request.
    Layers whose live acceptance promises less than plain decoding are declined. With ``schedule=paper`` a choice
    belongs to its context, so nothing is carried from one request to the next.

    The default ``update_interval`` is measured on SmolLM2-135M (six chat messages, 128 output tokens each), with 0.2 of
    the layers skipped: intervals 8, 16, 32, 64 and 128 accept 0.72, 0.73, 0.72, 0.71 and 0.71 of the draft tokens,
    commit 2.63, 2.57, 2.47, 2.43 and 2.43 tokens a round, and spend 6.0, 3.7, 2.0, 1.0 and 1.2 % of the time on
    choices. ``skip_ratio`` goes by the model's size (``selfspec.methods.budget``).

    With ``draft_bits`` the program runs layers at the precision at which they draft. The states that skip nothing come
    from the verification, so they remain the target's.

    In a batch the layer drafts share one kept set, as ``selfspec.methods.sharing`` says, unless ``share_kept_set`` is
    off. Each request still makes its own choices.
    """

    name = "clasp"
    summary = "skips the layers that a dynamic program finds for the current context"
    source = "CLaSp (Chen et al. 2025)"
    Settings = ClaspSettings
    settings: ClaspSettings
    learns = True

    def __init__(self, target: Target, settings: ClaspSettings) -> None:
        super().__init__(target, settings)
        self.layers = range(settings.fixed_first_layers, target.layer_count - settings.fixed_last_layers)
        self.skips = _skip_count(settings, target, len(self.layers))
        self.boundaries = frozenset(range(2 * self.layers.start, 2 * self.layers.stop + 1, 2))
        self.payoff = Payoff()
        self._lock = threading.Lock()
        self._choice: Choice | None = None

    @property
    def needs(self) -> Needs:
        """The hidden states of the prompt's last token, and cache slots for the longest row of the program."""
        longest_row = min(self.skips, len(self.layers) - self.skips)
        return Needs(probe_rows=longest_row, prompt_rows=1, prompt_states=self.boundaries)

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _ClaspDrafter(self, prefill)

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One kept set for the drafts of a batch, unless ``share_kept_set`` is off."""
        return share_kept_set(drafts) if self.settings.share_kept_set else list(drafts)

    @property
    def last_choice(self) -> "Choice | None":
        """The last choice of any request; ``None`` before the first."""
        with self._lock:
            return self._choice

    def adopt(self, skipped: Collection[int]) -> "Choice":
        """Takes layers as the last choice.

        Args:
            skipped: the layers to skip.
        """
        settings = self.settings
        sublayers = (sublayer for layer in skipped for sublayer in (2 * layer, 2 * layer + 1))
        threshold = settings.draft_exit_threshold
        stop = ConfidenceThreshold(threshold) if threshold > 0 else None
        kept = KeptSet.skipping(sublayers, self.target.sublayer_count)
        cost = draft_cost(kept, self.draft_precision, self.target.dtype)
        draft = LayerDraft(kept, settings.draft_length, stop)
        choice = Choice(tuple(skipped), draft, Record(self.payoff, cost))
        with self._lock:
            self._choice = choice
        return choice

    def state(self) -> LearnedState:
        """The layers of the last choice, if there was one."""
        choice = self.last_choice
        return LearnedState({"skipped": None if choice is None else list(choice.skipped)})

    def restore(self, state: LearnedState) -> None:
        """Loads a choice.

        Raises:
            StateError: it is none of these settings.
        """
        skipped: Any = state.values.get("skipped", [])
        if skipped is None:  # it was saved before the first choice
            self._choice = None
            return
        fits = isinstance(skipped, list) and all(type(layer) is int and layer in self.layers for layer in skipped)
        if not fits or skipped != sorted(set(skipped)) or len(skipped) != self.skips:
            raise StateError(
                f"the state skips layers {skipped}, not {self.skips} of the model's free ones; learn it again"
            )
        self.adopt(skipped)


@dataclass(frozen=True)
class Choice:
    """A choice of layers.

    Attributes:
        skipped: the layers, ascending.
        draft: what drafts without them.
        record: what came of it.
    """

    skipped: tuple[int, ...]
    draft: LayerDraft
    record: Record


def _skip_count(settings: ClaspSettings, target: Target, free: int) -> int:
    """``M``, checked against the model."""
    layer_count = target.layer_count
    if settings.skipped_layers is not None:
        name, skips = f"skipped_layers {settings.skipped_layers}", settings.skipped_layers
    else:
        ratio = default_skip_ratio(target, layer_count) if settings.skip_ratio is None else settings.skip_ratio
        name, skips = f"skip_ratio {ratio}", round(ratio * layer_count)
    most = min(free, layer_count - 1)
    if not 1 <= skips <= most:
        fixed = f", {max(0, free)} of them free," if free < layer_count else ""
        hint = f"skip 1 to {most}" if most > 0 else "fix fewer of them, or take a deeper model"
        raise InvalidSettingError(f"{name} skips {skips} layers: this model has {layer_count}{fixed or ';'} {hint}")
    return skips


class _ClaspDrafter(Drafter):
    def __init__(self, method: Clasp, prefill: Prefill) -> None:
        self._method = method
        self._payoff = method.payoff
        self._ours = method.settings.schedule == "ours"
        self._probe = prefill.probe
        self._choice = method.last_choice if self._ours else None
        self._rounds = 0
        self._watches = False
        self._started = 0.0
        self._states: torch.Tensor | None = None
        if self._pays():
            self._states = self._at(prefill.hidden_states, row=-1)

    def plan(self) -> Draft:
        """Chooses if there are states to choose from, then drafts with the last choice unless it is declined."""
        # The choice is made when it is needed, so the first token and the end of the output do not wait for it.
        if self._states is not None:
            with self._payoff.selection():
                self._choose(self._states)
            self._states, self._rounds = None, 0
        self._rounds += 1
        self._watches = self._rounds >= self._method.settings.update_interval and self._pays()
        self._started = self._payoff.clock()
        if self._choice is None or (self._ours and self._choice.record.declined):
            return NoDraft()
        return self._choice.draft

    def _pays(self) -> bool:
        if not self._ours:
            return True
        record = Record(self._payoff) if self._choice is None else self._choice.record
        return self._payoff.pays(self._probe.remaining_tokens, record.gain)

    @property
    def watched(self) -> Collection[int]:
        """Every layer boundary, in the last round before the next choice."""
        return self._method.boundaries if self._watches else ()

    def learn(self, feedback: Feedback) -> None:
        """Counts the round, and keeps the states of the last token."""
        self._payoff.note_round(self._payoff.clock() - self._started, len(feedback.acceptance.rows))
        if self._choice is not None and feedback.drafted:
            self._choice.record.note_round(feedback.drafted, feedback.accepted)
        if feedback.hidden_states:
            self._states = self._at(feedback.hidden_states, feedback.acceptance.rows[-1])

    def observe(self, feedback: Feedback) -> None:
        """Watches its next round, if it was to choose from states that are no longer those of the last token."""
        if self._states is not None:
            self._states, self._rounds = None, self._method.settings.update_interval - 1

    def _at(self, hidden_states: Mapping[int, torch.Tensor], row: int) -> torch.Tensor:
        """A copy of the states of one token at every layer boundary, ``[n + 1, hidden]``."""
        return torch.stack([hidden_states[index][row] for index in sorted(self._method.boundaries)])

    def _choose(self, states: torch.Tensor) -> None:
        """Chooses the layers of the coming rounds ("layer optimisation", section 3.4)."""
        branches = self._probe.branches(rows=1, precision=self._method.draft_precision)
        steps = choose_skipped(states, self._method.layers, self._method.skips)
        self._choice = self._method.adopt(run_selection(steps, branches.run))
