"""A process that answers requests with an engine of its own; started and watched by ``supervised``."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from multiprocessing.connection import Connection

import torch
from transformers.utils.logging import disable_progress_bar

from selfspec.engine import Engine
from selfspec.errors import RequestFailedError, SelfSpecError, first_line
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.backend import Answer, Load
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.local import LocalBackend
from selfspec.serve.logs import set_up_logs
from selfspec.serve.messages import Accepted, Busy, Cancel, Close, End, FromWorker, Ready, Step, Submit, ToWorker

LOAD_SECONDS = 0.25
"""How often a worker says what it is doing."""


def run_worker(
    pipe: Connection,
    options: EngineOptions,
    state: StateFile | None,
    threads: int,
    costs: RowCosts | None,
    engine: Engine | None = None,
) -> None:
    """What a worker's process does, until it is told to close or the server's process has ended.

    Args:
        pipe: to the server's process.
        options: what makes the engine.
        state: where what is learned is kept.
        threads: that compute.
        costs: what a forward takes, if a process before this one has measured it.
        engine: for ``options``, if the process that was forked has made it.
    """
    for sig in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes; the server's decides
        signal.signal(sig, signal.SIG_IGN)
    set_up_logs()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    torch.seed()  # processes that sample without seeds must not draw the same numbers
    asyncio.run(_WorkerProcess(pipe, LocalBackend(options, engine, state=state, costs=costs)).run())


class _WorkerProcess:
    """Reads commands from the pipe and sends what the backend answers.

    Args:
        pipe: to the server's process.
        backend: with the engine; not yet started.
    """

    def __init__(self, pipe: Connection, backend: LocalBackend) -> None:
        self._pipe, self._backend = pipe, backend
        self._answers: dict[int, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = Load()

    async def run(self) -> None:
        """Starts the backend and does what is asked, until ``Close``."""
        try:
            await self._backend.start()
        except SelfSpecError as error:
            self._send(Ready(None, error=error))
            return
        self._send(Ready(self._backend.model, self._backend.costs))
        loop, commands = asyncio.get_running_loop(), asyncio.Queue[ToWorker]()
        reader = threading.Thread(target=_read, args=(self._pipe, loop, commands), daemon=True)
        reader.start()
        self._start(self._tell_load())
        while not isinstance(command := await commands.get(), Close):
            self._take(command)
        await self._backend.close()

    def _take(self, command: ToWorker) -> None:
        if isinstance(command, Submit):
            self._start(self._answer(command))
        elif isinstance(command, Cancel) and (answer := self._answers.pop(command.number, None)) is not None:
            answer.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: Submit) -> None:
        number = asked.number
        try:
            answer = await self._backend.submit(
                asked.token_ids, asked.params, method=asked.method, request_id=asked.request_id
            )
        except Exception as error:
            self._send(Accepted(number, _for_others(error)))
            return
        self._answers[number] = answer
        self._send(Accepted(number))
        try:
            async for tokens in answer:
                self._send(Step(number, tokens))
            self._send(End(number, answer.ended))
        except Exception as error:
            self._send(End(number, None, _for_others(error)))
        finally:
            self._answers.pop(number, None)

    async def _tell_load(self) -> None:
        while True:
            load = self._backend.load()
            if load != self._told:
                self._told = load
                self._send(Busy(load))
            await asyncio.sleep(LOAD_SECONDS)

    def _send(self, message: FromWorker) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # the server's process has ended
            os._exit(1)


def _for_others(error: Exception) -> SelfSpecError:
    """An error that another process can read; of those of other packages this is not known."""
    if isinstance(error, SelfSpecError):
        return error
    return RequestFailedError(f"the request failed: {type(error).__name__}: {first_line(error)}")


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, commands: "asyncio.Queue[ToWorker]") -> None:
    """Hands commands over to the event loop; ends the process where the server's has ended."""
    while True:
        try:
            command = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # without waiting for a step, whose tokens could not be sent
        loop.call_soon_threadsafe(commands.put_nowait, command)
