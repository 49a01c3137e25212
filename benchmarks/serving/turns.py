"""Servers in turns: each is started, measured at every level of load, and ended, before the next one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.chat import RefusedError
from serving.figures import figures_of
from serving.http import BrokenReplyError
from serving.known import Chat, answer_alone
from serving.load import Level, measure, warm_up
from serving.processors import on_processors
from serving.servers import Files, command_of, free_port, running, served_name


@dataclass(frozen=True)
class Terms:
    """How servers are measured.

    Attributes:
        files: of the model.
        levels: of load.
        new_tokens: longest answer.
        slow: kinds of servers that are measured only in the first repeat, and only at ``slow_clients``.
        slow_clients: numbers of clients.
        client_processors: which the clients run on; ``None`` for any.
        server_processors: which the servers run on; ``None`` for any.
    """

    files: Files
    levels: Sequence[Level]
    new_tokens: int
    slow: frozenset[str] = frozenset()
    slow_clients: frozenset[int] = frozenset()
    client_processors: tuple[int, ...] | None = None
    server_processors: tuple[int, ...] | None = None

    def levels_for(self, kind: str, repeat: int) -> list[Level]:
        """The levels that a server is measured at in a repeat."""
        if kind not in self.slow:
            return list(self.levels)
        return [level for level in self.levels if repeat == 0 and level.clients in self.slow_clients]


def in_turns(kinds: Sequence[str], repeats: int, terms: Terms) -> Iterator[dict[str, Any]]:
    """Measures servers in turns.

    Args:
        kinds: of servers; ``engine:METHOD`` is no server but the same method in a process of its own.
        repeats: how often each.
        terms: of the measurement.

    Yields:
        A sample with ``server``, ``repeat``, ``clients`` and its figures; of a server that cannot be started or fails,
        one with ``error`` instead.
    """
    for repeat in range(repeats):
        for kind in kinds:
            if not (levels := terms.levels_for(kind, repeat)):
                continue
            began = time.monotonic()
            try:
                for sample in _measured(kind, levels, terms):
                    yield {"server": kind, "repeat": repeat, **sample}
            except (RefusedError, BrokenReplyError, RuntimeError, FileNotFoundError, OSError, TimeoutError) as error:
                yield {"server": kind, "repeat": repeat, "error": f"{type(error).__name__}: {error}"}
            print(f"{kind}: {time.monotonic() - began:.0f} s with its start", flush=True)


def _measured(kind: str, levels: Sequence[Level], terms: Terms) -> Iterator[dict[str, Any]]:
    files = terms.files
    if kind.startswith("engine:"):
        chats = [Chat(prompt, terms.new_tokens) for level in levels if level.clients == 1 for prompt in level.prompts]
        with on_processors(terms.server_processors):
            answers = answer_alone(files.model, kind.partition(":")[2], chats)
        yield {"clients": 1, **figures_of(answers)}
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(kind, files, port)
        server = running(command, served_name(kind, files), port, Path(folder), terms.server_processors)
        with server as up, on_processors(terms.client_processors):
            asyncio.run(warm_up(up.server, max(level.clients for level in levels)))
            for level in levels:
                yield {"clients": level.clients, **figures_of(asyncio.run(measure(up.server, level, terms.new_tokens)))}
