"""The demo: models generate with several methods, plain decoding and transformers, side by side."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from selfspec import Engine, Prompt
from selfspec.errors import ModelLoadError
from selfspec.loading import INSTALLABLE, find_installed, load_model
from selfspec.methods import make_method
from selfspec.types import SamplingParams
from selfspec_lab.bench.baseline import generate_timed
from selfspec_lab.bench.benchmark import Candidate, Outcome, Sample, run_benchmark
from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS
from selfspec_lab.testing import verifies_exactly

PLAIN = "autoregressive"
TRANSFORMERS = "transformers"
"""Name of transformers' ``generate`` with its defaults."""
REPEATS = 2
EXIT_LAYER = 6
"""Exit layer of the early-exit methods, of the 16 layers of the bundled checkpoints."""


@dataclass(frozen=True)
class Scene:
    """A model with prompts and methods.

    Attributes:
        model: name of the model.
        prompts: prompts by name.
        methods: settings by method; the first method's output is streamed.
        chat: whether the prompts are chat messages.
    """

    model: str
    prompts: Mapping[str, str]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    chat: bool = False

    def prompt(self, name: str) -> Prompt:
        """A prompt as ``Engine.generate`` takes it."""
        text = self.prompts[name]
        return [{"role": "user", "content": text}] if self.chat else text


REAL = Scene(
    "smollm2",
    {name: CHAT_PROMPTS[name] for name in ("question", "code", "summary")},
    {"auto": {}, "suffix": {}, "prompt-lookup": {}, "uniform": {"skip_ratio": 0.2}},
    chat=True,
)
BUNDLED = (
    Scene("tiny-early-exit", {"math": PROMPTS["math"][0]}, {"layerskip-dv": {"exit_layer": EXIT_LAYER}, "suffix": {}}),
    Scene("tiny", {"code": PROMPTS["code"][0]}, {"self-spec": {}, "suffix": {}}),
)


@dataclass(frozen=True)
class Result:
    """The figures of one candidate in a scene.

    Attributes:
        model: name of the model.
        candidate: name of the method, or ``transformers``.
        tokens_per_second: after the first token; median over prompts and repeats.
        speedup: over plain decoding of the same prompt in the same repeat; the median.
        spread: lowest and highest of these ratios.
        acceptance_rate: accepted ÷ drafted tokens; ``None`` if nothing was drafted.
        identical: outputs with exactly the tokens of plain decoding.
        outputs: number of outputs.
    """

    model: str
    candidate: str
    tokens_per_second: float
    speedup: float
    spread: tuple[float, float]
    acceptance_rate: float | None
    identical: int
    outputs: int


def run_demo(console: Console, *, max_new_tokens: int, device: str) -> bool:
    """Shows every scene and prints a table.

    Args:
        console: console for text and table.
        max_new_tokens: longest output of a prompt, in tokens.
        device: device as torch names it, or ``auto``.

    Returns:
        Whether every output of every method was identical to plain decoding.
    """
    scenes = [scene for scene in (REAL, *BUNDLED) if _is_there(scene, console)]
    results: list[Result] = []
    for scene in scenes:
        results += play(console, scene, max_new_tokens, device)
    console.print(make_table(results))
    console.print(
        f"Greedy, at most {max_new_tokens} new tokens, {REPEATS} repeats in turns; tokens/s after the first token; "
        "median speedup over plain decoding (lowest to highest).",
        style="dim",
    )
    return all(result.identical == result.outputs for result in results if result.candidate != TRANSFORMERS)


def _is_there(scene: Scene, console: Console) -> bool:
    model = INSTALLABLE.get(scene.model)
    if model is None or find_installed(model) is not None:
        return True
    console.print(
        f"{scene.model} is not installed (`selfspec models install {scene.model}` brings it); continuing with the "
        "bundled checkpoints."
    )
    return False


def play(console: Console, scene: Scene, max_new_tokens: int, device: str) -> list[Result]:
    """Shows a scene: streams one method's outputs, then measures all candidates in turns.

    Returns:
        The results of plain decoding, the methods, and transformers.
    """
    plain, engines = make_engines(scene, device)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    seen = next(iter(engines))
    for name in scene.prompts:
        _stream(console, f"{scene.model}, {name}, drafting with {seen}", scene, name, engines[seen], params)
    candidates: dict[str, Candidate] = {PLAIN: _candidate(plain, params)}
    candidates |= {name: _candidate(engine, params) for name, engine in engines.items()}
    candidates[TRANSFORMERS] = _transformers(plain, params)
    prompts = [plain.encode(scene.prompt(name)) for name in scene.prompts]
    return summarise(scene.model, run_benchmark(candidates, prompts, REPEATS))


