"""Measures what LoRA adapters add to forwards of one and several rows, by rank, and with several adapters in a batch.

``python benchmarks/adapter_steps.py --model smollm2``
``python benchmarks/adapter_steps.py --model tiny --ranks 8 --rows 1,8 --repeats 20 --out FILE``

A forward is all sublayers and the LM head, after ``--context`` cached tokens; adapters change all linear layers of
attention and MLPs, their weights are random. Forwards without an adapter and with one of each rank take turns, and
those of several sequences of a row each, with one adapter for all and with one each. Times are divided by those without
an adapter. Writes ``--out``, by default ``benchmarks/results/adapter-steps-NAME.json``, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec.files import replace_file
from selfspec.loading import load_model
from selfspec.model.forward import Forward
from selfspec.model.low_rank import Adapter
from selfspec.runtimes.adapting import adaptable_layers, fit_adapter
from selfspec.runtimes.target import Target
from selfspec.timing import interleaved_samples
from selfspec_lab.bench.stamp import make_stamp, parse_and_check

HERE = Path(__file__).parent
SEQUENCES = 4


def random_adapter(target: Target, rank: int) -> Adapter:
    """An adapter of all layers that can have one."""
    factors = {
        name: (torch.randn(rank, linear.in_features), 0.01 * torch.randn(linear.out_features, rank), 1.0)
        for name, linear in adaptable_layers(target.model, target.sublayers).items()
    }
    return fit_adapter(f"rank {rank}", str(rank), factors, target.model, target.sublayers)


def forward_of(target: Target, context: int, rows: int, adapters: Sequence[Adapter | None]) -> Callable[[], object]:
    """A function that runs a forward of as many rows for each of the adapters, a sequence each."""
    forwards = []
    for adapter in adapters:
        state = target.new_sequence(context, context + rows, context + rows, adapter)
        state.cache.commit(range(context))
        forwards.append(target.lay_out(state, rows))
    forward, states = Forward.join(forwards), target.embed(torch.arange(rows * len(adapters)))
    return lambda: target.run(states, range(target.sublayer_count), forward, logits=True)


@torch.inference_mode()
def measure(target: Target, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By kind of forward the median of its times divided by those without adapters, by adapter."""
    adapters = {f"rank {rank}": random_adapter(target, rank) for rank in options.ranks}
    found: dict[str, dict[str, float]] = {}
    for rows in options.rows:
        tasks = {name: forward_of(target, options.context, rows, [each]) for name, each in adapters.items()}
        plain = forward_of(target, options.context, rows, [None])
        found[f"{rows} rows"] = _relative(target, {"none": plain, **tasks}, options)
    several: dict[str, Callable[[], object]] = {"none": forward_of(target, options.context, 1, [None] * SEQUENCES)}
    for rank, (name, adapter) in zip(options.ranks, adapters.items(), strict=True):
        others = [random_adapter(target, rank) for _ in range(SEQUENCES)]
        several[f"{name}, one for all"] = forward_of(target, options.context, 1, [adapter] * SEQUENCES)
        several[f"{name}, one each"] = forward_of(target, options.context, 1, others)
    found[f"{SEQUENCES} sequences"] = _relative(target, several, options)
    return found


def _relative(target: Target, tasks: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, float]:
    samples = interleaved_samples(tasks, target.device, repeats=options.repeats, warm_up=2)
    plain = samples.pop("none")
    found = {"seconds": statistics.median(plain)}
    for name, own in samples.items():
        found[name] = statistics.median(one / other for one, other in zip(own, plain, strict=True))
    return found


def table(figures: dict[str, dict[str, float]]) -> str:
    """The figures in Markdown."""
    lines = ["| forward | ms without | with an adapter |", "| --- | --- | --- |"]
    for kind, own in figures.items():
        cells = ", ".join(f"{name}: {share:.3f} ×" for name, share in own.items() if name != "seconds")
        lines.append(f"| {kind} | {1000 * own['seconds']:.2f} | {cells} |")
    return "\n".join(lines)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=_counts, default=(8, 16, 64))
    parser.add_argument("--rows", type=_counts, default=(1, 4, 8, 32))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parse_and_check(parser)
    model, _ = load_model(options.model, dtype=options.dtype)
    target = Target(model)
    figures = measure(target, options)
    asked: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "out"}
    out = options.out or HERE / "results" / f"adapter-steps-{Path(options.model).stem}.json"
    replace_file(out, json.dumps({"options": asked, **make_stamp(target.device), "figures": figures}, indent=1) + "\n")
    print(table(figures))


if __name__ == "__main__":
    main()
