"""One client of a server beside the same engine without a server: chat by chat, in turns.

A machine that becomes slower meanwhile slows both, so their ratio needs no quiet hour.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.chat import Answer, stream_chat
from serving.figures import percentile
from serving.http import Server
from serving.known import Chat

_RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """A chat that an engine without a server and a server have answered, one right after the other.

    Attributes:
        tokens: of the answer.
        engine: seconds that the engine took.
        server: seconds from the connection to the end of the stream.
        client: seconds of processor time that the client of the server took, which parses after the end.
        first: seconds by which the server's first piece of text came later than the engine's.
        loop: seconds of processor time of the server's event loop, which decodes nothing.
    """

    tokens: int
    engine: float
    server: float
    client: float
    first: float
    loop: float

    def fields(self) -> dict[str, Any]:
        """Fields of a report."""
        return asdict(self)


def in_pairs(
    server: Server, ask: Callable[[Chat], Answer], chats: Sequence[Chat], loop_seconds: Callable[[], float]
) -> Iterator[Pair]:
    """Lets both answer each chat; they take turns in being the first.

    Args:
        server: answers.
        ask: the engine without a server.
        chats: to answer.
        loop_seconds: of processor time of the server's event loop so far.

    Raises:
        RuntimeError: the two texts of a chat differ.
    """
    for number, chat in enumerate(chats):
        alone = ask(chat) if number % 2 else None
        before = loop_seconds()
        answer, client = asyncio.run(_streamed(server, chat))
        loop = loop_seconds() - before
        alone = alone or ask(chat)
        if (answer.text, answer.tokens) != (alone.text, alone.tokens):
            raise RuntimeError(f"the server wrote {answer.text!r}, and the engine alone {alone.text!r}")
        yield Pair(
            answer.tokens,
            alone.ended - alone.began,
            answer.ended - answer.began,
            client,
            answer.first_seconds - alone.first_seconds,
            loop,
        )


def loop_seconds(process_id: int) -> float:
    """Processor time so far of the first thread of a process, in which a server's event loop runs (Linux)."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text().split()[0]) / 1e9


async def _streamed(server: Server, chat: Chat) -> tuple[Answer, float]:
    """The answer of a server, and the client's seconds of processor time."""
    began = time.thread_time()
    answer = await stream_chat(server, chat.body(server.model))
    return answer, time.thread_time() - began


def figures_of_pairs(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of the pairs of one server.

    Args:
        samples: fields of pairs, at least one.

    Returns:
        ``ratio`` of tokens a second, server to engine, ``low`` and ``high`` ends of its interval of 95 % (bootstrap
        over chats), ``later`` the median seconds of ``first``, ``client`` the client's share of the server's time, and
        ``loop`` the event loop's seconds of processor time for each token, where they were measured.
    """
    dice = random.Random(0)
    ratios = [_ratio(dice.choices(samples, k=len(samples))) for _ in range(_RESAMPLES)]
    figures = {
        "ratio": _ratio(samples),
        "low": percentile(ratios, 2.5),
        "high": percentile(ratios, 97.5),
        "later": percentile([sample["first"] for sample in samples], 50),
        "client": sum(sample["client"] for sample in samples) / sum(sample["server"] for sample in samples),
    }
    if all("loop" in sample for sample in samples):
        figures["loop"] = sum(sample["loop"] for sample in samples) / sum(sample["tokens"] for sample in samples)
    return figures


def _ratio(samples: Sequence[Mapping[str, float]]) -> float:
    return sum(sample["engine"] for sample in samples) / sum(sample["server"] for sample in samples)
