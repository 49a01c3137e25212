"""The ASGI application: routes, and how errors are answered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from selfspec import __version__
from selfspec.errors import SelfSpecError
from selfspec.serve.answer_bodies import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Status,
    Tokenized,
    Version,
    as_json,
)
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.document import body_of, describe
from selfspec.serve.interfaces.infill import InfillRequest
from selfspec.serve.interfaces.messages import CountTokensRequest, MessagesRequest
from selfspec.serve.interfaces.responses import ResponsesRequest
from selfspec.serve.middleware import ApiKey, BodyLimit, HostCheck, RequestLog, respond
from selfspec.serve.page import HEADERS, page_files
from selfspec.serve.reader import RequestReader
from selfspec.serve.reply import Reply
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from selfspec.serve.service import INTERFACES, Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "What is wrong with the request, and with which field of it."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer, for now or because it failed."},
}


def _streamed(events: str, whole: Any = None) -> dict[str, Any]:
    """Says in the OpenAPI document what answers are, and what they are with ``stream``."""
    # OpenAPI 3.2's word for one event of a stream, which FastAPI puts into documents of 3.1 too.
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    text = f"The answer; with `stream`, server-sent events, {events}"
    content = {"text/event-stream": {"itemSchema": event}}
    return {"response_model": whole, "responses": {200: {"description": text, "content": content}}}


_CHATS = _streamed("with a `chat.completion.chunk` each and `[DONE]` at the end.", ChatCompletion)
_COMPLETIONS = _streamed("with a `Completion` each and `[DONE]` at the end.", Completion)

_ROUTES: tuple[tuple[str, str, type[BaseModel], dict[str, Any], str], ...] = (
    ("/v1/chat/completions", "chat", ChatRequest, _CHATS, "Answers a chat."),
    ("/v1/completions", "completions", CompletionRequest, _COMPLETIONS, "Continues one or several texts."),
    (
        "/v1/messages",
        "messages",
        MessagesRequest,
        _streamed("as Anthropic's messages have them."),
        "Answers a chat in the form of Anthropic's interface.",
    ),
    ("/v1/messages/count_tokens", "count_tokens", CountTokensRequest, {}, "Counts the tokens of a chat."),
    (
        "/v1/responses",
        "responses",
        ResponsesRequest,
        _streamed("as OpenAI's responses have them."),
        "Answers a chat in the form of OpenAI's responses; nothing is stored.",
    ),
    (
        "/infill",
        "infill",
        InfillRequest,
        _streamed("as llama.cpp's infill have them."),
        "Writes what is between two texts.",
    ),
    ("/tokenize", "tokenize", TokenizeRequest, {"response_model": Tokenized}, "Encodes a text or a chat."),
    ("/detokenize", "detokenize", DetokenizeRequest, {"response_model": Detokenized}, "Decodes token ids."),
)
"""Routes that take a body: one of the ``INTERFACES``, or else a method of ``RequestReader``, the body, the answer."""

PING_SECONDS = 15.0
"""Seconds without an event after which a stream says that it is alive."""


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Makes the application. Its lifespan starts the service, beside the first requests, and closes it.

    With ``api_keys``, a request for the model needs one of them. Pages of ``cors_origins`` may call the server; ``*``
    are all. With ``hosts``, requests have to name one of them as their host.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Starts the service while requests are answered by status 503, and closes it after the last."""
        starting = asyncio.create_task(service.start())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await service.close()

    app = FastAPI(
        title="selfspec",
        summary="Lossless self-speculative decoding with the interface of OpenAI's API.",
        version=__version__,
        lifespan=lifespan,
        responses=_ERRORS,
        openapi_url=None,  # describe adds it; the pages of docs_url and redoc_url would load scripts from elsewhere
    )
    app.state.service = service
    _add_model_routes(app, service)
    _add_own_routes(app, service)
    _add_page(app)
    _add_error_handlers(app)
    # The last one added is the outermost: ids and logs, then the host, CORS, the key, and the body.
    describe(app, [asks for _, _, asks, _, _ in _ROUTES])
    app.add_middleware(BodyLimit, service.limits.body_bytes, service.limits.idle_seconds)
    if api_keys:
        app.add_middleware(ApiKey, api_keys)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "x-request-id", "request-id"],
        )
    if hosts is not None:
        app.add_middleware(HostCheck, hosts)
    app.add_middleware(RequestLog, service)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    """The routes that need the model."""
    for path, name, asks, answers, text in _ROUTES:
        route = app.post(path, name=name, description=text, openapi_extra=body_of(asks), **answers)
        route(_writing(service, name) if name in INTERFACES else _reading(service, getattr(RequestReader, name)))

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Lists the models that are served."""
        return _json(as_json(service.models()))

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> Response:
        """Says whether a model is served."""
        return _json(as_json(service.model(model)))


def _writing(service: Service, interface: str) -> Callable[[Request], Awaitable[Response]]:
    """A route that writes text."""

    async def answer(request: Request) -> Response:
        body, state = await _json_body(request), request.state
        reply = await service.answer(interface, body, state.request_id, state.scope, request.is_disconnected)
        return await _answer(reply, request)

    return answer


def _reading(service: Service, do: Callable[[RequestReader, bytes], bytes]) -> Callable[[Request], Awaitable[Response]]:
    """A route that reads a request and answers with what was found in it."""

    async def read(request: Request) -> Response:
        return _json(await service.read(do, await _json_body(request), request.is_disconnected))

    return read


def _add_own_routes(app: FastAPI, service: Service) -> None:
    """The routes about the server itself."""

    @app.get("/health", response_model=Status)
    async def health() -> Response:
        """Says that the server is alive; with status 503, that its model is being loaded, or its engine failed."""
        service.check_health()
        return _json(as_json(Status(status="ok")))

    @app.get("/ready", response_model=Status)
    async def ready() -> Response:
        """Says whether requests are taken; with status 503, not now."""
        service.check_ready()
        return _json(as_json(Status(status="ready")))

    @app.get("/version", response_model=Version)
    async def version() -> Response:
        """Says the version of selfspec."""
        return _json(as_json(Version(version=__version__)))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    """The page to try the model, and the files that it loads; not part of the interface's document."""

    @app.get("/", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(request: Request) -> Response:
        file = page_files().get(request.path_params.get("name", "index.html"))
        if file is None:
            raise HTTPException(404)
        return Response(file.content, media_type=file.media_type, headers=HEADERS)


def _add_error_handlers(app: FastAPI) -> None:
    """Answers every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    @app.exception_handler(SelfSpecError)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return respond(as_api_error(error), request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        """Errors of HTTP itself, in the form of OpenAI's errors."""
        text = str(error.detail)
        if error.status_code == 404:
            text = f"there is nothing at {request.url.path}; /openapi.json lists what there is"
        elif error.status_code == 405:
            text = f"{request.method} is not allowed at {request.url.path}"
        elif error.status_code == 400:
            text = "the body cannot be read: it must be JSON in UTF-8"
        response = respond(ApiError(error.status_code, text), request.scope)
        response.headers.update(error.headers or {})
        return response


async def _json_body(request: Request) -> bytes:
    """The body of a request, which no page of another origin can send without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    return await request.body()


class _EventStream(StreamingResponse):
    """A reply as server-sent events. However it ends, and if it never began, the reply is closed, and the log told.

    Where there is no event for ``PING_SECONDS``, the reply's ping is sent, since silent connections are dropped.
    """

    def __init__(self, reply: Reply, request: Request) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._events = reply.stream()
        super().__init__(self._events, media_type="text/event-stream", headers=headers)
        self._reply, self._request = reply, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        last = loop.time()

        async def send_noting(message: Message) -> None:
            nonlocal last
            last = loop.time()
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                pinging.cancel()
            await send(message)
            begun.set()

        async def ping() -> None:
            await begun.wait()
            while True:
                await asyncio.sleep(last + PING_SECONDS - loop.time())
                if loop.time() - last >= PING_SECONDS:
                    body = self._reply.ping().encode()
                    await send_noting({"type": "http.response.body", "body": body, "more_body": True})

        pinging = asyncio.create_task(ping())
        try:
            await super().__call__(scope, receive, send_noting)
        finally:
            pinging.cancel()
            await self._events.aclose()
            self._reply.close()
            _log_usage(self._reply, self._request)


async def _answer(reply: Reply, request: Request) -> Response:
    """The response of a reply: a stream, or a body. A client that goes away cancels it."""
    if reply.request.stream:
        return _EventStream(reply, request)
    work, gone = asyncio.ensure_future(reply.whole()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # the client is gone, and the status is for the log
        return _json(await work)
    finally:
        gone.cancel()
        work.cancel()
        reply.close()
        _log_usage(reply, request)


def _log_usage(reply: Reply, request: Request) -> None:
    """Puts how a reply ended, and its numbers of tokens, into the request's line in the log."""
    request.state.log["answer"] = reply.outcome
    if reply.has_ended:
        usage = reply.usage
        request.state.log.update(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"])


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: str | bytes) -> Response:
    """The response of a body."""
    return Response(body, media_type="application/json")
