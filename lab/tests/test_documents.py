"""The generated pages are those of the committed results."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from selfspec.cli.command_line import app
from selfspec.methods.papers import PAPERS
from selfspec_lab.bench.report.leaderboard import read_summaries, render_leaderboard
from selfspec_lab.experiments import EXPERIMENTS
from selfspec_lab.experiments.document import render_document
from selfspec_lab.experiments.store import read_folders
from selfspec_lab.papers.page import PAGE, RESULT, render_page, table_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_of_the_claims_is_made_of_the_committed_results() -> None:
    page, folders = ROOT / "docs" / "experiments.md", read_folders(RESULTS / "experiments")
    text = page.read_text(encoding="utf-8")
    assert set().union(*folders.values()) == EXPERIMENTS.keys()
    for folder, results in folders.items():
        assert all((folder / f"{name}.png").is_file() for name in results)
        for result in results.values():  # a claim is measured on one machine, which its own line names
            assert f"{result['stamp']['hardware']['processor']}, {result['stamp']['threads']} threads" in text
    assert text == render_document(folders, page)


def test_the_page_of_the_papers_tables_is_made_of_the_committed_runs() -> None:
    folders = sorted(path.parent for path in (RESULTS / "papers").glob("*/table.json"))
    assert folders
    for folder in folders:
        text, result = table_result(folder)
        assert text == (folder / PAGE).read_text(encoding="utf-8")
        assert result == json.loads((folder / RESULT).read_text(encoding="utf-8"))
        assert not any(json.loads(path.read_text("utf-8"))["stamp"]["dirty"] for path in folder.glob("*/run.json"))
    assert (ROOT / "docs" / "tables.md").read_text(encoding="utf-8") == render_page(folders)


def test_the_leaderboard_is_made_of_the_committed_runs() -> None:
    page = ROOT / "docs" / "leaderboard.md"
    summaries = read_summaries(RESULTS / "runs")
    assert {"tiny", "tiny-early-exit"} <= {summary["options"]["model"] for summary in summaries.values()}
    assert page.read_text(encoding="utf-8") == render_leaderboard(summaries, page)


@pytest.mark.parametrize("model", ["tiny", "tiny-early-exit"])
def test_the_equal_choices_on_the_page_of_changes_are_those_of_the_referee(
    benchmarks: Callable[[str], ModuleType], model: str
) -> None:
    result = json.loads((RESULTS / f"referee-{model}.json").read_text(encoding="utf-8"))
    assert not result["stamp"]["dirty"]
    assert all(row["there"] for row in result["sets"]), "a set that skips nothing is no comparison"
    agreement = benchmarks("referee").agreement(result["sets"])
    assert agreement in (ROOT / "docs" / "faithfulness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", ["tiny", "tiny-early-exit"])
def test_rounds_and_searches_are_those_of_swifts_authors(benchmarks: Callable[[str], ModuleType], model: str) -> None:
    result = json.loads((RESULTS / f"referee-swift-{model}.json").read_text(encoding="utf-8"))
    counts = benchmarks("referee_swift").equal_counts(result)
    assert all(equal == compared > 0 for equal, compared in counts.values())


def test_the_table_of_conformance_is_that_of_the_reports(benchmarks: Callable[[str], ModuleType]) -> None:
    conformance = benchmarks("conformance_table")
    reports = conformance.read_reports(RESULTS / "conformance")
    assert {"selfspec", "llama-cpp", "vllm"} <= set(reports)
    assert not any(result["divergences"] for result in reports["selfspec"]["results"])
    assert conformance.section(reports) in (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_the_tables_of_the_kernels_are_those_of_the_results(benchmarks: Callable[[str], ModuleType]) -> None:
    kernels, roofline = (benchmarks(name) for name in ("triton_kernels", "roofline"))
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    compiled = json.loads(kernels.RESULT.read_text(encoding="utf-8"))["kernels"]
    predicted = json.loads(roofline.ROOFLINE.read_text(encoding="utf-8"))
    assert kernels.table(compiled) in page
    assert kernels.fractions_table(compiled) in page
    assert roofline.table(predicted) in page
    assert predicted["predicted"]
    assert predicted["acceptance"] == roofline.measured_acceptance()
    reached = roofline.reached_fractions(compiled)
    found = roofline.predictions(predicted["acceptance"], predicted["context"], reached)
    for own, expected in zip(found, predicted["predictions"], strict=True):
        assert own == pytest.approx(expected), "but for the last bits, in which processors differ"


@pytest.mark.parametrize("name", PAPERS)
def test_the_table_of_a_paper_is_that_of_its_preset(name: str, benchmarks: Callable[[str], ModuleType]) -> None:
    preset = benchmarks("faithfulness").preset
    page = (ROOT / "docs" / "faithfulness.md").read_text(encoding="utf-8")
    assert preset(name) in page
    assert f"--paper {name}" in page


def test_the_tests_that_the_page_of_changes_names_exist() -> None:
    page = (ROOT / "docs" / "faithfulness.md").read_text(encoding="utf-8")
    tests = [path for folder in ("tests", "lab/tests") for path in (ROOT / folder).rglob("test_*.py")]
    sources = {path.name: path.read_text(encoding="utf-8") for path in tests}
    files = set(re.findall(r"\btest_\w+\.py\b", page))
    functions = set(re.findall(r"\btest_\w+\b(?!\.py)", page))
    assert files
    assert files <= set(sources)
    assert functions
    assert all(any(f"def {name}(" in source for source in sources.values()) for name in functions)


@pytest.mark.parametrize(
    "page", ["README.md", "lab/README.md", "recipes/README.md", *(ROOT / "docs").glob("*.md")], ids=str
)
def test_commands_on_pages_exist(page: str | Path) -> None:
    """With every option that is named; ``from-0.1.md`` alone names what went."""
    text, root = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " "), get_command(app)
    code = [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    code += re.findall(r"^ {4}(.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    command: Any
    for line in code if Path(page).name != "from-0.1.md" else ():
        if (found := re.search(r"(?:^|/bin/)selfspec (.*)", line)) is not None:
            words, command = shlex.split(found[1], comments=True), root
            while words and hasattr(command, "get_command") and not words[0].startswith("-"):
                command = command.get_command(command.make_context("", [], resilient_parsing=True), words.pop(0))
                assert command is not None, line
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line
