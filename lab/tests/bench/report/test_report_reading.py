"""Folders of runs: read as they were written, and refused where they are broken."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.report.medians import samples_of
from selfspec_lab.bench.report.read import read_run
from written_runs import LATENCIES, PLAIN_ROUNDS, THREE_ROUNDS, measured, three_prompts, write_run


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
        (changed(candidate="autoregressive", rounds=None), "a line above has the same prompt, candidate and repeat"),
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
        (changed(rounds=[{}]), "'token_ids' is missing"),
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


def test_lines_of_older_runs_are_read(tmp_path: Path) -> None:
    lines = write_run(tmp_path, three_prompts()) / "results.jsonl"
    expected = read_run(tmp_path).measurements
    older = [older_form(json.loads(line)) for line in lines.read_text(encoding="utf-8").splitlines()]
    lines.write_text("".join(json.dumps(line) + "\n" for line in older), encoding="utf-8")
    assert read_run(tmp_path).measurements == expected
    older[-4]["rounds"][0]["tokens"] += 1
    lines.write_text("".join(json.dumps(line) + "\n" for line in older), encoding="utf-8")
    with pytest.raises(InvalidParameterError, match="other tokens than the output"):
        read_run(tmp_path)


def older_form(line: dict[str, Any]) -> dict[str, Any]:
    """A line as runs had it before ``candidate`` and ``Round.to_dict``."""
    line["contender"] = line.pop("candidate")
    for each in line["rounds"] or ():
        each["tokens"] = len(each.pop("token_ids"))
    return line


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
