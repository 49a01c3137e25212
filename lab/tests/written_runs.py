"""Runs of the benchmark as its reports read them, written by hand."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.types import PhaseSeconds, Round
from selfspec_lab.bench.cost import DecodingBytes
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.bench.stamp import make_stamp

LATENCIES = LatencyProfile("cpu", "float32", 2, 0.001, 1.0, 2.0, 3.0, 1.0)
"""Two layers. A step at context ``n`` takes 2 (0.001 n + 1) + 2 · 2 + 4 seconds, a draft of sublayers 0 and 3 less."""
KEPT = KeptSet((0, 3), 4)
SECONDS = PhaseSeconds(select=0.1, draft=0.2, verify=0.5, other=0.0)
PICTURES = ("speedup", "acceptance", "time", "kept", "lengths", "stream")


def played(drafted: int, accepted: int, kept: KeptSet | None = KEPT, seconds: PhaseSeconds = SECONDS) -> Round:
    return Round(drafted, drafted, accepted, (7,) * (accepted + 1), kept, None, seconds)


def measured(
    candidate: str,
    prompt_key: str = "a",
    seconds: float = 4.0,
    records: Sequence[Round] | None = None,
    repeat: int = 0,
    **options: Any,
) -> Measurement:
    """An output of five tokens, or of those of its rounds."""
    tokens = 5 if records is None else 1 + sum(len(record.token_ids) for record in records)
    values = {
        "category": "math",
        "turn": 0,
        "position": 0,
        "prompt_token_count": 9,
        "token_ids": (7,) * tokens,
        "identical": True,
        "prefill_seconds": 1.0,
        "peak_memory_bytes": 1000,
        "bytes": DecodingBytes(4, 400, 3, 80, 120),
        **options,
    }
    return Measurement(
        prompt=prompt_key,
        candidate=candidate,
        repeat=repeat,
        decode_seconds=seconds,
        rounds=None if records is None else tuple(records),
        **values,
    )


def failed(candidate: str, prompt_key: str = "a", error: str = "RuntimeError: no luck", **options: Any) -> Measurement:
    return replace(measured(candidate, prompt_key, **options), error=error, token_ids=(), rounds=None, bytes=None)


def write_run(folder: Path, measurements: Sequence[Measurement], **options: Any) -> Path:
    """Writes a folder as the benchmark does; prompts and candidates are those of the measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {each.candidate: None for each in measurements}
    prompts = {each.prompt: each.category for each in sorted(measurements, key=lambda each: each.position)}
    fields: dict[str, Any] = {
        "benchmark": "run",
        "stamp": make_stamp(torch.device("cpu")),
        "options": {
            **{"model": "tiny", "widen": 1, "dtype": "auto", "device": "cpu", "runtime": "auto", "suite": "mini"},
            "methods": [name for name in names if name != "autoregressive" and not name.startswith("transformers")],
            "peers": [name for name in names if name.startswith("transformers")],
            **{"limit": None, "max_new_tokens": 64, "temperature": 0.0, "seed": 0, "context": 1024, "settings": {}},
            "repeats": 1 + max(each.repeat for each in measurements),
            **options.pop("options", {}),
        },
        "dtype": "float32",
        "parameters": 1234,
        "sublayers": 2 * LATENCIES.layers,
        "settings": {"layerskip": {"exit_layer": 1}},
        "ordered": False,
        "prompts": [{"key": key, "category": category, "tokens": 9} for key, category in prompts.items()],
        "skipped": [],
        "copy_bytes_per_second": 1e9,
        "latencies": LATENCIES.to_dict(),
        "failures": {},
        **options,
    }
    (folder / "run.json").write_text(json.dumps(fields), encoding="utf-8")
    lines = [json.dumps(each.to_dict(), ensure_ascii=False) + "\n" for each in measurements]
    (folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def summary_of(folder: Path, measurements: Sequence[Measurement], **options: Any) -> dict[str, Any]:
    summary = summarise(read_run(write_run(folder, measurements, **options)))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    return summary


THREE_ROUNDS = (played(2, 1), played(1, 0), played(0, 0))


PLAIN_ROUNDS = [played(0, 0, None)] * 4


def three_prompts() -> list[Measurement]:
    """Plain decoding at 1 token a second; a method at 2, 4 and 3 times that, with a repeat of the first prompt at 3."""
    return [
        *(measured("autoregressive", key, 4.0, PLAIN_ROUNDS) for key in "abc"),
        measured("autoregressive", "a", 8.0, PLAIN_ROUNDS, repeat=1),
        *(
            measured("layerskip", key, 4 / speedup, THREE_ROUNDS, identical=key != "b", peak_memory_bytes=1100)
            for key, speedup in (("a", 2.0), ("b", 4.0), ("c", 3.0))
        ),
        measured("layerskip", "a", 8 / 3, THREE_ROUNDS, repeat=1, peak_memory_bytes=1300, prefill_seconds=3.0),
        *(measured("transformers", key, 16.0, bytes=None) for key in "ab"),
    ]


def many(candidates: int, categories: int, *, kept: bool = True, prompts: int = 2) -> list[Measurement]:
    """A run of several ``candidates``, plain decoding among them, with long names."""
    names = ["autoregressive", "transformers-prompt-lookup"]
    names += [f"layer-drafting-method-{number}" for number in range(candidates - len(names))]
    generator = np.random.default_rng(0)
    measurements = []
    for position in range(categories * prompts):
        for place, name in enumerate(names):
            drafts = {"autoregressive": 0}.get(name, 1 + place % 5)
            layers = KeptSet((0, 1 + (position + place) % 3), 4) if kept and drafts else None
            records = [played(drafts, min(drafts, each), layers) for each in (0, drafts, 1)]
            measurements.append(
                measured(
                    name,
                    f"prompt-{position}",
                    float(generator.uniform(2, 9)),
                    None if name.startswith("transformers") else records,
                    category=f"category_{position // prompts}_of_many",
                    position=position,
                    identical=place % 4 != 3,
                )
            )
    return measurements


def rows_of(markdown: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading or a line that ends with it, without its header."""
    table = markdown.split(f"{heading}\n\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
