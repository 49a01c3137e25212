"""What the routes do: requests in, replies out. Knows no HTTP."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from selfspec.serve.answer import Answer
from selfspec.serve.answer_bodies import ModelCard, ModelList, ServedMethods
from selfspec.serve.api_errors import ApiError, renaming
from selfspec.serve.bodies import Bodies, ChatBodies, CompletionBodies
from selfspec.serve.capacity import Limits
from selfspec.serve.formats.dialect import Dialect
from selfspec.serve.interfaces.infill_bodies import InfillBodies
from selfspec.serve.interfaces.message_bodies import MessageBodies
from selfspec.serve.interfaces.response_bodies import ResponseBodies
from selfspec.serve.metrics import Metrics
from selfspec.serve.parameters import check_logprobs, choices_of, to_params
from selfspec.serve.pool import GivenUp, ReaderPool
from selfspec.serve.reader import Prepared, RequestReader, unknown_model
from selfspec.serve.reply import Reply
from selfspec.serve.served_engine import ServedEngine

T = TypeVar("T")

PLAIN = "autoregressive"
"""The method without drafts."""


INTERFACES: Mapping[str, tuple[Callable[[RequestReader, bytes], Prepared], type[Bodies]]] = {
    "chat": (RequestReader.chat, ChatBodies),
    "completions": (RequestReader.completion, CompletionBodies),
    "messages": (RequestReader.message, MessageBodies),
    "responses": (RequestReader.response, ResponseBodies),
    "infill": (RequestReader.infill, InfillBodies),
}
"""The interfaces that write text: how each reads a request, and what writes the bodies of its answers."""


class Service:
    """Answers requests with an engine, which is started before the first one.

    The first of the model's names is the one that replies have; ``adapters`` are models of their own for clients, which
    run beside its weights. ``readers`` parse and encode requests.
    ``draining`` refuses new requests, since the server is about to end; ``active`` counts the requests that are being
    answered; ``failure`` says why the engine could not be started, or failed.
    """

    def __init__(
        self,
        engine: ServedEngine,
        names: Sequence[str],
        limits: Limits | None = None,
        readers: ReaderPool | None = None,
        *,
        adapters: Sequence[str] = (),
    ) -> None:
        self.engine, self.limits = engine, limits or Limits()
        self.names, self.adapters = (*names, *adapters), frozenset(adapters)
        self.metrics = Metrics(self.names[0], engine.stats)
        self.draining = self._readable = False
        self.active = 0
        self._created = int(time.time())
        self._readers = readers or ReaderPool(seconds=self.limits.read_seconds)
        self._failure: BaseException | None = None
        self._dialect: Dialect | None = None

    async def start(self) -> None:
        """Starts the engine, and what reads requests for it, unless that has been done.

        ``failure`` is why that was not possible.
        """
        if self._readable:
            return
        try:
            await self.engine.start()
            self._dialect = await asyncio.to_thread(Dialect, self.engine.tokenizer)
            await self._readers.start(await asyncio.to_thread(self._make_reader))
            self._readable = True
        except Exception as error:
            self._failure = error

    async def close(self) -> None:
        """Ends the engine."""
        await self.engine.close()

    @property
    def failure(self) -> BaseException | None:
        """See the class."""
        return self._failure or self.engine.failure

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.loaded and not self.draining

    @property
    def loaded(self) -> bool:
        """Whether the model is loaded, and bodies can be read."""
        return self._readable and self.engine.ready

    def check_health(self) -> None:
        """Refuses with status 503 if the engine failed, or the model is not loaded yet."""
        if self.failure is not None:
            raise ApiError(503, "the engine failed, and the server ends", code="engine_failed", retry=True)
        if not self.loaded:
            raise ApiError(503, "the model is being loaded; try again soon", code="not_ready", retry=True)

    def check_ready(self) -> None:
        """Refuses with status 503 if no requests are taken."""
        self.check_health()
        if self.draining:
            raise ApiError(503, "the server is about to end and takes no more requests", code="draining", retry=True)

    async def answer(self, interface: str, body: bytes, request_id: str, scope: str, given_up: GivenUp) -> Reply:
        """Begins to answer a request of one of the ``INTERFACES``, whose names errors give to its fields.

        Raises ``ApiError`` if it does not fit, ``SelfSpecError`` if none can be taken now. Requests of one ``scope``
        share what is known of their prompts.
        """
        read, make_bodies = INTERFACES[interface]
        self.check_ready()
        self.engine.queue.check_room()
        prepared = await self.read(read, body, given_up)
        with renaming(prepared.names):
            bodies = make_bodies(prepared, self._adapter(prepared) or self.names[0], self.engine.tokenizer)
            return await self._submit(prepared, bodies, request_id, scope)

    async def read(self, do: Callable[[RequestReader, bytes], T], body: bytes, given_up: GivenUp) -> T:
        """What the reader does with a body, in a process of its own."""
        self.check_health()
        return await self._readers.run(do, body, given_up)

    def models(self) -> ModelList:
        """The models that are served: one, under each of its names, and its adapters."""
        return ModelList(object="list", data=[self.model(name) for name in self.names])

    def model(self, name: str) -> ModelCard:
        """The model of a name; raises ``ApiError`` if there is none."""
        if name not in self.names:
            raise unknown_model(name, self.names)
        self.check_health()
        card = ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="selfspec",
            max_model_len=self.engine.context,
            selfspec=ServedMethods(methods=list(self.engine.methods), method=self.engine.method),
        )
        if name in self.adapters:
            card["parent"] = self.names[0]
        return card

    def _adapter(self, prepared: Prepared) -> str | None:
        """The adapter that a request names as its model."""
        name = prepared.request.model
        return name if name in self.adapters else None

    def _make_reader(self) -> RequestReader:
        engine = self.engine
        return RequestReader(
            engine.tokenizer,
            engine.vocab_size,
            names=self.names,
            methods=engine.methods,
            context=engine.context,
            limits=self.limits,
        )

    async def _submit(self, prepared: Prepared, bodies: Bodies, request_id: str, scope: str) -> Reply:
        request, prompts, n = prepared.request, prepared.prompts, prepared.choices
        adapter = self._adapter(prepared)
        asked = [
            (prompt, params)
            for prompt, each in zip(prompts, to_params(prepared, self.engine, self.limits, adapter), strict=True)
            for params in choices_of(each, n)
        ]
        check_logprobs([params for _, params in asked], [len(prompt) for prompt, _ in asked], self.limits)
        method = request.speculative.method if request.speculative.enabled else PLAIN
        salt = f"{scope}\n{request.cache_salt}" if request.cache_salt else scope
        streams = await self.engine.submit(asked, method=method, request_id=request_id, cache_salt=salt)
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
