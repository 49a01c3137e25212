"""The overhead benchmark: what it counts, what it reports, what it refuses. Nothing here looks at a time."""

import ctypes
import io
import json
import math
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from checkpoints import make_tokenizer, save_checkpoint
from models import LAYERS, SUBLAYERS, WINDOW, build, prompt
from selfspec import METHODS, Engine, timing
from selfspec.cli.app import app
from selfspec.errors import InvalidParameterError, InvalidSettingError, SelfSpecError
from selfspec.methods.objective import ideal_speedup
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.sampling.tree import TokenTree
from selfspec.timing import in_turn, interleaved_samples
from selfspec.types import Generation, PhaseSeconds, Round
from selfspec_lab.bench import overhead
from selfspec_lab.bench.baseline import VARIANTS, generate_timed
from selfspec_lab.bench.contest import Outcome, Sample, hold_contest
from selfspec_lab.bench.cost import StepBytes, decoding_bytes
from selfspec_lab.bench.forced import ForcedAcceptance, ForcedEngine
from selfspec_lab.bench.llama_cpp import is_installed
from selfspec_lab.bench.llama_cpp.overhead import OverheadPeer
from selfspec_lab.bench.memory import ResidentPeak, copy_bytes_per_second
from selfspec_lab.bench.options import default_settings
from selfspec_lab.bench.overhead import OverheadOptions, measure_overhead
from selfspec_lab.bench.overhead_figures import METHOD_FIGURES, method_figures, plain_figures
from selfspec_lab.bench.overhead_table import print_overhead
from selfspec_lab.bench.stamp import git_state, make_stamp
from selfspec_lab.bench.timing import Measured, interleaved_seconds
from selfspec_lab.bench.verify_rows import verify_rows_seconds
from selfspec_lab.cli.bench_options import parse_method_settings

CPU = torch.device("cpu")
METHODS_TRIED = ("layerskip", "uniform", "prompt-lookup")


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.bench.memory._CPU_COPY_BYTES", 2**16)


def record(drafted: int, accepted: int, kept: KeptSet | None = None, seconds: PhaseSeconds | None = None) -> Round:
    tokens = tuple(range(accepted + 1))
    return Round(drafted, drafted, accepted, tokens, kept, None, seconds or PhaseSeconds())


def output(*records: Round, prompt_tokens: int = 9) -> Generation:
    tokens = (0, *(token for each in records for token in each.token_ids))
    return Generation("", tokens, (), prompt_tokens, "x", {}, "length", 3.0, 1.0, records, 0)


# Bytes


