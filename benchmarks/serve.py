"""Measures ``selfspec serve`` beside other servers, under load, for long, and with faults.

``python benchmarks/serve.py load --out FILE`` starts servers in turns and measures each with 1, 2, 4 … clients;
``--append`` adds repeats to a file. ``table FILE`` prints its medians in Markdown, ``page FILE...`` writes them into
``docs/serving.md``. ``soak`` lets many clients of all interfaces, good and bad ones, use a server of SmolLM2 (with a
template that knows tools) for minutes, and says at the end what was wrong. ``attacks`` sends what should not be sent,
and measures how long ``/health`` and another client's stream take meanwhile. ``conversation`` asks about a long text,
and asks again, alone and while another client reads a stream. ``pairs`` lets one client and an engine without a server
answer the same chats in turns.

Needs a quiet machine for ``load``. Servers: ``selfspec:METHOD``; ``engine:METHOD``, which is ``selfspec generate``
without a server; ``transformers`` and ``transformers-cb`` (continuous batching); ``llama.cpp``; ``vllm`` and
``vllm-eager``. Their programs are ``transformers``, ``llama-server`` and ``vllm`` on PATH, or what the environment
variables TRANSFORMERS, LLAMA_SERVER and VLLM name; llama.cpp also needs ``--gguf``. A model by name is served in
bfloat16 by all; ``--model FILE.gguf`` is served as it is, by selfspec and llama.cpp. All compute with OMP_NUM_THREADS
threads. All of them, in turns, with processors of their own for clients and servers:

    TRANSFORMERS=... LLAMA_SERVER=... VLLM=... python benchmarks/serve.py load --servers all --repeats 3
        --gguf FILE --client-cpus 0,1 --server-cpus 2,3 --out FILE

Servers that take long to start or to answer (``--slow``) are measured once, at fewer numbers of clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clients.agent_model import make_chat_model, make_long_model
from selfspec.files import replace_file
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from serving.alone import generate_alone
from serving.attacks import attacks, watch_attack
from serving.conversation import converse
from serving.figures import ratios_of, table
from serving.known import Chat, answer_alone, engine_alone, varied
from serving.load import levels_of, warm_up
from serving.page import load_section, write_section
from serving.pairs import figures_of_pairs, in_pairs, loop_seconds
from serving.processors import parse_processors
from serving.prompts import read_prompts
from serving.servers import Files, command_of, free_port, running, saved
from serving.soak import soak
from serving.turns import Terms, in_turns

OURS = "engine:auto,selfspec:auto,engine:autoregressive,selfspec:autoregressive"
ALL = f"{OURS},llama.cpp,vllm-eager,vllm,transformers,transformers-cb"
SLOW = "transformers,transformers-cb,vllm"
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
CLIENTS = "1,2,4,8,16,32"
PACKAGES = ("uvicorn", "fastapi", "pydantic", "llama-cpp-python")


def load(options: argparse.Namespace) -> None:
    """Measures servers in turns and writes the samples."""
    prompts = read_prompts(options.prompts)
    levels = levels_of([int(count) for count in options.clients.split(",")], prompts, rounds=options.rounds)
    if options.server_cpus is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(options.server_cpus)))
    chosen = ("model", "clients", "rounds", "new_tokens", "slow", "slow_clients", "client_cpus", "server_cpus")
    result = _begin(options, "serve-load", chosen)
    result.setdefault("failures", [])
    with saved(options.model, options.gguf) as files:
        terms = Terms(
            files,
            levels,
            options.new_tokens,
            frozenset(options.slow.split(",")),
            frozenset(int(count) for count in options.slow_clients.split(",")),
            options.client_cpus,
            options.server_cpus,
        )
        for sample in in_turns(
            (ALL if options.servers == "all" else options.servers).split(","), options.repeats, terms
        ):
            result["failures" if "error" in sample else "samples"].append(sample)
            print(json.dumps(sample), flush=True)
            _write(options.out, result)
    print_tables(result)


def alone(options: argparse.Namespace) -> None:
    """Answers chats without a server, a line of standard input each, and prints their answers."""
    from selfspec.engine import Engine

    engine = Engine.from_pretrained(options.model, options.method)
    engine.warmup()
    list(generate_alone(engine, [Chat("Say hello.", 16)]))
    for line in sys.stdin:
        (answer,) = generate_alone(engine, [Chat(**json.loads(line))])
        print(json.dumps(asdict(answer)), flush=True)


def pairs(options: argparse.Namespace) -> None:
    """Measures one client of a server beside the engine without a server, and writes the pairs."""
    chats = [Chat(prompt, options.new_tokens) for prompt in read_prompts(options.prompts)[: options.chats]]
    result = _begin(options, "serve-pairs", ("model", "methods", "chats", "new_tokens"))
    with saved(options.model) as files:
        for method in options.methods.split(","):
            command, port = f"selfspec:{method}", free_port()
            with (
                tempfile.TemporaryDirectory() as folder,
                running(command_of(command, files, port), files.name, port, Path(folder)) as started,
                engine_alone(files.model, method) as ask,
            ):
                ask(chats[0])  # loads first, while the server has nothing to do
                asyncio.run(warm_up(started.server, 1))
                loop = partial(loop_seconds, started.process.pid)
                found = [pair.fields() for pair in in_pairs(started.server, ask, chats, loop)]
            result["samples"] += [{"method": method, **pair} for pair in found]
            print(json.dumps({"method": method, **figures_of_pairs(found)}), flush=True)
    _write(options.out, result)


def soak_server(options: argparse.Namespace) -> None:
    """Lets many clients use a server, writes what happened, and ends with an error if something was wrong."""
    chats = varied(read_prompts(options.prompts), options.chats)
    result = _begin(options, "serve-soak", ("method", "chats", "clients", "seconds"))
    with tempfile.TemporaryDirectory() as folder:
        model = make_chat_model(Path(folder) / "smollm2-tools")
        answers = answer_alone(str(model), "autoregressive", chats)
        known = [(chat, answer.text) for chat, answer in zip(chats, answers, strict=True)]
        port = free_port()
        command = command_of(f"selfspec:{options.method}", Files(str(model)), port)
        with running(command, model.name, port, Path(folder)) as started:
            found = asyncio.run(soak(started, known, clients=options.clients, seconds=options.seconds))
    _write(options.out, {**result, **found.fields()})
    print(json.dumps({name: value for name, value in found.fields().items() if name != "held"}, indent=1))
    if found.faults():
        raise SystemExit("the soak found faults")


def attack_server(options: argparse.Namespace) -> None:
    """Attacks a server in many ways, writes what others noticed of it, and ends with an error if it was too much."""
    result, faults = _begin(options, "serve-attacks", ("method",)), []
    with tempfile.TemporaryDirectory() as folder:
        model, port = make_chat_model(Path(folder) / "smollm2-tools"), free_port()
        command = command_of(f"selfspec:{options.method}", Files(str(model)), port)
        with (
            running([*command, "--cache-dir", f"{folder}/kept"], model.name, port, Path(folder)) as started,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker,
        ):
            for name in attacks(started.server):
                if re.search(options.only, name):
                    noticed = asyncio.run(watch_attack(started, name, attacker))
                    result["samples"].append(noticed.fields())
                    faults += noticed.faults()
                    print(json.dumps(noticed.fields()), flush=True)
    _write(options.out, result)
    if faults:
        raise SystemExit("\n".join(faults))


def hold_conversations(options: argparse.Namespace) -> None:
    """Holds long conversations, writes how long they waited, and ends with an error if it was too long."""
    result, faults = _begin(options, "serve-conversation", ("method", "tokens")), []
    with tempfile.TemporaryDirectory() as folder:
        model, port = make_long_model(Path(folder) / "smollm2-long", 8192 + 2 * options.tokens), free_port()
        command = command_of(f"selfspec:{options.method}", Files(str(model)), port)
        with running(command, model.name, port, Path(folder)) as started:
            asyncio.run(converse(started.server, 1000, "warm-up", beside=False))
            for number in range(options.repeats):
                for beside in (False, True):
                    found = asyncio.run(converse(started.server, options.tokens, f"{number} {beside}", beside=beside))
                    result["samples"].append(found.fields())
                    faults += found.faults()
                    print(found, flush=True)
    _write(options.out, result)
    if faults:
        raise SystemExit("\n".join(faults))


def show(options: argparse.Namespace) -> None:
    """Prints a file of ``load`` as tables."""
    print_tables(json.loads(options.file.read_text(encoding="utf-8")))


def write_page(options: argparse.Namespace) -> None:
    """Writes the tables of files of ``load`` into the page about serving."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in options.files]
    write_section(PAGE, "\n\n".join(map(load_section, results)))


