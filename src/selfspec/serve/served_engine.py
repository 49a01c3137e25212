"""The engine of a server: loaded and prepared ahead, with its learned state in a file and the costs of plain steps."""

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from selfspec.async_engine import AsyncEngine, EngineStats, RequestStream
from selfspec.engine import Engine
from selfspec.errors import SelfSpecError
from selfspec.methods import METHODS
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import measure_row_costs
from selfspec.serve.logs import log
from selfspec.types import SamplingParams

_SEQUENCES = (1, 2, 4, 8, 16)


class ServedEngine:
    """An ``AsyncEngine`` with what a server needs around it.

    ``load`` makes the engine when the server starts. ``state`` is a file for what the method learns, saved every
    ``state_seconds`` while requests come; without one it is forgotten. ``start`` sets the attributes:

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
        state: Path | None = None,
        state_seconds: float = 60.0,
    ) -> None:
        self._load = load
        self._state, self._state_seconds = state, state_seconds
        self._engine: AsyncEngine | None = None
        self._saver: asyncio.Task[None] | None = None

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread; such an engine takes no more requests."""
        return None if self._engine is None else self._engine.failure

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._engine is not None and self.failure is None

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return 0 if self._engine is None else self._engine.running

    def stats(self) -> EngineStats:
        """What the engine did and holds."""
        return EngineStats() if self._engine is None else self._engine.stats()

    async def start(self) -> None:
        """Loads the model and what was learned, prepares the method, and starts decoding, unless that has been done.

        Raises ``SelfSpecError`` if the model or the state cannot be loaded.
        """
        if self._engine is not None:
            return
        model = await asyncio.to_thread(self._prepare)
        assert model.tokenizer is not None
        self.tokenizer = copy.deepcopy(model.tokenizer)
        self.vocab_size, self.context = model.target.vocab_size, model.target.context_limit
        self.method = model.method.name
        self.methods = tuple(dict.fromkeys((self.method, *METHODS)))
        self._engine = AsyncEngine(model)
        self._engine.start()
        if self._state is not None:
            self._saver = asyncio.create_task(self._save_regularly(self._state))

    async def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, method: str | None, request_id: str
    ) -> RequestStream:
        """Submits a prompt; raises ``SelfSpecError`` if the request does not fit, or too many wait."""
        assert self._engine is not None, "the engine is not started"
        if params.constraint is not None:  # may take long, so not in the event loop
            await asyncio.to_thread(self._engine.engine.grammars.compile, params.constraint)
        return self._engine.submit(token_ids, params, method=method, request_id=request_id)

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
        assert self._engine is not None
        try:
            await asyncio.to_thread(self._engine.engine.save_state, path)
        except SelfSpecError as error:  # a full disk does not end the server
            log(str(error), logging.ERROR)
