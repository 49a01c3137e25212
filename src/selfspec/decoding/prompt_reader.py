"""Which parts of prompts a step reads, and which of them share a forward."""

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many

from selfspec.decoding.cache_memory import CacheMemory
from selfspec.decoding.chunks import Chunks, Pace
from selfspec.decoding.events import Event, Failed
from selfspec.decoding.prompt import Chunk
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.step import read
from selfspec.runtimes.target import Target
from selfspec.timing import wait_for

MOST_ROWS = 128
"""Most rows of a forward with chunks of several prompts. With more, a row is no cheaper, and all would wait longer."""

FORWARD_ROWS = 16
"""Rows of a large forward that take about as long as a forward of one row takes.

A prompt waits for another one if they share at least this many leading tokens.
"""


class PromptReader:
    """Reads prompts, those that were not read for longest first.

    Chunks of several prompts share a forward where rows do not depend on each other, so that each has the bits that it
    has alone. Prompts that begin alike read what they have in common once.

    ``memory`` has keys and values of earlier texts; ``pace`` limits how much a step reads.
    """

    def __init__(self, target: Target, chunks: Chunks, memory: CacheMemory, pace: Pace) -> None:
        self._target = target
        self._chunks = chunks
        self._memory = memory
        self._pace = pace

    def read(self, unread: Iterable[Sequence], *, step: int, writing: bool, held: int) -> list[Event]:
        """Reads parts of prompts; ``held`` is the bytes of all sequences, ``writing`` whether outputs are written."""
        most = self._pace.tokens(writing)
        left = self._chunks.longest if math.isinf(most) else int(most)
        waiting = sorted(unread, key=lambda each: each.last_read)
        events: list[Event] = []
        began, tokens = time.perf_counter(), 0
        while waiting and left - tokens >= (FORWARD_ROWS if tokens else 1):
            chunks = self._next_forward(waiting, left - tokens)
            tokens += sum(chunk.rows for chunk in chunks)
            happened = read(self._target, chunks)
            failed = {event.request for event in happened if isinstance(event, Failed)}
            for chunk in chunks:
                waiting.remove(chunk.sequence)
                chunk.sequence.last_read = step
                if chunk.sequence.request not in failed:
                    self._memory.keep(chunk.sequence, held)
            events += happened
        if self._pace.is_bounded:
            wait_for(self._target.device)
        self._pace.note(tokens, time.perf_counter() - began)
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


def _begin_alike(chunk: Chunk, other: Chunk) -> bool:
    """Whether much of a chunk need not be read once another one is."""
    shared = chunk.start + FORWARD_ROWS
    if shared > min(chunk.sequence.reusable, other.end):
        return False
    return chunk.sequence.request.prompt_ids[:shared] == other.sequence.request.prompt_ids[:shared]
