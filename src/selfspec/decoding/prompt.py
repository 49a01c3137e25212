"""Reads chunks of prompts into their caches, several in one forward, and chooses the first tokens."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from selfspec.decoding.draft import Proposal
from selfspec.decoding.events import Event, Failed, Finished, Prefilled
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.verification import judge, not_finite
from selfspec.model.forward import Forward
from selfspec.runtimes.chain import VerifiedRows
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.sampling.logprobs import token_logprobs
from selfspec.sampling.tree import EMPTY_TREE
from selfspec.types import TokenLogprobs

MOST_LOGITS_BYTES = 2**26
"""Of logits in float32 at a time, where a prompt is scored. A part has at least one row, even if that takes more."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a prompt: the first ones whose keys and values are not computed yet."""

    sequence: Sequence
    start: int
    end: int

    def __post_init__(self) -> None:
        assert self.start == self.sequence.cache.length
        assert self.start < self.end <= self.sequence.prompt_length

    @property
    def rows(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt is read with it."""
        return self.end == self.sequence.prompt_length


def read_chunks(target: Target, chunks: Many[Chunk]) -> list[Event]:
    """Runs the next tokens of prompts through the model, in one forward. If it raises, nothing was committed.

    The chunks are of different sequences: several only where rows do not depend on each other
    (``Target.independent_rows``), and of sequences whose method asks for no states of the prompt.
    """
    states = torch.split(_run(target, chunks), [chunk.rows for chunk in chunks])
    ending = [rows[-1:] for chunk, rows in zip(chunks, states, strict=True) if chunk.ends_prompt]
    scored = iter(Logits(target.logits(torch.cat(ending), 1)).split([1] * len(ending)) if ending else ())
    events: list[Event] = []
    for chunk, rows in zip(chunks, states, strict=True):
        logits = next(scored) if chunk.ends_prompt else None
        try:
            events += _conclude(target, chunk, rows, logits)
        except Exception as error:  # of its logits processors, or no memory for its log-probabilities
            events.append(Failed.by(chunk.sequence.request, error))
    return events


def _run(target: Target, chunks: Many[Chunk]) -> torch.Tensor:
    """The residual stream after the last sublayer, ``[rows, hidden]``, of all chunks one after the other."""
    copies = _kept_states(chunks[0])
    assert len(chunks) == 1 or not any(chunk.sequence.prompt_states for chunk in chunks)
    forward = Forward.join([target.lay_out(chunk.sequence.state, chunk.rows) for chunk in chunks])
    tokens = torch.cat([chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks])
    return target.run(target.embed(tokens), range(target.sublayer_count), forward, copies=copies).hidden_states


def _kept_states(chunk: Chunk) -> dict[int, torch.Tensor]:
    """Where the states of the chunk's last rows go that the method asked for, by sublayer."""
    kept = chunk.sequence.prompt_states
    first = chunk.sequence.prompt_length - min((len(states) for states in kept.values()), default=0)
    rows = slice(max(0, chunk.start - first), max(0, chunk.end - first))
    return {index: states[rows] for index, states in kept.items()}


def _conclude(target: Target, chunk: Chunk, states: torch.Tensor, logits: Logits | None) -> list[Event]:
    """Keeps the rows of a chunk; chooses the first token from the logits of the last one, if the prompt is read."""
    sequence = chunk.sequence
    sequence.cache.commit(range(chunk.rows))
    if (alternatives := sequence.request.prompt_logprobs) is not None:
        scored = sequence.request.prompt_ids[chunk.start + 1 : chunk.end + 1]
        sequence.output.prompt_logprobs += _score_prompt(target, states[: len(scored)], scored, alternatives)
    if logits is None:
        return []
    (verified,) = judge([sequence], [Proposal(sequence.no_tokens, EMPTY_TREE)], [VerifiedRows(logits, {})])
    if verified is None:
        return [Failed(sequence.request, not_finite(sequence))]
    if sequence.request.max_new_tokens:
        sequence.commit(verified.acceptance, logits, "prefill")
    else:
        sequence.output.end_without_tokens()
    return [Prefilled(sequence), Finished(sequence)] if sequence.finished else [Prefilled(sequence)]


def _score_prompt(
    target: Target, hidden_states: torch.Tensor, token_ids: Many[int], alternatives: int
) -> list[TokenLogprobs]:
    """Scores tokens ``[n]`` of a prompt; row ``i`` of the last states ``[n, hidden]`` predicts token ``i``."""
    rows = max(1, MOST_LOGITS_BYTES // (target.vocab_size * torch.float32.itemsize))
    scored: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), rows):
        part = slice(first, first + rows)
        scored += token_logprobs(target.logits(hidden_states[part]), token_ids[part], alternatives)
    return scored
