"""The application around the routes: keys, limits, ids, logs, metrics, failures, clients that go away."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.serving import NAME, InlineReaders, ScriptedEngine, ScriptedStream, events, listening, make_client
from selfspec.async_engine import EngineStats
from selfspec.errors import EngineFailedError, RequestFailedError
from selfspec.serve import app as app_module
from selfspec.serve.api_errors import ApiError
from selfspec.serve.app import create_app
from selfspec.serve.capacity import Limits
from selfspec.serve.logs import JsonFormatter
from selfspec.serve.metrics import Metrics, Savings
from selfspec.serve.pool import GivenUp
from selfspec.serve.reader import RequestReader
from selfspec.serve.service import Service
from selfspec.types import PhaseSeconds, Round, SamplingParams

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


def test_health_readiness_and_version() -> None:
    scripted = ScriptedEngine()
    with make_client(scripted) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.get("/version").json() == {"version": "0.2.0"}
        scripted.ready = False
        for answer in (client.get("/health"), client.get("/ready"), client.post(PATH, json=CHAT)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert answer.headers["Retry-After"] == "1"


class LoadingEngine(ScriptedEngine):
    """Loads until it is told that it has."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.loaded = threading.Event()

    async def start(self) -> None:
        await asyncio.to_thread(self.loaded.wait)
        self.ready = True


