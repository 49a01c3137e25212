"""Claim 8: a draft's state that is near enough to the target's in cosine has the same greedy token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfspec.methods.uniform import evenly_skipped
from selfspec.model.kept import KeptSet
from selfspec_lab.experiments.base import Check, Data, Experiment, register
from selfspec_lab.experiments.cosine_bound_checks import lemma_holds, nearer_sets_accepted, rises_with_cosine
from selfspec_lab.experiments.cosine_bound_picture import draw_bins, draw_sets
from selfspec_lab.experiments.cosine_pairs import EDGES, Aims, Pairs, bins, histogram, norm_range, set_figures
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
        texts: of each domain.
        written_tokens: length of what the model writes for each; every one of them is drafted by every kind of set.
        uniform: skipped shares of the evenly spread sets.
        exits: kept shares of the layers of early exits.
        clasp: skipped shares of CLaSp's sets, chosen anew at every token.
    """

    texts: int
    written_tokens: int
    uniform: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)
    exits: tuple[float, ...] = (0.95, 0.875, 0.75, 0.5)
    clasp: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.375, 0.5)


@register
class CosineBound(Experiment):
    """Drafts every token of some texts with many kept sets and holds the states against the target's."""

    number = 8
    name = "cosine-bound"
    claim = (
        "From a certain cosine similarity to the target's last hidden state on, which the margin of the greedy token "
        "gives, a draft has the same greedy token. So cosine similarity stands for the acceptance rate: the nearer a "
        "kept set's states, the more of its tokens are accepted."
    )
    source = "KnapSpec, lemma 4.1 and the text behind it"
    method = (
        f"The model writes texts (sampled, temperature {TEMPERATURE}). At every token, with the target's keys and "
        "values of the tokens before, evenly spread sets, early exits and CLaSp's sets of several sizes draft one "
        "token. The state is what goes into the LM head, that is behind the final norm; cosine, bound and greedy token "
        "are computed from it in double precision. The lemma takes states of equal norm; scaling a state to it changes "
        "neither cosine nor token, so that it speaks of every pair. Intervals in brackets are 95 % bootstrap over "
        "texts."
    )
    model = "tiny"

    def __init__(self, amounts: Amounts | None = None) -> None:
        self.amounts = amounts

    @torch.inference_mode()
    def measure(self, lab: Lab) -> Data:
        """Reads texts and drafts each of their tokens with every set."""
        amounts = self.amounts or lab.pick(Amounts(2, 64), Amounts(5, 96))
        engine = lab.engine(self.model)
        texts: list[dict[str, Pairs]] = []
        bounds: list[torch.Tensor] = []
        task = "drafts by many sets"
        for _, reading, positions in read_own_texts(lab, engine, amounts.texts, amounts.written_tokens, task):
            aims = Aims(reading, positions)
            bounds.append(aims.bounds)
            drafts = _drafts(reading, positions, amounts)
            texts.append({name: aims.pairs(draft()) for name, draft in drafts.items()})
        return {
            "edges": list(EDGES),
            "tokens": sum(map(len, bounds)),
            "bounds": histogram(1 - torch.cat(bounds)),
            "norm_ratio": norm_range([pairs for text in texts for pairs in text.values()]),
            "texts": [bins(text.values()) for text in texts],
            "sets": {name: set_figures([text[name] for text in texts]) for name in texts[0]},
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """No counterexample to the lemma; acceptance rises with the cosine, pair by pair and set by set."""
        return [lemma_holds(data), rises_with_cosine(data), nearer_sets_accepted(data)]

    def draw(self, data: Data) -> "Figure":
        """Accepted share against cosine with the bound's distribution, and acceptance against cosine set by set."""
        figure, (left, right) = make_panels(2)
        draw_bins(left, data)
        draw_sets(right, data)
        return figure


def _drafts(reading: Reading, positions: Sequence[int], amounts: Amounts) -> dict[str, Callable[[], torch.Tensor]]:
    """By name of a kind of set what computes its states, ``[len(positions), hidden]``; equal sets are named once."""
    layers, total = reading.target.layer_count, reading.target.sublayer_count
    kept = {}
    for share in amounts.uniform:
        if skipped := evenly_skipped(layers, share):
            kept[f"uniform, {len(skipped)} of {total} sublayers skipped"] = KeptSet.skipping(skipped, total)
    for share in amounts.exits:
        layer = min(max(1, round(share * layers)), layers - 1)
        kept[f"exit behind layer {layer} of {layers}"] = KeptSet.early_exit(layer, total)
    drafts = {name: _with_set(reading, positions, each) for name, each in kept.items()}
    for share in amounts.clasp:
        skips = max(1, round(share * layers))
        drafts[f"clasp, {skips} of {layers} layers skipped"] = _with_program(reading, positions, skips)
    return drafts


def _with_set(reading: Reading, positions: Sequence[int], kept: KeptSet) -> Callable[[], torch.Tensor]:
    return lambda: reading.draft(kept, positions)


def _with_program(reading: Reading, positions: Sequence[int], skips: int) -> Callable[[], torch.Tensor]:
    """The states of sets that are chosen anew at every token."""
    return lambda: torch.stack([reading.program_state(position, skips) for position in positions])
