"""The numbers that ``--stats`` and ``/stats`` print: speed, draft tokens, and what each strategy drafted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.engine import Stream
    from selfspec.types import Forecast, Generation, Round

_HEADERS = ("drafted by", "rounds", "rows", "drafted", "guessed", "accepted", "tokens", "seconds")
_SPEED_HEADERS = ("ms/token", "speedup", "expected")

_NO_FASTER = "no draft within the saved time was expected to be faster"
_NOTHING_SAVED = "no time was saved yet that a draft could cost"


def summary(result: "Generation") -> str:
    """One line about an output: speed, drafts, memory and finish reason."""
    return (
        f"{result.method}: {result.new_token_count} tokens, {result.tokens_per_second:.1f} tokens/s, "
        f"{result.round_count} rounds, {result.accepted} of {result.drafted} draft tokens accepted "
        f"({result.acceptance_rate:.0%}), mean generated length {result.mean_generated_length:.2f}, "
        f"peak memory {result.peak_memory_bytes / 2**20:.0f} MiB, ended by {result.finish_reason}"
    )


@dataclass(frozen=True)
class Counts:
    """What one or more answers of a chat came to; they can be added.

    ``seconds`` are those after the first token of each answer, ``cached`` the prompt tokens from the prefix cache.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cached: int = 0
    rounds: tuple["Round", ...] = ()

    @classmethod
    def of(cls, stream: "Stream", tokens: int, seconds: float) -> "Counts":
        """Those of one answer, also of one that was stopped, from its stream."""
        return cls(1, tokens, seconds, stream.cached_prompt_tokens, tuple(stream.rounds))

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return sum(each.drafted for each in self.rounds)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(each.accepted for each in self.rounds)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        speed = (self.tokens - self.answers) / self.seconds if self.seconds else 0.0
        rate = self.accepted / self.drafted if self.drafted else 0.0
        length = fmean(len(each.token_ids) for each in self.rounds) if self.rounds else 0.0
        known = f", {self.cached} prompt tokens not read again" if self.cached else ""
        return (
            f"{self.tokens} tokens, {speed:.1f} tokens/s, {self.accepted} of {self.drafted} draft tokens accepted "
            f"({rate:.0%}), mean generated length {length:.2f}{known}"
        )


def draft_table(rounds: Sequence["Round"]) -> list[tuple[str, ...]]:
    """A header and one row per ``Round.drafted_by``; empty if the method has one way to draft.

    ``rows`` (of the verification, probes too), ``drafted``, ``guessed`` and ``tokens`` (committed) are means over the
    line's rounds, ``seconds`` is the time of all of them, and ``ms/token`` that divided by their tokens. For a method
    that makes forecasts, ``speedup`` is its estimate of the time of an autoregressive step divided by that time, and
    ``expected`` the speedup that it planned with.
    """
    names = dict.fromkeys(each.drafted_by for each in rounds if each.drafted_by is not None)
    if not names:
        return []
    forecasts = _forecasts(rounds)
    headers = _HEADERS + (_SPEED_HEADERS if forecasts else _SPEED_HEADERS[:1])
    step = fmean(1 / forecast.plain_tokens_per_second for forecast in forecasts) if forecasts else None
    groups = {name: [each for each in rounds if each.drafted_by == name] for name in names}
    return [headers, *((name, *_counts(group), *_speeds(group, step)) for name, group in groups.items())]


def draft_lines(rounds: Sequence["Round"]) -> list[str]:
    """The table as aligned lines of text, and why rounds were autoregressive."""
    table = draft_table(rounds)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    reasons = plain_reasons(rounds)
    return [*lines, reasons] if reasons else lines


def plain_reasons(rounds: Sequence["Round"]) -> str:
    """One line: why rounds drafted nothing; empty if none did, or the method makes no forecasts."""
    plain = [each.forecast for each in rounds if each.forecast and each.drafted_by == "plain"]
    if not plain:
        return ""
    held = sum(forecast.held_back for forecast in plain)
    reasons = {_NO_FASTER: len(plain) - held, _NOTHING_SAVED: held}
    counts = [f"{reason} in {count}" for reason, count in reasons.items() if count]
    return f"plain rounds: {', '.join(counts)}"


def _forecasts(rounds: Sequence["Round"]) -> list["Forecast"]:
    return [each.forecast for each in rounds if each.forecast is not None]


def _counts(rounds: Sequence["Round"]) -> tuple[str, ...]:
    verified, drafted, guessed, tokens = (
        fmean(counts)
        for counts in zip(
            *((1 + each.candidates + each.probes, each.drafted, each.guessed, len(each.token_ids)) for each in rounds),
            strict=True,
        )
    )
    seconds = sum(each.seconds.total for each in rounds)
    accepted = f"{fmean(each.accepted for each in rounds) / drafted:.0%}" if drafted else "-"
    means = f"{verified:.2f}", f"{drafted:.2f}", f"{guessed:.2f}", accepted, f"{tokens:.2f}"
    return f"{len(rounds)}", *means, f"{seconds:.2f}"


def _speeds(rounds: Sequence["Round"], step: float | None) -> tuple[str, ...]:
    """Milliseconds per token; with the seconds of an autoregressive step the other columns too."""
    seconds = sum(each.seconds.total for each in rounds)
    per_token = seconds / max(1, sum(len(each.token_ids) for each in rounds))
    if step is None:
        return (f"{1000 * per_token:.2f}",)
    forecasts = _forecasts(rounds)
    expected = f"{fmean(forecast.speedup for forecast in forecasts):.2f}x" if forecasts else "-"
    return f"{1000 * per_token:.2f}", f"{step / per_token:.2f}x" if per_token else "-", expected


def path_lines(rounds: Sequence["Round"]) -> list[str]:
    """Where drafts and verifications ran, natively or not, and why."""
    found = {"drafts": [each.drafting for each in rounds], "verification": [each.verification for each in rounds]}
    counted = {name: Counter(str(path) for path in paths if path is not None) for name, paths in found.items()}
    return [
        f"{name}: " + ", ".join(f"{text} ({count} rounds)" for text, count in counts.most_common())
        for name, counts in counted.items()
        if counts
    ]
