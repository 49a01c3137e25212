"""Measures the time that the host takes between two native calls: Python, tensors, text.

``python benchmarks/host_time.py --model smollm2``

Each gap runs from the end of a native call to the start of the next one. Medians are over the gaps of one kind: with
drafts, a gap follows a draft (``draft-verify``) or a verification (``verify-draft``, or ``verify-verify`` where drafts
run no forward). The forwards of a chain are one call: between them (``in-chain``) is what decides whether it goes on.
Steps of plain decoding are a chain, too, with gaps between its runs (``chain-chain``). ``forward`` is the mean over all
forwards: the gaps and the time in chains, divided by the number of forwards. Writes
``benchmarks/results/host-time-NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from selfspec import Engine
from selfspec.files import replace_file
from selfspec.runtimes import native
from selfspec.runtimes.chain import Chained
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.structures import NativeCall
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.widening import load_model

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, dict[str, Any]] = {"autoregressive": {}, "low-bit": {}, "uniform": {}, "suffix": {}}
Call = tuple[str, float, float]


class TimedLibrary:
    """The kernels, which note each native forward: its kind, its start and its end in seconds.

    A call of ``Runner.draft`` drafts, except where a chain of it is through the whole model: a run of plain steps.
    """

    def __init__(self, library: Any, calls: list[Call]) -> None:
        self._library, self._calls = library, calls
        self.drafts = False
        """Whether ``Runner.draft`` runs."""
        self._most = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)
        if not name.startswith(("forward_", "draft_", "verify_")):
            return function

        def timed(call: Any, *arguments: Any) -> None:
            start = time.perf_counter()
            function(call, *arguments)
            end = time.perf_counter()
            kind = "draft" if self.drafts else "verify"
            if name.startswith("forward_"):
                self._most = max(self._most, call._obj.count)
            if name.startswith("draft_") and not self._is_cheap(call._obj.forward.contents):
                kind = "chain"
            self._calls.append((kind, start, end))

        return timed

    def _is_cheap(self, call: NativeCall) -> bool:
        """It runs not all sublayers, or low-bit weights."""
        if not call.count:
            return False  # the head alone
        first = call.sublayers[call.which[0]]
        weights = first.attention.contents.inputs if first.attention else first.mlp.contents.gate_up
        return call.count < self._most or weights.count > 0  # parts of few bits


@contextmanager
def noting(calls: list[Call], between: list[float]) -> Iterator[None]:
    """Notes the native calls of models that are made inside, and the seconds between the forwards of a chain."""
    load, own = native.load, {name: getattr(Chained, name) for name in ("follow", "note", "lay_out")}
    since = [0.0]  # seconds since the last forward

    def timed(function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            since[0] += time.perf_counter() - start
            if function is own["lay_out"]:
                between.append(since[0])
                since[0] = 0.0

    for name, function in own.items():
        setattr(Chained, name, _method(timed, function))
    library, draft = TimedLibrary(load(), calls), Runner.draft

    def drafting(*arguments: Any) -> Any:
        library.drafts = True
        try:
            return draft(*arguments)
        finally:
            library.drafts = False

    Runner.draft = drafting  # type: ignore[method-assign]
    native.load = lambda: library  # type: ignore[assignment]
    try:
        yield
    finally:
        native.load, Runner.draft = load, draft  # type: ignore[method-assign]
        for name, function in own.items():
            setattr(Chained, name, function)


def _method(timed: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: timed(function, *arguments)


def gaps(calls: Sequence[Call]) -> dict[str, list[float]]:
    """By the kinds of the calls before and after, the seconds between them."""
    found: dict[str, list[float]] = defaultdict(list)
    for (before, _, end), (after, start, _) in pairwise(calls):
        found[f"{before}-{after}"].append(start - end)
    return found


def measure(model: str, method: str, settings: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """The gaps of one method, in milliseconds: median, first and third quartile, number."""
    calls: list[Call] = []
    between: list[float] = []
    with noting(calls, between):
        engine = Engine(*load_model(model, dtype="bfloat16", device="cpu", unpack=True), method, settings=settings)
        engine.warmup()
        ids = engine.encode("Once upon a time there was a little girl")
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(4):
            calls.clear()
            between.clear()
            engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
            of_kinds = gaps(calls[1:])
            for kind, seconds in of_kinds.items():
                found[kind] += seconds
            found["in-chain"] += between
            chains = sum(kind != "verify" for kind, _, _ in calls[1:])
            forwards = len(calls) - 1 - chains + max(chains, len(between))
            found["forward"].append((sum(map(sum, of_kinds.values())) + sum(between)) / forwards)
    return {kind: _quartiles(seconds) for kind, seconds in found.items() if len(seconds) > 10 or kind == "forward"}


def _quartiles(seconds: Sequence[float]) -> dict[str, float]:
    first, median, third = (1000 * each for each in statistics.quantiles(seconds, n=4))
    return {"median_ms": median, "first_ms": first, "third_ms": third, "gaps": len(seconds)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=list(METHODS), help="names of methods")
    options = parse_and_check(parser, arguments)
    figures = {name: measure(options.model, name, METHODS[name], options.new_tokens) for name in options.only}
    for name, kinds in figures.items():
        for kind, found in kinds.items():
            print(f"{name:16}{kind:15}" + " ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    result = {"options": vars(options), **make_stamp(torch.device("cpu")), "host": figures}
    replace_file(RESULTS / f"host-time-{options.model}-bf16-cpu.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
