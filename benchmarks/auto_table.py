"""Sums up runs of ``selfspec bench run`` with ``auto``: ``python benchmarks/auto_table.py RUN_FOLDER...``.

For each run: ``auto`` over plain decoding (median over prompts; mean, worst and best over categories; worst
prompt), over the fastest single method of each category and, prompt by prompt, over the one that comes nearest to
it; over llama.cpp and its prompt lookup; and its efficiency.

``python benchmarks/auto_table.py --worst adversaries --model smollm2 --out FILE`` measures ``auto`` against ten texts
that mislead it, with another process on the cores in some of them; ``--worst first`` measures the first request of a
process that knows nothing of the machine, over later ones. Both take some minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from auto_worst import adversaries, first
from selfspec.files import replace_file
from selfspec_lab.bench.stamp import make_stamp, parse_and_check

MEASURED = {"adversaries": (adversaries.measure, 256), "first": (first.measure, 64)}
"""What ``--worst`` measures, with the tokens of an answer."""
_LLAMA = ("llama-cpp", "llama-cpp-prompt-lookup")
COLUMNS = (
    "run",
    "median (95 %)",
    "mean over categories",
    "worst",
    "best",
    "worst prompt",
    "÷ best single method",
    "prompt by prompt (95 %)",
    "÷ llama.cpp",
    "÷ its prompt lookup",
    "efficiency",
    "plain, tokens/s",
    "plain ÷ llama.cpp",
    "processor",
)


def summarise(name: str, summary: Mapping[str, Any]) -> list[str]:
    """One row of the table.

    Args:
        name: of the run.
        summary: its ``summary.json``.
    """
    candidates = summary["candidates"]
    overall = {key: each["overall"] for key, each in candidates.items()}
    speedups = {
        key: {category: figures["speedup"] for category, figures in each["categories"].items()}
        for key, each in candidates.items()
    }
    auto, own = overall["auto"], speedups["auto"]
    several = [key for key in candidates if key.startswith("cascade(")]
    singles = [key for key in candidates if key not in ("auto", "autoregressive", *_LLAMA, *several)]
    bests = {category: max((speedups[key][category] for key in singles), default=0.0) for category in own}
    low, high = auto["speedup_interval"]
    rates = {key: figures["tokens_per_second"] for key, figures in overall.items()}
    over = [f"{rates['auto'] / rates[peer]:.2f}" if rates.get(peer) else "" for peer in _LLAMA]
    worst, best = min(own, key=lambda key: own[key]), max(own, key=lambda key: own[key])
    return [
        name + (" (uncommitted changes)" if summary["stamp"]["dirty"] else ""),
        f"{auto['speedup']:.2f} ({low:.2f} to {high:.2f})",
        f"{mean(own.values()):.2f}",
        f"{own[worst]:.2f}" + (f" ({worst})" if len(own) > 1 else ""),
        f"{own[best]:.2f}" + (f" ({best})" if len(own) > 1 else ""),
        *_prompt_by_prompt(
            summary.get("auto_over"), singles, mean(own[each] / bests[each] for each in own) if singles else None
        ),
        *over,
        f"{auto['efficiency']:.2f}",
        f"{rates['autoregressive']:.0f}",
        f"{rates['autoregressive'] / rates['llama-cpp']:.2f}" if rates.get("llama-cpp") else "",
        _processor(summary["stamp"]),
    ]


def _prompt_by_prompt(over: Mapping[str, Any] | None, singles: Sequence[str], by_category: float | None) -> list[str]:
    """The worst prompt over plain decoding; over the best single method by category, and over the nearest by prompt."""
    best = "" if by_category is None else f"{by_category:.2f}"
    if over is None:  # of an older run
        return ["", best, ""]
    worst = f"{over['autoregressive']['worst']:.2f}"
    nearest = min(singles, key=lambda name: over[name]["speedup"], default=None)
    if nearest is None:
        return [worst, best, ""]
    low, high = over[nearest]["speedup_interval"]
    return [worst, best, f"{over[nearest]['speedup']:.2f} ({low:.2f} to {high:.2f}; `{nearest}`)"]


def _processor(stamp: Mapping[str, Any]) -> str:
    """The processor, the kernels that it runs, and the threads."""
    hardware = stamp["hardware"]
    level = hardware.get("kernels") or hardware["cpu_capability"]
    return f"{hardware['processor']}, {level}, {stamp['threads']} of {hardware['cores']} cores"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown, or measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of runs, for the table")
    parser.add_argument("--worst", choices=MEASURED, help="measure this in place of the table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--new-tokens", type=int, help="of each answer; 64 in first requests, else 256")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, help="file of what was measured")
    options = parse_and_check(parser, arguments, lambda given: given.out is not None)
    if options.worst is None:
        _print_table(options.folders)
        return
    measure, tokens = MEASURED[options.worst]
    found = measure(options.model, options.new_tokens or tokens, options.repeats)
    if options.out is not None:
        own = {"model": options.model, "new_tokens": options.new_tokens or tokens, "repeats": options.repeats}
        result = {"options": own, **make_stamp(torch.device("cpu")), options.worst: found}
        replace_file(options.out, json.dumps(result, indent=1) + "\n")


def _print_table(folders: Sequence[Path]) -> None:
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        print("| " + " | ".join(summarise(folder.name, summary)) + " |")


if __name__ == "__main__":
    main()
