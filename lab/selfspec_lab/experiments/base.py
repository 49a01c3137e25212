"""An experiment: a claim of a paper, what is measured for it, and a status that follows from the data alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest
from selfspec_lab.checks import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfspec_lab.experiments.lab import Lab

FAVOURS_NONE = "it was trained with every middle sublayer left out equally often, so no set of sublayers is favoured"
"""Why the bundled checkpoint cannot show that some sets draft better than others."""

Data = dict[str, Any]
"""The measurements of an experiment, ready for JSON."""


class Experiment(ABC):
    """A claim of a paper, tested on available models.

    ``measure`` runs models. ``judge`` and ``draw`` use only the data that it returned, so statuses and pictures can
    be made again from committed data.
    """

    number: ClassVar[int]
    """Number of the claim in ``docs/experiments.md``."""
    name: ClassVar[str]
    claim: ClassVar[str]
    """The paper's claim, in a sentence or two."""
    source: ClassVar[str]
    """The paper, with its figures or tables."""
    method: ClassVar[str]
    """What is measured here, and how it differs from the paper."""
    model: ClassVar[str] = "tiny"
    """The default checkpoint."""
    unfit: ClassVar[Mapping[str, str]] = {"tiny": FAVOURS_NONE}
    """Models that cannot show the claim, with the reason; on them it runs for regressions alone."""

    @abstractmethod
    def measure(self, lab: "Lab") -> Data:
        """Runs the measurements.

        Args:
            lab: models, prompts and the amount to measure.

        Returns:
            The data, ready for JSON: finite numbers, text, lists, objects with text keys.
        """

    @abstractmethod
    def judge(self, data: Data) -> Sequence[Check]:
        """Checks every part of the claim against the data."""

    @abstractmethod
    def draw(self, data: Data) -> "Figure":
        """Draws a picture like the paper's, without the global state of pyplot."""


EXPERIMENTS: dict[str, type[Experiment]] = {}
"""All experiments by name, in the order of the claims."""


def register(experiment: type[Experiment]) -> type[Experiment]:
    """Adds an experiment to ``EXPERIMENTS``; a decorator."""
    assert experiment.name not in EXPERIMENTS, f"two experiments are named {experiment.name}"
    EXPERIMENTS[experiment.name] = experiment
    ordered = sorted(EXPERIMENTS.items(), key=lambda item: item[1].number)
    EXPERIMENTS.clear()
    EXPERIMENTS.update(ordered)
    return experiment


def find_experiment(name: str) -> type[Experiment]:
    """Finds an experiment by name.

    Raises:
        InvalidParameterError: there is no experiment of this name.
    """
    if name not in EXPERIMENTS:
        raise InvalidParameterError(
            f"there is no experiment '{name}'{suggest(name, EXPERIMENTS)}; choose all, or from {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
