"""``selfspec bench``: benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli import options
from selfspec.cli.terminal import silence_libraries
from selfspec_lab.cli.bench_options import parse_method_settings, parse_names
from selfspec_lab.cli.bench_run import leaderboard, report, run

bench = typer.Typer(no_args_is_help=True, help="Benchmarks.")
bench.command("run")(run)
bench.command("report")(report)
bench.command("leaderboard")(leaderboard)

WIDTH = 100
"""Columns where there is no terminal that has a width."""


@bench.command()
def overhead(
    model: options.Model = "tiny",
    widen: options.Widen = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    methods: options.Methods = "all",
    settings: options.MethodSettings = None,
    repeats: options.Repeats = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every output, ends of texts ignored.")] = 64,
    force_acceptance: Annotated[
        float | None,
        typer.Option(help="Accept drafted tokens with this probability, whatever the model says: NOT LOSSLESS."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure transformers with a compiled step too.")
    ] = True,
    llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp/--no-llama-cpp", help="Measure llama.cpp too, where it is installed.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measures plain decoding against bandwidth, transformers and llama.cpp, and every method against its ideal."""
    by_method = parse_method_settings(settings or ())

    from selfspec_lab.bench.overhead import OverheadOptions, check_out, run_overhead

    asked = OverheadOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        device=device,
        runtime=runtime,
        methods=parse_names(methods),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        force_acceptance=force_acceptance,
        compile=compiled,
        llama_cpp=llama_cpp,
    )
    if out is not None:
        check_out(out)
    silence_libraries()
    report = run_overhead(asked, progress=lambda text: typer.echo(text, err=True))
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        _print_table(report)
    failed = [name for name, figures in report["methods"].items() if figures["error"]]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _print_table(report: Mapping[str, Any]) -> None:
    from rich.console import Console

    from selfspec_lab.bench.overhead_table import print_overhead

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    print_overhead(console, report)
