"""Requests whose answers are known: what an engine without a server writes for each of them alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    command = [sys.executable, str(SCRIPT), "alone", "--model", model, "--method", method]
    asked = json.dumps([asdict(chat) for chat in chats])
    printed = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [Answer(**{**found, "arrivals": tuple(found["arrivals"])}) for found in json.loads(printed)]
