"""What surrounds every request: its id, its line in the log, the API key, and the limits of its body."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import anyio
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_errors import ApiError
from selfspec.serve.logs import log
from selfspec.serve.service import Service

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_WATCHED = ("/health", "/ready", "/metrics")
"""Asked every few seconds by whatever watches a server."""

_SMALL = 64 * 2**10
_MOST_LARGE = 16
"""Bodies of more than 64 KiB that may arrive at a time; after that those who read them have limits of their own."""

_LARGE_SECONDS = 1.0
"""Seconds that a body of more than 64 KiB has to arrive, where others wait for its place."""

_PROTECTED = ("/v1/", "/infill", "/tokenize", "/detokenize")

_UNREAD = 4 * 2**10
"""Bytes of the body of a request that needs no key: nothing reads it, and it takes no place from those that do."""


class RequestLog:
    """Gives every request an id and writes a line about it; answers unexpected exceptions.

    A request's own ``x-request-id`` is taken if it is short and plain. The answer has the same header, that of
    ``/v1/messages`` also under Anthropic's name. Routes put more fields of the line into ``scope["state"]["log"]``. The
    service counts the active requests and the statuses of answers: 499 for one that was given up.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        request_id = _header(scope, b"x-request-id")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        fields: dict[str, object] = {"request_id": request_id, "method": scope["method"], "path": scope["path"]}
        state = scope.setdefault("state", {})
        state["request_id"], state["log"], state["scope"] = request_id, fields, ""
        self._service.active += 1

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the protocol, which keeps its own scope, sends the headers alone

        async def send_with_id(message: Message) -> None:
            """Sends on, with the id of the request in the headers."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id") if _is_anthropics(scope) else (b"x-request-id",)
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and its time to complete answers is over
            if status:
                raise
            ends = ApiError(503, "the server ends, and has no more time for this request", code="draining", retry=True)
            await respond(ends, scope)(scope, receive, send_with_id)
        except Exception as error:
            log("request failed", logging.ERROR, error=error, fields=fields)
            if status:  # the answer has begun: all that is left is to end it
                raise
            fails = ApiError(500, "the server failed; its log says why, under this x-request-id")
            await respond(fails, scope)(scope, receive, send_with_id)
        finally:
            self._service.active -= 1
            self._service.metrics.response(status or 499)
            seconds = round(time.perf_counter() - began, 4)
            level = logging.DEBUG if scope["path"] in _WATCHED and status == 200 else logging.INFO
            log("request", level, fields={"status": status or 499, "seconds": seconds, **fields})


class HostCheck:
    """Refuses requests that name another host: pages of others, whose names lead to this machine (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "http":
            try:
                host = urlsplit(f"//{_header(scope, b'host')}").hostname
            except ValueError:
                host = None
            if host not in self._hosts:
                text = "the header 'Host' names another host; --allowed-host allows it"
                await respond(ApiError(403, text, code="host_not_allowed"), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKey:
    """Refuses requests for the model without one of the keys. Health, metrics and the page need none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http" or not _is_protected(scope):
            await self._app(scope, receive, send)
            return
        if (key := self._key(scope)) is not None:
            scope["state"]["scope"] = hashlib.sha256(self._keys[key]).hexdigest()  # the same after a restart
            await self._app(scope, receive, send)
            return
        text = "a valid API key is needed in the header 'Authorization: Bearer KEY'"
        await respond(ApiError(401, text, code="invalid_api_key"), scope)(scope, receive, send)

    def _key(self, scope: Scope) -> int | None:
        """Which of the keys a request has; ``None`` for none of them."""
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        given = given if scheme.lower() == "bearer" else _header(scope, b"x-api-key")  # as Anthropic's clients send it
        key = given.strip().encode("latin-1")
        # All keys are compared, each in constant time, so that the time says nothing about them.
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return matches.index(True) if any(matches) else None


class BodyLimit:
    """Refuses bodies that are too large or come too slowly, and large ones while too many others arrive.

    Those of requests that need no key are small, so that clients without one do not take the places of large ones.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, most_seconds: float) -> None:
        self._app, self._most_bytes, self._most_seconds = app, most_bytes, most_seconds
        self._large: dict[anyio.CancelScope, float] = {}  # when those above _SMALL began that are arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = None
        try:
            with anyio.move_on_after(self._most_seconds) as time_left:
                body = await self._read(scope, receive, time_left)
            if time_left.cancelled_caught:
                text = f"the body did not arrive within {self._most_seconds:g} seconds, or slowly while others waited"
                raise ApiError(408, text, code="timeout")
        except ApiError as error:
            await respond(error, scope, close=bool(_header(scope, b"expect")))(scope, receive, send)
            return
        if body is None:  # the client went away
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            """The body that was read, as one message, and then what the client sends."""
            return messages.pop() if messages else await receive()

        del body  # what reads it is to hold the only copy
        await self._app(scope, receive_body, send)

    async def _read(self, scope: Scope, receive: Receive, time_left: anyio.CancelScope) -> bytes | None:
        """The whole body, unless it is too large; ``None`` if the client went away."""
        declared = _header(scope, b"content-length")
        most = self._most_bytes if _is_protected(scope) else min(_UNREAD, self._most_bytes)
        if declared.isdigit() and int(declared[:20]) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                if len(body) > _SMALL and time_left not in self._large:
                    self._make_room()
                    self._large[time_left] = time.monotonic()
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self._large.pop(time_left, None)

    def _make_room(self) -> None:
        """Gives up the large body that has been arriving for longest, so that slow clients do not keep others out."""
        if len(self._large) < _MOST_LARGE:
            return
        slowest, began = next(iter(self._large.items()))
        if time.monotonic() - began < _LARGE_SECONDS:
            raise ApiError(429, "too many large requests at a time; try again", code="busy", retry=True)
        del self._large[slowest]
        slowest.cancel()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes; send less", code="body_too_large")


def respond(error: ApiError, scope: Scope, *, close: bool = False) -> JSONResponse:
    """The response of an error to a request, to ``/v1/messages`` in Anthropic's form.

    With ``close`` it is the last on its connection: the body of a client that asks before it sends one may never come.
    Others' bodies are read to their end, and dropped: before that, many clients do not look for an answer.
    """
    body = error.body
    if _is_anthropics(scope):
        body = {**error.messages_body, "request_id": scope["state"]["request_id"]}
    response = JSONResponse(body, error.status, error.headers)
    if close:
        response.headers["Connection"] = "close"
    return response


def _is_protected(scope: Scope) -> bool:
    """Whether a request needs a key, if there are keys. With OPTIONS a browser asks what it may send, without one."""
    return str(scope["path"]).startswith(_PROTECTED) and scope["method"] != "OPTIONS"


def _is_anthropics(scope: Scope) -> bool:
    """Whether a request is to Anthropic's interface."""
    return str(scope["path"]).startswith("/v1/messages")


def _header(scope: Scope, name: bytes) -> str:
    """The value of a request's header; empty if it has none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
