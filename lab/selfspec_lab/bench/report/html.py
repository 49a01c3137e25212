"""Renders a report as one self-contained HTML file."""

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from selfspec_lab.bench.report import tables, words
from selfspec_lab.bench.report.styles import SPEEDUP, Picture
from selfspec_lab.bench.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 1.5rem;
  max-width: 1180px; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
.notes { border-left: 4px solid #d55e00; background: #fff6ef; padding: .6rem 1rem .6rem 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .24rem .42rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #333; vertical-align: bottom; white-space: normal; }
th:first-child, .words th, .words td { text-align: left; }
.words td { white-space: normal; }
tbody th { font-weight: 600; }
th:first-child { position: sticky; left: 0; background: #fff; }
td.marked { background: #ffe3cf; font-weight: 700; white-space: normal; }
td.marked::before { content: "\\26A0\\00A0"; }
figure { margin: 0; break-inside: avoid; }
img { width: 100%; height: auto; }
figcaption { color: #444; font-size: .86rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  table { font-size: 6.2pt; }
  th, td { padding: .1rem .2rem; }
  td.marked::before { content: none; }
  thead th { hyphens: auto; }
  img { width: auto; max-width: 100%; max-height: 92vh; }
  .scroll { overflow: visible; }
  h2 { break-after: avoid; }
  tr { break-inside: avoid; }
}
"""


def to_html(summary: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """Renders the report.

    Args:
        summary: as ``summarise`` returns it.
        pictures: as ``draw_pictures`` returns them.
    """
    title = html.escape(words.title(summary))
    notes, settings = words.notes(summary), tables.settings_table(summary)
    parts = [
        f"<h1>{title}</h1>",
        _definitions(words.facts(summary)),
        _notes(notes),
        "<h2>Overall</h2>",
        table_html(tables.main_table(summary)),
        *(picture_html(picture) for picture in pictures if picture.name == SPEEDUP),
        "<h2>Speedup by category in figures</h2>",
        table_html(tables.category_table(summary)),
        *(picture_html(picture) for picture in pictures if picture.name != SPEEDUP),
        "<h2>Drafts</h2>",
        table_html(tables.draft_table(summary)),
        "<h2>Time and memory</h2>",
        table_html(tables.cost_table(summary)),
        *(["<h2>Settings</h2>", table_html(settings, kind="words")] if settings.rows else []),
        "<h2>How to read it</h2>",
        _definitions(words.HOW_TO_READ),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def table_html(table: Table, *, kind: str = "figures") -> str:
    """Renders a table.

    Args:
        table: the table.
        kind: class of the element: ``figures`` or ``words``.
    """
    header = "".join(f'<th scope="col">{_breakable(each)}</th>' for each in table.header)
    rows = "\n".join(
        f'<tr><th scope="row">{html.escape(first.text)}</th>{"".join(map(_cell, rest))}</tr>'
        for first, *rest in table.rows
    )
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def picture_html(picture: Picture) -> str:
    """Renders a picture with title and caption."""
    return (
        f'<figure id="{html.escape(picture.name)}">\n<h2>{html.escape(picture.title)}</h2>\n'
        f'<img alt="{html.escape(picture.alt)}" src="{_data_address(picture.figure)}">\n'
        f"<figcaption>{html.escape(picture.caption)}</figcaption>\n</figure>"
    )


def _breakable(text: str) -> str:
    """Escapes text and allows line breaks after ``_`` and ``-``."""
    return re.sub(r"([_-])", r"\1<wbr>", html.escape(text))


def _data_address(figure: "Figure") -> str:
    """A data URL of the figure as SVG; the same figure always gives the same text."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "selfspec", "hatch.linewidth": 0.7}):
        figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{html.escape(term)}</dt><dd>{html.escape(meaning)}</dd>" for term, meaning in pairs)
    return f"<dl>\n{items}\n</dl>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return '<ul class="notes">\n' + "\n".join(f"<li>{html.escape(note)}</li>" for note in notes) + "\n</ul>"


def _cell(cell: Cell) -> str:
    return f'<td class="marked">{html.escape(cell.text)}</td>' if cell.marked else f"<td>{html.escape(cell.text)}</td>"
