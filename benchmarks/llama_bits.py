"""Times a decoding step at several precisions beside llama.cpp's: ``python benchmarks/llama_bits.py --model smollm2``.

A step is one row through all sublayers and the LM head, after ``--context`` cached tokens. Ours run at 16, 8, 6 and 4
bits, llama.cpp's at bfloat16, Q8_0 and Q4_0 (all tensors, ``pure``), quantised by llama.cpp from the same weights. They
take turns, repeat by repeat, and every time is divided by that of its own runtime's bfloat16 step. Writes
``--out FILE``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rows import BITS, step_seconds
from selfspec.files import replace_file
from selfspec_lab.bench.llama_cpp import GgufFile, LlamaCpp, WeightsFile, quantise_gguf
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.measuring import Target
from selfspec_lab.widening import load_model

QUANTISED = ("Q8_0", "Q4_0")


class QuantisedFile(GgufFile):
    """A file of weights, quantised by llama.cpp into the same folder.

    Args:
        weights: the file in bfloat16.
        kind: llama.cpp's name of the precision.
    """

    def __init__(self, weights: WeightsFile, kind: str) -> None:
        super().__init__(weights.path.with_name(f"{kind}.gguf"), weights.context, weights.dtype)
        quantise_gguf(weights.path, self.path, f"MOSTLY_{kind}")


def measure(model: Any, context: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of one-row steps by runtime and precision.

    Args:
        model: the model.
        context: cached tokens.
        repeats: turns.
    """
    found: dict[str, list[float]] = defaultdict(list)
    target = Target(model)
    with ExitStack() as stack:
        weights = stack.enter_context(WeightsFile(model, context + 32))
        files = {"bf16": weights} | {kind: QuantisedFile(weights, kind) for kind in QUANTISED}
        peers = {kind: stack.enter_context(LlamaCpp(file)) for kind, file in files.items()}
        for _ in range(repeats):
            for kind, peer in peers.items():
                found[f"llama.cpp {kind}"].append(peer.rows_seconds(list(range(100, 200)), context, (1,))[1])
            for bits, rows in step_seconds(target, context, 3, (1,)).items():
                found[f"selfspec {bits} bits"].append(statistics.median(rows[1]))
    return dict(found)


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest ratio of each to its own runtime's bfloat16 step of the same turn."""
    found = {}
    for name, times in seconds.items():
        base = seconds["llama.cpp bf16" if name.startswith("llama") else f"selfspec {BITS[0]} bits"]
        each = sorted(time / own for time, own in zip(times, base, strict=True))
        found[name] = {
            "milliseconds": 1e3 * statistics.median(times),
            "ratio": statistics.median(each),
            "lowest": each[0],
            "highest": each[-1],
        }
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--widen", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    options = parse_and_check(parser)
    model, _ = load_model(options.model, dtype="bfloat16", device="cpu", widen=options.widen, unpack=True)
    found = ratios(measure(model, options.context, options.repeats))
    for name, figures in found.items():
        print(name, {key: round(value, 3) for key, value in figures.items()})
    stamp = make_stamp(torch.device("cpu"))
    report = {"model": options.model, "widen": options.widen, "steps": found, "stamp": stamp}
    replace_file(options.out, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
