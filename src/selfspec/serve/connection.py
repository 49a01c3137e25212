"""A connection: limits of its head, its requests at a time, and the time that it may keep the server waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from selfspec.serve.answer_bodies import as_json
from selfspec.serve.api_errors import ApiError

_MOST_HEADERS = 100
_MOST_PIPELINED = 8
_PART = 64 * 2**10
"""Bytes of a body that are handed over together: each time the application wakes."""


_FRAMING = (b"content-length", b"transfer-encoding")
"""Headers that say where a body ends."""


class _RefusedError(Exception):
    """Ends the parsing of a head."""


@dataclass
class ConnectionLimits:
    """Most connections, bytes of a head, and seconds for a head to arrive or for a client to read what was sent.

    ``waiting`` are the connections that are to send or to read something, in the order in which they began to wait. The
    first of them gives way to a new connection where there are ``connections`` already.
    """

    connections: int = 1024
    head_bytes: int = 32 * 2**10
    seconds: float = 20.0
    waiting: dict[Connection, None] = field(default_factory=dict)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with limits.

    Where a client would rather speak another protocol (Java's asks for HTTP/2 with its first request), it is answered
    in this one.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app = partial(self._answer, self.app)
        self._limits = limits
        self._requests: deque[RequestResponseCycle] = deque()  # not answered yet; the first one is being answered
        self._head: asyncio.TimerHandle | None = None  # until a head has to be complete
        self._written: asyncio.TimerHandle | None = None  # until the client has to have read
        self._unfinished = 0  # bytes since the last ones that ended a head or a message, or were of a body
        self._head_bytes = 0
        self._part = bytearray()  # of the body, not handed over yet
        self._is_upgrade = False  # the parser leaves out the body, since the head asks for another protocol
        self._skips_head = False
        self._refusal = ApiError(400, "the request is not valid HTTP", code="invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, in the place of one that only waits if there are too many."""
        super().connection_made(transport)
        limits = self._limits
        if len(self.connections) > limits.connections:
            gone = next(iter(limits.waiting), self)
            limits.waiting.pop(gone, None)  # its end is told later, and the next connection takes another one's place
            gone.transport.abort()
            if gone is self:
                return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets it."""
        self._stop_waiting()
        self._stop(self._written)
        self.eof_received()
        super().connection_lost(exc)
        self.app = None  # which knows this connection

    def eof_received(self) -> None:
        """Gives up its requests. Of a client that only stops sending TCP says the same as of one that has gone."""
        for cycle in self._requests:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; those of a head that does not end are counted, and of what follows the last part of a body."""
        if self._unfinished > self._limits.head_bytes:
            self.send_400_response(str(self._refused(431, "the head of the request is too large")))
            return
        self._unset_keepalive_if_required()
        self._unfinished += len(data)
        try:
            self._parse(data)
        except HttpParserError:
            self.send_400_response("")
            return
        if self._head is None and self.timeout_keep_alive_task is None and not self._requests:
            self._wait()  # for a head, or the rest of a body that was answered before its end

    def _parse(self, data: bytes) -> None:
        """Parses bytes. What follows a head that asks for another protocol is the rest of this one."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if self._is_upgrade:
                framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
                self._is_upgrade, self._skips_head = False, True
                self.parser = HttpRequestParser(self)
                self.parser.feed_data(b"\r\n".join((b"POST / HTTP/1.1", *framing, b"\r\n")))
            self._parse(data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        """Begins a head."""
        if self._skips_head:
            return
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise self._refused(400, "too many requests are sent before their answers are read")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Takes a part of the URL."""
        if self._skips_head:
            return
        super().on_url(url)
        if len(self.url) > self._limits.head_bytes // 4:
            raise self._refused(414, "the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        if self._skips_head:
            return
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if len(self.headers) > _MOST_HEADERS or self._head_bytes > self._limits.head_bytes:
            raise self._refused(431, "the head of the request is too large")

    def on_headers_complete(self) -> None:
        """Begins to answer."""
        if self._skips_head:
            self._skips_head = False
            return
        self._stop(self._head)
        self._head, self._unfinished, self._head_bytes = None, 0, 0
        self._is_upgrade = self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers)
        super().on_headers_complete()
        self._requests.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Collects parts of a body, of which there can be one for each byte."""
        self._unfinished = 0
        self._part += body
        if len(self._part) >= _PART:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._part:
            part, self._part = bytes(self._part), bytearray()
            super().on_body(part)

    def on_message_complete(self) -> None:
        """From now on the client waits for the server."""
        if self._is_upgrade:
            return
        self._hand_over()
        if not self.flow.write_paused:
            self._stop_waiting()
        self._unfinished = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """From now on the server waits for the client."""
        self._requests.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif not self._requests:
            self._limits.waiting[self] = None

    def timeout_keep_alive_handler(self) -> None:
        """The client has not sent another request."""
        if not self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._limits.waiting[self] = None
        self._written = self.loop.call_later(self._limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop(self._written)
        if self.transport.is_closing():
            self._close()
        elif self._requests:
            self._limits.waiting.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """Answers what cannot be parsed, in the form of all errors."""
        body = as_json(self._refusal.body).encode()
        head = f"HTTP/1.1 {self._refusal.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self._close()

    async def _answer(self, app: Any, *channel: Any) -> None:
        """Answers a request a turn of the event loop later, when it knows whose clients left at once.

        A thousand of them would keep all others waiting.
        """
        await asyncio.sleep(0)
        if not self._requests[0].disconnected:
            await app(*channel)

    def _close(self) -> None:
        """Closes it, at the latest in some seconds: what is left to be written, the client may never read."""
        self.transport.close()
        self._limits.waiting[self] = None
        self._stop(self._written)
        self._written = self.loop.call_later(self._limits.seconds, self.transport.abort)

    def _wait(self) -> None:
        """Waits for a head, for some seconds."""
        self._stop(self._head)
        self._head = self.loop.call_later(self._limits.seconds, self.transport.abort)
        self._limits.waiting[self] = None

    def _stop_waiting(self) -> None:
        self._stop(self._head)
        self._head = None
        self._limits.waiting.pop(self, None)

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def _refused(self, status: int, message: str) -> _RefusedError:
        self._refusal = ApiError(status, message, code="invalid_http")
        return _RefusedError(message)
