"""The one driver of requests: ``Engine`` runs its steps in place, ``AsyncEngine`` in a thread."""

import math
import time
from collections import deque
from collections.abc import Iterable

from selfspec.decoding.prefix_cache import CacheMemory
from selfspec.decoding.prompt import Chunks, PromptReader, ReadingPace
from selfspec.decoding.request import Advanced, Event, Failed, Finished, Prefilled, Request, Sequence, Started
from selfspec.decoding.round import try_round
from selfspec.errors import RequestFailedError, first_line
from selfspec.limits import is_out_of_memory
from selfspec.memory import PeakMemory
from selfspec.runtimes.target import Target

_RECALL_SECONDS = 0.03
"""Seconds of a step, while outputs are written, after which no further part of what is known of prompts is taken over.

A part takes some milliseconds: with a round after each of them, a long conversation would wait for many rounds.
"""


class Scheduler:
    """Decodes many requests, several of them at a time.

    Requests are admitted in the order of their arrival, as places and memory allow. Prompts that are being read take
    turns; the sequences whose prompts are read, and for whose next tokens there is memory, run their rounds together.
    What happens to a request is written into it, and its listener is called. Keys and values of those that end are
    copied into the prefix cache in parts, over several steps; until then no request is admitted, since the next one may
    begin with their texts. Then their memory is given back, in parts, too.

    Without ``memory`` any number of requests fits; without ``pace`` a step reads about a chunk.
    """

    def __init__(
        self,
        target: Target,
        *,
        chunks: Chunks,
        max_batch: int,
        memory: CacheMemory | None = None,
        pace: ReadingPace | None = None,
    ) -> None:
        self._target = target
        self._max_batch = max_batch
        self._memory = memory or CacheMemory(target, chunks.grain)
        self._prompts = PromptReader(target, chunks, self._memory, pace or ReadingPace(None))
        self._peak = PeakMemory(target.device)
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._ended: deque[Sequence] = deque()  # those that are not kept yet
        self._leaving: deque[Sequence] = deque()  # those whose memory is not given back yet, and that are kept
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs, or one that has ended still has memory."""
        return bool(self._waiting or self._running or self.leaving)

    @property
    def leaving(self) -> bool:
        """Whether the next step begins with keeping what has ended, or with giving its memory back."""
        return bool(self._ended or self._leaving)

    @property
    def reading(self) -> bool:
        """Whether the next step admits requests or reads prompts, as far as is known before it."""
        return bool(self._waiting) or any(sequence.unread for sequence in self._running)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Bytes that the requests that run hold."""
        return sum(sequence.bytes for sequence in list(self._running))

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drops a request that waits or runs; its memory is given back when it is kept."""
        request.ended_at = request.ended_at or time.perf_counter()
        self._waiting = deque(each for each in self._waiting if each is not request)
        self._ended += (each for each in self._running if each.request is request)
        self._running = [each for each in self._running if each.request is not request]

    def fail_all(self, error: Exception) -> list[Event]:
        """Ends all requests with an error, and gives back all memory."""
        events: list[Event] = [Failed(request, error) for request in (*self._waiting, *self._requests_running())]
        self._waiting.clear()
        self._note(events)
        self._ended.clear()
        self._leaving.clear()
        return events

    def step(self) -> list[Event]:
        """Keeps what has ended, admits the requests that fit, runs one step, and drops those that finished or failed.

        An exception that is not of one request ends all that run; those that wait go on.
        """
        events: list[Event] = []
        try:
            self._step(events)
        except Exception as error:  # what has happened to requests before counts
            events += [Failed.by(request, _of_engine(error)) for request in self._requests_running()]
        self._note(events)
        return events

    def _step(self, events: list[Event]) -> None:
        writes = any(not sequence.unread for sequence in self._running)
        self.keep_ended(at_once=not writes)
        self._memory.give_back(self._leaving)
        if not self._ended:
            self._admit(events, at_once=not writes)
        writing = [sequence for sequence in self._memory.grow(self._running) if not sequence.unread]
        unread = [sequence for sequence in self._running if sequence.unread]
        known = self._recall(unread, writing=bool(writing))
        events += self._prompts.read(known, step=self._steps, writing=bool(writing), held=self.held)
        events += try_round(self._target, writing, alone=not unread) if writing else []
        self._steps += 1
        finished = {event.request for event in events if isinstance(event, Finished)}
        self._ended += (sequence for sequence in self._running if sequence.request in finished)
        for event in events:
            if isinstance(event, Prefilled):
                self._memory.count(event.request)

    def keep_ended(self, *, at_once: bool = True) -> None:
        """Copies what has ended into the prefix cache; if not ``at_once``, no more than a part."""
        left = part = self._memory.part
        while self._ended and left:
            sequence = self._ended.popleft()  # first, so that one that cannot be kept is not tried for ever
            copied = self._memory.keep(sequence, self.held, left)
            if copied == left:
                self._ended.appendleft(sequence)
            else:
                self._leaving.append(sequence)
                if sequence.finished:
                    self._memory.write(sequence)
            left = part if at_once else left - copied

    def _recall(self, unread: Iterable[Sequence], *, writing: bool) -> list[Sequence]:
        """Takes over what is known of prompts, in parts, and of them a few in a step while outputs are written.

        Returns the prompts of which no more is known.
        """
        known: list[Sequence] = []
        began = time.perf_counter()
        for sequence in unread:
            while self._memory.recall(sequence, self.held):
                if writing and time.perf_counter() - began >= _RECALL_SECONDS:
                    return known
            known.append(sequence)
        return known

    def _admit(self, events: list[Event], *, at_once: bool) -> None:
        """Admits requests; if not ``at_once``, the prefix cache gives up no more than a part of its memory for them."""
        left = math.inf if at_once else self._memory.part_bytes
        while self._waiting and len(self._running) < self._max_batch:
            request, admitted = self._waiting[0], time.perf_counter()
            if not self._leaving:  # their memory comes first
                left -= self._memory.make_room(request, self._running, left)
            if not self._memory.admits(request, self._running, sum(each.bytes for each in self._leaving)):
                break
            self._waiting.popleft()
            try:
                self._memory.check(request)
                sequence = Sequence(self._target, request)
            except Exception as error:
                events.append(Failed.by(request, error))
                continue
            sequence.last_read = self._steps
            self._running.append(sequence)
            events.append(Started(request, at=admitted))

    def _note(self, events: Iterable[Event]) -> None:
        """Writes into requests what happened to them, calls their listeners, and drops those that ended."""
        for event in events:
            request = event.request
            if request.ended:
                continue
            match event:
                case Started():
                    request.started_at = event.at
                case Prefilled():
                    request.first_token_at = event.at
                case Advanced():
                    request.rounds.append(event.round)
                case Finished():
                    request.ended_at, request.peak_memory_bytes = event.at, self._peak.peak_bytes()
                case Failed():
                    request.ended_at, request.error = event.at, event.error
            if request.listener is not None:
                request.listener()
        ended = [sequence for sequence in self._running if sequence.request.ended]
        self._leaving += (sequence for sequence in ended if sequence not in self._ended)  # they failed
        self._running = [sequence for sequence in self._running if not sequence.request.ended]

    def _requests_running(self) -> list[Request]:
        return [sequence.request for sequence in self._running]


def _of_engine(error: Exception) -> Exception:
    """The error of a request that failed because a whole step did."""
    if is_out_of_memory(error):
        return error
    failed = RequestFailedError(f"the engine failed: {first_line(error)}")
    failed.__cause__ = error
    return failed
