"""Every measured figure on a page is written from a results file of a clean commit."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = ("leaderboard.md", "experiments.md", "tables.md", "clients.md")
"""Written as a whole; ``test_documents.py`` compares them with their results."""
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "lab" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name not in GENERATED
]
WITHOUT_STAMP = ("conformance", "triton", "result.json", "table.json", "tuned.json")
"""Reports of ``selfspec conformance`` about servers, which have a date and a version; what Triton compiled, which
depends on its version alone, with predictions from that; what is computed from the runs of a paper's table, whose
``run.json`` have one."""


@pytest.fixture
def pages(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("pages")


@pytest.fixture
def unaccounted(pages: ModuleType) -> object:
    return importlib.import_module("page_figures.measured").unaccounted


def test_the_script_writes_all_pages(pages: ModuleType) -> None:
    assert {page.relative_to(ROOT).as_posix() for page in pages.PAGES} == set(PAGES)
    assert set(pages.GENERATED) == set(GENERATED)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_the_results_have_it(page: str, pages: ModuleType) -> None:
    path = ROOT / page
    assert path.read_text(encoding="utf-8") == pages.written(path), "run: python benchmarks/pages.py"


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_of_no_file(page: str, unaccounted) -> None:  # type: ignore[no-untyped-def]
    assert unaccounted((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.rglob("*.json")) if not set(WITHOUT_STAMP) & set(path.parts)],
    ids=lambda path: path.relative_to(RESULTS).as_posix(),
)
def test_a_result_is_of_a_clean_commit(path: Path, pages: ModuleType) -> None:
    found = importlib.import_module("page_figures.results").stamps_of(json.loads(path.read_text(encoding="utf-8")))
    stamps = [*found]
    assert stamps
    for stamp in stamps:
        assert stamp["dirty"] is False
        assert len(stamp["commit"]) == 40
        assert stamp["date"]
        assert stamp["hardware"]["processor"]


def test_results_are_of_commits_of_this_history(pages: ModuleType) -> None:
    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return ran.stdout if ran.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the history is not here")
    history = set(git("rev-list", "HEAD").split())
    stamps_of = importlib.import_module("page_figures.results").stamps_of
    paths = [path for path in RESULTS.rglob("*.json") if not set(WITHOUT_STAMP) & set(path.parts)]
    commits = {stamp["commit"]: path.name for path in paths for stamp in stamps_of(json.loads(path.read_text("utf-8")))}
    assert commits
    assert {name for commit, name in commits.items() if commit not in history} == set()


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.85 of plain decoding.",
        "Decoding fell from 88 to 22 tokens/s.",
        "It takes 3 % more.",
        "Building takes about 20 seconds, once.",
        "- a point\n- twice, or 2 times as fast",
        "| rows | 1 | 2 |\n| --- | --- | --- |\n| 16 bits | 1.00 | 0.97 |",
        "Memory is 1,539 MiB.",
        "Words.\n\n<!-- not measured: settings -->\n\nAt most 30 ms.\n\nIt took 31 ms.",
        "## Limits\n\n<!-- not measured: settings -->\n\nAt most 30 ms.\n\n## Speed\n\nIt took 31 ms.",
        "<!-- not measured: because I say so -->\n\nIt took 31 ms.",
        "1.38<!-- =gguf-qwen-q4_k_m figures/tokens_per_second/auto/to_llama_cpp/median --> of llama.cpp, 2.5 of us.",
    ],
)
def test_a_figure_of_no_file_is_found(text: str, unaccounted) -> None:  # type: ignore[no-untyped-def]
    assert unaccounted(text)


@pytest.mark.parametrize(
    "text",
    [
        "With Python 3.10, torch 2.13 and Llama 3.1, by section 3.4 and equation 2.1.",
        "A model of 1.5 billion parameters, 30 layers and 8 heads, in 16 bits.",
        "Version 0.3.36, commit 0ea640560, 2026-11-22, port 8000, Qwen2.5-Coder-1.5B.",
        "`--temperature 0.8` and ``x = 1.5 s``",
        "```\ntokens/s 1.85\n```\n\n    indented 3.5",
        "[a link](https://example.org/1.85)",
        "<!-- benchmarks/pages.py writes this: x -->\n\n1.85\n\n<!-- up to here -->",
        "## Limits of 2.5\n\n<!-- not measured: settings -->\n\nAt most 30 ms.\n\nAnd 2.5 %.",
        "At most 2 % <!-- not measured: settings -->(`delta`).",
        "1.38<!-- =gguf-qwen-q4_k_m figures/tokens_per_second/auto/to_llama_cpp/median --> of llama.cpp",
    ],
)
def test_what_is_no_measured_figure_passes(text: str, unaccounted) -> None:  # type: ignore[no-untyped-def]
    assert unaccounted(text) == []


def test_a_single_figure_is_that_of_its_key(pages: ModuleType) -> None:
    inline = importlib.import_module("page_figures.inline")
    results = {"a": {"speeds": [{"b.c": 2469.0}, {"b.c": 1000.0}]}}
    assert inline.fill("0.0<!-- =a speeds/0/b.c ÷ speeds/1/b.c -->", results.__getitem__).startswith("2.5<!-- =a ")
    assert inline.fill("1<!-- =a speeds/0/b.c × 2 -->", results.__getitem__).startswith("4,938<")
    with pytest.raises(KeyError):
        inline.fill("1<!-- =a speeds/0/d -->", results.__getitem__)


def test_a_result_with_uncommitted_changes_is_not_shown(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = importlib.import_module("page_figures.results")
    result = json.loads((RESULTS / "gguf-smollm2-q4_1.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name, dirty in (("clean", False), ("dirty", True)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"dirty": dirty}))
    assert set(results.present(["clean", "dirty", "missing"])) == {"clean"}
    with pytest.raises(ValueError, match="not of a clean commit"):
        results.read("dirty")
    other = result | {"hardware": result["hardware"] | {"processor": "another"}}
    with pytest.raises(ValueError, match="several machines"):
        results.origin({"one": result, "two": other}, "results")
    assert "AMD EPYC, family 26 model 2, 2 threads on 2 cores" in results.origin({"one": result}, "results")
