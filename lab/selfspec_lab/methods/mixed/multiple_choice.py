"""The multiple-choice knapsack: one choice of every item, and for every total weight the least total loss.

KnapSpec's knapsack (section 3.4) is the case of two choices a sublayer, to run it or to skip it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Choice:
    """One choice of an item; weight and loss are not negative."""

    weight: int
    loss: float


@dataclass(frozen=True)
class Filling:
    """One choice of every item, with the sums of their weights and losses."""

    weight: int
    loss: float
    choices: tuple[int, ...]


def best_fillings(items: Sequence[Sequence[Choice]]) -> list[Filling]:
    """The Pareto-optimal fillings, ascending by weight: each loses less than all that weigh no more.

    Dynamic programming over the items: ``losses[w]`` is the least loss of the items so far at weight ``w`` exactly.
    """
    most = sum(max(choice.weight for choice in choices) for choices in items)
    losses = np.full(most + 1, math.inf)
    losses[0] = 0.0
    taken = np.zeros((len(items), most + 1), dtype=np.int16)
    for index, choices in enumerate(items):
        offered = np.stack([_shifted(losses, choice) for choice in choices])
        taken[index] = offered.argmin(0)
        losses = offered.min(0)
    before = np.concatenate([[math.inf], np.minimum.accumulate(losses)[:-1]])
    return [_backtrack(items, taken, int(weight), losses) for weight in np.flatnonzero(losses < before)]


def _shifted(losses: npt.NDArray[np.float64], choice: Choice) -> npt.NDArray[np.float64]:
    """The losses after a choice, by weight."""
    moved = np.full_like(losses, math.inf)
    moved[choice.weight :] = losses[: len(losses) - choice.weight] + choice.loss
    return moved


def _backtrack(
    items: Sequence[Sequence[Choice]], taken: npt.NDArray[np.int16], weight: int, losses: npt.NDArray[np.float64]
) -> Filling:
    chosen: list[int] = []
    left = weight
    for index in reversed(range(len(items))):
        chosen.append(int(taken[index, left]))
        left -= items[index][chosen[-1]].weight
    return Filling(weight, float(losses[weight]), tuple(reversed(chosen)))
