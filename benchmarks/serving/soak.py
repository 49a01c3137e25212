"""The soak: many clients use one server for minutes, and nothing may be lost, mixed up or kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.clients import CLIENTS, Client, Outcome, Task, outcome_of
from serving.http import Server, request
from serving.interfaces import INTERFACES
from serving.known import Chat
from serving.process_memory import Held, growth, held
from serving.servers import Started

MOST_GROWTH = 0.02
"""Share by which the memory may grow after the warm-up."""

_WRONG_KEPT = 20


@dataclass
class Soak:
    """What a soak found.

    Attributes:
        outcomes: requests by client, and whether the outcome was right.
        statuses: answers by status of HTTP.
        wrong: the first outcomes that were not right.
        held: what the server held, sampled over the time.
        left: requests that the server still had when all clients were gone.
    """

    outcomes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)

    def note(self, client: Client, outcome: Outcome) -> None:
        """Takes an outcome."""
        self.outcomes[client.__name__, outcome.right] += 1
        self.statuses[outcome.status] += 1
        if not outcome.right and len(self.wrong) < _WRONG_KEPT:
            self.wrong.append(f"{client.__name__}: {outcome.detail}")

    def faults(self) -> list[str]:
        """What should not have been; empty for a server that stood it."""
        found = [
            f"{count} requests of {name} went wrong" for (name, right), count in self.outcomes.items() if not right
        ]
        found += [f"{count} answers with status {status}" for status, count in self.statuses.items() if status >= 500]
        found += [f"{name} is {value:g} after the last request" for name, value in self.left.items() if value]
        grown = growth(self.held)
        if grown > MOST_GROWTH:
            found.append(f"memory grew by {grown:.1%} after the warm-up")
        return found

    def fields(self) -> dict[str, Any]:
        """Fields of a report."""
        right, wrong = Counter[str](), Counter[str]()
        for (name, fine), count in self.outcomes.items():
            (right if fine else wrong)[name] += count
        return {
            "requests": self.outcomes.total(),
            "right": dict(right),
            "wrong": dict(wrong),
            "examples": self.wrong,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "memory_growth": growth(self.held),
            "left": self.left,
            "held": [asdict(each) for each in self.held],
            "faults": self.faults(),
        }


async def soak(
    started: Started, known: Sequence[tuple[Chat, str]], *, clients: int, seconds: float, seed: int = 0
) -> Soak:
    """Lets clients send requests until the time is over, and then waits for the last answers.

    Args:
        started: the server.
        known: chats with their answers alone.
        clients: how many send at a time.
        seconds: of sending.
        seed: of the clients' choices.
    """
    found, began = Soak(), time.monotonic()
    seen: dict[tuple[str, str], Any] = {}
    kinds, greedy = {**CLIENTS, **INTERFACES}, [each for each in known if not each[0].sampling]

    async def client(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        while time.monotonic() - began < seconds:
            kind = dice.choices(list(kinds), list(kinds.values()))[0]
            chat, text = dice.choice(greedy if kind in INTERFACES else known)
            found.note(kind, await outcome_of(kind, Task(started.server, chat, text, dice, seen)))

    async def watch() -> None:
        while True:
            found.held.append(held(started.process.pid, time.monotonic() - began))
            await asyncio.sleep(min(2.0, seconds / 100))

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client(number) for number in range(clients)))
    finally:
        watching.cancel()
    await asyncio.sleep(2)  # for connections that were dropped last
    metrics = await metrics_of(started.server)
    found.left = {name: metrics[name] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")}
    return found


async def metrics_of(server: Server) -> dict[str, float]:
    """What a server says about itself: sums of its metrics by name."""
    async with request(server, "GET", "/metrics") as reply:
        return read_metrics((await reply.body()).decode().splitlines())


def read_metrics(lines: Sequence[str]) -> dict[str, float]:
    """Sums of metrics by name, over their labels, from the text format of Prometheus."""
    found: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
