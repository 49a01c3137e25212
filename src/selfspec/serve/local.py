"""The backend that is an engine in this process."""

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Sequence

from selfspec.async_engine import AsyncEngine, RequestStream
from selfspec.engine import Engine
from selfspec.errors import SelfSpecError
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.backend import Ended, Load, ModelInfo, Progress, Token
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.logs import log
from selfspec.serve.speedup import Savings, measure_forwards
from selfspec.types import Generation, Round, SamplingParams, TextPiece


class LocalBackend:
    """Answers with an engine in this process.

    Args:
        options: what makes the engine.
        engine: an engine that is made already, for ``options``; otherwise ``start`` loads it.
        state: where what is learned is kept; ``None`` forgets it.
        costs: what a forward takes, for estimates of the speedup; ``None`` measures it.
    """

    def __init__(
        self,
        options: EngineOptions,
        engine: Engine | None = None,
        *,
        state: StateFile | None = None,
        costs: RowCosts | None = None,
    ) -> None:
        self._options, self._engine, self._state, self.costs = options, engine, state, costs
        self._async: AsyncEngine | None = None
        self._model: ModelInfo | None = None
        self._plain: LiveCosts | None = None
        self._saver: asyncio.Task[None] | None = None
        self._ended = 0

    @property
    def model(self) -> ModelInfo:
        """The model, once started."""
        assert self._model is not None, "the backend is not started"
        return self._model

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self._async is not None and self._async.stats().alive

    async def start(self) -> None:
        """Loads the model and what was learned, prepares the method, and starts decoding.

        Raises:
            SelfSpecError: the model or the state cannot be loaded.
        """
        engine = self._engine = await asyncio.to_thread(self._prepare)
        assert engine.tokenizer is not None
        self._model = ModelInfo(
            tokenizer=copy.deepcopy(engine.tokenizer),
            vocab_size=engine.target.vocab_size,
            context=engine.target.context_limit,
            method=engine.method.name,
            methods=self._options.allowed_methods(engine),
            learns=engine.method.learns,
        )
        self._async = self._options.serve(engine)
        self._async.start()
        if self._state is not None:
            self._saver = asyncio.create_task(self._save_regularly(self._state))

    async def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, method: str | None, request_id: str
    ) -> "LocalAnswer":
        """Asks for an answer.

        Raises:
            SelfSpecError: the request does not fit, or too many wait.
        """
        assert self._async is not None, "the backend is not started"
        assert self._engine is not None
        if isinstance(params.json_schema, str):  # compiled beside the event loop; submitting finds it
            await asyncio.to_thread(self._engine.setup.grammars.mask, params.json_schema, len(token_ids))
        stream = self._async.submit(token_ids, params, method=method, request_id=request_id)
        return LocalAnswer(self, stream, self._plain)

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return 0 if self._async is None else self._async.running

    def load(self) -> Load:
        """What the engine is doing."""
        if self._async is None:
            return Load()
        stats = self._async.stats()
        prefix = stats.prefix_cache
        return Load(
            stats.running, stats.waiting, stats.cache_bytes, stats.cache_limit, prefix.query_tokens, prefix.hit_tokens
        )

    async def close(self) -> None:
        """Ends the engine; saves what was learned."""
        if self._saver is not None:
            self._saver.cancel()
        if self._async is not None:
            await self._async.close(drain=False)
        if self._state is not None and self._engine is not None:
            await self._save(self._state)

    def stop_now(self) -> None:
        """Does nothing: the engine ends with this process."""

    def note_end(self) -> None:
        """Notes that a request ended, after which there may be something new to save."""
        self._ended += 1

    def _prepare(self) -> Engine:
        engine = self._engine or self._options.load()
        engine.method.prepare(lambda text: log(f"preparing {engine.method.name}: {text}"))
        if self._state is not None and not self._state.load(engine, log):
            self._state = None
        if self.costs is None:
            self.costs = measure_forwards(engine.target, self._options.max_batch)
        self._plain = LiveCosts(self.costs)
        return engine

    async def _save_regularly(self, state: StateFile) -> None:
        saved = self._ended
        while True:
            await asyncio.sleep(state.seconds)
            if self._ended != saved:
                saved = self._ended
                await self._save(state)

    async def _save(self, state: StateFile) -> None:
        assert self._engine is not None
        try:
            await asyncio.to_thread(self._engine.save_state, state.own)
        except SelfSpecError as error:  # a full disk does not end the server
            log(str(error), logging.ERROR)


