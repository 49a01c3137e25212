"""Claim 7, first part: KnapSpec skips more attention as the context grows (KnapSpec, figure 3)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from selfspec.errors import InvalidParameterError
from selfspec.methods.api import Prefill
from selfspec.methods.knapsack import integer_weights
from selfspec.methods.knapspec import KnapSpec
from selfspec_lab.checks import Check, compare, not_applicable
from selfspec_lab.decide import mean_interval
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
from selfspec_lab.measuring import LatencyProfile, Target
from selfspec_lab.plots import ATTENTION, MLP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD = (
    "Figure 3: KnapSpec's selections at the end of sources of Python's standard library, with latencies measured here. "
    "The model sees more or less of a source, so all contexts end with the same tokens. The model is not widened, as "
    "at these lengths MLPs would dominate. For contexts beyond the model's, selections at the longest one are repeated "
    "with the latency that attention would have at up to 32K tokens by the measured line. Where the integer weights of "
    "attention and MLP are those of the shortest context, nothing can show. The paper goes to 32K tokens with "
    "Qwen3-8B, and compares with SWIFT. Throughout this claim the first and the last layer always run, a selection "
    "uses the last 16 tokens, and an integer weight is at most 5. `tiny` was trained on such sources."
)


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        contexts: numbers of context tokens, ascending; those that exceed the model's context are left out.
        documents: number of texts, up to 24.
        pretended: contexts beyond the model's, ascending, whose attention latency is used.
    """

    contexts: tuple[int, ...] = (128, 512, 1900)
    documents: int = 21
    pretended: tuple[int, ...] = (8192, 32768)


QUICK = Amounts(contexts=(128, 512), documents=21, pretended=(32768,))


def measure(lab: Lab, amounts: Amounts) -> Data:
    """Measures latencies, and selects at every context of every document."""
    model, tokenizer = lab.load(MODEL)
    target = Target(model)
    contexts = [each for each in amounts.contexts if each < target.context_limit - 1]
    if len(contexts) < 2:
        raise InvalidParameterError(
            f"knapspec-context compares contexts of {amounts.contexts[0]} tokens and more, but this model ends at "
            f"{target.context_limit}; use one with a longer context"
        )
    profile = measure_profile(target)
    method, longest = knapspec_with(target, profile), contexts[-1]
    slower = {each: knapspec_with(target, _as_slow_as_in(profile, each, longest)) for each in amounts.pretended}
    skipped: dict[str, list[list[float]]] = {str(context): [] for context in contexts}
    pretended: dict[str, list[list[float]]] = {str(context): [] for context in slower}
    for document in read_sources(tokenizer, amounts.documents, longest):
        lab.progress(f"knapspec's selections at {len(contexts)} contexts of a document")
        for context in contexts:
            prefilled = read(method, last_tokens(document, context))
            skipped[str(context)].append(_skipped_shares(method, prefilled))
        for context, slow in slower.items():
            pretended[str(context)].append(_skipped_shares(slow, prefilled))
    every = [*contexts, *slower]
    return {
        "attention_over_mlp": {str(context): profile.attention(context) / profile.mlp for context in every},
        "weights": {str(each): list(integer_weights(profile.attention(each), profile.mlp)) for each in every},
        "skipped": skipped,
        "pretended": pretended,
    }


def judge(data: Data) -> Sequence[Check]:
    """Whether the skipped share of attention grows, and whether it exceeds that of the MLPs."""
    skipped: dict[str, list[list[float]]] = data["skipped"]
    shortest, longest = min(skipped, key=int), max(skipped, key=int)
    growth = [after[0] - before[0] for before, after in zip(skipped[shortest], skipped[longest], strict=True)]
    ratios, pretended = data["attention_over_mlp"], data["pretended"]
    able = data["weights"][shortest] != data["weights"][longest]  # equal weights select the same, whatever the context
    return [
        compare(
            "a larger share of attention is skipped at the longest context than at the shortest",
            growth if able else [],
            f"{_mean(skipped[longest], 0):.0%} at {longest} tokens against {_mean(skipped[shortest], 0):.0%} at "
            f"{shortest}, where an attention branch takes {ratios[longest]:.1f} and {ratios[shortest]:.1f} times as "
            f"long as an MLP branch",
            what="growth of a text",
            form="+.0%",
        ),
        *(_pretended(data, shortest, context) for context in sorted(pretended, key=int)),
        _ahead(data),
    ]


