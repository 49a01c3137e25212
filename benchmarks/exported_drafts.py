"""Exports drafts of a model by several methods, and keeps what they promise: ``python benchmarks/exported_drafts.py``.

Each is what ``selfspec export-draft --json`` says; the drafts themselves are not kept. Acceptance and bytes do not
depend on the load of the machine. Writes ``benchmarks/results/exported-drafts-MODEL.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec.files import replace_file
from selfspec_lab.bench.stamp import make_stamp, parse_and_check

RESULTS = Path(__file__).parent / "results"
CASES = (
    ("--unpack", "--method", "low-bit", "--format", "gguf"),
    ("--method", "knapspec"),
    ("--method", "swift"),
    ("--method", "clasp", "--set", "skip_ratio=0.1"),
    ("--method", "clasp"),
)
"""Options of ``selfspec export-draft``, beside the model."""


def export(model: str, options: Sequence[str]) -> dict[str, Any]:
    """What one export promises."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "selfspec", "export-draft", "--model", model, "--chat", "--json", *options]
        done = subprocess.run([*command, "--out", f"{folder}/draft"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {"command": " ".join(options), **{name: value for name, value in found.items() if name != "usage"}}


def table(result: Mapping[str, Any]) -> str:
    """The exports as a table in Markdown; the speedup is that of the bytes, where a verification is one step."""
    lines = ["| options | layers | acceptance | bytes of a step | speedup by bytes |", "| --- " * 5 + "|"]
    for each in result["exports"]:
        length, speedup = max(
            ((length, _speedup(each["acceptance"], each["read"], length)) for length in range(1, 17)),
            key=lambda pair: pair[1],
        )
        layers = f"{len(each['kept_layers'])} of {each['layers']}"
        figures = f"{each['acceptance']:.2f} | {each['read']:.2f} | {speedup:.2f} (`k` = {length})"
        lines.append(f"| `{each['command']}` | {layers} | {figures} |")
    return "\n".join(lines)


def _speedup(acceptance: float, cost: float, length: int) -> float:
    tokens: float = sum(acceptance**position for position in range(length + 1))
    return tokens / (length * cost + 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path)
    options = parse_and_check(parser, arguments)
    result = {
        "model": options.model,
        **make_stamp(torch.device("cpu")),
        "exports": [export(options.model, case) for case in CASES],
    }
    print(table(result))
    replace_file(options.out or RESULTS / f"exported-drafts-{options.model}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
