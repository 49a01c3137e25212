"""Guesses of what a layer draft drafts next, so that it drafts several tokens in one forward.

A token draft is right about what a layer draft drafts more often than about what the target writes, and a row of a
draft's forward costs less than a row of the verification. So tokens that are found may be verified by a cheap draft,
whose output the target verifies (a cascade: Chen et al. 2024, "Cascade Speculative Drafting").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Guess: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Guesses how the text goes on after the context and the tokens drafted so far, which it is given."""


@dataclass(frozen=True)
class Continuation:
    """How a drafter that finds tokens expects the text to go on.

    Attributes:
        token_ids: the expected tokens, in order; empty where it expects nothing.
        match_length: how many of the last tokens it found them by.
    """

    token_ids: tuple[int, ...] = ()
    match_length: int = 0
