"""``selfspec bench device``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.api import options as shared_options
from selfspec.cli.api import silence_libraries
from selfspec_lab.cli import bench_options as options
from selfspec_lab.cli.bench_options import chosen_methods, parse_method_settings


def bench_device(
    model: options.Model = "smollm2",
    widen: options.Widen = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    methods: options.Methods = None,
    settings: options.Settings = None,
    repeats: options.Repeats = 3,
    max_new_tokens: options.MaxNewTokens = 64,
    minutes: Annotated[float, typer.Option(help="Nothing more is begun after this time.")] = 10.0,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("selfspec-device.json"),
    dirty: options.Dirty = False,
    as_json: shared_options.Json = False,
) -> None:
    """Measures a device, whichever it is, and writes one file about it: trial, rows, methods, transformers beside."""
    by_method = parse_method_settings(settings or ())

    from selfspec_lab.bench.device import METHODS, DeviceOptions, run_device
    from selfspec_lab.bench.stamp import check_clean
    from selfspec_lab.out_file import check_out

    asked = DeviceOptions(
        model=model,
        widen=widen,
        dtype=dtype,
        device=device,
        methods=chosen_methods(methods, METHODS, None, authors=False),
        settings=by_method,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        minutes=minutes,
    )
    check_clean(dirty)
    check_out(out)
    silence_libraries()
    report = run_device(asked, progress=lambda text: typer.echo(text, err=True))
    text = json.dumps(report, indent=2, allow_nan=False)
    out.write_text(text + "\n", encoding="utf-8")
    typer.echo(text if as_json else "\n".join(_lines(report, out)))


def _lines(report: Mapping[str, Any], out: Path) -> list[str]:
    """What a reader wants first; the file has the rest."""
    plain, transformers = report["plain"], report["transformers"]
    lines = [f"{report['device']['name']}, runtime {report['runtime']}"]
    lines += [f"  {name}: {line}" for name, line in report["trial"]["lines"].items()] if report["trial"] else []
    for name, figures in (("autoregressive", plain), ("transformers", transformers), *report["methods"].items()):
        speed, error = figures.get("tokens_per_second"), figures.get("error")
        text = "no measurement" if speed is None else f"{speed:.1f} tokens/s"
        other = figures.get("identical") is False
        same = (
            f", {figures['identical_texts']} of {figures['texts']} texts are those of plain decoding" if other else ""
        )
        lines.append(f"{name}: {text}{same}{f' ({error})' if error else ''}")
    return [*lines, f"{out} has the whole report ({report['seconds']:.0f} s)"]
