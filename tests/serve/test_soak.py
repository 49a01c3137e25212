"""The soak of ``benchmarks/serve.py``, for a moment and on a tiny model: nothing is lost, mixed up or kept."""

import asyncio
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.checkpoints import CHAT_TEMPLATE, save_checkpoint
from selfspec import Engine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAME = "tiny-chat"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a server holds is read from /proc")


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield lambda name: importlib.import_module(f"serving.{name}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    return save_checkpoint(tmp_path_factory.mktemp("model") / NAME, chat_template=template)


@pytest.fixture(scope="module")
def started(
    serving: Callable[[str], ModuleType], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    servers = serving("servers")
    port = servers.free_port()
    command = servers.command_of("selfspec:suffix", servers.Files(str(model), model), port)
    with servers.running(command, NAME, port, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def known(serving: Callable[[str], ModuleType], model: Path) -> list[tuple[Any, str]]:
    chats = serving("known").varied(serving("prompts").PROMPTS, 10)
    answers = list(serving("alone").generate_alone(Engine.from_pretrained(str(model), "autoregressive"), chats))
    assert len({answer.text for answer in answers}) > 5
    return [(chat, answer.text) for chat, answer in zip(chats, answers, strict=True)]


@pytest.mark.slow
def test_a_server_stands_the_soak(
    serving: Callable[[str], ModuleType], started: Any, known: list[tuple[Any, str]]
) -> None:
    found = asyncio.run(serving("soak").soak(started, known, clients=12, seconds=2.0))
    assert [fault for fault in found.faults() if "memory" not in fault] == []
    assert {"stream", "whole"} <= {name for name, _ in found.outcomes}
    assert found.statuses[200] > 0
    metrics = asyncio.run(serving("soak").metrics_of(started.server))
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.slow
def test_every_client_has_the_outcome_that_it_should(
    serving: Callable[[str], ModuleType], started: Any, known: list[tuple[Any, str]]
) -> None:
    clients, dice = serving("clients"), random.Random(0)
    interfaces = serving("interfaces").INTERFACES
    for client in (*clients.CLIENTS, *interfaces):
        chat, text = known[-2 if client in interfaces else -1]
        task = clients.Task(started.server, chat, text, dice)
        outcome = asyncio.run(clients.outcome_of(client, task))
        assert outcome.right, (client.__name__, outcome)


@pytest.mark.slow
def test_a_wrong_text_is_found(
    serving: Callable[[str], ModuleType], started: Any, known: list[tuple[Any, str]]
) -> None:
    clients, dice = serving("clients"), random.Random(0)
    task = clients.Task(started.server, known[0][0], known[0][1] + "!", dice)
    for client in (clients.whole, clients.stream, clients.slow, clients.dribble):
        assert not asyncio.run(clients.outcome_of(client, task)).right


def test_faults_are_named(serving: Callable[[str], ModuleType]) -> None:
    held, clients = serving("process_memory").Held, serving("clients")
    found = serving("soak").Soak(held=[held(float(second), 1000 + 10 * second, 5, 2) for second in range(100)])
    found.note(clients.whole, clients.Outcome(False, "status 500", 500))
    found.note(clients.whole, clients.Outcome(True, "the text alone", 200))
    found.left = {"running": 2.0, "waiting": 0.0}
    assert found.faults() == [
        "1 requests of whole went wrong",
        "1 answers with status 500",
        "running is 2 after the last request",
        "memory grew by 46.3% after the warm-up",
    ]


def test_metrics_are_summed_over_their_labels(serving: Callable[[str], ModuleType]) -> None:
    lines = ["# HELP a text", 'a{model="x y"} 2.0', 'a{model="z"} 1.5', "b 3"]
    assert serving("soak").read_metrics(lines) == {"a": 3.5, "b": 3.0}
