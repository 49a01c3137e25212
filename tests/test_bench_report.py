"""Summary and reports of a run: figures by hand, broken folders, text that is escaped, pictures that are painted."""

import ast
import base64
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text

from models import LAYERS, SUBLAYERS, build, prompt
from selfspec import Engine
from selfspec.bench import report
from selfspec.bench.contest import Sample
from selfspec.bench.cost import DecodingBytes, StepBytes
from selfspec.bench.overhead_figures import method_figures
from selfspec.bench.report import compare_runs, write_report
from selfspec.bench.report.figures import FIGURES
from selfspec.bench.report.html import to_html
from selfspec.bench.report.markdown import to_markdown
from selfspec.bench.report.medians import median_interval, samples_of
from selfspec.bench.report.plots import draw_pictures
from selfspec.bench.report.read import read_run
from selfspec.bench.report.rounds import accepted_by_position, predicted_tokens_per_second, tokens_per_loaded_layer
from selfspec.bench.report.styles import Picture
from selfspec.bench.report.summary import summarise
from selfspec.bench.run.measurement import Measurement, output_fields
from selfspec.bench.stamp import make_stamp
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.plots import ATTENTION, SKIPPED
from selfspec.target.kept import KeptSet
from selfspec.target.latency import LatencyProfile, measure_latencies
from selfspec.types import PhaseSeconds, Round

LATENCIES = LatencyProfile("cpu", "float32", 2, 0.001, 1.0, 2.0, 3.0, 1.0)
"""Two layers. A step at context ``n`` takes 2 (0.001 n + 1) + 2 · 2 + 4 seconds, a draft of sublayers 0 and 3 less."""
KEPT = KeptSet((0, 3), 4)
SECONDS = PhaseSeconds(select=0.1, draft=0.2, verify=0.5, other=0.0)
PICTURES = ("speedup", "acceptance", "time", "kept", "lengths", "stream")


def played(drafted: int, accepted: int, kept: KeptSet | None = KEPT, seconds: PhaseSeconds = SECONDS) -> Round:
    return Round(drafted, drafted, accepted, (7,) * (accepted + 1), kept, None, seconds)


def measured(
    contender: str,
    prompt_key: str = "a",
    seconds: float = 4.0,
    records: Sequence[Round] | None = None,
    repeat: int = 0,
    **options: Any,
) -> Measurement:
    """An output of five tokens, or of those of its rounds."""
    tokens = 5 if records is None else 1 + sum(len(record.token_ids) for record in records)
    values = {
        "category": "math",
        "turn": 0,
        "position": 0,
        "prompt_token_count": 9,
        "token_ids": (7,) * tokens,
        "identical": True,
        "prefill_seconds": 1.0,
        "peak_memory_bytes": 1000,
        "bytes": DecodingBytes(4, 400, 3, 80, 120),
        **options,
    }
    return Measurement(
        prompt=prompt_key,
        contender=contender,
        repeat=repeat,
        decode_seconds=seconds,
        rounds=None if records is None else tuple(records),
        **values,
    )


def failed(contender: str, prompt_key: str = "a", error: str = "RuntimeError: no luck", **options: Any) -> Measurement:
    return replace(measured(contender, prompt_key, **options), error=error, token_ids=(), rounds=None, bytes=None)