def test_while_the_model_loads_the_status_is_503() -> None:
    engine = LoadingEngine()
    posts = (PATH, "/v1/completions", "/v1/messages", "/v1/responses", "/infill", "/tokenize", "/detokenize")
    with TestClient(create_app(Service(engine, [NAME], readers=InlineReaders()))) as client:
        asked = [client.get(path) for path in ("/health", "/ready", "/v1/models")]
        for answer in (*asked, *(client.post(path, json=CHAT) for path in posts)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert answer.headers["Retry-After"] == "1"
        for path in ("/version", "/metrics", "/", "/openapi.json"):
            assert client.get(path).status_code == 200
        engine.loaded.set()
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        assert client.post(PATH, json=CHAT).status_code == 200


def test_a_server_whose_engine_failed_is_not_healthy() -> None:
    scripted = ScriptedEngine()
    with make_client(scripted) as client:
        scripted.failure = RuntimeError("broken")
        for answer in (client.get("/health"), client.get("/ready"), client.post(PATH, json=CHAT)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


def test_a_server_that_is_about_to_end_takes_no_requests() -> None:
    with make_client(ScriptedEngine()) as client:
        client.app.state.service.draining = True  # type: ignore[attr-defined]
        assert client.get("/ready").status_code == 503
        assert client.post(PATH, json=CHAT).json()["error"]["code"] == "draining"


def test_errors_of_paths_and_methods_have_openais_form() -> None:
    with make_client(ScriptedEngine()) as client:
        for answer, status in ((client.get("/v1/nothing"), 404), (client.get(PATH), 405), (client.get("/page/x"), 404)):
            assert answer.status_code == status
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_keys() -> None:
    with make_client(ScriptedEngine(), api_keys=["first", "second"]) as client:
        for header in ("Bearer first", "bearer second"):
            assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Bearer "},
        ):
            for answer in (
                client.get("/v1/models", headers=headers),
                client.post("/tokenize", json={"prompt": "x"}, headers=headers),
                client.post(PATH, json=CHAT, headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health", "/ready", "/version", "/metrics", "/page/style.css"):
            assert client.get(path).status_code == 200


def test_the_page_is_served_with_its_headers() -> None:
    with make_client(ScriptedEngine()) as client:
        page, style = client.get("/"), client.get("/page/style.css")
    assert page.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert style.headers["Content-Type"].startswith("text/css")


def test_other_origins_are_allowed_by_name() -> None:
    with make_client(ScriptedEngine()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "https://a.test"}).headers
    with make_client(ScriptedEngine(), cors_origins=["https://a.test"], api_keys=["key"]) as client:
        preflight = {"Origin": "https://a.test", "Access-Control-Request-Method": "POST"}
        assert client.options(PATH, headers=preflight).status_code == 200
        refused = client.post(PATH, json=CHAT, headers={"Origin": "https://a.test"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.test"
        assert {"Retry-After", "x-request-id"} <= {*refused.headers["access-control-expose-headers"].split(", ")}
        other = client.get("/health", headers={"Origin": "https://b.test"})
        assert "access-control-allow-origin" not in other.headers


def test_bodies_that_are_too_large() -> None:
    def chunks() -> Any:
        yield from [b"x" * 100] * 20

    with make_client(ScriptedEngine(), Limits(max_body=0.001)) as client:
        for content, asks in ((b"x" * 1100, {}), (chunks(), {}), (b"x" * 1100, {"Expect": "100-continue"})):
            answer = client.post(PATH, content=content, headers={"Content-Type": "application/json", **asks})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers.get("Connection") == ("close" if asks else None)
        assert client.post(PATH, json=CHAT).status_code == 200


def test_a_client_that_sends_a_large_body_reads_why_it_is_refused() -> None:
    """Where the connection is closed at once, it cannot send the rest, and many clients look no further."""
    large = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % 2**24
    with (
        listening(ScriptedEngine()) as url,
        socket.create_connection(("127.0.0.1", int(url[-5:])), timeout=20) as client,
    ):
        client.sendall(large + b"x" * 2**24)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = client.makefile("rb").read()
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"413", b"200"]


def test_ids_of_requests() -> None:
    with make_client(ScriptedEngine()) as client:
        assert client.get("/health", headers={"x-request-id": "my-id:1"}).headers["x-request-id"] == "my-id:1"
        made = [client.get("/health", headers={"x-request-id": given}).headers["x-request-id"] for given in ("", "a b")]
    assert len(set(made)) == 2
    assert all(len(each) == 32 for each in made)


def test_the_log_says_what_happened_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "selfspec"), make_client(ScriptedEngine("secret words")) as client:
        client.post(PATH, json=CHAT, headers={"x-request-id": "one"})
        client.get("/health")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    (line,) = [line for line in lines if line["message"] == "request"]  # none about /health
    assert (line["request_id"], line["status"], line["answer"], line["level"]) == ("one", 200, "complete", "info")
    assert line["completion_tokens"] == 12
    assert "secret" not in json.dumps(lines)


def test_metrics_have_vllms_names() -> None:
    with make_client(ScriptedEngine()) as client:
        client.post(PATH, json={**CHAT, "stream": True})
        client.post(PATH, json={**CHAT, "n": 2, "max_tokens": 4})
        client.post(PATH, json={})
        text = client.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="tiny-test"}'
    for name, value in (
        ("generation_tokens_total", 12 + 2 * 4),
        ("spec_decode_num_drafts_total", 6 + 2 * 2),
        ("spec_decode_num_draft_tokens_total", 6 + 2 * 2),
        ("spec_decode_num_accepted_tokens_total", 6 + 2 * 2),
        ("time_to_first_token_seconds_count", 3),
        ("e2e_request_latency_seconds_count", 3),
        ("inter_token_latency_seconds_count", 11 + 2 * 3),
        ("kv_cache_usage_perc", 0.25),
    ):
        assert float(found[f"vllm:{name}{label}"]) == value, name
    for labels, value in (('finished_reason="stop"', 1), ('finished_reason="length"', 2)):
        name, _, own = labels.partition("=")
        assert float(found[f'vllm:request_success_total{{{name}={own},model_name="tiny-test"}}']) == value
    assert float(found['vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny-test",position="0"}']) == 10
    assert float(found[f"selfspec:speedup_estimate{label}"]) == 2.0
    assert float(found['selfspec:http_responses_total{model_name="tiny-test",status="400"}']) == 1


def values_of(metrics: Metrics, name: str) -> dict[str, float]:
    """The values of a metric by what tells them apart."""
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith(name)]
    return {line.removeprefix(name).rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_tokens_that_arrive_together_share_the_time() -> None:
    metrics = Metrics("m", EngineStats)
    metrics.between(0.02, 4)
    metrics.between(300.0, 1)
    found = values_of(metrics, "vllm:inter_token_latency_seconds")
    bounds = {bound: found[f'_bucket{{le="{bound}",model_name="m"}}'] for bound in ("0.0025", "0.005", "120.0", "+Inf")}
    assert bounds == {"0.0025": 0, "0.005": 4, "120.0": 4, "+Inf": 5}
    assert (found['_count{model_name="m"}'], found['_sum{model_name="m"}']) == (5, 300.02)


def test_accepted_tokens_are_counted_by_their_place() -> None:
    metrics = Metrics("m", EngineStats)
    rounds = [Round(3, 3, count, (1,) * (count + 1), None, None, PhaseSeconds()) for count in (0, 2, 1, 3, 0)]
    scripted = ScriptedEngine()
    stream = ScriptedStream(scripted, [1], SamplingParams(), "auto")
    metrics.ended(replace(stream.result_with(None), rounds=tuple(rounds)), Savings(None), 1.0)
    found = values_of(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert list(found.values()) == [3, 2, 1]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(EngineFailedError("it died"), 503, "engine_failed"), (RequestFailedError("broken"), 500, None)],
)
def test_an_answer_that_fails_half_way(failure: Exception, status: int, code: str | None) -> None:
    scripted = ScriptedEngine()
    scripted.fails_at, scripted.error = 3, failure
    with make_client(scripted) as client:
        whole = client.post(PATH, json=CHAT)
        *chunks, last = events(client.post(PATH, json={**CHAT, "stream": True}).text)
        metrics = client.get("/metrics").text
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hel"
    assert (last["error"]["message"], last["error"]["code"]) == (str(failure), code)  # and no [DONE]
    assert 'selfspec:request_failed_total{model_name="tiny-test"} 2.0' in metrics


