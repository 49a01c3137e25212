"""Reports of a run in Markdown and HTML: what they say, text that is escaped, pictures that are painted."""

import ast
import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench import report
from selfspec_lab.bench.report import write_report
from selfspec_lab.bench.report.html import to_html
from selfspec_lab.bench.report.markdown import to_markdown
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.measurement import Measurement
from written_runs import (
    PICTURES,
    PLAIN_ROUNDS,
    THREE_ROUNDS,
    failed,
    many,
    measured,
    rows_of,
    summary_of,
    three_prompts,
    write_run,
)

# Markdown


def test_the_report_says_whether_it_was_a_chat_and_how_llama_cpp_was_built(tmp_path: Path) -> None:
    build = {"version": "1", "system_info": "AVX = 1", "missing": ["AVX2", "FMA"]}
    told = summary_of(tmp_path / "new", three_prompts(), chat=True, llama_cpp=build)
    for text in (to_markdown(told), to_html(told, [])):
        assert "as chat messages" in text
        assert "llama.cpp was not built for this processor: its build lacks AVX2, FMA" in text
        assert "its own copy of the weights" in text
    fitting = summary_of(tmp_path / "fit", three_prompts(), chat=False, llama_cpp={**build, "missing": []})
    assert "as texts to continue" in to_markdown(fitting)
    assert "not built for this processor" not in to_markdown(fitting)
    older = to_markdown(summary_of(tmp_path / "old", three_prompts()))  # of a run that does not say
    assert not any(words in older for words in ("chat", "to continue", "llama.cpp"))


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
        "- The run is not finished: 11 of 18 outputs are measured. Continue it with --resume.",
        "- 10 prompts skipped (long-0, long-1, long-2, long-3, long-4, long-5, long-6, long-7 and 2 more): too long",
        "- The output of layerskip differs from plain decoding in 1 of 4 cases.",
        "- layerskip failed 1 time; its figures cover the remaining 3 prompts: RuntimeError: no luck",
        "- swift could not be set up: no layers",
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


# Files


def test_the_summary_is_what_was_measured(tmp_path: Path) -> None:
    write_report(write_run(tmp_path, three_prompts()))
    assert json.loads((tmp_path / "summary.json").read_text()) == summarise(read_run(tmp_path))
    assert (tmp_path / "report.md").read_text() == to_markdown(summarise(read_run(tmp_path)))


def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, three_prompts())
    before = "an older summary"
    (tmp_path / "summary.json").write_text(before)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InvalidParameterError, match=r"summary\.json': No space left on device; make room"):
        write_report(tmp_path)
    assert (tmp_path / "summary.json").read_text() == before
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_pictures_need_matplotlib_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, three_prompts())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SelfSpecError, match=re.escape("pip install matplotlib")):
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