def write_run(folder: Path, measurements: Sequence[Measurement], **options: Any) -> Path:
    """Writes a folder as the benchmark does; prompts and contenders are those of the measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {each.contender: None for each in measurements}
    prompts = {each.prompt: each.category for each in sorted(measurements, key=lambda each: each.position)}
    fields: dict[str, Any] = {
        "benchmark": "run",
        "stamp": make_stamp(torch.device("cpu")),
        "options": {
            **{"model": "tiny", "widen": 1, "dtype": "auto", "device": "cpu", "runtime": "auto", "suite": "mini"},
            "methods": [name for name in names if name != "autoregressive" and not name.startswith("transformers")],
            "peers": [name for name in names if name.startswith("transformers")],
            **{"limit": None, "max_new_tokens": 64, "temperature": 0.0, "seed": 0, "context": 1024, "settings": {}},
            "repeats": 1 + max(each.repeat for each in measurements),
            **options.pop("options", {}),
        },
        "parameters": 1234,
        "sublayers": 2 * LATENCIES.layers,
        "settings": {"layerskip": {"exit_layer": 1}},
        "ordered": False,
        "prompts": [{"key": key, "category": category, "tokens": 9} for key, category in prompts.items()],
        "skipped": [],
        "copy_bytes_per_second": 1e9,
        "latencies": LATENCIES.to_dict(),
        "failures": {},
        **options,
    }
    (folder / "run.json").write_text(json.dumps(fields), encoding="utf-8")
    lines = [json.dumps(each.to_dict(), ensure_ascii=False) + "\n" for each in measurements]
    (folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def summary_of(folder: Path, measurements: Sequence[Measurement], **options: Any) -> dict[str, Any]:
    summary = summarise(read_run(write_run(folder, measurements, **options)))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    return summary


# Figures


THREE_ROUNDS = (played(2, 1), played(1, 0), played(0, 0))


def test_figures_of_rounds_by_hand() -> None:
    # Two drafts of 2 and 1 tokens through one layer, three verifications through two; 4 tokens are committed.
    assert tokens_per_loaded_layer(measured("x", records=THREE_ROUNDS), 2) == 4 / (3 * 1 + 3 * 2)
    assert tokens_per_loaded_layer(measured("x", records=[played(5, 4, None)]), 2) == 5 / 2
    assert tokens_per_loaded_layer(measured("x", records=[]), 2) is None
    # A second token was drafted once, and never accepted.
    assert accepted_by_position(THREE_ROUNDS) == [1 / 2, 0.0]
    assert accepted_by_position([played(3, 3), played(3, 1), played(1, 1)]) == [1.0, 1 / 2, 1 / 2]
    assert accepted_by_position([played(0, 0)]) == []


def test_predicted_speed_is_knapspecs_objective_by_hand() -> None:
    # The rounds begin at contexts 10, 12 and 13; a draft token runs one attention and one MLP beside what is outside.
    target = 2 * (0.001 * 12 + 1) + 2 * 2 + 4
    draft = (0.001 * 12 + 1) + 2 + 4
    expected = (1 - (1 / 3) ** 2) / (1 - 1 / 3) / (1 * draft + target)
    assert predicted_tokens_per_second([measured("x", records=THREE_ROUNDS)], LATENCIES) == pytest.approx(expected)
    plain = [measured("autoregressive", records=[played(0, 0, None)] * 4)]
    assert predicted_tokens_per_second(plain, LATENCIES) == pytest.approx(1 / (2 * (0.001 * 12 + 1) + 8))
    found = [measured("suffix", records=[played(3, 3, None)])]
    assert predicted_tokens_per_second(found, LATENCIES) == pytest.approx(4 / (2 * (0.001 * 10 + 1) + 8))


PLAIN_ROUNDS = [played(0, 0, None)] * 4


def three_prompts() -> list[Measurement]:
    """Plain decoding at 1 token a second; a method at 2, 4 and 3 times that, with a repeat of the first prompt at 3."""
    return [
        *(measured("autoregressive", key, 4.0, PLAIN_ROUNDS) for key in "abc"),
        measured("autoregressive", "a", 8.0, PLAIN_ROUNDS, repeat=1),
        *(
            measured("layerskip", key, 4 / speedup, THREE_ROUNDS, identical=key != "b", peak_memory_bytes=1100)
            for key, speedup in (("a", 2.0), ("b", 4.0), ("c", 3.0))
        ),
        measured("layerskip", "a", 8 / 3, THREE_ROUNDS, repeat=1, peak_memory_bytes=1300, prefill_seconds=3.0),
        *(measured("transformers", key, 16.0, bytes=None) for key in "ab"),
    ]


def test_figures_of_a_run_by_hand(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, three_prompts())
    figures = summary["contenders"]["layerskip"]["overall"]
    assert set(figures) == set(FIGURES)
    # By prompt 2.5 (of 2 and 3), 4 and 3; tokens a second 1.75 (of 2 and 1.5), 4 and 3.
    assert figures["speedup"] == pytest.approx(3)
    assert figures["tokens_per_second"] == pytest.approx(3)
    low, high = figures["speedup_interval"]
    assert 2.5 <= low <= 3 <= high <= 4
    # (1 + 4) seconds of plain decoding over 1 + 2, 1 + 1 and 1 + 4/3; in the second repeat 9 over 3 + 8/3.
    assert figures["speedup_with_prefill"] == pytest.approx(5 / (7 / 3))
    assert figures["speedup_over_transformers"] == pytest.approx((8 + 16) / 2)
    assert (figures["identical"], figures["compared"], figures["differing"]) == (3, 4, 1)
    assert figures["acceptance_rate"] == pytest.approx(1 / 3)
    assert figures["mean_generated_length"] == pytest.approx(4 / 3)
    assert figures["mean_draft_length"] == 1
    assert figures["accepted_by_position"] == [1 / 2, 0]
    assert figures["etpl"] == pytest.approx(4 / 9)
    assert figures["measured_tpt"] == pytest.approx(16 / (2 + 1 + 4 / 3 + 8 / 3))
    assert figures["ideal_speedup"] == 2
    assert figures["efficiency"] == pytest.approx(3 / 2)
    assert figures["time_to_first_token"] == 1
    assert figures["peak_memory_bytes"] == 1300
    assert figures["memory_above_plain"] == pytest.approx(0.1)
    seconds = 2 + 1 + 4 / 3 + 8 / 3
    assert figures["draft_share"] == pytest.approx(12 * 0.2 / seconds)
    assert figures["verify_share"] == pytest.approx(12 * 0.5 / seconds)
    assert figures["selection_share"] == pytest.approx(12 * 0.1 / seconds)
    assert sum(figures[f"{name}_share"] for name in ("draft", "verify", "selection")) > 1
    assert figures["other_share"] == 0
    assert (figures["rounds"], figures["tokens"], figures["prompts"], figures["failures"]) == (12, 20, 3, 0)


def test_plain_decoding_and_peers(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, three_prompts())
    contenders = summary["contenders"]
    assert list(contenders) == ["autoregressive", "layerskip", "transformers"]
    assert [each["kind"] for each in contenders.values()] == ["baseline", "method", "peer"]
    assert contenders["layerskip"]["settings"] == {"exit_layer": 1}
    assert contenders["transformers"]["settings"] is None
    plain, peer = (contenders[name]["overall"] for name in ("autoregressive", "transformers"))
    assert (plain["speedup"], plain["speedup_interval"], plain["etpl"]) == (1, [1, 1], 1 / 2)
    assert plain["acceptance_rate"] is None
    assert (peer["speedup"], peer["speedup_over_transformers"]) == (1 / 4, 1)
    for name in ("acceptance_rate", "etpl", "predicted_tpt", "ideal_speedup", "efficiency", "draft_share", "rounds"):
        assert peer[name] is None
    assert peer["measured_tpt"] == 8 / 32
    assert summary["plain_over"] == {"transformers": {"speedup": 4, "speedup_interval": [4, 4]}}


def test_categories_have_figures_of_their_own(tmp_path: Path) -> None:
    both = [
        measured(name, key, seconds, records, category=category, position=position)
        for position, (key, category, factor) in enumerate([("a", "math", 2), ("b", "code", 4)])
        for name, seconds, records in (("autoregressive", 4.0, PLAIN_ROUNDS), ("layerskip", 4 / factor, THREE_ROUNDS))
    ]
    contender = summary_of(tmp_path, both)["contenders"]["layerskip"]
    assert [each["speedup"] for each in contender["categories"].values()] == [2, 4]
    assert list(contender["categories"]) == ["math", "code"]
    assert contender["overall"]["speedup"] == 3


def test_only_prompts_and_repeats_of_both_are_compared(tmp_path: Path) -> None:
    measurements = [
        measured("autoregressive", "a", 4.0),
        measured("autoregressive", "b", 400.0),
        measured("layerskip", "a", 2.0),
        measured("layerskip", "a", 0.001, repeat=1),
        failed("layerskip", "b"),
        failed("layerskip", "b", repeat=1),
    ]
    contender = summary_of(tmp_path, measurements)["contenders"]["layerskip"]
    assert contender["overall"]["speedup"] == 2
    assert (contender["overall"]["prompts"], contender["overall"]["failures"]) == (1, 2)
    assert contender["errors"] == ["RuntimeError: no luck (2 times)"]


def test_who_never_succeeded_has_no_figures(tmp_path: Path) -> None:
    measurements = [measured("autoregressive"), failed("layerskip")]
    summary = summary_of(tmp_path, measurements, failures={"swift": "InvalidSettingError: too few layers"})
    counts = {"identical", "compared", "differing", "tokens", "prompts", "failures"}
    for name, failures in (("layerskip", 1), ("swift", 0)):
        contender = summary["contenders"][name]
        for figures in (contender["overall"], contender["categories"]["math"]):
            assert {figure for figure, value in figures.items() if value is not None} == counts
            assert figures["failures"] == failures
    assert summary["contenders"]["swift"]["errors"] == ["InvalidSettingError: too few layers"]


def test_outputs_of_one_token_have_no_speed(tmp_path: Path) -> None:
    nothing = DecodingBytes(0, 0, 0, 0, 0)
    names = ("autoregressive", "layerskip", "transformers")
    measurements = [measured(name, seconds=1e-4, records=[], bytes=nothing) for name in names]
    figures = summary_of(tmp_path, measurements)["contenders"]["layerskip"]["overall"]
    assert figures["speedup"] is figures["tokens_per_second"] is figures["ideal_speedup"] is figures["etpl"] is None
    assert figures["measured_tpt"] is None
    assert (figures["rounds"], figures["prompts"], figures["time_to_first_token"]) == (0, 1, 1)
    write_report(tmp_path)


def test_samples_of_peers_are_not_compared(tmp_path: Path) -> None:
    measurements = [measured("autoregressive"), measured("transformers", identical=None, bytes=None)]
    figures = summary_of(tmp_path, measurements)["contenders"]["transformers"]["overall"]
    assert (figures["identical"], figures["compared"], figures["differing"]) == (0, 0, 0)


def test_what_an_engine_did_is_what_the_overhead_benchmark_counts(tmp_path: Path) -> None:
    model: Any = build("llama")
    engines = {name: Engine(model, None, name) for name in ("autoregressive", "uniform", "prompt-lookup")}
    costs = StepBytes(engines["uniform"].target)
    outputs = {name: engine.generate(prompt(12), max_new_tokens=30) for name, engine in engines.items()}
    measurements = [
        Measurement("a", "x", name, repeat=0, turn=0, position=0, **output_fields(each, costs, 5))
        for name, each in outputs.items()
    ]
    latencies = measure_latencies(engines["uniform"].target, contexts=[8, 16], repeats=1)
    fields = {"sublayers": SUBLAYERS, "latencies": latencies.to_dict()}
    contenders = summary_of(tmp_path, measurements, **fields)["contenders"]
    samples = {
        name: [Sample(each.token_ids, each.seconds - each.prefill_seconds, 5, each)] for name, each in outputs.items()
    }
    assert outputs["uniform"].accepted > 0
    for name, output in outputs.items():
        figures = contenders[name]["overall"]
        expected = method_figures(samples[name], samples["autoregressive"], costs)
        for figure in ("speedup", "ideal_speedup", "efficiency", "acceptance_rate", "mean_generated_length"):
            assert figures[figure] == (None if expected[figure] is None else pytest.approx(expected[figure])), figure
        for share in ("selection_share", "draft_share", "verify_share", "other_share"):
            assert figures[share] == pytest.approx(expected[share], abs=1e-3)
        assert figures["rounds"] == output.rounds
    assert contenders["autoregressive"]["overall"]["etpl"] == pytest.approx(1 / LAYERS)
    assert contenders["uniform"]["overall"]["predicted_tpt"] > 0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_intervals_contain_the_median_and_are_always_the_same(values: list[float]) -> None:
    low, high = median_interval(values) or (math.nan, math.nan)
    assert min(values) <= low <= np.median(values) <= high <= max(values)
    assert median_interval(list(values)) == [low, high]


def test_intervals_narrow_with_more_prompts() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        low, high = median_interval(list(generator.normal(1, 0.1, count))) or (0.0, 0.0)
        widths.append(high - low)
    # The median of a thousand normal values has a standard error of 1.253 · 0.1 / √1000.
    assert widths[1] == pytest.approx(2 * 1.96 * 0.1253 / math.sqrt(1000), rel=0.4)
    assert widths[0] > 3 * widths[1]
    assert median_interval([]) is None


# Reading


def test_a_run_is_read_as_it_was_measured(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, three_prompts()))
    assert run.measurements == three_prompts()
    assert run.latencies == LATENCIES
    assert run.categories == {"math": 3}
    assert len(samples_of(run.measurements, "layerskip")) == 4


@pytest.mark.parametrize("kept_bytes", [1, 40, -1])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path, kept_bytes: int) -> None:
    write_run(tmp_path, [measured("autoregressive", key, category="prüfung") for key in "ab"])
    path = tmp_path / "results.jsonl"
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first + b"\n" + second[:kept_bytes])
    assert [each.prompt for each in read_run(tmp_path).measurements] == ["a"]
    inside_a_letter = second[: second.index("ü".encode()) + 1]
    path.write_bytes(first + b"\n" + inside_a_letter)
    assert [each.prompt for each in read_run(tmp_path).measurements] == ["a"]


def changed(**values: Any) -> str:
    return json.dumps({**measured("layerskip", records=THREE_ROUNDS).to_dict(), **values})


def changed_round(**values: Any) -> str:
    line = measured("layerskip", records=THREE_ROUNDS).to_dict()
    line["rounds"][1] |= values
    return json.dumps(line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a measurement"),
        ("", "not a measurement"),
        (changed(prompt="other"), "run.json has no prompt 'other'"),
        (changed(category="code"), "another category"),
        (changed(contender="autoregressive", rounds=None), "were there before"),
        (changed(decode_seconds=-1), "decode_seconds should be a number of at least 0"),
        (changed(prefill_seconds="1"), "prefill_seconds should be a number"),
        (changed(decode_seconds=math.nan), "NaN is no number of JSON"),
        (changed(repeat=True), "repeat should be a whole number"),
        (changed(repeat=-1), "repeat should be a whole number"),
        (changed(identical="yes"), "identical should be"),
        (changed(error=3), "error should be text"),
        (changed(token_ids=[]), "has tokens"),
        (changed(token_ids=[1, 2]), "other tokens than the output"),
        (changed(unknown=1), "unknown"),
        (changed(rounds=[{}]), "'tokens' is missing"),
        (changed(bytes={"tokens": 1}), "plain"),
        (changed(bytes=dict.fromkeys(("tokens", "plain", "draft_steps", "draft", "verify"), -1)), "whole numbers"),
        (changed_round(drafted="1"), "whole numbers"),
        (changed_round(accepted=2), "accepts no more than it drafts"),
        (changed_round(kept=[4]), "sublayer 4 does not exist"),
        (changed_round(seconds={"draft": -1.0}), "seconds should be numbers"),
        (changed_round(threshold="x"), "threshold"),
    ],
)
def test_lines_that_are_no_measurement_are_refused(tmp_path: Path, line: str, reason: str) -> None:
    write_run(tmp_path, [measured("autoregressive", records=PLAIN_ROUNDS)])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidParameterError, match=re.escape("results.jsonl', line 2: ")) as caught:
        read_run(tmp_path)
    assert reason in str(caught.value)


def test_lines_that_are_no_text_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [measured("autoregressive")])
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(InvalidParameterError, match="line 2"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"benchmark": "overhead"}, "benchmark = run"),
        ({"options": {}}, "options lacks model"),
        ({"options": []}, "options is no dict"),
        ({"stamp": None}, "stamp is no dict"),
        ({"sublayers": 3}, "even number"),
        ({"sublayers": 8}, "latencies are of 2 layers"),
        ({"sublayers": True}, "sublayers is no int"),
        ({"ordered": 0}, "ordered is no bool"),
        ({"prompts": [{"key": "a"}]}, "number 1 of prompts lacks category, tokens"),
        ({"skipped": ["a"]}, "number 1 of skipped lacks key"),
        ({"latencies": {"mlp": 1}}, "a latency profile has the fields"),
        ({"failures": "none"}, "failures is no dict"),
    ],
)
def test_descriptions_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_run(tmp_path, [measured("autoregressive")])
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidParameterError, match=re.escape(f"'{path}' does not describe a run: ")) as caught:
        read_run(tmp_path)
    assert reason in str(caught.value)


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"no run\.json"):
        read_run(tmp_path / "nowhere")
    write_run(tmp_path, [measured("autoregressive")])
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(InvalidParameterError, match="no measurement yet"):
        read_run(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(InvalidParameterError, match=r"no results\.jsonl"):
        read_run(tmp_path)
    for broken in (b"{", b"\xff", b"[]"):
        (tmp_path / "run.json").write_bytes(broken)
        with pytest.raises(InvalidParameterError, match="does not describe a run"):
            read_run(tmp_path)


# Markdown


def rows_of(markdown: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading or a line that ends with it, without its header."""
    table = markdown.split(f"{heading}\n\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def test_the_main_table_has_the_fastest_first(tmp_path: Path) -> None:
    markdown = to_markdown(summary_of(tmp_path, [*three_prompts(), failed("clasp")], failures={"swift": "x"}))
    rows = rows_of(markdown, "Overall")
    assert [row[0] for row in rows] == ["layerskip", "autoregressive", "transformers", "clasp", "swift"]
    assert re.fullmatch(r"3\.00× \(2\.50 to 4\.00\)", rows[0][1])
    assert rows[0][2] == "**3/4, 1 differ**"
    assert rows[1][2] == "4/4"
    assert [row[1] for row in rows[3:]] == ["**failed**"] * 2
    assert rows_of(markdown, "Speedup by category")[0][1] == "**3.00× ≠**"
    assert ["layerskip", r"exit\_layer=1"] in rows_of(markdown, "Settings")


def test_the_report_says_what_was_measured_and_what_is_missing(tmp_path: Path) -> None:
    measurements = [*three_prompts(), failed("layerskip", "c", repeat=1)]
    skipped = [{"key": f"long-{number}", "category": "math", "reason": "too long"} for number in range(10)]
    markdown = to_markdown(summary_of(tmp_path, measurements, skipped=skipped, failures={"swift": "no layers"}))
    for line in (
        "# tiny (float32) on mini",
        "- **model**: tiny (float32), 1,234 parameters, 2 layers",
        "- **suite**: mini: 3 prompts in 1 category",
        "- **outputs**: up to 64 tokens, greedy, 2 repeats",
        "- **plain decoding**: 1.0 tokens/s; 4.00× (4.00 to 4.00) as fast as transformers",
        "- The run is not finished: 11 of 18 outputs are measured. Go on with it by --resume.",
        "- 10 prompts skipped (long-0, long-1, long-2, long-3, long-4, long-5, long-6, long-7 and 2 more): too long",
        "- layerskip wrote other tokens than plain decoding in 1 of 4 outputs.",
        "- layerskip failed 1 time; its figures are of the 3 prompts that are left: RuntimeError: no luck",
        "- swift could not be made: no layers",
    ):
        assert line in markdown.splitlines()
    assert "commit" in markdown
    assert "not finished" not in to_markdown(summary_of(tmp_path, [measured("autoregressive")]))


HOSTILE = '$\\frac_{$ <script>alert("1")</script> | [x](y) `code` &amp;'


def hostile_run() -> list[Measurement]:
    return [
        measured("autoregressive", HOSTILE, 4.0, PLAIN_ROUNDS, category=HOSTILE),
        measured("layerskip", HOSTILE, 2.0, THREE_ROUNDS, category=HOSTILE),
        failed("swift", HOSTILE, HOSTILE, category=HOSTILE),
        measured("autoregressive", "b", 4.0, PLAIN_ROUNDS),
        measured("layerskip", "b", 2.0, THREE_ROUNDS),
    ]


def test_text_of_others_means_nothing_in_markdown(tmp_path: Path) -> None:
    markdown = to_markdown(summary_of(tmp_path, hostile_run(), options={"model": HOSTILE, "suite": HOSTILE}))
    assert "<" not in markdown
    assert r"\[x\](y)" in markdown
    header, _, row = markdown.split("## Speedup by category\n\n")[1].splitlines()[:3]
    assert [len(re.split(r"(?<!\\)\|", line)) for line in (header, row)] == [5, 5]


# HTML


class Document(HTMLParser):
    """Elements with their attributes; refuses what is not nested well."""

    VOID = ("meta", "img", "wbr", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def written(folder: Path, measurements: Sequence[Measurement], **options: Any) -> str:
    write_report(write_run(folder, measurements, **options))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_holds_every_picture_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = written(tmp_path, many(5, 2))
    document = Document(text)
    assert [attributes["id"] for attributes in document.all("figure")] == list(PICTURES)
    images = document.all("img")
    assert len(images) == len(PICTURES)
    for image in images:
        address = image["src"] or ""
        assert address.startswith("data:image/svg+xml;base64,")
        picture = base64.b64decode(address.partition(",")[2], validate=True).decode()
        assert "<svg" in picture
        assert not re.search(r'(?:href|src)="(?!#|data:)', picture)
        assert len(image["alt"] or "") > 40
    for _, attributes in document.elements:
        assert not set(attributes) & {"onload", "onclick", "style", "srcset"}
        assert all(str(attributes.get(name, "data:")).startswith("data:") for name in ("src", "href", "data"))
    assert not document.all("script")
    assert not document.all("link")
    assert "url(" not in text
    assert "@import" not in text
    assert len(text.encode()) < 3e6
    assert {"html", "head", "title", "body", "table"} <= {name for name, _ in document.elements}
    assert document.all("html") == [{"lang": "en"}]


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path, many(3, 1))
    pages = []
    for _ in range(2):
        write_report(tmp_path)
        pages.append((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[1]


def test_text_of_others_means_nothing_in_html(tmp_path: Path) -> None:
    settings = {"layerskip": {HOSTILE: HOSTILE}}
    text = written(tmp_path, hostile_run(), options={"model": HOSTILE, "suite": HOSTILE}, settings=settings)
    document = Document(text)
    assert not document.all("script")
    assert not document.all("a")
    assert document.text.count(HOSTILE) >= 4
    assert "&amp;amp;" in text


def test_the_page_shows_failures_and_differing_outputs(tmp_path: Path) -> None:
    text = to_html(summary_of(tmp_path, [*three_prompts(), failed("swift")], failures={"clasp": "no layers"}), [])
    marked = re.findall(r'<td class="marked">(.*?)</td>', text)
    assert marked.count("failed") == 4  # overall and in their category
    assert "3/4, 1 differ" in marked
    notes = text.split('<ul class="notes">')[1].split("</ul>")[0]
    assert all(name in notes for name in ("swift", "clasp", "layerskip"))


# Pictures


def many(contenders: int, categories: int, *, kept: bool = True, prompts: int = 2) -> list[Measurement]:
    """A run of so many contenders, plain decoding among them, with long names."""
    names = ["autoregressive", "transformers-prompt-lookup"]
    names += [f"layer-drafting-method-{number}" for number in range(contenders - len(names))]
    generator = np.random.default_rng(0)
    measurements = []
    for position in range(categories * prompts):
        for place, name in enumerate(names):
            drafts = {"autoregressive": 0}.get(name, 1 + place % 5)
            layers = KeptSet((0, 1 + (position + place) % 3), 4) if kept and drafts else None
            records = [played(drafts, min(drafts, each), layers) for each in (0, drafts, 1)]
            measurements.append(
                measured(
                    name,
                    f"prompt-{position}",
                    float(generator.uniform(2, 9)),
                    None if name.startswith("transformers") else records,
                    category=f"category_{position // prompts}_of_many",
                    position=position,
                    identical=place % 4 != 3,
                )
            )
    return measurements


def pictures_of(folder: Path, measurements: Sequence[Measurement], **options: Any) -> dict[str, Picture]:
    run = read_run(write_run(folder, measurements, **options))
    return {picture.name: picture for picture in draw_pictures(run, summarise(run))}


def texts_of(picture: Picture) -> list[tuple[str, Any]]:
    """The text that a picture shows, with where it stands."""
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()
    legends = list(picture.figure.legends)
    artists = list(picture.figure.texts)
    for panel in picture.figure.axes:
        if not panel.axison:
            continue
        legends += [panel.get_legend()] if panel.get_legend() else []
        artists += [*panel.texts, *(child for child in panel.get_children() if isinstance(child, Text))]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            artists += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
    artists += [text for legend in legends for text in legend.get_texts()]
    drawn = {id(artist): artist for artist in artists if artist.get_text().strip() and artist.get_visible()}
    renderer = canvas.get_renderer()
    return [(artist.get_text(), artist.get_window_extent(renderer)) for artist in drawn.values()]


@pytest.mark.parametrize(
    ("contenders", "categories", "kept", "ordered"),
    [(3, 1, True, False), (3, 13, False, True), (18, 13, True, True)],
)
def test_pictures_have_room_for_all_contenders(
    tmp_path: Path, contenders: int, categories: int, kept: bool, ordered: bool
) -> None:
    pictures = pictures_of(tmp_path, many(contenders, categories, kept=kept, prompts=1), ordered=ordered)
    assert list(pictures) == [name for name in PICTURES if kept or name != "kept"]
    for name, picture in pictures.items():
        width, height = picture.figure.get_size_inches() * picture.figure.dpi
        shown = texts_of(picture)
        for text, box in shown:
            assert box.x0 > -1, (name, text)
            assert box.y0 > -1, (name, text)
            assert box.x1 < width + 1, (name, text)
            assert box.y1 < height + 1, (name, text)
        for (one, first), (other, second) in combinations(shown, 2):
            across = min(first.x1, second.x1) - max(first.x0, second.x0)
            along = min(first.y1, second.y1) - max(first.y0, second.y0)
            assert across <= 1 or along <= 1, (name, one, other)


def test_speedups_are_drawn_where_they_are(tmp_path: Path) -> None:
    measurements = three_prompts()
    panel = pictures_of(tmp_path, measurements)["speedup"].figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["layerskip ≠", "transformers"]
    points = {
        (float(line.get_xdata()[0]), int(line.get_ydata()[0])) for line in panel.lines if len(line.get_xdata()) == 1
    }
    assert sorted(points) == [(pytest.approx(0.25), 1), (pytest.approx(3), 0)]


def test_kept_sublayers_are_drawn_where_they_drafted(tmp_path: Path) -> None:
    records = [played(1, 0), played(1, 0, KeptSet((0, 1, 2), 4)), played(1, 0, None), played(0, 0)]
    measurements = [measured("autoregressive"), measured("layerskip", records=records)]
    panel = pictures_of(tmp_path, measurements)["kept"].figure.axes[0]
    picture = np.asarray(panel.images[0].get_array())
    kept, skipped = (
        np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]) for colour in (ATTENTION, SKIPPED)
    )
    # From below: attention of both layers, then their MLPs. The last two rounds were not drafted by layers.
    np.testing.assert_allclose(picture[:2, 0], [kept, skipped])
    np.testing.assert_allclose(picture[:2, 1], [kept, kept])
    np.testing.assert_allclose(picture[2, 0], skipped)
    np.testing.assert_allclose(picture[:, 2:], 1.0)
    assert "keeps 75% attention, 50% MLP" in panel.get_title(loc="left")


def test_the_ideal_is_drawn_over_the_measured(tmp_path: Path) -> None:
    panel = pictures_of(tmp_path, three_prompts())["acceptance"].figure.axes[0]
    bars = [line for line in panel.lines if line.get_linestyle() == ":" and len(line.get_xdata()) == 2]
    assert [(list(bar.get_xdata()), list(bar.get_ydata())) for bar in bars] == [([1 / 3] * 2, [pytest.approx(3), 2])]


def test_times_add_up(tmp_path: Path) -> None:
    panel = pictures_of(tmp_path, three_prompts())["time"].figure.axes[0]
    ends = {round(bar.get_y() + bar.get_height() / 2): bar.get_x() + bar.get_width() for bar in panel.patches}
    # 16 tokens each: 12 rounds of 0.8 seconds, which here are more than the output took; 20 seconds; 4 seconds a token.
    assert ends == {0: pytest.approx(600), 1: pytest.approx(1250), 2: pytest.approx(4000)}


def test_the_stream_has_its_borders(tmp_path: Path) -> None:
    pictures = pictures_of(tmp_path, many(3, 13), ordered=True)
    assert "1 category_0_of_many, 2 category_1_of_many" in pictures["stream"].caption
    dashed = [line for line in pictures["stream"].figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [2.5 + 2 * number for number in range(12)]
    assert "borders" not in pictures_of(tmp_path, many(3, 13))["stream"].caption


def test_pictures_need_matplotlib_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, three_prompts())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SelfSpecError, match=re.escape("pip install 'selfspec[bench]'")):
        write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.md",
        "results.jsonl",
        "run.json",
        "summary.json",
    ]


