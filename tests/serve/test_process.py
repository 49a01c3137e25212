"""`selfspec serve` as a process: signals, ports, an engine that fails."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from helpers.checkpoints import CHAT_TEMPLATE, save_checkpoint
from helpers.commands import run
from selfspec.serve import server as serve_server

PATIENCE = 120.0
"""Seconds: a process imports torch, and the machine may be busy."""


FAILING = """
from selfspec.cli.command_line import main
from selfspec.decoding.scheduler import Scheduler

class Broken(BaseException): ...

step, steps = Scheduler.step, iter(range(20))

def fail_late(self):
    if next(steps, None) is None:
        raise Broken("out of order")
    return step(self)

Scheduler.step = fail_late
main()
"""
"""``selfspec`` with an engine whose thread ends by an exception after twenty steps."""


CLOSING = """
from selfspec.cli.command_line import main
from selfspec.serve import server

server._CLOSING_SECONDS = 1
main()
"""
"""``selfspec`` with a server that waits a second for answers that are not complete."""


LOADING = """
import sys, time
from pathlib import Path

from selfspec.cli.command_line import main
from selfspec.serve.served_engine import ServedEngine

go, prepare = Path(sys.argv.pop(1)), ServedEngine._prepare

def prepare_late(self):
    while not go.exists():
        time.sleep(0.05)
    return prepare(self)

