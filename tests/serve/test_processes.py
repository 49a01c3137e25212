"""How workers are started: forks of a process with the model, and what happens where that ends or cannot be forked."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import psutil
import pytest

from helpers.checkpoints import CHAT_TEMPLATE, save_checkpoint
from selfspec.errors import SelfSpecError
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve import processes
from selfspec.serve.engine_options import EngineOptions, StateFile
from selfspec.serve.messages import Accepted, Close, Ready, Step, Submit
from selfspec.serve.processes import Forks, Loads, WorkerProcess, make_starter
from selfspec.serve.template import Fork, Forked, Loaded, _Template
from selfspec.types import SamplingParams

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker loads the model")

PATIENCE = 120.0


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "tiny-chat", chat_template=CHAT_TEMPLATE)
    return EngineOptions(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def forks(options: EngineOptions) -> Iterator[Forks]:
    with closing(Forks(options, 1, NoStarter())) as starter:
        yield starter


class NoStarter:
    """A starter that is not needed."""

    def start(self, index: int, state: StateFile | None, costs: RowCosts | None) -> WorkerProcess:
        raise AssertionError("a worker could not be forked")

    def close(self) -> None:
        pass


class OtherStarter:
    """A starter that says that it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def start(self, index: int, state: StateFile | None, costs: RowCosts | None) -> WorkerProcess:
        self.asked.append(index)
        return WorkerProcess(os.getpid(), Pipe()[0], lambda: 0)

    def close(self) -> None:
        pass


def receive(worker: WorkerProcess, kind: type) -> object:
    """The next message of a kind."""
    while worker.pipe.poll(PATIENCE):
        if isinstance(message := worker.pipe.recv(), kind):
            return message
    raise AssertionError(f"the worker sends no {kind.__name__}")


def sampled_text(worker: WorkerProcess) -> str:
    """What a worker answers to a request without a seed."""
    receive(worker, Ready)
    worker.pipe.send(Submit(1, (3, 4, 5), SamplingParams(max_new_tokens=20, temperature=1.0), None, "id"))
    assert receive(worker, Accepted) == Accepted(1)
    texts: list[int] = []
    while len(texts) < 20 and worker.pipe.poll(PATIENCE):
        message = worker.pipe.recv()
        texts += [token.token_id for token in message.tokens] if isinstance(message, Step) else []
    return str(texts)


def test_a_worker_is_forked_with_the_model_and_what_was_measured(forks: Forks) -> None:
    worker = forks.start(0, None, None)
    ready = receive(worker, Ready)
    assert isinstance(ready, Ready)
    assert ready.model is not None
    assert ready.costs is not None
    again = forks.start(1, None, None)
    also = receive(again, Ready)
    assert isinstance(also, Ready)
    assert also.costs == ready.costs  # nothing is measured twice
    template = psutil.Process(worker.process_id).parent()
    assert template == psutil.Process(again.process_id).parent()
    assert template is not None
    assert template.num_threads() == 1
    worker.pipe.send(Close())
    assert worker.wait(PATIENCE) == 0
    again.kill()
    assert again.wait(PATIENCE) == -signal.SIGKILL


def test_forks_do_not_draw_the_same_numbers(forks: Forks) -> None:
    workers = [forks.start(index, None, None) for index in range(2)]
    texts = {sampled_text(worker) for worker in workers}
    for worker in workers:
        worker.kill()
    assert len(texts) == 2


def test_a_worker_ends_with_the_process_that_asked_for_it(forks: Forks) -> None:
    worker = forks.start(0, None, None)
    receive(worker, Ready)
    worker.pipe.close()
    assert worker.wait(PATIENCE) == 1


def test_a_template_that_was_killed_is_started_again(forks: Forks) -> None:
    worker = forks.start(0, None, None)
    receive(worker, Ready)
    template = psutil.Process(worker.process_id).parent()
    assert template is not None
    template.kill()
    until = time.monotonic() + PATIENCE
    while template.is_running() and template.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.01)
    assert worker.exit_code() is None  # it goes on
    second = forks.start(1, None, None)
    assert isinstance(receive(second, Ready), Ready)
    worker.kill()
    assert worker.wait(PATIENCE) == processes.UNKNOWN
    second.kill()


def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    starter = Forks(EngineOptions(str(tmp_path / "none")), 1, NoStarter())
    with closing(starter), pytest.raises(SelfSpecError, match="none"):
        starter.start(0, None, None)


def test_a_process_with_threads_is_not_forked(options: EngineOptions) -> None:
    ours, other = Pipe()

    def ask() -> None:
        ours.send(Fork(None))
        send_handle(ours, ours.fileno(), os.getpid())
        answers.append(ours.recv())
        ours.close()

    answers: list[object] = []
    asking = threading.Thread(target=ask)  # the second thread of this process
    asking.start()
    with pytest.raises((EOFError, OSError)):
        _Template(other, options, 1).run()
    asking.join()
    assert answers == [Forked(None)]


def unforkable(pipe: Connection, options: EngineOptions, threads: int) -> None:
    """A template that has threads."""
    pipe.send(Loaded())
    pipe.recv()
    os.close(recv_handle(pipe))
    pipe.send(Forked(None))


def test_where_forks_are_impossible_each_worker_loads_the_model(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "run_template", unforkable)
    other = OtherStarter()
    with closing(Forks(options, 1, other)) as starter:
        for index in range(2):
            starter.start(index, None, None)
    assert other.asked == [0, 1]


def test_forks_are_for_the_processor(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_starter(options, 1), Forks)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(make_starter(options, 1), Loads)


def test_a_worker_that_loads_the_model_itself(options: EngineOptions) -> None:
    costs = RowCosts((1,), (0.5,))
    worker = Loads(options, 1).start(0, None, costs)
    ready = receive(worker, Ready)
    assert isinstance(ready, Ready)
    assert ready.costs == costs
    worker.kill()
    assert worker.wait(PATIENCE) == -signal.SIGKILL
