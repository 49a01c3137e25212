"""The figures of ``selfspec bench run`` for one candidate over some prompts."""

from typing import Any

from selfspec_lab.bench.report.medians import (
    Samples,
    decode_speed,
    median,
    median_interval,
    median_over_prompts,
    over,
    quotient,
    speedups_by_prompt,
    whole_speed,
)
from selfspec_lab.bench.report.rounds import round_figures
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.measuring import LatencyProfile

Figures = dict[str, Any]

FIGURES = (
    "tokens_per_second",
    "speedup",
    "speedup_interval",
    "speedup_with_prefill",
    "speedup_over_transformers",
    "identical",
    "compared",
    "differing",
    "acceptance_rate",
    "mean_generated_length",
    "mean_draft_length",
    "accepted_by_position",
    "etpl",
    "measured_tpt",
    "predicted_tpt",
    "ideal_speedup",
    "efficiency",
    "time_to_first_token",
    "peak_memory_bytes",
    "memory_above_plain",
    "draft_share",
    "verify_share",
    "selection_share",
    "other_share",
    "rounds",
    "tokens",
    "prompts",
    "failures",
)
"""The figures of a candidate, over all prompts or over those of a category; null if a figure is undefined.

Medians over the repeats of a prompt, then over the prompts: ``tokens_per_second`` (tokens after the first ÷ seconds
after it); ``speedup``, the ratio of these to plain decoding for the same prompt and repeat, ``speedup_interval``, its
95 % bootstrap interval over the prompts; ``speedup_with_prefill``, with all tokens and the time of the whole request;
``speedup_over_transformers``; ``ideal_speedup`` from the bytes read (``DecodingBytes``); ``efficiency``, speedup ÷
ideal speedup; ``time_to_first_token`` in seconds; ``memory_above_plain``, peak memory ÷ that of plain decoding - 1.

Over all rounds: ``acceptance_rate``, accepted ÷ drafted tokens; ``mean_generated_length`` and ``mean_draft_length``,
committed and drafted tokens per round; ``accepted_by_position``, of the rounds that drafted a j-th token the share that
accepted it; the shares of the time after the first token; ``predicted_tpt``, KnapSpec's objective (equation 4, with
head) for that acceptance and draft length with the measured latencies; ``measured_tpt``, tokens per second.

``etpl`` is DEL's (Entezari Zarch et al. 2025): tokens ÷ loaded layers of a prompt, mean over the prompts; a draft token
loads half a layer per sublayer that it runs, a verification loads all layers. ``peak_memory_bytes`` is the maximum.
``identical`` of the ``compared`` outputs have exactly the tokens of plain decoding, ``differing`` have others.
``rounds`` and ``tokens`` count all outputs, ``prompts`` the prompts with an output, ``failures`` the failed attempts.
"""


def candidate_figures(
    samples: Samples, plain: Samples, transformers: Samples, latencies: LatencyProfile, failures: int
) -> Figures:
    """Computes all figures of a candidate.

    Args:
        samples: its outputs.
        plain: outputs of plain decoding; compared by prompt and repeat.
        transformers: outputs of the peer ``transformers``; empty if it was not measured.
        latencies: the model's latencies.
        failures: number of failed attempts.
    """
    figures: Figures = dict.fromkeys(FIGURES)
    figures.update(identical=0, compared=0, differing=0, tokens=0, prompts=0, failures=failures)
    if samples:
        figures.update(_speed_figures(samples, plain, transformers))
        figures.update(_output_figures(samples, plain))
        if all(sample.rounds is not None for sample in samples.values()):
            figures.update(round_figures(samples, latencies))
    return figures


def _speed_figures(samples: Samples, plain: Samples, transformers: Samples) -> Figures:
    speedups = list(speedups_by_prompt(samples, plain).values())
    ideals = {key: _ideal_speedup(sample) for key, sample in samples.items()}
    efficiencies = {key: quotient(speedup, ideals[key]) for key, speedup in over(samples, plain, decode_speed).items()}
    return {
        "tokens_per_second": median_over_prompts({key: decode_speed(sample) for key, sample in samples.items()}),
        "speedup": median(speedups),
        "speedup_interval": median_interval(speedups),
        "speedup_with_prefill": median_over_prompts(over(samples, plain, whole_speed)),
        "speedup_over_transformers": median_over_prompts(over(samples, transformers, decode_speed)),
        "ideal_speedup": median_over_prompts(ideals),
        "efficiency": median_over_prompts(efficiencies),
        "time_to_first_token": median_over_prompts({key: sample.prefill_seconds for key, sample in samples.items()}),
    }


def _output_figures(samples: Samples, plain: Samples) -> Figures:
    outputs = list(samples.values())
    same = [sample.identical for sample in outputs if sample.identical is not None]
    memory_over_plain = median_over_prompts(over(samples, plain, _peak_memory))
    decoded = sum(len(sample.token_ids) - 1 for sample in outputs)
    return {
        "identical": sum(same),
        "compared": len(same),
        "differing": len(same) - sum(same),
        "measured_tpt": quotient(decoded, sum(sample.decode_seconds for sample in outputs)) or None,
        "peak_memory_bytes": max(map(_peak_memory, outputs)) or None,
        "memory_above_plain": None if memory_over_plain is None else memory_over_plain - 1,
        "tokens": sum(len(sample.token_ids) for sample in outputs),
        "prompts": len({prompt for prompt, _ in samples}),
    }


def _ideal_speedup(sample: Measurement) -> float | None:
    return sample.bytes.ideal_speedup if sample.bytes is not None and sample.bytes.tokens else None


def _peak_memory(sample: Measurement) -> int:
    return sample.peak_memory_bytes
