"""Measures what each change towards the papers is worth on a real model.

``python benchmarks/faithfulness.py measure --out now.json`` runs every case of ``CASES``;
``python benchmarks/faithfulness.py table benchmarks/results/faithfulness.json`` prints them as a table, and
``python benchmarks/faithfulness.py preset NAME`` the table of a paper's preset. Both stand in ``docs/faithfulness.md``.

To measure an older version, put its ``src`` first on ``PYTHONPATH`` and pass ``--defaults``: only the methods with
their default settings are run, since older versions have other settings. ``--label`` names the version in the file,
and ``--append`` adds to a file. Acceptance, tokens a round and the kept share do not depend on the load of the machine;
the share of selection does, so measure on a quiet one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from method_settings import Figures, read_prompts, summarise
from selfspec import Engine
from selfspec.loading import load_model
from selfspec.methods.papers import PAPERS
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.cli.bench_options import parse_names

Settings = Mapping[str, Any]

PAPER: Settings = {"schedule": "paper"}

CASES: dict[str, tuple[Settings, ...]] = {
    "swift": (
        {},
        PAPER,
        {**PAPER, "window": "sliding"},
        {**PAPER, "tree_widths": "authors"},
        {**PAPER, "dynamic_verification": False},
    ),
    "del": ({}, PAPER, {**PAPER, "keep_prompt": True}, {**PAPER, "allow_no_draft": False}),
    **{f"paper({name})": ({},) for name in PAPERS},
    **{f"paper({name}, authors)": ({},) for name, paper in PAPERS.items() if paper.authors},
    "knapspec": (
        {},
        PAPER,
        {"recent_tokens": 16},
        {"similarity_threshold": -1.0},
        {**PAPER, "similarity_threshold": -1.0},
    ),
    "clasp": (
        {},
        PAPER,
        {**PAPER, "update_interval": 16},
        {**PAPER, "update_interval": 64},
        {**PAPER, "update_interval": 128},
        {"skip_ratio": 0.5},
    ),
    "self-spec": ({}, {"skip_ratio": 0.45}),
    "uniform": ({}, {"skip_ratio": 0.45}),
    "adaptive-cosine": ({}, {"skip_ratio": 0.45}),
}
"""By method the settings to measure, the defaults first."""


def measure(
    model: Any, tokenizer: Any, method: str, settings: Settings, sizes: tuple[int, int], **params: Any
) -> Figures:
    """What the drafts of one method were worth.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        method: name of the method.
        settings: its settings; the others have their defaults.
        sizes: number of prompts, and tokens of each output.
        **params: sampling parameters.
    """
    engine = Engine(model, tokenizer, method, settings=dict(settings))
    engine.warmup()
    prompts = read_prompts(engine, sizes[0])
    return summarise([engine.generate(ids, max_new_tokens=sizes[1], ignore_eos=True, **params) for ids in prompts])


def run(options: argparse.Namespace) -> None:
    """Measures the cases and writes them."""
    model, tokenizer = load_model(options.model, dtype="bfloat16", device="cpu", unpack=True)
    rows = json.loads(options.out.read_text()) if options.append and options.out.exists() else []
    stamp = {"stamp": make_stamp(torch.device("cpu"))}
    params = {"temperature": options.temperature, "seed": 0} if options.temperature else {}
    for method in parse_names(options.methods):
        for settings in CASES[method][:1] if options.defaults else CASES[method]:
            found = measure(model, tokenizer, method, settings, (options.prompts, options.new_tokens), **params)
            row = {
                "version": options.label,
                "method": method,
                "settings": dict(settings),
                **params,
                **asdict(found),
                **stamp,
            }
            rows.append(row)
            print(row, flush=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The cases as a table in Markdown."""
    lines = [
        "| version | method | settings | acceptance | tokens a round | kept share | no draft | selection |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        chosen = ", ".join(f"{name}={value}" for name, value in row["settings"].items()) or "defaults"
        chosen += f", temperature {row['temperature']}" if "temperature" in row else ""
        dirty = " (uncommitted changes)" if row.get("stamp", {}).get("dirty") else ""
        acceptance = f"{row['acceptance']:.2f}" if row["idle_share"] < 1 else "-"
        lines.append(
            f"| {row['version']}{dirty} | `{row['method']}` | {chosen} | {acceptance} | {row['tokens_per_round']:.2f} "
            f"| {row['kept_share']:.2f} | {row['idle_share']:.0%} | {row['selection_share']:.1%} |"
        )
    return "\n".join(lines)


def preset(name: str) -> str:
    """The settings of a paper's preset as a table in Markdown, beside those of its authors' code."""
    paper = PAPERS[name]
    lines = ["| setting | paper | where | authors' code |", "| --- | --- | --- | --- |"]
    for setting in [*paper.settings, *(each for each in paper.authors if each not in paper.settings)]:
        own, theirs = paper.settings.get(setting), paper.authors.get(setting)
        printed = ("by the model's size", "`ratio_rule`") if own is None else (f"`{_text(own.value)}`", own.place)
        coded = "" if theirs is None else f"`{_text(theirs.value)}`; {theirs.place}"
        lines.append(f"| `{setting}` | {printed[0]} | {printed[1]} | {coded} |")
    return "\n".join(lines)


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--append", action="store_true")
    measuring.add_argument("--label", default="now")
    measuring.add_argument("--defaults", action="store_true")
    measuring.add_argument("--methods", default=",".join(CASES))
    measuring.add_argument("--model", default="smollm2")
    measuring.add_argument("--prompts", type=int, default=6)
    measuring.add_argument("--new-tokens", type=int, default=128)
    measuring.add_argument("--temperature", type=float, default=0.0)
    printing = commands.add_parser("table")
    printing.add_argument("file", type=Path)
    commands.add_parser("preset").add_argument("name", choices=list(PAPERS))
    options = parse_and_check(parser, arguments, lambda given: given.command == "measure")
    if options.command == "measure":
        run(options)
    elif options.command == "preset":
        print(preset(options.name))
    else:
        print(table(json.loads(options.file.read_text())))


if __name__ == "__main__":
    main()
