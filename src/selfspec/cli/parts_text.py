"""What each part of a method drafted, as a table: how often it was chosen, what was expected of it, what came of it."""

from collections.abc import Sequence
from dataclasses import astuple
from statistics import fmean

from selfspec.types import Forecast, Round

_HEADERS = ("part", "rounds", "drafted", "guessed", "accepted", "tokens")
_SPEED_HEADERS = ("ms/token", "speedup", "expected")

_NO_FASTER = "no draft that saved time pays for was expected to be faster"
_NOTHING_SAVED = "no time was saved to pay for any draft"


def parts_table(records: Sequence[Round]) -> list[tuple[str, ...]]:
    """The table's header and one row for each part; empty where the method has no parts.

    ``drafted``, ``guessed`` and ``tokens`` (committed) are means over the part's rounds. ``ms/token`` is time of these
    rounds ÷ their tokens. Of a method that makes forecasts, ``speedup`` is the time of a step of plain decoding, as the
    method estimates it, ÷ that time, and ``expected`` the speedup that the method planned with.

    Args:
        records: rounds in order.
    """
    names = dict.fromkeys(record.drafted_by for record in records if record.drafted_by is not None)
    parts = {name: [record for record in records if record.drafted_by == name] for name in names}
    if not parts:
        return []
    forecasts = _forecasts(records)
    headers = _HEADERS + (_SPEED_HEADERS if forecasts else _SPEED_HEADERS[:1])
    step = fmean(1 / forecast.plain_tokens_per_second for forecast in forecasts) if forecasts else None
    return [headers, *((name, *_counts(rounds), *_speeds(rounds, step)) for name, rounds in parts.items())]


def parts_lines(records: Sequence[Round]) -> list[str]:
    """The table as lines of text, and why rounds were decoded plainly.

    Args:
        records: rounds in order.
    """
    table = parts_table(records)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    reasons = plain_reasons(records)
    return [*lines, reasons] if reasons else lines


def plain_reasons(records: Sequence[Round]) -> str:
    """Why rounds were decoded plainly, in one line; empty where none was, or the method makes no forecasts.

    Args:
        records: rounds in order.
    """
    plain = [record.forecast for record in records if record.forecast and record.drafted_by == "plain"]
    if not plain:
        return ""
    held = sum(forecast.held_back for forecast in plain)
    reasons = {_NO_FASTER: len(plain) - held, _NOTHING_SAVED: held}
    counts = [f"{reason} in {count}" for reason, count in reasons.items() if count]
    return f"plain rounds: {', '.join(counts)}"


def _forecasts(records: Sequence[Round]) -> list[Forecast]:
    return [record.forecast for record in records if record.forecast is not None]


def _counts(rounds: Sequence[Round]) -> tuple[str, ...]:
    drafted, guessed, tokens = (
        fmean(counts)
        for counts in zip(*((each.drafted, each.guessed, len(each.token_ids)) for each in rounds), strict=True)
    )
    accepted = f"{fmean(each.accepted for each in rounds) / drafted:.0%}" if drafted else "-"
    return f"{len(rounds)}", f"{drafted:.2f}", f"{guessed:.2f}", accepted, f"{tokens:.2f}"


def _speeds(rounds: Sequence[Round], step: float | None) -> tuple[str, ...]:
    """Milliseconds a token; with the seconds of a step of plain decoding the other columns too."""
    seconds = sum(sum(astuple(record.seconds)) for record in rounds)
    each = seconds / max(1, sum(len(record.token_ids) for record in rounds))
    if step is None:
        return (f"{1000 * each:.2f}",)
    forecasts = _forecasts(rounds)
    expected = f"{fmean(forecast.speedup for forecast in forecasts):.2f}x" if forecasts else "-"
    return f"{1000 * each:.2f}", f"{step / each:.2f}x" if each else "-", expected
