"""Which numbers of a page are measured figures, and which of them no results file accounts for.

A measured figure is a number with a decimal point, or any number before a unit: ``1.85``, ``41 tokens/s``, ``3 %``,
``20 seconds``. It has to stand between the marks of a block, or before the mark of a single figure (``blocks.py``,
``inline.py``). These need none:

- code, links and headings;
- versions, sizes of models and places in papers, by the word beside them: Python 3.10, 1.5 billion, section 3.1;
- a paragraph, list or table with ``<!-- not measured: KIND -->`` in it, or alone in the paragraph before it, and a
  section that begins with one alone. The kinds:
  ``settings`` (defaults, limits and constants of the code), ``computed`` (from sizes of models), ``printed`` (in a
  paper that is named), ``tested`` (a bound that a test asserts), ``versions``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from page_figures.inline import MARK as INLINE

KINDS = ("settings", "computed", "printed", "tested", "versions")

_TIME = r"[mµ]?s\b|milliseconds?|seconds?|minutes?|hours?"
_UNIT = rf"(?:tokens/s|tokens (?:a|per) second|%|×(?!\d)|times\b|[kKMGT]i?B\b|{_TIME})"
_NUMBER = r"(?<![\w.,\-^=/])\d[\d,]*(?:\.\d+)?(?!\d|\.\d|,\d)"
_FIGURE = re.compile(rf"{_NUMBER}(?=\s?{_UNIT})|(?<![\w.\-^=/])\d[\d,]*\.\d+(?![\w.]*\d)")
_NAMES = (
    *("Python", "torch", "transformers", "torchao", "bitsandbytes", "vLLM", "Linux", "version", "selfspec"),
    *("Llama", "ERNIE", "arXiv", "[Ss]ections?", "[Ee]quations?", "[Tt]ables?", "[Ff]igures?", "§"),
)
_PLACE = rf"(?:{'|'.join(_NAMES)})(?: ≥)?\s?\d[\d.]*(?:(?:,| and| to) \d[\d.]*)*"
_VERSION = re.compile(rf"{_PLACE}|\d[\d.]* (?:billion|million)")
_EXEMPT = re.compile(rf"<!-- not measured: (?:{'|'.join(KINDS)})\b.*?-->", re.DOTALL)
_HIDDEN = (
    re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE),
    re.compile(r"^    .*$", re.MULTILINE),
    re.compile(r"<!--[^>]*? writes this[^>]*?-->.*?<!-- up to here -->", re.DOTALL),
    re.compile(r"(?<=\])\([^)]*\)"),
    re.compile(r"(`+)[^`].*?\1", re.DOTALL),
    re.compile(r"<https?:[^>]*>"),
)


def unaccounted(page: str) -> list[str]:
    """The measured figures of a page that have no mark, each with the words around it.

    Args:
        page: Markdown.
    """
    return [found for block in _blocks(page) for found in _figures(block)]


def _blocks(page: str) -> Iterator[str]:
    """The paragraphs, lists and tables that are not exempt, without code, links, headings and generated text."""
    for pattern in _HIDDEN[:3]:
        page = pattern.sub("", page)
    for section in re.split(r"^#+ .*$", page, flags=re.MULTILINE):
        blocks = [text for block in re.split(r"\n\s*\n", section) if (text := block.strip())]
        alone = [_EXEMPT.fullmatch(block) is not None for block in blocks]
        if alone[:1] == [True]:
            continue
        for block, exempt in zip(blocks, [False, *alone], strict=False):
            if not exempt and not _EXEMPT.search(block):
                yield block


def _figures(block: str) -> Iterator[str]:
    text = INLINE.sub("", block)
    for pattern in _HIDDEN[3:]:
        text = pattern.sub("", text)
    text = re.sub(r"<!--.*?-->", "", _VERSION.sub("", text), flags=re.DOTALL)
    for match in _FIGURE.finditer(text):
        around = text[max(0, match.start() - 30) : match.end() + 20]
        yield f"{match.group()} in '{' '.join(around.split())}'"
