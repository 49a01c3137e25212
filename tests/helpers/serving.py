"""Servers for tests: one in this process, and an engine that says what it is told to."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from transformers import PreTrainedTokenizerBase

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from selfspec.async_engine import EngineStats
from selfspec.errors import SelfSpecError
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.serve.app import create_app
from selfspec.serve.capacity import Limits
from selfspec.serve.pool import GivenUp
from selfspec.serve.reader import RequestReader, read
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.service import Service
from selfspec.types import Generation, PhaseSeconds, Round, SamplingParams, TextPiece, TokenLogprobs, TokenOrigin

NAME = "tiny-test"
Result = TypeVar("Result")


class ScriptedStream:
    """Says a text, a character a step: the first one of the prompt, then rounds of one draft token and another one."""

    def __init__(self, engine: "ScriptedEngine", prompt: Sequence[int], params: SamplingParams, method: str) -> None:
        tokenizer = engine.tokenizer
        self._ids = tokenizer.encode(engine.text, add_special_tokens=False)[: params.max_new_tokens]
        self._texts = [str(tokenizer.decode([token_id], skip_special_tokens=True)) for token_id in self._ids]
        self._engine, self._prompt, self._params, self._method = engine, prompt, params, method
        self._place = 0
        self.cancelled = False

    async def next_pieces(self) -> list[TextPiece]:
        await asyncio.sleep(0)
        place, self._place = self._place, self._place + 1
        if place == self._engine.fails_at:
            raise self._engine.error
        if self._engine.pauses_at is not None and place >= self._engine.pauses_at and not self.cancelled:
            await self._engine.resumed.wait()
        if place >= len(self._ids):
            raise StopAsyncIteration
        token_id, logprobs, asked = self._ids[place], None, self._params.logprobs
        if asked is not None:
            logprobs = TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (0, -2.0))[:asked])
        return [TextPiece(self._texts[place], token_id, self._origins[place], logprobs)]

    @property
    def _origins(self) -> list[TokenOrigin]:
        return ["prefill" if place == 0 else "draft" if place % 2 else "target" for place in range(len(self._ids))]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """As many as the pieces so far are of."""
        pairs = [tuple(self._ids[place : place + 2]) for place in range(1, min(self._place, len(self._ids)), 2)]
        return tuple(Round(1, 1, 1, pair, None, None, PhaseSeconds(verify=len(pair) / 2)) for pair in pairs)

    def result_with(self, text: str | None) -> Generation:
        prompt = None
        if self._params.prompt_logprobs is not None:
            prompt = (None, *(TokenLogprobs(token_id, -1.0, ((token_id, -1.0),)) for token_id in self._prompt[1:]))
        return Generation(
            text="".join(self._texts) if text is None else text,
            token_ids=tuple(self._ids),
            origins=tuple(self._origins),
            prompt_token_count=len(self._prompt),
            method=self._method,
            settings={},
            finish_reason="length" if len(self._ids) == self._params.max_new_tokens else "eos",
            seconds=1.0 + (len(self._ids) - 1) / 10,
            prefill_seconds=1.0,
            rounds=self.rounds,
            peak_memory_bytes=0,
            cached_prompt_tokens=2,
            prompt_logprobs=prompt,
        )

    def cancel(self, error: SelfSpecError | None = None) -> None:
        self.cancelled = True


class ScriptedCosts(LiveCosts):
    """A plain step takes as long as a round of two tokens."""

    def __init__(self) -> None:
        pass

    def __call__(self, rows: int) -> float:
        return float(rows)

    def note(self, *_: Any) -> None:
        pass


class ScriptedEngine(ServedEngine):
    """Answers every prompt with the same text."""

    failure: BaseException | None = None
    ready = True
    running = 1

    def __init__(
        self,
        text: str = "Hello there.",
        *,
        chat_template: str | None = CHAT_TEMPLATE,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.text = text
        self.fails_at: int | None = None
        self.error: Exception = RuntimeError("broken")
        self.refuses: Exception | None = None
        self.pauses_at: int | None = None
        self.resumed = asyncio.Event()
        self.streams: list[ScriptedStream] = []
        self.salts: list[str] = []
        self.asked: list[tuple[list[int], SamplingParams, str | None]] = []
        self.tokenizer = tokenizer or make_tokenizer(chat_template=chat_template)
        self.vocab_size, self.context = max(128, len(self.tokenizer)), 1024
        self.memory = 4096
        self.method, self.methods = "auto", ("auto", "autoregressive", "suffix")
        self.plain = ScriptedCosts()

    @property
    def queue(self) -> "ScriptedEngine":  # type: ignore[override]
        return self

    async def start(self) -> None:
        pass

    def check_room(self) -> None:
        if self.refuses is not None:
            raise self.refuses

    def room(self, prompt_tokens: int, share: float = 1.0) -> int:
        return min(self.context, int(share * self.memory)) - prompt_tokens

    async def submit(  # type: ignore[override]
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        method: str | None,
        request_id: str,
        cache_salt: str = "",
    ) -> list[ScriptedStream]:
        self.asked += [(list(token_ids), params, method) for token_ids, params in asked]
        self.salts.append(cache_salt)
        streams = [ScriptedStream(self, token_ids, params, method or "auto") for token_ids, params in asked]
        self.streams += streams
        return streams

    def stats(self) -> EngineStats:
        return EngineStats(cache_limit=100, cache_bytes=25)

    async def close(self) -> None:
        pass


class InlineReaders:
    """Reads bodies where the test runs, without processes."""

    reader: RequestReader

    async def start(self, reader: RequestReader) -> None:
        self.reader = reader

    async def run(self, do: Callable[[RequestReader, bytes], Result], body: bytes, _: GivenUp | None = None) -> Result:
        return read(self.reader, do, body)


def make_client(
    engine: ServedEngine, limits: Limits | None = None, adapters: Sequence[str] = (), **options: Any
) -> TestClient:
    """A client of an application in this process. Exceptions of the server are answers with status 500."""
    service = Service(engine, [NAME], limits, InlineReaders(), adapters=adapters)
    return StartedClient(create_app(service, **options), service)


class StartedClient(TestClient):
    """A client of a server that has loaded its model."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        super().__init__(app, raise_server_exceptions=False)
        self.service = service

    def __enter__(self) -> "StartedClient":
        super().__enter__()
        while not self.service.ready and self.service.failure is None:
            time.sleep(0.01)
        return self


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


@contextmanager
def listening(engine: ServedEngine, **options: Any) -> Iterator[str]:
    """The URL of a server in a thread of this process, for clients that need a socket."""
    app = create_app(Service(engine, [NAME], readers=InlineReaders()), **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 20
        while not (server.started and app.state.service.ready):
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
