"""Measures what a forward of several rows costs, at 16, 8, 6 and 4 bits, beside what the processor allows.

``python benchmarks/rows.py --model smollm2``
``python benchmarks/rows.py --model tiny --widen 8``
``python benchmarks/rows.py --rows 1,2,3,4,5,6,7,8 --bits 16 --out FILE``

A step is all sublayers and the LM head over rows of one sequence, after ``--context`` cached tokens; steps of all bits
and all numbers of rows take turns. Times are divided by that of one row in bfloat16. The bound beside each is the
larger one of two times: all weights read at the speed at which memory is copied, and all products at the speed of
the level's own instruction with operands in registers (``peak.cpp``), with as many threads. Writes ``--out``, by
default ``benchmarks/results/rows-NAME.json``; ``--table`` prints the table of a file that was written before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec.files import replace_file
from selfspec.runtimes.kernel_build import choose_level, find_compiler
from selfspec.runtimes.precision import FULL_BITS, Precision
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.measuring import StepBytes, Target, copy_bytes_per_second
from selfspec_lab.widening import load_model

HERE = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32, 64)
BITS = (FULL_BITS, 8, 6, 4)


def peak() -> dict[str, float]:
    """Products a second of one thread, by dtype and for low-bit weights, at the level that the kernels run at."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        options = ["-O3", "-std=c++17", "-ffp-contract=off", "-fopenmp", *choose_level().flags]
        subprocess.run([*find_compiler(), *options, str(HERE / "peak.cpp"), "-o", str(program)], check=True)
        found: dict[str, float] = json.loads(subprocess.run([program], check=True, capture_output=True).stdout)
    return found


@torch.inference_mode()
def step_seconds(
    target: Target, context: int, repeats: int, row_counts: Sequence[int] = ROWS, all_bits: Sequence[int] = BITS
) -> dict[int, dict[int, list[float]]]:
    """The seconds of steps by bits and rows, in turns.

    Args:
        target: the model.
        context: cached tokens before the rows.
        repeats: steps of each kind.
        row_counts: numbers of rows.
        all_bits: of the weights.
    """
    state = target.new_sequence(context, context + max(row_counts), context + max(row_counts))
    state.cache.commit(range(context))
    models = {bits: target.at(Precision.of(bits)) for bits in all_bits}
    found: dict[int, dict[int, list[float]]] = {bits: defaultdict(list) for bits in all_bits}
    for repeat in range(repeats + 1):
        for rows in row_counts:
            states = target.embed(torch.arange(rows) + repeat)
            for bits, model in models.items():
                forward = target.lay_out(state, rows)
                start = time.perf_counter()
                model.run(states, range(target.sublayer_count), forward, logits=True)
                if repeat:  # the first is a warm-up
                    found[bits][rows].append(time.perf_counter() - start)
    return found


def bounds(
    target: Target, options: argparse.Namespace, bandwidth: float, speeds: dict[str, float]
) -> dict[int, dict[int, float]]:
    """The least seconds of a step by bits and rows.

    Args:
        target: the model.
        options: of the command line.
        bandwidth: bytes a second.
        speeds: products a second of one thread, as ``peak`` gives them.
    """
    costs = StepBytes(target)
    products = (sum(costs.sublayers) + costs.outside) / target.dtype.itemsize  # one a weight
    own = speeds[str(target.dtype).removeprefix("torch.")]
    found: dict[int, dict[int, float]] = {}
    for bits in options.bits:
        speed = torch.get_num_threads() * (own if bits == FULL_BITS else speeds["low_bit"])
        precision = None if bits == FULL_BITS else Precision.of(bits)
        read = costs.step(range(target.sublayer_count), options.context, precision) / bandwidth
        found[bits] = {rows: max(read, rows * products / speed) for rows in options.rows}
    return found


def table(result: dict[str, Any]) -> str:
    """The figures of a file as a table in Markdown: each cell the step, and what is bound."""
    seconds, bound_seconds = result["seconds"], result["bounds"]
    unit, counts = seconds[str(FULL_BITS)]["1"]["median"], list(seconds[str(FULL_BITS)])
    lines = ["| rows | " + " | ".join(counts) + " |", "| --- " * (1 + len(counts)) + "|"]
    for bits in seconds:
        pairs = [(seconds[bits][rows]["median"], bound_seconds[bits][rows]) for rows in counts]
        cells = (f"{own / unit:.2f} ({bound / unit:.2f})" for own, bound in pairs)
        lines.append(f"| {bits} bits | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _quartiles(seconds: Sequence[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(seconds, n=4)
    return {"median": median, "first": first, "third": third}


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--widen", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=_counts, default=ROWS, metavar="1,A,B", help="numbers of rows, 1 among them")
    parser.add_argument("--bits", type=_counts, default=BITS, metavar="16,A", help="bits of weights, 16 among them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this file, and measure nothing")
    options = parse_and_check(parser, arguments, lambda given: not given.table)
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    model, _ = load_model(options.model, dtype="bfloat16", device="cpu", widen=options.widen, unpack=True)
    target = Target(model)
    speeds, bandwidth = peak(), copy_bytes_per_second(target.device)
    seconds = step_seconds(target, options.context, options.repeats, options.rows, options.bits)
    result = {
        "options": {key: value for key, value in vars(options).items() if key not in ("table", "out")},
        **make_stamp(target.device),
        "level": choose_level().name,
        "threads": torch.get_num_threads(),
        "products_per_second_of_a_thread": speeds,
        "copy_bytes_per_second": bandwidth,
        "seconds": {bits: {rows: _quartiles(each) for rows, each in found.items()} for bits, found in seconds.items()},
        "bounds": bounds(target, options, bandwidth, speeds),
    }
    text = json.dumps(result, indent=1)
    print(table(json.loads(text)))
    label = options.model + (f"-x{options.widen}" if options.widen > 1 else "")
    replace_file(options.out or HERE / "results" / f"rows-{label}-bf16-cpu.json", text + "\n")


if __name__ == "__main__":
    main()
