"""A text in a model's cache, and what a method is given at its end."""

from collections.abc import Sequence

from selfspec.methods.api import Needs, Prefill
from selfspec.methods.testing import read_text
from selfspec_lab.measuring import Target


def prefill_text(target: Target, token_ids: Sequence[int], needs: Needs) -> Prefill:
    """Runs a text through the target as the prompt of a request.

    Args:
        target: the model.
        token_ids: the text, at least one token.
        needs: which states to keep, and how many rows the probe has room for.

    Returns:
        What ``Method.begin`` takes.
    """
    return read_text(target, token_ids, needs)[1]
