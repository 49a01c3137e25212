"""``selfspec bench``: benchmarks."""

import json
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.bench_run import SETTINGS_HELP, leaderboard, parse_method_settings, report, run
from selfspec.cli.generate import MODEL_HELP, RUNTIME_HELP
from selfspec.cli.models import WIDEN_HELP
from selfspec.cli.terminal import silence_libraries

bench = typer.Typer(no_args_is_help=True, help="Benchmarks.")
bench.command("run")(run)
bench.command("report")(report)
bench.command("leaderboard")(leaderboard)

WIDTH = 100
"""Columns where there is no terminal that has a width."""


@bench.command()
def overhead(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
    widen: Annotated[int, typer.Option(help=WIDEN_HELP)] = 1,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint was saved.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="As torch names it, or auto: an accelerator if there is one.")] = "auto",
    runtime: Annotated[str, typer.Option(help=RUNTIME_HELP)] = "auto",
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.KEY=VALUE",
            help=SETTINGS_HELP,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often everything is measured.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every output, ends of texts ignored.")] = 64,
    force_acceptance: Annotated[
        float | None,
        typer.Option(help="Accept drafted tokens with this probability, whatever the model says: NOT LOSSLESS."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure transformers with a compiled step too.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measures plain decoding against memory bandwidth and transformers, and every method against its ideal."""
    by_method = parse_method_settings(settings or ())

    from rich.console import Console

    from selfspec.bench.overhead import OverheadOptions, check_out, run_overhead
    from selfspec.bench.overhead_table import print_overhead

    options = OverheadOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        device=device,
        runtime=runtime,
        methods=tuple(name.strip() for name in methods.split(",")),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        force_acceptance=force_acceptance,
        compile=compiled,
    )
    if out is not None:
        check_out(out)
    silence_libraries()
    report = run_overhead(options, progress=lambda text: typer.echo(text, err=True))
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        print_overhead(console, report)
    failed = [name for name, figures in report["methods"].items() if figures["error"]]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
