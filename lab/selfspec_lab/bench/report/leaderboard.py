"""``docs/leaderboard.md``: method × suite × checkpoint × hardware, from the summaries of runs."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec.loading import bundled_models

_COLUMNS = ("speedup", "95 %", "ideal", "acceptance", "M", "identical", "÷ transformers", "memory")

Summary = Mapping[str, Any]


def read_summaries(folder: Path) -> dict[Path, Summary]:
    """The runs in the folders below one folder, by folder; the bundled checkpoints come last.

    Raises:
        InvalidParameterError: there are none, or one is not the summary of a run.
    """
    summaries: dict[Path, Summary] = {}
    for path in sorted(folder.glob("*/summary.json")):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            _order(summary)
            summary["contenders"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidParameterError(f"'{path}' is not the summary of a run: {error!r}") from error
        summaries[path.parent] = summary
    if not summaries:
        raise InvalidParameterError(f"there are no runs in the folders below '{folder}'; make one: selfspec bench run")
    return dict(sorted(summaries.items(), key=lambda item: _order(item[1])))


def render_leaderboard(summaries: Mapping[Path, Summary], page: Path) -> str:
    """The page as Markdown.

    Args:
        summaries: by folder, as ``read_summaries`` gives them.
        page: where the page will be, which reports are named from.
    """
    parts = [
        "# Leaderboard",
        "Generated from the committed runs by `selfspec bench leaderboard`; do not edit. Every table is one run: one "
        "process, the same weights and prompts, contenders in random order on every prompt. *Speedup* is decoding "
        "speed over plain decoding in the same runtime (`autoregressive`), the median over prompts, with its 95 % "
        "bootstrap interval; *ideal* what acceptance and the bytes read would allow; *÷ transformers* the speed over "
        "its `generate`; *identical* how many outputs had exactly the tokens of plain decoding (in bfloat16 near-ties "
        "may fall the other way); *memory* the peak above plain decoding. Settings are the defaults and those listed "
        "below a table; none was tuned on the prompts shown.",
        *(_section(folder, summary, page) for folder, summary in summaries.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _order(summary: Summary) -> tuple[bool, str, str, int, str, str]:
    """Models that others have trained come first: they say more about a user's own."""
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
        f"torch {stamp['versions']['torch']}, commit {(stamp['commit'] or 'none')[:12]}, {stamp['date'][:10]}; "
        f"[full report]({report})."
    )
    return "\n\n".join([f"## {name}, {summary['dtype']}: {suite}", about, _table(summary), _settings(summary)]).rstrip()


def _short(spec: str) -> str:
    kind, _, path = spec.partition(":")
    return f"{kind}:{'+'.join(part.split('/')[-1] for part in path.split('+'))}"


def _table(summary: Summary) -> str:
    contenders = sorted(summary["contenders"].items(), key=lambda item: -(item[1]["overall"]["speedup"] or 0.0))
    lines = [f"| contender | {' | '.join(_COLUMNS)} |", "| --- |" + " ---: |" * len(_COLUMNS)]
    return "\n".join(lines + [f"| {' | '.join(_row(name, each))} |" for name, each in contenders])


def _row(name: str, contender: Mapping[str, Any]) -> Sequence[str]:
    figures = contender["overall"]
    label = f"`{name}`" + (" (peer)" if contender["kind"] == "peer" else "")
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


def _settings(summary: Summary) -> str:
    """The settings that were chosen for the run; all others are defaults."""
    chosen = summary["options"].get("settings", {})
    lines = [f"`{name}.{key}={value}`" for name, values in chosen.items() for key, value in values.items()]
    exits = sorted(
        {
            each["settings"]["exit_layer"]
            for each in summary["contenders"].values()
            if (each["settings"] or {}).get("exit_layer") is not None
        }
    )
    parts = [f"Settings: {', '.join(lines)}."] if lines else []
    if exits:
        parts.append(f"Fixed exit layers: {', '.join(map(str, exits))}. Everything else is at its default.")
    return " ".join(parts)
