"""Measures a table: one benchmark run for each task, in a folder each. A stopped table goes on where it was."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec import Engine, Prompt
from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.run.folder import RunFolder
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.runner import Observer, Run
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.bench.suites import Question
from selfspec_lab.decide import SEEDS
from selfspec_lab.papers.columns import Column, choose_columns, load_column
from selfspec_lab.papers.prepare import Tuned, tune_methods
from selfspec_lab.papers.tables import Table, find_table
from selfspec_lab.widening import load_model

FULL = {"limit": 6, "max_new_tokens": 64, "context": 2048, "tuning_prompts": 4, "tuning_sets": 24}
QUICK = {"limit": 2, "max_new_tokens": 24, "context": 256, "tuning_prompts": 2, "tuning_sets": 3}
"""Sizes of ``TableOptions``: of a table within hours on two cores, and to see that it runs."""


@dataclass(frozen=True)
class TableOptions:
    """What to measure; checked at construction.

    Attributes:
        table: name of the table.
        model: a name that ``load_model`` takes.
        dtype: of the weights.
        unpack: whether weights of a quantised GGUF file become numbers of the dtype.
        device: as torch names it, or ``auto``.
        suite: a suite instead of the paper's tasks.
        tasks: keys of the tasks to measure; all if empty.
        data: folder of the paper's tasks; ``None`` for none.
        hub: whether the hub may be asked for them.
        limit: prompts for each task.
        max_new_tokens: longest output, at most the paper's.
        context: tokens of a passage of a long text, at most the paper's.
        tuning_prompts: calibration texts; 10 in DEL.
        tuning_sets: sets that Draft & Verify's search measures.
        seed: of sampling and of the choice of texts.

    Raises:
        InvalidParameterError: there is no such table, no text for it, or a number is too small.
    """

    table: str
    model: str = "tiny"
    dtype: str = "auto"
    unpack: bool = False
    device: str = "auto"
    suite: str | None = None
    tasks: tuple[str, ...] = ()
    data: Path | None = None
    hub: bool = False
    limit: int = FULL["limit"]
    max_new_tokens: int = FULL["max_new_tokens"]
    context: int = FULL["context"]
    tuning_prompts: int = FULL["tuning_prompts"]
    tuning_sets: int = FULL["tuning_sets"]
    seed: int = 0

    def __post_init__(self) -> None:
        known = [task.key for task in find_table(self.table).tasks]
        for task in self.tasks:
            if task not in known:
                raise InvalidParameterError(f"{self.table} has no task '{task}'; choose from {', '.join(known)}")
        for name in ("limit", "context", "tuning_prompts", "tuning_sets"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_new_tokens < 2:
            raise InvalidParameterError(f"max_new_tokens must be at least 2, not {self.max_new_tokens}")

    def to_tune(self) -> dict[str, Any]:
        """What the tuning depends on."""
        return {name: value for name, value in asdict(self).items() if name not in ("data", "hub", "limit")}

    def run_options(self, table: Table, column: Column, tuned: Tuned) -> RunOptions:
        """The options of the run of one task."""
        sampled = table.temperature > 0
        return RunOptions(
            model=self.model,
            dtype=self.dtype,
            unpack=self.unpack,
            device=self.device,
            methods=(PLAIN,),
            variants={label: row.method for label, row in table.methods.items()},
            settings={label: values for label, values in tuned.settings.items() if values},
            states=tuned.states,
            peers=("none",),
            suite=column.spec,
            limit=self.limit,
            repeats=SEEDS if sampled else 1,
            max_new_tokens=min(self.max_new_tokens, table.max_new_tokens or column.task.max_new_tokens),
            temperature=table.temperature,
            sampling="speculative" if sampled else "coupled",
            seed=self.seed,
            context=min(self.context, column.task.context),
            chat=None if column.index is None or column.task.chat else False,
        )


def measure_table(options: TableOptions, out: Path, observer: Observer) -> dict[str, Any]:
    """Measures what is not measured yet.

    Args:
        options: what to measure.
        out: folder of the results; one folder in it for each task.
        observer: receives the progress.

    Returns:
        What ``page.render_table`` needs besides the runs: ``table``, ``columns`` (task, title, stand-in, index),
        ``left_out`` by task, ``exit`` (the grid search's choice), and ``layers``. Ready for JSON.

    Raises:
        SelfSpecError: an option or a suite is invalid, or ``out`` holds another run.
    """
    table = find_table(options.table)
    columns, left_out = choose_columns(
        table, suite=options.suite, tasks=options.tasks, data=options.data, hub=options.hub
    )
    _check_folder(out)
    observer.stage(f"loading {options.model}")
    model, tokenizer = load_model(
        options.model, dtype=options.dtype, device=options.device, widen=1, unpack=options.unpack
    )
    plain = Engine(model, tokenizer, PLAIN)
    out.mkdir(parents=True, exist_ok=True)
    tuned: Tuned | None = None
    for column in columns:
        observer.stage(f"{table.name}: {column.task.title}")
        tunes = tuned is None and any(row.tune for row in table.methods.values())
        suite, others = load_column(
            column,
            plain.encode,
            limit=options.limit,
            context=min(options.context, column.task.context),
            seed=options.seed,
            tuning=options.tuning_prompts if tunes else 0,
        )
        tuned = tuned or tune_methods(
            table,
            plain,
            [_prompt(each) for each in others],
            out,
            max_new_tokens=options.max_new_tokens,
            iterations=options.tuning_sets,
            asked=options.to_tune(),
            progress=observer.stage,
        )
        run_options = options.run_options(table, column, tuned)
        folder = RunFolder(out / column.task.key, resume=True)
        folder.check_same(run_options.to_dict(), make_stamp(plain.target.device))
        if not _finished(folder):
            Run(run_options, plain, suite, folder, observer).measure()
    assert tuned is not None
    return {
        "table": table.name,
        "columns": [
            {
                "task": each.task.key,
                "title": each.task.title,
                "stand_in": each.stand_in,
                "index": each.index,
            }
            for each in columns
        ],
        "left_out": left_out,
        "exit": None if tuned.exit is None else {**vars(tuned.exit), "pays": tuned.exit.pays},
        "layers": plain.target.layer_count,
    }


def _finished(folder: RunFolder) -> bool:
    """Whether every candidate of a run was measured on every prompt as often as asked."""
    if not folder.has_run:
        return False
    run = read_run(folder.path)
    return len(run.measurements) == len(run.fields["prompts"]) * len(run.fields["settings"]) * int(
        run.fields["options"]["repeats"]
    )


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidParameterError(f"--out '{out}' is a file; name a folder")


def _prompt(question: Question) -> Prompt:
    return list(question.token_ids) if question.token_ids is not None else question.turns[0]
