"""Every decoder-only family of transformers, by a tiny random model; the page of models says what comes of it."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from selfspec.cli.command_line import app
from selfspec_lab.families.examine import examine
from selfspec_lab.families.page import cells, generated
from selfspec_lab.families.tiny import family_names

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
LINES = [
    tuple(cell.strip() for cell in line.split("|")[1:-1])
    for line in generated(PAGE).splitlines()
    if line.startswith("|") and "---" not in line
][1:]
VERSION = generated(PAGE).split()[2].rstrip(",")


def test_the_page_names_every_family() -> None:
    if transformers.__version__ != VERSION:
        pytest.skip(f"the page was made with transformers {VERSION}")
    refused = generated(PAGE).rpartition("Refused")[2]
    missing = [
        name for name in family_names() if name not in {line[0] for line in LINES} and f"`{name}`" not in refused
    ]
    assert not missing, "selfspec families --page docs/models.md"


def test_there_are_at_least_a_hundred() -> None:
    assert len(LINES) >= 100
    assert sum(line[-2] == "yes" for line in LINES) >= 12, "families with states"
    assert sum(line[-3] == "yes" for line in LINES) >= 70, "families whose own layer can be a head"
    assert sum(bool(line[-1]) for line in LINES) >= 80, "families that are read from GGUF files"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_family_writes_what_transformers_writes(line: tuple[str, ...]) -> None:
    """Greedy, in float32: with skipped sublayers, in a batch that skips layers, and with token trees."""
    if line[0] not in family_names():
        pytest.skip(f"transformers {transformers.__version__} has no {line[0]}")
    facts = examine(line[0])
    assert facts.identical
    assert 0 < facts.accepted <= facts.drafted
    assert cells(facts) == line


def test_the_command_says_what_holds() -> None:
    ran: Any = CliRunner().invoke(app, ["families", "llama", "gpt2"])
    assert ran.exit_code == 0, ran.output
    llama, gpt2 = ran.output.splitlines()[-2:]
    assert all(word in llama for word in ("row", "native", "batches", "trees", "MTP", "GGUF `llama`"))
    assert "looking" in gpt2
    assert "native" not in gpt2
