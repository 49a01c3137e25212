"""The pictures of claim 8: acceptance over cosine, for pairs with the bound, and for sets."""

from typing import TYPE_CHECKING

import numpy as np

from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.cosine_bound_checks import accepted_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_bins(panel: "Axes", data: Data) -> None:
    """Draws the accepted share of pairs by bin of their cosine, and the distribution of the bounds."""
    shares = accepted_shares(data["texts"])
    places = list(range(len(data["edges"]) - 1))
    bounds = np.array(data["bounds"]) / data["tokens"]
    panel.bar(places, bounds, color="#e69f00", alpha=0.5, hatch="//", label="tokens whose bound is here")
    panel.plot(list(shares), list(shares.values()), color="#0072b2", marker="o", label="drafts here that are accepted")
    panel.set_xlim(len(places) - 0.4, -0.6)
    panel.set_xticks(places, [f"≤ {edge:g}" for edge in data["edges"][1:]], rotation=60)
    panel.set_ylim(0, 1.02)
    panel.set_xlabel("1 − cosine similarity of draft and target (nearer to the right)")
    panel.set_ylabel("share")
    panel.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def draw_sets(panel: "Axes", data: Data) -> None:
    """Draws the accepted share of each kind of set over its mean cosine."""
    styles = {"uniform": ("#e69f00", "s"), "exit": ("#d55e00", "^"), "clasp": ("#0072b2", "o")}
    for kind, (colour, marker) in styles.items():
        chosen = [figures for name, figures in data["sets"].items() if name.startswith(kind)]
        rates = [figures["accepted"] / figures["pairs"] for figures in chosen]
        cosines = [figures["cosine"] for figures in chosen]
        panel.plot(cosines, rates, linestyle="", color=colour, marker=marker, label=kind)
    panel.set_ylim(0, 1.02)
    panel.set_xlabel("mean cosine similarity to the target's state")
    panel.set_ylabel("share of draft tokens accepted")
    panel.legend(frameon=False, title="kept sets", fontsize="small")
