"""What the routes do: requests in, replies out. Knows no HTTP."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from selfspec.async_engine import RequestStream
from selfspec.serve.answer import Answer
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.bodies import Bodies, ChatBodies, CompletionBodies
from selfspec.serve.inputs import (
    FIELDS,
    RequestEncoder,
    RequestLimits,
    check_completion,
    choices_of,
    count_choices,
    to_params,
)
from selfspec.serve.metrics import Metrics
from selfspec.serve.reply import Reply
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from selfspec.serve.responses import Detokenized, ModelCard, ModelList, ServedMethods, Tokenized
from selfspec.serve.served_engine import ServedEngine

T = TypeVar("T")

PLAIN = "autoregressive"
"""The method without drafts."""


class Service:
    """Answers requests with an engine, which is started before the first one.

    The first of the model's names is the one that replies have. ``draining`` refuses new requests, since the server is
    about to end; ``active`` counts the requests that are being answered.
    """

    def __init__(self, engine: ServedEngine, names: Sequence[str], limits: RequestLimits | None = None) -> None:
        self.engine, self.names, self.limits = engine, tuple(names), limits or RequestLimits()
        self.metrics = Metrics(self.names[0], engine.stats)
        self.draining = False
        self.active = 0
        self._created = int(time.time())
        self._thread = ThreadPoolExecutor(1, "selfspec-encode")  # texts are encoded beside the event loop
        self._encoder: RequestEncoder | None = None

    async def close(self) -> None:
        """Ends the engine."""
        await self.engine.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check_health(self) -> None:
        """Refuses with status 503 if the engine failed."""
        if self.engine.failure is not None:
            raise ApiError(503, "the engine failed, and the server ends", code="engine_failed", retry=True)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.engine.ready and not self.draining

    async def chat(self, request: ChatRequest, request_id: str) -> Reply:
        """Begins to answer a chat; raises ``ApiError`` if it does not fit or cannot be taken now."""
        self._check(request)
        n = count_choices(request, 1, self.limits)
        prompt = await self._off_loop(lambda encoder: encoder.chat(request))
        bodies = ChatBodies(request, self.names[0], self.engine.tokenizer)
        return await self._reply(request, [prompt], n, bodies, request_id)

    async def completion(self, request: CompletionRequest, request_id: str) -> Reply:
        """Begins to answer a completion; raises ``ApiError`` if it does not fit or cannot be taken now."""
        self._check(request)
        check_completion(request)
        prompts = await self._off_loop(lambda encoder: encoder.completion(request))
        n = count_choices(request, len(prompts), self.limits)
        bodies = CompletionBodies(request, self.names[0], self.engine.tokenizer)
        return await self._reply(request, prompts, n, bodies, request_id)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """The token ids of a text or a chat."""
        self._check_model(request.model)

        def encode(encoder: RequestEncoder) -> tuple[list[int], list[str]]:
            if request.messages is not None:
                found = encoder.messages(request.messages, add_generation_prompt=request.add_generation_prompt)
            else:
                found = encoder.text(request.prompt or "", add_special_tokens=request.add_special_tokens)
            return found, encoder.token_strings(found) if request.return_token_strs else []

        token_ids, texts = await self._off_loop(encode)
        answer = Tokenized(count=len(token_ids), max_model_len=self.engine.context, tokens=token_ids)
        if request.return_token_strs:
            answer.token_strs = texts
        return answer

    async def detokenize(self, request: DetokenizeRequest) -> Detokenized:
        """The text of token ids."""
        self._check_model(request.model)
        return Detokenized(prompt=await self._off_loop(lambda encoder: encoder.decode(request.tokens)))

    def models(self) -> ModelList:
        """The models that are served: one, under each of its names."""
        return ModelList(object="list", data=[self.model(name) for name in self.names])

    def model(self, name: str) -> ModelCard:
        """The model of a name; raises ``ApiError`` if there is none."""
        self._check_model(name)
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="selfspec",
            max_model_len=self.engine.context,
            selfspec=ServedMethods(methods=list(self.engine.methods), method=self.engine.method),
        )

    def _check(self, request: GenerationRequest) -> None:
        self._check_model(request.model)
        asked, methods = request.speculative.method, self.engine.methods
        if asked is not None and asked not in methods:
            raise ApiError(
                400,
                f"there is no method '{asked}' here; this server has {', '.join(methods)}",
                param="speculative.method",
                code="invalid_value",
            )
        self.check_health()
        if self.draining:
            raise ApiError(503, "the server is about to end and takes no more requests", code="draining", retry=True)
        if not self.engine.ready:
            raise ApiError(503, "the model is being loaded; try again soon", code="not_ready", retry=True)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"there is no model '{name}' here; this server has {' and '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def _reply(
        self, request: GenerationRequest, prompts: Sequence[list[int]], n: int, bodies: Bodies, request_id: str
    ) -> Reply:
        """Submits ``n`` requests for each prompt, or none."""
        asked = [
            (prompt, params)
            for prompt in prompts
            for params in choices_of(to_params(request, len(prompt), self.engine.context, self.limits), n)
        ]
        echoed: list[list[tuple[str, int]]] = [[] for _ in prompts]
        if isinstance(request, CompletionRequest) and request.echo:
            echoed = await self._off_loop(lambda encoder: [encoder.texts(prompt) for prompt in prompts])
        method = request.speculative.method if request.speculative.enabled else PLAIN
        streams: list[RequestStream] = []
        try:
            for index, (token_ids, params) in enumerate(asked):
                name = request_id if len(asked) == 1 else f"{request_id}-{index}"
                streams.append(await self.engine.submit(token_ids, params, method=method, request_id=name))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, Exception):
                raise as_api_error(error, FIELDS, request.prompt_field) from error
            raise
        answers = [
            Answer(index, stream, request, self.engine, method or self.engine.method, echoed[index // n])
            for index, stream in enumerate(streams)
        ]
        return Reply(request, answers, bodies, [len(prompt) for prompt in prompts], self.metrics)

    async def _off_loop(self, encode: Callable[[RequestEncoder], T]) -> T:
        """Encodes in a thread of its own."""
        if self._encoder is None:
            self._encoder = RequestEncoder(self.engine.tokenizer, self.engine.vocab_size)
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, self._encoder)
