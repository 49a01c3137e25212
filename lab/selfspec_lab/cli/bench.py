"""``selfspec bench``: benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.api import make_console, silence_libraries
from selfspec.cli.api import options as shared_options
from selfspec_lab.cli import bench_options as options
from selfspec_lab.cli.bench_batches import batches
from selfspec_lab.cli.bench_device import bench_device
from selfspec_lab.cli.bench_options import chosen_methods, parse_method_settings
from selfspec_lab.cli.bench_paper import paper as measure_paper
from selfspec_lab.cli.bench_paper import tables
from selfspec_lab.cli.bench_run import leaderboard, report, run

bench = typer.Typer(no_args_is_help=True, help="Runs benchmarks and writes their reports.")
bench.command("run", epilog="Example: selfspec bench run --out results --model smollm2 --methods suffix")(run)
bench.command("batches", epilog="Example: selfspec bench batches --model smollm2 --methods suffix")(batches)
bench.command("device", epilog="Example: selfspec bench device --model smollm2 --device cuda --out device.json")(
    bench_device
)
bench.command("report", epilog="Example: selfspec bench report results")(report)
bench.command("paper", epilog="Example: selfspec bench paper --table clasp-1 --model M --data data --out results")(
    measure_paper
)
bench.command("tables", epilog="Example: selfspec bench tables results tables.md")(tables)
bench.command("leaderboard", epilog="Example: selfspec bench leaderboard runs leaderboard.md")(leaderboard)


@bench.command(epilog="Example: selfspec bench overhead --model tiny --widen 8 --dtype bfloat16")
def overhead(
    model: options.Model = "tiny",
    widen: options.Widen = 1,
    dtype: options.Dtype = "auto",
    unpack: options.Unpack = False,
    activations: options.Activations = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    methods: options.Methods = None,
    paper: options.Papers = None,
    authors: options.Authors = False,
    settings: options.Settings = None,
    repeats: options.Repeats = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every output; ends of texts are ignored.")] = 64,
    force_acceptance: Annotated[
        float | None,
        typer.Option(help="Accept each draft token with this probability, without comparing: NOT LOSSLESS."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also measure transformers with a compiled step.")
    ] = True,
    llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp/--no-llama-cpp", help="Also measure llama.cpp if it is installed.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    dirty: options.Dirty = False,
    as_json: shared_options.Json = False,
) -> None:
    """Measures plain decoding against bandwidth, transformers and llama.cpp, and every method against its ideal."""
    by_method = parse_method_settings(settings or ())

    from selfspec_lab.bench.overhead import OverheadOptions, run_overhead
    from selfspec_lab.bench.stamp import check_clean
    from selfspec_lab.out_file import check_out

    asked = OverheadOptions(
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
        force_acceptance=force_acceptance,
        compile=compiled,
        llama_cpp=llama_cpp,
    )
    if out is not None:
        check_clean(dirty)
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
    from selfspec_lab.bench.overhead_table import print_overhead

    print_overhead(make_console(), report)
