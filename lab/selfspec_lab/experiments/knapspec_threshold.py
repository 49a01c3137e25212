"""Claim 7, fourth part: pruning at a cosine of 0.5 loses nothing (KnapSpec, figure 4)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfspec.methods.api import Prefill
from selfspec.methods.knapsack import fill_table, integer_weights
from selfspec.methods.knapspec import KnapSpec
from selfspec_lab.checks import Check, compare
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.knapspec_scene import (
    MODEL,
    knapspec_with,
    last_tokens,
    measure_profile,
    read,
    read_sources,
    select,
)
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OFF, CHOSEN = -1.0, 0.5
"""The similarity threshold that prunes nothing, and the paper's choice."""

NOTHING = 0.01
"""Largest loss of TPT that counts as none (our choice; the paper has 1.26× with and without)."""

FEWER = 0.05
"""Least share of pruned states that counts as pruning (our choice; the paper saves 31 % of memory)."""

METHOD = (
    "Figure 4: KnapSpec's selections at the end of prompts of three domains and of longer sources, for thresholds "
    "from none upwards: TPT of the selection, and the number of states in the dynamic program, "
    f"which pruning leaves out. The paper measures speed and memory; that {NOTHING:.0%} of TPT is nothing and "
    f"{FEWER:.0%} of the states is something are our limits."
)


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        thresholds: similarity thresholds, ascending, from ``OFF`` on, with ``CHOSEN`` and a higher one.
        prompts: prompts per domain.
        documents: number of sources, up to 24.
        context: tokens per source.
    """

    thresholds: tuple[float, ...] = (OFF, CHOSEN, 0.75, 0.9, 0.98)
    prompts: int = 6
    documents: int = 3
    context: int = 512


QUICK = Amounts(thresholds=(OFF, CHOSEN, 0.75), prompts=6, documents=3, context=128)


def measure(lab: Lab, amounts: Amounts) -> Data:
    """TPT, estimated acceptance and number of states, by threshold and text."""
    engine = lab.engine(MODEL)
    target, tokenizer = engine.target, engine.tokenizer
    assert tokenizer is not None
    profile = measure_profile(target)
    context = min(amounts.context, target.context_limit - 2)
    texts = [engine.encode(prompt) for domain in PROMPTS for prompt in lab.prompts(domain, amounts.prompts)]
    texts += [last_tokens(source, len(source)) for source in read_sources(tokenizer, amounts.documents, context)]
    found: dict[str, dict[str, list[float]]] = {
        str(threshold): {"tpt": [], "acceptance": [], "states": []} for threshold in amounts.thresholds
    }
    for text in texts:
        lab.progress(f"knapspec's selections with {len(amounts.thresholds)} thresholds")
        prefilled = read(knapspec_with(target, profile), text)
        for threshold in amounts.thresholds:
            method = knapspec_with(target, profile, similarity_threshold=threshold)
            selection = select(method, prefilled)
            of_threshold = found[str(threshold)]
            of_threshold["tpt"].append(selection.tokens_per_second)
            of_threshold["acceptance"].append(selection.acceptance)
            of_threshold["states"].append(count_states(method, prefilled))
    return {"thresholds": found}


@torch.inference_mode()
def count_states(method: KnapSpec, prefilled: Prefill) -> int:
    """Number of states that the dynamic program keeps, summed over the sublayers."""
    layers = method.target.layer_count
    branches = prefilled.probe.branches(_rows(method, prefilled), method.selection_rows)
    references = torch.stack([prefilled.hidden_states[index] for index in method.watched])
    latencies = method.latencies.of_target
    weights = integer_weights(latencies.attention(prefilled.probe.committed), latencies.mlp)
    items: list[int | None] = [*weights * (layers - 2), None, None]
    budget = min(layers * sum(weights) // 2, (layers - 2) * sum(weights))
    table = fill_table(references, items, budget, method.settings.similarity_threshold, branches.run, first=2)
    return sum(table.entries)


def judge(data: Data) -> Sequence[Check]:
    """Whether the paper's threshold loses nothing and prunes something, and whether a higher one loses."""
    names = sorted(data["thresholds"], key=float)
    chosen = str(CHOSEN)
    higher = names[names.index(chosen) + 1]
    tpts, states = (
        {name: statistics.fmean(_relative(data, name, figure)) for name in names[1:]} for figure in ("tpt", "states")
    )
    told = ", ".join(f"{share:.3f} at {name}" for name, share in tpts.items())
    pruned = _where_pruned(data, str(OFF), chosen)
    losses = [before - after for before, after in _where_pruned(data, chosen, higher)]
    texts = len(data["thresholds"][chosen]["tpt"])
    return [
        compare(
            f"at a threshold of {CHOSEN} the selected TPT is within {NOTHING:.0%} of that without pruning",
            [share - 1 + NOTHING for _, share in pruned],
            f"TPT over that without pruning: {told} (paper: 1.26× both at 0.5 and without)",
            what=f"TPT over {1 - NOTHING:.0%} of that without pruning",
            same=texts - len(pruned),
        ),
        compare(
            f"that threshold prunes at least {FEWER:.0%} of the states",
            [1 - FEWER - share for share in _relative(data, chosen, "states")],
            "states over those without pruning: "
            + ", ".join(f"{share:.3f} at {name}" for name, share in states.items())
            + " (paper: 31 % less memory at 0.5)",
            what=f"pruned share beyond {FEWER:.0%}",
            counts=False,  # the paper counts bytes
        ),
        compare(
            "the next higher threshold loses TPT",
            losses,
            f"{tpts[higher]:.3f} of the TPT at {higher} against {tpts[chosen]:.3f} at {CHOSEN}",
            what="loss of a text",
            same=texts - len(losses),
        ),
    ]


def draw(panel: "Axes", data: Data) -> None:
    """TPT and states against the threshold."""
    names = sorted((name for name in data["thresholds"] if float(name) > OFF), key=float)
    places = [float(name) for name in names]
    for figure, colour, marker, style, label in (
        ("tpt", "#0072b2", "o", "-", "TPT of the selection"),
        ("states", "#d55e00", "s", "--", "states"),
    ):
        means = [statistics.fmean(_relative(data, name, figure)) for name in names]
        panel.plot(places, means, color=colour, marker=marker, linestyle=style, label=label)
    panel.axvline(CHOSEN, color="#bbbbbb", linestyle=":")
    panel.set_ylim(0, 1.1)
    panel.set_xlabel("similarity threshold τ")
    panel.set_ylabel("over that without pruning")
    panel.set_title("fig. 4: pruning threshold", fontsize="medium")
    panel.legend(frameon=False, fontsize="small", loc="lower left")


def _relative(data: Data, name: str, figure: str) -> list[float]:
    """A figure at a threshold ÷ the same figure without pruning, one number per text."""
    at, without = (data["thresholds"][each][figure] for each in (name, str(OFF)))
    return [mine / theirs for mine, theirs in zip(at, without, strict=True)]


def _where_pruned(data: Data, low: str, high: str) -> list[tuple[float, float]]:
    """TPT at two thresholds, over that without pruning, of the texts on which the higher one prunes more states.

    With as many states the program is the same, and so is its selection.
    """
    states = zip(*(data["thresholds"][name]["states"] for name in (low, high)), strict=True)
    tpts = zip(*(_relative(data, name, "tpt") for name in (low, high)), strict=True)
    return [pair for pair, (before, after) in zip(tpts, states, strict=True) if after < before]


def _rows(method: KnapSpec, prefilled: Prefill) -> int:
    """Number of recent tokens that a selection at the end of this text uses."""
    return len(next(iter(prefilled.hidden_states.values())))
