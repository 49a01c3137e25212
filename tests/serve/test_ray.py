"""The application under Ray Serve: its text, its metrics, its replicas that end, and what it refuses."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from helpers.checkpoints import CHAT_TEMPLATE, save_checkpoint
from helpers.commands import run
from helpers.ray_processes import ray_folder, replicas
from helpers.server_process import ServerProcess, serve
from helpers.serving import events
from selfspec import Engine
from selfspec.cli.options import EngineChoice
from selfspec.cli.serve import serve as command
from selfspec.errors import EngineFailedError, InvalidParameterError, MissingPackageError
from selfspec.serve import ray_server
from selfspec.serve.api_errors import ApiError
from selfspec.serve.capacity import Limits
from selfspec.serve.ray import _NOT_HERE, RayOptions, Replica, app, check_ray_options, require_ray
from selfspec.serve.ray_server import cpus_of_replicas

ROOT = Path(__file__).parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def starts_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test for which Ray starts its dozen processes."""
    return needs_ray(pytest.mark.slow(test))


PATIENCE = 180.0
"""Seconds: Ray takes long to start, and the machine may be busy."""

TEXT = "one two three one two three one two"


def wait_for(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.2)
    return found


def streamed(url: str, prompt: str, tokens: int, **headers: str) -> tuple[str, Any]:
    """The text of a streamed completion, and the report of its last chunk; raises if it did not end by ``[DONE]``."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"speculative": {"report": True}, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, headers=headers).raise_for_status()
    *chunks, end = events(answer.text)
    if end != "[DONE]":
        raise httpx.RemoteProtocolError(f"the stream ended by {end}")
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    report = next(chunk["selfspec"] for chunk in chunks if "rounds" in (chunk.get("selfspec") or {}))
    return "".join(texts), {**report, **chunks[-1]["usage"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model") / "tiny", chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def started(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """A server with one replica, and the folder of its Ray."""
    options = ("--ray", "--model", model, "--dtype", "float32", "--method", "suffix", "--readers", "1")
    options = (*options, "--max-batch", "2", "--max-waiting", "2")
    with ray_folder() as env, serve(tmp_path_factory.mktemp("ray"), *options, env=env, seconds=PATIENCE) as server:
        yield server, env["RAY_TMPDIR"]


@starts_ray
def test_a_replica_streams_the_text_of_the_engine(model: str, started: tuple[ServerProcess, str]) -> None:
    text, report = streamed(started[0].url, TEXT, 48)
    assert text == Engine.from_pretrained(model, "autoregressive").generate(TEXT, max_new_tokens=48).text
    assert report["completion_tokens"] == 48
    assert report["drafted_tokens"] >= report["accepted_tokens"] > 0


@starts_ray
def test_threads_of_a_replica_soon_sleep(started: tuple[ServerProcess, str]) -> None:
    (replica,) = replicas(started[1])
    environment = Path(f"/proc/{replica}/environ").read_bytes().split(b"\0")
    assert [each for each in environment if each.startswith(b"GOMP_SPINCOUNT=")] == [b"GOMP_SPINCOUNT=2000"]


@starts_ray
def test_ray_shows_the_metrics_of_a_replica(started: tuple[ServerProcess, str]) -> None:
    server, folder = started
    streamed(server.url, TEXT, 8)
    assert "vllm:generation_tokens_total" in httpx.get(f"{server.url}/metrics").text
    ports = list(Path(folder).glob("ray/session_latest/metrics_export_port_*"))
    url = f"http://127.0.0.1:{ports[0].read_text().strip()}/metrics"

    def written() -> list[float]:
        lines = httpx.get(url, timeout=PATIENCE).text.splitlines()
        found = [line for line in lines if line.startswith("ray_vllm_generation_tokens_total{")]
        assert all('replica="' in line and 'model_name="tiny"' in line for line in found)
        return [value for line in found if (value := float(line.rpartition(" ")[2])) >= 8]

    assert wait_for(written)


@starts_ray
def test_bad_requests_are_answered_as_without_ray(started: tuple[ServerProcess, str]) -> None:
    url = started[0].url
    wrong = httpx.post(f"{url}/v1/completions", json={"prompt": 3.5}, timeout=PATIENCE)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    foreign = httpx.get(f"{url}/version", headers={"Host": "example.org"}, timeout=PATIENCE)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "host_not_allowed")


@starts_ray
def test_more_requests_than_may_wait_are_refused(started: tuple[ServerProcess, str]) -> None:
    body = {"prompt": TEXT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def complete(_: int) -> httpx.Response:
        return httpx.post(f"{started[0].url}/v1/completions", json=body, timeout=PATIENCE)

    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(complete, range(12)))
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 429)
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1


@dataclass
class Cluster:
    """An application of the committed configuration file.

    Attributes:
        url: where it answers.
        folder: of its Ray.
    """

    url: str
    folder: str

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=PATIENCE).status_code == 200
        except httpx.TransportError:
            return False

    def others_answered(self, request: str, process: int) -> bool:
        """Whether the log of a replica other than this process has a request."""
        logs = Path(self.folder).glob("ray/session_latest/logs/worker-*.err")
        others = [log.read_text() for log in logs if not log.stem.endswith(f"-{process}")]
        assert any('"request_id": ' in log for log in others)
        return any(f'"request_id": "{request}"' in log for log in others)


@contextmanager
def configured(model: str, folder: Path, **deployment: Any) -> Iterator[Cluster]:
    """Runs ``examples/ray_serve.yaml`` with another model and port, without a Ray that is there already."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    config = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["applications"][0]["args"] |= {"model": model, "dtype": "float32", "method": "suffix", "readers": 1}
    config["applications"][0]["deployments"][0] |= deployment
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with ray_folder() as env, (folder / "log").open("w") as log:
        environment = {**os.environ, **env, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            cluster = Cluster(f"http://127.0.0.1:{port}", env["RAY_TMPDIR"])
            wait_for(lambda: process.poll() is not None or cluster.is_ready())
            assert process.poll() is None, (folder / "log").read_text()
            yield cluster
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@starts_ray
def test_a_replica_that_is_killed_under_load_loses_its_own_requests_and_is_replaced(model: str, tmp_path: Path) -> None:
    prompts = [f"{TEXT} {index}" for index in range(60)]
    outputs = Engine.from_pretrained(model, "autoregressive").generate(prompts, max_new_tokens=100, ignore_eos=True)
    expected = {prompt: output.text for prompt, output in zip(prompts, outputs, strict=True)}
    assert len(set(expected.values())) > 5
    clients = 12
    with configured(model, tmp_path) as cluster, ThreadPoolExecutor(clients) as pool:
        wait_for(lambda: len(replicas(cluster.folder)) == 2)
        victim = min(replicas(cluster.folder))

        def complete(prompt: str) -> str | None:
            """The text; ``None`` for a request that was lost."""
            try:
                return streamed(cluster.url, prompt, 100, **{"x-request-id": request_id(prompt)})[0]
            except httpx.HTTPError:
                return None

        answers = [pool.submit(complete, prompt) for prompt in prompts]
        wait_for(lambda: sum(answer.done() for answer in answers) >= clients)
        os.kill(victim, signal.SIGKILL)
        texts = dict(zip(prompts, (answer.result(PATIENCE) for answer in answers), strict=True))
        lost = [prompt for prompt, text in texts.items() if text is None]
        assert 1 <= len(lost) <= clients
        assert not any(cluster.others_answered(request_id(prompt), victim) for prompt in lost)
        assert all(text in (None, expected[prompt]) for prompt, text in texts.items())
        wait_for(lambda: len(now := replicas(cluster.folder)) == 2 and victim not in now)
        assert {prompt: complete(prompt) for prompt in lost} == {prompt: expected[prompt] for prompt in lost}

        # Requests of a session find their prefix, since they meet the same replica.
        reports = [streamed(cluster.url, TEXT * 3, 4, **{"x-session-id": "one"})[1] for _ in range(6)]
        cached = [report["prompt_tokens_details"]["cached_tokens"] for report in reports]
        assert all(count > 0 for count in cached[1:])


@starts_ray
def test_a_replica_is_added_under_load_and_leaves_after_it(model: str, tmp_path: Path) -> None:
    expected = Engine.from_pretrained(model, "autoregressive").generate(TEXT, max_new_tokens=100, ignore_eos=True).text
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 2}
    ended = threading.Event()
    with configured(model, tmp_path, autoscaling_config=scaling) as cluster, ThreadPoolExecutor(8) as pool:
        assert len(replicas(cluster.folder)) == 1

        def ask_on() -> int:
            count = 0
            while not ended.is_set():
                assert streamed(cluster.url, TEXT, 100)[0] == expected
                count += 1
            return count

        clients = [pool.submit(ask_on) for _ in range(8)]
        try:
            wait_for(lambda: len(replicas(cluster.folder)) == 2)
        finally:
            ended.set()
        assert all(client.result(PATIENCE) > 0 for client in clients)
        wait_for(lambda: len(replicas(cluster.folder)) == 1)


