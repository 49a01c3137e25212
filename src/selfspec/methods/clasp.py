"""CLaSp: which layers to skip, chosen by dynamic programming over the hidden states of the last accepted token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from selfspec.decoding.draft import ConfidenceThreshold, LayerDraft
from selfspec.decoding.drafter import Branches, Drafter, Needs, Prefill
from selfspec.errors import InvalidSettingError
from selfspec.methods.knapsack import SpreadRows
from selfspec.methods.registry import register
from selfspec.methods.selecting import PeriodicDrafter, Selected, SelectingMethod, SelectingSettings
from selfspec.methods.settings import fraction, setting
from selfspec.methods.skipping import RATIO_HELP, check_skipped, default_skip_ratio
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

Run = Callable[[int, torch.Tensor], torch.Tensor]
"""Runs one sublayer on independent states ``[count, rows, hidden]`` of the same tokens, as ``Branches.run`` does."""


@dataclass(frozen=True)
class ClaspSettings(SelectingSettings):
    """Settings of ``clasp``."""

    skipped_layers: int | None = setting(
        None, "layers that drafts skip (M; 44 of 80 in the paper); none takes skip_ratio", minimum=1
    )
    skip_ratio: float | None = fraction(
        None, f"share of all layers that drafts skip (0.5 to 0.6 in the paper); {RATIO_HELP}"
    )
    update_interval: int = setting(32, "rounds between two choices of layers (the paper names none)", minimum=1)
    first_choice: str = setting(
        "prompt",
        "what the first choice is based on: the prompt's last token (prompt), or the first round, which the whole "
        "model drafts (round, as in the port of KnapSpec's authors)",
        choices=("prompt", "round"),
    )
    draft_exit_threshold: float = fraction(0.7, "stop drafting after a token less confident than this; 0 never stops")
    draft_length: int = setting(12, "most draft tokens of a round (K; the paper names none)", minimum=1, maximum=64)
    fixed_first_layers: int = setting(0, "layers at the start that are never skipped (10 in figure 3b)", minimum=0)
    fixed_last_layers: int = setting(0, "layers at the end that are never skipped (10 in figure 3b)", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skipped_layers is not None and self.skip_ratio is not None:
            raise InvalidSettingError("skipped_layers and skip_ratio both set the number of layers; give only one")


@dataclass(frozen=True)
class Row:
    """Row ``i`` of Algorithm 1, for the numbers ``j`` of skipped layers from which ``M`` can still be reached."""

    lowest: int
    """``j`` of the first state."""
    states: torch.Tensor
    """``[n, hidden]``, ``g(i, lowest) … g(i, lowest + n - 1)``."""
    first_choice: int
    """The smallest ``j`` that can be reached both by running and by skipping layer ``i - 1``."""
    runs: torch.Tensor
    """Bool ``[c]``, for ``first_choice`` and the ``j`` after it: whether running was the better of the two."""


def program(target_states: torch.Tensor, layers: range, skips: int, run: Run) -> list[Row]:
    """Algorithm 1 (equation 2), row by row; a row runs its layer once, over all its states.

    ``g(i, j)`` is the nearer to ``h(i)``, in cosine, of ``g(i-1, j-1)`` (skip layer ``i-1``) and ``f(g(i-1, j))`` (run
    it). With no layer skipped it is ``h(i)`` itself, with all skipped ``h(0)``; neither takes a forward. The paper
    computes every ``j`` up to ``M``. Here those from which ``M`` cannot be reached any more are left out, which
    changes no choice.

    ``target_states``, ``[n + 1, hidden]``, is the target's residual stream before each of the ``n`` layers, which have
    no gap, and after the last. ``skips`` is ``M``, 1 to ``n``. Returns rows 1 to ``n``.
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
            ran = _run_layer(layer, states[first - lowest : first - lowest + choices], run)
            similarity = functional.cosine_similarity(torch.cat([ran, skipped[:choices]]).float(), aim.float(), dim=-1)
            runs = similarity[:choices] > similarity[choices:]
            chosen = torch.cat([torch.where(runs[:, None], ran, skipped[:choices]), skipped[choices:]])
        lowest = max(0, least)
        states = torch.cat([aim[None], chosen]) if lowest == 0 else chosen
        rows.append(Row(lowest, states, first, runs))
    return rows


