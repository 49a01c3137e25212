"""The papers' tables and figures, as typed into ``tables.json``: what they compare, on what, and what they report."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest

FILE = Path(__file__).with_name("tables.json")

FIGURES = {
    "M": "mean generated length M (CLaSp: τ)",
    "acceptance": "acceptance rate",
    "etpl": "tokens per loaded layer (eTPL)",
    "attention_skipped": "skipped share of the attention sublayers",
    "mlp_skipped": "skipped share of the MLP sublayers",
    "speedup": "speedup over plain decoding",
}
"""What tables report, by the name in ``tables.json``."""


@dataclass(frozen=True)
class Task:
    """A column of a table: texts in the form of the paper.

    Attributes:
        key: name of the task, and of its folder of results.
        title: as the paper calls it.
        form: of the prompts.
        max_new_tokens: longest output in the paper.
        suites: what it is read from, the first that is at hand: files of a data folder ``{data}``, or the hub.
        stand_in: the files of the data folder are other texts than the paper's, of the same kind.
        chat: whether the questions are chat messages.
        context: tokens of a passage, for long texts.
    """

    key: str
    title: str
    form: str
    max_new_tokens: int
    suites: tuple[str, ...]
    stand_in: bool = False
    chat: bool = False
    context: int = 1024


@dataclass(frozen=True)
class Row:
    """A method of a table.

    Attributes:
        method: its name here.
        settings: values of its settings.
        tune: what is tuned beforehand: ``exit`` (exit layer and draft length), ``exit-layer``, ``fixed-exit``, or
            ``skipped`` (Draft & Verify's search); ``None`` for nothing.
        exit_share: share of the layers that the exit layer is; ``None`` for the method's own.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tune: str | None = None
    exit_share: float | None = None


@dataclass(frozen=True)
class Reported:
    """The figures of a table for one of the paper's models.

    Attributes:
        name: the model, as the paper calls it.
        shapes: its sizes by name in ``selfspec_lab.roofline``: one, or one for each task.
        rows: by method a list of figures for each task, and last the overall speedup, each in the table's order.
        device: the GPU if it is not the table's.
        bits: of a weight.
    """

    name: str
    shapes: tuple[str, ...]
    rows: Mapping[str, list[list[float]]]
    device: str | None = None
    bits: int = 16

    def shape(self, column: int) -> str:
        """The model of a column, from 0."""
        return self.shapes[column % len(self.shapes)]


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        name: of ``--table``.
        paper: the paper.
        place: its table or figure.
        methods: by the paper's name of the method.
        tasks: the columns.
        figures: names in ``FIGURES`` that it reports; its speedups are last.
        device: its GPU.
        models: what it reports, by model.
        temperature: of sampling; 0 is greedy.
        max_new_tokens: longest output, if the table has one for all tasks.
        needs: ``early-exit`` if it is about models trained for early exit.
        order: pairs of methods of which the first is faster, where the paper has no numbers.
        trend: ``size`` or ``attention`` for a claim beyond the order of the methods.
        note: what a reader has to know besides.
    """

    name: str
    paper: str
    place: str
    methods: Mapping[str, Row]
    tasks: tuple[Task, ...]
    figures: tuple[str, ...]
    device: str
    models: tuple[Reported, ...]
    temperature: float = 0.0
    max_new_tokens: int | None = None
    needs: str | None = None
    order: tuple[tuple[str, str], ...] = ()
    trend: str | None = None
    note: str = ""

    def nearest(self, layers: int) -> Reported:
        """What the paper reports for its model whose number of layers is nearest, the smaller of two."""
        from selfspec_lab.roofline import find_shape

        def distance(model: Reported) -> tuple[int, int, str]:
            own = find_shape(model.shape(-1)).layers
            return abs(own - layers), own, model.name

        return min(self.models, key=distance)

    def reported(self, model: Reported, method: str, column: int, figure: str) -> float | None:
        """A figure of the paper, or ``None`` where it has none.

        Args:
            model: the paper's model.
            method: the paper's name of the method.
            column: index of the task; -1 for the overall speedup.
            figure: name in ``FIGURES``.
        """
        cells = model.rows.get(method)
        if cells is None or not cells[column] or (column == -1 and figure != "speedup"):
            return None
        return cells[-1][0] if column == -1 else cells[column][self.figures.index(figure)]


@functools.cache
def read_tables() -> dict[str, Table]:
    """All tables, by name."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    tasks = {key: Task(key, **{**values, "suites": tuple(values["suites"])}) for key, values in read["tasks"].items()}
    return {name: _table(name, values, tasks) for name, values in read["tables"].items()}


def _table(name: str, values: dict[str, Any], tasks: Mapping[str, Task]) -> Table:
    models = tuple(Reported(**{**each, "shapes": tuple(each["shapes"])}) for each in values["models"])
    return Table(
        name,
        **{
            **values,
            "methods": {label: Row(**row) for label, row in values["methods"].items()},
            "tasks": tuple(tasks[key] for key in values["tasks"]),
            "figures": tuple(values["figures"]),
            "models": models,
            "order": tuple((first, second) for first, second in values.get("order", ())),
        },
    )


def find_table(name: str) -> Table:
    """A table by its name.

    Raises:
        InvalidParameterError: there is none of this name.
    """
    tables = read_tables()
    if name not in tables:
        raise InvalidParameterError(
            f"there is no table '{name}'{suggest(name, dict.fromkeys(tables))}; choose from {', '.join(tables)}"
        )
    return tables[name]
