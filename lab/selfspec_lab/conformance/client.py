"""A client of an OpenAI-compatible server, every wait of which has a deadline."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from selfspec.errors import InvalidParameterError, MissingPackageError
from selfspec_lab.conformance.answer import Answer, ServerFaultError
from selfspec_lab.conformance.interfaces import Request

if TYPE_CHECKING:
    import httpx

Result = TypeVar("Result")

_HALF = "the stream ended without a 'finish_reason': only half of it came"

LONGEST_TIMEOUT = 86400.0
"""Seconds."""


class Client:
    """Asks one server.

    Args:
        url: where it listens, with or without ``/v1``.
        model: name of the model; may be set later.
        api_key: sent as a bearer token, if there is one.
        timeout: seconds after which an answer has to be complete.

    Raises:
        InvalidParameterError: the URL is none of HTTP, or the key or the timeout is impossible.
        MissingPackageError: httpx is not installed.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str | None = None, timeout: float = 120.0) -> None:
        self.url, self.model, self.timeout = server_url(url), model, timeout
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise InvalidParameterError(f"--timeout is at most {LONGEST_TIMEOUT:g} seconds, not {timeout}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidParameterError("--api-key has characters that no header can have")
        try:
            import httpx
        except ImportError as error:
            raise MissingPackageError(
                "asking a server needs httpx; run `pip install './lab[conformance]'` in a checkout of selfspec"
            ) from error
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._faults = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        secure = self.url.lower().startswith("https:")  # reading all certificates takes a tenth of a second
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, verify=secure)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def within(self, work: Awaitable[Result]) -> Result:
        """The result of an exchange with the server.

        Raises:
            ServerFaultError: it is not complete after ``timeout`` seconds, or the connection failed.
        """
        try:
            return await asyncio.wait_for(work, self.timeout)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise self._silent() from error
        except self._faults as error:
            if "Timeout" in type(error).__name__:
                raise self._silent() from error
            reason = str(error) or type(error).__name__
            raise ServerFaultError(f"the connection to {self.url} failed: {reason}") from error

    async def ask(self, request: Request) -> Answer:
        """The answer to a request, as one body.

        Raises:
            ServerFaultError: the server answered otherwise, or not in time.
        """
        body = {**request.body(self.model), "stream": False}
        answer = request.interface.answer(await self.json("POST", request.interface.path, body))
        if answer.finish_reason is None:
            raise ServerFaultError("the answer has no 'finish_reason'")
        return answer

    async def ask_streamed(self, request: Request) -> Answer:
        """The answer to a request, as a stream that is read to its end; without tokens.

        Raises:
            ServerFaultError: the server answered otherwise, not in time, or only with half a stream.
        """

        async def read() -> Answer:
            async with self._stream(request) as pieces:
                read = [piece async for piece in pieces]
            reasons = [piece.finish_reason for piece in read if piece.finish_reason is not None]
            if not reasons:
                raise ServerFaultError(_HALF)
            return Answer("".join(piece.text for piece in read), reasons[-1])

        return await self.within(read())

    async def cancel(self, request: Request, pieces_read: int = 2) -> bool:
        """Drops the connection of a stream once some pieces of its text have come.

        Returns:
            Whether the stream was still under way.

        Raises:
            ServerFaultError: the server answered otherwise, or not in time.
        """

        async def read_and_drop() -> bool:
            count = 0
            async with self._stream(request) as pieces:
                async for piece in pieces:
                    if piece.finish_reason is not None:
                        return False
                    count += bool(piece.text)
                    if count == pieces_read:
                        return True
            raise ServerFaultError(_HALF)

        try:
            return await self.within(read_and_drop())
        except ServerFaultError as fault:
            raise ServerFaultError(f"a stream beside another request: {fault}", fault.status) from fault

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON body of an answer with status 200.

        Raises:
            ServerFaultError: the server answered otherwise, or not in time.
        """
        response = await self.send(method, path, body)
        _check(response, "application/json")
        return _parse(response.text)

    async def send(self, method: str, path: str, body: Any = None) -> "httpx.Response":
        """Any answer of the server, read to its end.

        Raises:
            ServerFaultError: there is none in time.
        """
        return await self.within(self._http.request(method, path, json=body))

    @asynccontextmanager
    async def _stream(self, request: Request) -> AsyncIterator[AsyncIterator[Answer]]:
        """The events of a stream; leaving the block closes its connection."""
        path, body = request.interface.path, {**request.body(self.model), "stream": True}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
            _check(response, "text/event-stream")
            yield self._events(request, response)

    async def _events(self, request: Request, response: "httpx.Response") -> AsyncIterator[Answer]:
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield request.interface.answer(_parse(data))

    def _silent(self) -> ServerFaultError:
        return ServerFaultError(f"{self.url} gave no complete answer within {self.timeout:g} seconds")


async def together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of work that is done at the same time. The first error ends all of it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def server_url(url: str) -> str:
    """A server's URL without ``/v1`` and without a slash at its end.

    Raises:
        InvalidParameterError: it is none of HTTP.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid or parts.query or parts.fragment:
        raise InvalidParameterError(f"'{url}' is no URL of a server; give one as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check(response: "httpx.Response", kind: str) -> None:
    """Refuses an answer that is an error, or of another kind; the body of an error has been read."""
    given = response.headers.get("content-type", "").partition(";")[0].strip() or "no content type"
    status = response.status_code
    if status != 200:
        message = f"status {status} at {response.request.url}"
        if status in (401, 403):
            message += "; if the server wants a key, give it by --api-key"
        raise ServerFaultError(f"{message}: {_error_text(response)}", status)
    if given != kind:
        raise ServerFaultError(f"{response.request.url} answered with {given}, not {kind}")


def _error_text(response: "httpx.Response") -> str:
    """What an error says, in one short line."""
    try:
        body = json.loads(response.text)
    except ValueError:
        body = None
    for value in (body.get("error"), body.get("detail"), body.get("message")) if isinstance(body, dict) else ():
        message = value.get("message") if isinstance(value, dict) else value
        if message:
            return " ".join(str(message).split())[:200]
    kind = response.headers.get("content-type", "").partition(";")[0]
    return f"a body of {len(response.content)} bytes ({kind or 'no content type'})"


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerFaultError(f"the server sent no valid JSON: {text[:80]!r}") from error