class LocalAnswer:
    """An answer of ``LocalBackend``.

    Args:
        backend: is told when it ends.
        stream: of the engine.
        plain: what plain decoding takes; ``None`` for no estimate.
    """

    def __init__(self, backend: LocalBackend, stream: RequestStream, plain: LiveCosts | None) -> None:
        self._backend, self._stream = backend, stream
        self._savings = Savings(plain)
        self._drafters = Drafters(stream.job.rounds, stream.job.method.name)
        self._rounds = self._drafted = self._accepted = 0

    def __aiter__(self) -> AsyncIterator[Sequence[Token]]:
        """The answer itself."""
        return self

    async def __anext__(self) -> Sequence[Token]:
        """The tokens of the next step."""
        try:
            pieces = await self._stream.next_pieces()
        except StopAsyncIteration:
            self._backend.note_end()
            raise
        self._note_rounds()
        *before, last = pieces  # a step has at least one
        return [*map(self._drafters.token, before), self._drafters.token(last, self._progress())]

    @property
    def ended(self) -> Ended:
        """How it ended."""
        return as_ended(self._stream.result, self._savings)

    def cancel(self) -> None:
        """Gives it up."""
        self._stream.cancel()

    def _note_rounds(self) -> None:
        rounds, running = self._stream.job.rounds, self._backend.running
        for record in rounds[self._rounds :]:
            self._savings.note(record, running)
            self._drafted += record.drafted
            self._accepted += record.accepted
        self._rounds = len(rounds)

    def _progress(self) -> Progress:
        return Progress(
            drafted=self._drafted,
            accepted=self._accepted,
            plain_seconds=self._savings.plain_seconds,
            round_seconds=self._savings.round_seconds,
        )


class Drafters:
    """Says for each token of an answer what drafted it.

    Args:
        rounds: of the answer; may grow.
        method: what drafts where a round does not say it.
    """

    def __init__(self, rounds: Sequence[Round], method: str) -> None:
        self._rounds, self._method = rounds, method
        self._round, self._left = -1, 1  # the first token is the prompt's: no round committed it

    def token(self, piece: TextPiece, progress: Progress | None = None) -> Token:
        """The next token.

        Args:
            piece: the token.
            progress: of the answer, if it is the last one of a step.
        """
        while self._left == 0:
            self._round += 1
            self._left = len(self._rounds[self._round].token_ids)
        self._left -= 1
        drafted_by = None
        if piece.origin == "draft":
            drafted_by = self._rounds[self._round].drafted_by or self._method
        return Token(piece.text, piece.token_id, piece.origin, drafted_by, piece.logprobs, progress)


def as_ended(result: Generation, savings: Savings) -> Ended:
    """How an answer ended.

    Args:
        result: the output.
        savings: what its rounds took.
    """
    longest = max((record.accepted for record in result.rounds), default=0)
    return Ended(
        finish_reason=result.finish_reason,
        prompt_tokens=result.prompt_token_count,
        cached_tokens=result.cached_prompt_tokens,
        new_tokens=result.new_token_count,
        method=result.method,
        rounds=result.round_count,
        drafts=sum(record.drafted > 0 for record in result.rounds),
        drafted=result.drafted,
        accepted=result.accepted,
        accepted_at=tuple(sum(record.accepted > place for record in result.rounds) for place in range(longest)),
        tokens_per_second=result.tokens_per_second,
        plain_seconds=savings.plain_seconds,
        round_seconds=savings.round_seconds,
        prompt_logprobs=result.prompt_logprobs,
    )