def _pretended(data: Data, shortest: str, context: str) -> Check:
    """The claim with the latencies of a longer context than the model has."""
    pairs = data["pretended"][context]
    growth = [after[0] - before[0] for before, after in zip(data["skipped"][shortest], pairs, strict=True)]
    return compare(
        f"with attention as slow as at {context} tokens, a larger share of it is skipped than at {shortest} tokens",
        growth if data["weights"][shortest] != data["weights"][context] else [],
        f"{_mean(pairs, 0):.0%} of attention and {_mean(pairs, 1):.0%} of MLP, where attention takes "
        f"{data['attention_over_mlp'][context]:.1f} times as long as MLP",
        what="growth of a text",
        form="+.0%",
    )


def _ahead(data: Data) -> Check:
    """Figure 3 at its longest contexts, where attention takes longer than MLPs do."""
    ratios = data["attention_over_mlp"]
    longest = max(ratios, key=int)
    pairs = (data["skipped"] | data["pretended"])[longest]
    statement = f"where attention is the slower branch, more of it than of MLP is skipped (at {longest} tokens)"
    if ratios[longest] <= 1:
        return not_applicable(
            statement, f"an attention branch takes {ratios[longest]:.1f} times as long as an MLP there"
        )
    return compare(
        statement,
        [attention - mlp for attention, mlp in pairs],
        f"{_mean(pairs, 0):.0%} of attention against {_mean(pairs, 1):.0%} of MLP",
        what="lead of a text",
        form="+.0%",
    )


def draw(panel: "Axes", data: Data) -> None:
    """Draws skipped shares over the context; hollow markers are for latencies of longer contexts."""
    skipped: dict[str, list[list[float]]] = data["skipped"]
    contexts, beyond = sorted(map(int, skipped)), sorted(map(int, data["pretended"]))
    for kind, (name, colour, marker) in enumerate((("attention", ATTENTION, "o"), ("MLP", MLP, "s"))):
        means = [_mean(skipped[str(context)], kind) for context in contexts]
        intervals = [mean_interval([pair[kind] for pair in skipped[str(context)]]) for context in contexts]
        spread = [
            [max(0.0, mean - low) for mean, (low, _) in zip(means, intervals, strict=True)],
            [max(0.0, high - mean) for mean, (_, high) in zip(means, intervals, strict=True)],
        ]
        panel.errorbar(contexts, means, yerr=spread, color=colour, marker=marker, capsize=3, label=name)
        panel.plot(
            [contexts[-1], *beyond],
            [means[-1], *(_mean(data["pretended"][str(context)], kind) for context in beyond)],
            color=colour,
            marker=marker,
            markerfacecolor="white",
            linestyle=":",
            zorder=1,
        )
    panel.set_xscale("log", base=2)
    every = [contexts[0], contexts[-1], *beyond]
    panel.set_xticks(every, map(str, every))
    panel.set_ylim(0, 1)
    panel.set_xlabel("context, tokens (hollow: latency alone)")
    panel.set_ylabel("skipped share of sublayers")
    panel.set_title("fig. 3: skipped against context", fontsize="medium")
    panel.legend(frameon=False, fontsize="small", loc="upper left")


def _as_slow_as_in(profile: LatencyProfile, context: int, longest: int) -> LatencyProfile:
    """Latencies in which attention at the longest context takes as long as in another context."""
    return replace(profile, attention_base=profile.attention_base + profile.attention_per_token * (context - longest))


def _skipped_shares(method: KnapSpec, prefilled: Prefill) -> list[float]:
    """Skipped shares of attention and of MLP."""
    kept = select(method, prefilled).kept
    return [1 - kept.attention_share, 1 - kept.mlp_share]


def _mean(shares: Sequence[Sequence[float]], kind: int) -> float:
    """Mean share of attention (``kind`` 0) or of MLP (1)."""
    return statistics.fmean(pair[kind] for pair in shares)
