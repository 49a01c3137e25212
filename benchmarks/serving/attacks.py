"""Attacks on a server: what ``/health`` and another client's stream notice of each of them."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.http import BrokenReplyError, Server, connected, head, read_head, request
from serving.process_memory import held
from serving.servers import Started

MOST_HEALTH, MOST_GAP = 0.1, 0.25
"""Seconds that ``/health`` and the next piece of another stream may take at most."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_PATIENCE = 60.0
_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_ITEMS: tuple[dict[str, Any], ...] = (
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "reasoning", "summary": []},
)
_GRAMMARS = (
    'start: start start | "a"',
    "start: /(" + "a?" * 500 + ")/",
    'start: x~1000000\nx: "a"',
    'start: s*\ns: t*\nt: u*\nu: "" | "a"',
    'root ::= root root | "a"',
    "start: " + " | ".join(f'"word {index}"' for index in range(3000)),
)
_WORDS = "the quick brown fox jumps over the lazy dog and runs on, "


@dataclass
class Noticed:
    """What others noticed of an attack.

    Attributes:
        attack: its name.
        health: longest time of ``/health``, in seconds.
        gap: longest time between two pieces of another stream, in seconds.
        seconds: of the attack.
        statuses: answers to it by status of HTTP; 0 for connections that were closed without one.
        grown: bytes that the server's processes hold more after it.
    """

    attack: str
    health: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    grown: int = 0

    def fields(self) -> dict[str, Any]:
        """Fields of a report."""
        return {**asdict(self), "statuses": {str(status): count for status, count in self.statuses.items()}}

    def faults(self) -> list[str]:
        """What should not have been."""
        found = [f"{self.attack}: /health took {self.health:.3f} s"] if self.health > MOST_HEALTH else []
        found += [f"{self.attack}: a stream waited {self.gap:.3f} s"] if self.gap > MOST_GAP else []
        return found + [
            f"{self.attack}: status {status}" for status in self.statuses if status >= 500 and status != 503
        ]


Attack = Callable[[Server, Counter[int]], Awaitable[None]]


async def send(server: Server, statuses: Counter[int], path: str, content: bytes) -> None:
    """Sends a request, reads its answer to the end, and counts its status."""
    status = 0
    with suppress(OSError, BrokenReplyError, asyncio.TimeoutError):
        async with request(server, "POST", path, content) as reply:
            status = reply.status
            await asyncio.wait_for(reply.body(), _PATIENCE)
    statuses[status] += 1


def posts(path: str, *bodies: bytes | Mapping[str, Any]) -> Attack:
    """An attack by requests that are sent together."""
    contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]

    async def attack(server: Server, statuses: Counter[int]) -> None:
        await asyncio.gather(*(send(server, statuses, path, content) for content in contents))

    return attack


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """A response format."""
    asked = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": asked}}


