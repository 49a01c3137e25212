"""The demo: every bundled checkpoint, domain and method, next to plain decoding in the same run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.engine import Engine
from selfspec.loading import BUNDLED, load_model
from selfspec.methods import METHODS
from selfspec.prompts import PROMPTS
from selfspec.types import Generation, SamplingParams

BASELINE = "autoregressive"
PROMPTS_PER_DOMAIN = 2
EXIT_LAYER = 6
"""Where the early-exit methods leave the 16 layers of the bundled checkpoints."""

_SHOWN = {"tiny": "uniform", "tiny-early-exit": "layerskip"}
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measurement:
    """What one method did on the prompts of one domain.

    Attributes:
        checkpoint: name of the bundled checkpoint.
        domain: name of the domain.
        method: name of the method.
        tokens_per_second: tokens after the first ÷ seconds after the first token, all prompts together.
        speedup: ``tokens_per_second`` ÷ that of plain decoding in the same run.
        acceptance_rate: accepted ÷ drafted tokens; ``None`` where nothing was drafted.
        mean_generated_length: tokens per round.
        identical: whether every output has exactly the tokens of plain decoding.
    """

    checkpoint: str
    domain: str
    method: str
    tokens_per_second: float
    speedup: float
    acceptance_rate: float | None
    mean_generated_length: float
    identical: bool


def run_demo(console: Console, *, max_new_tokens: int, device: str) -> bool:
    """Generates with everything that is there, in float32 and greedily, and prints a table.

    Args:
        console: where text and table go.
        max_new_tokens: longest output of a prompt.
        device: where to run.

    Returns:
        Whether every method wrote exactly what plain decoding writes.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    measurements: list[Measurement] = []
    for checkpoint in BUNDLED:
        engines = make_engines(checkpoint, device)
        for domain, prompts in PROMPTS.items():
            _write_for_all_to_see(console, checkpoint, domain, engines[_SHOWN[checkpoint]], prompts[0], params)
            generations = generate_interleaved(engines, prompts[:PROMPTS_PER_DOMAIN], params)
            measurements += measure(checkpoint, domain, generations)
    console.print(make_table(measurements))
    console.print(
        f"float32, greedy, {PROMPTS_PER_DOMAIN} prompts a domain, at most {max_new_tokens} new tokens each. "
        f"Speedup is over {BASELINE} in the same run.",
        style="dim",
    )
    return all(measurement.identical for measurement in measurements)


def make_engines(checkpoint: str, device: str) -> dict[str, Engine]:
    """An engine for every method, all with the same float32 model; plain decoding comes first."""
    model, tokenizer = load_model(checkpoint, dtype="float32", device=device)
    names = [BASELINE, *(name for name in METHODS if name != BASELINE)]
    return {name: Engine(model, tokenizer, name, settings=_settings(name)) for name in names}


def _settings(method: str) -> dict[str, Any]:
    return {"exit_layer": EXIT_LAYER} if method.startswith("layerskip") else {}


def generate_interleaved(
    engines: Mapping[str, Engine], prompts: Sequence[str], params: SamplingParams
) -> dict[str, list[Generation]]:
    """Outputs of every engine for every prompt.

    All engines are warmed up, take turns on each prompt, and another one begins each time, so that a machine that gets
    slower or faster in between favours none.
    """
    names = list(engines)
    for engine in engines.values():
        engine.generate(prompts[0], params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
    generations: dict[str, list[Generation]] = {name: [] for name in names}
    for turn, prompt in enumerate(prompts):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            generations[name].append(engines[name].generate(prompt, params))
    return generations


def measure(checkpoint: str, domain: str, generations: Mapping[str, Sequence[Generation]]) -> list[Measurement]:
    """One measurement for every method.

    Args:
        checkpoint: name of the checkpoint.
        domain: name of the domain.
        generations: by method the outputs for the same prompts; ``autoregressive`` among the methods.
    """
    plain = generations[BASELINE]
    plain_speed = _tokens_per_second(plain)
    return [
        Measurement(
            checkpoint=checkpoint,
            domain=domain,
            method=method,
            tokens_per_second=_tokens_per_second(outputs),
            speedup=_ratio(_tokens_per_second(outputs), plain_speed),
            acceptance_rate=_acceptance_rate(outputs),
            mean_generated_length=_mean_generated_length(outputs),
            identical=[output.token_ids for output in outputs] == [output.token_ids for output in plain],
        )
        for method, outputs in generations.items()
    ]


def make_table(measurements: Sequence[Measurement]) -> Table:
    """The measurements as a table of at most 100 columns, one section a domain."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "domain", "method"):
        table.add_column(header, no_wrap=True)
    for header in ("tokens/s", "speedup", "acceptance\nrate", "mean\ngenerated\nlength"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("identical\nto plain", no_wrap=True)
    for index, measurement in enumerate(measurements):
        following = measurements[index + 1 : index + 2]
        same_domain = any(_group(measurement) == _group(other) for other in following)
        table.add_row(*_cells(measurement), end_section=not same_domain)
    return table


def _group(measurement: Measurement) -> tuple[str, str]:
    return measurement.checkpoint, measurement.domain


def _cells(measurement: Measurement) -> tuple[str, ...]:
    rate = measurement.acceptance_rate
    return (
        measurement.checkpoint,
        measurement.domain,
        measurement.method,
        f"{measurement.tokens_per_second:.1f}",
        f"{measurement.speedup:.2f}x",
        "-" if rate is None else f"{rate:.2f}",
        f"{measurement.mean_generated_length:.2f}",
        "yes" if measurement.identical else "[bold red]no[/]",
    )


def _write_for_all_to_see(
    console: Console, checkpoint: str, domain: str, engine: Engine, prompt: str, params: SamplingParams
) -> None:
    """Streams one output to the console, accepted draft tokens in green. Nothing is timed here."""
    console.rule(f"{checkpoint}, {domain}, drafting with {engine.method.name}", align="left")
    console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
    for piece in engine.stream(prompt, params):
        style = "green" if piece.origin == "draft" else None
        console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
        console.file.flush()
    console.print("\n")


def _tokens_per_second(outputs: Sequence[Generation]) -> float:
    tokens = sum(output.new_token_count - 1 for output in outputs)
    return _ratio(tokens, sum(output.seconds - output.prefill_seconds for output in outputs))


def _acceptance_rate(outputs: Sequence[Generation]) -> float | None:
    drafted = sum(output.drafted for output in outputs)
    return sum(output.accepted for output in outputs) / drafted if drafted else None


def _mean_generated_length(outputs: Sequence[Generation]) -> float:
    tokens = sum(len(record.token_ids) for output in outputs for record in output.records)
    return _ratio(tokens, sum(output.rounds for output in outputs))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
