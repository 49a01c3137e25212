"""``selfspec bench overhead``: the costs of plain decoding, drafting and selection, and their lower bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.types import SamplingParams
from selfspec_lab.bench import overhead_figures as figures
from selfspec_lab.bench.baseline import VARIANTS, generate_timed
from selfspec_lab.bench.benchmark import Candidate, Outcome, Sample, run_benchmark
from selfspec_lab.bench.forced import ForcedEngine, check_probability
from selfspec_lab.bench.llama_cpp.overhead import NAME as LLAMA_CPP
from selfspec_lab.bench.llama_cpp.overhead import OverheadPeer
from selfspec_lab.bench.options import PLAIN, BenchOptions, make_engines
from selfspec_lab.bench.resident_peak import ResidentPeak
from selfspec_lab.bench.spread import Measured
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.bench.verify_rows import verify_rows_seconds
from selfspec_lab.measuring import ROW_COUNTS, StepBytes, Target, copy_bytes_per_second
from selfspec_lab.prompts import PROMPTS

_TRANSFORMERS = "transformers: "


@dataclass(frozen=True)
class OverheadOptions(BenchOptions):
    """What to measure. Outputs have exactly ``max_new_tokens`` tokens; end-of-sequence tokens are ignored.

    Attributes:
        force_acceptance: probability with which drafted tokens are accepted regardless of the model (not lossless);
            ``None`` for normal acceptance.
        compile: also measure ``generate`` with a compiled step.
        llama_cpp: also measure llama.cpp, if it is installed and can run the model.
    """

    repeats: int = 5
    force_acceptance: float | None = None
    compile: bool = True
    llama_cpp: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.force_acceptance is not None:
            check_probability(self.force_acceptance)


def run_overhead(options: OverheadOptions, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Loads the model and measures it.

    Args:
        options: what to measure.
        progress: is called with a line of text before each step.

    Returns:
        The report, ready for JSON.

    Raises:
        SelfSpecError: the model cannot be loaded.
    """
    model, tokenizer = options.load(progress)
    return measure_overhead(model, tokenizer, options, progress)


