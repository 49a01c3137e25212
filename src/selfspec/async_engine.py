"""Many requests at once on one model, from asyncio."""

import asyncio
import threading
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from selfspec.decoding.cache_memory import CacheMemory
from selfspec.decoding.pace import Pace
from selfspec.decoding.prefix_cache import PrefixCache, PrefixCacheStats
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine import Engine
from selfspec.engine_stats import EngineStats, MethodCounts, Tally
from selfspec.errors import EngineClosedError, EngineFailedError, InvalidParameterError, QueueFullError, first_line
from selfspec.generation import Job, changed
from selfspec.memory import PeakMemory, free_bytes
from selfspec.methods.pool import MethodPool
from selfspec.prompt_forms import Prompt
from selfspec.request_stream import RequestStream
from selfspec.runtimes.target import Target
from selfspec.types import Generation, SamplingParams
from selfspec.worker import Worker

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
        engine: the model, and the method of requests that name none.
        max_batch: most requests that run at a time; the others wait.
        max_waiting: most requests beside ``max_batch``; further ones are refused. ``None`` refuses none.
        memory_limit: most bytes of keys and values, of requests and prefix cache together. A request is admitted when
            its whole length fits. If not given, half of the memory that is free now.
        prefix_cache_bytes: most bytes of the prefix cache, which gives way to requests; 0 keeps none. If not given, the
            engine's own prefix cache, or half of the memory limit.
        max_read_seconds: about as long as reading prompts may hold up, in each step, the outputs that are being
            written; ``None`` for any time. Where chunks cannot be cut (see ``decoding.chunks``), one chunk is read.

    Raises:
        InvalidParameterError: an argument is out of range.

    Attributes:
        engine: see above.
        memory_limit: see above, in bytes.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int = 16,
        max_waiting: int | None = None,
        memory_limit: int | None = None,
        prefix_cache_bytes: int | None = None,
        max_read_seconds: float | None = 0.1,
    ) -> None:
        _check_at_least(1, max_batch=max_batch, memory_limit=memory_limit)
        _check_at_least(0, max_waiting=max_waiting, prefix_cache_bytes=prefix_cache_bytes)
        if max_read_seconds is not None and not max_read_seconds > 0:
            raise InvalidParameterError(f"max_read_seconds must be above 0, not {max_read_seconds}")
        self.engine = engine
        setup = engine.setup
        self.memory_limit = _default_limit(setup.target) if memory_limit is None else memory_limit
        self._memory = CacheMemory(
            setup.target, setup.chunks, self.memory_limit, self._prefix_cache(prefix_cache_bytes)
        )
        self._methods = MethodPool(engine.method)
        self._most = None if max_waiting is None else max_batch + max_waiting
        self._tally = Tally()
        self._scheduler = Scheduler(
            setup.target, chunks=setup.chunks, max_batch=max_batch, memory=self._memory, pace=Pace(max_read_seconds)
        )
        self._worker = Worker(
            self._scheduler,
            PeakMemory(setup.target.device),
            self._tally,
            overlaps=setup.target.independent_rows >= setup.chunks.longest,  # then all forwards are native
        )
        self._lock = threading.Lock()
        self._started = self._closed = False

    def _prefix_cache(self, most_bytes: int | None) -> PrefixCache | None:
        if most_bytes is None and self.engine.prefix_cache is not None:
            return self.engine.prefix_cache
        most_bytes = self.memory_limit // 2 if most_bytes is None else most_bytes
        return PrefixCache(self.engine.target, most_bytes) if most_bytes else None

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
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed; make another one")
            if not self._started:
                self._started = True
                self._worker.start()

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and ends.

        Args:
            drain: let the requests that wait and run come to their ends; otherwise they fail with
                ``EngineClosedError``.
            timeout: seconds after which they fail all the same; ``None`` waits for them.
        """
        with self._lock:
            self._closed, started = True, self._started
        if started:
            await asyncio.to_thread(self._worker.stop, drain=drain, timeout=timeout)

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
        """Takes a request, in the running event loop. Prompt and parameters are checked at once.

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
        loop = asyncio.get_running_loop()
        setup = self.engine.setup
        if method is not None or settings:
            setup = replace(setup, method=self._methods.get(method, settings))
        job = Job(setup, prompt, changed(params or SamplingParams(), changes))
        self._memory.check(job.request)
        stream = RequestStream(job, request_id or uuid.uuid4().hex, loop, self._worker.cancel)
        with self._lock:
            self._check_open()
            if self._most is not None and self._worker.requests >= self._most:
                raise QueueFullError(f"{self._most} requests run or wait, which is the most; try again later")
            self._worker.add(stream)
        return stream

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

    @property
    def running(self) -> int:
        """Requests that hold a place; as in ``stats``, at no cost."""
        return self._scheduler.running

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended its thread: it takes no more requests; ``None`` if there was none."""
        return self._worker.failure

    def stats(self) -> EngineStats:
        """What it did so far, and what it holds now."""
        running, prefixes = self._scheduler.running, self._memory.prefixes
        return replace(
            self._tally.stats,
            alive=self._worker.alive,
            running=running,
            waiting=max(0, self._worker.requests - running),
            cache_bytes=self._scheduler.held,
            cache_limit=self.memory_limit,
            prefix_cache=PrefixCacheStats() if prefixes is None else prefixes.stats,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed, or is being closed; make another one")
        if not self._started:
            raise EngineClosedError("the engine is not started; use it in 'async with', or call start() first")
        if self.failure is not None:
            raise EngineFailedError(f"the engine failed: {first_line(self.failure)}; make another engine")


def _check_at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise InvalidParameterError(f"{name} must be at least {least}, not {value}")


def _default_limit(target: Target) -> int:
    free = free_bytes(target.device)
    return _UNKNOWN if free is None else max(1, int(_FREE_SHARE * free))
