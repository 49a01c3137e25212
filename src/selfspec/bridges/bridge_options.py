"""The options of a bridge, checked at construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from selfspec.errors import InvalidSettingError
from selfspec.planning.allowance import CREDIT
from selfspec.planning.plans import MOST_DRAFTED
from selfspec.ranges import check_number
from selfspec.runtimes.costs.rows import RowCosts

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROW = 0.1
"""Share of a step that a further row is taken to cost before any was timed: little, so that drafts are tried."""

_MOST_CREDIT = 1000

_MEASURED, _ASSUMED = 0.08, 0.25
"""Doubt in the shape of the costs, as the standard deviation of the logarithm of twice the rows."""


@dataclass(frozen=True)
class BridgeOptions:
    """What a user of a bridge can choose.

    Attributes:
        max_draft_tokens: most draft tokens of a sequence in a round, 1 to 32.
        row_costs: what a forward of the engine costs by its number of rows, 1 among them: seconds, or multiples of the
            cost of one row. Without them a further row is taken to cost a tenth of the first. Either is corrected by
            what rounds take.
        memory_tokens: tokens of ended texts that later texts are looked up in; 0 keeps none.
        credit: steps of plain decoding that a text may lose before anything was saved; more of them let long drafts be
            tried where each row is dear.
        delta: share of plain decoding's time that a text may lose beyond that, 0 to 1.

    Raises:
        InvalidSettingError: a value is of the wrong type or out of range.
    """

    max_draft_tokens: int = 16
    row_costs: Mapping[int, float] = field(default_factory=dict)
    memory_tokens: int = 2**15
    credit: float = CREDIT
    delta: float = 0.02

    def __post_init__(self) -> None:
        check = partial(check_number, error=InvalidSettingError)
        check("max_draft_tokens", self.max_draft_tokens, 1, MOST_DRAFTED, whole=True)
        check("memory_tokens", self.memory_tokens, 0, whole=True)
        check("credit", self.credit, 0, _MOST_CREDIT)
        check("delta", self.delta, 0, 1)
        _ = self.costs

    @classmethod
    def of(cls, max_draft_tokens: int, others: Mapping[str, Any]) -> "BridgeOptions":
        """The options of a bridge, the others by name.

        Raises:
            InvalidSettingError: one is unknown or out of range.
        """
        known = {each.name for each in fields(cls)} - {"max_draft_tokens"}
        if unknown := sorted(others.keys() - known):
            raise InvalidSettingError(f"a bridge has no option {unknown[0]}; choose from {', '.join(sorted(known))}")
        return cls(max_draft_tokens, **others)

    @property
    def costs(self) -> RowCosts:
        """The costs to start from; only their shape counts."""
        if self.row_costs == {}:
            return RowCosts(_ROWS, tuple(1 + _ROW * (rows - 1) for rows in _ROWS))
        try:
            rows = tuple(sorted(self.row_costs))
            return RowCosts(rows, tuple(self.row_costs[each] for each in rows))
        except (ValueError, TypeError):
            raise InvalidSettingError(
                f"row_costs must map numbers of rows, 1 among them, to costs above 0, not {self.row_costs!r}"
            ) from None

    @property
    def shape_doubt(self) -> float:
        """How sure the shape of the costs is."""
        return _MEASURED if self.row_costs else _ASSUMED
