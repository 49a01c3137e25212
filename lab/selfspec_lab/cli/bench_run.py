"""``selfspec bench run`` and ``selfspec bench report``: the methods side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.api import silence_libraries
from selfspec.errors import InvalidParameterError
from selfspec_lab.cli import bench_options as options
from selfspec_lab.cli.bench_options import chosen_methods, parse_method_settings, parse_names

if TYPE_CHECKING:
    from selfspec_lab.bench.run.options import RunOptions


def run(
    out: options.Out,
    model: options.Model = "tiny",
    widen: options.Widen = 1,
    methods: options.Methods = None,
    paper: options.Papers = None,
    authors: options.Authors = False,
    peers: options.Peers = "transformers",
    suite: options.Suite = "mini",
    limit: options.Limit = None,
    context: options.Context = 1024,
    chat: options.Chat = None,
    settings: options.Settings = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    sampling: options.Sampling = "coupled",
    repeats: options.Repeats = 3,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    unpack: options.Unpack = False,
    activations: options.Activations = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dirty: options.Dirty = False,
) -> None:
    """Measures methods, transformers and llama.cpp on the prompts of a suite, in turns, and writes a report.

    Ctrl-C keeps the results so far; --resume continues from there.
    """
    by_method = parse_method_settings(settings or ())

    from selfspec_lab.bench.run.options import RunOptions
    from selfspec_lab.bench.stamp import check_clean

    check_clean(dirty)
    asked = RunOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        unpack=unpack,
        activations=activations,
        device=device,
        runtime=runtime,
        methods=chosen_methods(methods, "all", paper, authors),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        peers=parse_names(peers),
        suite=suite,
        limit=limit,
        temperature=temperature,
        top_p=top_p,
        sampling=sampling,
        seed=seed,
        context=context,
        chat=chat,
    )
    failed = _measure(asked, out, resume=resume, overwrite=overwrite)
    _print_overview(out)
    if failed:
        typer.echo(f"failed: {', '.join(sorted(failed))}", err=True)
        raise typer.Exit(1)


def _measure(asked: "RunOptions", out: Path, *, resume: bool, overwrite: bool) -> set[str]:
    """Measures and writes the report; returns the names of the candidates that failed."""
    from selfspec_lab.bench.report import write_report
    from selfspec_lab.bench.run.runner import run as run_benchmark
    from selfspec_lab.cli.bench_progress import RunProgress
    from selfspec_lab.plots import check_drawing

    check_drawing()
    silence_libraries()
    if asked.left_out:
        typer.echo(asked.left_out, err=True)
    try:
        with RunProgress() as progress:
            run_benchmark(asked, out, progress, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        if (out / "results.jsonl").is_file():
            typer.echo(f"the results so far are in {out}; continue with --resume", err=True)
        raise
    write_report(out)
    return progress.failed


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `selfspec bench run` wrote.")],
) -> None:
    """Rewrites the report of a run, or compares several runs."""
    from selfspec_lab.bench.report import compare_runs, write_report
    from selfspec_lab.plots import check_drawing

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
    """Writes one page about several runs: method, suite, checkpoint, hardware."""
    from selfspec_lab.bench.report.leaderboard import read_summaries, render_leaderboard

    text = render_leaderboard(read_summaries(runs), out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError(f"the page cannot be written to '{out}': {error.strerror or error}") from error


def _print_overview(folder: Path) -> None:
    """Prints the report up to its first table."""
    about, table, *_ = (folder / "report.md").read_text(encoding="utf-8").split("\n## ")
    typer.echo(f"{about}\n## {table.rstrip()}")
    typer.echo(f"the whole report: {folder / 'report.md'}, with pictures: {folder / 'report.html'}", err=True)
