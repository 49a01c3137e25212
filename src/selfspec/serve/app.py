"""The ASGI application: routes, and how errors are answered."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from selfspec import __version__
from selfspec.errors import SelfSpecError
from selfspec.serve.api_errors import ApiError, as_api_error, as_invalid
from selfspec.serve.middleware import ApiKey, BodyLimit, RequestLog, respond
from selfspec.serve.page import HEADERS, page_files
from selfspec.serve.reply import Reply
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from selfspec.serve.responses import (
    Body,
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Status,
    Tokenized,
    Version,
)
from selfspec.serve.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "What is wrong with the request, and with which field of it."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer, for now or because it failed."},
}


def create_app(service: Service, *, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()) -> FastAPI:
    """Makes the application. Its lifespan starts the engine, if that is not done, and closes it.

    With ``api_keys``, a request for the model needs one of them. Pages of ``cors_origins`` may call the server; ``*``
    are all.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Starts the service before the first request, and closes it after the last."""
        await service.engine.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="selfspec",
        summary="Lossless self-speculative decoding with the interface of OpenAI's API.",
        version=__version__,
        lifespan=lifespan,
        responses=_ERRORS,
        docs_url=None,  # its pages load scripts from elsewhere; /openapi.json is the document
        redoc_url=None,
    )
    app.state.service = service
    _add_model_routes(app, service)
    _add_own_routes(app, service)
    _add_page(app)
    _add_error_handlers(app)
    # The last one added is the outermost: ids and logs, then CORS, the key, and the body.
    app.add_middleware(BodyLimit, service.limits.body_bytes, service.limits.body_seconds)
    if api_keys:
        app.add_middleware(ApiKey, api_keys)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, service)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    """The routes that need the model."""

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_stream_of(ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers a chat."""
        return await _answer(await service.chat(body, request.state.request_id), request)

    @app.post("/v1/completions", response_model=Completion, responses=_stream_of(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several texts."""
        return await _answer(await service.completion(body, request.state.request_id), request)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Lists the models that are served."""
        return _json(service.models())

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> Response:
        """Says whether a model is served."""
        return _json(service.model(model))

    @app.post("/tokenize", response_model=Tokenized)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Encodes a text or a chat."""
        return _json(await service.tokenize(body))

    @app.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Decodes token ids."""
        return _json(await service.detokenize(body))


def _add_own_routes(app: FastAPI, service: Service) -> None:
    """The routes about the server itself."""

    @app.get("/health", response_model=Status)
    async def health() -> Response:
        """Says that the server is alive; with status 503, that its engine failed."""
        service.check_health()
        return _json(Status(status="ok"))

    @app.get("/ready", response_model=Status)
    async def ready() -> Response:
        """Says whether requests are taken; with status 503, not now."""
        service.check_health()
        if not service.ready:
            why = "the server is about to end" if service.draining else "the model is being loaded"
            raise ApiError(503, why, code="not_ready", retry=True)
        return _json(Status(status="ready"))

    @app.get("/version", response_model=Version)
    async def version() -> Response:
        """Says the version of selfspec."""
        return _json(Version(version=__version__))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    """The page to try the model, and the files that it loads; not part of the interface's document."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return _page_file(name)


def _page_file(name: str) -> Response:
    """A file of the page; 404 if there is none of this name."""
    file = page_files().get(name)
    if file is None:
        raise HTTPException(404)
    return Response(file.content, media_type=file.media_type, headers=HEADERS)


def _add_error_handlers(app: FastAPI) -> None:
    """Answers every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(SelfSpecError)
    async def failed(_: Request, error: SelfSpecError) -> JSONResponse:
        return respond(as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond(as_invalid(error.errors(), error.body))

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
        response = respond(ApiError(error.status_code, text))
        response.headers.update(error.headers or {})
        return response


async def _answer(reply: Reply, request: Request) -> Response:
    """The response of a reply: a stream, or a body. A client that goes away cancels it."""
    if reply.request.stream:
        return StreamingResponse(
            _events(reply, request),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
    work, gone = asyncio.ensure_future(reply.whole()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # the client is gone, and the status is for the log
        return _json(await work)
    finally:
        gone.cancel()
        work.cancel()
        _log_usage(reply, request)


async def _events(reply: Reply, request: Request) -> AsyncIterator[str]:
    """The events of a stream; at its end, however it comes, the log learns how the reply ended."""
    events = reply.stream()
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]
        _log_usage(reply, request)


def _log_usage(reply: Reply, request: Request) -> None:
    """Puts how a reply ended, and its numbers of tokens, into the request's line in the log."""
    request.state.log["answer"] = reply.outcome
    if reply.has_ended:
        usage = reply.usage
        request.state.log.update(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: Body) -> Response:
    """The response of a body."""
    return Response(body.to_json(), media_type="application/json")


def _stream_of(chunk: type[Body]) -> dict[int | str, dict[str, Any]]:
    """Says in the OpenAPI document that with ``stream`` the answer is a stream of such chunks."""
    text = f"The answer; with `stream`, server-sent events with a `{chunk.__name__}` each and `[DONE]` at the end."
    # OpenAPI 3.2's word for one event of a stream, which FastAPI puts into documents of 3.1 too.
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {200: {"description": text, "content": {"text/event-stream": {"itemSchema": event}}}}
