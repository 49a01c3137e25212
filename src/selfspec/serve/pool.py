"""The backend that is several processes with an engine each. One that ends is started again."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

from selfspec.errors import QueueFullError, SelfSpecError, WorkerDiedError
from selfspec.serve.backend import Load, ModelInfo
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.processes import make_starter
from selfspec.serve.supervised import Worker, WorkerAnswer
from selfspec.types import SamplingParams

_STATE_SECONDS = 5.0
"""How often what was learned is saved for workers that are started again."""

_PREFIX = 64
"""Prompts that begin with the same tokens go to the same worker while it is as free as others, for its prefix cache."""


class WorkerPool:
    """Answers with engines in processes of their own.

    Args:
        options: what makes each engine.
        workers: how many.
        state: where what is learned is kept; ``None`` keeps it for workers that are started again, until ``close``.
    """

    def __init__(self, options: EngineOptions, workers: int, *, state: StateFile | None = None) -> None:
        self._most = workers * options.max_batch + options.waiting
        threads = max(1, _threads() // workers)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if state is None:
            self._folder = tempfile.TemporaryDirectory(prefix="selfspec-serve-")
            state = StateFile(Path(self._folder.name) / "state", _STATE_SECONDS, asked_for=False)
        states = [replace(state, index=index) for index in range(workers)]
        self._starter = make_starter(options.shared(workers), threads)
        self._workers = [Worker(index, own, self._starter) for index, own in enumerate(states)]

    @property
    def model(self) -> ModelInfo:
        """The model, once started."""
        model = next((worker.model for worker in self._workers if worker.model is not None), None)
        assert model is not None, "the backend is not started"
        return model

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        return any(worker.ready for worker in self._workers)

    @property
    def process_ids(self) -> list[int]:
        """Of the workers' processes."""
        return [worker.process_id for worker in self._workers]

    async def start(self) -> None:
        """Starts the workers and waits until all of them take requests.

        Raises:
            SelfSpecError: one of them cannot load the model.
        """
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except SelfSpecError:
            self.stop_now()
            raise

    async def submit(
        self, token_ids: Sequence[int], params: SamplingParams, *, method: str | None, request_id: str
    ) -> WorkerAnswer:
        """Asks the worker for an answer that has the fewest to give.

        Raises:
            SelfSpecError: the request does not fit, or too many wait.
            WorkerDiedError: no worker takes requests now.
        """
        ready = [worker for worker in self._workers if worker.ready]
        if not ready:
            raise WorkerDiedError("the model is being loaded again after its process ended; send the request again")
        if sum(len(worker.answers) for worker in ready) >= self._most:
            raise QueueFullError(f"{self._most} requests run or wait, which is the most; try again later")
        preferred = hash(tuple(token_ids[:_PREFIX])) % len(ready)
        order = sorted(range(len(ready)), key=lambda index: (len(ready[index].answers), index != preferred))
        return await ready[order[0]].submit(tuple(token_ids), params, method, request_id)

    def load(self) -> Load:
        """What the engines are doing."""
        return reduce(add, (worker.load for worker in self._workers))

    def stop_now(self) -> None:
        """Ends the processes without waiting for anything."""
        for worker in self._workers:
            worker.kill()
        self._starter.close()
        self._clean_up()

    async def close(self) -> None:
        """Ends the workers; each saves what it has learned."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._starter.close()
        self._clean_up()

    def _clean_up(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _threads() -> int:
    """Threads that may compute: as many as processors, or as the environment says."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    affinity = getattr(os, "sched_getaffinity", None)
    return int(given) if given.isdigit() else len(affinity(0)) if affinity else os.cpu_count() or 1
