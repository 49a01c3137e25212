"""Compares what CLaSp, DEL and KnapSpec select here with what published code selects, on the same weights.

``git clone https://github.com/kaist-flexml-lab/knapspec CLONE`` has the code of KnapSpec's authors and their ports of
CLaSp and DEL. ``python benchmarks/referee.py CLONE --model tiny --out FILE.json`` runs all selections on texts of
growing length and compares the sets, and DEL's exit layers, draft lengths and thresholds. The code is run as it is; two
things that it imports are replaced here, as it was written for transformers 4: ``DynamicCache.from_legacy_cache``, and
``triton``, which its selections do not use.
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
from selfspec.methods.dynamic_exit import Del, Statistics, shadow_tokens
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


ROUND_ROWS = 6
"""Rows of a round of DEL, if none of the drafts is wrong."""


def import_strategies(clone: Path) -> tuple[Any, ...]:
    """The authors' classes ``Knapspec``, ``CLaSp`` and ``DEL``."""
    if not (clone / "self_speculation_strategy" / "knapspec.py").is_file():
        raise SystemExit(f"'{clone}' is no clone of kaist-flexml-lab/knapspec")
    sys.path.insert(0, str(clone))
    sys.modules.setdefault("triton", types.ModuleType("triton"))
    DynamicCache.from_legacy_cache = staticmethod(lambda legacy: DynamicCache(ddp_cache_data=legacy))
    names = ("knapspec", "Knapspec"), ("clasp", "CLaSp"), ("DEL", "DEL")
    return tuple(getattr(importlib.import_module(f"self_speculation_strategy.{file}"), name) for file, name in names)


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


def compare_del(engine: Engine, port: Any, token_ids: Sequence[int], prompt_tokens: int) -> list[dict[str, Any]]:
    """Exit layer, draft length and threshold that both choose after each round of a text; drafts are its own tokens.

    The port tries lengths up to 17. Where it has chosen the length 0 it counts rows after a wrong draft, too, which are
    left out here.
    """
    target = engine.target
    ours = make_method("paper(del, authors)", target, {"d_max": 17})
    assert isinstance(ours, Del)
    theirs = port(target.model, gamma_max=18, omega=ours.settings.omega, coefficients=(1.0, 0.0, 1.0))
    states = Reading(target, token_ids).states[1:]
    statistics, exit_layer, begin, rows = Statistics.empty(target.layer_count), 1, 0, []
    ends = [prompt_tokens + 1, *range(prompt_tokens + 1 + ROUND_ROWS, len(token_ids), ROUND_ROWS)]
    for end in ends:
        context = max(0, prompt_tokens - 1 - begin)
        drafted, _ = shadow_tokens(ours.head, list(states[:, begin + context : end]))
        wrong = (drafted[exit_layer - 1] != drafted[-1]).nonzero()
        valid = begin + context + (int(wrong[0]) + 1 if len(wrong) else end - begin - context)
        shown = end if theirs.current_gamma else valid
        theirs.cached_hidden_states = [[state[None, begin:shown]] for state in states]
        with torch.inference_mode():
            theirs.run(exit_layer, context, False, current_length=shown)
        first = max(begin, begin + context - ours.settings.context_window)
        counted = {boundary: states[index, first:valid] for index, boundary in enumerate(ours.watched)}
        statistics = statistics.then(ours.count(counted, valid - first), ours.settings.omega)
        chosen = ours.choose(statistics)
        exit_layer, begin = theirs.current_exit_layer, end
        threshold = float(theirs.average_confidence[exit_layer - 1].mean().nan_to_num(0.0))
        rows.append(
            {
                "method": "del",
                "tokens": end,
                "here": [chosen.exit_layer, chosen.draft_length, round(chosen.threshold, 4)],
                "there": [exit_layer, theirs.current_gamma, round(threshold, 4)],
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both selections and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="clone of kaist-flexml-lab/knapspec")
    parser.add_argument("--model", default="tiny", help="a Llama model")
    parser.add_argument("--texts", type=int, default=6, help="texts a domain, of 24 to 160 tokens")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parse_and_check(parser, arguments, writes=lambda given: given.out is not None)
    knapspec, clasp, dynamic_exit = import_strategies(options.clone)
    model, tokenizer = load_model(options.model, dtype="float32", device="cpu", unpack=True)
    engine = Engine(model, tokenizer, "autoregressive")
    rows = []
    for domain, prompts in PROMPTS.items():
        for index, prompt in enumerate(prompts[: options.texts]):
            written = engine.generate(prompt, max_new_tokens=24 * (index + 1), ignore_eos=True)
            beginning = engine.encode(prompt)
            token_ids = [*beginning, *written.token_ids]
            rows += compare_del(engine, dynamic_exit, token_ids, len(beginning))
            rows += [compare_knapspec(engine, knapspec, token_ids, latencies) for latencies in LATENCIES]
            rows += [compare_clasp(engine, clasp, token_ids, position) for position in range(15, len(token_ids), 16)]
            print(f"{domain} {index + 1}: {agreement(rows)}", file=sys.stderr)
    print(agreement(rows))
    if options.out is not None:
        result = {"stamp": make_stamp(torch.device("cpu")), "model": options.model, "sets": rows}
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


def agreement(rows: Sequence[dict[str, Any]]) -> str:
    """How many sets or exits are equal, by method, and in how many sublayers or numbers the others differ."""
    texts = []
    for method in ("knapspec", "clasp", "del"):
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