def print_tables(result: Mapping[str, Any]) -> None:
    """Prints the medians of a result of ``load``, what was aimed at, and what failed."""
    samples = result["samples"]
    for figure, title, scale, digits in (
        ("tokens_per_second", "tokens/s by number of clients", 1, 0),
        ("first_p50", "milliseconds to the first token, median", 1000, 0),
        ("first_p99", "the same, 99th percentile", 1000, 0),
        ("token_p50", "milliseconds per token of an answer, median", 1000, 1),
        ("gap_p99", "milliseconds between pieces of text, 99th percentile", 1000, 0),
    ):
        print(f"{title}:\n\n{table(samples, figure, scale=scale, digits=digits)}\n")
    print("\n".join(ratios_of(samples)))
    for failure in result.get("failures", ()):
        print(f"{failure['server']} failed: {failure['error']}")


def _begin(options: argparse.Namespace, name: str, chosen: Sequence[str]) -> dict[str, Any]:
    """The file to add samples to, or a new one."""
    given = {option: getattr(options, option) for option in chosen}
    if "model" in given:
        given["model"] = Path(given["model"]).name
    stamp = make_stamp(torch.device("cpu"), PACKAGES)
    if options.append and options.out.exists():
        result: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
        if result["options"] != given:
            raise SystemExit(f"{options.out} was measured with {result['options']}, not {given}; write to another file")
        result["stamps"].append(stamp)
        return result
    return {"benchmark": name, "stamps": [stamp], "options": given, "samples": []}


