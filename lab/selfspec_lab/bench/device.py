"""``selfspec bench device``: everything about one device that others want to know, in minutes and in one file."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from selfspec import Engine
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.methods import make_method
from selfspec.model.observed import ObservedDecoder
from selfspec.runtimes.accelerators import describe_device
from selfspec.runtimes.candidates import CANDIDATES
from selfspec.runtimes.costs.measuring import measure_row_costs
from selfspec.runtimes.device_trial import BITS, BUDGET, Trial
from selfspec.runtimes.precision import Precision
from selfspec.types import SamplingParams
from selfspec_lab.bench import overhead_figures as figures
from selfspec_lab.bench.baseline import generate_timed
from selfspec_lab.bench.benchmark import NO_TIME, Candidate, Outcome, Sample, explain, run_benchmark
from selfspec_lab.bench.options import PLAIN, BenchOptions, make_engines
from selfspec_lab.bench.resident_peak import ResidentPeak
from selfspec_lab.bench.spread import Measured
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.measuring import StepBytes, Target, copy_bytes_per_second
from selfspec_lab.prompts import PROMPTS

METHODS = "auto,suffix,low-bit"
"""What is measured by default, in the order of interest: time may run out."""

_TRANSFORMERS = "transformers"
_PACKAGES = ("triton", "selfspec-lab")


@dataclass(frozen=True)
class DeviceOptions(BenchOptions):
    """What to measure. Outputs have exactly ``max_new_tokens`` tokens; end-of-sequence tokens are ignored.

    Attributes:
        minutes: after which nothing more is begun.
    """

    minutes: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.minutes > 0:
            raise InvalidParameterError(f"minutes must be above 0, not {self.minutes}")


def run_device(options: DeviceOptions, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Loads the model and measures the device with it.

    Args:
        options: what to measure.
        progress: is called with a line of text before each step.

    Returns:
        The report, ready for JSON; ``docs/gpu.md`` says what its parts are.

    Raises:
        SelfSpecError: the model cannot be loaded.
    """
    began = time.perf_counter()
    model, tokenizer = options.load(progress)
    stamp = make_stamp(model.device, _PACKAGES)
    progress(f"runtimes on {model.device}: up to {BUDGET:.0f} s, at the first use of the model")
    target = Target(model, options.runtime)
    trial = _trial(target)
    progress("forwards of several rows")
    rows = _row_seconds(target)
    plain = Engine(model, tokenizer, make_method(PLAIN, target))
    prompts = [plain.encode(texts[0]) for texts in PROMPTS.values()]
    for prompt in prompts:
        target.check_length(len(prompt), options.max_new_tokens)
    engines, failures = make_engines(plain, options.method_names, options.settings)
    candidates: dict[str, Candidate] = {
        PLAIN: partial(_write, plain, options),
        _TRANSFORMERS: partial(_write_by_transformers, model, options),
        **{name: partial(_write, engine, options) for name, engine in engines.items()},
    }
    end = began + 60 * options.minutes
    outcome = run_benchmark(
        candidates, prompts, options.repeats, is_over=lambda: time.perf_counter() > end, progress=progress
    )
    if outcome.failures.get(PLAIN, NO_TIME) != NO_TIME:
        raise RuntimeError(f"plain decoding failed: {outcome.failures[PLAIN]}")
    outcome.failures |= failures
    return {
        "benchmark": "device",
        "stamp": stamp,
        "device": describe_device(target.device),
        "options": {**asdict(options), "prompts": len(prompts), "weights": target.weights},
        "runtime": target.chosen_runtime,
        "trial": trial,
        "copy_bytes_per_second": copy_bytes_per_second(target.device),
        "row_seconds": rows,
        **_speeds(target, outcome, options.method_names),
        "repeats_done": len(outcome.samples.get(PLAIN, ())),
        "seconds": time.perf_counter() - began,
    }


def _trial(target: Target) -> dict[str, Any] | None:
    """The table of the trial: the one that chose the runtime, or one that is made for the report alone."""
    trial, chose = target.trial, target.trial is not None
    if trial is None:
        if isinstance(target.decoder, ObservedDecoder) or not target.decoder.placement.is_whole:
            return None
        trial = Trial(target.decoder, CANDIDATES).run()
    return {"chose_the_runtime": chose, "budget_seconds": BUDGET, "lines": trial.table(), **trial.to_dict()}


def _row_seconds(target: Target) -> dict[str, Any]:
    """Seconds of a forward of the whole model by its rows, with its own weights and with low-bit ones."""
    precisions = {"own": None, **{f"{bits} bits": Precision.of(bits) for bits in BITS}}
    found: dict[str, Any] = {}
    for name, precision in precisions.items():
        try:
            costs = measure_row_costs(target, range(target.sublayer_count), precision, most_seconds=4.0)
            found[name] = {str(rows): seconds for rows, seconds in zip(costs.rows, costs.seconds, strict=True)}
        except SelfSpecError as error:
            found[name] = {"error": explain(error)}
    target.release_low_bit()
    return found


def _write(engine: Engine, options: DeviceOptions, prompt_ids: Sequence[int]) -> Sample:
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    peak = ResidentPeak(engine.target.device)
    result = engine.generate(list(prompt_ids), params)
    return Sample(result.token_ids, result.seconds - result.prefill_seconds, peak.peak_bytes(), result)


def _write_by_transformers(model: PreTrainedModel, options: DeviceOptions, prompt_ids: Sequence[int]) -> Sample:
    peak = ResidentPeak(model.device)
    output = generate_timed(model, prompt_ids, options.max_new_tokens, {})
    return Sample(output.token_ids, output.seconds, peak.peak_bytes())


def _speeds(target: Target, outcome: Outcome, names: Sequence[str]) -> dict[str, Any]:
    """Plain decoding, transformers beside it, and the methods."""
    costs, plain = StepBytes(target), outcome.samples.get(PLAIN, [])
    methods: dict[str, Any] = {}
    for name in names:
        samples = outcome.samples.get(name, [])
        methods[name] = {"error": outcome.failures.get(name), **_identity(samples, plain), **_drafts(samples)}
        if samples:
            methods[name] |= figures.by_repeat(figures.method_figures, samples, plain, [costs] * len(plain))
    return {
        "plain": {"error": outcome.failures.get(PLAIN), **_speed(plain)},
        "transformers": {
            "error": outcome.failures.get(_TRANSFORMERS),
            **_identity(outcome.samples.get(_TRANSFORMERS, []), plain),
            **_speed(outcome.samples.get(_TRANSFORMERS, [])),
        },
        "methods": methods,
    }


def _speed(repeats: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    return Measured.of(map(figures.tokens_per_second, repeats)).fields("tokens_per_second")


def _identity(repeats: Sequence[Sequence[Sample]], plain: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Whether all texts are those of plain decoding, and how many of how many are."""
    pairs = (
        [
            own.token_ids == other.token_ids
            for samples, others in zip(repeats, plain, strict=True)
            for own, other in zip(samples, others, strict=True)
        ]
        if repeats
        else []
    )
    return {"identical": all(pairs) if pairs else None, "identical_texts": sum(pairs), "texts": len(pairs)}


def _drafts(repeats: Sequence[Sequence[Sample]]) -> Mapping[str, Any]:
    """How many rounds each strategy of a method drafted."""
    generations = [sample.generation for samples in repeats for sample in samples if sample.generation is not None]
    drafted = Counter(str(each.drafted_by) for generation in generations for each in generation.rounds)
    return {"drafted_by": dict(drafted)}
