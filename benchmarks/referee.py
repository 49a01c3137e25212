"""Compares the layers that CLaSp and KnapSpec select here with those that published code selects, on the same weights.

``git clone https://github.com/kaist-flexml-lab/knapspec CLONE`` has the code of KnapSpec's authors and their port of
CLaSp. ``python benchmarks/referee.py CLONE --model tiny --out FILE.json`` runs both selections at the end of texts of
growing length and compares the sets. The code is run as it is; two things that it imports are replaced here, as it was
written for transformers 4: ``DynamicCache.from_legacy_cache``, and ``triton``, which its selections do not use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from selfspec import Engine
from selfspec.loading import load_model
from selfspec.methods import make_method
from selfspec.methods.api import LearnedState
from selfspec.methods.knapspec import KnapSpec
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.experiments.knapspec_scene import WINDOW, read, select
from selfspec_lab.experiments.reading import Reading
from selfspec_lab.measuring import LatencyProfile
from selfspec_lab.prompts import PROMPTS

SKIPPED = 0.5
"""Share of the layers that CLaSp skips."""

LATENCIES = {"as dear": (1.0, 0.0, 1.0), "attention twice as dear": (1.0, 0.0, 2.0), "MLP three times": (3.0, 0.0, 1.0)}
"""Seconds of an MLP branch, and of an attention branch by cached token and without, as the authors' code takes them."""


def import_strategies(clone: Path) -> tuple[Any, Any]:
    """The authors' classes ``Knapspec`` and ``CLaSp``."""
    if not (clone / "self_speculation_strategy" / "knapspec.py").is_file():
        raise SystemExit(f"'{clone}' is no clone of kaist-flexml-lab/knapspec")
    sys.path.insert(0, str(clone))
    sys.modules.setdefault("triton", types.ModuleType("triton"))
    DynamicCache.from_legacy_cache = staticmethod(lambda legacy: DynamicCache(ddp_cache_data=legacy))
    names = ("knapspec", "Knapspec"), ("clasp", "CLaSp")
    found = [getattr(importlib.import_module(f"self_speculation_strategy.{file}"), name) for file, name in names]
    return found[0], found[1]


def legacy_cache(model: Any, token_ids: Sequence[int]) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Keys and values of a text by transformers."""
    with torch.inference_mode():
        cache = model(torch.tensor([token_ids]), use_cache=True).past_key_values
    return tuple((layer.keys, layer.values) for layer in cache.layers)


def compare_clasp(engine: Engine, clasp: Any, token_ids: Sequence[int], position: int) -> dict[str, Any]:
    """The layers that both skip for one token."""
    layers = engine.target.layer_count
    count = max(1, int(layers * SKIPPED))
    reading = Reading(engine.target, token_ids)
    theirs = clasp(L=layers, M=count, model=engine.target.model)
    theirs.cached_hidden_states = [[reading.states[layer, position][None, None]] for layer in range(layers + 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        theirs.optimize(0, legacy_cache(engine.target.model, token_ids[: position + 1]))
    return {
        "method": "clasp",
        "tokens": position + 1,
        "here": list(reading.choose_skipped(position, range(layers), count)),
        "there": [layer for layer, skipped in enumerate(theirs.skip_set) if skipped],
    }


def compare_knapspec(engine: Engine, knapspec: Any, token_ids: Sequence[int], latencies: str) -> dict[str, Any]:
    """The sublayers that both skip at the end of a text, with the same latencies."""
    target = engine.target
    mlp, per_token, base = LATENCIES[latencies]
    ours = make_method("paper(knapspec, authors)", target, {})
    assert isinstance(ours, KnapSpec)
    like = ours.latencies.of_target
    profile = LatencyProfile(like.device, like.dtype, target.layer_count, per_token, base, mlp, 0.0, 0.0)
    ours.restore(LearnedState({"latency_profile": profile.to_dict()}))
    prefilled = read(ours, token_ids)
    selection = select(ours, prefilled)
    theirs = knapspec(L=target.layer_count, M=0, model=target.model, coefficients=(mlp, per_token, base))
    rows = next(iter(prefilled.hidden_states.values()))[-WINDOW:]
    states = {
        index: prefilled.hidden_states.get(index, torch.zeros_like(rows)) for index in range(target.sublayer_count + 1)
    }
    theirs.cached_hidden_states = [[states[index][-WINDOW:][None]] for index in range(target.sublayer_count + 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        theirs.optimize(legacy_cache(target.model, token_ids))
    return {
        "method": "knapspec",
        "latencies": latencies,
        "tokens": len(token_ids),
        "here": list(selection.kept.skipped),
        "there": [index for index, skipped in enumerate(theirs.skip_set) if skipped],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both selections and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="clone of kaist-flexml-lab/knapspec")
    parser.add_argument("--model", default="tiny", help="a Llama model")
    parser.add_argument("--texts", type=int, default=6, help="texts a domain, of 24 to 160 tokens")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parse_and_check(parser, arguments, writes=lambda given: given.out is not None)
    knapspec, clasp = import_strategies(options.clone)
    model, tokenizer = load_model(options.model, dtype="float32", device="cpu", unpack=True)
    engine = Engine(model, tokenizer, "autoregressive")
    rows = []
    for domain, prompts in PROMPTS.items():
        for index, prompt in enumerate(prompts[: options.texts]):
            written = engine.generate(prompt, max_new_tokens=24 * (index + 1), ignore_eos=True)
            token_ids = [*engine.encode(prompt), *written.token_ids]
            rows += [compare_knapspec(engine, knapspec, token_ids, latencies) for latencies in LATENCIES]
            rows += [compare_clasp(engine, clasp, token_ids, position) for position in range(15, len(token_ids), 16)]
            print(f"{domain} {index + 1}: {agreement(rows)}", file=sys.stderr)
    print(agreement(rows))
    if options.out is not None:
        result = {"stamp": make_stamp(torch.device("cpu")), "model": options.model, "sets": rows}
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


def agreement(rows: Sequence[dict[str, Any]]) -> str:
    """How many sets are equal, by method, and the sublayers in which the others differ."""
    texts = []
    for method in ("knapspec", "clasp"):
        own = [row for row in rows if row["method"] == method]
        equal = sum(row["here"] == row["there"] for row in own)
        differ = [len({*row["here"]} ^ {*row["there"]}) for row in own if row["here"] != row["there"]]
        texts.append(
            f"{method} {equal} of {len(own)} equal"
            + (f", others differ by {min(differ)} to {max(differ)}" if differ else "")
        )
    return "; ".join(texts)


if __name__ == "__main__":
    main()
