"""What the routes do: requests in, replies out. Knows no HTTP."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from selfspec import __version__
from selfspec.serve.answering import Reply
from selfspec.serve.backend import Answer, Backend
from selfspec.serve.chat import ChatForm
from selfspec.serve.choices import Choice, Rules
from selfspec.serve.completions import CompletionForm
from selfspec.serve.errors import ApiError, as_api_error
from selfspec.serve.limits import Limits
from selfspec.serve.logprobs import TokenNames
from selfspec.serve.metrics import Metrics
from selfspec.serve.prompts import RequestEncoder
from selfspec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    Speculative,
    TokenizeRequest,
)
from selfspec.serve.responses import Detokenized, ModelCard, ModelList, ServedMethods, Tokenized
from selfspec.serve.sampling import (
    FIELDS,
    asked_logprobs,
    check_completion,
    choices_of,
    count_choices,
    stop_strings,
    to_params,
)
from selfspec.types import SamplingParams

T = TypeVar("T")

PLAIN = "autoregressive"
"""The method without drafts."""


class Service:
    """Answers requests with a backend.

    Args:
        backend: what answers; started before the first request.
        names: of the model, the first of which is the one that answers have.
        limits: what is taken at most.

    Attributes:
        metrics: of all requests.
        draining: whether new requests are refused, since the server is about to end.
        active: requests that are being answered.
    """

    def __init__(self, backend: Backend, names: Sequence[str], limits: Limits | None = None) -> None:
        self.backend, self.names, self.limits = backend, tuple(names), limits or Limits()
        self.metrics = Metrics(self.names[0], backend.load)
        self.draining = False
        self.active = 0
        self._started = False
        self._created = int(time.time())
        self._thread = ThreadPoolExecutor(1, "selfspec-encode")  # texts are encoded beside the event loop
        self._encoder: RequestEncoder | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.backend.ready and not self.draining

    async def start(self) -> None:
        """Starts the backend, unless that has been done.

        Raises:
            SelfSpecError: it cannot be started.
        """
        if not self._started:
            await self.backend.start()
            self._started = True

    def request_began(self) -> None:
        """Notes that a request has come."""
        self.active += 1

    def request_ended(self, status: int) -> None:
        """Notes that a request has been answered with a status."""
        self.active -= 1
        self.metrics.response(status)

    async def close(self) -> None:
        """Ends the backend."""
        await self.backend.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: ChatRequest, request_id: str) -> Reply:
        """Begins to answer a chat.

        Raises:
            ApiError: the request does not fit, or cannot be taken now.
        """
        self._check(request)
        n = count_choices(request, 1, self.limits)
        prompt = await self._off_loop(lambda encoder: encoder.chat(request))
        params = to_params(request, len(prompt), self.backend.model.context, self.limits)
        tools = bool(request.tools) and request.tool_choice != "none"
        rules = _rules(request, tools=tools)
        choices = [Choice(index, rules) for index in range(n)]
        answers = await self._submit(
            request, [(prompt, each) for each in choices_of(params, n)], request_id, "messages"
        )
        return Reply(
            choices, answers, ChatForm(self._head("chatcmpl"), self._names(request)), [len(prompt)], self.metrics
        )

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
            params = to_params(request, len(prompt), self.backend.model.context, self.limits)
            asked += [(prompt, each) for each in choices_of(params, n)]
        echoed = await self._off_loop(lambda encoder: [encoder.texts(prompt) for prompt in prompts if request.echo])
        rules = _rules(request)
        choices = [
            Choice(index, rules, "".join(text for text, _ in echoed[index // n]) if echoed else "")
            for index in range(len(asked))
        ]
        form = CompletionForm(
            self._head("cmpl"),
            self._names(request),
            {index: echoed[index // n] for index in range(len(asked))} if echoed else None,
        )
        answers = await self._submit(request, asked, request_id, "prompt")
        return Reply(choices, answers, form, [len(prompt) for prompt in prompts], self.metrics)

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
        answer = Tokenized(count=len(token_ids), max_model_len=self.backend.model.context, tokens=token_ids)
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
        model = self.backend.model
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="selfspec",
            max_model_len=model.context,
            selfspec=ServedMethods(methods=list(model.methods), method=model.method),
        )

    def _check(self, request: Sampled) -> None:
        self._check_model(request.model)
        self._method(request.speculative)
        if self.draining:
            raise ApiError(503, "the server is about to end and takes no more requests", code="draining", retry=True)
        if not self.backend.ready:
            raise ApiError(503, "the model is being loaded again; try again soon", code="not_ready", retry=True)

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
        methods = self.backend.model.methods
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
    ) -> list[Answer]:
        """Asks for all answers, or for none."""
        method, answers = self._method(request.speculative), list[Answer]()
        try:
            for index, (token_ids, params) in enumerate(asked):
                name = request_id if len(asked) == 1 else f"{request_id}-{index}"
                answers.append(await self.backend.submit(token_ids, params, method=method, request_id=name))
        except BaseException as error:
            for answer in answers:
                answer.cancel()
            if isinstance(error, Exception):
                raise as_api_error(error, FIELDS, prompt) from error
            raise
        return answers

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.names[0],
            "system_fingerprint": f"selfspec-{__version__}",
        }

    def _names(self, request: Sampled) -> TokenNames:
        return TokenNames(self.backend.model.tokenizer, as_ids=request.return_tokens_as_token_ids)

    async def _off_loop(self, encode: Callable[[RequestEncoder], T]) -> T:
        if self._encoder is None:
            model = self.backend.model
            self._encoder = RequestEncoder(model.tokenizer, model.vocab_size)
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, self._encoder)


def _rules(request: Sampled, *, tools: bool = False) -> Rules:
    return Rules(
        stop=stop_strings(request),
        include_stop=request.include_stop_str_in_output,
        tools=tools,
        logprobs=asked_logprobs(request),
        report=request.speculative.report,
    )
