"""What the repository contains is written for it: no line of the data sets, and in the checkpoints' folders no code.

The data is looked for beside the repository; where it is not there, only the tests of the finder run.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY.parent / "shared" / "data"
LONGEST_COMMON = 40
"""Characters that a line may have in common with the data by chance."""

_KEY = 24
"""Characters at a line's start that lines are indexed by."""

_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrt]|([\"'/\\]))")
_QUOTES = str.maketrans("‘’“”", "''\"\"")
_MARKS = re.compile(r"^\W+|\W+$")
_STARTS = re.compile(rf"\b(?=(\w.{{{_KEY - 1}}}))")


def normalised(text: str) -> str:
    """The text on one line, with single spaces and straight quotation marks."""
    return " ".join(text.translate(_QUOTES).split())


def unescaped(text: str) -> str:
    """The text with the escapes of JSON and HTML decoded, wherever in a file they stand."""
    text = _ESCAPES.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2] or "\n", text)
    return html.unescape(text)


def strings(value: object) -> Iterator[str]:
    """All strings of a decoded JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def long_lines(text: str) -> set[str]:
    """The lines of over 40 characters, normalised, without the punctuation around them; rulers are left out."""
    lines = (" ".join(line.split()) for line in text.translate(_QUOTES).splitlines() if len(line) > LONGEST_COMMON)
    words = (_MARKS.sub("", line) for line in lines if len(line) > LONGEST_COMMON)
    return {line for line in words if len(line) >= _KEY}


class Lines:
    """Long lines, which are looked for in other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._by_start: dict[str, set[str]] = {}
        for line in set().union(*map(long_lines, texts)):
            self._by_start.setdefault(line[:_KEY], set()).add(line)

    def found_in(self, text: str) -> set[str]:
        """Those of the lines that the text contains, also where it breaks its lines elsewhere."""
        text = normalised(text)
        starts = self._by_start.keys() & _STARTS.findall(text)
        return {line for start in starts for line in self._by_start[start] if line in text}


def readings(name: str, text: str) -> list[str]:
    """A file's text as it stands, with escapes decoded, and the string literals of Python joined."""
    if not name.endswith(".py"):
        return [text, unescaped(text)] if "\\" in text or "&" in text else [text]
    return [text, "\n".join(literals(compile(text, name, "exec", dont_inherit=True).co_consts))]


def literals(constants: Iterable[object]) -> Iterator[str]:
    """The strings of compiled code. An abstract syntax tree has them too, but takes three times as long."""
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, CodeType):
            yield from literals(each.co_consts)
        elif isinstance(each, tuple | frozenset):
            yield from literals(each)


def quotations(files: dict[str, str], sources: list[str]) -> dict[str, set[str]]:
    """Find lines of over 40 characters that files and sources share.

    Args:
        files: text by name.
        sources: texts of others; their lines are looked for in the files, and the files' lines in them.

    Returns:
        the lines found, by name of the file; files without any are left out.
    """
    read = {name: readings(name, text) for name, text in files.items()}
    lines = Lines(sources)
    found = {name: set().union(*map(lines.found_in, texts)) for name, texts in read.items()}
    own = Lines(text for texts in read.values() for text in texts)
    parts = set().union(*map(own.found_in, sources))
    for name, texts in read.items() if parts else ():
        found[name] |= parts & set().union(*map(long_lines, texts))
    return {name: lines for name, lines in found.items() if lines}


def data_texts(folder: Path) -> list[str]:
    """The texts of a folder of data: every string of its JSON lines, and its plain text."""
    records = (json.loads(line) for path in folder.glob("*.jsonl") for line in path.open(encoding="utf-8"))
    return [*strings(list(records)), *(path.read_text(encoding="utf-8") for path in folder.rglob("*.txt"))]


def standard_library() -> list[str]:
    """The sources of the running interpreter's standard library, without its own tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test"}
    paths = (path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def tracked_texts(*folders: str) -> dict[str, str]:
    """The tracked text files of the repository by name, the licence left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        content = (REPOSITORY / name).read_bytes() if (REPOSITORY / name).is_file() else b"\0"
        if b"\0" not in content and Path(name).name != "LICENSE":
            texts[name] = content.decode("utf-8", errors="replace")
    return texts


def told(found: dict[str, set[str]]) -> str:
    return "\n".join(f"{name}: {line}" for name, lines in found.items() for line in sorted(lines))


@pytest.mark.skipif(not DATA.is_dir(), reason="the data is not there")
def test_no_file_quotes_the_data() -> None:
    texts, data = tracked_texts(), data_texts(DATA)
    if not texts:
        pytest.skip("not a git checkout")
    assert len(data) > 1000
    found = quotations(texts, data)
    assert not found, told(found)


@pytest.mark.slow
def test_no_checkpoint_quotes_the_standard_library() -> None:
    texts = tracked_texts("lab/selfspec_lab/checkpoints")
    if not texts:
        pytest.skip("not a git checkout")
    assert {"README.md", "evaluation.json", "training.json"} <= {Path(name).name for name in texts}
    found = quotations(texts, standard_library())
    assert not found, told(found)


SOURCE = "The miller’s third daughter counted every sack twice.\n    return sorted(sacks, key=lambda sack: sack.weight)"
SENTENCE, STATEMENT = (normalised(line).rstrip(".)") for line in SOURCE.splitlines())


@pytest.mark.parametrize(
    ("name", "text", "quoted"),
    [
        ("card.md", "Here:\n\nThe miller's third daughter   counted every sack twice.\n", SENTENCE),
        ("card.md", "> One said: The miller's third\ndaughter counted every sack twice. And so on.", SENTENCE),
        ("card.md", "It starts so:\n\n````\nthird daughter counted every sack twice. >>>\n", SENTENCE[13:]),
        ("run.json", json.dumps({"prompt": [f"Question:\n{SOURCE}\nAnswer:"]}), SENTENCE),
        ("run.json", json.dumps({"prompt": f"def lightest(sacks):\n{SOURCE[54:]}"}), STATEMENT),
        ("report.html", "<td>The miller&#x27;s third daughter counted every sack twice.</td>", SENTENCE),
        ("prompts.py", 'FIRST = (\n    "The miller\'s third "\n    "daughter counted every sack twice."\n)', SENTENCE),
        ("sort.py", f"def lightest(sacks):\n{SOURCE[54:]}\n", STATEMENT),
    ],
)
def test_the_finder_finds_what_was_planted(name: str, text: str, quoted: str) -> None:
    found = quotations({name: text, "own.md": "Nothing in this file was taken from anywhere else at all."}, [SOURCE])
    assert set(found) == {name}
    assert quoted in found[name]


def test_the_finder_leaves_own_and_short_lines() -> None:
    own = {
        "own.md": "The miller's third daughter counted.\n" + "-" * 60,
        "own.py": "def lightest(sacks):\n    return min(sacks, key=weight)\n",
    }
    assert quotations(own, [SOURCE, "-" * 60, "def lightest(sacks):"]) == {}


def test_data_is_read_from_records_and_books(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(json.dumps({"turns": ["One.", {"code": SOURCE}], "id": 3}) + "\n")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("It was a book.", encoding="utf-8")
    assert data_texts(tmp_path) == ["One.", SOURCE, "It was a book."]
