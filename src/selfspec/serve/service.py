"""What the routes do: requests in, replies out. Knows no HTTP."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from selfspec.serve.answer import Answer
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.bodies import Bodies, ChatBodies, CompletionBodies
from selfspec.serve.formats.dialect import Dialect
from selfspec.serve.inputs import RequestEncoder, RequestLimits
from selfspec.serve.interfaces.infill_bodies import InfillBodies
from selfspec.serve.interfaces.message_bodies import MessageBodies
from selfspec.serve.interfaces.response_bodies import ResponseBodies
from selfspec.serve.metrics import Metrics
from selfspec.serve.parameters import check_logprobs, choices_of, fields_of, to_params
from selfspec.serve.pool import ReaderPool, Readers
from selfspec.serve.reader import Prepared, RequestReader, unknown_model
from selfspec.serve.reply import Reply
from selfspec.serve.responses import ModelCard, ModelList, ServedMethods
from selfspec.serve.served_engine import ServedEngine

T = TypeVar("T")

PLAIN = "autoregressive"
"""The method without drafts."""


class Service:
    """Answers requests with an engine, which is started before the first one.

    The first of the model's names is the one that replies have. ``readers`` parse and encode requests.
    ``draining`` refuses new requests, since the server is about to end; ``active`` counts the requests that are being
    answered; ``failure`` says why the engine could not be started, or failed.
    """

    def __init__(
        self,
        engine: ServedEngine,
        names: Sequence[str],
        limits: RequestLimits | None = None,
        readers: Readers | None = None,
    ) -> None:
        self.engine, self.names, self.limits = engine, tuple(names), limits or RequestLimits()
        self.metrics = Metrics(self.names[0], engine.stats)
        self.draining = self._readable = False
        self.active = 0
        self._created = int(time.time())
        self._readers = readers or ReaderPool(seconds=self.limits.read_seconds)
        self._failure: BaseException | None = None
        self._dialect: Dialect | None = None

    async def start(self) -> None:
        """Starts the engine, and what reads requests for it; ``failure`` is why that was not possible."""
        try:
            await self.engine.start()
            self._dialect = await asyncio.to_thread(Dialect, self.engine.tokenizer)
            await self._readers.start(await asyncio.to_thread(self._make_reader))
            self._readable = True
        except Exception as error:
            self._failure = error

    async def close(self) -> None:
        """Ends the engine."""
        await self._readers.close()
        await self.engine.close()

    @property
    def failure(self) -> BaseException | None:
        """See the class."""
        return self._failure or self.engine.failure

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._readable and self.engine.ready and not self.draining

    def check_health(self) -> None:
        """Refuses with status 503 if the engine failed, or the model is not loaded yet."""
        if self.failure is not None:
            raise ApiError(503, "the engine failed, and the server ends", code="engine_failed", retry=True)
        if not (self._readable and self.engine.ready):
            raise ApiError(503, "the model is being loaded; try again soon", code="not_ready", retry=True)

    def check_ready(self) -> None:
        """Refuses with status 503 if no requests are taken."""
        self.check_health()
        if self.draining:
            raise ApiError(503, "the server is about to end and takes no more requests", code="draining", retry=True)

    async def chat(self, body: bytes, request_id: str, scope: str = "") -> Reply:
        """Begins to answer a chat; raises ``ApiError`` if it does not fit or cannot be taken now.

        Requests of one ``scope`` share what is known of their prompts.
        """
        prepared = await self._prepare(RequestReader.chat, body)
        bodies = ChatBodies(prepared.request, self.names[0], self.engine.tokenizer)
        return await self._reply(prepared, bodies, request_id, scope)

    async def completion(self, body: bytes, request_id: str, scope: str = "") -> Reply:
        """Begins to answer a completion; see ``chat``."""
        prepared = await self._prepare(RequestReader.completion, body)
        bodies = CompletionBodies(prepared.request, self.names[0], self.engine.tokenizer)
        return await self._reply(prepared, bodies, request_id, scope)

    async def message(self, body: bytes, request_id: str, scope: str = "") -> Reply:
        """Begins to answer a request to ``/v1/messages``; see ``chat``."""
        prepared = await self._prepare(RequestReader.message, body)
        return await self._reply(prepared, MessageBodies(self.names[0]), request_id, scope)

    async def response(self, body: bytes, request_id: str, scope: str = "") -> Reply:
        """Begins to answer a request to ``/v1/responses``; see ``chat``."""
        prepared = await self._prepare(RequestReader.response, body)
        bodies = ResponseBodies(self.names[0], prepared.repeated, prepared.namespaces)
        return await self._reply(prepared, bodies, request_id, scope)

    async def infill(self, body: bytes, request_id: str, scope: str = "") -> Reply:
        """Begins to answer a request to ``/infill``; see ``chat``."""
        prepared = await self._prepare(RequestReader.infill, body)
        return await self._reply(prepared, InfillBodies(self.names[0]), request_id, scope)

    async def count_tokens(self, body: bytes) -> bytes:
        """The number of tokens of a message, as JSON."""
        return await self._read(RequestReader.count_tokens, body)

    async def tokenize(self, body: bytes) -> bytes:
        """The token ids of a text or a chat, as JSON."""
        return await self._read(RequestReader.tokenize, body)

    async def detokenize(self, body: bytes) -> bytes:
        """The text of token ids, as JSON."""
        return await self._read(RequestReader.detokenize, body)

    def models(self) -> ModelList:
        """The models that are served: one, under each of its names."""
        return ModelList(object="list", data=[self.model(name) for name in self.names])

    def model(self, name: str) -> ModelCard:
        """The model of a name; raises ``ApiError`` if there is none."""
        if name not in self.names:
            raise unknown_model(name, self.names)
        self.check_health()
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="selfspec",
            max_model_len=self.engine.context,
            selfspec=ServedMethods(methods=list(self.engine.methods), method=self.engine.method),
        )

    def _make_reader(self) -> RequestReader:
        engine = self.engine
        encoder = RequestEncoder(engine.tokenizer, engine.vocab_size)
        return RequestReader(
            encoder, names=self.names, methods=engine.methods, context=engine.context, limits=self.limits
        )

    async def _prepare(self, do: Callable[[RequestReader, bytes], Prepared], body: bytes) -> Prepared:
        """Reads a request for text, if there is room for one."""
        self.check_ready()
        try:
            self.engine.check_room()
        except Exception as error:
            raise as_api_error(error) from error
        return await self._read(do, body)

    async def _read(self, do: Callable[[RequestReader, bytes], T], body: bytes) -> T:
        self.check_health()
        return await self._readers.run(do, body)

    async def _reply(self, prepared: Prepared, bodies: Bodies, request_id: str, scope: str) -> Reply:
        """Submits the choices of each prompt, or none; names fields as the request's interface does."""
        try:
            return await self._submit(prepared, bodies, request_id, scope)
        except ApiError as error:
            error.param = prepared.names.get(error.param or "", error.param)
            raise

    async def _submit(self, prepared: Prepared, bodies: Bodies, request_id: str, scope: str) -> Reply:
        request, prompts, n = prepared.request, prepared.prompts, prepared.choices
        asked = [
            (prompt, params)
            for prompt in prompts
            for params in choices_of(to_params(prepared, len(prompt), self.engine.context, self.limits), n)
        ]
        check_logprobs([params for _, params in asked], [len(prompt) for prompt, _ in asked], self.limits)
        method = request.speculative.method if request.speculative.enabled else PLAIN
        salt = f"{scope}\n{request.cache_salt}" if request.cache_salt else scope
        try:
            streams = await self.engine.submit(asked, method=method, request_id=request_id, cache_salt=salt)
        except Exception as error:
            raise as_api_error(error, fields_of(prepared), request.prompt_field) from error
        assert self._dialect is not None, "the service is not started"
        echoed = prepared.echoed or [[] for _ in prompts]
        answers = [
            Answer(
                index,
                stream,
                request,
                self.engine,
                method or self.engine.method,
                echoed[index // n],
                self._dialect.reader(prepared.asked, thinks=prepared.thinks) if prepared.asked is not None else None,
            )
            for index, stream in enumerate(streams)
        ]
        lengths = [len(prompt) for prompt in prompts]
        return Reply(request, answers, bodies, lengths, self.metrics, self.limits.request_seconds)