def test_an_unexpected_exception_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedEngine()
    scripted.fails_at, scripted.error = 3, ZeroDivisionError("oh")
    with make_client(scripted) as client:
        whole = client.post(PATH, json=CHAT)
        *_, last = events(client.post(PATH, json={**CHAT, "stream": True}).text)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in last["error"]["message"]
    assert sum(record.exc_info is not None for record in caplog.records) == 2


def test_an_unexpected_exception_before_an_answer_begins_is_in_the_log_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ScriptedEngine, "submit", fail)
    with make_client(ScriptedEngine()) as client:
        answer = client.post(PATH, json=CHAT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "its log says why" in answer.json()["error"]["message"]
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def run_until_gone(
    scripted: ScriptedEngine,
    body: dict[str, Any],
    gone: Callable[[Sequence[Any]], bool],
    path: str = PATH,
    readers: InlineReaders | None = None,
) -> list[Any]:
    """Sends a request from a client that goes away when ``gone`` says so of what it has received."""

    async def run() -> list[Any]:
        scripted.resumed = asyncio.Event()
        service = Service(scripted, ["m"], readers=readers or InlineReaders())
        await service.start()
        app = create_app(service)
        received: list[Any] = []
        sent, away = False, asyncio.Event()

        async def receive() -> Any:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            await away.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            received.append(message)

        async def leave() -> None:
            while not gone(received):
                await asyncio.sleep(0)
            away.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            **{"http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
            "headers": [(b"content-type", b"application/json")],
        }
        await asyncio.wait_for(asyncio.gather(app(scope, receive, send), leave()), 10)  # type: ignore[arg-type]
        return received

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (PATH, {**CHAT, "stream_options": {"include_usage": True}}, 14),
        ("/v1/completions", {"prompt": "a"}, 13),  # which begins with its first token
        ("/v1/messages", {**CHAT, "max_tokens": 20}, 14),
        ("/v1/responses", {"input": "Hi"}, 14),
    ],
)
def test_the_events_of_a_step_are_sent_together(path: str, body: dict[str, Any], expected: int) -> None:
    """The beginning, each of the 12 steps, and the end with all that follows it."""

    def ended(received: Sequence[Any]) -> bool:
        return bool(received) and received[-1].get("more_body") is False

    received = run_until_gone(ScriptedEngine(), {**body, "stream": True}, ended, path)
    assert len([each for each in received if each.get("body")]) == expected