FAILING = """
from selfspec.methods.api import Drafter, Method, MethodSettings, NoDraft, Prefill


class Broken(BaseException): ...


class FailingDrafter(Drafter):
    rounds = 0

    def plan(self):
        self.rounds += 1
        if self.rounds == 10:
            raise Broken("out of order")
        return NoDraft()


class Failing(Method):
    name, summary, source, Settings = "failing", "fails in the tenth round", "a test", MethodSettings

    def begin(self, prefill):
        return FailingDrafter()
"""
"""A method that ends the engine's thread by an exception."""


@starts_ray
def test_a_replica_whose_engine_failed_is_replaced(model: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    options = ("--ray", "--model", model, "--method", "failing:Failing", "--readers", "1")
    with ray_folder() as env:
        paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        with serve(tmp_path, *options, env={**env, "PYTHONPATH": paths}, seconds=PATIENCE) as server:
            former = replicas(env["RAY_TMPDIR"])

            def complete(tokens: int) -> httpx.Response:
                body = {"prompt": TEXT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)

            assert complete(4).status_code == 200
            failed = complete(60)
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
            wait_for(lambda: not former & replicas(env["RAY_TMPDIR"]) and complete(4).status_code == 200)


def request_id(prompt: str) -> str:
    return f"request-{prompt.rpartition(' ')[2]}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "2"), "--replicas needs --ray"),
        (("--ray-address", "127.0.0.1:1"), "--ray-address needs --ray"),
        (("--ray", "--method", "swift", "--state", "x"), "--state is not for --ray"),
        (("--ray", "--max-connections", "2"), "--max-connections is not for --ray"),
        pytest.param(("--ray", "--ray-address", "127.0.0.1:1"), "no Ray answers at '127.0.0.1:1'", marks=needs_ray),
        (("--ray", "--ray-address", "127.0.0.1:1", "--port", "0"), "give one"),
        (("--ray", "--model", "/no/such/folder"), "there is no model '/no/such/folder'"),
    ],
)
def test_what_cannot_be_deployed_is_said_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    port = () if "--port" in arguments else ("--port", "8765")
    ended = run("serve", *port, *arguments)
    assert ended.exit_code == 2, ended.output
    assert message in ended.stderr.strip().splitlines()[-1]


