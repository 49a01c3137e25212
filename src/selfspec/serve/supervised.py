"""A worker as the server's process sees it: its process, which is started again if it ends, and its answers."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Sequence

from selfspec.errors import SelfSpecError, WorkerDiedError
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.backend import Ended, Load, ModelInfo, Token
from selfspec.serve.engine_options import StateFile
from selfspec.serve.logs import log
from selfspec.serve.messages import Accepted, Busy, Cancel, Close, End, FromWorker, Ready, Step, Submit, ToWorker
from selfspec.serve.processes import Starter, WorkerProcess
from selfspec.types import SamplingParams

_PATIENCE = 30.0
"""Most seconds between two starts of a worker that keeps ending."""

_CLOSING_SECONDS = 20.0
"""For a worker to save what it has learned."""

_ENDING_SECONDS = 1.0
"""For a process that has closed its pipe to end, so that its exit code can be told."""


class WorkerAnswer:
    """An answer of a worker.

    Args:
        worker: writes it.
        number: its name between the processes.
    """

    def __init__(self, worker: "Worker", number: int) -> None:
        self._worker, self._number = worker, number
        self._ended: Ended | None = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.steps: asyncio.Queue[Sequence[Token] | Ended | Exception] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[Sequence[Token]]:
        """The answer itself."""
        return self

    async def __anext__(self) -> Sequence[Token]:
        """The tokens of the next step."""
        if self._ended is not None:
            raise StopAsyncIteration
        step = await self.steps.get()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Ended):
            self._ended = step
            raise StopAsyncIteration
        return step

    @property
    def ended(self) -> Ended:
        """How it ended."""
        assert self._ended is not None, "the answer has not been read to its end"
        return self._ended

    def cancel(self) -> None:
        """Gives it up."""
        self._worker.cancel(self._number)

    def fail(self, error: Exception) -> None:
        """Takes the news that no more will come."""
        if self.accepted.done():
            self.steps.put_nowait(error)
        else:
            self.accepted.set_exception(error)


class Worker:
    """A worker as the server's process sees it: its process, and the answers that it is writing.

    Args:
        index: among the workers.
        state: where what it learns is kept.
        starter: starts its process.

    Attributes:
        answers: that it is writing, by their numbers.
        model: what it serves; ``None`` before it is ready for the first time.
        load: what it was doing when it last said so.
        ready: whether it takes requests.
    """

    def __init__(self, index: int, state: StateFile | None, starter: Starter) -> None:
        self.index = index
        self.answers: dict[int, WorkerAnswer] = {}
        self.model: ModelInfo | None = None
        self.load = Load()
        self.ready = False
        self._state, self._starter = state, starter
        self._costs: RowCosts | None = None  # measured by the first process, so that the next one is ready sooner
        self._numbers = itertools.count()
        self._process: WorkerProcess | None = None
        self._started: asyncio.Future[None] | None = None
        self._closing = False
        self._failures = 0
        self._restart: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int:
        """Of its process."""
        assert self._process is not None, "the worker is not started"
        return self._process.process_id

    async def start(self) -> None:
        """Starts the process and waits until it takes requests."""
        loop = asyncio.get_running_loop()
        self._started, self._process = loop.create_future(), None
        # Starting waits for the process to be made; the event loop goes on meanwhile.
        process = self._process = await asyncio.to_thread(self._starter.start, self.index, self._state, self._costs)
        if self._closing:
            process.kill()
        threading.Thread(target=self._read, args=(process, loop), daemon=True).start()
        await self._started

    async def submit(
        self, token_ids: tuple[int, ...], params: SamplingParams, method: str | None, request_id: str
    ) -> WorkerAnswer:
        """Asks for an answer, and waits until the request is accepted.

        Raises:
            SelfSpecError: the request does not fit, or too many wait.
            WorkerDiedError: the process ended.
        """
        answer = WorkerAnswer(self, number := next(self._numbers))
        self.answers[number] = answer
        self._send(Submit(number, token_ids, params, method, request_id))
        try:
            await answer.accepted
        except BaseException:
            self.cancel(number)
            raise
        return answer

    def cancel(self, number: int) -> None:
        """Gives an answer up; nothing happens if it has ended."""
        if self.answers.pop(number, None) is not None:
            self._send(Cancel(number))

    def kill(self) -> None:
        """Ends the process at once, for good."""
        self._closing = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the process for good, once it has saved what it has learned."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        if self._process is None:
            return
        self._send(Close())
        if await asyncio.to_thread(self._process.wait, _CLOSING_SECONDS) is None:
            self.kill()

    def _send(self, message: ToWorker) -> None:
        assert self._process is not None, "the worker is not started"
        try:
            self._process.pipe.send(message)
        except OSError:  # it has ended, as the reading thread is about to find out
            log("a worker cannot be reached", logging.WARNING, fields={"worker": self.index})

    def _read(self, process: WorkerProcess, loop: asyncio.AbstractEventLoop) -> None:
        """Hands what the worker says over to the event loop, until its end."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended before the worker
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._take, process.pipe.recv())
            loop.call_soon_threadsafe(self._ended, process.wait(_ENDING_SECONDS))

    def _take(self, message: FromWorker) -> None:
        """Does what a message says, in the event loop."""
        match message:
            case Ready(model=None, error=error):
                self._failed(error or WorkerDiedError("a worker could not start"))
            case Ready(model=model, costs=costs):
                self.model, self._costs, self.ready = self.model or model, costs, True
                self._failures = 0
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Busy(load=load):
                self.load = load
            case Accepted(number=number, error=error) if (answer := self.answers.get(number)) is not None:
                if error is not None:
                    del self.answers[number]
                    answer.fail(error)
                elif not answer.accepted.done():
                    answer.accepted.set_result(None)
            case Step(number=number, tokens=tokens) if (answer := self.answers.get(number)) is not None:
                answer.steps.put_nowait(tokens)
            case End(number=number, ended=ended, error=error) if (answer := self.answers.pop(number, None)) is not None:
                answer.steps.put_nowait(ended or error or WorkerDiedError("the answer has no end"))

    def _ended(self, code: int | None) -> None:
        """The process has ended: its answers fail, and it is started again."""
        self.ready, self.load = False, Load()
        answers, self.answers = self.answers, {}
        for answer in answers.values():
            answer.fail(
                WorkerDiedError(f"the process that was writing this answer ended (exit code {code}); send it again")
            )
        if self._closing:
            return
        log("a worker ended", logging.ERROR, fields={"worker": self.index, "exit_code": code, "answers": len(answers)})
        self._failed(WorkerDiedError(f"a worker ended while it started (exit code {code})"))
        if self.model is not None:
            self._restart = asyncio.ensure_future(self._start_again())

    def _failed(self, error: SelfSpecError) -> None:
        """Tells whoever waits for the start that there is none."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    async def _start_again(self) -> None:
        """Starts the process again, at once the first time, then more and more patiently."""
        if self._failures:
            await asyncio.sleep(min(_PATIENCE, 2.0**self._failures))
        self._failures += 1
        try:
            await self.start()
        except SelfSpecError as error:
            log(f"a worker cannot be started again: {error}", logging.ERROR, fields={"worker": self.index})
            if self._process is None and not self._closing:  # otherwise its end is the reason to try again
                self._restart = asyncio.ensure_future(self._start_again())
        else:
            log("a worker was started again", fields={"worker": self.index, "pid": self.process_id})
