"""Connections that send too much, too little or nothing, or do not read: each has an end."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from selfspec.serve.connection import Connection, ConnectionLimits
from selfspec.serve.server import Server

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
WAIT = GET.replace(b"/", b"/wait", 1)
POST = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
SECONDS = 0.5

BLOCKED = 0.5

ASKED: list[str] = []
LEFT = threading.Event()
"""Paths of requests, and whether a client has left that one of them waited for."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with as many bytes as the path says; two paths before the body, one while the server stands still.

    Another one waits until the client has left.
    """
    ASKED.append(scope["path"])
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        LEFT.set()
        return
    if scope["path"] == "/block":
        time.sleep(BLOCKED)
    if scope["path"] in ("/block", "/early"):
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"].strip("/") or 1)):
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def serving(loop: Any = "auto", send_buffer: int | None = None, **limits: Any) -> Iterator[int]:
    """The port of a server in a thread, whose system buffers at most ``send_buffer`` bytes of what is sent."""
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    http = partial(Connection, limits=ConnectionLimits(**limits))
    config = uvicorn.Config(
        app,
        http=http,
        loop=loop,
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_keep_alive=1,  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        thread.join()


def answer(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that a server sends to a connection until it closes it."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while data := connection.recv(2**16):
                received += data
        except ConnectionError:
            pass
    return received


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(head_bytes=4096, seconds=SECONDS) as found:
        yield found


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET / HTTP/1.1\r\na: " + b"b" * 5000 + b"\r\n\r\n"], 431),
        ([b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 200], 431),
        ([b"GET / HTTP/1.1\r\na: ", *[b"b" * 1000] * 6], 431),
        ([b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n"], 414),
        ([b"nonsense\r\n\r\n"], 400),
        ([GET * 50], 400),
        ([POST + b"0\r\na: ", *[b"b" * 1000] * 6], 431),
        ([WAIT, b"GET / HTTP/1.1\r\na: ", *[b"b" * 1000] * 6], 431),
    ],
    ids=[
        "a long header",
        "many headers",
        "a header without an end",
        "a long URL",
        "no HTTP",
        "pipelined",
        "a trailer",
        "while another is answered",
    ],
)
def test_what_is_too_large_is_refused(port: int, parts: list[bytes], status: int) -> None:
    received = answer(port, *parts, pause=0.01)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":{"message":' in received


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", GET, GET + b"GET"], ids=["nothing", "half", "one", "one and a half"]
)
def test_a_connection_that_waits_is_closed(port: int, sent: bytes) -> None:
    began = time.monotonic()
    received = answer(port, sent)
    assert received.startswith(b"HTTP/1.1 200 ") == (GET in sent)
    assert SECONDS / 2 < time.monotonic() - began < 10


UPGRADE = b"Host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
SMUGGLED = b"GET /early HTTP/1.1\r\nHost: a\r\n\r\n"
COUNTED = b"POST / HTTP/1.1\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED)
CHUNKED = b"POST / HTTP/1.1\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        [COUNTED + SMUGGLED, GET],
        [COUNTED, SMUGGLED, GET],
        [COUNTED[:50], COUNTED[50:] + SMUGGLED[:9], SMUGGLED[9:] + GET],
        [CHUNKED + b"%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n0\r\n\r\n", GET],
        [CHUNKED, b"%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n", b"0\r\n\r\n" + COUNTED + SMUGGLED],
        [b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n" + GET],
    ],
    ids=["together", "apart", "in pieces", "chunked", "twice", "no body"],
)
def test_a_request_for_another_protocol_is_answered_in_this_one(port: int, sent: list[bytes]) -> None:
    """Its body is its own, and never the next request."""
    received = answer(port, *sent, pause=0.05)
    assert received.count(b"HTTP/1.1 200 ") == 2, received
    assert received.count(b"HTTP/1.1") == 2


@pytest.mark.parametrize(
    "sent", [[b"1\r\nx\r\n" * 5000], [b"1\r\nx\r\n"] * 20, [b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 40]
)
def test_a_body_of_many_parts_is_handed_over_in_few(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    """Each would wake the application and copy all before it, and there can be one for each byte."""
    handed: list[bytes] = []
    on_body = HttpToolsProtocol.on_body

    def noted(self: HttpToolsProtocol, body: bytes) -> None:
        handed.append(body)
        on_body(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", noted)
    received = answer(port, POST, *sent, b"0\r\n\r\n", pause=0.01)
    assert received.startswith(b"HTTP/1.1 200 ")
    size = b"".join(sent).count(b"x")
    assert b"".join(handed) == b"x" * size
    assert len(handed) == 1 + size // 2**16


@pytest.mark.parametrize("length", [6000, 10_000])
def test_the_rest_of_a_body_that_was_answered_is_no_head(length: int) -> None:
    post = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length
    with serving(head_bytes=4096, seconds=20.0) as port:
        received = answer(port, post, *[b"x" * 1000] * (length // 1000), GET, pause=0.02)
    assert received.count(b"HTTP/1.1 ") == 2
    assert received.startswith(b"HTTP/1.1 403 ")
    assert b"HTTP/1.1 200 " in received


def test_a_client_that_does_not_read_is_dropped(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /2000 HTTP/1.1\r\nHost: a\r\n\r\n")  # 125 MiB, more than any buffer
        time.sleep(4 * SECONDS)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(2**20):
                received += len(data)
    assert received < 100 * 2**20
    assert b"200" in answer(port, GET)


@pytest.mark.parametrize("head", [GET, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")])
def test_the_end_of_an_answer_that_is_not_read_is_dropped(head: bytes) -> None:
    """Less than what makes the server stop writing: the connection is closed already, and waits for its client."""
    with serving(send_buffer=4096, seconds=SECONDS) as port, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head)
        time.sleep(1 + 4 * SECONDS)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(2**16):
                received += len(data)
    assert received < 2**16


def test_connections_that_do_not_read_give_way() -> None:
    with serving(connections=20, seconds=30.0) as port, contextlib.ExitStack() as opened:
        for _ in range(30):
            unread = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            unread.sendall(b"GET /2000 HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(0.02)
        assert answer(port, GET).startswith(b"HTTP/1.1 200 ")


def test_all_requests_of_a_client_that_leaves_are_given_up(port: int) -> None:
    """Not the last one alone, which waits for those before it."""
    LEFT.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(WAIT + GET)
        time.sleep(0.1)
    assert LEFT.wait(10)


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_clients_that_left_at_once_are_not_answered(loop: Any) -> None:
    with serving(loop) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as blocking:
            blocking.sendall(b"GET /block HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(BLOCKED / 5)
            ASKED.clear()
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    connection.sendall(GET)
            assert blocking.recv(100).startswith(b"HTTP/1.1 403 ")
        assert answer(port, GET.replace(b"/", b"/3", 1)).startswith(b"HTTP/1.1 200 ")
    assert ASKED == ["/3"]


def test_new_connections_take_the_place_of_those_that_wait_longest() -> None:
    with serving(connections=20, seconds=30.0) as port:
        silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(60)]
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(GET)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert silent[0].recv(1) == b""  # closed
        silent[-1].sendall(GET)
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200 ")
        for each in silent:
            each.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_each_connection_of_a_burst_takes_the_place_of_another_one() -> None:
    """In asyncio's loop they are made in one turn, in which none of those that give way is told."""
    with serving("asyncio", connections=10, seconds=30.0) as port, contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        silent = [connect() for _ in range(9)]
        time.sleep(0.1)
        blocking = connect()
        blocking.sendall(b"GET /block HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.1)
        burst = [connect() for _ in range(6)]
        assert blocking.recv(100).startswith(b"HTTP/1.1 403 ")
        time.sleep(0.1)
        assert [is_closed(each) for each in silent] == [True] * 6 + [False] * 3
        assert not any(map(is_closed, burst))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, which makes a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=a"]
    subprocess.run([openssl, "req", "-x509", *made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_a_handshake_that_does_not_end_is_dropped(certificate: tuple[str, str], loop: Any) -> None:
    """Until it ends, nothing counts the connection, and by itself asyncio waits for a minute."""
    service: Any = SimpleNamespace(loaded=False, failure=None)
    cert, key = certificate
    files = {"ssl_certfile": cert, "ssl_keyfile": key}
    config = uvicorn.Config(app, port=0, loop=loop, lifespan="off", log_config=None, ws="none", **files)
    server = Server(config, service, 0.0, handshake_seconds=SECONDS)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        began = time.monotonic()
        for sent in (b"", b"\x16\x03\x01"):
            assert answer(port, sent) == b""
        assert SECONDS < time.monotonic() - began < 20
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain, context.wrap_socket(plain) as client:
            client.sendall(GET)
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        server.force_exit = server.should_exit = True
        thread.join()
