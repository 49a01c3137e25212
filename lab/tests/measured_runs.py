"""Runs of the benchmark on a tiny random model."""

import json
from pathlib import Path
from typing import Any

from helpers.checkpoints import make_tokenizer
from helpers.models import LAYERS, SUBLAYERS, build
from selfspec import Engine
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.types import SamplingParams
from selfspec_lab.bench.run.folder import RunFolder
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.peers import TRANSFORMERS_PEERS
from selfspec_lab.bench.run.runner import Run
from selfspec_lab.bench.suites.types import Question, Suite

PEERS = tuple(TRANSFORMERS_PEERS)

METHODS_TRIED = ("uniform", "layerskip", "swift")

SUITE = Suite(
    "two",
    (
        Question("a-1", "a", ("def f(x):\n    return x",)),
        Question("b-1", "b", ("Once upon a time there was", "And then?")),
    ),
    ordered=False,
    chat=False,
)

SHORT = SamplingParams(max_new_tokens=4)

PROMPTS = ("a-1", "b-1/1", "b-1/2")

LATENCIES = LatencyProfile("cpu", "float32", LAYERS, 1e-9, 1e-6, 1e-6, 1e-6, 1e-7)


class Watcher:
    """An observer that remembers, and interrupts after some measurements if it is told to."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.seen: list[Measurement] = []
        self.total = self.done = 0
        self._interrupt_after = interrupt_after

    def stage(self, text: str) -> None:
        pass

    def begin(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def measured(self, measurement: Measurement) -> None:
        self.seen.append(measurement)
        if len(self.seen) == self._interrupt_after:
            raise KeyboardInterrupt


def options(**changes: Any) -> RunOptions:
    chosen: dict[str, Any] = {
        "methods": METHODS_TRIED,
        "peers": PEERS,
        "dtype": "float32",
        "device": "cpu",
        "repeats": 2,
        "max_new_tokens": 8,
        "settings": {"layerskip": {"exit_layer": 4, "draft_length": 3}},
    }
    return RunOptions(**{**chosen, **changes})


def measure(
    folder: Path, chosen: RunOptions | None = None, watcher: Watcher | None = None, suite: Suite = SUITE, **how: bool
) -> list[Measurement]:
    """Measures with a random model; the lines that are in the folder then."""
    plain = Engine(build("llama"), make_tokenizer(), method="autoregressive")
    Run(chosen or options(), plain, suite, RunFolder(folder, **how), watcher or Watcher()).measure()
    return lines(folder)


def lines(folder: Path) -> list[Measurement]:
    text = (folder / "results.jsonl").read_text(encoding="utf-8")
    return [Measurement.from_dict(json.loads(line), SUBLAYERS) for line in text.splitlines()]
