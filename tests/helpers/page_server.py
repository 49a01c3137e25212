"""A server for tests of the page: it serves the page's files, and replays streams that a test wrote."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from selfspec.serve.page import HEADERS, page_files

METHODS = ["auto", "suffix", "low-bit", "autoregressive"]
FIGURES = {"rounds": 5, "drafted_tokens": 8, "accepted_tokens": 6, "acceptance_rate": 0.75, "speedup_estimate": 1.5}


@dataclass(frozen=True)
class Refusal:
    """An answer that is an error, in OpenAI's form."""

    status: int
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


Stream = Iterable[dict[str, Any] | bytes]
Answers = Callable[[dict[str, Any]], "Refusal | Stream"]


def token(text: str, drafted_by: str | None = None) -> dict[str, Any]:
    return {"text": text, "origin": "draft" if drafted_by else "target", "drafted_by": drafted_by}


def chunk(tokens: Sequence[dict[str, Any]], content: str | None = None, **selfspec: Any) -> dict[str, Any]:
    """A chunk of a stream; its content is the tokens' text unless another is given."""
    content = "".join(each["text"] for each in tokens) if content is None else content
    return {
        "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}],
        "selfspec": {"tokens": list(tokens), **selfspec},
    }


def end(reason: str = "stop", **figures: Any) -> dict[str, Any]:
    """The last chunk."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "selfspec": {**FIGURES, **figures}}


@dataclass
class PageServer:
    """A running server; ``answers`` may be replaced between requests.

    Attributes:
        url: where the page is.
        answers: what a chat completion gets.
        key: the API key it asks for; ``None`` for none.
        requests: bodies of the chat completions so far.
        dropped: set when the browser has closed a connection.
    """

    url: str
    answers: Answers
    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    dropped: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve_page(answers: Answers) -> Iterator[PageServer]:
    """Serves on a free port of this machine until the block ends."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    http.daemon_threads = True
    state = PageServer(f"http://127.0.0.1:{http.server_port}/", answers)
    http.state = state  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    @property
    def state(self) -> PageServer:
        return self.server.state  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            entry = {"id": "tiny", "object": "model", "selfspec": {"methods": METHODS}}
            return self._json(200, {"data": [entry]}) if self._admits() else None
        name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
        if name not in page_files():
            return self._refuse(Refusal(404, "no such file"))
        file = page_files()[name]
        return self._send(200, file.content, {**HEADERS, "Content-Type": file.media_type})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admits():
            return None
        self.state.requests.append(body)
        answer = self.state.answers(body)
        if isinstance(answer, Refusal):
            return self._refuse(answer)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for each in answer:
                self.wfile.write(each if isinstance(each, bytes) else f"data: {json.dumps(each)}\n\n".encode())
                self.wfile.flush()
        except ConnectionError:
            self.state.dropped.set()

    def _admits(self) -> bool:
        admitted = self.state.key is None or self.headers["Authorization"] == f"Bearer {self.state.key}"
        if not admitted:
            self._refuse(Refusal(401, "This server needs an API key."))
        return admitted

    def _refuse(self, refusal: Refusal) -> None:
        self._json(refusal.status, {"error": {"message": refusal.message}}, refusal.headers)

    def _json(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {**(headers or {}), "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
