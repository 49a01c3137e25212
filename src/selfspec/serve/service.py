"""What the routes do: requests in, replies out. Knows no HTTP."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from selfspec import __version__
from selfspec.async_engine import RequestStream
from selfspec.serve.answer import Answer, AnswerOptions
from selfspec.serve.api_errors import ApiError, as_api_error
from selfspec.serve.encoder import RequestEncoder
from selfspec.serve.forms import ChatForm, CompletionForm, Form, TokenNames
from selfspec.serve.metrics import Metrics
from selfspec.serve.reply import Reply
from selfspec.serve.request_params import (
    FIELDS,
    RequestLimits,
    asked_logprobs,
    check_completion,
    choices_of,
    count_choices,
    stop_strings,
    to_params,
)
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    Speculative,
    TokenizeRequest,
)
from selfspec.serve.responses import Detokenized, ModelCard, ModelList, ServedMethods, Tokenized
from selfspec.serve.served_engine import ServedEngine
from selfspec.types import SamplingParams

T = TypeVar("T")

PLAIN = "autoregressive"
"""The method without drafts."""


class Service:
    """Answers requests with an engine.

    Args:
        engine: writes the answers; started before the first request.
        names: of the model, the first of which is the one that replies have.
        limits: the largest request that is taken.

    Attributes:
        metrics: of all requests.
        draining: whether new requests are refused, since the server is about to end.
        active: requests that are being answered.
    """

    def __init__(self, engine: ServedEngine, names: Sequence[str], limits: RequestLimits | None = None) -> None:
        self.engine, self.names, self.limits = engine, tuple(names), limits or RequestLimits()
        self.metrics = Metrics(self.names[0], engine.stats)
        self.draining = False
        self.active = 0
        self._started = False
        self._created = int(time.time())
        self._thread = ThreadPoolExecutor(1, "selfspec-encode")  # texts are encoded beside the event loop
        self._encoder: RequestEncoder | None = None

    async def start(self) -> None:
        """Starts the engine, unless that has been done.

        Raises:
            SelfSpecError: it cannot be started.
        """
        if not self._started:
            await self.engine.start()
            self._started = True

    async def close(self) -> None:
        """Ends the engine."""
        await self.engine.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def request_began(self) -> None:
        """Counts a request that has come."""
        self.active += 1

    def request_ended(self, status: int) -> None:
        """Counts a request that has been answered with a status."""
        self.active -= 1
        self.metrics.response(status)

    def check_health(self) -> None:
        """Refuses with status 503 if the engine failed."""
        if self.engine.failure is not None:
            raise ApiError(503, "the engine failed, and the server ends", code="engine_failed", retry=True)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.engine.ready and not self.draining

    async def chat(self, request: ChatRequest, request_id: str) -> Reply:
        """Begins to answer a chat.

        Raises:
            ApiError: the request does not fit, or cannot be taken now.
        """
        self._check(request)
        n = count_choices(request, 1, self.limits)
        prompt = await self._off_loop(lambda encoder: encoder.chat(request))
        params = to_params(request, len(prompt), self.engine.context, self.limits)
        streams = await self._submit(
            request, [(prompt, each) for each in choices_of(params, n)], request_id, "messages"
        )
        form = ChatForm(self._head("chatcmpl"), self._token_names(request))
        tools = bool(request.tools) and request.tool_choice != "none"
        return self._reply(request, streams, form, [len(prompt)], tools=tools)

    async def completion(self, request: CompletionRequest, request_id: str) -> Reply:
        """Begins to answer a completion.

        Raises:
            ApiError: the request does not fit, or cannot be taken now.
        """
        self._check(request)
        check_completion(request)
        prompts = await self._off_loop(lambda encoder: encoder.completion(request))
        n = count_choices(request, len(prompts), self.limits)
        asked: list[tuple[list[int], SamplingParams]] = []
        for prompt in prompts:
            params = to_params(request, len(prompt), self.engine.context, self.limits)
            asked += [(prompt, each) for each in choices_of(params, n)]
        texts = await self._off_loop(lambda encoder: [encoder.texts(prompt) for prompt in prompts if request.echo])
        echoed = {index: texts[index // n] for index in range(len(asked))} if texts else {}
        streams = await self._submit(request, asked, request_id, "prompt")
        form = CompletionForm(self._head("cmpl"), self._token_names(request), echoed)
        return self._reply(request, streams, form, [len(prompt) for prompt in prompts], echoed=echoed)

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
        return ModelList(object="list", data=[self._card(name) for name in self.names])

    def model(self, name: str) -> ModelCard:
        """The model of a name.

        Raises:
            ApiError: there is none.
        """
        self._check_model(name)
        return self._card(name)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="selfspec",
            max_model_len=self.engine.context,
            selfspec=ServedMethods(methods=list(self.engine.methods), method=self.engine.method),
        )

    def _check(self, request: Sampled) -> None:
        self._check_model(request.model)
        self._method(request.speculative)
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

    def _method(self, asked: Speculative) -> str | None:
        """The name of the method; ``None`` for the server's own."""
        methods = self.engine.methods
        if asked.method is not None and asked.method not in methods:
            raise ApiError(
                400,
                f"there is no method '{asked.method}' here; this server has {', '.join(methods)}",
                param="speculative.method",
                code="invalid_value",
            )
        return asked.method if asked.enabled else PLAIN

    async def _submit(
        self, request: Sampled, asked: Sequence[tuple[list[int], SamplingParams]], request_id: str, prompt: str
    ) -> list[RequestStream]:
        """Submits all prompts, or none."""
        method, streams = self._method(request.speculative), list[RequestStream]()
        try:
            for index, (token_ids, params) in enumerate(asked):
                name = request_id if len(asked) == 1 else f"{request_id}-{index}"
                streams.append(await self.engine.submit(token_ids, params, method=method, request_id=name))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, Exception):
                raise as_api_error(error, FIELDS, prompt) from error
            raise
        return streams

    def _reply(
        self,
        request: Sampled,
        streams: Sequence[RequestStream],
        form: Form,
        prompts: Sequence[int],
        *,
        tools: bool = False,
        echoed: Mapping[int, Sequence[tuple[str, int]]] | None = None,
    ) -> Reply:
        options = AnswerOptions(
            stop=stop_strings(request),
            include_stop=request.include_stop_str_in_output,
            tools=tools,
            logprobs=asked_logprobs(request),
            report=request.speculative.report,
        )
        method = self._method(request.speculative) or self.engine.method
        begins = ["".join(text for text, _ in (echoed or {}).get(index, ())) for index in range(len(streams))]
        answers = [
            Answer(index, stream, options, self.engine, method, begins[index]) for index, stream in enumerate(streams)
        ]
        return Reply(answers, form, prompts, self.metrics)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.names[0],
            "system_fingerprint": f"selfspec-{__version__}",
        }

    def _token_names(self, request: Sampled) -> TokenNames:
        return TokenNames(self.engine.tokenizer, as_ids=request.return_tokens_as_token_ids)

    async def _off_loop(self, encode: Callable[[RequestEncoder], T]) -> T:
        """Encodes in a thread of its own."""
        if self._encoder is None:
            self._encoder = RequestEncoder(self.engine.tokenizer, self.engine.vocab_size)
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, self._encoder)