def measure_overhead(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: OverheadOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures a loaded model; arguments and result as for ``run_overhead``."""
    target = Target(model, options.runtime)
    plain = Engine(model, tokenizer, make_method(PLAIN, target))
    prompts = [plain.encode(texts[0]) for texts in PROMPTS.values()]
    for prompt in prompts:
        target.check_length(len(prompt), options.max_new_tokens)
    engines, failures = _make_engines(plain, options)
    candidates = {PLAIN: _engine_candidate({PLAIN: plain}, PLAIN, options)}
    candidates |= {
        _TRANSFORMERS + name: _transformers_candidate(model, make(), options)
        for name, make in VARIANTS.items()
        if options.compile or name != "compiled"
    }
    candidates |= {name: _engine_candidate(engines, name, options) for name in engines}

    context = max(map(len, prompts)) + options.max_new_tokens
    with OverheadPeer(model, context, wanted=options.llama_cpp) as llama_cpp:
        if llama_cpp.error is None:
            candidates[LLAMA_CPP] = llama_cpp.candidate(options.max_new_tokens)
        machine = _Machine(target, prompts, options.max_new_tokens, llama_cpp)

        def start_repeat() -> None:
            engines.update(_make_engines(plain, options)[0])  # without what the methods have learned
            machine.measure()

        outcome = run_benchmark(candidates, prompts, options.repeats, before_repeat=start_repeat, progress=progress)
    if PLAIN in outcome.failures:
        raise RuntimeError(f"plain decoding failed: {outcome.failures[PLAIN]}")
    outcome.failures |= failures
    settings = {name: {**engine.method.settings.__dict__} for name, engine in engines.items()}
    report = _report(target, options, outcome, machine, settings)
    plain_speeds = [figures.tokens_per_second(samples) for samples in outcome.samples[PLAIN]]
    return {**report, "llama_cpp": llama_cpp.report(outcome, plain_speeds)}


class _Machine:
    """Measurements beside the candidates, once per repeat: copy bandwidth and forwards of several rows."""

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, llama_cpp: OverheadPeer
    ) -> None:
        self._target = target
        self._llama_cpp = llama_cpp
        self._token_ids = prompts[0]
        self.context = sum(map(len, prompts)) // len(prompts) + max_new_tokens // 2
        self.copies: list[float] = []
        self.rows: list[dict[int, float]] = []

    def measure(self) -> None:
        self.copies.append(copy_bytes_per_second(self._target.device))
        self.rows.append(verify_rows_seconds(self._target, self._token_ids, self.context))
        self._llama_cpp.measure_rows(self._token_ids, self.context)

    def over_one_row(self, rows: int) -> Measured:
        return Measured.of(seconds[rows] / seconds[1] if rows in seconds else None for seconds in self.rows)


def _make_engines(plain: Engine, options: OverheadOptions) -> tuple[dict[str, Engine], dict[str, str]]:
    if options.force_acceptance is None:
        return make_engines(plain, options.method_names, options.settings)
    return make_engines(
        plain, options.method_names, options.settings, ForcedEngine, probability=options.force_acceptance
    )


def _engine_candidate(engines: Mapping[str, Engine], name: str, options: OverheadOptions) -> Candidate:
    """A candidate that runs the engine that has the name at that time."""
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)

    def write(prompt_ids: Sequence[int]) -> Sample:
        engine = engines[name]
        peak = ResidentPeak(engine.target.device)
        result = engine.generate(prompt_ids, params)
        return Sample(result.token_ids, result.seconds - result.prefill_seconds, peak.peak_bytes(), result)

    return write


def _transformers_candidate(model: PreTrainedModel, variant: Mapping[str, Any], options: OverheadOptions) -> Candidate:
    def write(prompt_ids: Sequence[int]) -> Sample:
        peak = ResidentPeak(model.device)
        output = generate_timed(model, prompt_ids, options.max_new_tokens, variant)
        return Sample(output.token_ids, output.seconds, peak.peak_bytes())

    return write


def _report(
    target: Target, options: OverheadOptions, outcome: Outcome, machine: _Machine, settings: Mapping[str, Any]
) -> dict[str, Any]:
    costs, plain = StepBytes(target), outcome.samples[PLAIN]
    plain_speeds = [figures.tokens_per_second(samples) for samples in plain]
    methods = {}
    for name in options.method_names:
        report: dict[str, Any] = {"error": outcome.failures.get(name), "settings": settings.get(name)}
        if name in outcome.samples:
            samples = outcome.samples[name]
            report |= figures.by_repeat(figures.method_figures, samples, plain, [costs] * len(plain))
            forced = options.force_acceptance is not None
            report["identical"] = None if forced else _texts(samples) == _texts(plain)
        else:
            report |= figures.over_repeats([dict.fromkeys(figures.METHOD_FIGURES)])
        methods[name] = report
    return {
        "benchmark": "overhead",
        "stamp": make_stamp(target.device),
        "options": _options(target, options, machine),
        **Measured.of(machine.copies).fields("copy_bytes_per_second"),
        "plain": figures.by_repeat(figures.plain_figures, plain, [costs] * len(plain), machine.copies),
        "transformers": _transformers_report(outcome, plain_speeds, options),
        "methods": methods,
        "verify_rows": {str(rows): machine.over_one_row(rows).median for rows in ROW_COUNTS},
        "verify_rows_spread": {str(rows): machine.over_one_row(rows).spread for rows in ROW_COUNTS},
        "verify_one_row_seconds": Measured.of(seconds.get(1) for seconds in machine.rows).median,
    }


def _options(target: Target, options: OverheadOptions, machine: _Machine) -> dict[str, Any]:
    return {
        "model": options.model,
        "widen": options.widen,
        "parameters": target.parameter_count,
        "dtype": target.weights,
        "device": str(target.device),
        "runtime": options.runtime,
        "fused_sublayers": target.fused_count,
        "methods": options.method_names,
        "prompts": len(PROMPTS),
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
        "force_acceptance": options.force_acceptance,
        "lossless": options.force_acceptance is None,
        "verify_rows_context": machine.context,
    }


def _transformers_report(outcome: Outcome, plain_speeds: Sequence[float], options: OverheadOptions) -> dict[str, Any]:
    """Figures of ``generate`` and its variants; ``plain_speedup`` is the speed of our plain decoding ÷ theirs."""
    reports: dict[str, Any] = {}
    for variant in VARIANTS:
        samples = outcome.samples.get(_TRANSFORMERS + variant)
        speeds = [figures.tokens_per_second(repeat) for repeat in samples or ()]
        ratios = [plain / speed for plain, speed in zip(plain_speeds, speeds, strict=False)]
        left_out = "not requested" if variant == "compiled" and not options.compile else None
        reports[variant] = {
            **Measured.of(speeds).fields("tokens_per_second"),
            **Measured.of(ratios).fields("plain_speedup"),
            "error": outcome.failures.get(_TRANSFORMERS + variant, left_out),
        }
    return {**reports.pop("dynamic"), **reports}


def _texts(repeats: Sequence[Sequence[Sample]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in samples] for samples in repeats]
