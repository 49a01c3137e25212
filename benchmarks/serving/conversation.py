"""A long conversation: how long its turns wait for their first token, and how long another stream waits meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.attacks import COMPLETION, MOST_GAP
from serving.chat import chat_body, text_of
from serving.http import Server, request

MOST_SECONDS = 1.0
"""Seconds by which the first token of a later turn may come after that of a chat with as many tokens as are new."""

_SENTENCE = "In chapter {} the travellers cross a river and count {} stones before they rest under the trees. "
_SENTENCE_TOKENS = 22
_QUESTION = "Which of them counted the stones, and how many were there in the chapter before the last one?"


@dataclass
class Turn:
    """A turn of a conversation.

    Attributes:
        prompt: tokens of all of it.
        new: those that were read for it.
        first: seconds to its first token.
        gap: longest time between two pieces of another stream meanwhile, in seconds; 0 where there was none.
        text: of the answer.
    """

    prompt: int = 0
    new: int = 0
    first: float = 0.0
    gap: float = 0.0
    text: str = field(default="", repr=False)


@dataclass
class Conversation:
    """The turns of a conversation, and a chat with about as many tokens as its second turn has new ones."""

    beside: bool
    turns: list[Turn] = field(default_factory=list)
    short: Turn = field(default_factory=Turn)

    def fields(self) -> dict[str, Any]:
        """Fields of a report."""
        return asdict(self)

    def faults(self) -> list[str]:
        """What should not have been."""
        late = [turn.first - self.short.first for turn in self.turns[1:]]
        found = [f"the first token came {each:.2f} s later than that of a short chat" for each in late]
        gaps = [turn.gap for turn in self.turns]
        return [text for text, each in zip(found, late, strict=True) if each > MOST_SECONDS] + [
            f"a stream waited {gap:.3f} s" for gap in gaps if gap > MOST_GAP
        ]


async def converse(server: Server, tokens: int, salt: str, *, beside: bool) -> Conversation:
    """Asks about a text of ``tokens`` tokens, asks again, and asks in a chat of its own.

    Args:
        server: answers.
        tokens: of the text, roughly.
        salt: of prefixes, so that nothing is known of the text.
        beside: whether another client reads a stream meanwhile.
    """
    found = Conversation(beside)
    text = "".join(_SENTENCE.format(number, 7 * number) for number in range(tokens // _SENTENCE_TOKENS))
    messages = [{"role": "user", "content": text + _QUESTION}]
    gap = [0.0]
    async with _writing(server, gap) if beside else _nothing():
        for _ in range(3):
            turn = await _ask(server, messages, salt)
            turn.gap, gap[0] = gap[0], 0.0
            found.turns.append(turn)
            messages += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": _QUESTION}]
        found.short = await _ask(server, messages[-1:], f"{salt} alone")
    return found


async def _ask(server: Server, messages: list[dict[str, str]], salt: str) -> Turn:
    body = chat_body(server.model, "", 24, messages=messages, cache_salt=salt, ignore_eos=True)
    turn, began = Turn(), time.perf_counter()
    async with request(server, "POST", "/v1/chat/completions", body) as reply:
        if reply.status != 200:
            raise RuntimeError((await reply.body()).decode("utf-8", "replace")[:500])
        async for event in reply.events():
            if event == "[DONE]":
                continue
            chunk = json.loads(event)
            if text := text_of(chunk):
                turn.first = turn.first or time.perf_counter() - began
                turn.text += text
            if usage := chunk.get("usage"):
                turn.prompt = usage["prompt_tokens"]
                turn.new = turn.prompt - usage["prompt_tokens_details"]["cached_tokens"]
    return turn


@asynccontextmanager
async def _writing(server: Server, gap: list[float]) -> AsyncIterator[None]:
    """A client that reads streams; the longest time between two pieces is put into ``gap``."""
    begun = asyncio.Event()

    async def read() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        while True:
            async with request(server, "POST", COMPLETION, json.dumps(body).encode()) as reply:
                assert reply.status == 200, f"a stream has status {reply.status}"
                last = 0.0
                async for event in reply.events():
                    now = time.perf_counter()
                    gap[0] = max(gap[0], now - last) if last and event != "[DONE]" else gap[0]
                    last = now
                    begun.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(1)
    gap[0] = 0.0
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait({reading})


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
