"""Renders a report in Markdown."""

from collections.abc import Iterable, Mapping
from typing import Any

from selfspec_lab.bench.report import tables, words
from selfspec_lab.bench.report.tables import Cell, Table

_SPECIAL = str.maketrans({**{char: f"\\{char}" for char in "\\`*_|[]"}, "<": "&lt;", ">": "&gt;"})


def to_markdown(summary: Mapping[str, Any]) -> str:
    """Renders the report.

    Args:
        summary: as ``summarise`` returns it.

    Returns:
        Markdown, ending with a newline.
    """
    notes, settings = words.notes(summary), tables.settings_table(summary)
    parts = [
        f"# {escape(words.title(summary))}",
        bullets(f"**{name}**: {escape(value)}" for name, value in words.facts(summary)),
        *([bullets(map(escape, notes))] if notes else []),
        "## Overall",
        table_text(tables.main_table(summary)),
        "## Speedup by category",
        table_text(tables.category_table(summary)),
        "## Drafts",
        table_text(tables.draft_table(summary)),
        "## Time and memory",
        table_text(tables.cost_table(summary)),
        *(["## Settings", table_text(settings)] if settings.rows else []),
        "## How to read it",
        bullets(f"**{term}**: {meaning}" for term, meaning in words.HOW_TO_READ),
    ]
    return "\n\n".join(parts) + "\n"


def table_text(table: Table) -> str:
    """Renders a table; marked cells are bold."""
    lines = [[escape(each) for each in table.header], ["---"] * len(table.header)]
    lines += [[_cell(each) for each in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Renders a list."""
    return "\n".join(f"- {line}" for line in lines)


def escape(text: str) -> str:
    """Escapes Markdown and HTML and joins lines."""
    return " ".join(text.replace("&", "&amp;").translate(_SPECIAL).split())


def _cell(cell: Cell) -> str:
    return f"**{escape(cell.text)}**" if cell.marked else escape(cell.text)
