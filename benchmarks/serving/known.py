"""Requests whose answers are known: what an engine without a server writes for each of them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec.serve.waits import brief_waits
from serving.chat import Answer, chat_body

SCRIPT = Path(__file__).parents[1] / "serve.py"


@dataclass(frozen=True)
class Chat:
    """A chat with one message.

    Attributes:
        prompt: the message.
        new_tokens: longest answer.
        sampling: ``temperature``, ``seed`` and the like, which an engine and a server call alike; none for greedy.
    """

    prompt: str
    new_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)

    def body(self, model: str, **fields: Any) -> bytes:
        """The body of its request.

        Args:
            model: its name.
            **fields: to add or change.
        """
        return chat_body(model, self.prompt, self.new_tokens, **{**self.sampling, **fields})


def varied(prompts: Sequence[str], count: int) -> list[Chat]:
    """Chats of several lengths, every second of them sampled with a seed of its own.

    Args:
        prompts: at least ``count``, all different.
        count: how many.
    """
    lengths = (4, 8, 16, 24, 40)
    sampled = [{"temperature": 0.8, "seed": number} if number % 2 else {} for number in range(count)]
    return [Chat(prompts[number], lengths[number % len(lengths)], sampled[number]) for number in range(count)]


def answer_alone(model: str, method: str, chats: Sequence[Chat]) -> list[Answer]:
    """Answers of an engine without a server, one after the other, in a process that has done nothing else.

    Args:
        model: its name.
        method: what drafts.
        chats: to answer.
    """
    with engine_alone(model, method) as ask:
        return [ask(chat) for chat in chats]


@contextmanager
def engine_alone(model: str, method: str) -> Iterator[Callable[[Chat], Answer]]:
    """Starts an engine without a server, in a process of its own that ends after the block.

    Its threads wait for each other as those of a server do.

    Args:
        model: its name.
        method: what drafts.

    Yields:
        What answers a chat; it raises ``RuntimeError`` where the process has failed.
    """
    command = [sys.executable, str(SCRIPT), "alone", "--model", model, "--method", method]
    environment = {**os.environ, **brief_waits()}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        asked, printed = process.stdin, process.stdout
        assert asked is not None
        assert printed is not None

        def ask(chat: Chat) -> Answer:
            print(json.dumps(asdict(chat)), file=asked, flush=True)
            if not (line := printed.readline()):
                raise RuntimeError("the engine without a server failed; its errors are above")
            found = json.loads(line)
            return Answer(**{**found, "arrivals": tuple(found["arrivals"])})

        yield ask