ServedEngine._prepare = prepare_late
main()
"""
"""``selfspec`` with a model that is loaded once there is a file."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model") / "tiny-chat", chat_template=CHAT_TEMPLATE))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Process:
    """A server in a process of its own."""

    def __init__(
        self, model: str, *arguments: str, program: Sequence[str] = ("-m", "selfspec"), status: int = 200
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--model", model, "--port", str(port), "--readers", "1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        wait_for(lambda: self.status("/ready") == status or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def is_ready(self) -> bool:
        return self.status("/ready") == 200

    def status(self, path: str) -> int | None:
        """What the server answers; ``None`` if it does not."""
        try:
            return httpx.get(f"{self.url}{path}", timeout=10).status_code
        except httpx.TransportError:
            return None

    def complete(self, tokens: int = 20, **fields: Any) -> httpx.Response:
        body = {"prompt": "abcabcabc", "max_tokens": tokens, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)

    @contextmanager
    def long_answer(self) -> Iterator[Iterator[str]]:
        """The lines of a long answer as they come, the first of which has come."""
        body = {"prompt": "abcabc", "max_tokens": 900, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    def end(self, signal_number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(signal_number)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


@contextmanager
def serving(model: str, *arguments: str, **options: Any) -> Iterator[Process]:
    server = Process(model, *arguments, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_the_first_signal_ends_it_after_the_last_answer(chat_model: str) -> None:
    with serving(chat_model, "--method", "suffix") as server:
        again = run("serve", "--port", server.url.rpartition(":")[2], "--model", "none")
        with server.long_answer() as lines:
            server.process.send_signal(signal.SIGTERM)
            refused = None
            while refused is None or refused.status_code == 200:
                refused = server.complete(1)
            text = "\n".join(lines)
        out, err = server.process.communicate(timeout=PATIENCE)
    assert again.exit_code == 2
    assert f"cannot listen on {server.url.removeprefix('http://')}" in again.stderr  # and nothing about the model
    assert text.rstrip().endswith("[DONE]")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert server.process.returncode == 0
    first, second = out.splitlines()
    assert first == f"selfspec serves tiny-chat at {server.url} (Ctrl-C ends it)"
    assert second.startswith(f"try: curl {server.url}/v1/chat/completions")
    own = err.partition("nanobind:")[0]  # where Triton is installed, it says at the end what it leaked
    assert {json.loads(line)["message"] for line in own.splitlines()} >= {"request", "draining", "ended"}


def test_a_signal_before_the_first_tick_does_not_silence_the_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_server, "settle_process", lambda: None)
    greeted: list[bool] = []
    service: Any = SimpleNamespace(ready=True, loaded=True, draining=False, active=0, failure=None)
    server = serve_server.Server(uvicorn.Config("none:app"), service, 1.0, lambda: greeted.append(True))
    server.handle_exit(signal.SIGTERM, None)
    service.ready = False
    assert asyncio.run(server.on_tick(1))
    assert greeted == [True]


ENDLESS = (
    "{% if messages[0].content == 'endless' %}" + "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3 + "{% endif %}"
)
"""A template that one text keeps busy for days, as an attacker's text would a bad template for minutes."""


@pytest.mark.slow
def test_a_signal_does_not_wait_for_a_text_that_takes_long_to_encode(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "tiny-chat", chat_template=ENDLESS + CHAT_TEMPLATE))
    options = ("--method", "autoregressive", "--drain-seconds", "0.5", "--read-seconds", "300")
    with serving(model, *options, program=("-c", CLOSING)) as server, ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "endless"}]}
        answer = pool.submit(httpx.post, f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        time.sleep(1)
        assert not answer.done()
        began = time.monotonic()
        code, _, _ = server.end()
        assert (code, time.monotonic() - began < 60) == (0, True)
        assert answer.result().status_code == 503


@pytest.mark.slow
def test_what_is_not_complete_when_the_time_is_over_ends_with_an_error(chat_model: str) -> None:
    with serving(chat_model, "--method", "autoregressive", "--drain-seconds", "0.05") as server:
        body = {"prompt": "abc", "max_tokens": 900, "n": 16, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        server.process.communicate(timeout=PATIENCE)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.process.returncode == 0


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once(chat_model: str) -> None:
    with serving(chat_model, "--method", "autoregressive") as server, server.long_answer():
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not server.is_ready())
        assert server.end()[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_process(chat_model: str) -> None:
    with serving(chat_model, "--method", "autoregressive", program=("-c", FAILING)) as server:
        with server.long_answer() as lines:
            last = [line for line in lines if line][-1]
        _, err = server.process.communicate(timeout=PATIENCE)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")
    assert "Broken: out of order" in error["message"]
    assert server.process.returncode == 1
    *log, line = err.splitlines()
    assert line == "error: the engine failed: Broken: out of order"
    assert any("Broken" in json.loads(each).get("error", "") for each in log)  # with its traceback


@pytest.mark.slow
def test_the_port_answers_while_the_model_loads(chat_model: str, tmp_path: Path) -> None:
    program = ("-c", LOADING, str(tmp_path / "go"))
    with serving(chat_model, "--method", "autoregressive", program=program, status=503) as server:
        answer = server.complete(1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert (answer.headers["Retry-After"], server.status("/health")) == ("1", 503)
        (tmp_path / "go").touch()
        wait_for(server.is_ready)
        assert (server.status("/health"), server.complete(1).status_code) == (200, 200)


def test_there_are_no_workers() -> None:
    ended = run("serve", "--port", "0", "--workers", "2")
    assert ended.exit_code == 2
    assert "--workers" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-certfile", "/no/such/file"], "there is no file '/no/such/file'"),
        (["--method", "no-such-method", "--state", "x"], "no-such-method"),
        (["--method", "suffix", "--set", "nothing"], "KEY=VALUE"),
        (["--host", "no.such.host.invalid"], "cannot bind to 'no.such.host.invalid'"),
        (["--api-key", ""], "empty"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(arguments: list[str], message: str) -> None:
    ended = run("serve", "--port", "0", *arguments)
    assert_refused(ended.exit_code, ended.stderr, message)


@pytest.mark.slow
def test_a_model_that_is_not_there_is_said_in_a_line() -> None:
    """After the port was opened and the log set up, in a process of its own."""
    command = [sys.executable, "-m", "selfspec", "serve", "--port", "0", "--model", "/no/such/folder"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert_refused(ended.returncode, ended.stderr, "/no/such/folder")


def assert_refused(exit_code: int, errors: str, message: str) -> None:
    assert exit_code == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in errors