def test_replicas_are_at_least_one() -> None:
    ended = run("serve", "--ray", "--replicas", "0")
    assert ended.exit_code == 2
    assert "--replicas" in ended.stderr


def test_a_port_in_use_is_said_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("serve", "--ray", "--port", str(taken.getsockname()[1]))
    assert ended.exit_code == 2
    assert "cannot listen on" in ended.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas: input should be greater than or equal to 1, not 0"),
        ({"max_batch": "many"}, "max_batch: input should be a valid integer"),
        ({"modell": "x"}, "there is no option 'modell'"),
        ({"port": 8000}, "http_options.port"),
        ({"state": "x"}, "every replica would write the same file"),
        ({"api_key": ["a b"]}, "--api-key"),
    ],
)
def test_a_configuration_with_wrong_options_is_refused(given: dict[str, Any], message: str) -> None:
    if importlib.util.find_spec("ray") is None and "api_key" in given:
        pytest.skip("keys are read when Ray is there")
    with pytest.raises(InvalidParameterError, match=message.replace("(", r"\(")):
        app(given)


def test_texts_stand_for_numbers_and_lists() -> None:
    options = check_ray_options({"max_batch": "4", "name": "a", "replicas": "2", "unpack": "true"})
    assert (options.max_batch, options.name, options.replicas, options.unpack) == (4, ["a"], 2, True)


def test_the_options_are_those_of_the_command() -> None:
    of_the_command = {name: parameter.default for name, parameter in signature(command).parameters.items()}
    own = {name: field.default for name, field in {field.name: field for field in fields(RayOptions)}.items()}
    assert own.pop("cpus") == 1.0
    assert own.pop("replicas") == 1
    assert {name: of_the_command[name] for name in own} == own
    assert of_the_command.keys() - own.keys() == _NOT_HERE.keys() | {"ray", "replicas", "ray_address"}
    for choice in (EngineChoice, Limits):
        for field in fields(choice):
            least = field.metadata.get("others", {}).get("min")
            if field.name in own and least:
                with pytest.raises(InvalidParameterError, match=field.name):
                    check_ray_options({field.name: least / 2 if isinstance(field.default, float) else 0})


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(MissingPackageError, match=r"pip install 'selfspec\[ray\]'"):
        require_ray()
    with pytest.raises(MissingPackageError):
        app({})


def test_an_engine_that_failed_makes_its_replica_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(RayOptions(memory_limit=0.1), [])
    service = replica._service
    monkeypatch.setattr(service, "_readable", True)
    monkeypatch.setattr(type(service.engine), "ready", True)
    asyncio.run(replica.check_health())
    monkeypatch.setattr(service, "_failure", EngineFailedError("broken"))
    with pytest.raises(ApiError, match="the engine failed"):
        asyncio.run(replica.check_health())


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [([8], 1, 8), ([8], 2, 4), ([8], 3, 2), ([2], 4, 0.5), ([3, 3], 3, 1), ([4, 4], 2, 4), ([4, 4, 1], 3, 2)],
)
def test_processors_are_shared_out(nodes: list[float], count: int, expected: float) -> None:
    assert cpus_of_replicas(nodes, count) == expected


@pytest.mark.parametrize("nodes", [[], [2]])
def test_too_many_replicas_are_refused(nodes: list[float]) -> None:
    with pytest.raises(InvalidParameterError, match="replicas are too many"):
        cpus_of_replicas(nodes, ray_server._MOST_SHARING * 2 + 1)
