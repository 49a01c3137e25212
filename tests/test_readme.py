"""Every snippet of the pages about models and serving runs as it stands; ``.ci/newcomer.py`` runs the README's."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.server_process import serve
from selfspec.cli.command_line import app
from selfspec.loading import INSTALLABLE, find_installed

ROOT = Path(__file__).parents[1]
PAGES = ("docs/models.md", "docs/serving.md")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


SERVER = "http://127.0.0.1:8000"
"""Where snippets expect ``selfspec serve``."""
PYTHON = [
    (page, text) for page in PAGES for language, text in blocks(page) if language == "python" and SERVER not in text
]
REQUESTS = [
    (language, text)
    for page in PAGES
    for language, text in blocks(page)
    if SERVER in text and language in ("python", "bash")
]
LINES = [
    line.partition("  #")[0]
    for page in PAGES
    for language, text in blocks(page)
    if not language
    for line in text.splitlines()
]


def needs_real_model(text: str) -> None:
    if "smollm2" in text and find_installed(INSTALLABLE["smollm2"]) is None:
        pytest.skip("smollm2 is not installed: selfspec models install smollm2")


@pytest.mark.trained
@pytest.mark.parametrize(
    "text", [text for _, text in PYTHON], ids=[f"{page}-{text.count(chr(10))}" for page, text in PYTHON]
)
def test_python(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_real_model(text)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "snippet", "exec"), {})
    assert len(printed.getvalue().split()) > 3


@pytest.mark.trained
@pytest.mark.parametrize("command", LINES)
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_real_model(command)
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    assert program == "selfspec"
    with warnings.catch_warnings():
        result: Any = CliRunner().invoke(app, arguments, input="Hello!\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.slow
@pytest.mark.trained
def test_requests_to_a_server(tmp_path: Path) -> None:
    """The snippets that ask ``selfspec serve``, in Python and by curl, against a real one."""
    pytest.importorskip("openai", reason="the package openai is not installed: pip install '.[dev]'")
    needs_real_model("smollm2")
    assert {language for language, _ in REQUESTS} == {"python", "bash"}
    with serve(tmp_path, "--model", "smollm2", "--method", "suffix", "--default-new-tokens", "24") as server:
        for language, text in REQUESTS:
            snippet = text.replace(SERVER, server.url)
            if language == "python":
                program = [sys.executable, "-c", snippet]
            else:
                request = snippet[snippet.index("curl") :]
                program = ["bash", "-c", request.replace("curl", "curl --silent --fail", 1)]
            done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert len(done.stdout.split()) > 3


def test_ci_does_what_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script reads every block, in order; CI runs it, and nothing of it twice."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    newcomer = importlib.import_module("newcomer")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = list(newcomer.commands(readme))
    words = [command.text.split("#")[0].split() for command in found]
    assert len(found) >= 10
    assert words[:2] == [["make", "demo"], ["make", "test"]]
    assert {"pip", "curl", "selfspec"} <= {words[0] for words in words}
    assert {command.language for command in found} == {"", "python", "bash"}
    assert all(command.text in readme for command in found)
    assert any('Engine.from_pretrained("smollm2"' in command.text for command in found)
    serving = [index for index, command in enumerate(found) if command.text.startswith("selfspec serve")]
    asking = [index for index, command in enumerate(found) if newcomer.SERVER in command.text]
    assert len(serving) == 1
    assert len(asking) >= 2
    assert serving[0] < min(asking)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ".ci/newcomer.py" in ci
    assert not re.search(r"^make .*(demo|test)$", ci, re.MULTILINE)
    with pytest.raises(ValueError, match="ruby"):
        list(newcomer.commands("```ruby\nputs 1\n```\n"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 160


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
)
def test_links_lead_somewhere(page: str) -> None:
    """To files that exist, and to headings that these have."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        linked = (ROOT / page).parent / link if link else ROOT / page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), f"{link}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
