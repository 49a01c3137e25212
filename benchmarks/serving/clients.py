"""Clients of the soak, good and bad ones. Each says what came of its request."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serving.chat import text_of
from serving.http import BrokenReplyError, Reply, Server, connected, head, read_head, request
from serving.known import Chat

PATH = "/v1/chat/completions"
PATIENCE = 300.0
"""Seconds after which a request without an answer counts as lost."""

HUGE = 5 * 2**20
"""Bytes of a body that is larger than a server takes."""


@dataclass(frozen=True)
class Outcome:
    """What came of a request.

    Attributes:
        right: whether it is what it should be.
        detail: what it was.
        status: of HTTP; 0 if no head was read.
    """

    right: bool
    detail: str
    status: int = 0


@dataclass(frozen=True)
class Task:
    """A chat that a client has to send.

    Attributes:
        server: where to.
        chat: the chat.
        text: its answer alone.
        dice: the client's random numbers.
        seen: what was answered to requests whose answers alone are not known.
    """

    server: Server
    chat: Chat
    text: str
    dice: random.Random
    seen: dict[tuple[str, str], Any] = field(default_factory=dict)


Client = Callable[[Task], Awaitable[Outcome]]


async def whole(task: Task) -> Outcome:
    """Asks for an answer that is not a stream."""
    request_id = uuid.uuid4().hex
    body = task.chat.body(task.server.model, stream=False, stream_options=None)
    async with request(task.server, "POST", PATH, body, {"x-request-id": request_id}) as reply:
        return await _compared(reply, task, request_id)


async def stream(task: Task) -> Outcome:
    """Reads a stream as fast as it comes."""
    return await _streamed(task, pause=0.0)


async def slow(task: Task) -> Outcome:
    """Reads a stream with pauses."""
    return await _streamed(task, pause=task.dice.uniform(0.02, 0.2))


async def cancel(task: Task) -> Outcome:
    """Drops the connection after some pieces."""
    wanted, text = task.dice.randrange(1, 6), ""
    async with request(task.server, "POST", PATH, task.chat.body(task.server.model)) as reply:
        if reply.status != 200:
            return await refused(reply)
        async for data in reply.events():
            if data == "[DONE]" or not (wanted := wanted - 1):
                break
            text += text_of(json.loads(data))
    return Outcome(task.text.startswith(text), "the beginning of the answer", 200)


async def leave(task: Task) -> Outcome:
    """Drops the connection without waiting for the answer."""
    async with connected(task.server) as (_, writer):
        body = task.chat.body(task.server.model)
        writer.write(head(task.server, "POST", PATH, len(body), {}) + body)
        await writer.drain()
        await asyncio.sleep(task.dice.uniform(0, 2))
    return Outcome(True, "left")


async def cut(task: Task) -> Outcome:
    """Drops the connection in the middle of the body."""
    async with connected(task.server) as (_, writer):
        body = task.chat.body(task.server.model)
        writer.write(head(task.server, "POST", PATH, len(body), {}) + body[: len(body) // 2])
        await writer.drain()
    return Outcome(True, "left")


async def dribble(task: Task) -> Outcome:
    """Sends the body in pieces, with pauses."""
    body, request_id = task.chat.body(task.server.model, stream=False, stream_options=None), uuid.uuid4().hex
    async with connected(task.server) as (reader, writer):
        writer.write(head(task.server, "POST", PATH, len(body), {"x-request-id": request_id}))
        for start in range(0, len(body), 50):
            writer.write(body[start : start + 50])
            await writer.drain()
            await asyncio.sleep(0.1)
        return await _compared(await read_head(reader), task, request_id)


async def huge(task: Task) -> Outcome:
    """Sends a body that is too large; the server may answer before it has read all of it."""
    async with connected(task.server) as (reader, writer):
        writer.write(head(task.server, "POST", PATH, HUGE, {}) + b" " * HUGE)
        return await _client_error(await read_head(reader), 413)


async def empty(task: Task) -> Outcome:
    """Sends no body."""
    async with request(task.server, "POST", PATH) as reply:
        return await _client_error(reply)


async def broken_text(task: Task) -> Outcome:
    """Sends a message that is not UTF-8."""
    body = task.chat.body(task.server.model).replace(b'"content": "', b'"content": "\xff\xfe\xc3')
    async with request(task.server, "POST", PATH, body) as reply:
        return await _client_error(reply)


async def broken_json(task: Task) -> Outcome:
    """Sends half of a JSON body as if it were all."""
    body = task.chat.body(task.server.model)
    async with request(task.server, "POST", PATH, body[: len(body) // 2]) as reply:
        return await _client_error(reply)


async def no_http(task: Task) -> Outcome:
    """Sends bytes that are no request."""
    async with connected(task.server) as (reader, writer):
        writer.write(task.dice.randbytes(200) + b"\r\n\r\n")
        await writer.drain()
        try:
            return await _client_error(await read_head(reader))
        except (BrokenReplyError, ConnectionError):
            return Outcome(True, "the connection was closed")


CLIENTS: dict[Client, int] = {
    **{stream: 30, whole: 25, slow: 10, cancel: 15, leave: 5, cut: 4, dribble: 3},
    **{huge: 1, empty: 2, broken_text: 2, broken_json: 2, no_http: 1},
}
"""The clients, with their shares."""


async def outcome_of(client: Client, task: Task) -> Outcome:
    """Lets a client send its request; also a request that is lost has an outcome."""
    try:
        return await asyncio.wait_for(client(task), PATIENCE)
    except asyncio.TimeoutError:
        return Outcome(False, f"no answer within {PATIENCE:g} seconds")
    except (BrokenReplyError, OSError, ValueError) as error:
        return Outcome(False, f"{type(error).__name__}: {error}")


async def _streamed(task: Task, pause: float) -> Outcome:
    async with request(task.server, "POST", PATH, task.chat.body(task.server.model)) as reply:
        if reply.status != 200:
            return await refused(reply)
        text, reason = await read_stream(reply, pause)
    return Outcome(False, "the stream has no end", 200) if reason is None else same(text, task, 200)


async def read_stream(reply: Reply, pause: float = 0.0) -> tuple[str, str | None]:
    """The text of a chat's stream, and why it ended; ``None`` if it does not say so.

    Raises:
        BrokenReplyError: there is an error in the stream.
    """
    text, reason = "", None
    async for data in reply.events():
        if data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise BrokenReplyError(f"an error in the stream: {chunk['error']}")
            text += text_of(chunk)
            reason = next((choice.get("finish_reason") for choice in chunk["choices"]), None) or reason
        await asyncio.sleep(pause)
    return text, reason


async def _compared(reply: Reply, task: Task, request_id: str) -> Outcome:
    if reply.status != 200:
        return await refused(reply)
    if reply.headers.get("x-request-id") != request_id:
        return Outcome(False, "the id of another request", reply.status)
    body: dict[str, Any] = json.loads(await reply.body())
    return same(body["choices"][0]["message"]["content"], task, reply.status)


def same(text: str, task: Task, status: int) -> Outcome:
    """Whether a text is the one that the chat has alone."""
    right = text == task.text
    return Outcome(right, "the text alone" if right else f"{text!r} instead of {task.text!r}", status)


async def refused(reply: Reply) -> Outcome:
    """An answer that should have been given; a full queue may say so."""
    text = (await reply.body()).decode("utf-8", "replace")
    return Outcome(reply.status == 429 and "retry-after" in reply.headers, f"refused: {text[:300]}", reply.status)


async def _client_error(reply: Reply, *expected: int) -> Outcome:
    right = reply.status in (expected or range(400, 500))
    return Outcome(right, f"status {reply.status}", reply.status)