def test_bytes_of_a_step_are_those_of_the_weights_and_of_the_context() -> None:
    model: Any = build("llama")
    costs = StepBytes(Target(model))
    layer = model.model.layers[2]
    attention = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
    mlp = [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    assert costs.sublayers[4] == sum(each.weight.nbytes for each in attention) + layer.input_layernorm.weight.nbytes
    assert costs.sublayers[5] == sum(each.weight.nbytes for each in mlp) + layer.post_attention_layernorm.weight.nbytes
    assert costs.outside == model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    weights = sum(weight.nbytes for weight in model.parameters()) - model.model.embed_tokens.weight.nbytes
    slot = 2 * 2 * 24 * 4  # keys and values, 2 heads of 24, float32
    assert costs.target_step(0) == weights
    assert costs.target_step(100) == weights + LAYERS * slot * 100
    assert costs.step([0, 3, 4], 100) == costs.outside + sum(costs.sublayers[i] for i in (0, 3, 4)) + 2 * slot * 100


def test_a_tied_head_is_read_and_a_window_bounds_what_is_read_of_the_context() -> None:
    tied: Any = build("llama-tied-biases")
    assert StepBytes(Target(tied)).target_step(0) == sum(weight.nbytes for weight in tied.parameters())
    costs = StepBytes(Target(build("mistral-window")))
    assert costs.target_step(WINDOW) == costs.target_step(1000) > costs.target_step(WINDOW - 1)


def test_of_experts_only_those_of_one_row_count() -> None:
    model: Any = build("mixtral")
    costs = StepBytes(Target(model))
    experts = sum(weight.nbytes for weight in model.model.layers[0].mlp.experts.parameters())
    branch = sum(weight.nbytes for weight in Target(model).sublayers[1].parameters())
    assert costs.sublayers[1] == branch - experts // 2  # 2 of 4


def test_ideal_speedup_by_hand() -> None:
    costs = StepBytes(Target(build("llama")))
    kept = KeptSet((0, 1, 2, 5), SUBLAYERS)
    read = decoding_bytes(costs, [output(record(3, 2, kept), record(2, 0), record(0, 0))])
    full, part = costs.target_step, lambda context: costs.step((0, 1, 2, 5), context)
    # 9 tokens of prompt and the first new one: the first step sees 10 slots. The rounds commit 3, 1 and 1 tokens.
    assert read.tokens == 5
    assert read.plain == full(10) + full(11) + full(12) + full(13) + full(14)
    assert read.draft == part(10) + part(11) + part(12)
    assert read.draft_steps == 3
    assert read.verify == full(13) + full(15) + full(14)
    assert read.ideal_speedup == read.plain / (read.draft + read.verify)
    assert read.cost_coefficient == (read.draft / 3) / (read.plain / 5)


def test_ideal_speedup_is_equation_6_where_the_context_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepBytes(Target(build("llama")))
    monkeypatch.setattr(costs, "_per_slot", [0] * LAYERS)
    kept = KeptSet.early_exit(2, SUBLAYERS)
    read = decoding_bytes(costs, [output(record(4, 4, kept), record(4, 1, kept), record(4, 0, kept))])
    cost = costs.step(range(4), 0) / costs.target_step(0)
    assert read.cost_coefficient == pytest.approx(cost)
    assert read.ideal_speedup == pytest.approx(float(ideal_speedup(8 / 3, 5 / 12, cost)))


def test_rounds_without_a_draft_have_an_ideal_of_one() -> None:
    read = decoding_bytes(StepBytes(Target(build("llama"))), [output(record(0, 0), record(0, 0))])
    assert read.ideal_speedup == 1
    assert read.cost_coefficient is None


# Figures


def test_figures_of_a_repeat_by_hand() -> None:
    costs = StepBytes(Target(build("llama")))
    seconds = PhaseSeconds(select=0.1, draft=0.6, verify=0.8, other=0.3)
    drafted = output(record(4, 3, KeptSet.early_exit(2, SUBLAYERS), seconds))
    plain = output(*[record(0, 0)] * 4)
    method = [Sample(drafted.token_ids, 2.0, 70, drafted)]
    baseline = [Sample(plain.token_ids, 4.0, 60, plain)]
    figures = method_figures(method, baseline, costs)
    assert figures["tokens_per_second"] == 2.0
    assert figures["speedup"] == 2.0
    ideal = decoding_bytes(costs, [drafted]).ideal_speedup
    assert figures["ideal_speedup"] == ideal
    assert figures["efficiency"] == 2.0 / ideal
    assert figures["acceptance_rate"] == 0.75
    assert figures["mean_generated_length"] == 4.0
    assert figures["cost_coefficient"] == pytest.approx((0.6 / 4) / (4.0 / 4))
    shares = [figures[f"{name}_share"] for name in ("selection", "draft", "verify", "other")]
    assert shares == pytest.approx([0.05, 0.3, 0.4, 0.25])
    assert figures["peak_memory_bytes"] == 70

    step_bytes = decoding_bytes(costs, [plain]).plain / 4
    assert plain_figures(baseline, costs, 1e6)["bandwidth_fraction"] == step_bytes * 1.0 / 1e6


def test_measured_figures() -> None:
    measured = Measured.of([3.0, None, 1.0, 10.0])
    assert measured.fields("x") == {"x": 3.0, "x_spread": [1.0, 10.0]}
    assert Measured.of([None]).fields("x") == {"x": None, "x_spread": None}


def test_everybody_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [in_turn("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        list("abc"),
    ]
    calls: list[str] = []
    # The first call takes a second, the second one two, and so on.
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(range(len(calls) + 1))))
    tasks = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert interleaved_samples(tasks, CPU, repeats=2, warm_up=1) == {"a": [4, 5], "b": [3, 6]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
    calls.clear()
    assert interleaved_seconds(tasks, CPU, repeats=3, warm_up=0) == {"a": 4, "b": 3}


# The contest


def test_contenders_take_turns_and_one_that_fails_leaves_the_others_alone() -> None:
    written: list[tuple[str, int]] = []

    def contender(name: str, fails_at: int = -1) -> Any:
        def write(prompt_ids: list[int]) -> Sample:
            written.append((name, len(prompt_ids)))
            if sum(each == name for each, _ in written) == fails_at:
                raise ValueError("no\nmore")
            return Sample((), 1.0, 0)

        return write

    contenders = {"a": contender("a"), "b": contender("b", 4), "c": contender("c", 1), "d": contender("d")}
    outcome = hold_contest(contenders, [[0], [0, 0]], 2)
    assert outcome.failures == {"b": "ValueError: no more", "c": "ValueError: no more"}
    assert {name: [len(repeat) for repeat in repeats] for name, repeats in outcome.samples.items()} == {
        "a": [2, 2],
        "d": [2, 2],
    }
    assert written[:4] == [("a", 2), ("b", 2), ("c", 2), ("d", 2)]  # warm-up on the longest prompt
    assert written[4:10] == [("a", 1), ("b", 1), ("d", 1), ("b", 2), ("d", 2), ("a", 2)]


# Forced acceptance


def accept(rule: ForcedAcceptance, tree: TokenTree) -> Any:
    drafted = torch.arange(100, 100 + len(tree))
    scores = torch.eye(len(tree) + 1, 200)  # row r of the target chooses token r
    return rule.accept(tree, drafted, None, (), scores, ()).read()


@pytest.mark.parametrize("probability", [0.3, 0.8])
def test_tokens_stand_with_the_forced_probability(probability: float) -> None:
    rule = ForcedAcceptance(probability, random.Random(1))
    rounds, length = 4000, 5
    accepted = [len(accept(rule, TokenTree.chain(length)).rows) - 1 for _ in range(rounds)]
    trials = sum(min(length, count + 1) for count in accepted)
    deviation = math.sqrt(probability * (1 - probability) / trials)
    assert abs(sum(accepted) / trials - probability) < 4 * deviation
    for count in range(length):  # given that so many stand, the next one does with the same probability
        reached = sum(each >= count for each in accepted)
        share = sum(each > count for each in accepted) / reached
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / reached)


