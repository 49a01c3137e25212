"""What an experiment makes of data: checks, panels, and the data as it is read again."""

import json
from typing import Any

from selfspec_lab.experiments.base import Data, Experiment


def holding(experiment: Experiment, data: Data) -> list[bool]:
    """Whether each part of a claim holds; every one has a statement and its figures."""
    checks = experiment.judge(data)
    assert all(check.figure and not check.statement.endswith(".") for check in checks)
    return [check.status == "holds" for check in checks]


def drawn(experiment: Experiment, data: Data) -> list[Any]:
    """The panels of a picture, all of which say what they show."""
    figure = experiment.draw(data)
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.axison]
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in panels)
    return panels


def as_read(data: Data) -> Data:
    """The data as it comes back from a file, which is just as it was."""
    again: Data = json.loads(json.dumps(data, allow_nan=False))
    assert again == data, "what is no text among keys, or a tuple, does not come back"
    return again
