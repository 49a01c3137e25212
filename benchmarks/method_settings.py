"""Runs one method with several values of a setting.

``python benchmarks/method_settings.py clasp update_interval 16 64``

Prints, for each value, what the drafts were worth on chat messages (for a model without a chat template, on the
prompts of the three domains): figures that do not depend on the load of the machine, and the share of selection in the
decoding time, which does. Defaults of settings are chosen by these figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from selfspec import Engine
from selfspec.loading import load_model
from selfspec.types import Generation, Round
from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS


@dataclass(frozen=True)
class Figures:
    """What drafts were worth, over all rounds of several outputs.

    Attributes:
        acceptance: accepted ÷ drafted tokens.
        tokens_per_round: committed tokens ÷ rounds.
        kept_share: kept ÷ all sublayers, mean over the draft steps.
        modelled_speed: tokens ÷ time, in plain decoding's, if a draft step costs its kept share of a target step and a
            verification one target step: tokens a round ÷ (draft steps · kept share + 1).
        selection_share: time of choosing what drafts ÷ time after the prefill.
        idle_share: rounds that drafted nothing ÷ rounds.
    """

    acceptance: float
    tokens_per_round: float
    kept_share: float
    modelled_speed: float
    selection_share: float
    idle_share: float


def summarise(results: Sequence[Generation]) -> Figures:
    """The figures of several outputs."""
    rounds = list(chain.from_iterable(_rounds(result) for result in results))
    drafted = sum(each.drafted for each in rounds)
    work = sum(each.drafted * len(each.kept.sublayers) / each.kept.total for each in rounds if each.kept)
    tokens = sum(len(each.token_ids) for each in rounds)
    return Figures(
        acceptance=sum(each.accepted for each in rounds) / max(1, drafted),
        tokens_per_round=tokens / len(rounds),
        kept_share=work / max(1, drafted),
        modelled_speed=tokens / (work + len(rounds)),
        selection_share=sum(each.seconds.select for each in rounds)
        / sum(result.seconds - result.prefill_seconds for result in results),
        idle_share=sum(not each.drafted for each in rounds) / len(rounds),
    )


def _rounds(result: Generation) -> Sequence[Round]:
    """The rounds of an output; versions before the package ``selfspec-lab`` call them ``records``."""
    return getattr(result, "records", result.rounds)


def read_prompts(engine: Engine, count: int) -> list[list[int]]:
    """The first prompts: chat messages if the model has a chat template, else texts of the domains in turn."""
    texts = [*CHAT_PROMPTS.values(), *PROMPTS["math"]]
    if getattr(engine.tokenizer, "chat_template", None):
        return [engine.encode([{"role": "user", "content": text}]) for text in texts[:count]]
    return [engine.encode(text) for text in list(chain.from_iterable(zip(*PROMPTS.values(), strict=False)))[:count]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method")
    parser.add_argument("setting")
    parser.add_argument("values", nargs="+")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], help="another setting, as name=value")
    options = parser.parse_args(arguments)
    others = dict(text.split("=", 1) for text in options.set)
    model, tokenizer = load_model(options.model, dtype=options.dtype, device="cpu", unpack=True)
    print(f"{options.method} {options.setting} on {options.model}, {options.prompts} x {options.new_tokens} {others}")
    print(f"{'value':>12} acceptance tokens/round kept modelled selection idle", flush=True)
    for value in options.values:
        settings = {**others, options.setting: value}
        engine = Engine(model, tokenizer, options.method, settings=settings)
        prompts = read_prompts(engine, options.prompts)
        results = [engine.generate(ids, max_new_tokens=options.new_tokens, ignore_eos=True) for ids in prompts]
        found = summarise(results)
        print(
            f"{value:>12} {found.acceptance:10.3f} {found.tokens_per_round:12.2f} {found.kept_share:4.2f} "
            f"{found.modelled_speed:8.3f} {found.selection_share:8.1%} {found.idle_share:5.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
