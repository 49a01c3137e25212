"""Reading prompts: how they are cut into chunks, which chunks share a forward, and the first token of the output."""

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from selfspec.decoding.draft import Proposal
from selfspec.decoding.output import token_logprobs
from selfspec.decoding.prefix_cache import CacheMemory
from selfspec.decoding.request import Event, Failed, Finished, Prefilled, Sequence
from selfspec.decoding.verification import judge, not_finite
from selfspec.model.forward import Forward
from selfspec.model.ranks import is_lost_rank
from selfspec.runtimes.chain import VerifiedRows
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import EMPTY_TREE
from selfspec.timing import wait_for
from selfspec.types import PhaseClock, TokenLogprobs

_FEWEST_ROWS = 64
_CPU_CHUNK = 256
_CHUNK = 1024
_FEWEST_TOKENS = 16
_FIRST_TOKENS = 64
_SMOOTHING = 0.5

MOST_ROWS = 128
"""Most rows of a forward with chunks of several prompts. With more, a row is no cheaper, and all would wait longer."""

FORWARD_ROWS = 16
"""Rows of a large forward that take about as long as a forward of one row takes.

A prompt waits for another one if they share at least this many leading tokens.
"""

MOST_LOGITS_BYTES = 2**26
"""Of logits in float32 at a time, where a prompt is scored. A part has at least one row, even if that takes more."""


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of a prompt may end: ``longest`` is their most tokens.

    They end at multiples of ``grain``, which is 1 or ``longest``, or with the prompt.
    """

    longest: int
    grain: int

    def end(self, start: int, length: int, most: int) -> int:
        """Where the chunk ends that begins at ``start``, in a prompt of ``length`` tokens.

        At most ``most`` tokens are wanted, at least 1; a chunk may have more, up to ``grain``.
        """
        end = start + max(1, min(most, self.longest))
        return min(length, max(start + self.grain, end // self.grain * self.grain))


def chunks_of(target: Target, longest: int | None = None) -> Chunks:
    """The chunks in which a model's prompts are read.

    Where rows do not depend on each other, a prompt has the same keys and values however it is cut. In float32 they
    differ by rounding that no text shows, as those of a verification do, unless they have 8 bits, where it may change
    a code. Elsewhere the cuts are the same for every request, so that a prompt is computed alike alone, beside others,
    and after a beginning that was found in a prefix cache.

    If ``longest`` is not given: on a CPU as many rows as do not depend on each other, where these are as fast as more,
    else 256, since a chunk takes long; 1024 elsewhere.
    """
    on_cpu = target.device.type == "cpu"
    independent = target.independent_rows if on_cpu and target.independent_rows >= _FEWEST_ROWS else 0
    if longest is None:
        longest = _CPU_CHUNK if on_cpu else _CHUNK
        longest = min(independent, _CHUNK) if independent else longest
    is_free = longest <= independent or (target.dtype == torch.float32 and target.cache_bits is None)
    return Chunks(longest, 1 if is_free else longest)


class ReadingPace:
    """How much of prompts a step reads, so that outputs that are being written do not wait long for it.

    ``most_seconds`` is the longest time for reading in a step while outputs are written, ``None`` for any time. A chunk
    that cannot be made shorter may take longer, and so may the first chunks, from which the speed is learned: apart for
    prompts that are scored, whose tokens all go through the LM head.
    """

    def __init__(self, most_seconds: float | None) -> None:
        self._most_seconds = most_seconds
        self._per_token: dict[bool, float] = {}

    @property
    def is_bounded(self) -> bool:
        """Whether times matter."""
        return self._most_seconds is not None

    def tokens(self, writing: bool, scored: bool = False) -> float:
        """Tokens to read in the next step, depending on whether outputs are being written."""
        if self._most_seconds is None or not writing:
            return math.inf
        if scored not in self._per_token:
            return _FIRST_TOKENS
        return max(_FEWEST_TOKENS, int(self._most_seconds / self._per_token[scored]))

    def note(self, tokens: int, seconds: float, scored: bool = False) -> None:
        """Measures what was read. Later tokens of a prompt take longer, since they see more."""
        if tokens >= _FEWEST_TOKENS:  # fewer take about as long as that many
            now = seconds / tokens
            before = self._per_token.get(scored, now)
            self._per_token[scored] = max(now, _SMOOTHING * now + (1 - _SMOOTHING) * before)


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


@torch.inference_mode()
def read_prompts(target: Target, chunks: Many[Chunk]) -> list[Event]:
    """``read_chunks``; if it raises, each chunk is read by itself, so that a sequence that fails ends alone."""
    try:
        return read_chunks(target, chunks)
    except Exception as error:  # raised before anything was committed
        if len(chunks) == 1 or is_lost_rank(error):
            return [Failed.by(chunk.sequence.request, error) for chunk in chunks]
    return [event for chunk in chunks for event in read_prompts(target, [chunk])]


def read_chunks(target: Target, chunks: Many[Chunk]) -> list[Event]:
    """Runs the next tokens of prompts through the model, in one forward. If it raises, nothing was committed.

    The chunks are of different sequences: several only where rows do not depend on each other
    (``Target.independent_rows``), and of sequences whose method asks for no states of the prompt.
    """
    states = torch.split(_run(target, chunks), [chunk.rows for chunk in chunks])
    ending = [rows[-1:] for chunk, rows in zip(chunks, states, strict=True) if chunk.ends_prompt]
    scored = iter(target.score(torch.cat(ending), 1).split([1] * len(ending)) if ending else ())
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
    last_rows = _kept_states(chunks[0])
    assert len(chunks) == 1 or not any(chunk.sequence.prompt_states for chunk in chunks)
    forward = Forward.join([target.lay_out(chunk.sequence.state, chunk.rows, settled=True) for chunk in chunks])
    tokens = torch.cat([chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks])
    return target.run(
        target.embed(tokens, forward), range(target.sublayer_count), forward, last_rows=last_rows
    ).hidden_states


def _kept_states(chunk: Chunk) -> dict[int, torch.Tensor]:
    """Where the states of the chunk's last rows go that the method asked for, by sublayer."""
    kept = chunk.sequence.prompt_states
    first = chunk.sequence.prompt_length - min((len(states) for states in kept.values()), default=0)
    rows = slice(max(0, chunk.start - first), max(0, chunk.end - first))
    return {index: states[rows] for index, states in kept.items()}


