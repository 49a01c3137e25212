"""Processes in which bodies are read: a few, which can be killed at any time, and never the server's own."""

import contextlib
import errno
import math
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
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

    Bodies that wait for a process are few, and wait no longer than that either.
    """

    def __init__(self, count: int = 2, seconds: float = 20.0) -> None:
        self._count, self._seconds = count, seconds
        self._places = anyio.CapacityLimiter(count)
        self._large_places = anyio.CapacityLimiter(max(1, count - 1))
        self._no_limit = anyio.CapacityLimiter(math.inf)  # anyio's own, beside those above
        self._waiting = 0
        self._reader: RequestReader | None = None
        self._file = Path()

    async def start(self, reader: RequestReader) -> None:
        """Starts the processes, which load the reader from a file that only this user can read."""
        to_process.WORKER_MAX_IDLE_TIME = sys.maxsize  # these processes are few, and needed at once after a pause
        self._reader, self._file = reader, await to_thread.run_sync(_write, reader)
        async with anyio.create_task_group() as group:
            for _ in range(self._count):
                group.start_soon(self._start_one)

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

    async def close(self) -> None:
        """Drops the file. The processes end with the event loop."""
        self._reader = None
        with contextlib.suppress(OSError):
            self._file.unlink()

    async def _run(self, do: Callable[[RequestReader, bytes], Result], body: bytes) -> Result:
        try:
            with anyio.fail_after(self._seconds):
                await self._keep_file()  # a process can have been ended from outside
                return await to_process.run_sync(_read, self._file, do, body, cancellable=True, limiter=self._no_limit)
        except (TimeoutError, anyio.BrokenWorkerProcess) as error:
            await self._start_one()  # in place of the one that was killed, before the next body needs it
            raise too_much() from error

    async def _start_one(self) -> None:
        await self._keep_file()
        await to_process.run_sync(_load, self._file, cancellable=True, limiter=self._no_limit)

    async def _keep_file(self) -> None:
        """Writes the file again if it is missing: what cleans up temporary files deletes it after some days."""
        if self._reader is not None and not self._file.exists():
            written = await to_thread.run_sync(_write, self._reader)
            written.replace(self._file)


def _write(reader: RequestReader) -> Path:
    with tempfile.NamedTemporaryFile(prefix="selfspec-", suffix=".reader", delete=False) as file:
        pickle.dump(reader, file)
    return Path(file.name)


def _read(file: Path, do: Callable[[RequestReader, bytes], Result], body: bytes) -> Result:
    return read(_load(file), do, body)


@lru_cache(1)
def _load(file: Path) -> RequestReader:
    """The reader, in a process that ends when the server does, and not before."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a supervisor sends to all processes
        signal.signal(each, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        os.nice(_NICENESS)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if most < 0 else min(_MEMORY, most), most))
    reader = pickle.loads(_own_bytes(file))
    assert isinstance(reader, RequestReader)
    return reader


def _own_bytes(file: Path) -> bytes:
    """What is in a file of this user; another one could have made it anew where it was deleted."""
    with file.open("rb") as opened:
        if sys.platform != "win32" and os.fstat(opened.fileno()).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "another user made it; delete it", str(file))
        return opened.read()
