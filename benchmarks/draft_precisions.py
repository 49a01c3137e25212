"""Runs methods that draft with layers at several precisions, in turns with plain decoding.

``python benchmarks/draft_precisions.py --model smollm2 --perturb``
``python benchmarks/draft_precisions.py --model tiny --widen 8 --prompts 5 --new-tokens 48``

Prompts are chat messages, or the prompts of the three domains for a model without a chat template. Every output is
compared with plain decoding's. Writes the figures to ``benchmarks/results/draft-precisions-NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from selfspec import Engine
from selfspec.errors import NoGainWarning
from selfspec.files import replace_file
from selfspec.types import Generation
from selfspec_lab.bench.cost import decoding_bytes
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.measuring import StepBytes
from selfspec_lab.perturbing import perturb
from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS
from selfspec_lab.widening import load_model

RESULTS = Path(__file__).parent / "results"
PLAIN = "autoregressive"
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "low-bit, 8 bits": ("low-bit", {"draft_bits": 8}),
    "low-bit, 6 bits": ("low-bit", {"draft_bits": 6}),
    "low-bit, 4 bits": ("low-bit", {"draft_bits": 4}),
    "low-bit, 4 bits, head 8": ("low-bit", {"draft_bits": 4, "head_bits": 8}),
    "mixed": ("mixed", {}),
    **{
        f"{method}, {bits} bits": (method, {"draft_bits": bits})
        for method in ("clasp", "swift", "knapspec")
        for bits in (16, 8, 4)
    },
}


def describe(results: Sequence[Generation], plain: Sequence[Generation], costs: StepBytes) -> dict[str, Any]:
    """The figures of one method's outputs.

    Args:
        results: one for each prompt.
        plain: plain decoding's, in the same order.
        costs: bytes of the model's steps.
    """
    rounds = list(chain.from_iterable(result.rounds for result in results))
    drafted, seconds = sum(each.drafted for each in rounds), [_decoding_seconds(each) for each in results]
    base = [_decoding_seconds(each) for each in plain]
    ratios = [before / after for before, after in zip(base, seconds, strict=True)]
    return {
        "acceptance": sum(each.accepted for each in rounds) / drafted if drafted else None,
        "tokens_per_round": sum(len(each.token_ids) for each in rounds) / len(rounds),
        "cost_in_bytes": decoding_bytes(costs, results).cost_coefficient,
        "speedup": sum(base) / sum(seconds),
        "speedup_spread": [min(ratios), max(ratios)],
        "selection_share": sum(each.seconds.select for each in rounds) / sum(seconds),
    }


def _decoding_seconds(result: Generation) -> float:
    return result.seconds - result.prefill_seconds


def read_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Chat messages if the model has a chat template, else texts of the domains in turn."""
    if getattr(engine.tokenizer, "chat_template", None):
        texts = [*CHAT_PROMPTS.values(), *PROMPTS["math"]]
        return [engine.encode([{"role": "user", "content": text}]) for text in texts[:count]]
    return [engine.encode(text) for text in list(chain.from_iterable(zip(*PROMPTS.values(), strict=False)))[:count]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--widen", type=int, default=1)
    parser.add_argument("--perturb", action="store_true", help="take weights of a 4-bit file off its grid")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=list(DRAFTS), help="names of drafts")
    options = parse_and_check(parser, arguments)
    warnings.simplefilter("ignore", NoGainWarning)
    model, tokenizer = load_model(options.model, dtype="bfloat16", device="cpu", widen=options.widen, unpack=True)
    if options.perturb:
        perturb(model)
    engines = {PLAIN: Engine(model, tokenizer, PLAIN)}
    for name in options.only:
        method, settings = DRAFTS[name]
        engines[name] = Engine(model, tokenizer, method, settings=settings)
    for engine in engines.values():
        engine.warmup()
    outputs: dict[str, list[Generation]] = {name: [] for name in engines}
    for ids in read_prompts(engines[PLAIN], options.prompts):
        for name, engine in engines.items():
            outputs[name].append(engine.generate(ids, max_new_tokens=options.new_tokens, ignore_eos=True))
            assert outputs[name][-1].token_ids == outputs[PLAIN][-1].token_ids, name
    costs = StepBytes(engines[PLAIN].target)
    figures = {name: describe(results, outputs[PLAIN], costs) for name, results in outputs.items() if name != PLAIN}
    for name, found in figures.items():
        print(f"{name:26}" + " ".join(f"{key} {_text(value)}" for key, value in found.items()), flush=True)
    label = options.model + (f"-x{options.widen}" if options.widen > 1 else "")
    result = {"options": vars(options), **make_stamp(engines[PLAIN].target.device), "drafts": figures}
    replace_file(RESULTS / f"draft-precisions-{label}-bf16-cpu.json", json.dumps(result, indent=1) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(_text, value))
    return "none" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
