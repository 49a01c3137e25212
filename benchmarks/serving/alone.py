"""What `selfspec generate` does with the same chats: one after the other in one process, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from selfspec.engine import Engine
from serving.chat import Answer


def answer_alone(engine: Engine, prompts: Sequence[str], new_tokens: int) -> Iterator[Answer]:
    """Answers chats one after the other.

    Args:
        engine: with the model and the method.
        prompts: of the user.
        new_tokens: longest answer.
    """
    for prompt in prompts:
        began, arrivals = time.perf_counter(), []
        stream = engine.stream([{"role": "user", "content": prompt}], max_new_tokens=new_tokens)
        for piece in stream:
            if piece.text:
                arrivals.append(time.perf_counter())
        result = stream.result
        yield Answer(result.text, result.new_token_count, began, tuple(arrivals), time.perf_counter())
