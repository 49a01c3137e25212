"""A small HTTP client: little work per token, and free to misbehave, which clients of libraries are not."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

_LAST_CHUNK = b"0\r\n\r\n"


class BrokenReplyError(Exception):
    """The reply ended early, or is no HTTP."""


@dataclass(frozen=True)
class Server:
    """Where a server listens.

    Attributes:
        host: its name or address.
        port: its port.
        model: the model's name in requests.
    """

    host: str
    port: int
    model: str


@dataclass(frozen=True)
class Reply:
    """The head of a reply; its body has not been read.

    Attributes:
        status: of HTTP.
        headers: by their names in lower case.
        reader: of the connection.
    """

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            BrokenReplyError: the connection ended before the body did.
        """
        if self.headers.get("transfer-encoding") != "chunked":
            length = self.headers.get("content-length")
            yield await (self.reader.read() if length is None else _exactly(self.reader, int(length)))
            return
        while size := int(await _line(self.reader), 16):
            yield await _exactly(self.reader, size)
            await _line(self.reader)
        await _line(self.reader)

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[str]:
        """The data of the server-sent events, as they arrive."""
        rest = b""
        async for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for data in _data(lines):
                yield data

    async def timed_events(self) -> list[tuple[float, str]]:
        """The data of all server-sent events, and when each arrived, in seconds of ``time.perf_counter``.

        Nothing is parsed before the end, so that reading takes next to no time from a server on the same processors.

        Raises:
            BrokenReplyError: the connection ended before the body did.
        """
        is_chunked, received = self.headers.get("transfer-encoding") == "chunked", list[tuple[float, bytes]]()
        while data := await self.reader.read(2**16):
            received.append((time.perf_counter(), data))
            if is_chunked and data.endswith(_LAST_CHUNK):
                break
        found, rest = [], b""
        for at, chunk in _timed_chunks(received) if is_chunked else received:
            *lines, rest = (rest + chunk).split(b"\n")
            found += [(at, data) for data in _data(lines)]
        return found


def _data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of some lines of server-sent events."""
    return (line[5:].strip().decode() for line in lines if line.startswith(b"data:"))


def _timed_chunks(received: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The chunks of a body as it arrived in pieces, each with the time of its end."""
    whole, ends = b"".join(data for _, data in received), list(accumulate(len(data) for _, data in received))
    place = 0
    while (head := whole.find(b"\r\n", place)) >= 0:
        start, size = head + 2, int(whole[place:head], 16)
        if not size:
            return
        place = start + size + 2
        yield received[min(bisect_left(ends, start + size), len(ends) - 1)][0], whole[start : start + size]
    raise BrokenReplyError("the connection ended within a reply")


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection; it is dropped at once at the end of the block, whatever has been read of it."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def request(
    server: Server, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Reply]:
    """Sends a request on a connection of its own; leaving the block drops the connection.

    Args:
        server: where to.
        method: of HTTP.
        path: of the URL.
        body: any bytes.
        headers: further ones.

    Yields:
        The reply, as soon as its head is there.
    """
    async with connected(server) as (reader, writer):
        writer.write(head(server, method, path, len(body), headers or {}) + body)
        await writer.drain()
        yield await read_head(reader)


def head(server: Server, method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
    """The head of a request with a JSON body of ``length`` bytes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {server.host}:{server.port}", "Connection: close"]
    lines += [f"Content-Length: {length}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def read_head(reader: asyncio.StreamReader) -> Reply:
    """Reads status and headers.

    Raises:
        BrokenReplyError: the connection ended before.
    """
    status = (await _line(reader)).split(maxsplit=2)
    if len(status) < 2 or not status[1].isdigit():
        raise BrokenReplyError(f"the reply begins with {status}")
    headers = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Reply(int(status[1]), headers, reader)


async def get_json(server: Server, path: str) -> tuple[int, Any]:
    """Status and JSON of a page; ``None`` for a body that is no JSON."""
    async with request(server, "GET", path) as reply:
        body = await reply.body()
    try:
        return reply.status, json.loads(body)
    except ValueError:
        return reply.status, None


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise BrokenReplyError("the connection ended within a reply")
    return line.decode("latin-1").rstrip("\r\n")


async def _exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise BrokenReplyError("the connection ended within a reply") from error
