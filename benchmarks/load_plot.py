"""When speculation pays as load rises, from measured costs of rows: ``python benchmarks/load_plot.py``.

With ``n`` sequences at once, of which each drafts ``k`` tokens a round, the expected speedup over plain decoding is

    s(n, k) = (1 + a + … + a^k) t(n) / (k d(n) + t(n (k + 1)))

where ``t(r)`` is the measured time of a forward of the model over ``r`` rows, ``d(n)`` that of a draft step over ``n``
rows, and ``a`` the probability that a draft token is accepted if those before it are. A draft step costs nothing
(``known``: tokens that are copied), what the same rows cost at ``--draft-bits`` in the same file (``low-bit``), or a
share ``c`` of the model's own step (``0.5``). For each load the best ``k`` of 1 to ``--longest`` is taken; where no
``s(n, k)`` is above 1, speculation does not pay, and ``k`` is 0.

``--rows`` is a file of ``rows.py``, or of ``gguf_files.py`` (``rows_2`` to ``rows_16``), whose ``--candidate`` may be
``llama.cpp``. Between the measured numbers of rows, times are on straight lines; past the last one they continue the
last line, and the entry says ``extrapolated``. A forward costs no more than one over more rows. The rows are those of
one sequence after a short context: reading keys and values of long contexts, which a round does once and plain decoding
once a token, is left out, and so is everything outside of the forwards.

``--measured`` is a file of ``serve.py`` (serve-load): points are the tokens a second of ``--of`` ÷ those of ``--over``,
by the number of clients, which is the number of sequences. Writes a picture and the table as JSON, with the stamp of
``--rows``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_figures.results import find_stamp
from selfspec.errors import InvalidParameterError
from selfspec.files import replace_file
from selfspec.methods.objective import expected_tokens
from selfspec_lab.plots import check_picture

HERE = Path(__file__).parent
ROOT = HERE.parent
ROWS = HERE / "results" / "rows-smollm2-bf16-cpu.json"
LOADS = (1, 2, 4, 8, 16, 32, 64)
ACCEPTANCES = (0.6, 0.8, 0.9)
KNOWN, LOW_BIT = "known", "low-bit"
_TICKS = (0.9, 1, 1.2, 1.5, 2, 3, 4, 6)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")

Seconds = Mapping[int, float]
"""Seconds of a forward by its number of rows."""


def read_rows(path: Path, candidate: str = "plain") -> dict[str, Seconds]:
    """The seconds of forwards by bits of the weights; a GGUF file's own are ``16``."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if "seconds" in found:
        return {
            bits: {int(rows): each["median"] for rows, each in of_rows.items()}
            for bits, of_rows in found["seconds"].items()
        }
    figures = found["figures"]
    if candidate not in figures["row_seconds"]:
        known = ", ".join(figures["row_seconds"])
        raise InvalidParameterError(f"'{path.name}' has no rows of {candidate}; --candidate is one of {known}")
    one = figures["row_seconds"][candidate]["median"]
    more = {int(name.removeprefix("rows_")): each for name, each in figures.items() if name.startswith("rows_")}
    return {"16": {1: one, **{rows: one * each[candidate]["median"] for rows, each in more.items()}}}


def seconds_of(measured: Seconds, rows: int) -> float:
    """The time of a forward over some rows, on straight lines through the measured ones."""
    counts = sorted(measured)
    level = {count: min(measured[more] for more in counts if more >= count) for count in counts}
    if rows in level:
        return level[rows]
    high = next((count for count in counts if count > rows), counts[-1])
    low = max(count for count in counts if count < high)
    return level[low] + (level[high] - level[low]) * (rows - low) / (high - low)


def draft_seconds(costs: Mapping[str, Seconds], draft: str, bits: str, rows: int) -> float:
    """The time of a draft step over some rows."""
    if draft == KNOWN:
        return 0.0
    if draft == LOW_BIT:
        return seconds_of(costs[bits], rows)
    return float(draft) * seconds_of(costs["16"], rows)


def best_round(
    costs: Mapping[str, Seconds], draft: str, bits: str, acceptance: float, load: int, longest: int
) -> dict[str, Any]:
    """The best number of draft tokens for a number of sequences, 0 if none pays, and its expected speedup."""
    step, drafting = seconds_of(costs["16"], load), draft_seconds(costs, draft, bits, load)
    speedups = {0: 1.0}
    for length in range(1, longest + 1):
        round_seconds = length * drafting + seconds_of(costs["16"], load * (length + 1))
        speedups[length] = float(expected_tokens(acceptance, length)) * step / round_seconds
    best = max(speedups, key=lambda length: speedups[length])
    extrapolated = load * (best + 1) > max(costs["16"])
    return {"load": load, "draft_tokens": best, "speedup": speedups[best], "extrapolated": extrapolated}


