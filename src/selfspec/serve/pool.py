"""Processes in which bodies are read: a few, which can be killed at any time, and never the server's own."""

import contextlib
import math
import os
import pickle
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
from anyio import to_process, to_thread

from selfspec.errors import QueueFullError
from selfspec.serve.api_errors import ApiError
from selfspec.serve.reader import RequestReader, read, too_much

LARGE = 64 * 2**10
"""Bytes of a body from which on it never takes the last process: small ones are read meanwhile."""

_MOST_WAITING, _MOST_LARGE_WAITING = 256, 64
"""Bodies that are read or wait for it; beyond the second number, no large ones."""

_MEMORY = 2 * 2**30
"""Bytes of a process."""

_NICENESS = 5
"""Tokens of answers come first."""

Result = TypeVar("Result")
GivenUp = Callable[[], Awaitable[bool]]
"""Whether the client that waits for something has gone away."""


class ReaderPool:
    """Reads bodies in ``count`` processes, each body within ``seconds``; one that takes longer loses its process.

    Bodies that wait for a process are few, and wait no longer than that either. The processes end with the event loop.
    """

    def __init__(self, count: int = 2, seconds: float = 20.0) -> None:
        self._count, self._seconds = count, seconds
        self._places = anyio.CapacityLimiter(count)
        self._large_places = anyio.CapacityLimiter(max(1, count - 1))
        self._no_limit = anyio.CapacityLimiter(math.inf)  # anyio's own, beside those above
        self._waiting = 0
        self._name, self._pickled = uuid.uuid4().hex, b""

    async def start(self, reader: RequestReader) -> None:
        """Starts the processes, and gives each the reader."""
        to_process.WORKER_MAX_IDLE_TIME = sys.maxsize  # these processes are few, and needed at once after a pause
        self._pickled = await to_thread.run_sync(pickle.dumps, reader)
        async with anyio.create_task_group() as group:
            for _ in range(self._count):
                group.start_soon(self._in_process, _nothing)

    async def run(
        self, do: Callable[[RequestReader, bytes], Result], body: bytes, given_up: GivenUp | None = None
    ) -> Result:
        """What a method of the reader makes of a body, unless the client has given it up while it waited.

        Raises:
            ApiError: the body is refused, given up, or takes too long.
            QueueFullError: too many bodies wait, or this one has waited too long.
        """
        most = _MOST_LARGE_WAITING if len(body) > LARGE else _MOST_WAITING
        if self._waiting >= most:
            raise QueueFullError(f"{most} requests wait to be read; try again later")
        self._waiting += 1
        try:
            async with contextlib.AsyncExitStack() as places:
                with anyio.move_on_after(self._seconds) as waited:
                    if len(body) > LARGE:
                        await places.enter_async_context(self._large_places)
                    await places.enter_async_context(self._places)
                if waited.cancelled_caught:
                    raise QueueFullError("other requests take long to be read; try again later")
                if given_up is not None and await given_up():
                    raise ApiError(499, "the client has gone away")
                return await self._run(do, body)
        finally:
            self._waiting -= 1

    async def _run(self, do: Callable[[RequestReader, bytes], Result], body: bytes) -> Result:
        try:
            with anyio.fail_after(self._seconds):
                return await self._in_process(partial(read, do=do, body=body))
        except (TimeoutError, anyio.BrokenWorkerProcess) as error:
            await self._in_process(_nothing)  # in place of the one that was killed, before the next body needs it
            raise too_much() from error

    async def _in_process(self, do: Callable[[RequestReader], Result]) -> Result:
        """Does something with the reader in a process; one that is new is given the reader with the same call."""
        run = partial(to_process.run_sync, cancellable=True, limiter=self._no_limit)
        with contextlib.suppress(_NoReaderError):
            return await run(_with_reader, self._name, do, b"")
        return await run(_with_reader, self._name, do, self._pickled)


# In a process of a pool

_readers: dict[str, RequestReader] = {}
"""The reader, by the name of its pool."""


class _NoReaderError(Exception):
    """The process is new, and has no reader yet."""


def _with_reader(name: str, do: Callable[[RequestReader], Result], pickled: bytes) -> Result:
    if name not in _readers:
        if not pickled:
            raise _NoReaderError
        _settle()
        _readers.clear()
        _readers[name] = pickle.loads(pickled)
    return do(_readers[name])


def _nothing(_: RequestReader) -> None:
    """Only makes a process ready."""


def _settle() -> None:
    """Makes the process end when the server does, and not before, and limits what it takes."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a supervisor sends to all processes
        signal.signal(each, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        os.nice(_NICENESS)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if most < 0 else min(_MEMORY, most), most))
