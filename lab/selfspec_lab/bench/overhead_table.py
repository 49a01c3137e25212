"""The report of ``selfspec bench overhead`` for people."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from selfspec_lab.bench.stamp import commit_text

_COLUMNS = (
    ("speedup", "speedup", "{:.2f}x"),
    ("ideal\nspeedup", "ideal_speedup", "{:.2f}x"),
    ("effi-\nciency", "efficiency", "{:.2f}"),
    ("accept-\nance", "acceptance_rate", "{:.2f}"),
    ("mean\nlength", "mean_generated_length", "{:.2f}"),
    ("cost", "cost_coefficient", "{:.2f}"),
    ("select", "selection_share", "{:.1%}"),
    ("draft", "draft_share", "{:.0%}"),
    ("verify", "verify_share", "{:.0%}"),
    ("other", "other_share", "{:.0%}"),
    ("peak\nMiB", "peak_memory_bytes", "{:.0f}"),
)


def print_overhead(console: Console, report: Mapping[str, Any]) -> None:
    """Prints a report that ``run_overhead`` made."""
    console.print(render_overhead(report), soft_wrap=False)


def render_overhead(report: Mapping[str, Any]) -> RenderableType:
    """A report as a summary and two tables of at most 100 columns."""
    methods = report["methods"]
    failed = [Text(f"{name}: {each['error']}", style="red") for name, each in methods.items() if each["error"]]
    return Group(_summary(report), _methods_table(methods), *failed, _rows_table(report))


def _summary(report: Mapping[str, Any]) -> RenderableType:
    options, plain, stamp = report["options"], report["plain"], report["stamp"]
    table = Table.grid(padding=(0, 2, 0, 0))
    wide = f", widened {options['widen']} times" if options["widen"] > 1 else ""
    table.add_row("model", f"{options['model']}{wide}, {options['parameters']:,} parameters, {options['dtype']}")
    hardware = stamp["hardware"]
    device = hardware["device"] if hardware["device"] != "cpu" else hardware["processor"]
    table.add_row("commit", commit_text(stamp))
    table.add_row("device", f"{device}, {stamp['threads']} threads, load {stamp['load_average']}")
    copy = f"{report['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    table.add_row("copy", copy + _range(report, "copy_bytes_per_second", 1e9))
    table.add_row(
        "plain",
        f"{plain['tokens_per_second']:.1f} tokens/s{_range(plain, 'tokens_per_second')}, "
        f"{plain['bandwidth_fraction']:.0%} of the copy bandwidth",
    )
    others = report["transformers"]
    variants = {"transformers": others, **{f"  {name}": others[name] for name in ("static", "compiled")}}
    variants["llama.cpp"] = report["llama_cpp"]
    for name, variant in variants.items():
        table.add_row(name, Text(_variant_text(variant)))
    if report["llama_cpp"]["missing"]:
        missing = ", ".join(report["llama_cpp"]["missing"])
        table.add_row("", Text(f"built without {missing}, which this processor has: slower than it could be", "red"))
    if options["force_acceptance"] is not None:
        table.add_row("acceptance", Text(f"FORCED, {options['force_acceptance']} a token: not lossless", "bold red"))
    return table


def _variant_text(variant: Mapping[str, Any]) -> str:
    if variant["tokens_per_second"] is None:
        return f"none: {variant['error']}"
    return (
        f"{variant['tokens_per_second']:.1f} tokens/s{_range(variant, 'tokens_per_second')}; "
        f"plain is {variant['plain_speedup']:.2f}x as fast"
    )


def _range(fields: Mapping[str, Any], name: str, unit: float = 1.0) -> str:
    lowest, highest = fields[f"{name}_spread"]
    return f" ({lowest / unit:.1f} to {highest / unit:.1f})"


def _methods_table(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for header, _, _ in _COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for name, figures in methods.items():
        table.add_row(name, *(_cell(figures, field, form) for _, field, form in _COLUMNS))
    return table


def _cell(figures: Mapping[str, Any], field: str, form: str) -> str:
    value = figures[field]
    if value is None:
        return "-"
    return form.format(value / 2**20 if field == "peak_memory_bytes" else value)


def _rows_table(report: Mapping[str, Any]) -> Table:
    rows, theirs = report["verify_rows"], report["llama_cpp"]["verify_rows"]
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("rows of a verification", no_wrap=True)
    for count in rows:
        table.add_column(count, justify="right", no_wrap=True)
    table.add_row("time ÷ that of one row", *map(_ratio, rows.values()))
    if any(theirs.values()):
        table.add_row("the same of llama.cpp", *(_ratio(theirs.get(count)) for count in rows))
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
