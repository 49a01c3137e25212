"""What ``auto`` plans beside what comes: ``python benchmarks/auto_rounds.py --model FILE``.

Answers the chat prompts and the edits of ``gguf_files.py`` by ``auto`` and by plain decoding in turns, and prints for
each of the two, by the rows of a verification, the seconds that its forward was planned to take and took; and by what
drafted, the tokens beyond the first that were expected and that came. Rounds that do not follow each other in one
native call (layers draft, a processor reads the text) are left out.

Where the planned seconds differ from the measured ones, costs are not learned well; where the tokens do, acceptance is
not. Where both agree, and the speedup is small, rows cost too much or drafts are right too seldom.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from gguf_sides.questions import CHAT, EDITS, ask
from selfspec import Engine
from selfspec.decoding import verification

PROMPTS = {"chat": CHAT, "edits": EDITS}


class Played(NamedTuple):
    """A round of a run: seconds of its forward, tokens beyond the first."""

    name: str
    rows: int
    probes: int
    planned: float
    took: float
    expected: float
    came: int


@contextmanager
def recorded(rounds: list[Played]) -> Iterator[None]:
    """Appends the rounds of runs, as they are played."""
    run = verification._Run
    begin, following, note = run.__init__, run.next, run.note

    def started(self: Any, sequence: Any, *rest: Any) -> None:
        self.drafter = sequence.drafter
        begin(self, sequence, *rest)

    def timed(self: Any) -> Any:
        rows = following(self)
        self.began = time.perf_counter()
        return rows

    def noted(self: Any, drafted: Sequence[int], probed: Any) -> None:
        took, drafter, coming = time.perf_counter() - self.began, self.drafter, self._coming
        if planned := getattr(drafter, "_round", None):
            rows = 1 + len(coming.known) + len(coming.probes)
            seconds, came = drafter.verify_costs.now()[rows], len(drafted) - self._written - 1
            own = (planned.name, rows, len(coming.probes), seconds, took, planned.expected - 1, came)
            rounds.append(Played(*own))
        note(self, drafted, probed)

    run.__init__, run.next, run.note = started, timed, noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        run.__init__, run.next, run.note = begin, following, note  # type: ignore[method-assign]


def by_rows(rounds: Sequence[Played]) -> list[str]:
    """Lines of the planned and measured seconds of forwards, by their rows."""
    groups: dict[int, list[Played]] = defaultdict(list)
    for each in rounds:
        groups[each.rows].append(each)
    return [
        f"  {rows:2} rows: {len(own):4} rounds, planned {1e3 * median(each.planned for each in own):6.2f} ms, "
        f"took {1e3 * median(each.took for each in own):6.2f}, mean {1e3 * fmean(each.took for each in own):6.2f}"
        for rows, own in sorted(groups.items())
    ]


def by_source(rounds: Sequence[Played]) -> list[str]:
    """Lines of the expected and committed tokens beyond the first, by what drafted."""
    groups: dict[tuple[str, bool], list[Played]] = defaultdict(list)
    for each in rounds:
        groups[each.name, bool(each.probes)].append(each)
    return [
        f"  {name + (' and probes' if probes else ''):22} {len(own):4} rounds, {fmean(each.rows for each in own):5.2f} "
        f"rows, expected {fmean(each.expected for each in own):5.2f} more tokens, came "
        f"{fmean(each.came for each in own):5.2f}"
        for (name, probes), own in sorted(groups.items())
    ]


def measure(engines: dict[str, Engine], prompt: Sequence[int], tokens: int) -> tuple[float, list[Played]]:
    """Plain decoding's seconds after the first token ÷ those of ``auto``, and its rounds."""
    rounds: list[Played] = []
    plain = engines["plain"].generate(prompt, max_new_tokens=tokens)
    with recorded(rounds):
        auto = engines["auto"].generate(prompt, max_new_tokens=tokens)
    return (plain.seconds - plain.prefill_seconds) / (auto.seconds - auto.prefill_seconds), rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name, a folder or a GGUF file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args(arguments)
    auto = Engine.from_pretrained(options.model, "auto")
    auto.warmup()
    engines = {"auto": auto, "plain": Engine(auto.target.model, auto.tokenizer, "autoregressive")}
    tokenizer = auto.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    for name, prompts in PROMPTS.items():
        speedups, rounds = [], list[Played]()
        for prompt in ask(tokenizer, prompts) * options.repeats:
            speedup, own = measure(engines, prompt, options.max_new_tokens)
            speedups.append(speedup)
            rounds += own
        print(f"{name}: {', '.join(f'{each:.2f}' for each in speedups)} of plain decoding")
        print(*by_rows(rounds), *by_source(rounds), sep="\n")


if __name__ == "__main__":
    main()
