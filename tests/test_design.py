"""The page on the design names files and definitions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("design.md", "tests.md"))
DEFINITIONS = sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", PAGE)))
PLACES = sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)))


@pytest.mark.parametrize(("file", "name"), DEFINITIONS)
def test_a_named_definition_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "src" / "selfspec" / file).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert name in defined


@pytest.mark.parametrize("place", PLACES)
def test_a_named_file_exists(place: str) -> None:
    assert (ROOT / place).exists() or (ROOT / "src" / "selfspec" / place).exists()


def test_the_page_walks_through_the_round() -> None:
    assert ("decoding/round.py", "run_round") in DEFINITIONS
    assert len(DEFINITIONS) > 30
    assert len(PLACES) > 20
