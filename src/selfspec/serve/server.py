"""The process of a server: from a listening socket to the end, after the last answer."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from selfspec.errors import EngineFailedError, SelfSpecError, first_line
from selfspec.serve.address import BACKLOG, Address
from selfspec.serve.connection import Connection, ConnectionLimits
from selfspec.serve.logs import log
from selfspec.serve.service import Service

_OTHER_FILES = 256
_TURN = 0.001
"""Seconds that a thread may keep Python from the event loop, which needs it several times for each answer."""

_HANDSHAKE_SECONDS = 5.0
"""For clients that begin a connection with TLS: until its handshake ends, ``Connection`` does not see it."""

_CLOSING_SECONDS = 5
"""For clients that do not read the last bytes of their answers."""


class Server(uvicorn.Server):
    """Ends gracefully at the first signal, and at once at the second.

    After the first, new requests are refused and ``/ready`` says so; when the last answer is complete, or after
    ``drain_seconds``, the process ends with exit code 0. It also ends if the engine fails: then requests have got their
    errors, and nothing could be answered any more. ``failure`` says why the engine could not be started, or failed.
    Handshakes of TLS have ``handshake_seconds``.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_seconds: float,
        started: Callable[[], None] = lambda: None,
        *,
        handshake_seconds: float = _HANDSHAKE_SECONDS,
    ) -> None:
        super().__init__(config)
        self._service, self._drain_seconds, self._handshake_seconds = service, drain_seconds, handshake_seconds
        self._on_start: Callable[[], None] | None = started
        self._drains_until: float | None = None
        self.failure: SelfSpecError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens. With TLS handshakes have to end in time, for which uvicorn has no option."""
        if not self.config.is_ssl:
            await super().startup(sockets)
            return
        loop = asyncio.get_running_loop()
        listen = loop.create_server
        timed = partial(listen, ssl_handshake_timeout=self._handshake_seconds)
        loop.create_server = timed  # type: ignore[method-assign]
        try:
            await super().startup(sockets)
        finally:
            loop.create_server = listen  # type: ignore[method-assign]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self._drains_until is not None or not self._service.ready:
            os._exit(128 + sig)
        self._drains_until = time.monotonic() + self._drain_seconds
        self._service.draining = True
        log("draining", fields={"signal": signal.Signals(sig).name, "requests": self._service.active})

    async def on_tick(self, counter: int) -> bool:
        """Looks ten times a second whether to end."""
        if self._on_start is not None and self._service.loaded:  # a signal may have come since
            settle_process()
            self._on_start()
            self._on_start = None
        if self.failure is None and (cause := self._service.failure) is not None:
            self.failure, self.should_exit = _as_failure(cause), True
        if self._drains_until is not None and (self._service.active == 0 or time.monotonic() > self._drains_until):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends what is still being written, so that clients are told, and then all connections."""
        if self._service.loaded:
            await self._service.engine.queue.close(drain=False)
        await super().shutdown(sockets)


def settle_process() -> None:
    """Prepares a process that has loaded its model for answering."""
    # What is loaded stays: looking through it again would stop everybody for some tenths of a second.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_TURN)


def _raise_open_files(connections: int) -> None:
    """Lets the process have as many files open as it takes connections, where the system allows it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = connections + _OTHER_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _as_failure(cause: BaseException) -> SelfSpecError:
    """Why the server ends: a model that cannot be served, or an engine that failed."""
    if isinstance(cause, SelfSpecError):
        return cause
    log("the engine failed", logging.CRITICAL, error=cause)
    return EngineFailedError(f"the engine failed: {type(cause).__name__}: {first_line(cause)}")


def run_server(
    app: FastAPI,
    service: Service,
    address: Address,
    listening: socket.socket,
    *,
    drain_seconds: float = 60.0,
    connections: ConnectionLimits | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Answers requests at an address until a signal ends the process; calls ``started`` when it takes requests.

    Raises ``EngineFailedError`` if the engine's thread ended by an exception, another ``SelfSpecError`` if the engine
    cannot be started.
    """
    limits = connections or ConnectionLimits()
    _raise_open_files(limits.connections)
    config = uvicorn.Config(
        app,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # anything that makes a protocol
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ssl_certfile=address.certfile,
        ssl_keyfile=None if address.keyfile is None else str(address.keyfile),
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        timeout_keep_alive=max(1, int(limits.seconds)),
    )
    seconds = min(_HANDSHAKE_SECONDS, limits.seconds)
    server = Server(config, service, drain_seconds, started, handshake_seconds=seconds)
    server.run(sockets=[listening])
    if server.failure is not None:
        raise server.failure
    log("ended")