def test_the_target_does_not_matter_and_the_last_token_is_its_own() -> None:
    everything = accept(ForcedAcceptance(1.0, random.Random(0)), TokenTree.chain(3))
    assert everything.token_ids == (100, 101, 102, 3)
    nothing = accept(ForcedAcceptance(0.0, random.Random(0)), TokenTree.chain(3))
    assert (nothing.rows, nothing.token_ids) == ((0,), (0,))
    tree = accept(ForcedAcceptance(1.0, random.Random(0)), TokenTree((-1, 0, -1, 0)))
    assert (tree.rows, tree.token_ids) == ((0, 1, 2), (100, 101, 2))


def test_forced_engine_accepts_without_the_model() -> None:
    settings = {"exit_layer": 1, "draft_length": 5}
    forced = ForcedEngine(build("llama"), None, "layerskip", settings=settings, probability=1.0)
    result = forced.generate(prompt(9), max_new_tokens=25, ignore_eos=True)
    assert result.acceptance_rate == 1.0
    assert result.mean_generated_length == 6.0
    honest = Engine(build("llama"), None, "layerskip", settings=settings).generate(prompt(9), max_new_tokens=25)
    assert honest.acceptance_rate < 1.0


# The other baseline, the machine, the stamp


@pytest.mark.parametrize("variant", ["dynamic", "static"])
def test_transformers_writes_the_same_text_at_full_length(variant: str) -> None:
    model = build("llama")
    written = generate_timed(model, prompt(9), 12, VARIANTS[variant]())
    assert written.token_ids == Engine(model).generate(prompt(9), max_new_tokens=12, ignore_eos=True).token_ids
    assert written.seconds > 0


