"""The load: some clients, each of which sends the next chat when its last one is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from serving.chat import Answer, chat_body, stream_chat
from serving.http import Server

_WARM_UP = "Say hello to visitor number {number}, and tell them what they can see in this town."
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Level:
    """One level of load.

    Attributes:
        clients: how many send at a time.
        prompts: what they send, each message once.
    """

    clients: int
    prompts: tuple[str, ...]


def levels_of(clients: Sequence[int], prompts: Sequence[str], *, rounds: int, fewest: int = 4) -> list[Level]:
    """The levels of a measurement. No two have a prompt in common, so that no cache of prompts helps.

    Args:
        clients: numbers of clients.
        prompts: messages.
        rounds: messages of each client.
        fewest: messages of a level with few clients.

    Raises:
        ValueError: there are too few prompts.
    """
    counts = [max(fewest, rounds * count) for count in clients]
    if sum(counts) > len(prompts):
        raise ValueError(f"these levels send {sum(counts)} different prompts, and there are {len(prompts)}; give more")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [
        Level(each, tuple(prompts[end - count : end])) for each, count, end in zip(clients, counts, ends, strict=True)
    ]


async def measure(server: Server, level: Level, new_tokens: int) -> list[Answer]:
    """Answers to all prompts of a level.

    Args:
        server: answers.
        level: of load.
        new_tokens: longest answer.

    Raises:
        RefusedError: a request was refused.
        BrokenReplyError: a stream ended early.
    """
    waiting = iter(level.prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await stream_chat(server, chat_body(server.model, prompt, new_tokens)))

    await asyncio.gather(*(client() for _ in range(level.clients)))
    return answers


async def warm_up(server: Server, clients: int) -> None:
    """Sends short chats, one alone and then one from each client."""
    for count in (1, clients):
        prompts = tuple(_WARM_UP.format(number=number) for number in range(count))
        await measure(server, Level(count, prompts), _WARM_UP_TOKENS)