def test_no_module_imports_matplotlib_before_it_is_needed() -> None:
    modules = list(Path(report.__file__).parent.glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("matplotlib") for name in names), path


# Files


def test_the_summary_is_what_was_measured(tmp_path: Path) -> None:
    write_report(write_run(tmp_path, three_prompts()))
    assert json.loads((tmp_path / "summary.json").read_text()) == summarise(read_run(tmp_path))
    assert (tmp_path / "report.md").read_text() == to_markdown(summarise(read_run(tmp_path)))


def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, three_prompts())
    before = "an older summary"
    (tmp_path / "summary.json").write_text(before)

    def full(path: Path, *_: Any, **__: Any) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidParameterError, match=r"summary\.json': No space left on device; make room"):
        write_report(tmp_path)
    assert (tmp_path / "summary.json").read_text() == before
    assert not list(tmp_path.glob("*.part"))


# Comparing


def test_runs_side_by_side(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", three_prompts())
    faster = [
        replace(each, decode_seconds=each.decode_seconds / 2)
        for each in three_prompts()
        if each.contender != "transformers"
    ]
    options = {"model": "tiny-early-exit", "seed": 0}
    settings = {"layerskip": {"exit_layer": 9}}
    two = write_run(tmp_path / "two", [*faster, failed("swift")], options=options, settings=settings)
    text = compare_runs([one, two])
    differences = {row[0]: row[1:] for row in rows_of(text, "What differs between the runs:")}
    assert differences["model"] == ["tiny", "tiny-early-exit"]
    assert differences["layerskip, exit\\_layer"] == ["1", "9"]
    assert differences["peers"] == ["transformers", "none"]
    assert "seed" not in differences
    assert "commit" not in differences
    rows = {row[0]: row[1:] for row in rows_of(text, "Speedup (95 % interval)")}
    assert list(rows) == ["layerskip", "autoregressive", "transformers", "swift", "plain decoding, tokens/s"]
    assert rows["layerskip"] == ["**3.00× (2.50 to 4.00); 1 of 4 outputs differ**"] * 2
    assert rows["transformers"][1] == "–"
    assert rows["swift"] == ["–", "**failed**"]
    assert rows["plain decoding, tokens/s"] == ["1.0", "2.0"]


def test_runs_that_do_not_differ(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name / "run", three_prompts()) for name in ("one", "two"))
    text = compare_runs([one, two])
    assert "the same options, settings, software and hardware" in text
    assert f"| contender | {Path('one', 'run')} | {Path('two', 'run')} |" in text
    assert compare_runs([one]).count("| contender | run |") == 1