def _conclude(target: Target, chunk: Chunk, states: torch.Tensor, logits: Logits | None) -> list[Event]:
    """Keeps the rows of a chunk; chooses the first token from the logits of the last one, if the prompt is read."""
    sequence, request = chunk.sequence, chunk.sequence.request
    sequence.cache.commit(range(chunk.rows))
    if (alternatives := request.prompt_logprobs) is not None:
        scored = request.prompt_ids[chunk.start + 1 : chunk.end + 1]
        sequence.output.prompt_logprobs += _score_prompt(target, states[: len(scored)], scored, alternatives)
    if logits is None:
        return []
    empty = Proposal(sequence.no_tokens, EMPTY_TREE)
    (verified,) = judge([sequence], [empty], [VerifiedRows(logits, {})], PhaseClock())
    if verified is None:
        return [Failed(request, not_finite(sequence))]
    if request.max_new_tokens:
        sequence.commit(verified.acceptance, logits, prefill=True)
    else:
        sequence.output.end_without_tokens()
    return [Prefilled(request), Finished(request)] if sequence.finished else [Prefilled(request)]


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


class PromptReader:
    """Reads prompts, those that were not read for longest first.

    Chunks of several prompts share a forward where rows do not depend on each other, so that each has the bits that it
    has alone. Prompts that begin alike read what they have in common once.

    ``memory`` has keys and values of earlier texts; ``pace`` limits how much a step reads.
    """

    def __init__(self, target: Target, chunks: Chunks, memory: CacheMemory, pace: ReadingPace) -> None:
        self._target = target
        self._chunks = chunks
        self._memory = memory
        self._pace = pace

    def read(self, unread: Iterable[Sequence], *, step: int, writing: bool, held: int) -> list[Event]:
        """Reads parts of prompts, which are all scored or none; ``held`` is the bytes of all sequences.

        ``writing`` is whether outputs are written.
        """
        waiting = sorted(unread, key=lambda each: each.last_read)
        scored = bool(waiting) and _is_scored(waiting[0])
        waiting = [each for each in waiting if _is_scored(each) == scored]
        most = self._pace.tokens(writing, scored)
        left = self._chunks.longest if math.isinf(most) else int(most)
        events: list[Event] = []
        began, tokens = time.perf_counter(), 0
        while waiting and left - tokens >= (FORWARD_ROWS if tokens else 1):
            chunks = self._next_forward(waiting, left - tokens)
            tokens += sum(chunk.rows for chunk in chunks)
            happened = read_prompts(self._target, chunks)
            failed = {event.request for event in happened if isinstance(event, Failed)}
            for chunk in chunks:
                waiting.remove(chunk.sequence)
                chunk.sequence.last_read = step
                if chunk.sequence.request not in failed:
                    self._memory.keep(chunk.sequence, held, chunk.rows)
            events += happened
        if self._pace.is_bounded:
            wait_for(self._target.device)
        self._pace.note(tokens, time.perf_counter() - began, scored)
        return events

    def _next_forward(self, waiting: Many[Sequence], most: int) -> list[Chunk]:
        """The chunks to read next, of at most about ``most`` tokens: the first prompt's, and others that may join."""
        chunks: list[Chunk] = []
        rows = 0
        for sequence in waiting:
            if chunks and (rows >= min(most, MOST_ROWS) or not self._may_join(sequence)):
                continue
            self._memory.fill(sequence)
            start, length = sequence.cache.length, sequence.prompt_length
            chunk = Chunk(sequence, start, self._chunks.end(start, length, most))
            if chunks and not self._fits(chunk, chunks, min(most, MOST_ROWS) - rows):
                continue
            chunks.append(chunk)
            rows += chunk.rows
            if not self._may_join(sequence):
                break
        return chunks

    def _may_join(self, sequence: Sequence) -> bool:
        return self._target.independent_rows > 0 and not sequence.prompt_states

    def _fits(self, chunk: Chunk, chunks: Iterable[Chunk], room: int) -> bool:
        """Whether a chunk goes into the forward of others now; otherwise a later forward reads it."""
        if chunk.rows > min(room, self._target.independent_rows):
            return False
        return self._memory.prefixes is None or not any(_begin_alike(chunk, other) for other in chunks)


def _is_scored(sequence: Sequence) -> bool:
    return sequence.request.prompt_logprobs is not None


def _begin_alike(chunk: Chunk, other: Chunk) -> bool:
    """Whether much of a chunk need not be read once another one is."""
    shared = chunk.start + FORWARD_ROWS
    request, before = chunk.sequence.request, other.sequence.request
    if shared > min(chunk.sequence.reusable, other.end) or request.cache_salt != before.cache_salt:
        return False
    return request.prompt_ids[:shared] == before.prompt_ids[:shared]
