"""Figures from the rounds of a run: acceptance, lengths, loaded layers, time, and the papers' efficiency figures."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from selfspec.methods.api import KeptSet
from selfspec.methods.objective import tokens_per_time
from selfspec.types import Round
from selfspec_lab.bench.report.medians import Samples, medians_by_prompt
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.inspection import add_seconds
from selfspec_lab.measuring import LatencyProfile
from selfspec_lab.replay import play, tokens_per_layer


def round_figures(samples: Samples, latencies: LatencyProfile) -> dict[str, Any]:
    """The figures of ``FIGURES`` that come from rounds.

    Args:
        samples: outputs of a selfspec method.
        latencies: the model's latencies.
    """
    outputs = list(samples.values())
    records = [record for sample in outputs for record in sample.rounds or ()]
    if not records:
        return {"rounds": 0}
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    etpl = medians_by_prompt(
        {
            key: tokens_per_layer(play(sample.rounds), latencies.layers) if sample.rounds else None
            for key, sample in samples.items()
        }
    )
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_generated_length": sum(len(record.token_ids) for record in records) / len(records),
        "mean_draft_length": drafted / len(records),
        "accepted_by_position": accepted_by_position(records),
        "etpl": statistics.fmean(etpl.values()),
        "predicted_tpt": predicted_tokens_per_second(outputs, latencies),
        **_time_shares(records, sum(sample.decode_seconds for sample in outputs)),
        "rounds": len(records),
    }


def accepted_by_position(records: Sequence[Round]) -> list[float]:
    """For each position in a draft, the share of the rounds drafting a token there that accepted it."""
    drafted = Counter(record.drafted for record in records)
    accepted = Counter(record.accepted for record in records)
    positions = range(1, max(drafted, default=0) + 1)
    return [_at_least(accepted, position) / _at_least(drafted, position) for position in positions]


def predicted_tokens_per_second(samples: Iterable[Measurement], latencies: LatencyProfile) -> float:
    """KnapSpec's TPT, equation 4, with the cost of the head.

    ``α`` is the acceptance rate, ``γ`` the mean draft length; latencies are taken at the mean context. Tokens that no
    layers drafted take no time.

    Args:
        samples: outputs with at least one round.
        latencies: the model's latencies.
    """
    contexts: list[int] = []
    drafts: Counter[KeptSet | None] = Counter()
    accepted = 0
    for sample in samples:
        length = sample.prompt_token_count + 1  # the first token comes from the prefill
        for record in sample.rounds or ():
            contexts.append(length)
            drafts[record.kept] += record.drafted - record.guessed
            accepted += record.accepted
            length += len(record.token_ids)
    context, drafted = round(statistics.fmean(contexts)), drafts.total()
    seconds = sum(count * latencies.draft_step(kept, context) for kept, count in drafts.items() if kept is not None)
    return float(
        tokens_per_time(
            alpha=accepted / drafted if drafted else 0.0,
            draft_length=drafted / len(contexts),
            draft_time=seconds / drafted if drafted else 0.0,
            target_time=latencies.target_step(context),
        )
    )


def _time_shares(records: Sequence[Round], seconds: float) -> dict[str, float]:
    if not seconds:
        return {}
    spent = add_seconds(records)
    shares = {"draft": spent.draft / seconds, "verify": spent.verify / seconds, "selection": spent.select / seconds}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return {f"{phase}_share": share for phase, share in shares.items()}


def _at_least(counts: Counter[int], least: int) -> int:
    return sum(count for length, count in counts.items() if length >= least)
