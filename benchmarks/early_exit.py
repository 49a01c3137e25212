"""Measures what training an early exit brought: which of its draft tokens are accepted, without and with the adapter.

``python benchmarks/early_exit.py --model smollm2 --adapter DIR --out FILE``

``DIR`` is what ``selfspec train early-exit --adapter`` has written; its ``training.json`` with the curve of perplexity
and agreement becomes part of the result. Prompts are the bundled ones, asked of a chat model, outputs greedy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec import Engine
from selfspec.files import replace_file
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.prompts import PROMPTS

LENGTHS = (1, 4)
"""Tokens of a draft."""


def accepted(options: argparse.Namespace, exit_layer: int, length: int, adapter: str | None) -> dict[str, float]:
    """Share of the draft tokens that are accepted, and tokens of a round, by domain."""
    settings = {"exit_layer": exit_layer, "draft_length": length}
    engine = Engine.from_pretrained(
        options.model, method="layerskip", settings=settings, adapters={"exit": options.adapter}, unpack=True
    )
    found = {}
    for domain, prompts in PROMPTS.items():
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts[: options.prompts]]
        results = engine.generate(chats, max_new_tokens=options.max_new_tokens, adapter=adapter)
        drafted = sum(result.drafted for result in results)
        found[domain] = sum(result.accepted for result in results) / drafted
    return {**found, "mean": sum(found.values()) / len(found)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each domain")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    options = parse_and_check(parser, arguments)
    training: dict[str, Any] = json.loads((options.adapter / "training.json").read_text(encoding="utf-8"))
    exit_layer = training["training"]["exit_layer"]
    shares = {
        name: {str(length): accepted(options, exit_layer, length, adapter) for length in LENGTHS}
        for name, adapter in (("without", None), ("with", "exit"))
    }
    result = {"accepted": shares, **training, "stamp": make_stamp(torch.device("cpu"))}
    replace_file(options.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(shares, indent=2))


if __name__ == "__main__":
    main()
