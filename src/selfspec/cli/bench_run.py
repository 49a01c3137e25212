"""``selfspec bench run`` and ``selfspec bench report``: the methods side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.generate import MODEL_HELP, RUNTIME_HELP, parse_assignments
from selfspec.cli.models import WIDEN_HELP
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import InvalidParameterError, InvalidSettingError

SETTINGS_HELP = "A setting of a method; repeatable. Fixed exit layers are 6 of 16 layers unless set."
SUITE_HELP = (
    "mini (bundled); spec-bench:FILE, gsm8k:FILE, humaneval:FILE (their JSONL); text:FILE (continue passages of "
    "--context tokens); prompts:FILE; stream:A+B (one after another); hub:NAME."
)
_WHAT, _HOW = "What is measured", "How it is measured"


def run(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP, rich_help_panel=_WHAT)] = "tiny",
    widen: Annotated[int, typer.Option(help=WIDEN_HELP, rich_help_panel=_WHAT)] = 1,
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.", rich_help_panel=_WHAT)] = "all",
    peers: Annotated[
        str,
        typer.Option(
            help="transformers' own: transformers, transformers-early-exit, transformers-prompt-lookup; all; none.",
            rich_help_panel=_WHAT,
        ),
    ] = "transformers",
    suite: Annotated[str, typer.Option(help=SUITE_HELP, rich_help_panel=_WHAT)] = "mini",
    limit: Annotated[
        int | None, typer.Option(help="At most so many questions of a category.", rich_help_panel=_WHAT)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a passage of text:FILE.", rich_help_panel=_WHAT)] = 1024,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.KEY=VALUE", help=SETTINGS_HELP, rich_help_panel=_WHAT),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.", rich_help_panel=_HOW)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; else all methods sample with one seed.", rich_help_panel=_HOW)
    ] = 0.0,
    repeats: Annotated[int, typer.Option(help="How often everything is measured.", rich_help_panel=_HOW)] = 3,
    seed: Annotated[int, typer.Option(help="Of the order, of sampling, of the suite.", rich_help_panel=_HOW)] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint was saved.", rich_help_panel=_HOW),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="As torch names it, or auto: an accelerator if there is one.", rich_help_panel=_HOW)
    ] = "auto",
    runtime: Annotated[str, typer.Option(help=RUNTIME_HELP, rich_help_panel=_HOW)] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
) -> None:
    """Measures methods and transformers' own ways on the prompts of a suite, in turns, and writes a report.

    Ctrl-C keeps what was measured; --resume goes on from there.
    """
    by_method = parse_method_settings(settings or ())

    from selfspec.bench.run.options import RunOptions

    options = RunOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        device=device,
        runtime=runtime,
        methods=_names(methods),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        peers=_names(peers),
        suite=suite,
        limit=limit,
        temperature=temperature,
        seed=seed,
        context=context,
    )

    from selfspec.bench.report import write_report
    from selfspec.bench.run.runner import run as run_benchmark
    from selfspec.cli.bench_progress import RunProgress
    from selfspec.plots import check_drawing

    check_drawing()
    silence_libraries()
    try:
        with RunProgress() as progress:
            run_benchmark(options, out, progress, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        if (out / "results.jsonl").is_file():
            typer.echo(f"what was measured is in {out}; go on by --resume", err=True)
        raise
    write_report(out)
    _print_overview(out)
    failed = progress.failed
    if failed:
        typer.echo(f"failed: {', '.join(sorted(failed))}", err=True)
        raise typer.Exit(1)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `selfspec bench run` wrote.")],
) -> None:
    """Writes the report of a run anew, or compares several runs."""
    from selfspec.bench.report import compare_runs, write_report
    from selfspec.plots import check_drawing

    if len(folders) > 1:
        typer.echo(compare_runs(folders))
        return
    check_drawing()
    write_report(folders[0])
    _print_overview(folders[0])


def leaderboard(
    runs: Annotated[Path, typer.Argument(help="Folder with the folders of runs.")],
    out: Annotated[Path, typer.Argument(help="Markdown file to write.")],
) -> None:
    """Writes one page of several runs: method, suite, checkpoint, hardware."""
    from selfspec.bench.report.leaderboard import read_summaries, render_leaderboard

    text = render_leaderboard(read_summaries(runs), out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError(f"the page cannot be written to '{out}': {error.strerror or error}") from error


def _print_overview(folder: Path) -> None:
    """The report as far as its first table."""
    about, table, *_ = (folder / "report.md").read_text(encoding="utf-8").split("\n## ")
    typer.echo(f"{about}\n## {table.rstrip()}")
    typer.echo(f"all of it in {folder / 'report.md'}, with pictures in {folder / 'report.html'}", err=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def parse_method_settings(assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Settings of several methods as ``--set`` gives them.

    Args:
        assignments: each ``method.key=value``.

    Returns:
        By method the values by key, still text.

    Raises:
        InvalidSettingError: one has no ``=`` or no ``.`` before it, or a key comes twice.
    """
    settings: dict[str, dict[str, str]] = {}
    for name, value in parse_assignments(assignments).items():
        method, dot, key = name.partition(".")
        if not method or not dot or not key:
            raise InvalidSettingError(f"--set takes METHOD.KEY=VALUE here, not '{name}={value}'")
        settings.setdefault(method, {})[key] = value
    return settings
