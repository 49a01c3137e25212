"""A text in a model's cache, with what a method learns of it before the first round, and no output to write."""

from collections.abc import Sequence

from transformers import LogitsProcessorList

from selfspec.decoding.loop import prefill
from selfspec.decoding.request import Request
from selfspec.methods.base import Needs, Prefill
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy

_CHUNK = 1024


def reading_request(target: Target, token_ids: Sequence[int], probe_rows: int) -> Request:
    """A request that is there for its prompt to be read, with room for the token behind it and one more.

    Args:
        target: the model.
        token_ids: the prompt, at least one token.
        probe_rows: cache slots for rows behind the prompt.
    """
    return Request(
        target,
        token_ids,
        max_new_tokens=2,
        rule=Greedy(),
        processor=ScoreProcessor(LogitsProcessorList()),
        probe_rows=probe_rows,
    )


def prefill_text(target: Target, token_ids: Sequence[int], needs: Needs) -> Prefill:
    """Runs a text through the target, as a request with this prompt begins.

    Args:
        target: the model.
        token_ids: the text, at least one token.
        needs: which states to keep, and how many rows the probe has room for.

    Returns:
        What a method would be given to begin with.
    """
    return prefill(target, reading_request(target, token_ids, needs.probe_rows), _CHUNK, needs)
