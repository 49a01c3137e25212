"""Which texts a table is measured on: the first suite of each task that is at hand, or one suite of the user's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites import Question, Suite, read_suite
from selfspec_lab.bench.suites.types import Encode
from selfspec_lab.papers.tables import Table, Task


@dataclass(frozen=True)
class Column:
    """A task with the suite that it is measured on.

    Attributes:
        task: the task.
        spec: the suite, as ``read_suite`` takes it.
        stand_in: whether these are other texts than the paper's.
        index: of the task in the table; ``None`` for a suite of the user's.
    """

    task: Task
    spec: str
    stand_in: bool
    index: int | None


def choose_columns(
    table: Table, *, suite: str | None, data: Path | None, hub: bool, tasks: Sequence[str] = ()
) -> tuple[list[Column], dict[str, str]]:
    """The columns of a table.

    Args:
        table: the table.
        suite: a suite instead of the paper's tasks.
        data: folder with ``gsm8k_test.jsonl``, ``humaneval.jsonl``, ``spec_bench.jsonl`` and ``books``.
        hub: whether the hub may be asked; without it only the data folder is read.
        tasks: keys of the tasks to measure; all if empty.

    Returns:
        The columns, and why each other task is left out.

    Raises:
        InvalidParameterError: there is no column; the data folder does not exist.
    """
    if data is not None and not data.is_dir():
        raise InvalidParameterError(f"there is no data folder '{data}'")
    if suite is not None:
        own = Task("suite", suite, "own suite", table.max_new_tokens or 128, (suite,))
        return [Column(own, suite, stand_in=True, index=None)], {}
    columns, left_out = [], {}
    for index, task in enumerate(table.tasks):
        spec = _at_hand(task, data, hub)
        if tasks and task.key not in tasks:
            left_out[task.title] = "not asked for"
        elif spec is None:
            left_out[task.title] = f"none of {', '.join(task.suites)} is at hand"
        else:
            columns.append(Column(task, spec, task.stand_in and "hub:" not in spec, index))
    if not columns:
        raise InvalidParameterError(
            f"no text of {table.name} is at hand; name --data FOLDER with gsm8k_test.jsonl, humaneval.jsonl, "
            "spec_bench.jsonl and books/, allow --hub, or name your own --suite"
        )
    return columns, left_out


def _at_hand(task: Task, data: Path | None, hub: bool) -> str | None:
    """The paper's own texts from the hub if it may be asked, otherwise files that exist."""
    remote = [spec for spec in task.suites if "hub:" in spec]
    local = [spec.format(data=data) for spec in task.suites if "hub:" not in spec and data is not None]
    local = [spec for spec in local if Path(spec[spec.index(str(data)) :]).is_file()]
    chosen = [*remote, *local] if hub else local
    return chosen[0] if chosen else None


def load_column(
    column: Column, encode: Encode, *, limit: int, context: int, seed: int, tuning: int
) -> tuple[Suite, list[Question]]:
    """The questions of a column, and other ones to tune on.

    Args:
        column: the column.
        encode: the model's tokenizer.
        limit: number of questions.
        context: tokens of a passage.
        seed: seed of their choice.
        tuning: number of questions to tune on, at most.

    Raises:
        SelfSpecError: the suite cannot be read.
    """
    suite = _read(column.spec, limit, seed, encode, context)
    asked = {(question.turns, question.token_ids) for question in suite.questions}
    others = _read(column.spec, limit + tuning, seed + 1, encode, context).questions if tuning else ()
    return suite, [each for each in others if (each.turns, each.token_ids) not in asked][:tuning]


def _read(spec: str, limit: int, seed: int, encode: Encode, context: int) -> Suite:
    """A suite with ``limit`` questions, as many of every category as of the others."""
    source = read_suite(spec, seed=seed, limit=limit)
    suite = source.load(encode, context)
    categories = len({question.category for question in suite.questions})
    share = -(-limit // categories)
    if share < limit:
        suite = read_suite(spec, seed=seed, limit=share).load(encode, context)
    return replace(suite, questions=_spread(suite.questions, limit))


def _spread(questions: Sequence[Question], limit: int) -> tuple[Question, ...]:
    """At most ``limit`` questions, evenly spread."""
    count = min(limit, len(questions))
    return tuple(questions[index * len(questions) // count] for index in range(count))