def _run_layer(layer: int, states: torch.Tensor, run: Run) -> torch.Tensor:
    """Attention and MLP of a layer: ``[count, hidden]`` in and out."""
    return run(2 * layer + 1, run(2 * layer, states[:, None]))[:, 0]


def choose_skipped(target_states: torch.Tensor, layers: range, skips: int, run: Run) -> tuple[int, ...]:
    """Runs Algorithm 1 and backtracks from ``(L, M)``: the ``M`` layers to skip, ascending."""
    rows = program(target_states, layers, skips, run)
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
class Clasp(SelectingMethod):
    """Skips whole layers, chosen again every ``update_interval`` rounds for the current context.

    A choice uses the hidden states of the last accepted token, which the last verification computed; before the first
    round those of the prompt's last token, of which the paper does not speak (or see ``first_choice``). It costs about
    one verification. With ``schedule=ours`` a choice is made at least ``update_interval`` rounds after the last one.
    With ``draft_bits`` the program runs layers at the precision at which they draft; the states that skip nothing come
    from the verification, so they remain the target's.
    """

    name = "clasp"
    summary = "skips the layers that a dynamic program finds for the current context"
    source = "CLaSp (Chen et al. 2025)"
    Settings = ClaspSettings
    settings: ClaspSettings

    def __init__(self, target: Target, settings: ClaspSettings) -> None:
        super().__init__(target, settings)
        self.layers = range(settings.fixed_first_layers, target.layer_count - settings.fixed_last_layers)
        self.skips = _skip_count(settings, target, len(self.layers))
        if settings.first_choice == "round":
            self.first_draft = self.draft(KeptSet.full(target.sublayer_count))

    @property
    def watched(self) -> range:
        """Every layer boundary."""
        return range(2 * self.layers.start, 2 * self.layers.stop + 1, 2)

    @property
    def needs(self) -> Needs:
        """The hidden states of the prompt's last token, and cache slots for the longest row of the program."""
        longest_row = min(self.skips, len(self.layers) - self.skips)
        return Needs(probe_rows=longest_row, prompt_rows=1, prompt_states=frozenset(self.watched))

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _ClaspDrafter(self, prefill)

    def choice_of(self, selection: tuple[int, ...]) -> Selected:
        """Drafts without some layers."""
        sublayers = (sublayer for layer in selection for sublayer in (2 * layer, 2 * layer + 1))
        kept = KeptSet.skipping(sublayers, self.target.sublayer_count)
        return Selected(selection, self.draft(kept), self.new_record(kept))

    def draft(self, kept: KeptSet) -> LayerDraft:
        """Drafts with a kept set."""
        threshold = self.settings.draft_exit_threshold
        stop = ConfidenceThreshold(threshold) if threshold > 0 else None
        return LayerDraft(kept, self.settings.draft_length, stop)

    def state(self) -> LearnedState:
        """The layers that the last choice skips."""
        choice = self.last_choice
        return LearnedState({"skipped": None if choice is None else list(choice.selection)})

    def restore(self, state: LearnedState) -> None:
        """Loads a choice, which requests then start with."""
        skipped: Any = state.values.get("skipped", [])
        if skipped is None:  # it was saved before the first choice
            self.adopt(None)
            return
        self.adopt(self.choice_of(check_skipped(skipped, self.layers, self.skips, self.skips)))


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


class _ClaspDrafter(PeriodicDrafter):
    method: Clasp

    def __init__(self, method: Clasp, prefill: Prefill) -> None:
        interval = method.settings.update_interval
        super().__init__(method, prefill, SpreadRows(1, 1), interval)  # of the last token
        if method.settings.first_choice == "round":
            self.rounds = interval - 1  # the first round is watched
        elif self.pays():
            # The choice is made when it is needed, so the first token does not wait for it.
            self.rounds = interval
            self.add(prefill.hidden_states, slice(-1, None), len(prefill.prompt_ids) - 1)

    def choose(self, references: torch.Tensor, branches: Branches) -> None:
        """Chooses the layers of the coming rounds ("layer optimisation", section 3.4)."""
        method = self.method
        self.use(method.choice_of(choose_skipped(references[:, 0], method.layers, method.skips, branches.run)))
