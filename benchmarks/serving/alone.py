"""What `selfspec generate` does with chats: one after the other in one process, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from selfspec.engine import Engine
from serving.chat import Answer
from serving.known import Chat


def generate_alone(engine: Engine, chats: Sequence[Chat]) -> Iterator[Answer]:
    """Answers chats one after the other.

    Args:
        engine: with the model and the method.
        chats: to answer.
    """
    for chat in chats:
        began, arrivals = time.perf_counter(), []
        messages = [{"role": "user", "content": chat.prompt}]
        stream = engine.stream(messages, max_new_tokens=chat.new_tokens, **chat.sampling)
        for piece in stream:
            if piece.text:
                arrivals.append(time.perf_counter())
        result = stream.result
        yield Answer(result.text, result.new_token_count, began, tuple(arrivals), time.perf_counter())