def test_nothing_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="name the folders"):
        compare_runs([])
    with pytest.raises(InvalidParameterError, match="holds no run"):
        compare_runs([tmp_path])


# In a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WATCH = """<script>
addEventListener("load", () => {
  const found = [...document.images].map(image => {
    const box = image.getBoundingClientRect();
    return [image.naturalWidth, box.left, box.top, box.width, box.height];
  });
  document.body.dataset.images = JSON.stringify(found);
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report in")
def test_a_browser_paints_every_picture(tmp_path: Path) -> None:
    text = written(tmp_path, many(4, 2))
    page, screenshot = tmp_path / "watched.html", tmp_path / "page.png"
    page.write_text(text.replace("</body>", f"{WATCH}</body>"), encoding="utf-8")
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-component-update"),
        *("--disable-background-networking", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--dump-dom", f"--screenshot={screenshot}", "--window-size=1200,6000", page.as_uri()),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    images = json.loads(Document(finished.stdout).all("body")[0]["data-images"] or "null")
    assert len(images) == len(PICTURES)
    pixels = imread(screenshot)[..., :3]
    for (width, left, top, shown_width, height), name in zip(images, PICTURES, strict=True):
        assert width > 0, name
        painted = pixels[int(top) : int(top + height), int(left) : int(left + shown_width)]
        assert painted.shape[0] > 50, name
        assert painted.shape[1] > 500, name
        dark = (painted.mean(-1) < 0.5).mean()
        assert 0.001 < dark < 0.5, name
        coloured = (np.ptp(painted, axis=-1) > 0.3).mean()
        assert coloured > 0.0005, name
