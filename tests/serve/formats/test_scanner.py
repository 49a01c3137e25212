"""What a scanner holds back costs no more than its length, however many pieces it comes in."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import make_tokenizer
from selfspec.serve.formats.marks import Marks
from selfspec.serve.formats.scanner import Scanner, overlap

PIECES, SECONDS = 40_000, 0.5
"""Pieces of an answer, and processor time that a hundredth of is enough for."""


def overlap_by_definition(text: str, searched: str) -> int:
    lengths = range(min(len(text), len(searched) - 1), 0, -1)
    return next((length for length in lengths if searched.startswith(text[-length:])), 0)


@given(st.text("ab", max_size=9), st.text("ab", max_size=7))
def test_the_longest_end_that_a_text_begins_with_is_found(text: str, searched: str) -> None:
    assert overlap(text, searched) == overlap_by_definition(text, searched)


def test_a_text_that_ends_like_no_stop_string_is_searched_once() -> None:
    began = time.thread_time()
    for _ in range(PIECES):
        assert overlap("a" * 255, "b" * 256) == 0
    assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize("kind", ["text", "reasoning"])
def test_whitespace_that_is_held_back_is_copied_once(kind: str) -> None:
    """A client can have an answer of nothing else, by a bias or a regular expression."""
    scan = Scanner(Marks(make_tokenizer()), {})
    add: Any = getattr(scan, kind)
    began = time.thread_time()
    for _ in range(PIECES):
        add(" " * 16)
    assert time.thread_time() - began < SECONDS
    assert not scan.parts
    add("end ")
    [part] = scan.parts
    assert (part.kind, part.text) == (kind, "end" if kind == "reasoning" else " " * 16 * PIECES + "end ")