def test_a_client_that_leaves_a_stream_cancels_its_answers() -> None:
    scripted = ScriptedEngine()
    scripted.pauses_at = 4
    run_until_gone(scripted, {**CHAT, "stream": True, "n": 2}, lambda received: len(received) > 8)
    assert [stream.cancelled for stream in scripted.streams] == [True, True]


def test_a_client_that_does_not_wait_cancels_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedEngine()
    scripted.pauses_at = 4
    with caplog.at_level(logging.INFO, "selfspec"):
        run_until_gone(scripted, CHAT, lambda _: bool(scripted.streams))
    assert scripted.streams[0].cancelled
    (line,) = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert (line["status"], line["answer"]) == (499, "cancelled")


class WaitingReaders(InlineReaders):
    """Has no place for a body until its client has left."""

    async def run(self, do: Callable[[RequestReader, bytes], Any], body: bytes, given_up: GivenUp | None = None) -> Any:
        assert given_up is not None
        while not await given_up():
            await asyncio.sleep(0)
        raise ApiError(499, "the client has gone away")


@pytest.mark.parametrize(
    ("path", "body"), [(PATH, CHAT), (PATH, {**CHAT, "stream": True}), ("/tokenize", {"prompt": "a"})]
)
def test_a_client_that_leaves_while_its_body_waits_is_noticed(path: str, body: dict[str, Any]) -> None:
    scripted = ScriptedEngine()
    run_until_gone(scripted, body, lambda _: True, path, WaitingReaders())
    assert not scripted.streams


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        (PATH, CHAT, ": ping"),
        ("/v1/completions", {"prompt": "a"}, ": ping"),
        ("/v1/messages", {**CHAT, "max_tokens": 20}, 'event: ping\ndata: {"type":"ping"}'),
        ("/v1/responses", {"input": "Hi"}, "event: response.in_progress\n"),
    ],
)
def test_a_stream_that_waits_gets_pings(
    path: str, body: dict[str, Any], ping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a client takes them, events: its timer does not see comments."""

    def read(engine: ScriptedEngine, pings: int) -> list[str]:
        """The events of a stream of an engine that waits for some pings."""

        def ended(received: Sequence[Any]) -> bool:
            if sum(each.get("body", b"").startswith(ping.encode()) for each in received) >= pings:
                engine.resumed.set()
            return bool(received) and received[-1].get("more_body") is False

        received = run_until_gone(engine, {**body, "stream": True}, ended, path)
        assert received[0]["status"] == 200
        return b"".join(each.get("body", b"") for each in received).decode().split("\n\n")

    plain, waits = ScriptedEngine(), ScriptedEngine()
    expected = read(plain, 0)
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    waits.pauses_at = 4
    blocks = read(waits, 3)
    pings = [block for block in blocks if block.startswith(ping)]
    own = sum(block.startswith(ping) for block in expected)  # that streams begin with
    assert len(pings) >= own + 3
    assert len(blocks) - len(pings) == len(expected) - own
    if path == "/v1/responses":
        numbers = [json.loads(block.partition("data: ")[2])["sequence_number"] for block in blocks if block]
        assert numbers == list(range(len(numbers)))


def test_the_document_names_what_requests_may_have() -> None:
    with make_client(ScriptedEngine()) as client:
        document = client.get("/openapi.json").json()
        assert client.get("/docs").status_code == 404  # its page would load scripts from elsewhere
    assert "422" not in json.dumps(document["paths"])
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    for path in (PATH, "/v1/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "4XX", "5XX"} <= responses.keys()
        assert {"application/json", "text/event-stream"} <= responses["200"]["content"].keys()
        assert responses["200"]["content"]["text/event-stream"]["itemSchema"]["required"] == ["data"]
