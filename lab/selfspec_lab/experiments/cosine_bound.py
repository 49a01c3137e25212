"""Claim 8: draft states with high cosine similarity to the target's have the same greedy token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from selfspec.methods.api import KeptSet
from selfspec.methods.skipping import evenly_skipped
from selfspec_lab.checks import Check
from selfspec_lab.decide import SEEDS
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.cosine_bound_checks import lemma_holds, nearer_drafts_accepted, nearer_sets_accepted
from selfspec_lab.experiments.cosine_bound_picture import draw_bins, draw_sets
from selfspec_lab.experiments.cosine_pairs import (
    EDGES,
    Pairs,
    TargetStates,
    bins,
    histogram,
    nearness,
    norm_range,
    set_figures,
)
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.reading import Reading, read_own_texts
from selfspec_lab.experiments.sampled import TEMPERATURE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain.
        seeds: texts per prompt.
        written_tokens: tokens that the model writes for each text; every kind of set drafts each of them.
        uniform: skipped shares of evenly spread sets.
        exits: kept shares of early exits.
        clasp: skipped shares of CLaSp's sets, selected at every token.
    """

    prompts: int
    seeds: int
    written_tokens: int
    uniform: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)
    exits: tuple[float, ...] = (0.95, 0.875, 0.75, 0.5)
    clasp: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.375, 0.5)


@register
class CosineBound(Experiment):
    """KnapSpec, lemma 4.1: drafts every token of some texts with many kept sets and compares the states."""

    number = 8
    name = "cosine-bound"
    claim = (
        "A draft whose last hidden state has a cosine similarity to the target's above a bound has the same greedy "
        "token; the bound follows from the margin of the target's greedy token. So cosine similarity is a proxy for "
        "the acceptance rate: the nearer the states of a kept set, the more of its tokens are accepted."
    )
    source = "KnapSpec (Cha et al. 2026), lemma 4.1 and the text after it"
    method = (
        f"The model writes {SEEDS} texts of each prompt (sampled, temperature {TEMPERATURE}, each with a seed of its "
        "own); what is compared is a prompt's mean over them. At every token, with the target's keys and "
        "values of the tokens before, evenly spread sets, early exits and CLaSp's sets of several sizes draft one "
        "token. The state is the input of the LM head, after the final norm; cosine, bound and greedy token are "
        "computed from it in double precision. The lemma assumes states of equal norm; scaling a state changes neither "
        "its cosine nor its greedy token, so the lemma applies to every pair."
    )
    model = "tiny"
    unfit: ClassVar[Mapping[str, str]] = {}

    def __init__(self, amounts: Amounts | None = None) -> None:
        self.amounts = amounts

    @torch.inference_mode()
    def measure(self, lab: Lab) -> Data:
        """Drafts each token of some texts with every set."""
        amounts = self.amounts or lab.pick(Amounts(7, 1, 32), Amounts(7, SEEDS, 32))
        engine = lab.engine(self.model)
        texts: list[dict[str, Pairs]] = []
        bounds: list[torch.Tensor] = []
        task = "drafts by many sets"
        for _, reading, positions in read_own_texts(
            lab, engine, amounts.prompts, amounts.written_tokens, task, seeds=amounts.seeds
        ):
            target_states = TargetStates(reading, positions)
            bounds.append(target_states.bounds)
            drafts = _drafts(reading, positions, amounts)
            texts.append({name: target_states.pairs(draft()) for name, draft in drafts.items()})
        return {
            "seeds": amounts.seeds,
            "edges": list(EDGES),
            "tokens": sum(map(len, bounds)),
            "bounds": histogram(1 - torch.cat(bounds)),
            "norm_ratio": norm_range([pairs for text in texts for pairs in text.values()]),
            "texts": [bins(text.values()) for text in texts],
            "nearness": [nearness(text.values()) for text in texts],
            "sets": {name: set_figures([text[name] for text in texts]) for name in texts[0]},
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """No counterexample to the lemma; acceptance rises with the cosine, over pairs and over sets."""
        return [lemma_holds(data), nearer_drafts_accepted(data), nearer_sets_accepted(data)]

    def draw(self, data: Data) -> "Figure":
        """Draws acceptance over cosine with the distribution of the bound, and acceptance over cosine by set."""
        figure, (left, right) = make_panels(2)
        draw_bins(left, data)
        draw_sets(right, data)
        return figure


def _drafts(reading: Reading, positions: Sequence[int], amounts: Amounts) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that compute the states ``[len(positions), hidden]`` of a kind of set, by its name."""
    layers, total = reading.target.layer_count, reading.target.sublayer_count
    kept = {}
    for share in amounts.uniform:
        if skipped := evenly_skipped(layers, share):
            kept[f"uniform, {len(skipped)} of {total} sublayers skipped"] = KeptSet.skipping(skipped, total)
    for share in amounts.exits:
        layer = min(max(1, round(share * layers)), layers - 1)
        kept[f"exit after layer {layer} of {layers}"] = KeptSet.early_exit(layer, total)
    drafts = {name: _with_set(reading, positions, each) for name, each in kept.items()}
    for share in amounts.clasp:
        skips = max(1, round(share * layers))
        drafts[f"clasp, {skips} of {layers} layers skipped"] = _with_program(reading, positions, skips)
    return drafts


def _with_set(reading: Reading, positions: Sequence[int], kept: KeptSet) -> Callable[[], torch.Tensor]:
    return lambda: reading.draft(kept, positions)


def _with_program(reading: Reading, positions: Sequence[int], skips: int) -> Callable[[], torch.Tensor]:
    """The states of sets that CLaSp selects at every token."""
    return lambda: torch.stack([reading.program_state(position, skips) for position in positions])
