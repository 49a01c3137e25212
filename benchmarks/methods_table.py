"""Runs every method on ten prompts per domain with both bundled checkpoints: ``python benchmarks/methods_table.py``.

Checks that greedy outputs in float32 are identical to plain decoding, and writes figures of every method to
``benchmarks/results/methods.json`` and ``methods.md``. It does not compare speeds (``selfspec bench`` does).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from selfspec.engine import Engine
from selfspec.files import replace_file
from selfspec.loading import bundled_models, load_model
from selfspec.methods import all_methods
from selfspec.types import Generation
from selfspec_lab.bench.resident_peak import ResidentPeak
from selfspec_lab.bench.stamp import commit_text, make_stamp, parse_and_check
from selfspec_lab.prompts import PROMPTS

PLAIN = "autoregressive"
EXIT_LAYER = 6
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """Figures of one method on the prompts of one domain.

    Attributes:
        checkpoint: name of the bundled checkpoint.
        method: name of the method.
        domain: name of the domain.
        identical: outputs identical to plain decoding.
        drafting: outputs in which something was drafted.
        accepting: outputs in which something was accepted.
        outputs: number of outputs.
        acceptance_rate: accepted ÷ drafted tokens.
        mean_generated_length: tokens per round.
        attention_share: mean kept share of attention over the rounds in which layers drafted; ``None`` without any.
        mlp_share: the same of MLPs.
        select_share: share of selection in the decoding time.
    """

    checkpoint: str
    method: str
    domain: str
    identical: int
    drafting: int
    accepting: int
    outputs: int
    acceptance_rate: float
    mean_generated_length: float
    attention_share: float | None
    mlp_share: float | None
    select_share: float


def settings_of(method: str) -> dict[str, int]:
    """Return the settings that depend on the checkpoint: its best exit layer."""
    return {"exit_layer": EXIT_LAYER} if method.startswith("layerskip") else {}


def measure(checkpoint: str, prompts: int, max_new_tokens: int) -> list[Row]:
    """Run all methods on one checkpoint; learning methods see all domains as one stream."""
    model, tokenizer = load_model(checkpoint, dtype="float32", device="cpu")
    plain = Engine(model, tokenizer)
    texts = {domain: texts[:prompts] for domain, texts in PROMPTS.items()}
    generate(plain, texts["code"][:1], max_new_tokens)  # warms up
    wanted = {domain: generate(plain, chosen, max_new_tokens) for domain, chosen in texts.items()}
    rows = []
    for method in tqdm([name for name in all_methods()[0] if name != PLAIN], checkpoint):
        engine = Engine(model, tokenizer, method, settings=settings_of(method))
        for domain, chosen in texts.items():
            rows.append(summarize(checkpoint, domain, generate(engine, chosen, max_new_tokens), wanted[domain]))
    return rows


def generate(engine: Engine, prompts: Sequence[str], max_new_tokens: int) -> list[Generation]:
    """Generate the outputs."""
    return [engine.generate(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]


def peak_memory(checkpoint: str, method: str, max_new_tokens: int) -> tuple[int, int]:
    """Peak resident bytes of this process for plain decoding, then for a method; one prompt per domain."""
    model, tokenizer = load_model(checkpoint, dtype="float32", device="cpu")
    prompts = [texts[0] for texts in PROMPTS.values()]
    plain = Engine(model, tokenizer)
    generate(plain, prompts, max_new_tokens)  # warms up
    peaks = []
    for engine in (plain, Engine(model, tokenizer, method, settings=settings_of(method))):
        gc.collect()
        peak = ResidentPeak(engine.target.device)
        generate(engine, prompts, max_new_tokens)
        peaks.append(peak.peak_bytes())
    return peaks[0], peaks[1]


def memory_above_plain(checkpoint: str, method: str, max_new_tokens: int) -> float:
    """Ratio of ``peak_memory`` minus 1, measured in a process of its own, as imports and fragmentation persist."""
    command = [sys.executable, __file__, "--memory-of", checkpoint, method, "--max-new-tokens", str(max_new_tokens)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    plain, peak = (int(number) for number in printed.split())
    return peak / plain - 1


def summarize(checkpoint: str, domain: str, results: Sequence[Generation], plain: Sequence[Generation]) -> Row:
    """Compute the figures of one method's outputs."""
    records = [record for result in results for record in result.rounds]
    layered = [record for record in records if record.kept is not None]
    seconds = {phase: sum(getattr(record.seconds, phase) for record in records) for phase in asdict(records[0].seconds)}
    drafted = sum(result.drafted for result in results)
    return Row(
        checkpoint=checkpoint,
        method=results[0].method,
        domain=domain,
        identical=sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True)),
        drafting=sum(result.drafted > 0 for result in results),
        accepting=sum(result.accepted > 0 for result in results),
        outputs=len(results),
        acceptance_rate=sum(result.accepted for result in results) / drafted if drafted else 0.0,
        mean_generated_length=sum(len(record.token_ids) for record in records) / len(records),
        attention_share=sum(record.attention_share or 0 for record in layered) / len(layered) if layered else None,
        mlp_share=sum(record.mlp_share or 0 for record in layered) / len(layered) if layered else None,
        select_share=seconds["select"] / sum(seconds.values()),
    )


def render(rows: Sequence[Row], memory: dict[str, dict[str, float]]) -> str:
    """Render the figures as Markdown."""
    lines = [
        "| checkpoint | method | domain | identical | drafted in | acceptance | M | kept attention | kept MLP | select "
        "| memory above plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kept = ["-" if share is None else f"{share:.2f}" for share in (row.attention_share, row.mlp_share)]
        lines.append(
            f"| {row.checkpoint} | {row.method} | {row.domain} | {row.identical}/{row.outputs} | "
            f"{row.drafting}/{row.outputs} | {row.acceptance_rate:.3f} | {row.mean_generated_length:.2f} | {kept[0]} | "
            f"{kept[1]} | {row.select_share:.1%} | {memory[row.checkpoint][row.method]:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything; exit with 1 if an output differs from plain decoding or a method drafted nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10, help="prompts per domain")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest output")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--memory-of", nargs=2, metavar=("CHECKPOINT", "METHOD"), help=argparse.SUPPRESS)
    options = parse_and_check(parser, writes=lambda given: not given.memory_of)
    warnings.simplefilter("ignore")
    if options.memory_of:
        print(*peak_memory(*options.memory_of, options.max_new_tokens))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [
        row for checkpoint in bundled_models() for row in measure(checkpoint, options.prompts, options.max_new_tokens)
    ]
    methods = [name for name in all_methods()[0] if name != PLAIN]
    memory = {
        checkpoint: {
            method: memory_above_plain(checkpoint, method, options.max_new_tokens)
            for method in tqdm(methods, f"{checkpoint}, memory")
        }
        for checkpoint in bundled_models()
    }
    found: dict[str, Any] = {
        "stamp": make_stamp(torch.device("cpu")),
        "rows": [asdict(row) for row in rows],
        "memory_above_plain": memory,
    }
    replace_file(options.out / "methods.json", json.dumps(found, indent=2) + "\n")
    table = f"{render(rows, memory)}\nCommit {commit_text(found['stamp'])}.\n"
    replace_file(options.out / "methods.md", table)
    print(table)
    return 0 if all(row.identical == row.drafting == row.outputs for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
