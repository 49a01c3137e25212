"""``selfspec bench paper``: a headline table of a paper, measured here beside the paper's figures."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.api import silence_libraries
from selfspec.errors import InvalidParameterError
from selfspec_lab.cli import bench_options as options

_WHAT = "What is measured"

_TABLES_HELP = (
    "The table: swift-2, swift-10, clasp-1, clasp-1-sampled, clasp-5, del-1, del-3, knapspec-2, knapspec-3; figures "
    "have their number, too."
)


def paper(
    table: Annotated[str, typer.Option(help=_TABLES_HELP, rich_help_panel=_WHAT)],
    out: options.Out,
    model: options.Model = "tiny",
    suite: Annotated[
        str | None,
        typer.Option(help="A suite, as of `selfspec bench run`, instead of the paper's tasks.", rich_help_panel=_WHAT),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names of some of the paper's tasks, separated by commas.", rich_help_panel=_WHAT),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the paper's tasks: gsm8k_test.jsonl, humaneval.jsonl, spec_bench.jsonl, books/*.txt.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Read the paper's own data sets from the hub.", rich_help_panel=_WHAT)
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Prompts of each task. Default: 6.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest output, at most the paper's. Default: 64.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a passage of a long text, at most the paper's. Default: 2048.")
    ] = None,
    tuning_sets: Annotated[
        int | None, typer.Option(help="Sets that Draft & Verify's search tries where it is a baseline. Default: 24.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts, short outputs: to see that it runs.")] = False,
    dtype: options.Dtype = "auto",
    unpack: options.Unpack = False,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    dirty: options.Dirty = False,
) -> None:
    """Measures a table of a paper with any model, and prints it beside the paper's figures.

    Ctrl-C keeps the results so far; the same command goes on from there.
    """
    from selfspec_lab.bench.stamp import check_clean
    from selfspec_lab.papers import measuring

    check_clean(dirty)
    sizes = measuring.QUICK if quick else measuring.FULL
    given = {"limit": limit, "max_new_tokens": max_new_tokens, "context": context, "tuning_sets": tuning_sets}
    asked = measuring.TableOptions(
        table=table,
        model=model,
        dtype=dtype,
        unpack=unpack,
        device=device,
        suite=suite,
        tasks=() if tasks is None else options.parse_names(tasks),
        data=data,
        hub=hub,
        seed=seed,
        **{**sizes, **{name: value for name, value in given.items() if value is not None}},
    )
    silence_libraries()
    from selfspec_lab.cli.bench_progress import RunProgress
    from selfspec_lab.papers.page import PAGE, write_table

    try:
        with RunProgress() as progress:
            description = measuring.measure_table(asked, out, progress)
    except KeyboardInterrupt:
        typer.echo(f"the results so far are in {out}; the same command goes on", err=True)
        raise
    write_table(out, description)
    typer.echo((out / PAGE).read_text(encoding="utf-8"))
    if progress.failed:
        typer.echo(f"failed: {', '.join(sorted(progress.failed))}", err=True)
        raise typer.Exit(1)


def tables(
    results: Annotated[Path, typer.Argument(help="Folder with the folders that `selfspec bench paper --out` wrote.")],
    out: Annotated[Path, typer.Argument(help="Markdown file to write.")],
) -> None:
    """Writes one page about several measured tables of papers."""
    from selfspec_lab.papers.page import DESCRIPTION, render_page

    folders = sorted(path.parent for path in results.glob(f"*/{DESCRIPTION}"))
    if not folders:
        raise InvalidParameterError(f"there are no tables in '{results}'; measure one: selfspec bench paper")
    text = render_page(folders)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError(f"the page cannot be written to '{out}': {error.strerror or error}") from error
