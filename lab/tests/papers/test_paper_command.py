"""``selfspec bench paper`` on a tiny random model: measured, replayed, decided, and gone on with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.checkpoints import save_checkpoint
from selfspec.cli.command_line import app
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.exit_grid import grid, search_exit
from selfspec_lab.papers.claims import judge_table
from selfspec_lab.papers.figures import MACHINES, PromptFigures, pooled, read_figures, text_of
from selfspec_lab.papers.prepare import TUNED
from selfspec_lab.papers.tables import find_table

SMALL = ("--suite", "mini", "--limit", "3", "--max-new-tokens", "8", "--quick", "--dirty", "--device", "cpu")


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def measured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tables") / "del-1"
    result = bench("paper", "--table", "del-1", "--model", model, *SMALL, "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


def test_the_page_has_the_paper_the_clock_and_the_papers_machine(measured: Path) -> None:
    page = (measured / "table.md").read_text(encoding="utf-8")
    assert "DEL (Entezari Zarch et al. 2025), table 1" in page
    assert "Llama-3.2-1B on A100 40GB" in page
    assert "Grid search: exit layer" in page
    assert page.count("| LS |") == page.count("| DEL |") == 2
    cell = page.split("| DEL |")[2].split("|")[1].split(" / ")
    assert len(cell) == 3
    assert page.count("on the paper's machine |") == page.count("by the clock here |") >= 0
    assert "Replay against clock" in page


def test_what_was_tuned_for_something_else_is_not_taken(measured: Path, model: str) -> None:
    result = bench(
        *("paper", "--table", "del-1", "--model", model, *SMALL, "--tuning-sets", "5", "--out", str(measured))
    )
    assert result.exit_code != 0
    assert "was tuned for another tuning_sets; name another --out" in " ".join(result.output.split())


def test_every_method_ran_with_what_was_tuned(measured: Path) -> None:
    run = read_run(measured / "suite")
    assert set(run.fields["settings"]) == {"autoregressive", "LS", "FS", "DV", "DEL"}
    tuned = json.loads((measured / TUNED).read_text(encoding="utf-8"))
    for label in ("LS", "FS", "DV"):
        assert run.fields["settings"][label]["exit_layer"] == tuned["exit"]["exit_layer"]
    assert run.fields["settings"]["LS"]["draft_length"] == tuned["exit"]["draft_length"]
    assert run.fields["settings"]["DEL"]["drop_unsure"] is True
    assert all(each.identical for each in run.measurements), "a method wrote another text"
    assert sum(record.drafted for each in run.measurements for record in each.rounds or ()) > 0


def test_figures_are_those_of_the_rounds(measured: Path) -> None:
    table, run = find_table("del-1"), read_run(measured / "suite")
    figures = read_figures(run, table, table.models[0], 0, 0)
    for label, own in figures.items():
        assert len(own) == 3
        assert all(set(each.speedups) == set(MACHINES) for each in own)
        samples = [each for each in run.measurements if each.candidate == label]
        records = [record for each in samples for record in each.rounds or ()]
        assert pooled(own, "M") == pytest.approx(sum(len(each.token_ids) for each in records) / len(records))
    assert pooled([], "M") is None


def test_equal_rounds_are_not_compared(measured: Path) -> None:
    table, run = find_table("del-1"), read_run(measured / "suite")
    figures = read_figures(run, table, table.models[0], 0, 0)
    same = {**figures, "FS": figures["LS"]}
    checks = {check.statement: check for check in judge_table(table, table.models[0], same, {})}
    check = checks["FS is faster than LS, on the paper's machine"]
    assert check.status == "not applicable"
    assert "3 prompts left out" in check.figure
    unable = judge_table(table, table.models[0], figures, dict.fromkeys(table.methods, "nothing pays"))
    assert {(check.status, check.figure) for check in unable} == {("not applicable", "nothing pays")}


def outputs(speed: float, skipped: tuple[float, float] | None, count: int = 24) -> list[PromptFigures]:
    """Figures of 24 prompts, on the first ``count`` of which layers were skipped."""
    speedups = dict.fromkeys(MACHINES, speed)
    return [
        PromptFigures(
            0, str(index), str(index), speedups, 8, 32, 40, 24, 0.1, skipped if index < count else None, (speed,)
        )
        for index in range(24)
    ]


def test_prompts_about_one_text_are_one_pair() -> None:
    table = find_table("del-1")
    figures = {
        label: [replace(each, text=str(int(each.prompt) // 2)) for each in outputs(speed, (0.3, 0.3))]
        for label, speed in (("LS", 1.2), ("FS", 1.3), ("DV", 1.1), ("DEL", 1.4))
    }
    name = "DEL is faster than FS, on the paper's machine"
    [check] = [each for each in judge_table(table, table.models[0], figures, {}) if each.statement == name]
    assert (check.status, check.test and check.test.pairs) == ("undecided", 12)
    assert "24 prompts of 12 texts, a mean for each" in check.figure


def test_the_turns_of_a_question_are_about_one_text() -> None:
    assert text_of(["86/1", "86/2", "173"]) == {"86/1": "86", "86/2": "86", "173": "173"}
    named = [f"HumanEval/{number}" for number in (0, 1, 27)]
    assert text_of(named) == {key: key for key in named}


def test_drafts_that_cost_nothing_in_the_model_are_not_compared_with_plain_decoding() -> None:
    table = find_table("swift-2")
    figures = {"Parallel": outputs(1.1, None), "Lookahead": outputs(1.6, None), "SWIFT": outputs(1.2, (0.4, 0.4))}
    checks = judge_table(table, table.models[0], figures, {})
    found = {check.statement: check for check in checks}
    for statement in ("plain decoding is faster than Parallel", "Lookahead is faster than plain decoding"):
        assert found[statement].status == "not applicable"
        assert "it cannot be slower" in found[statement].figure
    assert found["SWIFT is faster than plain decoding, on the paper's machine"].status == "holds"
    assert found["Lookahead is faster than Parallel, on the paper's machine"].status == "holds"


def test_outputs_that_end_before_a_selection_decide_nothing() -> None:
    table = find_table("knapspec-2")
    figures = {label: outputs(0.9, (0.3, 0.3), 24) for label in table.methods} | {
        "KnapSpec": outputs(1.2, (0.2, 0.4), 22)
    }
    name = "KnapSpec is faster than CLaSp, on the paper's machine"
    [check] = [each for each in judge_table(table, table.models[0], figures, {}) if each.statement == name]
    assert (check.status, check.test and check.test.pairs) == ("holds", 22)
    assert "2 prompts left out, whose outputs end before the first selection" in check.figure
    never = {**figures, "KnapSpec": outputs(1.2, None, 0)}
    found = {each.statement: each for each in judge_table(table, table.models[0], never, {})}
    assert found["KnapSpec is faster than CLaSp"].status == "not applicable"


def test_a_table_goes_on_without_measuring_again(measured: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (measured / "suite" / "results.jsonl").read_bytes()

    def measure(_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("selfspec_lab.papers.measuring.Run.measure", measure)
    arguments = ("paper", "--table", "del-1", "--model", model, *SMALL, "--out", str(measured))
    result = bench(*arguments)
    assert result.exit_code == 0, result.output
    assert (measured / "suite" / "results.jsonl").read_bytes() == before
    (measured / "suite" / "results.jsonl").write_bytes(b"\n".join(before.splitlines()[:-1]) + b"\n")
    assert isinstance(bench(*arguments).exception, AssertionError)
    (measured / "suite" / "results.jsonl").write_bytes(before)
    other = bench(*arguments, "--seed", "1")
    assert other.exit_code == 2
    assert "was tuned for another seed" in other.output


def test_tables_become_one_page(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = bench("tables", str(measured.parent), str(page))
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# The papers' tables, measured here")
    assert "table 1" in text
    empty = bench("tables", str(tmp_path), str(page))
    assert empty.exit_code == 2
    assert "there are no tables" in empty.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--table", "swift-9"), "there is no table 'swift-9'"),
        (("--table", "swift-2"), "no text of swift-2 is at hand"),
        (("--table", "swift-2", "--suite", "mini", "--limit", "0"), "limit must be at least 1"),
        (("--table", "swift-2", "--suite", "mini", "--max-new-tokens", "1"), "max_new_tokens must be at least 2"),
        (("--table", "swift-2", "--data", "nowhere"), "there is no data folder 'nowhere'"),
        (("--table", "swift-2", "--tasks", "xsum"), "swift-2 has no task 'xsum'; choose from cnn-dm, gsm8k"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded a model")

    monkeypatch.setattr("selfspec_lab.papers.measuring.load_model", load)
    result = bench("paper", *arguments, "--out", str(tmp_path / "out"), "--dirty")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_the_grid_search_finds_the_exit_that_is_right(model: str) -> None:
    from selfspec import Engine

    engine = Engine.from_pretrained(model, device="cpu")
    choice = search_exit(engine, ["def f(x):", "Once upon a time"], 16)
    assert (choice.exit_layer, choice.draft_length) in grid(engine.target.layer_count)
    assert choice.plain == 1 / engine.target.layer_count
    assert choice.pays == (choice.tokens_per_layer > choice.plain)
