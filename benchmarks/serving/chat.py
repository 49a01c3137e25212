"""One streamed chat: what came, and when."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from serving.http import BrokenReplyError, Server, request


class RefusedError(Exception):
    """The server answered with an error.

    Args:
        status: of HTTP; 200 if the error came within the stream.
        message: of the error.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True)
class Answer:
    """A chat that was answered.

    Attributes:
        text: of the answer.
        tokens: of the answer, as the server counts them.
        began: when the request was sent; seconds of ``time.perf_counter``, like all times.
        arrivals: when each piece of text came.
        ended: when the stream was complete.
    """

    text: str
    tokens: int
    began: float
    arrivals: tuple[float, ...]
    ended: float

    @property
    def first_seconds(self) -> float:
        """From the request to the first piece of text."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces, each of which may be several tokens."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def seconds_per_token(self) -> float:
        """From the first piece to the last, by tokens after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)


def chat_body(model: str, message: str, new_tokens: int, **fields: Any) -> bytes:
    """The body of a greedy chat with one message.

    Args:
        model: its name.
        message: of the user.
        new_tokens: longest answer.
        **fields: to add or change.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return json.dumps(body).encode()


async def stream_chat(server: Server, body: bytes) -> Answer:
    """Sends a chat and reads its stream to the end.

    Args:
        server: answers.
        body: from ``chat_body``.

    Raises:
        RefusedError: it answered with an error.
        BrokenReplyError: the stream ended early.
    """
    began = time.perf_counter()
    texts, arrivals, tokens, done = [], [], None, False
    async with request(server, "POST", "/v1/chat/completions", body) as reply:
        if reply.status != 200:
            raise RefusedError(reply.status, (await reply.body()).decode("utf-8", "replace")[:500])
        events = await reply.timed_events()
        ended = time.perf_counter()
        for at, data in events:
            if data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RefusedError(200, json.dumps(chunk["error"]))
            if text := text_of(chunk):
                arrivals.append(at)
                texts.append(text)
            done = done or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
    if not arrivals or not done:  # not every server sends [DONE]
        raise BrokenReplyError("the stream ended without a reason, or has no text")
    return Answer("".join(texts), tokens or len(arrivals), began, tuple(arrivals), ended)


def text_of(chunk: dict[str, Any]) -> str:
    """The text of a chunk of a chat; empty if it has none."""
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in chunk.get("choices") or ())
