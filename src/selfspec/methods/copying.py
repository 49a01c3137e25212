"""Drafts that copy the continuation of an earlier occurrence. Shared by ``prompt-lookup`` and ``suffix``."""

from collections.abc import Sequence

from selfspec.decoding.draft import Draft, NoDraft, TokenDraft
from selfspec.sampling.tree import TokenTree


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """What followed an earlier occurrence.

    Where the text ends before ``count`` tokens are found, the copy goes on with itself: the suffix and its earlier
    occurrence then lie so close that the text is about to repeat with their distance as its period.

    Args:
        tokens: prompt and output.
        start: position behind the earlier occurrence, before the end of the text.
        count: tokens wanted, at least 1.

    Returns:
        ``count`` token ids.
    """
    piece = list(tokens[start : start + count])
    repeats = -(-count // len(piece))
    return (piece * repeats)[:count]


def chain_draft(tokens: Sequence[int]) -> Draft:
    """A draft of tokens one after the other, or none where there are none."""
    return TokenDraft(tuple(tokens), TokenTree.chain(len(tokens))) if tokens else NoDraft()
