"""The phases of each recipe: steps, batches, lengths, learning rates, objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from data import CODE_LIGHT, MATH_HEAVY, MATH_LIGHT, MATH_LIGHTEST, MIXTURE
from objectives import (
    DistilledSubsetObjective,
    DraftingExitObjective,
    EarlyExitObjective,
    HalfDepthObjective,
    MutualExitObjective,
    MutualHalfDepthObjective,
    Objective,
    SubsetObjective,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps with batches of one size.

    Attributes:
        steps: optimizer steps.
        rows: rows in a batch.
        length: tokens of a row.
    """

    steps: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a recipe; checkpoints are named by phase.

    Attributes:
        name: name of the phase and its checkpoint file.
        objective: objective of its steps.
        stages: stages, in order.
        warm_up: steps over which the learning rate rises from 0.
        decay: steps at the end over which it falls to 0; 0 leaves it stable.
        peak: share of the stable learning rate at the top.
        mixture: share of the tokens that each domain gives.
    """

    name: str
    objective: type[Objective]
    stages: tuple[Stage, ...]
    warm_up: int = 0
    decay: int = 0
    peak: float = 1.0
    mixture: Mapping[str, float] = field(default_factory=lambda: MIXTURE)

    @property
    def steps(self) -> int:
        """Optimizer steps of the phase."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens that the phase reads."""
        return sum(stage.steps * stage.rows * stage.length for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """Return the stage of a step of this phase (0 ... steps - 1)."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise ValueError(f"phase {self.name} has {self.steps} steps")

    def scale(self, step: int) -> float:
        """Share of the stable learning rate at a step of this phase, 0 ... 1."""
        rise = (step + 1) / self.warm_up if self.warm_up else 1.0
        fall = (self.steps - step) / self.decay if self.decay else 1.0
        return self.peak * min(1.0, rise, fall)

    def scaled(self, factor: float) -> Phase:
        """Return the phase with numbers of steps multiplied, at least one step per stage."""

        def times(steps: int) -> int:
            return max(1, round(steps * factor)) if steps else 0

        stages = tuple(Stage(times(stage.steps), stage.rows, stage.length) for stage in self.stages)
        return replace(self, stages=stages, warm_up=times(self.warm_up), decay=times(self.decay))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of one bundled checkpoint.

    Attributes:
        phases: phases in order; the last has the checkpoint's name.
        blended: name of an earlier phase whose weights are averaged with the last one's.
        share: weight of that phase in the average, 0 ... 1.
    """

    phases: tuple[Phase, ...]
    blended: str | None = None
    share: float = 0.0

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self.phases[-1].name


START = Phase("start", SubsetObjective, (Stage(200, 16, 256),), warm_up=100, peak=0.5)
BASE = Phase("base", SubsetObjective, (Stage(400, 16, 256), Stage(550, 32, 256)))
SUBSETS = Phase(
    "subsets",
    DistilledSubsetObjective,
    (Stage(430, 32, 256), Stage(170, 16, 512), Stage(20, 4, 2048)),
    decay=450,
    mixture=MATH_HEAVY,
)
HALF_DEPTH = Phase(
    "half-depth", HalfDepthObjective, (Stage(60, 4, 2048),), warm_up=5, decay=55, peak=0.3, mixture=MATH_LIGHT
)
MUTUAL_HALF_DEPTH = Phase(
    "mutual-half-depth",
    MutualHalfDepthObjective,
    (Stage(320, 32, 256), Stage(100, 16, 512), Stage(30, 4, 2048)),
    warm_up=10,
    decay=350,
    peak=0.5,
    mixture=MATH_LIGHT,
)
TINY = Phase(
    "tiny",
    HalfDepthObjective,
    (Stage(60, 32, 256), Stage(24, 16, 512), Stage(6, 4, 2048)),
    warm_up=5,
    decay=85,
    peak=0.4,
    mixture=CODE_LIGHT,
)
EXITS = Phase(
    "exits",
    EarlyExitObjective,
    (Stage(180, 32, 256), Stage(60, 16, 512), Stage(10, 4, 2048)),
    warm_up=10,
    decay=240,
    peak=0.5,
    mixture=MATH_HEAVY,
)
MORE_EXITS = Phase(
    "more-exits",
    EarlyExitObjective,
    (Stage(98, 32, 256), Stage(12, 4, 2048)),
    warm_up=5,
    decay=105,
    peak=0.5,
    mixture=MATH_LIGHTEST,
)
MUTUAL_EXITS = Phase(
    "mutual-exits",
    MutualExitObjective,
    (Stage(320, 32, 256), Stage(80, 16, 512), Stage(30, 4, 2048)),
    warm_up=10,
    decay=330,
    peak=0.5,
    mixture=MATH_LIGHT,
)
EARLY_EXIT = Phase(
    "tiny-early-exit",
    DraftingExitObjective,
    (Stage(90, 32, 256), Stage(50, 16, 512), Stage(10, 4, 2048)),
    warm_up=5,
    decay=140,
    peak=0.5,
    mixture=CODE_LIGHT,
)

MTP, MTP_AGAIN = Stage(1000, 8, 256), Stage(300, 8, 256)
"""Of a multi-token-prediction head, whose model is frozen (``mtp.py``): a new one, and one that goes on."""

TINY_RECIPE = Recipe((START, BASE, SUBSETS, HALF_DEPTH, MUTUAL_HALF_DEPTH, TINY), "mutual-half-depth", 0.3)

EARLY_EXIT_RECIPE = Recipe(
    (START, BASE, SUBSETS, HALF_DEPTH, EXITS, MORE_EXITS, MUTUAL_EXITS, EARLY_EXIT), "mutual-exits", 0.4
)
"""LayerSkip's way of continued training: early exits are trained in a model that is already trained.

The mean of the weights of the last two phases has the exits of the one and the text of the other.
"""
