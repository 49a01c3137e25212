"""``selfspec bench``: benchmarks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.generate import MODEL_HELP, parse_assignments
from selfspec.cli.models import WIDEN_HELP
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import InvalidSettingError

bench = typer.Typer(no_args_is_help=True, help="Benchmarks.")

WIDTH = 100
"""Columns where there is no terminal that has a width."""


@bench.callback()
def _bench() -> None:
    """Keeps ``overhead`` a command of its own although it is the only one."""


@bench.command()
def overhead(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
    widen: Annotated[int, typer.Option(help=WIDEN_HELP)] = 1,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint was saved.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="As torch names it, or auto: an accelerator if there is one.")] = "auto",
    runtime: Annotated[str, typer.Option(help="How sublayers run: auto, eager (transformers' own), fused.")] = "auto",
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.KEY=VALUE",
            help="A setting of a method; repeatable. Fixed exit layers are 6 of 16 layers unless set.",
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
