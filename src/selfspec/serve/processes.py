"""How processes of workers are started: forked from one that has loaded the model, or each loads it."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any, Protocol

from selfspec.errors import SelfSpecError
from selfspec.loading import parse_device
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.logs import log
from selfspec.serve.template import Fork, Forked, Loaded, Reap, Reaped, run_template
from selfspec.serve.worker import run_worker

UNKNOWN = 255
"""The exit code of a process of which only the end is known."""

_LOOK_SECONDS = 0.01
_ASK_SECONDS = 1.0
"""For a template that is doing something else."""


@dataclass(frozen=True)
class WorkerProcess:
    """A process of a worker.

    Attributes:
        process_id: of the system.
        pipe: to the worker.
        exit_code: looks how it ended; ``None`` while it runs.
    """

    process_id: int
    pipe: Connection
    exit_code: Callable[[], int | None]

    def wait(self, seconds: float) -> int | None:
        """Waits for its end.

        Args:
            seconds: most time.

        Returns:
            The exit code; ``None`` if it still runs.
        """
        until = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Ends it at once, unless its end has been seen."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)


class Starter(Protocol):
    """Starts processes of workers; used from several threads."""

    def start(self, index: int, state: StateFile | None, costs: RowCosts | None) -> WorkerProcess:
        """Starts a process; waits until it is made, not until it takes requests.

        Args:
            index: of the worker.
            state: where what it learns is kept.
            costs: what a forward takes, if a process before it has measured that.

        Raises:
            SelfSpecError: the model cannot be loaded.
        """
        ...

    def close(self) -> None:
        """Ends what it needs itself, at once."""
        ...


def make_starter(options: EngineOptions, threads: int) -> Starter:
    """Chooses how processes are started: by forks on a CPU under Linux.

    Args:
        options: what makes each engine.
        threads: that compute in each process.

    Raises:
        DeviceError: the device cannot be used.
    """
    loads = Loads(options, threads)
    on_cpu = parse_device(options.device).type == "cpu"
    return Forks(options, threads, loads) if on_cpu and sys.platform == "linux" else loads


class Loads:
    """Starts processes that load the model, each for itself.

    Args:
        options: what makes each engine.
        threads: that compute in each process.
    """

    def __init__(self, options: EngineOptions, threads: int) -> None:
        self._options, self._threads = options, threads

    def start(self, index: int, state: StateFile | None, costs: RowCosts | None) -> WorkerProcess:
        """Starts a process."""
        process, pipe = _started(f"selfspec-worker-{index}", run_worker, self._options, state, self._threads, costs)
        assert process.pid is not None
        return WorkerProcess(process.pid, pipe, lambda: process.exitcode)

    def close(self) -> None:
        """Does nothing."""


class Forks:
    """Forks processes from a template (``serve.template``), which is started at the first one.

    Args:
        options: what makes each engine.
        threads: that compute in each process.
        otherwise: starts processes if the template cannot be forked.
    """

    def __init__(self, options: EngineOptions, threads: int, otherwise: Starter) -> None:
        self._options, self._threads, self._otherwise = options, threads, otherwise
        self._lock = threading.Lock()
        self._template: tuple[BaseProcess, Connection] | None = None
        self._can_fork = True

    def start(self, index: int, state: StateFile | None, costs: RowCosts | None) -> WorkerProcess:
        """Forks the template, once it has loaded the model; a template that has ended is started again."""
        while self._can_fork:
            try:
                with self._lock:
                    if (forked := self._fork(state)) is not None:
                        return forked
            except (EOFError, OSError):
                log("the process that workers are forked from ended; it is started again", logging.ERROR)
                self._template = None
        return self._otherwise.start(index, state, costs)

    def close(self) -> None:
        """Ends the template; what it has forked goes on."""
        if self._template is not None:
            self._template[0].kill()
        self._otherwise.close()

    def _fork(self, state: StateFile | None) -> WorkerProcess | None:
        """Forks the template; ``None`` if that is not possible now or later."""
        process, pipe = self._template = self._template or self._new_template()
        ours, other = multiprocessing.Pipe()
        with other:
            pipe.send(Fork(state))
            send_handle(pipe, other.fileno(), process.pid)
            forked: Forked = pipe.recv()
        process_id = forked.process_id
        if process_id is not None:
            return WorkerProcess(process_id, ours, lambda: self._exit_code(pipe, process_id))
        log("the loaded model has threads and cannot be forked: each worker loads it", logging.WARNING)
        self._can_fork = False
        process.kill()
        return None

    def _new_template(self) -> tuple[BaseProcess, Connection]:
        process, pipe = _started("selfspec-template", run_template, self._options, self._threads)
        try:
            loaded: Loaded = pipe.recv()
        except (EOFError, OSError):
            process.join()
            loaded = Loaded(SelfSpecError(f"the process that loads the model ended (exit code {process.exitcode})"))
        if loaded.error is not None:
            raise loaded.error
        return process, pipe

    def _exit_code(self, pipe: Connection, process_id: int) -> int | None:
        """Asks the template that has forked a process how it ended."""
        if not self._lock.acquire(timeout=_ASK_SECONDS):
            return None
        try:
            pipe.send(Reap(process_id))
            reaped: Reaped = pipe.recv()
        except (EOFError, OSError):  # the template has ended, and no other process is told
            return None if _runs(process_id) else UNKNOWN
        finally:
            self._lock.release()
        return reaped.exit_code


def _runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def _started(name: str, work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Starts a process and returns it with the pipe to it."""
    context = _context()
    ours, other = context.Pipe()
    process = context.Process(target=work, args=(other, *arguments), name=name, daemon=True)
    process.start()
    other.close()
    return process, ours


def _context() -> SpawnContext | ForkServerContext:
    """Where the system can: a process that has imported everything and is forked for each process."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["selfspec.serve.template"])
    return context
