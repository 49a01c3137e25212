"""A selection of KnapSpec in use: what it was made from, what came of it, and its form in a state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from selfspec.errors import StateError
from selfspec.methods.knapsack import Candidates, Selection
from selfspec.methods.knapspec_calibration import Calibration
from selfspec.methods.layer_search import check_skipped, free_sublayers
from selfspec.methods.payoff import Record
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

_SELECTION = "selection"
_SELECTION_NUMBERS = ("draft_length", "acceptance", "tokens_per_second")


@dataclass(frozen=True)
class Ground:
    """What a selection was made from.

    Attributes:
        candidates: of the first stage.
        calibration: their expected acceptance, by live rounds too.
    """

    candidates: Candidates
    calibration: Calibration

    @property
    def calibrated(self) -> Candidates:
        """The candidates with their expected acceptance."""
        return replace(self.candidates, acceptance=self.calibration.acceptance)

    def note_round(self, kept: KeptSet, drafted: int, accepted: int) -> None:
        """Counts a round that one of them drafted."""
        if kept in self.candidates.kept:
            similarity = float(self.candidates.similarities[self.candidates.kept.index(kept)])
            missed = int(accepted < drafted)
            self.calibration.note_round(similarity, accepted + missed, missed)


@dataclass(frozen=True)
class Choice:
    """A selection in use.

    Attributes:
        selection: the selection.
        record: what came of it.
        ground: what it was made from; ``None`` on the paper's schedule, and where it was loaded.
    """

    selection: Selection
    record: Record
    ground: Ground | None = None


def selection_values(selection: Selection | None) -> dict[str, Any]:
    """A selection as the values of a state."""
    return {_SELECTION: None if selection is None else _values_of(selection)}


def _values_of(selection: Selection) -> dict[str, Any]:
    return {
        "skipped": list(selection.kept.skipped),
        "draft_length": selection.draft_length,
        "acceptance": selection.acceptance,
        "tokens_per_second": selection.tokens_per_second,
    }


def read_selection(state: LearnedState, target: Target, longest: int) -> Selection | None:
    """The selection of a state, if there is one.

    Args:
        state: the state.
        target: the model.
        longest: longest draft.

    Raises:
        StateError: it is damaged, or does not fit this model.
    """
    values: Any = state.values.get(_SELECTION)
    if values is None:
        return None
    if not isinstance(values, Mapping) or values.keys() != {"skipped", *_SELECTION_NUMBERS}:
        raise StateError("the state's selection is damaged; learn it again")
    if values["skipped"] != []:
        check_skipped(values["skipped"], free_sublayers(target.layer_count))
    length, *rates = (values[name] for name in _SELECTION_NUMBERS)
    if type(length) is not int or not 1 <= length <= longest or not all(_is_rate(rate) for rate in rates):
        raise StateError(f"the state's selection is not one of drafts of up to {longest} tokens; learn it again")
    return Selection(KeptSet.skipping(values["skipped"], target.sublayer_count), length, *rates)


def _is_rate(value: object) -> bool:
    return type(value) is float and 0 <= value < math.inf
