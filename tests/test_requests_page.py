"""The page on requests names every parameter."""

import re
from dataclasses import fields
from pathlib import Path

from selfspec.types import SamplingParams

PAGE = (Path(__file__).parents[1] / "docs" / "requests.md").read_text(encoding="utf-8")


def test_the_table_names_the_parameters_and_no_others() -> None:
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(field.name for field in fields(SamplingParams))
