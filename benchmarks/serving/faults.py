"""A worker is killed while it answers: what clients are told, how soon the server is whole, what it still knows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from serving.chat import RefusedError, stream_chat
from serving.http import BrokenReplyError, Server, get_json
from serving.known import Chat
from serving.process_memory import resident_bytes
from serving.servers import Started, processes_of

PATIENCE = 60.0
"""Most seconds to wait for a worker that is started again."""

RESTARTED = "a worker was started again"
"""What the server's log says when a new worker takes requests."""


async def kill_worker(started: Started, worker: int, known: Sequence[tuple[Chat, str]]) -> dict[str, Any]:
    """Kills a worker while every chat is being answered, and waits until another one has taken its place.

    Args:
        started: a server with workers.
        worker: its process.
        known: chats with their answers alone, all sent at the same time.

    Returns:
        ``answered`` right, ``wrong``, ``told`` (the messages of the errors with their numbers), ``ready_seconds`` until
        ``/ready`` says so, and ``whole_seconds`` until a new worker takes requests.
    """
    before = started.log.read_text(encoding="utf-8").count(RESTARTED)
    asking = [asyncio.create_task(_ask(started.server, chat, text)) for chat, text in known]
    await asyncio.sleep(1.0)
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    ready = await _seconds_until_ready(started.server, killed)
    whole = await _seconds_until_restarted(started, before, killed)
    outcomes = await asyncio.gather(*asking)
    told = {each: outcomes.count(each) for each in dict.fromkeys(outcomes) if each not in ("right", "wrong")}
    return {
        "answered": outcomes.count("right"),
        "wrong": outcomes.count("wrong"),
        "told": told,
        "ready_seconds": ready,
        "whole_seconds": whole,
    }


def workers_of(started: Started) -> list[int]:
    """The processes of a server that have a model: large ones without children."""
    last = [each for each in processes_of(started.process.pid)[1:] if len(processes_of(each)) == 1]
    sizes = {each: resident_bytes(each) for each in last}
    return [each for each, size in sizes.items() if size > max(sizes.values()) / 2]


async def _ask(server: Server, chat: Chat, text: str) -> str:
    try:
        answer = await stream_chat(server, chat.body(server.model))
    except RefusedError as error:
        return error.message
    except (BrokenReplyError, OSError) as error:
        return f"lost: {error}"
    return "right" if answer.text == text else "wrong"


async def _seconds_until_ready(server: Server, since: float) -> float:
    while time.monotonic() < since + PATIENCE:
        status, _ = await get_json(server, "/ready")
        if status == 200:
            break
        await asyncio.sleep(0.02)
    return time.monotonic() - since


async def _seconds_until_restarted(started: Started, before: int, since: float) -> float:
    while time.monotonic() < since + PATIENCE:
        if started.log.read_text(encoding="utf-8").count(RESTARTED) > before:
            break
        await asyncio.sleep(0.02)
    return time.monotonic() - since