def test_transformers_writes_past_the_end_of_the_text() -> None:
    model: Any = build("llama")
    first = generate_timed(model, prompt(9), 12, {}).token_ids[0]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = first
    try:
        assert len(generate_timed(model, prompt(9), 12, {}).token_ids) == 12
    finally:
        model.generation_config.eos_token_id = before


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.bench.memory.timed", lambda task, device: 0.5)
    assert copy_bytes_per_second(CPU, size=1000) == 4000


def test_peak_memory_is_that_of_the_run() -> None:
    large, small = ResidentPeak(CPU), None
    block = torch.ones(2**26, dtype=torch.uint8)
    with_block = large.peak_bytes()
    del block
    small = ResidentPeak(CPU)
    assert with_block >= 2**26
    if Path("/proc/self/clear_refs").exists():
        assert small.peak_bytes() < with_block


def test_memory_that_was_freed_before_is_not_of_the_run() -> None:
    before = ResidentPeak(CPU).peak_bytes()
    blocks = [torch.ones(2**14, dtype=torch.uint8) for _ in range(2**12)]  # small enough to be kept when they are freed
    held = ResidentPeak(CPU).peak_bytes()
    del blocks
    after = ResidentPeak(CPU).peak_bytes()
    assert held > before + 2**25
    if Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "malloc_trim"):
        assert after < held - 2**25


def test_rows_are_run_over_a_committed_context(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama"))
    layouts: list[tuple[int, int]] = []
    begin = Target.begin

    def noted(self: Target, sequence: Any, rows: int, **options: Any) -> Any:
        layouts.append((sequence.cache.length, rows))
        return begin(self, sequence, rows, **options)

    monkeypatch.setattr(Target, "begin", noted)
    seconds = verify_rows_seconds(target, prompt(5), context=20, row_counts=(1, 4, 16))
    assert seconds.keys() == {1, 4, 16}
    assert layouts[0] == (0, 20)
    assert set(layouts[1:]) == {(20, 1), (20, 4), (20, 16)}
    assert verify_rows_seconds(target, prompt(5), context=1020, row_counts=(4, 8)).keys() == {4}


def test_stamp() -> None:
    stamp = make_stamp(CPU)
    assert stamp["threads"] == torch.get_num_threads()
    assert stamp["versions"]["torch"] == torch.__version__
    assert stamp["hardware"]["device"] == "cpu"
    assert stamp["date"].endswith("+00:00")
    json.dumps(stamp, allow_nan=False)


def test_commit_is_that_of_the_package_and_changes_make_it_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "package.py"
    file.write_text("")
    assert git_state(file) == (None, None)
    git("init", "--quiet")
    assert git_state(file) == (None, None)  # in somebody else's checkout
    git("add", "package.py")
    git("commit", "--quiet", "--no-verify", "--message", "first")
    assert git_state(file) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "new.py").write_text("")
    assert git_state(file) == (git("rev-parse", "HEAD"), True)


# The whole benchmark


def options(**changes: Any) -> OverheadOptions:
    standard = OverheadOptions(
        model="x", device="cpu", methods=METHODS_TRIED, repeats=2, max_new_tokens=8, compile=False
    )
    return replace(standard, **{"llama_cpp": False, **changes})


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec_lab.bench.memory._CPU_COPY_BYTES", 2**16)
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
    assert report["transformers"]["compiled"]["error"] == "left out on request"
    assert report["options"]["lossless"] is True


