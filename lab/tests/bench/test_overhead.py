"""What ``selfspec bench overhead`` measures and reports. No test looks at a time."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from helpers.checkpoints import make_tokenizer
from helpers.models import build, prompt
from selfspec import METHODS
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench import overhead
from selfspec_lab.bench.benchmark import Outcome
from selfspec_lab.bench.llama_cpp import is_installed
from selfspec_lab.bench.llama_cpp.overhead import OverheadPeer
from selfspec_lab.bench.overhead import OverheadOptions, measure_overhead
from selfspec_lab.bench.overhead_figures import METHOD_FIGURES
from selfspec_lab.bench.overhead_table import print_overhead

METHODS_TRIED = ("layerskip", "uniform", "prompt-lookup")


def options(**changes: Any) -> OverheadOptions:
    standard = OverheadOptions(
        model="x", device="cpu", methods=METHODS_TRIED, repeats=2, max_new_tokens=8, compile=False
    )
    return replace(standard, **{"llama_cpp": False, **changes})


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    settings = {"layerskip": {"draft_length": "3"}, "uniform": {"confidence_threshold": 0.0}}
    return measure_overhead(build("llama"), make_tokenizer(), options(settings=settings, llama_cpp=True))


def numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict):
        for branch in tree.values():
            yield from numbers(branch)
    elif isinstance(tree, float):
        yield tree


def test_report_has_every_field_with_its_spread(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    figures = [
        *[(report, "copy_bytes_per_second"), (report["plain"], "bandwidth_fraction")],
        *[(report[baseline], "tokens_per_second") for baseline in ("plain", "transformers")],
        (report["transformers"]["static"], "tokens_per_second"),
        *[(report["methods"]["layerskip"], name) for name in METHOD_FIGURES],
        *[(report["methods"]["uniform"], name) for name in METHOD_FIGURES],
    ]
    for part, name in figures:
        low, high = part[f"{name}_spread"]
        assert low <= part[name] <= high, name
    assert list(report["verify_rows"]) == list(report["verify_rows_spread"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert report["verify_rows"]["1"] == 1.0
    assert all(math.isfinite(number) for number in numbers(report))


def test_report_is_consistent(report: dict[str, Any]) -> None:
    assert list(report["methods"]) == list(METHODS_TRIED)
    for name, figures in report["methods"].items():
        assert figures["error"] is None
        assert figures["identical"] is True
        for low, high in (
            *[figures[f"{phase}_share_spread"] for phase in ("selection", "draft", "verify", "other")],
            *[figures["speedup_spread"], figures["ideal_speedup_spread"]],
        ):
            assert 0 <= low <= high, name
        assert figures["mean_generated_length"] >= 1
        assert figures["peak_memory_bytes"] > 0
    layerskip = report["methods"]["layerskip"]
    assert (layerskip["settings"]["exit_layer"], layerskip["settings"]["draft_length"]) == (2, 3)
    assert 0 < layerskip["acceptance_rate"] <= 1
    assert 0 < layerskip["cost_coefficient_bytes"] < report["methods"]["uniform"]["cost_coefficient_bytes"] < 1
    assert report["transformers"]["compiled"]["tokens_per_second"] is None
    assert report["transformers"]["compiled"]["error"] == "not requested"
    assert report["options"]["lossless"] is True


def test_llama_cpp_is_measured_where_it_is_installed(report: dict[str, Any]) -> None:
    theirs = report["llama_cpp"]
    assert list(theirs["verify_rows"]) == list(theirs["verify_rows_spread"]) == ["1", "2", "4", "8", "16"]
    if not is_installed():
        assert "is not installed; run: pip install './lab[peers]'" in theirs["error"]
        assert theirs["tokens_per_second"] is None
        return
    assert theirs["error"] is None
    assert theirs["verify_rows"]["1"] == 1.0
    assert all(value > 0 for value in theirs["verify_rows"].values())
    assert theirs["plain_speedup_spread"][0] <= theirs["plain_speedup"] <= theirs["plain_speedup_spread"][1]
    assert theirs["version"]
    assert theirs["system_info"]


def table_of(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_overhead(console, report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_says_what_is_known_of_llama_cpp(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "not installed; run: pip install './lab[peers]' in a checkout of selfspec"
    monkeypatch.setattr("selfspec_lab.bench.llama_cpp.overhead.obstacle", lambda *_: reason)
    without = OverheadPeer(build("llama"), 64, wanted=True).report(Outcome(), [])
    text = table_of({**report, "llama_cpp": without})
    assert "llama.cpp     none: not installed; run: pip install './lab[peers]'" in text
    assert "the same of llama.cpp" not in text
    rows = {"1": 1.0, "2": 1.51, "4": 2.52, "8": 4.53, "16": None}
    figures = {"tokens_per_second": 12.5, "tokens_per_second_spread": [12.0, 13.0], "plain_speedup": 2.25}
    text = table_of({**report, "llama_cpp": {**without, **figures, "missing": ["AVX2", "FMA"], "verify_rows": rows}})
    assert "12.5 tokens/s (12.0 to 13.0); plain is 2.25x as fast" in text
    assert "built without AVX2, FMA, which this processor has" in text
    line = next(line for line in text.splitlines() if "the same of llama.cpp" in line)
    assert line.split()[-7:] == ["1.00", "1.51", "2.52", "4.53", "-", "-", "-"]
    assert max(map(len, text.splitlines())) <= 100


def test_a_model_that_llama_cpp_cannot_run_leaves_the_rest() -> None:
    with OverheadPeer(build("gemma2"), 64, wanted=True) as peer:
        assert peer.error is not None
        assert "not for gemma2" in peer.error or "not installed" in peer.error
        peer.measure_rows(prompt(5), 20)
    if is_installed():
        with OverheadPeer(build("llama"), 64, wanted=True) as peer:
            peer.measure_rows(prompt(5), 4000)
            assert "ContextLengthError" in str(peer.report(Outcome(), [])["error"])
    with OverheadPeer(build("llama"), 64, wanted=False) as peer:
        assert peer.report(Outcome(), [])["error"] == "not requested"


def test_table_shows_every_method(report: dict[str, Any]) -> None:
    report = json.loads(json.dumps(report))
    report["methods"]["uniform"] |= dict.fromkeys(METHOD_FIGURES) | {"error": "ValueError: broken"}
    for name in METHODS:
        report["methods"].setdefault(name, report["methods"]["layerskip"])
    console = Console(file=io.StringIO(), width=100)
    print_overhead(console, report)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert all(f" {name} " in text for name in METHODS if name != "autoregressive")
    assert "uniform: ValueError: broken" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_method_that_fails_is_reported_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(METHODS["uniform"], "begin", broken)
    chosen = options(
        methods=("uniform", "layerskip", "layerskip-fs"), settings={"layerskip-fs": {"exit_layer": 60}}, repeats=1
    )
    report = measure_overhead(build("llama"), make_tokenizer(), chosen)
    assert report["methods"]["uniform"]["error"] == "ValueError: broken"
    assert report["methods"]["uniform"]["speedup"] is None
    assert "exit layer 60 is out of range" in report["methods"]["layerskip-fs"]["error"]
    assert report["methods"]["layerskip"]["speedup"] > 0


def test_every_repeat_starts_with_methods_that_have_learned_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    methods: list[Any] = []
    begin: Any = METHODS["swift"].begin

    def noted(method: Any, prefill: Any) -> Any:
        methods.append(method)
        return begin(method, prefill)

    monkeypatch.setattr(METHODS["swift"], "begin", noted)
    measure_overhead(build("llama"), make_tokenizer(), options(methods=("swift",)))
    warm_up, *rest = map(id, methods)
    assert rest == [rest[0]] * 3 + [rest[3]] * 3
    assert len({warm_up, rest[0], rest[3]}) == 3


def test_forced_acceptance_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "VARIANTS", {"dynamic": dict, "static": dict, "compiled": dict})
    chosen = options(methods=("layerskip",), force_acceptance=1.0, repeats=1)
    report = measure_overhead(build("llama"), make_tokenizer(), chosen)
    assert report["methods"]["layerskip"]["acceptance_rate"] == 1.0
    assert report["methods"]["layerskip"]["identical"] is None
    assert report["options"]["lossless"] is False
    console = Console(file=io.StringIO(), width=100)
    print_overhead(console, report)
    assert isinstance(console.file, io.StringIO)
    assert "FORCED, 1.0 a token: not lossless" in console.file.getvalue()


def test_errors_are_of_the_package() -> None:
    assert issubclass(InvalidParameterError, SelfSpecError)
    with pytest.raises(InvalidParameterError, match="repeats must be at least 1"):
        options(repeats=0)
