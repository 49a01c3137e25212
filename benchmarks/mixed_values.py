"""Which value of a sublayer's precision predicts acceptance better: a cosine of states, or a divergence of outputs?

``python benchmarks/mixed_values.py --model smollm2 --out FILE``

KnapSpec values a kept set by the cosine similarity of its last hidden state to the target's; ``mixed`` values a choice
of bits by the KL divergence of the target's distribution with that one change. Both are measured here, one part changed
at a time, on a text of the model's own, and added up over the parts. They are compared on another text of the model's
own by how often a draft chooses the target's token:

- over random mixes of bits: the rank correlation of the sum with the agreement;
- for budgets of time: the agreement of the mix that the knapsack fills each budget with.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from selfspec.loading import load_model
from selfspec.methods.auto.preparation import OwnText, write_text
from selfspec.runtimes.costs.parts import measure_latencies
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.precision import FULL_BITS, Precision
from selfspec.runtimes.target import Target
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.methods.mixed.losses import SKIP, ChangedModel
from selfspec_lab.methods.mixed.plan import Plan, fill, part_seconds
from selfspec_lab.perturbing import perturb

Losses = list[Mapping[int, float]]

GROUP = 32
"""Weights of a row that share a scale."""

BUDGETS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7)
"""Times of a draft step ÷ that of the whole model at full bits."""


class CosineModel(ChangedModel):
    """The target with one part changed, valued by states instead of distributions."""

    def loss(self, part: int, bits: int) -> float:
        """One minus the mean cosine to the target's last hidden state; of the LM head, to its logits."""
        head = part == self._target.sublayer_count
        own = self._target.logits(self._states[part]) if head else self._states[self._target.sublayer_count]
        changed = self._logits(part, bits) if head else self._last_states(part, bits)
        cosines = torch.nn.functional.cosine_similarity(own.float(), changed.float(), dim=-1)
        return max(0.0, 1.0 - float(cosines[4:].mean()))

    def _last_states(self, part: int, bits: int) -> torch.Tensor:
        states = self._states[part]
        if bits != SKIP:
            states = self._copy(part, bits).run(states, (part,), self._forward).hidden_states
        later = range(part + 1, self._target.sublayer_count)
        return self._target.run(states, later, self._forward).hidden_states


def measure(model: ChangedModel, total: int) -> Losses:
    """The loss of each choice of every part, the LM head last."""
    return [
        {FULL_BITS: 0.0} | {bits: model.loss(part, bits) for bits in (LOW_BITS if part == total else (*LOW_BITS, SKIP))}
        for part in range(total + 1)
    ]


def agreement(target: Target, bits: Sequence[int], text: OwnText) -> float:
    """How often a draft with these bits chooses what the target chooses."""
    plan = Plan(tuple(bits), 1, 0.0, 0.0, 0.0)
    target.release_low_bit()
    model, rows = target.at(plan.precision(GROUP)), len(text.token_ids)
    forward = target.lay_out(target.new_sequence(rows, rows, rows), rows)
    states = model.run(target.embed(text.token_ids), plan.kept.sublayers, forward).hidden_states
    return float((model.logits(states).argmax(-1) == text.choices).float().mean())


def random_mix(parts: int, generator: random.Random) -> tuple[int, ...]:
    """Bits of every part: mostly low, some skipped, in a share that differs from mix to mix."""
    skipped, four, six = generator.uniform(0, 0.15), generator.uniform(0, 1), generator.uniform(0, 1)
    bits = []
    for part in range(parts):
        if part < parts - 1 and generator.random() < skipped:
            bits.append(SKIP)
        else:
            bits.append(4 if generator.random() < four else 6 if generator.random() < six else 8)
    return tuple(bits)


@torch.inference_mode()
def compare(target: Target, rows: int, mixes: int) -> dict[str, Any]:
    """Measures both values, and what they predict.

    Args:
        target: the model.
        rows: tokens of the text that values are measured on, and of the one that they are compared on.
        mixes: random mixes.
    """
    text = write_text(target, 2 * rows)
    held_out = OwnText(text.token_ids[rows:], text.choices[rows:])
    total = target.sublayer_count
    losses = {
        "divergence": measure(ChangedModel(target, text.token_ids[:rows], GROUP), total),
        "cosine": measure(CosineModel(target, text.token_ids[:rows], GROUP), total),
    }
    profiles = {FULL_BITS: measure_latencies(target)}
    for bits in LOW_BITS:
        target.release_low_bit()
        profiles[bits] = measure_latencies(target, precision=Precision.of(bits, GROUP))
    seconds = part_seconds(profiles, target.layer_count, 256)
    full = sum(each[FULL_BITS] for each in seconds)
    generator = random.Random(0)
    tried = [random_mix(total + 1, generator) for _ in range(mixes)]
    agreements = [agreement(target, bits, held_out) for bits in tried]
    found: dict[str, Any] = {"agreements": agreements}
    for name, values in losses.items():
        sums = [sum(value[bits] for value, bits in zip(values, mix, strict=True)) for mix in tried]
        candidates = fill(values, seconds)
        filled = {}
        for budget in BUDGETS:
            affordable = [each for each in candidates if each.seconds <= budget * full]
            if affordable:
                filled[budget] = agreement(target, min(affordable, key=lambda each: each.loss).bits, held_out)
        found[name] = {"rank_correlation": -float(spearmanr(sums, agreements)[0]), "agreement_by_budget": filled}
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--mixes", type=int, default=60)
    parser.add_argument("--perturb", action="store_true", help="take weights of a 4-bit file off its grid")
    parser.add_argument("--out", type=Path)
    options = parse_and_check(parser)
    model, _ = load_model(options.model, dtype="bfloat16", device="cpu", unpack=True)
    if options.perturb:
        perturb(model)
    target = Target(model)
    found = compare(target, options.rows, options.mixes)
    found |= {"model": options.model, "rows": options.rows, "stamp": make_stamp(target.device)}
    print(json.dumps({name: value for name, value in found.items() if name != "agreements"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
