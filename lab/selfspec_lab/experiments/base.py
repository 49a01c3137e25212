"""What an experiment is: a claim of a paper, what is measured for it, and a verdict computed from the data alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfspec_lab.experiments.lab import Lab

Verdict = Literal["holds", "holds in part", "does not hold"]

Data = dict[str, Any]
"""What an experiment measured, ready for JSON."""


@dataclass(frozen=True)
class Check:
    """One part of a claim, held against the data.

    Attributes:
        statement: the part, as a sentence that is true or false.
        holds: whether it is true of the data.
        figure: the numbers that say so.
    """

    statement: str
    holds: bool
    figure: str


class Experiment(ABC):
    """A claim of a paper, tried on models at hand.

    ``measure`` runs models; ``judge`` and ``draw`` are functions of what it gave, so that verdicts and pictures can be
    made again from committed data.
    """

    number: ClassVar[int]
    """Its place among the claims of ``docs/experiments.md``."""
    name: ClassVar[str]
    claim: ClassVar[str]
    """What the paper says, in a sentence or two."""
    source: ClassVar[str]
    """Paper, and its figures or tables."""
    method: ClassVar[str]
    """What is measured here to try it, and where that differs from the paper."""
    model: ClassVar[str] = "tiny"
    """The checkpoint that it runs on unless another one is asked for."""

    @abstractmethod
    def measure(self, lab: "Lab") -> Data:
        """Runs what there is to run.

        Args:
            lab: gives models and prompts, and says how much to measure.

        Returns:
            The data, ready for JSON: finite numbers, text, lists, objects with text keys.
        """

    @abstractmethod
    def judge(self, data: Data) -> Sequence[Check]:
        """Holds every part of the claim against the data."""

    @abstractmethod
    def draw(self, data: Data) -> "Figure":
        """A picture like the paper's, made without the global state of pyplot."""


def verdict(checks: Sequence[Check]) -> Verdict:
    """What the checks come to: all of them hold, some of them, or none."""
    holding = sum(check.holds for check in checks)
    if holding == len(checks):
        return "holds"
    return "holds in part" if holding else "does not hold"


EXPERIMENTS: dict[str, type[Experiment]] = {}
"""Every experiment by its name, in the order of the claims."""


def register(experiment: type[Experiment]) -> type[Experiment]:
    """Makes an experiment known; a decorator."""
    assert experiment.name not in EXPERIMENTS, f"two experiments are named {experiment.name}"
    EXPERIMENTS[experiment.name] = experiment
    ordered = sorted(EXPERIMENTS.items(), key=lambda item: item[1].number)
    EXPERIMENTS.clear()
    EXPERIMENTS.update(ordered)
    return experiment


def find_experiment(name: str) -> type[Experiment]:
    """The experiment of a name.

    Raises:
        InvalidParameterError: there is none.
    """
    if name not in EXPERIMENTS:
        raise InvalidParameterError(
            f"there is no experiment '{name}'{suggest(name, EXPERIMENTS)}; choose all, or from {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
