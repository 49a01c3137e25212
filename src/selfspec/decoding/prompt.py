"""Reads chunks of prompts into their caches, several in one forward, and chooses the first tokens."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from selfspec.decoding.draft import Proposal
from selfspec.decoding.events import Event, Failed, Finished, Prefilled
from selfspec.decoding.prompt_scores import score_prompt
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.verification import judge, not_finite
from selfspec.model.forward import Forward
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.runtimes.verifying import VerifiedRows
from selfspec.sampling.tree import EMPTY_TREE


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt to run: the first ones whose keys and values are not computed yet.

    Attributes:
        sequence: whose prompt it is.
        start: the first of them; as many are in the cache.
        end: the one after the last of them; see ``chunks.Chunks`` for where a chunk may end.
    """

    sequence: Sequence
    start: int
    end: int

    def __post_init__(self) -> None:
        assert self.start == self.sequence.cache.length
        assert self.start < self.end <= self.sequence.prompt_length

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.start

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt is read with it."""
        return self.end == self.sequence.prompt_length


def read_chunks(target: Target, chunks: Many[Chunk]) -> list[Event]:
    """Runs the next tokens of prompts through the model, in one forward.

    Args:
        target: the model.
        chunks: at least one, of different sequences. Several only where rows do not depend on each other
            (``Target.independent_rows``), and of sequences whose method asks for no states of the prompt.

    Returns:
        For each prompt that is read to its end: that it is, and whether the first token ended the output; or that its
        sequence failed.

    Raises:
        Exception: the forward failed; nothing was committed.
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
        sequence.output.prompt_logprobs += score_prompt(target, states[: len(scored)], scored, alternatives)
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
