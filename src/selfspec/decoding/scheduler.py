"""Admits requests, plays steps for those that run, and lets finished ones go."""

import time
from collections import deque

from selfspec.decoding.cache_memory import CacheMemory
from selfspec.decoding.chunks import Chunks
from selfspec.decoding.events import Event, Failed, Finished, Prefilled, Started
from selfspec.decoding.pace import Pace
from selfspec.decoding.prompt_reader import PromptReader
from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.step import play
from selfspec.runtimes.target import Target


class Scheduler:
    """Decodes many requests, several of them at a time.

    Requests are admitted in the order of their arrival, as places and memory allow. Prompts that are being read take
    turns; the sequences whose prompts are read play their rounds together.

    Args:
        target: the model.
        chunks: how prompts are cut.
        max_batch: most sequences at a time; each holds a cache for its whole length.
        memory: says what fits; any number of requests if not given.
        pace: how much of prompts a step reads; about a chunk if not given.
    """

    def __init__(
        self,
        target: Target,
        *,
        chunks: Chunks,
        max_batch: int,
        memory: CacheMemory | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._target = target
        self._max_batch = max_batch
        self._memory = memory or CacheMemory(target, chunks)
        self._prompts = PromptReader(target, chunks, self._memory, pace or Pace(None))
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Bytes that the requests that run hold."""
        return sum(sequence.bytes for sequence in list(self._running))

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drops a request, whether it waits or runs; its cache is free at once."""
        self._waiting = deque(each for each in self._waiting if each is not request)
        dropped = [each for each in self._running if each.request is request]
        self._running = [each for each in self._running if each.request is not request]
        for sequence in dropped:
            self._memory.keep(sequence, self.held)

    def drop_running(self) -> list[Request]:
        """Drops all requests that run, and returns them."""
        dropped, self._running = [each.request for each in self._running], []
        return dropped

    def step(self) -> list[Event]:
        """Admits as many requests as fit, plays one step, and drops what finished or failed.

        Returns:
            What happened.
        """
        events = self._admit()
        writing = [sequence for sequence in self._running if not sequence.unread]
        unread = [sequence for sequence in self._running if sequence.unread]
        events += self._prompts.read(unread, step=self._steps, writing=bool(writing), held=self.held)
        events += play(self._target, writing, alone=not unread) if writing else []
        self._steps += 1
        self._let_go(events)
        return events

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        while self._waiting and len(self._running) < self._max_batch:
            request, admitted = self._waiting[0], time.perf_counter()
            if not self._memory.admits(request, self.held):
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
            events.append(Started(sequence, admitted))
        return events

    def _let_go(self, events: list[Event]) -> None:
        failed = {id(event.request) for event in events if isinstance(event, Failed)}
        self._running = [each for each in self._running if not each.finished and id(each.request) not in failed]
        for event in events:
            if isinstance(event, Prefilled):
                self._memory.count(event.sequence)
            if isinstance(event, Finished):
                self._memory.keep(event.sequence, self.held)
