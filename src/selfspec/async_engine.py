"""Many requests at once on one model, from asyncio."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from selfspec.decoding.prefix_cache import CacheMemory, PrefixCacheStats
from selfspec.decoding.prompt import ReadingPace
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine import Engine
from selfspec.engine_options import QueueKeywords, changed
from selfspec.engine_stats import EngineStats, MethodCounts
from selfspec.engine_thread import EngineThread
from selfspec.errors import InvalidParameterError, naming
from selfspec.memory import free_bytes
from selfspec.methods.registry import MethodPool
from selfspec.prompts import Prompt
from selfspec.request_stream import RequestStream
from selfspec.runtimes.low_bit import low_bit_within
from selfspec.runtimes.target import Target
from selfspec.types import Generation, SamplingParams

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
        engine: the model, its options, and the method of requests that name none. Its prefix cache, or one of half of
            the memory limit where its options do not say how large it is, gives way to requests.
        methods: names of others that requests will name. They are prepared, so that their first requests do not
            slow down the others, and their low-bit weights are taken from the memory limit.
        progress: is called with a line of text before each part of preparing them that may take long.
        **keywords: options that differ from the engine's: ``max_batch``, ``max_waiting``, ``memory_limit`` and
            ``max_read_seconds`` (see ``EngineOptions``).

    Raises:
        InvalidParameterError: there is no such option, or its value is out of range.
        OutOfMemoryError: the low-bit weights of a method exceed the memory limit.
        SelfSpecError: there is no such method, or it cannot draft for this model.

    Attributes:
        engine: see above.
        memory_limit: most bytes of keys and values: the limit without the low-bit weights of ``methods``.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        methods: Sequence[str] = (),
        progress: Callable[[str], None] = lambda _: None,
        **keywords: "Unpack[QueueKeywords]",
    ) -> None:
        options = changed(engine.options, keywords, "option of AsyncEngine", QueueKeywords.__annotations__)
        if engine.target.ranks.count > 1:
            raise InvalidParameterError(
                f"{engine.target.ranks.count} processes share this model, and would take its requests in different "
                "orders; use Engine, in all of them alike"
            )
        self.engine = engine
        self._methods = MethodPool(engine.method)
        limit = _default_limit(engine.target) if options.memory_limit is None else options.memory_limit
        self.memory_limit = self._prepare(methods, limit, progress)
        is_sized = engine.options.prefix_cache is not None
        prefixes = engine.prefix_cache if is_sized else options.prefixes(engine.target, self.memory_limit // 2)
        self._memory = CacheMemory(engine.target, engine.chunks.grain, self.memory_limit, prefixes, engine.kept)
        self._scheduler = Scheduler(
            engine.target,
            chunks=engine.chunks,
            max_batch=options.max_batch,
            memory=self._memory,
            pace=ReadingPace(options.max_read_seconds),
        )
        self._thread = EngineThread(
            self._scheduler,
            None if options.max_waiting is None else options.max_batch + options.max_waiting,
            # Only where all forwards are native (`threads.overlapped`).
            overlaps=engine.target.independent_rows >= engine.chunks.longest,
            flush=engine.flush,
        )

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
        self._thread.start()

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and ends.

        Args:
            drain: let the requests that wait and run come to their ends; otherwise they fail with
                ``EngineClosedError``.
            timeout: seconds after which they fail all the same; ``None`` waits for them.
        """
        await self._thread.close(drain, timeout)

    async def wait_closed(self) -> None:
        """Waits until the engine has ended, because it was closed or because its thread failed (``failure``)."""
        await self._thread.wait_closed()

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

    def room(self, prompt_tokens: int, share: float = 1.0) -> int:
        """How many new tokens a request may have.

        Args:
            prompt_tokens: of its prompt.
            share: of the memory limit that it may take; 1 is all of it.

        Returns:
            What context and memory leave; zero or negative if the prompt does not fit.
        """
        return self._memory.room(self.engine.method, prompt_tokens, share)

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
        streams = [RequestStream(*each, loop, self._thread.cancel) for each in zip(requests, request_ids, strict=True)]
        self._thread.enqueue(streams)
        return streams

    def check_room(self, count: int = 1) -> None:
        """Raises what ``enqueue`` would raise now.

        Args:
            count: number of requests.
        """
        self._thread.check_room(count)

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
    def failure(self) -> BaseException | None:
        """What ended the thread; ``None`` unless it failed. Open and later requests end with ``EngineFailedError``."""
        return self._thread.failure

    @property
    def running(self) -> int:
        """Requests that hold a place; as in ``stats``, at no cost."""
        return self._scheduler.running

    def stats(self) -> EngineStats:
        """What it did so far, and what it holds now."""
        running, prefixes = self._scheduler.running, self._memory.prefixes
        return replace(
            self._thread.tally.stats,
            alive=self._thread.alive,
            running=running,
            waiting=max(0, self._thread.open - running),
            cache_bytes=self._scheduler.held,
            cache_limit=self.memory_limit,
            prefix_cache=PrefixCacheStats() if prefixes is None else prefixes.stats,
        )

    def _prepare(self, names: Sequence[str], limit: int, progress: Callable[[str], None]) -> int:
        """Prepares methods within a memory limit; returns what their low-bit weights leave of it."""
        for name in names:

            def told(text: str, name: str = name) -> None:
                progress(f"{name}: {text}")

            with naming(f"the method '{name}'"), low_bit_within(limit - 1) as low_bit:
                method = self._methods.get(name)
                if method is not self.engine.method:  # the caller has prepared that one
                    method.prepare(told)
            limit -= low_bit.bytes
        return limit


def _default_limit(target: Target) -> int:
    free = free_bytes(target.device)
    return _UNKNOWN if free is None else max(1, int(_FREE_SHARE * free))
