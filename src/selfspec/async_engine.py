"""Many requests at once on one model, from asyncio."""

import asyncio
import logging
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from selfspec.decoding.prefix_cache import CacheMemory, PrefixCache, PrefixCacheStats
from selfspec.decoding.prompt import Pace
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine import Engine
from selfspec.engine_stats import EngineStats, MethodCounts, Tally
from selfspec.errors import (
    EngineClosedError,
    EngineFailedError,
    InvalidParameterError,
    QueueFullError,
    RequestFailedError,
    SelfSpecError,
    first_line,
)
from selfspec.memory import free_bytes
from selfspec.methods.registry import MethodPool
from selfspec.options import QueueKeywords, changed
from selfspec.prompts import Prompt
from selfspec.request_stream import RequestStream
from selfspec.runtimes.kernels import overlapped, release_threads
from selfspec.runtimes.target import Target
from selfspec.types import Generation, SamplingParams, TextPiece

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FREE_SHARE = 0.5
_UNKNOWN = 2**30
"""The limit in bytes where the system does not say how much memory is free."""

__all__ = ["AsyncEngine", "EngineStats", "MethodCounts", "PrefixCacheStats", "RequestStream"]


class AsyncEngine:
    """Many requests at once on one model; they come and go at any time.

    A thread of its own decodes all of them together. Each has its own parameters, seed, stop conditions and method,
    and its text is what it is alone. The model should not be used by others meanwhile.

    ::

        async with AsyncEngine(Engine.from_pretrained("smollm2")) as engine:
            async for piece in engine.submit("Once upon a time", max_new_tokens=30):
                print(piece.text, end="")

    Args:
        engine: the model, its options, and the method of requests that name none.
        prefix_cache_bytes: most bytes of the prefix cache, which gives way to requests; 0 keeps none. If not given,
            what the engine's options say: its own prefix cache, or half of the memory limit.
        **keywords: options that differ from the engine's: ``max_batch``, ``max_waiting``, ``memory_limit`` and
            ``max_read_seconds`` (see ``EngineOptions``).

    Raises:
        InvalidParameterError: there is no such option, or its value is out of range.

    Attributes:
        engine: see above.
        memory_limit: most bytes of keys and values.
        failure: the exception that ended the thread; ``None`` unless it failed. Open and later requests then end with
            ``EngineFailedError``.
    """

    def __init__(
        self, engine: Engine, *, prefix_cache_bytes: int | None = None, **keywords: "Unpack[QueueKeywords]"
    ) -> None:
        options = changed(engine.options, keywords, "option of AsyncEngine", QueueKeywords.__annotations__)
        if engine.target.ranks.count > 1:
            raise InvalidParameterError(
                f"{engine.target.ranks.count} processes share this model, and would take its requests in different "
                "orders; use Engine, in all of them alike"
            )
        self.engine = engine
        self.memory_limit = _default_limit(engine.target) if options.memory_limit is None else options.memory_limit
        self.failure: BaseException | None = None
        prefixes = self._prefix_cache(prefix_cache_bytes)
        self._memory = CacheMemory(engine.target, engine.chunks.grain, self.memory_limit, prefixes, engine.kept)
        self._scheduler = Scheduler(
            engine.target,
            chunks=engine.chunks,
            max_batch=options.max_batch,
            memory=self._memory,
            pace=Pace(options.max_read_seconds),
        )
        self._methods = MethodPool(engine.method)
        self._tally = Tally()
        self._most = None if options.max_waiting is None else options.max_batch + options.max_waiting
        # Hand pieces over when the next step begins to compute, some tenths of a millisecond later, so that event loops
        # do not compete for the lock before. Only where all forwards are native (`kernels.overlapped`).
        self._overlaps = engine.target.independent_rows >= engine.chunks.longest
        self._ready: list[tuple[RequestStream, list[TextPiece], bool]] = []  # to be handed over
        self._wake = threading.Condition()  # guards all of the following
        self._commands: deque[Callable[[], None]] = deque()
        self._open = 0  # requests that wait or run
        self._waiters: list[asyncio.Future[None]] = []
        self._started = self._draining = self._stopped = self._ended = False
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)

    async def __aenter__(self) -> "AsyncEngine":
        """Starts it."""
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it: waits for all requests, unless an exception is the reason."""
        await self.close(drain=error is None)

    def start(self) -> None:
        """Starts decoding. Requests may be submitted from now on.

        Raises:
            EngineClosedError: it was closed.
        """
        with self._wake:
            if self._draining:
                raise EngineClosedError("the engine is closed; make another one")
            if not self._started:
                self._started = True
                release_threads()  # of the thread that has made the engine
                self._thread.start()

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and ends.

        Args:
            drain: let the requests that wait and run come to their ends; otherwise they fail with
                ``EngineClosedError``.
            timeout: seconds after which they fail all the same; ``None`` waits for them.
        """
        with self._wake:
            self._draining, started = True, self._started
        if started:
            await asyncio.to_thread(self._stop, drain, timeout)
        else:
            self._resolve_waiters()

    async def wait_closed(self) -> None:
        """Waits until the engine has ended, because it was closed or because its thread failed (``failure``)."""
        ended = asyncio.get_running_loop().create_future()
        with self._wake:
            if self._ended:
                return
            self._waiters.append(ended)
        await ended

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        **changes: Any,
    ) -> RequestStream:
        """Queues a request, in the running event loop. Prompt and parameters are checked at once.

        Args:
            prompt: text, token ids, or chat messages; one prompt.
            params: how to choose tokens and when to stop.
            method: name of the method that drafts; ``None`` for the engine's own. Methods are made at first use and
                kept, with what they learn.
            settings: values of the method's settings by name.
            request_id: what errors call the request; made up if not given.
            **changes: single parameters to change, by name.

        Returns:
            The stream of its pieces; to be read or cancelled.

        Raises:
            SelfSpecError: prompt, parameters, method or settings do not fit.
            RequestTooLargeError: it could never be admitted, since it needs more than ``memory_limit``.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine does not run, or is being closed; ``EngineFailedError`` if it failed.
        """
        request = self.prepare(prompt, params, method=method, settings=settings, **changes)
        return self.enqueue([request], [request_id or uuid.uuid4().hex])[0]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        **changes: Any,
    ) -> Request:
        """Does of ``submit`` what takes time of the prompt's length, or compiles a schema, in any thread.

        Args:
            prompt: as for ``submit``.
            params: as for ``submit``.
            method: as for ``submit``.
            settings: as for ``submit``.
            cache_salt: only requests with the same salt share prefixes of their prompts and draft from each other's
                texts, so that others cannot tell by the time what was asked before.
            **changes: as for ``submit``.

        Returns:
            What ``enqueue`` takes, once.

        Raises:
            SelfSpecError: prompt, parameters, method or settings do not fit.
            RequestTooLargeError: it could never be admitted, since it needs more than ``memory_limit``.
        """
        params = changed(params or SamplingParams(), changes, "sampling parameter")
        chosen = self._methods.get(method, settings)
        request = self.engine.request(prompt, params, method=chosen, cache_salt=cache_salt)
        self._memory.check(request)
        return request

    def enqueue(self, requests: Sequence[Request], request_ids: Sequence[str]) -> list[RequestStream]:
        """Queues requests of ``prepare``, all or none, in the running event loop.

        Args:
            requests: from ``prepare``.
            request_ids: what errors call them.

        Returns:
            Their streams.

        Raises:
            QueueFullError: too many requests wait.
            EngineClosedError: the engine does not run, or is being closed; ``EngineFailedError`` if it failed.
        """
        loop = asyncio.get_running_loop()
        streams = [RequestStream(*each, loop, self._cancel) for each in zip(requests, request_ids, strict=True)]
        with self._wake:
            self.check_room(len(requests))
            self._open += len(requests)
            for stream in streams:
                stream.request.listener = partial(self._collect, stream)
                self._commands.append(partial(self._scheduler.add, stream.request))
            self._wake.notify()
        return streams

    def check_room(self, count: int = 1) -> None:
        """Raises what ``enqueue`` would raise now.

        Args:
            count: number of requests.
        """
        self._check_open()
        if self._most is not None and self._open + count > self._most:
            raise QueueFullError(f"{self._most} requests run or wait, which is the most; try again later")

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Generation:
        """Writes the whole output. A task that is cancelled meanwhile cancels its request.

        Args:
            prompt: as for ``submit``.
            params: as for ``submit``.
            **options: as for ``submit``.

        Raises:
            SelfSpecError: as from ``submit``, or the request failed.
        """
        stream = self.submit(prompt, params, **options)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()  # changes nothing if it has ended
        return stream.result

    def prepare_method(self, name: str, progress: Callable[[str], None] = lambda _: None) -> None:
        """Makes a method that requests will name, and does ahead of them what would slow down the first.

        Args:
            name: of the method.
            progress: is called with a line of text before each part that may take long.

        Raises:
            SelfSpecError: there is no such method, or it cannot draft for this model.
        """
        self._methods.get(name).prepare(progress)

    @property
    def running(self) -> int:
        """Requests that hold a place; as in ``stats``, at no cost."""
        return self._scheduler.running

    def stats(self) -> EngineStats:
        """What it did so far, and what it holds now."""
        running, prefixes = self._scheduler.running, self._memory.prefixes
        return replace(
            self._tally.stats,
            alive=self._started and not self._ended,
            running=running,
            waiting=max(0, self._open - running),
            cache_bytes=self._scheduler.held,
            cache_limit=self.memory_limit,
            prefix_cache=PrefixCacheStats() if prefixes is None else prefixes.stats,
        )

    def _prefix_cache(self, most_bytes: int | None) -> PrefixCache | None:
        if most_bytes is None and self.engine.options.prefix_cache is not None:
            return self.engine.prefix_cache
        most_bytes = self.memory_limit // 2 if most_bytes is None else most_bytes
        if most_bytes < 0:
            raise InvalidParameterError(f"prefix_cache_bytes must be at least 0, not {most_bytes}")
        return PrefixCache(self.engine.target, most_bytes) if most_bytes else None

    def _check_open(self) -> None:
        if self._draining:
            raise EngineClosedError("the engine is closed, or is being closed; make another one")
        if not self._started:
            raise EngineClosedError("the engine is not started; use it in 'async with', or call start() first")
        if self._ended:
            raise _closed_by(self.failure)

    def _stop(self, drain: bool, timeout: float | None) -> None:
        """Ends the thread; waits until it has ended."""
        with self._wake:
            self._stopped = not drain
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
        except BaseException as failure:  # of the thread, not of a request: the engine ends
            self.failure = failure
            logging.getLogger("selfspec").critical("the engine's thread failed", exc_info=failure)
        finally:
            with self._wake:
                self._ended = True
            self._run_commands()
            self._tally.step(self._scheduler.fail_all(_closed_by(self.failure)), 0.0)
            self._hand_over()
            self.engine.flush()
            self._resolve_waiters()

    def _wait_for_work(self) -> bool:
        """Waits for something to do and runs the commands; returns false where the thread is to end."""
        with self._wake:
            while not (self._commands or self._scheduler.busy or self._draining):
                self._wake.wait()
            draining, stopped = self._draining, self._stopped
        self._run_commands()
        return not stopped and (self._scheduler.busy or not draining)

    def _run_commands(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _step(self) -> None:
        began = time.perf_counter()
        with overlapped(self._hand_over):
            events = self._scheduler.step()
        self._tally.step(events, time.perf_counter() - began)
        if not (self._overlaps and self._scheduler.busy):
            self._hand_over()

    def _collect(self, stream: RequestStream) -> None:
        """Collects what an event of a request has to hand over."""
        request = stream.request
        try:
            pieces = request.output.take_pieces()
        except Exception as error:  # of the tokenizer
            pieces, request.error, request.ended_at = [], request.error or error, time.perf_counter()
        if pieces or request.ended:
            self._ready.append((stream, pieces, request.ended))
        if request.ended:
            self._close_request()

    def _hand_over(self) -> None:
        """Gives each event loop what is ready for it, in one call."""
        ready, self._ready = self._ready, []
        of_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, list[TextPiece], bool]]] = defaultdict(list)
        for each in ready:
            of_loop[each[0].loop].append(each)
        for loop, own in of_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed: these streams are not read any more
                for stream, *_ in own:
                    self._cancel(stream)

    def _cancel(self, stream: RequestStream) -> None:
        """Drops a request before the next step. May be called from any thread."""
        with self._wake:
            self._commands.append(partial(self._drop, stream))
            self._wake.notify()

    def _drop(self, stream: RequestStream) -> None:
        if not stream.request.ended:
            self._scheduler.cancel(stream.request)
            self._tally.cancelled(stream.request)
            self._close_request()

    def _close_request(self) -> None:
        with self._wake:
            self._open -= 1

    def _resolve_waiters(self) -> None:
        with self._wake:
            self._ended, waiters, self._waiters = True, self._waiters, []
        for waiter in waiters:
            try:
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
            except RuntimeError:  # the loop is closed
                continue


def _deliver(ready: Iterable[tuple[RequestStream, list[TextPiece], bool]]) -> None:
    for stream, pieces, ended in ready:
        stream.deliver(pieces, ended, _as_request_error(stream.request.error) if ended else None)


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


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


def _default_limit(target: Target) -> int:
    free = free_bytes(target.device)
    return _UNKNOWN if free is None else max(1, int(_FREE_SHARE * free))
