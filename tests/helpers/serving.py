"""Servers for tests: one in this process, and a backend that says what it is told to."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi.testclient import TestClient

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from selfspec.serve.app import AppOptions, create_app
from selfspec.serve.backend import Backend, Ended, Load, ModelInfo, Token
from selfspec.serve.limits import Limits
from selfspec.serve.service import Service
from selfspec.types import SamplingParams, TokenLogprobs

NAME = "tiny-test"


class ScriptedAnswer:
    """Says a text, a character a step."""

    def __init__(self, backend: "ScriptedBackend", prompt: Sequence[int], params: SamplingParams, method: str) -> None:
        tokenizer = backend.model.tokenizer
        self._ids = tokenizer.encode(backend.text, add_special_tokens=False)[: params.max_new_tokens]
        self._texts = [str(tokenizer.decode([token_id])) for token_id in self._ids]
        self._backend, self._prompt, self._params, self._method = backend, prompt, params, method
        self._place = 0
        self.cancelled = False

    def __aiter__(self) -> "ScriptedAnswer":
        return self

    async def __anext__(self) -> Sequence[Token]:
        await asyncio.sleep(0)
        place, self._place = self._place, self._place + 1
        if place == self._backend.fails_at:
            raise self._backend.failure
        if self._backend.pauses_at is not None and place >= self._backend.pauses_at and not self.cancelled:
            await self._backend.resumed.wait()
        if place >= len(self._ids):
            raise StopAsyncIteration
        token_id = self._ids[place]
        logprob = None
        asked = self._params.logprobs
        if asked is not None:
            logprob = TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (0, -2.0))[:asked])
        origin = "prefill" if place == 0 else "draft" if place % 2 else "target"
        drafted_by = self._method if origin == "draft" else None
        return [Token(self._texts[place], token_id, origin, drafted_by, logprob)]

    @property
    def ended(self) -> Ended:
        count = len(self._ids)
        prompt = None
        if self._params.prompt_logprobs is not None:
            prompt = (None, *(TokenLogprobs(token_id, -1.0, ((token_id, -1.0),)) for token_id in self._prompt[1:]))
        return Ended(
            finish_reason="length" if count == self._params.max_new_tokens else "eos",
            prompt_tokens=len(self._prompt),
            cached_tokens=2,
            new_tokens=count,
            method=self._method,
            rounds=count // 2,
            drafts=count // 2,
            drafted=count // 2,
            accepted=count // 2,
            accepted_at=(count // 2,),
            tokens_per_second=10.0,
            plain_seconds=2.0,
            round_seconds=1.0,
            prompt_logprobs=prompt,
        )

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedBackend:
    """Answers every prompt with the same text."""

    def __init__(self, text: str = "Hello there.", *, chat_template: str | None = CHAT_TEMPLATE) -> None:
        self.text = text
        self.fails_at: int | None = None
        self.failure: Exception = RuntimeError("broken")
        self.refuses: Exception | None = None
        self.pauses_at: int | None = None
        self.resumed = asyncio.Event()
        self.answers: list[ScriptedAnswer] = []
        self.asked: list[tuple[list[int], SamplingParams, str | None]] = []
        tokenizer = make_tokenizer(chat_template=chat_template)
        self.model = ModelInfo(tokenizer, 128, 1024, "auto", ("auto", "autoregressive", "suffix"))
        self.ready = True

    async def start(self) -> None:
        pass

    async def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, method: str | None, request_id: str
    ) -> ScriptedAnswer:
        if self.refuses is not None:
            raise self.refuses
        self.asked.append((list(token_ids), params, method))
        self.answers.append(ScriptedAnswer(self, token_ids, params, method or "auto"))
        return self.answers[-1]

    def load(self) -> Load:
        return Load(running=sum(not answer.cancelled for answer in self.answers), cache_limit=100, cache_bytes=25)

    async def close(self) -> None:
        pass

    def stop_now(self) -> None:
        pass


def make_client(backend: Backend, limits: Limits | None = None, **options: Any) -> TestClient:
    """A client of an application in this process. Exceptions of the server are answers with status 500."""
    app = create_app(Service(backend, [NAME], limits), AppOptions(**options))
    return TestClient(app, raise_server_exceptions=False)


def events(text: str) -> list[Any]:
    """The objects of a stream; the last one is the text ``[DONE]``."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    found = [block.removeprefix("data: ") for block in blocks]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


def walk(value: Any, visit: Callable[[Any], None]) -> None:
    """Visits all values of a JSON value."""
    visit(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        walk(part, visit)


def contents(chunks: Sequence[Any]) -> Iterator[str]:
    """The texts of a chat's chunks."""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]
