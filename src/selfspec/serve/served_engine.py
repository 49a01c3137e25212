"""The engine of a server: loaded and prepared ahead, with its learned state in a file and the costs of plain steps."""

import asyncio
import contextlib
import copy
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, move_on_after, to_thread
from transformers import PreTrainedTokenizerBase

from selfspec.async_engine import AsyncEngine, EngineStats, RequestStream
from selfspec.constraint import Constraint
from selfspec.decoding.request import Request
from selfspec.engine import Engine
from selfspec.errors import QueueFullError, SelfSpecError
from selfspec.methods import METHODS, make_method
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.measuring import measure_row_costs
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import release_threads
from selfspec.serve.logs import log
from selfspec.types import SamplingParams

P = ParamSpec("P")
T = TypeVar("T")

_SEQUENCES = (1, 2, 4, 8, 16)

_MOST_PREPARING = 2
"""Requests with and without schemas that are prepared at a time: more threads would keep Python from decoding."""


class ServedEngine:
    """An ``AsyncEngine`` with what a server needs around it.

    ``load`` makes the engine when the server starts. ``methods`` are those that requests may name beside the engine's
    own, all prepared by ``start``; if not given, those that need no preparation. ``state`` is a file for what the
    method learns, saved every ``state_seconds`` while requests come; without one it is forgotten. A request waits for
    at most ``wait_seconds`` to be prepared. ``start`` sets the attributes:

    Attributes:
        tokenizer: a copy that the engine does not use.
        vocab_size: number of token ids.
        context: tokens of the context.
        method: name of the method where a request names none.
        methods: names of the methods that a request may name.
        plain: estimates what forwards of plain decoding take; ``None`` for no estimate.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    context: int
    method: str
    methods: tuple[str, ...]
    plain: LiveCosts | None = None

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        methods: Sequence[str] | None = None,
        state: Path | None = None,
        state_seconds: float = 60.0,
        wait_seconds: float = 20.0,
    ) -> None:
        self._load, self._served, self._wait_seconds = load, methods, wait_seconds
        self._state, self._state_seconds = state, state_seconds
        self._engine: AsyncEngine | None = None
        self._saver: asyncio.Task[None] | None = None
        self._preparing, self._compiling = CapacityLimiter(_MOST_PREPARING), CapacityLimiter(_MOST_PREPARING)
        self._no_limit = CapacityLimiter(math.inf)  # anyio's own, beside those above

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread; such an engine takes no more requests."""
        return None if self._engine is None else self._engine.failure

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._engine is not None and self.failure is None

    @property
    def queue(self) -> AsyncEngine:
        """What takes requests, once it is started."""
        assert self._engine is not None, "the engine is not started"
        return self._engine

    def stats(self) -> EngineStats:
        """What the engine did and holds."""
        return EngineStats() if self._engine is None else self._engine.stats()

    async def start(self) -> None:
        """Loads the model and what was learned, prepares the method, and starts decoding, unless that has been done.

        Raises ``SelfSpecError`` if the model or the state cannot be loaded.
        """
        if self._engine is not None:
            return
        model = await asyncio.to_thread(_releasing, self._prepare)
        assert model.tokenizer is not None
        self.tokenizer = await asyncio.to_thread(copy.deepcopy, model.tokenizer)
        self.vocab_size, self.context = model.target.vocab_size, model.target.context_limit
        self.method = model.method.name
        engine = await asyncio.to_thread(
            _releasing, AsyncEngine, model, methods=self._served or (), progress=lambda text: log(f"preparing {text}")
        )
        served = _unprepared(model.target) if self._served is None else self._served
        self.methods = tuple(dict.fromkeys((self.method, *served)))
        engine.start()
        self._engine = engine
        if self._state is not None:
            self._saver = asyncio.create_task(self._save_regularly(self._state))

    async def submit(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        method: str | None,
        request_id: str,
        cache_salt: str = "",
    ) -> list[RequestStream]:
        """Submits prompts with their parameters, or none.

        What takes time of a prompt's length, or compiles a schema, is done in a thread. Raises ``SelfSpecError`` if one
        does not fit, or too many wait, or this one has waited too long for a thread.
        """
        engine = self.queue

        def prepare() -> list[Request]:
            return [
                engine.prepare(list(prompt), params, method=method, cache_salt=cache_salt) for prompt, params in asked
            ]

        constrained = any(params.constraint is not None for _, params in asked)
        async with contextlib.AsyncExitStack() as places:
            with move_on_after(self._wait_seconds) as waited:
                await places.enter_async_context(self._compiling if constrained else self._preparing)
            if waited.cancelled_caught:
                raise QueueFullError("other requests take long to be prepared; try again later")
            requests = await to_thread.run_sync(_releasing, prepare, limiter=self._no_limit)
        ids = [request_id if len(asked) == 1 else f"{request_id}-{index}" for index in range(len(asked))]
        return engine.enqueue(requests, ids)

    async def close(self) -> None:
        """Ends the engine, and saves what was learned, unless the engine failed."""
        if self._saver is not None:
            self._saver.cancel()
        if self._engine is not None:
            await self._engine.close(drain=False)
            if self._state is not None and self.failure is None:
                await self._save(self._state)

    def _prepare(self) -> Engine:
        model = self._load()
        model.method.prepare(lambda text: log(f"preparing {model.method.name}: {text}"))
        with contextlib.suppress(SelfSpecError):  # which requests with schemas are told
            model.grammars.mask(
                Constraint("json_schema", "{}"), 0
            )  # reads the vocabulary, for which the first one would stop all others
        if self._state is not None:
            model.method.state()  # refuses a method that has nothing to save now, not at the end
            if self._state.exists():
                model.load_state(self._state)
                log(f"loaded what {model.method.name} has learned from '{self._state}'")
        most = model.options.max_batch
        counts = sorted({count for count in _SEQUENCES if count < most} | {most})
        self.plain = LiveCosts(measure_row_costs(model.target, range(model.target.sublayer_count), row_counts=counts))
        return model

    async def _save_regularly(self, path: Path) -> None:
        saved = self.stats().finished
        while True:
            await asyncio.sleep(self._state_seconds)
            if (finished := self.stats().finished) != saved:
                saved = finished
                await self._save(path)

    async def _save(self, path: Path) -> None:
        try:
            await asyncio.to_thread(_releasing, self.queue.engine.save_state, path)
        except SelfSpecError as error:  # a full disk does not end the server
            log(str(error), logging.ERROR)


def _releasing(do: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Does something in a thread that stays, so that it keeps no threads for parallel work from those that decode."""
    try:
        return do(*arguments, **options)
    finally:
        release_threads()


def _unprepared(target: Target) -> list[str]:
    """The methods of this package that draft for a model without being prepared for it."""
    found = []
    for name in METHODS:
        with contextlib.suppress(SelfSpecError):  # it cannot draft for this model
            if not make_method(name, target).needs_preparation:
                found.append(name)
    return found
