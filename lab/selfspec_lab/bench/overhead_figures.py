"""The figures of ``selfspec bench overhead``: one value per repeat, then median and spread."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfspec.types import Generation, PhaseSeconds
from selfspec_lab.bench.benchmark import Sample
from selfspec_lab.bench.cost import decoding_bytes
from selfspec_lab.bench.spread import Measured
from selfspec_lab.measuring import StepBytes

Figures = dict[str, float | None]

METHOD_FIGURES = (
    "speedup",
    "ideal_speedup",
    "efficiency",
    "acceptance_rate",
    "mean_generated_length",
    "cost_coefficient",
    "selection_share",
    "draft_share",
    "verify_share",
    "other_share",
    "peak_memory_bytes",
)
"""The figures of every method.

``speedup`` is over plain decoding in the same repeat; ``ideal_speedup`` is ``DecodingBytes.ideal_speedup``;
``efficiency`` is speedup ÷ ideal speedup; ``cost_coefficient`` is the time of a draft step ÷ that of a plain step. The
shares are of the time after the first token; ``other_share`` is what is neither selection, draft nor verification.
A selection that is fused with a verification counts as verification.
On an accelerator a phase ends when its work is queued; time until the work is done belongs to the phase that waits.
"""


def tokens_per_second(samples: Sequence[Sample]) -> float:
    """Tokens after the first ÷ seconds after the first token, over all prompts."""
    return sum(len(sample.token_ids) - 1 for sample in samples) / sum(sample.seconds for sample in samples)


def plain_figures(samples: Sequence[Sample], costs: StepBytes, copy_bytes_per_second: float) -> Figures:
    """One repeat of plain decoding.

    ``bandwidth_fraction`` is bytes that a step reads (weights of sublayers, norms and head; keys and values of its
    context) × tokens per second ÷ copy bandwidth.
    """
    speed, step_bytes = tokens_per_second(samples), decoding_bytes(costs, _generations(samples)).plain_step
    return {
        "tokens_per_second": speed,
        "bandwidth_fraction": step_bytes * speed / copy_bytes_per_second,
        "step_bytes": step_bytes,
        "peak_memory_bytes": float(max(sample.peak_bytes for sample in samples)),
    }


def method_figures(samples: Sequence[Sample], plain: Sequence[Sample], costs: StepBytes) -> Figures:
    """One repeat of a method, compared with plain decoding of the same prompts in the same repeat."""
    generations = _generations(samples)
    read = decoding_bytes(costs, generations)
    records = [record for generation in generations for record in generation.rounds]
    drafted = sum(record.drafted for record in records)
    speed, plain_speed = tokens_per_second(samples), tokens_per_second(plain)
    elapsed = sum(sample.seconds for sample in samples)
    phases = {name: sum(getattr(record.seconds, name) for record in records) for name in PhaseSeconds().__dict__}
    shares = {name: phases[name] / elapsed for name in ("select", "draft", "verify")}
    return {
        "tokens_per_second": speed,
        "speedup": speed / plain_speed,
        "ideal_speedup": read.ideal_speedup,
        "efficiency": speed / plain_speed / read.ideal_speedup,
        "acceptance_rate": sum(record.accepted for record in records) / drafted if drafted else None,
        "mean_generated_length": read.tokens / len(records),
        "cost_coefficient": phases["draft"] / drafted * plain_speed if drafted else None,
        "cost_coefficient_bytes": read.cost_coefficient,
        "selection_share": shares["select"],
        "draft_share": shares["draft"],
        "verify_share": shares["verify"],
        "other_share": 1 - sum(shares.values()),
        "peak_memory_bytes": float(max(sample.peak_bytes for sample in samples)),
    }


def over_repeats(repeats: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Median and spread of every figure over the repeats, as fields of a report."""
    fields: dict[str, Any] = {}
    for name in repeats[0]:
        fields.update(Measured.of(figures[name] for figures in repeats).fields(name))
    return fields


def by_repeat(function: Callable[..., Figures], *columns: Sequence[Any]) -> dict[str, Any]:
    """Applies a function to each repeat's samples, then ``over_repeats``."""
    return over_repeats([function(*row) for row in zip(*columns, strict=True)])


def _generations(samples: Sequence[Sample]) -> list[Generation]:
    return [sample.generation for sample in samples if sample.generation is not None]
