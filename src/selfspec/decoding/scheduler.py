"""Admits requests, plays steps for those that run, and lets finished ones go."""

import time
from collections import deque

from selfspec.decoding.events import Event, Failed, Started
from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.decoding.step import step
from selfspec.runtimes.target import Target


class Scheduler:
    """Decodes many requests, several of them at a time.

    Args:
        target: the model.
        prefill_chunk: about as many prompt tokens are read in one step, beside the rounds of other sequences.
        max_batch: most sequences at a time; each holds a cache for its whole length.
    """

    def __init__(self, target: Target, *, prefill_chunk: int, max_batch: int) -> None:
        self._target = target
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drops a request, whether it waits or runs; its cache is free at once."""
        self._waiting = deque(each for each in self._waiting if each is not request)
        self._running = [each for each in self._running if each.request is not request]

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
        events += step(self._target, self._running, self._prefill_chunk)
        failed = [event.request for event in events if isinstance(event, Failed)]
        self._running = [each for each in self._running if not each.finished and each.request not in failed]
        return events

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        while self._waiting and len(self._running) < self._max_batch:
            request, admitted = self._waiting.popleft(), time.perf_counter()
            try:
                sequence = Sequence(self._target, request)
            except Exception as error:
                events.append(Failed.by(request, error))
                continue
            self._running.append(sequence)
            events.append(Started(sequence, admitted))
        return events