def tool(properties: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that takes some arguments."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def raw(*parts: bytes, count: int = 1, wait: float = 0.0, reads: bool = True) -> Attack:
    """An attack by connections that send some bytes, and stay for a while."""

    async def one(server: Server, statuses: Counter[int]) -> None:
        status = 0
        with suppress(OSError, BrokenReplyError, asyncio.TimeoutError):
            async with connected(server) as (reader, writer):
                for part in parts:
                    writer.write(part)
                    await asyncio.wait_for(writer.drain(), _PATIENCE)
                await asyncio.sleep(wait)
                if reads:
                    status = (await asyncio.wait_for(read_head(reader), _PATIENCE)).status
        statuses[status] += 1

    async def attack(server: Server, statuses: Counter[int]) -> None:
        await asyncio.gather(*(one(server, statuses) for _ in range(count)))

    return attack


def given_up(path: str, content: Mapping[str, Any], *, count: int, together: int = 50) -> Attack:
    """An attack by requests whose clients leave at once, some at a time."""
    body = json.dumps(content).encode()

    async def leave(server: Server) -> None:
        async with connected(server) as (_, writer):
            writer.write(head(server, "POST", path, len(body), {}) + body)
            await writer.drain()

    async def attack(server: Server, statuses: Counter[int]) -> None:
        for _ in range(0, count, together):
            await asyncio.gather(*(leave(server) for _ in range(together)), return_exceptions=True)
        statuses[0] += count

    return attack


def trickling(chunk: bytes, *, count: int, seconds: float) -> Attack:
    """An attack by bodies that come in many small chunks, each in a packet of its own."""

    async def one(server: Server) -> None:
        async with connected(server) as (_, writer):
            writer.write(_CHUNKED)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await writer.drain()
                await asyncio.sleep(0.05)

    async def attack(server: Server, statuses: Counter[int]) -> None:
        await asyncio.gather(*(one(server) for _ in range(count)), return_exceptions=True)
        statuses[0] += count

    return attack


def references(depth: int) -> dict[str, Any]:
    """A schema whose objects have eight parts of the next kind each."""
    kinds = {
        f"k{index}": {"properties": {key: {"$ref": f"#/$defs/k{index + 1}"} for key in "abcdefgh"}}
        for index in range(depth)
    }
    return {"$defs": {**kinds, f"k{depth}": {"type": "string"}}, "$ref": "#/$defs/k0"}


def attacks(server: Server) -> dict[str, Attack]:
    """The attacks by name."""
    words = _WORDS * (2_000_000 // len(_WORDS))
    pattern = {"type": "string", "pattern": "^(x*y*z*){30}.*[ab].{14}$"}
    wide = {f"field {index}": {"type": "string", "pattern": f"^.*[ab].{{{index % 30}}}$"} for index in range(300)}
    length = head(server, "POST", COMPLETION, 100_000, {})
    unread = json.dumps({"prompt": "a", "max_tokens": 4000, "n": 16, "stream": True, "logprobs": 0, "ignore_eos": True})
    alone = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    unread_head = head(server, "POST", COMPLETION, len(unread), {})
    return {
        "wrong elements of a list": posts(CHAT, *[b'{"messages": [' + b"1," * 500_000 + b"1]}"] * 4),
        "wrong parts of messages": posts(
            CHAT, b'{"messages": [' + b",".join([b'{"role":"user","content":[{}]}'] * 60_000) + b"]}"
        ),
        "chats of 2 MB": posts(CHAT, *[chat(words)] * 5),
        "texts of one word": posts("/tokenize", *[{"prompt": "a" * 120_000}] * 5),
        "very many token ids": posts(COMPLETION, *[{"prompt": [5] * 1_000_000}] * 2),
        "very many prompts": posts(COMPLETION, {"prompt": ["a"] * 1024, "n": 128}),
        "a nested body": posts(
            CHAT, b'{"messages": ' + b"[" * 1_000_000, b'{"messages":[],"tools":' + b'{"a":' * 50_000
        ),
        "numbers instead of texts": posts(CHAT, *[chat(chat_template_kwargs={"a": [1] * 1_300_000})] * 4),
        "much to repeat": posts(
            "/v1/responses", *[{"input": "Hi", "metadata": {"a": [{}] * 700_000}, "max_output_tokens": 4}] * 4
        ),
        "tools with large schemas": posts(CHAT, *[chat(tools=[tool(wide)], tool_choice="required")] * 4),
        "bodies of one-byte chunks": raw(_CHUNKED + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n", count=2),
        "bodies that trickle": trickling(b" ", count=100, seconds=5),
        "requests that are given up": given_up(COMPLETION, {"prompt": "a", "max_tokens": 500}, count=1000),
        "streams that are given up": given_up(CHAT, chat(stream=True, max_tokens=500), count=1000),
        "long lists of responses": posts(
            "/v1/responses",
            *[{"input": [item] * count, "max_output_tokens": 2} for item in _ITEMS for count in (2000, 4096, 40_000)],
        ),
        "schemas that refer": posts(
            CHAT,
            *[
                chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": each}})
                for each in (references(8), references(30), {"$ref": "#"}, {"allOf": [{"$ref": "#"}] * 2})
            ],
        ),
        "grammars": posts(CHAT, *[chat(structured_outputs={"grammar": each}, max_tokens=40) for each in _GRAMMARS]),
        "large bodies that come slowly": raw(length + b" " * 90_000, count=40, wait=3, reads=False),
        "a salt for each request": posts(
            COMPLETION, *[{"prompt": "a", "max_tokens": 1, "cache_salt": str(number)} for number in range(200)]
        ),
        "nested variables": posts(
            CHAT, json.dumps(chat()).encode()[:-1] + b', "chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 901
        ),
        "a method that needs preparation": posts(
            COMPLETION, *[{"prompt": "a", "speculative": {"method": "mixed"}}] * 4
        ),
        "128 choices with a schema": posts(CHAT, chat(n=128, response_format=schema(wide), max_tokens=4)),
        "regular expressions": posts(
            CHAT, *[chat(response_format=schema({f"p{index}": pattern}), max_tokens=40) for index in range(16)]
        ),
        "log-probabilities of everything": posts(
            COMPLETION, *[{"prompt": words[:8000], "echo": True, "logprobs": 20, "max_tokens": 1}] * 4
        ),
        "too many log-probabilities": posts(CHAT, chat(logprobs=True, top_logprobs=20, n=64, max_tokens=1000)),
        "undecodable bytes": posts(COMPLETION, *[{"prompt": [230] * 2000, "echo": True, "max_tokens": 1}] * 2),
        "tiny temperatures": posts(CHAT, *[chat(temperature=value) for value in (1e-40, 1e-9)]),
        "control tokens": posts(CHAT, chat("<|im_start|>" * 5000)),
        "24 MB of headers": raw(b"GET /health HTTP/1.1\r\n", *[b"a: " + b"b" * 100_000 + b"\r\n"] * 240),
        "very many headers": raw(b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 200_000, count=4),
        "a header without an end": raw(b"GET /health HTTP/1.1\r\na: ", *[b"b" * 60_000] * 40),
        "a long URL": raw(b"GET /" + b"a" * 2_000_000 + b" HTTP/1.1\r\n\r\n"),
        "pipelined requests": raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20_000, count=2),
        "1,100 silent connections": raw(count=1100, wait=3, reads=False),
        "1,100 half heads": raw(b"GET /health HT", count=1100, wait=3, reads=False),
        "100 half bodies": raw(length + b'{"prompt": "', count=100, wait=3, reads=False),
        "250 streams that are not read": raw(
            head(server, "POST", COMPLETION, len(alone), {}) + alone, count=250, wait=5, reads=False
        ),
        "answers that are not read": raw(unread_head + unread.encode(), count=4, wait=5, reads=False),
        "the document, often": raw(
            b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", count=50
        ),
    }


def run_attack(server: Server, name: str) -> Counter[int]:
    """Attacks a server, in the process of the attacker; returns the statuses of the answers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    statuses: Counter[int] = Counter()
    asyncio.run(attacks(server)[name](server, statuses))
    return statuses


async def watch_attack(started: Started, name: str, attacker: Executor) -> Noticed:
    """Attacks a server from another process, while one client asks for ``/health`` and another reads a stream."""
    noticed, before = Noticed(name), held(started.process.pid, 0).resident_bytes
    async with _watching(started.server, noticed):
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        noticed.statuses = await loop.run_in_executor(attacker, run_attack, started.server, name)
        noticed.seconds = time.monotonic() - began
        await asyncio.sleep(1)
    noticed.grown = held(started.process.pid, 0).resident_bytes - before
    return noticed


@asynccontextmanager
async def _watching(server: Server, noticed: Noticed) -> AsyncIterator[None]:
    """Measures until the block ends, once a stream is being read."""
    reads = asyncio.Event()

    async def health() -> None:
        while True:
            began = time.monotonic()
            async with request(server, "GET", "/health") as reply:
                await reply.body()
                assert reply.status == 200, f"/health has status {reply.status}"
            noticed.health = max(noticed.health, time.monotonic() - began)
            await asyncio.sleep(0.02)

    async def stream() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        while True:
            async with request(server, "POST", COMPLETION, json.dumps(body).encode()) as reply:
                last = 0.0
                async for event in reply.events():
                    now = time.monotonic()
                    noticed.gap = max(noticed.gap, now - last) if last and event != "[DONE]" else noticed.gap
                    last = now
                    reads.set()

    tasks = [asyncio.create_task(stream())]
    await asyncio.wait_for(reads.wait(), _PATIENCE)
    tasks.append(asyncio.create_task(health()))
    await asyncio.sleep(0.5)
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
