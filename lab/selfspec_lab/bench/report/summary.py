"""The summary of a run: all figures of its reports, as in ``summary.json``."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.figures import candidate_figures
from selfspec_lab.bench.report.medians import Samples, median, median_interval, samples_of, speedups_by_prompt
from selfspec_lab.bench.report.read import Run
from selfspec_lab.bench.run.peers import PEERS

AUTO = "auto"

TRANSFORMERS = "transformers"
"""Name of the peer that is transformers' ``generate`` with its defaults."""


def summarise(run: Run) -> dict[str, Any]:
    """Computes the figures of a run.

    Args:
        run: as ``read_run`` returns it.

    Returns:
        The object of ``summary.json``. From ``run.json``: ``stamp``, ``options``, ``parameters``,
        ``copy_bytes_per_second``, ``skipped`` prompts, ``failures`` (candidates that could not be set up), ``chat`` and
        ``llama_cpp`` (null in older runs). ``dtype`` and ``layers`` of the model. ``prompts``: number of prompts, and
        ``categories``: the same by category. ``expected`` and ``measured``: numbers of outputs. ``plain_over``: by peer
        ``speedup`` and ``speedup_interval`` of plain decoding over it. ``auto_over``: the same of ``auto`` over each
        other candidate, prompt by prompt, and the ``worst`` prompt. ``candidates``: by name, in the order of the
        options, ``kind`` (``baseline``, ``method`` or ``peer``), ``settings``, ``errors``, and the figures of
        ``figures.FIGURES``, ``overall`` and by category (``categories``).
    """
    names = _candidates(run)
    samples = {name: samples_of(run.measurements, name) for name in names}
    fields = run.fields
    asked = {*names, *fields["options"]["methods"], *fields["options"]["peers"]} - {*fields["failures"]}
    return {
        "benchmark": "run",
        "stamp": fields["stamp"],
        "options": fields["options"],
        "parameters": fields["parameters"],
        "dtype": fields["dtype"],
        "layers": run.latencies.layers,
        "copy_bytes_per_second": fields["copy_bytes_per_second"],
        "ordered": fields["ordered"],
        "chat": fields.get("chat"),
        "llama_cpp": fields.get("llama_cpp"),
        "prompts": len(fields["prompts"]),
        "categories": run.categories,
        "skipped": fields["skipped"],
        "failures": fields["failures"],
        "expected": len(asked) * len(fields["prompts"]) * fields["options"]["repeats"],
        "measured": len(run.measurements),
        "plain_over": {name: _over(samples[PLAIN], samples[name]) for name in names if kind_of(name) == "peer"},
        "auto_over": {
            name: _over(samples[AUTO], samples[name], worst=True) for name in names if AUTO in samples and name != AUTO
        },
        "candidates": {name: _candidate(run, name, samples) for name in names},
    }


def kind_of(candidate: str) -> str:
    """Kind of a candidate: ``baseline``, ``peer`` or ``method``."""
    return "baseline" if candidate == PLAIN else "peer" if candidate in PEERS else "method"


def _candidates(run: Run) -> list[str]:
    """All candidates: plain decoding, then the others in the order of the options."""
    options = run.fields["options"]
    there = {measurement.candidate for measurement in run.measurements} | set(run.fields["failures"])
    ordered = dict.fromkeys([PLAIN, *options["methods"], *options["peers"], *sorted(there)])
    return [name for name in ordered if name in there or name == PLAIN]


def _candidate(run: Run, name: str, samples: Mapping[str, Samples]) -> dict[str, Any]:
    errors = [each for each in run.measurements if each.candidate == name and each.error is not None]
    messages = [run.fields["failures"][name]] if name in run.fields["failures"] else []

    def figures(category: str | None) -> dict[str, Any]:
        """Figures over the prompts of a category, or over all."""
        mine, plain, transformers = (
            _in_category(samples.get(each, {}), category) for each in (name, PLAIN, TRANSFORMERS)
        )
        failures = sum(category in (None, each.category) for each in errors)
        return candidate_figures(mine, plain, transformers, run.latencies, failures)

    return {
        "kind": kind_of(name),
        "settings": run.fields["settings"].get(name),
        "errors": [*messages, *_counted(each.error for each in errors if each.error is not None)],
        "overall": figures(None),
        "categories": {category: figures(category) for category in run.categories},
    }


def _over(samples: Samples, others: Samples, *, worst: bool = False) -> dict[str, Any]:
    speedups = list(speedups_by_prompt(samples, others).values())
    figures: dict[str, Any] = {"speedup": median(speedups), "speedup_interval": median_interval(speedups)}
    return {**figures, "worst": min(speedups, default=None)} if worst else figures


def _in_category(samples: Samples, category: str | None) -> Samples:
    return {key: sample for key, sample in samples.items() if category in (None, sample.category)}


def _counted(messages: Iterable[str]) -> list[str]:
    """Each message once, with its number of occurrences if above 1."""
    return [f"{message} ({count} times)" if count > 1 else message for message, count in Counter(messages).items()]