def make_engines(scene: Scene, device: str) -> tuple[Engine, dict[str, Engine]]:
    """Makes engines for plain decoding and, by name, for the scene's methods, all with the same model.

    The dtype is bfloat16 if verification is exact in it, otherwise float32.
    """
    model: Any
    model, tokenizer = load_model(scene.model, dtype="auto", device=device)
    if not (model.device.type == "cpu" and verifies_exactly(model.dtype)):
        model.to(torch.float32)
    plain = Engine(model, tokenizer, PLAIN)
    engines = {
        name: Engine(model, tokenizer, make_method(name, plain.target, settings))
        for name, settings in scene.methods.items()
    }
    return plain, engines


def _candidate(engine: Engine, params: SamplingParams) -> Candidate:
    def write(prompt_ids: Sequence[int]) -> Sample:
        result = engine.generate(prompt_ids, params)
        return Sample(result.token_ids, result.seconds - result.prefill_seconds, 0, result)

    return write


def _transformers(plain: Engine, params: SamplingParams) -> Candidate:
    def write(prompt_ids: Sequence[int]) -> Sample:
        output = generate_timed(plain.target.model, prompt_ids, params.max_new_tokens, {}, eos_ids=plain.eos_ids)
        return Sample(output.token_ids, output.seconds, 0)

    return write


def summarise(model: str, outcome: Outcome) -> list[Result]:
    """Computes one result per candidate.

    Args:
        model: name of the model.
        outcome: results of the benchmark, with plain decoding.

    Raises:
        ModelLoadError: a candidate failed.
    """
    for name, reason in outcome.failures.items():
        raise ModelLoadError(f"{name} failed on {model}: {reason}")
    plain = _flat(outcome.samples[PLAIN])
    return [_summarise(model, name, _flat(samples), plain) for name, samples in outcome.samples.items()]


def _summarise(model: str, candidate: str, samples: Sequence[Sample], plain: Sequence[Sample]) -> Result:
    speeds = [_tokens_per_second(sample) for sample in samples]
    ratios = [speed / _tokens_per_second(other) for speed, other in zip(speeds, plain, strict=True)]
    generations = [sample.generation for sample in samples if sample.generation is not None]
    drafted = sum(generation.drafted for generation in generations)
    return Result(
        model=model,
        candidate=candidate,
        tokens_per_second=statistics.median(speeds),
        speedup=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        acceptance_rate=sum(generation.accepted for generation in generations) / drafted if drafted else None,
        identical=sum(sample.token_ids == other.token_ids for sample, other in zip(samples, plain, strict=True)),
        outputs=len(samples),
    )


def _flat(repeats: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [sample for samples in repeats for sample in samples]


def _tokens_per_second(sample: Sample) -> float:
    """Tokens after the first ÷ seconds after the first; an output of one token counts as one."""
    return max(1, len(sample.token_ids) - 1) / sample.seconds


def make_table(results: Sequence[Result]) -> Table:
    """The results as a table of at most 100 columns, with one section per model."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for header in ("tokens/s", "speedup", "", "acceptance", "identical\nto plain"):
        table.add_column(header, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        following = results[index + 1 : index + 2]
        same_model = any(result.model == other.model for other in following)
        table.add_row(*_cells(result), end_section=not same_model)
    return table


def _cells(result: Result) -> tuple[str, ...]:
    rate, (lowest, highest) = result.acceptance_rate, result.spread
    share = f"{result.identical} of {result.outputs}"
    wrong = result.identical < result.outputs and result.candidate != TRANSFORMERS
    return (
        result.model,
        result.candidate,
        f"{result.tokens_per_second:.1f}",
        f"{result.speedup:.2f}x",
        f"{lowest:.2f}-{highest:.2f}",
        "-" if rate is None else f"{rate:.2f}",
        f"[bold red]{share}[/]" if wrong else share,
    )


def _stream(console: Console, title: str, scene: Scene, name: str, engine: Engine, params: SamplingParams) -> None:
    """Streams one output to the console, accepted draft tokens in green. Nothing is timed here."""
    console.rule(title, align="left")
    console.print(scene.prompts[name], style="dim", end="\n\n" if scene.chat else "", markup=False, soft_wrap=True)
    for piece in engine.stream(scene.prompt(name), params):
        style = "green" if piece.origin == "draft" else None
        console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
        console.file.flush()
    console.print("\n")