def _write(path: Path, result: dict[str, Any]) -> None:
    replace_file(path, json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    loading = commands.add_parser("load", help="measure servers under load")
    loading.add_argument("--servers", default=OURS, help="with commas between them, or all")
    loading.add_argument("--clients", default=CLIENTS)
    loading.add_argument("--rounds", type=int, default=2, help="chats of each client")
    loading.add_argument("--repeats", type=int, default=1)
    loading.add_argument("--gguf", type=Path, help="a GGUF file of the model, for llama.cpp")
    loading.add_argument("--append", action="store_true", help="add repeats to --out")
    loading.add_argument("--out", type=Path, required=True)
    loading.add_argument("--client-cpus", type=parse_processors, help="processors of the clients, as in 0,1")
    loading.add_argument("--server-cpus", type=parse_processors, help="processors of the servers, as in 2-3")
    loading.add_argument("--slow", default=SLOW, help="servers to measure once only, at --slow-clients")
    loading.add_argument("--slow-clients", default="1,4,16")
    soaking = commands.add_parser("soak", help="let many clients, good and bad ones, use a server for minutes")
    soaking.add_argument("--clients", type=int, default=200)
    soaking.add_argument("--seconds", type=float, default=600.0)
    soaking.add_argument("--chats", type=int, default=100, help="different chats")
    soaking.add_argument("--out", type=Path, required=True)
    soaking.set_defaults(append=False)
    attacking = commands.add_parser("attacks", help="attack a server, and measure what others notice of it")
    attacking.add_argument("--only", default="", help="a regular expression for the names of the attacks to run")
    attacking.add_argument("--out", type=Path, required=True)
    attacking.add_argument("--append", action="store_true", help="add to --out")
    conversing = commands.add_parser("conversation", help="hold long conversations, and measure how long they wait")
    conversing.add_argument("--tokens", type=int, default=16_000, help="of the text that it is about, roughly")
    conversing.add_argument("--repeats", type=int, default=2)
    conversing.add_argument("--out", type=Path, required=True)
    conversing.set_defaults(append=False)
    pairing = commands.add_parser("pairs", help="measure one client beside the engine without a server, in turns")
    pairing.add_argument("--methods", default="autoregressive,auto", help="with commas between them")
    pairing.add_argument("--chats", type=int, default=40)
    pairing.add_argument("--out", type=Path, required=True)
    pairing.set_defaults(append=False)
    single = commands.add_parser("alone", help="answer chats without a server, a line of standard input each")
    for each in (soaking, attacking, conversing, single):
        each.add_argument("--method", default="auto")
    for each in (loading, pairing, single):
        each.add_argument("--model", default="smollm2")
    for each in (loading, pairing):
        each.add_argument("--new-tokens", type=int, default=64)
    for each in (loading, pairing, soaking):
        each.add_argument("--prompts", type=Path, help="JSON lines; default: built-in messages")
    showing = commands.add_parser("table", help="print a file of load as tables")
    showing.add_argument("file", type=Path)
    writing = commands.add_parser("page", help="write files of load into docs/serving.md")
    writing.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parse_and_check(parser, arguments, lambda given: given.command not in ("alone", "table", "page"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are ended
    commands_by_name = {
        "load": load,
        "alone": alone,
        "pairs": pairs,
        "attacks": attack_server,
        "soak": soak_server,
        "conversation": hold_conversations,
        "table": show,
        "page": write_page,
    }
    commands_by_name[options.command](options)


if __name__ == "__main__":
    main()