def make_table(
    costs: Mapping[str, Seconds], drafts: Sequence[str], bits: str, acceptances: Sequence[float], longest: int
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The best round by kind of draft, acceptance and load."""
    return {
        draft: {
            str(acceptance): [best_round(costs, draft, bits, acceptance, load, longest) for load in LOADS]
            for acceptance in acceptances
        }
        for draft in drafts
    }


def measured_points(path: Path, of: str, over: str) -> list[dict[str, float]]:
    """Speedups that were measured, by the number of clients: medians of tokens a second, divided."""
    samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
    speeds: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        speeds.setdefault((sample["server"], sample["clients"]), []).append(sample["tokens_per_second"])
    clients = sorted(count for server, count in speeds if server == of and (over, count) in speeds)
    if not clients:
        known = ", ".join(sorted({server for server, _ in speeds}))
        raise InvalidParameterError(f"'{path.name}' does not have both {of} and {over}; it has {known}")
    return [
        {"load": count, "speedup": statistics.median(speeds[of, count]) / statistics.median(speeds[over, count])}
        for count in clients
    ]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws one panel for each kind of draft: the speedup by load, with the number of draft tokens at each point."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    check_picture(path)
    figure = Figure(figsize=(1.0 + 4.2 * len(result["table"]), 3.6), layout="constrained")
    panels = figure.subplots(1, len(result["table"]), sharey=True, squeeze=False)[0]
    for panel, (draft, by_acceptance) in zip(panels, result["table"].items(), strict=True):
        for colour, (acceptance, rounds) in zip(COLOURS, by_acceptance.items(), strict=False):
            loads, speedups = ([each[name] for each in rounds] for name in ("load", "speedup"))
            panel.plot(loads, speedups, color=colour, marker="o", markersize=3, label=f"acceptance {acceptance}")
            for each in (each for each in rounds if each["draft_tokens"]):
                place = (each["load"], each["speedup"])
                panel.annotate(
                    str(each["draft_tokens"]), place, (0, 4), textcoords="offset points", fontsize=7, color=colour
                )
        for each in result.get("points", []):
            panel.plot(each["load"], each["speedup"], "kx")
        panel.axhline(1, color="black", linewidth=0.6)
        panel.set_xscale("log", base=2)
        panel.set_xticks(LOADS, [str(load) for load in LOADS])
        panel.set_yscale("log")
        panel.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_title(
            {KNOWN: "known tokens", LOW_BIT: f"drafts at {result['draft_bits']} bits"}.get(draft, f"c = {draft}")
        )
        panel.set_xlabel("sequences at once")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("expected speedup")
    panels[0].legend(frameon=False, fontsize="small")
    if result.get("points"):
        panels[-1].plot([], [], "kx", label=f"measured: {result['of']} ÷ {result['over']}")
        panels[-1].legend(frameon=False, fontsize="small")
    with mpl.rc_context({"svg.hashsalt": "load"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _numbers(text: str) -> tuple[float, ...]:
    found = tuple(map(float, text.split(",")))
    if not all(0 <= each <= 1 for each in found):
        raise argparse.ArgumentTypeError(f"'{text}': acceptances are from 0 to 1")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Computes, draws and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--candidate", default="plain", help="of a file of gguf_files.py")
    parser.add_argument("--drafts", default=f"{KNOWN},{LOW_BIT}", help=f"{KNOWN}, {LOW_BIT}, or numbers c")
    parser.add_argument("--draft-bits", default="4")
    parser.add_argument("--acceptances", type=_numbers, default=ACCEPTANCES, metavar="A,B")
    parser.add_argument("--longest", type=int, default=12, help="most draft tokens of a round")
    parser.add_argument("--measured", type=Path, help="a file of serve.py, whose speedups are put beside the curves")
    parser.add_argument("--of", default="selfspec:auto")
    parser.add_argument("--over", default="selfspec:autoregressive")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "load.svg")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "load-smollm2-bf16-cpu.json")
    options = parser.parse_args(arguments)
    try:
        costs = read_rows(options.rows, options.candidate)
        drafts = options.drafts.split(",")
        if LOW_BIT in drafts and options.draft_bits not in costs:
            raise InvalidParameterError(
                f"'{options.rows.name}' has no rows at {options.draft_bits} bits; name other --drafts"
            )
        result: dict[str, Any] = {
            "rows": options.rows.name,
            "stamp": find_stamp(json.loads(options.rows.read_text(encoding="utf-8"))),
            "draft_bits": options.draft_bits,
            "longest": options.longest,
            "table": make_table(costs, drafts, options.draft_bits, options.acceptances, options.longest),
        }
        if options.measured:
            points = measured_points(options.measured, options.of, options.over)
            result |= {"measured": options.measured.name, "of": options.of, "over": options.over, "points": points}
        draw(result, options.picture)
    except InvalidParameterError as error:
        parser.error(str(error))
    replace_file(options.out, json.dumps(result, indent=1) + "\n")
    for draft, by_acceptance in result["table"].items():
        for acceptance, rounds in by_acceptance.items():
            cells = "  ".join(f"{each['load']}: {each['speedup']:.2f} ({each['draft_tokens']})" for each in rounds)
            print(f"{draft:>8} {acceptance}  {cells}")


if __name__ == "__main__":
    main()
