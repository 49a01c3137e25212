"""The thread that decodes the requests of an ``AsyncEngine``; it alone touches the scheduler."""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from selfspec.decoding.events import Event, Failed, Finished
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine_stats import Tally
from selfspec.errors import EngineClosedError, EngineFailedError, RequestFailedError, SelfSpecError, first_line
from selfspec.memory import PeakMemory
from selfspec.request_stream import Delivery, RequestStream
from selfspec.runtimes.overlap import overlapped


class Worker:
    """Runs steps while there are requests, and hands pieces over to the event loops of their streams.

    Args:
        scheduler: decodes; from ``start`` on it belongs to the worker's thread.
        memory: measures the process.
        tally: counts what happens.
        overlaps: hand pieces over when the next step begins to compute, some tenths of a millisecond later, so that
            event loops do not hold up what has to be done before. Only where steps are native forwards
            (``runtimes.overlap``).

    Attributes:
        failure: the exception that ended the thread; ``None`` while it runs, and after ``stop``.
    """

    def __init__(self, scheduler: Scheduler, memory: PeakMemory, tally: Tally, *, overlaps: bool = False) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._tally = tally
        self._overlaps = overlaps
        self._ready: list[Delivery] = []  # to be handed over
        self._requests = 0
        self._streams: dict[int, RequestStream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._draining = self._stopped = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="selfspec-worker", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def requests(self) -> int:
        """How many requests wait or run."""
        with self._wake:
            return self._requests

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, stream: RequestStream) -> None:
        """Lets a request wait for its turn. May be called from any thread."""
        with self._wake:
            self._requests += 1
        self._command(lambda: self._add(stream))

    def cancel(self, stream: RequestStream) -> None:
        """Drops a request before the next step. May be called from any thread."""
        self._command(lambda: self._cancel(stream))

    def stop(self, *, drain: bool, timeout: float | None) -> None:
        """Ends the thread; waits until it has ended.

        Args:
            drain: let the requests that wait and run come to their ends.
            timeout: seconds after which they are ended all the same; ``None`` waits for them.
        """
        with self._wake:
            self._draining, self._stopped = True, not drain
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._stopped = True
                self._wake.notify()
            self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        error = EngineClosedError("the engine was closed before the request ended")
        try:
            while self._wait_for_work():
                self._work()
        except BaseException as failure:
            self.failure = failure
            error = EngineFailedError(f"the engine failed: {type(failure).__name__}: {first_line(failure)}")
            error.__cause__ = failure
        finally:
            with suppress(Exception):  # requests that were added last are ended too
                self._run_commands()
            self._end_all(error)

    def _wait_for_work(self) -> bool:
        """Waits for something to do and runs the commands; returns false where the thread is to end."""
        with self._wake:
            while not (self._commands or self._scheduler.busy or self._draining):
                self._wake.wait()
            draining, stopped = self._draining, self._stopped
        self._run_commands()
        return not stopped and (self._scheduler.busy or not draining)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _work(self) -> None:
        if not self._scheduler.busy:
            return
        began = time.perf_counter()
        try:
            with overlapped(self._hand_over):
                events = self._scheduler.step()
        except Exception as error:  # of no request that could be named: all that run are ended, the next ones go on
            self._fail_running(error)
            return
        self._tally.step(time.perf_counter() - began)
        self._ready += self._note(events)
        if not (self._overlaps and self._scheduler.busy):
            self._hand_over()

    def _add(self, stream: RequestStream) -> None:
        request = stream.job.request
        self._streams[id(request)] = stream
        self._scheduler.add(request)

    def _cancel(self, stream: RequestStream) -> None:
        request = stream.job.request
        if self._streams.pop(id(request), None) is not None:
            self._scheduler.remove(request)
            self._ended("cancelled", stream)

    def _note(self, events: Iterable[Event]) -> list[Delivery]:
        deliveries = []
        for event in events:
            request = event.request if isinstance(event, Failed) else event.sequence.request
            stream = self._streams[id(request)]
            error = _noted(stream, event, self._memory)
            ended = error is not None or isinstance(event, Finished)
            deliveries.append(Delivery(stream, request.output.take_pieces(), ended, error))
            self._tally.event(event, stream.job.method.name)
            if ended:
                del self._streams[id(request)]
                self._ended("finished" if error is None else "failed", stream)
        return deliveries

    def _hand_over(self) -> None:
        """Gives each event loop what is ready for it, in one call."""
        deliveries, self._ready = self._ready, []
        of_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            if delivery.pieces or delivery.ended:
                of_loop[delivery.stream.loop].append(delivery)
        for loop, own in of_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed: these streams are not read any more
                for delivery in own:
                    self.cancel(delivery.stream)

    def _fail_running(self, error: Exception) -> None:
        failed = RequestFailedError(f"the engine failed: {first_line(error)}; other requests go on")
        failed.__cause__ = error
        running = self._scheduler.drop_running()
        self._ready += self._note([Failed(request, failed) for request in running])
        self._hand_over()

    def _end_all(self, error: SelfSpecError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        self._ready += [Delivery(stream, [], True, error) for stream in streams]
        self._hand_over()
        for stream in streams:
            self._scheduler.remove(stream.job.request)
            self._ended("failed", stream)

    def _ended(self, how: Literal["finished", "cancelled", "failed"], stream: RequestStream) -> None:
        with self._wake:
            self._requests -= 1
        self._tally.ended(how, stream)


def _noted(stream: RequestStream, event: Event, memory: PeakMemory) -> SelfSpecError | None:
    """Notes an event; returns the error of a request that failed."""
    try:
        stream.note(event, memory)
    except SelfSpecError as error:
        return error
    except Exception as error:
        failed = RequestFailedError(f"the request failed: {type(error).__name__}: {first_line(error)}")
        failed.__cause__ = error
        return failed
    return None


def _deliver(deliveries: Iterable[Delivery]) -> None:
    for delivery in deliveries:
        delivery.stream.deliver(delivery.pieces, delivery.ended, delivery.error)
