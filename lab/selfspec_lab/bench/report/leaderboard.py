"""Renders ``docs/leaderboard.md``: method × suite × checkpoint × hardware, from the summaries of runs."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec.loading import bundled_models
from selfspec_lab.bench.stamp import commit_text

_COLUMNS = ("speedup", "95 %", "ideal", "acceptance", "M", "identical", "÷ transformers", "memory")

Summary = Mapping[str, Any]


def read_summaries(folder: Path) -> dict[Path, Summary]:
    """Reads the summaries in the subfolders of a folder.

    Returns:
        Summaries by folder, the bundled checkpoints last.

    Raises:
        InvalidParameterError: there are none, or a file is not the summary of a run.
    """
    summaries: dict[Path, Summary] = {}
    for path in sorted(folder.glob("*/summary.json")):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if "contenders" in summary:  # its name in older summaries
                summary["candidates"] = summary.pop("contenders")
            _order(summary)
            summary["candidates"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidParameterError(f"'{path}' is not the summary of a run: {error!r}") from error
        summaries[path.parent] = summary
    if not summaries:
        raise InvalidParameterError(f"there are no runs in the subfolders of '{folder}'; make one: selfspec bench run")
    return dict(sorted(summaries.items(), key=lambda item: _order(item[1])))


def render_leaderboard(summaries: Mapping[Path, Summary], page: Path) -> str:
    """Renders the page as Markdown.

    Args:
        summaries: by folder, as ``read_summaries`` returns them.
        page: path of the page; links to reports are relative to it.
    """
    parts = [
        "# Leaderboard",
        "Generated from the committed runs by `selfspec bench leaderboard`; do not edit. Every table is one run: one "
        "process, the same weights and prompts, candidates in random order on every prompt. *Speedup* is decoding "
        "speed ÷ that of plain decoding in the same runtime (`autoregressive`), median over prompts, with its 95 % "
        "bootstrap interval; *ideal* is the speedup if reading memory took all the time; *acceptance* is accepted ÷ "
        "drafted tokens; *M* is the mean generated length; *identical* counts outputs with exactly the tokens of plain "
        "decoding (in bfloat16 near-ties can be resolved differently); *÷ transformers* is speed ÷ that of its "
        "`generate`; *memory* is peak memory over that of plain decoding. Settings are the defaults and those listed "
        "below a table; none was tuned on these prompts.",
        *(_section(folder, summary, page) for folder, summary in summaries.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _order(summary: Summary) -> tuple[bool, str, str, int, str, str]:
    """Sort key; models that others have trained come first."""
    options = summary["options"]
    processor, model = summary["stamp"]["hardware"]["processor"], options["model"]
    return model in bundled_models(), processor, model, options["widen"], summary["dtype"], options["suite"]


def _section(folder: Path, summary: Summary, page: Path) -> str:
    options, stamp = summary["options"], summary["stamp"]
    hardware = stamp["hardware"]
    name = options["model"] + (f", widened {options['widen']} times" if options["widen"] > 1 else "")
    suite = options["suite"].split("/")[-1] if ":" not in options["suite"] else _short(options["suite"])
    decoding = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    on_cpu = hardware["device"] == "cpu"
    device = f"{hardware['processor']} ({hardware['cpu_capability']})" if on_cpu else hardware["device"]
    chat = " as chat messages" if summary.get("chat") else ""
    repeats = "1 repeat" if options["repeats"] == 1 else f"{options['repeats']} repeats"
    report = Path(os.path.relpath(folder / "report.md", page.parent)).as_posix()
    about = (
        f"{summary['parameters'] / 1e6:,.0f} million parameters, {decoding}, {summary['prompts']} prompts{chat}, up to "
        f"{options['max_new_tokens']} new tokens, {repeats}; {device}, {stamp['threads']} threads, "
        f"torch {stamp['versions']['torch']}, commit {commit_text(stamp)}, {stamp['date'][:10]}; "
        f"[full report]({report})."
    )
    parts = [f"## {name}, {summary['dtype']}: {suite}", about, _table(summary), _failures(summary), _settings(summary)]
    return "\n\n".join(part for part in parts if part)


def _short(spec: str) -> str:
    kind, _, path = spec.partition(":")
    return f"{kind}:{'+'.join(part.split('/')[-1] for part in path.split('+'))}"


def _table(summary: Summary) -> str:
    candidates = sorted(summary["candidates"].items(), key=lambda item: -(item[1]["overall"]["speedup"] or 0.0))
    lines = [f"| candidate | {' | '.join(_COLUMNS)} |", "| --- |" + " ---: |" * len(_COLUMNS)]
    return "\n".join(lines + [f"| {' | '.join(_row(name, each))} |" for name, each in candidates])


def _row(name: str, candidate: Mapping[str, Any]) -> Sequence[str]:
    figures = candidate["overall"]
    label = f"`{name}`" + (" (peer)" if candidate["kind"] == "peer" else "")
    if figures["speedup"] is None:
        return [label, "failed", *[""] * (len(_COLUMNS) - 1)]
    interval = figures["speedup_interval"]
    compared, identical = figures["compared"], figures["identical"]
    same = f"{identical}/{compared}" if identical == compared else f"**{identical}/{compared}**"
    return [
        label,
        f"{figures['speedup']:.2f}×",
        "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        _number(figures["ideal_speedup"], "{:.2f}×"),
        _number(figures["acceptance_rate"], "{:.2f}"),
        _number(figures["mean_generated_length"], "{:.2f}"),
        same if compared else "",
        _number(figures["speedup_over_transformers"], "{:.2f}×"),
        _number(figures["memory_above_plain"], "{:+.1%}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _failures(summary: Summary) -> str:
    """Why candidates have no figures."""
    reasons = {name: reason.partition(": ")[2] or reason for name, reason in summary.get("failures", {}).items()}
    return " ".join(f"`{name}` failed: {reason}." for name, reason in reasons.items())


def _settings(summary: Summary) -> str:
    """The settings that the run changed from their defaults."""
    chosen = summary["options"].get("settings", {})
    lines = [f"`{name}.{key}={value}`" for name, values in chosen.items() for key, value in values.items()]
    exits = sorted(
        {
            each["settings"]["exit_layer"]
            for each in summary["candidates"].values()
            if (each["settings"] or {}).get("exit_layer") is not None
        }
    )
    parts = [f"Settings: {', '.join(lines)}."] if lines else []
    if exits:
        parts.append(f"Fixed exit layers: {', '.join(map(str, exits))}. All other settings are defaults.")
    return " ".join(parts)
