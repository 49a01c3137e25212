"""A server whose text is a function of the prompt, except where a test says otherwise."""

import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "scripted"
CHANGED = 3
"""Index of the token that is another one where a test says so."""

CHOSEN, OTHER = -0.5, -0.75
"""Log-probabilities of the token that is written, and of the one that could have been."""

TOKEN_SECONDS = 0.002


def words(prompt: str, seed: int | None, count: int) -> list[str]:
    """The tokens that answer a prompt."""
    dice = random.Random(zlib.crc32(f"{prompt}|{seed}".encode()))
    return [f" word{dice.randrange(100)}" for _ in range(count)]


def prompt_of(body: Mapping[str, Any]) -> str:
    """The text of a prompt or of messages."""
    if "prompt" in body:
        return str(body["prompt"])
    return "\n".join(message["content"] for message in body["messages"])


@dataclass
class Asked:
    """A request, and what the server did before it.

    Attributes:
        body: of the request.
        most_running: how many requests ran at a time while this one did, itself among them.
        before: bodies of earlier requests.
        dropped: streams whose client had gone away before.
    """

    body: dict[str, Any]
    most_running: int
    before: list[dict[str, Any]]
    dropped: int


@dataclass
class Script:
    """What a server does.

    Attributes:
        changes: whether an answer has another token at ``CHANGED``.
        refuses: a message if the server refuses a body with status 400; an empty one otherwise.
        answers: replaces answers: status, content type and bytes for a path and a body; ``None`` for none.
        card: further fields of the model in ``/v1/models``.
        accepted: whether ``/metrics`` counts a draft token with each request.
        cuts_streams: streams end in the middle.
        cached: tokens of each prompt that a cache knew, as the server says; ``None`` if it does not.
        interrupts: a stream ends as soon as another request runs.
        paths: where requests are answered.
    """

    changes: Callable[[Asked], bool] = lambda _: False
    refuses: Callable[[dict[str, Any]], str] = lambda _: ""
    answers: Callable[[str, dict[str, Any]], tuple[int, str, bytes] | None] = lambda _path, _body: None
    card: dict[str, Any] = field(default_factory=dict)
    accepted: bool = False
    cuts_streams: bool = False
    cached: int | None = None
    interrupts: bool = False
    paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")

    bodies: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    arrived: list[Asked] = field(default_factory=list)

    def begin(self, body: dict[str, Any]) -> Asked:
        """Notes that a request has begun."""
        with self.lock:
            self.running += 1
            asked = Asked(body, self.running, list(self.bodies), self.dropped)
            self.arrived.append(asked)
            for each in self.arrived:
                each.most_running = max(each.most_running, self.running)
            self.bodies.append(body)
            return asked

    def end(self, asked: Asked) -> None:
        """Notes that a request has ended, once: before its last bytes, after which the client may send the next one."""
        with self.lock:
            left = [each for each in self.arrived if each is not asked]
            self.running -= len(self.arrived) - len(left)
            self.arrived = left

    def tokens(self, asked: Asked) -> list[tuple[str, str]]:
        """The tokens of an answer, each with the one that it could have been."""
        body = asked.body
        seed = body.get("seed") if body["temperature"] else None
        pairs = [(token, f"{token}x") for token in words(prompt_of(body), seed, body["max_tokens"])]
        if self.changes(asked):
            pairs[CHANGED] = pairs[CHANGED][::-1]
        return pairs


class Handler(BaseHTTPRequestHandler):
    """Answers by the server's script."""

    script: Script

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        script = type(self).script
        if (replaced := script.answers(self.path, {})) is not None:
            return self._send(*replaced)
        if self.path == "/v1/models":
            return self._json({"data": [{"id": MODEL, "owned_by": "script", **script.card}]})
        if self.path == "/version":
            return self._json({"version": "1.2.3"})
        if self.path == "/metrics" and script.accepted:
            count = f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {len(script.bodies)}.0\n'
            return self._send(200, "text/plain", b"# a comment\n" + count.encode())
        return self._send(404, "text/html", b"<html>nothing here</html>")

    def do_POST(self) -> None:
        script = type(self).script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (replaced := script.answers(self.path, body)) is not None:
            return self._send(*replaced)
        if self.path not in script.paths:
            return self._send(404, "text/html", b"<html>nothing here</html>")
        if reason := script.refuses(body):
            return self._json({"error": {"message": reason}}, 400)
        asked = script.begin(body)
        try:
            return self._stream(asked) if body.get("stream") else self._whole(asked)
        finally:
            script.end(asked)

    def _whole(self, asked: Asked) -> None:
        time.sleep(10 * TOKEN_SECONDS)  # so that requests overlap
        script = type(self).script
        usage = {} if script.cached is None else {"prompt_tokens_details": {"cached_tokens": script.cached}}
        choice = self._choice(asked.body, script.tokens(asked), "message", "length")
        script.end(asked)
        self._json({"choices": [choice], "usage": usage})

    def _stream(self, asked: Asked) -> None:
        script, body = type(self).script, asked.body
        pairs = script.tokens(asked)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            for index, pair in enumerate(pairs):
                time.sleep(TOKEN_SECONDS)
                if script.cuts_streams and index == len(pairs) // 2:
                    return
                if script.interrupts and asked.most_running > 1:
                    return
                self._event({"choices": [self._choice(body, [pair], "delta", None)]})
            self._event({"choices": [self._choice(body, [], "delta", "length")]})
            self._event({"choices": [], "usage": {}})
            script.end(asked)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            script.dropped += 1

    def _choice(self, body: dict[str, Any], pairs: list[tuple[str, str]], holder: str, reason: Any) -> dict[str, Any]:
        text, choice = "".join(token for token, _ in pairs), {"index": 0, "finish_reason": reason}
        if "prompt" in body:
            logprobs = {
                "tokens": [token for token, _ in pairs],
                "token_logprobs": [CHOSEN for _ in pairs],
                "top_logprobs": [{token: CHOSEN, other: OTHER} for token, other in pairs],
            }
            return {**choice, "text": text, "logprobs": logprobs if "logprobs" in body else None}
        content = [
            {"token": token, "logprob": CHOSEN, "top_logprobs": [{"token": other, "logprob": OTHER}]}
            for token, other in pairs
        ]
        said = {"role": "assistant", "content": text}
        return {**choice, holder: said, "logprobs": {"content": content} if body.get("logprobs") else None}

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\n\ndata: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The URL of a server that follows a script."""
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
