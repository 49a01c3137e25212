"""The thread of an ``AsyncEngine``: it decodes requests, and hands what they write over to event loops."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from selfspec.decoding.scheduler import Scheduler
from selfspec.engine_stats import Tally
from selfspec.errors import (
    EngineClosedError,
    EngineFailedError,
    QueueFullError,
    RequestFailedError,
    SelfSpecError,
    first_line,
)
from selfspec.request_stream import RequestStream
from selfspec.runtimes.threads import overlapped, release_threads
from selfspec.types import TextPiece

_Ready = tuple[RequestStream, list[TextPiece], bool]
"""What a stream is to be given: pieces, and whether the request has ended."""

_BETWEEN = 0.04
"""Least seconds between two hand-overs, unless an output begins or ends, or a prompt is read, which may take longer.

Each wakes an event loop and a client, which take a processor from the forward: of fast models a few in a hundred.
"""


class EngineThread:
    """Decodes the requests of streams, which come from any thread, until it is closed or fails.

    Args:
        scheduler: runs the requests; only this thread uses it.
        most: most requests that run or wait; ``None`` for any number.
        overlaps: hand pieces over when the next step begins to compute, some tenths of a millisecond later, so that
            event loops do not compete for the lock before.
        flush: is called at the end.

    Attributes:
        failure: the exception that ended it; ``None`` unless it failed.
        tally: counts what it does.
        open: number of requests that wait or run.
    """

    def __init__(self, scheduler: Scheduler, most: int | None, *, overlaps: bool, flush: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.tally = Tally()
        self.open = 0
        self._scheduler, self._most, self._overlaps, self._flush = scheduler, most, overlaps, flush
        self._ready: list[_Ready] = []  # to be handed over
        self._urgent, self._due = False, 0.0  # whether an output begins or ends; when others may be handed over again
        self._wake = threading.Condition()  # guards all of the following, and ``open``
        self._commands: list[Callable[[], None]] = []
        self._started = self._draining = self._stopped = self._ended = False
        self._closed: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._started and not self._ended

    def start(self) -> None:
        """Starts it, unless that has been done; raises ``EngineClosedError`` if it was closed."""
        with self._wake:
            if self._draining:
                raise EngineClosedError("the engine is closed; make another one")
            if not self._started:
                self._started = True
                release_threads()  # of the thread that has made the engine
                self._thread.start()

    async def close(self, drain: bool, timeout: float | None) -> None:
        """Ends it, after the last request with ``drain``, at the latest after ``timeout`` seconds."""
        with self._wake:
            self._draining, started = True, self._started
            if not started and not self._ended:
                self._ended = True
                self._closed.set_result(None)
        if started:
            await asyncio.to_thread(self._stop, drain, timeout)

    async def wait_closed(self) -> None:
        """Waits until it has ended."""
        await asyncio.shield(asyncio.wrap_future(self._closed))  # who waits no longer does not end it

    def enqueue(self, streams: Sequence[RequestStream]) -> None:
        """Queues the requests of streams, all or none; raises what ``check_room`` does."""
        with self._wake:
            self.check_room(len(streams))
            self.open += len(streams)
            for stream in streams:
                stream.request.listener = partial(self._collect, stream)
                self._commands.append(partial(self._scheduler.add, stream.request))
            self._wake.notify()

    def check_room(self, count: int) -> None:
        """Raises ``QueueFullError`` if no ``count`` requests can be taken, ``EngineClosedError`` if none will be."""
        if self._draining:
            raise EngineClosedError("the engine is closed, or is being closed; make another one")
        if not self._started:
            raise EngineClosedError("the engine is not started; use it in 'async with', or call start() first")
        if self._ended:
            raise _closed_by(self.failure)
        if self._most is not None and self.open + count > self._most:
            raise QueueFullError(f"{self._most} requests run or wait, which is the most; try again later")

    def cancel(self, stream: RequestStream) -> None:
        """Drops a request before the next step."""
        with self._wake:
            self._commands.append(partial(self._drop, stream))
            self._wake.notify()

    def _stop(self, drain: bool, timeout: float | None) -> None:
        """Ends the thread; waits until it has ended."""
        with self._wake:
            self._stopped = self._stopped or not drain
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._stopped = True
                self._wake.notify()
            self._thread.join()

    # The thread: from here on, and only here, the scheduler is used.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._scheduler.busy:
                    self._step()
            self._scheduler.keep_ended()
        except BaseException as failure:  # of the thread, not of a request: the engine ends
            self.failure = failure
            logging.getLogger("selfspec").critical("the engine's thread failed", exc_info=failure)
        finally:
            with self._wake:
                self._ended = True
                commands = self._take_commands()
            for command in commands:
                command()
            self.tally.step(self._scheduler.fail_all(_closed_by(self.failure)), 0.0)
            self._hand_over()
            self._flush()
            self._closed.set_result(None)

    def _wait_for_work(self) -> bool:
        """Waits for something to do and runs the commands; returns false where the thread is to end."""
        with self._wake:
            while not (self._commands or self._scheduler.busy or self._draining):
                self._wake.wait()
            draining, stopped, commands = self._draining, self._stopped, self._take_commands()
        for command in commands:
            command()
        return not stopped and (self._scheduler.busy or not draining)

    def _take_commands(self) -> Sequence[Callable[[], None]]:
        """The commands since the last call; to be called with the lock."""
        commands, self._commands = self._commands, []
        return commands

    def _step(self) -> None:
        began = time.perf_counter()
        with overlapped(self._hand_over):
            events = self._scheduler.step()
        self.tally.step(events, time.perf_counter() - began)
        if not (self._overlaps and self._scheduler.busy) or self._scheduler.leaving:
            self._hand_over()

    def _collect(self, stream: RequestStream) -> None:
        """Collects what an event of a request has to hand over."""
        request = stream.request
        try:
            pieces = request.output.take_pieces()
        except Exception as error:  # of the tokenizer
            if request.error is None:
                self.tally.ended(request, "failed")
            pieces, request.error, request.ended_at = [], request.error or error, time.perf_counter()
        if pieces or request.ended:
            self._ready.append((stream, pieces, request.ended))
            self._urgent = self._urgent or request.ended or not request.rounds
        if request.ended:
            self._close_request()

    def _hand_over(self) -> None:
        """Gives each event loop what is ready for it, in one call, if it is time to."""
        now = time.perf_counter()
        if now < self._due and not (self._urgent or self._scheduler.reading):
            return
        self._urgent, self._due = False, now + _BETWEEN
        ready, self._ready = self._ready, []
        of_loop: dict[asyncio.AbstractEventLoop, list[_Ready]] = defaultdict(list)
        for each in ready:
            of_loop[each[0].loop].append(each)
        for loop, own in of_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed: these streams are not read any more
                for stream, *_ in own:
                    self.cancel(stream)

    def _drop(self, stream: RequestStream) -> None:
        if not stream.request.ended:
            self._scheduler.cancel(stream.request)
            self.tally.ended(stream.request, "cancelled")
            self._close_request()

    def _close_request(self) -> None:
        with self._wake:
            self.open -= 1


def _deliver(ready: Iterable[_Ready]) -> None:
    for stream, pieces, ended in ready:
        stream.deliver(pieces, ended, _as_request_error(stream.request.error) if ended else None)


def _as_request_error(error: Exception | None) -> SelfSpecError | None:
    if error is None or isinstance(error, SelfSpecError):
        return error
    failed = RequestFailedError(f"the request failed: {type(error).__name__}: {first_line(error)}")
    failed.__cause__ = error
    return failed


def _closed_by(failure: BaseException | None) -> EngineClosedError:
    if failure is None:
        return EngineClosedError("the engine was closed before the request ended")
    error = EngineFailedError(
        f"the engine failed: {type(failure).__name__}: {first_line(failure)}; make another engine"
    )
    error.__cause__ = failure
    return error
