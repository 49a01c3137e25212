"""The files of the page: whole, from one origin, without anything inline."""

import os
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

from selfspec.serve.page import HEADERS, page_files

TEXTS = {name: file.content.decode() for name, file in page_files().items()}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_file_has_its_media_type() -> None:
    assert {"index.html", "style.css", "main.js", "icon.svg"} <= TEXTS.keys()
    assert "__init__.py" not in TEXTS
    assert page_files()["main.js"].media_type == "text/javascript; charset=utf-8"
    assert page_files()["index.html"].media_type == "text/html; charset=utf-8"


def test_every_file_that_is_named_is_there_and_every_file_is_named() -> None:
    named = set(re.findall(r'"(?:\./|page/)([\w.]+)"', "\n".join(TEXTS.values())))
    assert named == TEXTS.keys() - {"index.html"}


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in TEXTS.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
        assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


def test_nothing_is_inline() -> None:
    tags = Tags()
    tags.feed(TEXTS["index.html"])
    assert len(tags.found) > 50
    for tag, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style"
        assert tag != "script" or attributes["src"]


def test_the_policy_allows_nothing_but_the_own_origin() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}


def test_the_wheel_has_them(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=root, env={**os.environ, "SELFSPEC_WHEEL_KERNELS": "never"}, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name: wheel.read(name) for name in wheel.namelist()}
    assert {name: packed.get(f"selfspec/serve/page/{name}") for name in TEXTS} == {
        name: text.encode() for name, text in TEXTS.items()
    }