def test_llama_cpp_is_measured_where_it_is_installed(report: dict[str, Any]) -> None:
    theirs = report["llama_cpp"]
    assert list(theirs["verify_rows"]) == list(theirs["verify_rows_spread"]) == ["1", "2", "4", "8", "16"]
    if not is_installed():
        assert "is not installed; run: pip install 'selfspec[peers]'" in theirs["error"]
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
    reason = "not installed; run: pip install 'selfspec[peers]'"
    monkeypatch.setattr("selfspec_lab.bench.llama_cpp.overhead.obstacle", lambda *_: reason)
    without = OverheadPeer(build("llama"), 64, wanted=True).report(Outcome(), [])
    text = table_of({**report, "llama_cpp": without})
    assert "llama.cpp     none: not installed; run: pip install 'selfspec[peers]'" in text
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
        assert "not of gemma2" in peer.error or "not installed" in peer.error
        peer.measure_rows(prompt(5), 20)
    if is_installed():
        with OverheadPeer(build("llama"), 64, wanted=True) as peer:
            peer.measure_rows(prompt(5), 4000)
            assert "ContextLengthError" in str(peer.report(Outcome(), [])["error"])
    with OverheadPeer(build("llama"), 64, wanted=False) as peer:
        assert peer.report(Outcome(), [])["error"] == "left out on request"


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


def test_default_exit_layer() -> None:
    assert default_settings(METHODS["layerskip"], 16) == {"exit_layer": 6}
    assert default_settings(METHODS["layerskip"], 2) == {"exit_layer": 1}
    assert default_settings(METHODS["uniform"], 16) == {}


# The command


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, ["bench", "overhead", *arguments])
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--methods", "uniform,"), "there is no method ''"),
        (("--repeats", "0"), "repeats must be at least 1, not 0"),
        (("--max-new-tokens", "1"), "max_new_tokens must be at least 2"),
        (("--force-acceptance", "1.5"), "must be from 0 to 1, not 1.5"),
        (("--force-acceptance", "nan"), "must be from 0 to 1, not nan"),
        (("--widen", "0"), "whole number from 1 to 64"),
        (("--dtype", "float63"), "unknown dtype 'float63'"),
        (("--device", "gpu"), "device 'gpu' cannot be used"),
        (("--runtime", "magic"), "there is no runtime 'magic'"),
        (("--out", "nowhere/result.json"), "the folder of --out 'nowhere/result.json' is missing"),
        (("--out", "."), "--out '.' is a folder"),
        (("--set", "exit_layer=3"), "--set takes METHOD.KEY=VALUE"),
        (("--set", "layerskip.exit_layr=3"), "did you mean 'exit_layer'?"),
        (("--set", "layerskip.exit_layer=0"), "exit_layer must be at least 1"),
        (("--set", "nothing.exit_layer=3"), "there is no method 'nothing'"),
        (("--methods", "uniform", "--set", "layerskip.exit_layer=3"), "not among the methods to measure"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_settings_of_several_methods() -> None:
    assert parse_method_settings(["a.x=1", "b.y=2.5", "a.z=c.d=e"]) == {
        "a": {"x": "1", "z": "c.d=e"},
        "b": {"y": "2.5"},
    }
    for wrong in (["x=1"], [".x=1"], ["a.=1"], ["a.x"], ["a.x=1", "a.x=2"]):
        with pytest.raises(InvalidSettingError):
            parse_method_settings(wrong)


def test_the_command_writes_json_to_stdout_and_to_a_file(tmp_path: Path) -> None:
    model, out = str(save_checkpoint(tmp_path / "model")), tmp_path / "result.json"
    measured = ("--model", model, "--device", "cpu", "--repeats", "1", "--max-new-tokens", "4", "--no-compile")
    result = run(*measured, "--methods", "layerskip", "--widen", "2", "--json", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert json.loads(out.read_text()) == report
    assert report["options"]["widen"] == 2
    assert report["options"]["parameters"] > 2 * sum(weight.numel() for weight in build("llama").parameters())
    assert "repeat 1 of 1, prompt 3 of 3" in result.stderr


def test_the_command_says_what_failed(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "model"))
    measured = ("--model", model, "--device", "cpu", "--repeats", "1", "--max-new-tokens", "4", "--no-compile")
    result = run(*measured, "--methods", "layerskip", "--set", "layerskip.exit_layer=6")
    assert result.exit_code == 1
    assert "exit layer 6 is out of range" in " ".join(result.stdout.split())
    assert result.stderr.endswith("failed: layerskip\n")


def test_errors_are_of_the_package() -> None:
    assert issubclass(InvalidParameterError, SelfSpecError)
    with pytest.raises(InvalidParameterError, match="repeats must be at least 1"):
        options(repeats=0)
