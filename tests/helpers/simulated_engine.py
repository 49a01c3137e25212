"""An engine without a model: its texts are given, and a clock advances by what its forwards cost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from selfspec.bridges.bridge_options import BridgeOptions
from selfspec.bridges.drafts import Drafts
from selfspec.runtimes.costs.rows import RowCosts

STEP = 0.02

FLAT = RowCosts((1, 32), (STEP, 1.3 * STEP))
"""As of an accelerator: rows cost next to nothing."""
DEAR = RowCosts((1, 32), (STEP, 32 * STEP))
"""Each row costs a step, so no draft can pay."""
Q4_K_M = RowCosts((1, 2, 4, 8, 16), tuple(STEP * each for each in (1.0, 1.7, 2.8, 5.8, 7.2)))
"""llama.cpp with a file of type Q4_K_M."""


@dataclass(eq=False)
class SimulatedEngine:
    """Writes given texts with drafts, one after the other, or several of the same length together."""

    costs: RowCosts
    options: BridgeOptions = field(default_factory=BridgeOptions)
    now: float = 0.0
    lengths: list[int] = field(default_factory=list)  # of the drafts of each round, over all sequences

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.options, clock=lambda: self.now)

    def write(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Writes an output after a prompt; returns its seconds without the prompt's."""
        return self.write_together([(prompt, output)])

    def write_together(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        """Writes outputs after prompts in rounds that they share, each until its end."""
        whole = [np.array([*prompt, *output]) for prompt, output in texts]
        lengths = [len(prompt) + 1 for prompt, _ in texts]
        self.now += 10 * STEP
        began = self.now
        while running := [row for row, length in enumerate(lengths) if length < len(whole[row])]:
            shown = [whole[row][: lengths[row]] for row in running]
            most = [len(whole[row]) - lengths[row] - 1 for row in running]
            drafts = self.drafts.draft(shown, most)
            self.lengths += map(len, drafts)
            self.now += self.costs(sum(1 + len(draft) for draft in drafts))
            for row, draft, limit in zip(running, drafts, most, strict=True):
                assert len(draft) <= limit
                lengths[row] += 1 + common(draft, whole[row][lengths[row] :].tolist())
        return self.now - began


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def repeating(seed: int, share: float, length: int = 128) -> tuple[list[int], list[int]]:
    """A prompt of 200 tokens, and an output that copies it; a share of its tokens is replaced: ``1 - share``."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1000) for _ in range(200)]
    output: list[int] = []
    for place in range(20, 20 + length):
        output.append(prompt[place % 200] if rng.random() < share else rng.randrange(1000))
    return prompt, output
