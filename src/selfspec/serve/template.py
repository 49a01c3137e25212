"""A process that has loaded and prepared the model, and is forked for each worker.

A worker that is forked is ready within a moment and shares the memory of the weights and of the copies that draft with
all others. What must not be forked is a process with several threads, so this one computes with one thread; what is
measured with all of them is measured in a first fork, which ends then (``_scout``). On a CPU under Linux only.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils.logging import disable_progress_bar

from selfspec.engine import Engine
from selfspec.errors import SelfSpecError, WorkerDiedError
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.logs import log, set_up_logs
from selfspec.serve.speedup import measure_forwards
from selfspec.serve.worker import run_worker

_THREADS = Path("/proc/self/task")
_ENDING_SECONDS = 1.0


@dataclass(frozen=True)
class Loaded:
    """Says that the model is loaded; or why it never will be."""

    error: SelfSpecError | None = None


@dataclass(frozen=True)
class Fork:
    """Asks for a worker, whose end of a pipe is sent after it."""

    state: StateFile | None


@dataclass(frozen=True)
class Forked:
    """Says which process the worker is; ``None`` where the template has other threads and cannot be forked."""

    process_id: int | None


@dataclass(frozen=True)
class Reap:
    """Asks how a worker ended."""

    process_id: int


@dataclass(frozen=True)
class Reaped:
    """Says how a worker ended; ``None`` while it runs."""

    exit_code: int | None


ToTemplate: TypeAlias = Fork | Reap


def run_template(pipe: Connection, options: EngineOptions, threads: int) -> None:
    """What the process does, until the server's process closes the pipe or has ended.

    Args:
        pipe: to the server's process.
        options: what makes the engine.
        threads: that compute in each worker.
    """
    for sig in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes; the server's decides
        signal.signal(sig, signal.SIG_IGN)
    set_up_logs()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tqdm.monitor_interval = 0  # its monitor is a thread
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):  # the server's process has ended
        try:
            template = _Template(pipe, options, threads)
        except SelfSpecError as error:
            pipe.send(Loaded(error))
            return
        gc.collect()
        gc.freeze()  # collections in a worker leave these objects alone, and their memory shared
        pipe.send(Loaded())
        template.run()


class _Template:
    def __init__(self, pipe: Connection, options: EngineOptions, threads: int) -> None:
        self._pipe, self._options, self._threads = pipe, options, threads
        self._engine = options.load()
        self._costs: RowCosts | None = None
        found = self._scout() if _one_thread() else None
        if found is not None:
            preparation, self._costs = found
            if preparation is not None:
                self._engine.method.prepare_from(preparation)

    def run(self) -> None:
        """Does what the server's process asks for, until ``EOFError``."""
        while True:
            asked: ToTemplate = self._pipe.recv()
            if isinstance(asked, Fork):
                self._pipe.send(Forked(self._fork_worker(asked.state)))
            else:
                self._pipe.send(Reaped(_reap(asked.process_id)))

    def _fork_worker(self, state: StateFile | None) -> int | None:
        pipe = Connection(recv_handle(self._pipe))
        try:
            if not _one_thread():
                return None
            return self._fork(
                lambda: run_worker(pipe, self._options, state, self._threads, self._costs, engine=self._engine)
            )
        finally:
            pipe.close()

    def _scout(self) -> tuple[Any, RowCosts]:
        """What the method and forwards of a batch take, measured in a process that ends then.

        Raises:
            SelfSpecError: the method cannot be prepared.
        """
        receiving, sending = Pipe(duplex=False)
        process_id = self._fork(lambda: sending.send(_measured(self._engine, self._options, self._threads)))
        sending.close()
        try:
            found: tuple[Any, RowCosts] | SelfSpecError = receiving.recv()
        except EOFError as error:
            raise WorkerDiedError("a process ended while it measured the model; it may lack memory") from error
        finally:
            os.waitpid(process_id, 0)
        if isinstance(found, SelfSpecError):
            raise found
        return found

    def _fork(self, work: Callable[[], None]) -> int:
        """Starts a process that works and ends; returns its id."""
        process_id = os.fork()
        if process_id == 0:
            self._pipe.close()
            _work_and_exit(work)
        return process_id


def _measured(engine: Engine, options: EngineOptions, threads: int) -> tuple[Any, RowCosts] | SelfSpecError:
    torch.set_num_threads(threads)
    try:
        engine.method.prepare(lambda text: log(f"preparing {engine.method.name}: {text}"))
        return engine.method.preparation(), measure_forwards(engine.target, options.max_batch)
    except SelfSpecError as error:
        return error


def _work_and_exit(work: Callable[[], None]) -> NoReturn:
    """Works and ends the process, which must not go on with what the template was doing."""
    code = 1
    try:
        work()
        code = 0
    except Exception as error:
        log("a process failed", logging.ERROR, error=error)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _one_thread() -> bool:
    """Whether this process has no other threads; those that have loaded the weights may need a moment to end."""
    gc.collect()
    until = time.monotonic() + _ENDING_SECONDS
    while not (alone := len(list(_THREADS.iterdir())) == 1) and time.monotonic() < until:
        time.sleep(_ENDING_SECONDS / 100)
    return alone


def _reap(process_id: int) -> int | None:
    ended, status = os.waitpid(process_id, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
