"""The pictures of claim 4: similarity over distance as in CLaSp's figure 3a, cosines as in its figure 3b."""

from statistics import fmean
from typing import TYPE_CHECKING, Any

from selfspec_lab.decide import mean_interval
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.clasp_program_checks import chance_similarity, means_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_similarity(panel: "Axes", data: Data) -> None:
    """Draws the Jaccard similarity of the program's sets over the distance of tokens, with its interval."""
    by_distance = [
        means_of(data, values) for values in zip(*(text["similarity"] for text in data["texts"]), strict=True)
    ]
    low, high = zip(*(mean_interval(values) for values in by_distance), strict=True)
    panel.fill_between(data["distances"], low, high, color="#56b4e9", alpha=0.35, linewidth=0)
    means = [fmean(values) for values in by_distance]
    panel.plot(data["distances"], means, color="#0072b2", marker="o", label="the program's sets")
    chance = chance_similarity(data["layers"], data["skipped_layers"])
    panel.axhline(chance, color="black", linestyle=":", label="chance")
    panel.set_xscale("log", base=2)
    panel.set_xticks(data["distances"], [str(distance) for distance in data["distances"]])
    panel.set_ylim(0, 1)
    panel.set_xlabel(f"distance of two tokens ({data['skipped_layers']} of {data['layers']} layers skipped)")
    panel.set_ylabel("Jaccard similarity of their skipped sets")
    panel.legend(frameon=False, fontsize="small")


def draw_cosines(panel: "Axes", data: Data) -> None:
    """Draws the mean cosine of brute force, program and random sets, by prompt."""
    texts = data["texts"]
    domains = [text["domain"] for text in texts][:: data.get("seeds", 1)]
    places = range(1, len(domains) + 1)
    low, high = (means_of(data, values) for values in zip(*(text["band"] for text in texts), strict=True))
    panel.vlines(places, low, high, color="#999999", linewidth=5, alpha=0.5, label="middle 90 % of all sets")
    styles: list[tuple[str, str, dict[str, Any]]] = [
        ("best", "brute force", {"marker": "_", "color": "black", "markersize": 11, "markeredgewidth": 2}),
        ("program", "dynamic program", {"marker": "o", "color": "#0072b2"}),
        ("random", "random, mean", {"marker": "x", "color": "#d55e00"}),
    ]
    for name, label, style in styles:
        means = means_of(data, [text["cosine"][name] for text in texts])
        panel.plot(places, means, linestyle="", label=label, **style)
    panel.set_xticks(places, domains, rotation=90)
    panel.set_xlabel(f"prompt ({data['free_skipped_layers']} of {data['free_layers']} free layers skipped)")
    panel.set_ylabel("cosine similarity to the target's final state")
    panel.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
