"""Writes the figures of all pages from the results: ``python benchmarks/pages.py``.

Every measured figure on a page is written by a script from a results file of a clean commit: in tables between marks
(``page_figures/blocks.py``), or singly in a sentence (``page_figures/inline.py``). The tests fail where a page differs
from what this writes, and where it has another measured figure (``page_figures/measured.py``).

``--check`` writes nothing and lists both; ``--missing`` lists tables without results and the commands for them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from page_figures.blocks import BLOCKS, write_blocks
from page_figures.inline import fill
from page_figures.measured import unaccounted
from page_figures.results import FOLDER, present, read

ROOT = Path(__file__).parents[1]
GENERATED = ("leaderboard.md", "experiments.md", "tables.md", "clients.md")
"""Pages of ``docs`` that are written as a whole by scripts of their own, from results."""
PAGES = tuple(
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "lab" / "README.md")
    if page.name not in GENERATED
)


def written(page: Path) -> str:
    """A page with its figures as the results have them."""
    link = Path(os.path.relpath(FOLDER, page.parent)).as_posix()
    return fill(write_blocks(page.read_text(encoding="utf-8"), link), read)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pages, or lists what is wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args(arguments)
    if options.missing:
        for name, block in BLOCKS.items():
            absent = sorted(set(block.files) - set(present(block.files)))
            if absent:
                print(f"{name}: {', '.join(absent)}\n    {block.command}")
        return
    wrong = []
    for page in PAGES:
        text = written(page)
        if options.check:
            wrong += [f"{page.relative_to(ROOT)}: not as the results have it"] * (text != page.read_text("utf-8"))
            wrong += [f"{page.relative_to(ROOT)}: {found}" for found in unaccounted(text)]
        else:
            page.write_text(text, encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
