"""``selfspec bench batches``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.api import make_console, silence_libraries
from selfspec.cli.api import options as shared_options
from selfspec.errors import InvalidParameterError
from selfspec_lab.cli import bench_options as options
from selfspec_lab.cli.bench_options import chosen_methods, parse_method_settings


def batches(
    model: options.Model = "smollm2",
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
    sizes: Annotated[str, typer.Option(help="Numbers of prompts, separated by commas.")] = "1,2,4,8,16",
    repeats: options.Repeats = 3,
    max_new_tokens: options.MaxNewTokens = 48,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    dirty: options.Dirty = False,
    as_json: shared_options.Json = False,
) -> None:
    """Measures several prompts generated together, beside plain decoding of one prompt at a time."""
    by_method = parse_method_settings(settings or ())

    from selfspec_lab.bench.batches import BatchesOptions, run_batches
    from selfspec_lab.bench.stamp import check_clean
    from selfspec_lab.out_file import check_out

    asked = BatchesOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        unpack=unpack,
        activations=activations,
        device=device,
        runtime=runtime,
        methods=chosen_methods(methods, "suffix,uniform", paper, authors),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        sizes=_parse_sizes(sizes),
    )
    if out is not None:
        check_clean(dirty)
        check_out(out)
    silence_libraries()
    report = run_batches(asked, progress=lambda text: typer.echo(text, err=True))
    text = json.dumps(report, indent=2, allow_nan=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        _print_table(report)
    if not all(figures["identical"] for sizes in report["batches"].values() for figures in sizes.values()):
        typer.echo("outputs differ from those of plain decoding alone", err=True)
        raise typer.Exit(1)


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InvalidParameterError(f"--sizes takes whole numbers separated by commas, not '{text}'") from None


def _print_table(report: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table("method", "prompts", "tokens/s", "÷ one plain prompt", "÷ plain together", "acceptance", "length")
    for name, sizes in report["batches"].items():
        for size, figures in sizes.items():
            low, high = figures["tokens_per_second_spread"]
            speedup, acceptance = figures["speedup"], figures["acceptance_rate"]
            table.add_row(
                name,
                str(size),
                f"{figures['tokens_per_second']:.1f} ({low:.1f}-{high:.1f})",
                "" if speedup is None else f"{speedup:.2f}x",
                f"{figures['over_plain']:.2f}x",
                "" if acceptance is None else f"{acceptance:.2f}",
                "" if figures["mean_generated_length"] is None else f"{figures['mean_generated_length']:.2f}",
            )
    make_console().print(table)
