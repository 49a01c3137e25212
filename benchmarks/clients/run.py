"""Runs clients that others wrote against ``selfspec serve``, and writes the page about it.

``python benchmarks/clients/run.py all`` makes an environment for each client, starts a server for it, keeps what it
found in ``benchmarks/results/clients/`` and writes ``docs/clients.md`` from that. Give names of clients instead of
``all`` for some, ``--quick`` for a try whose results are only printed, ``report`` to write the page alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from client import HERE, Client, Setting
from environments import make, make_node, versions
from report import render
from run_agents import AGENTS
from run_guidellm import GUIDELLM
from run_lm_eval import LM_EVAL
from run_schemathesis import SCHEMATHESIS
from run_scripts import ANTHROPIC, INSTRUCTOR, LANGCHAIN, LITELLM, OPENAI
from served import serve

from selfspec.loading import load_model
from selfspec_lab.bench.stamp import make_stamp, parse_and_check


def name_of(client: Client) -> str:
    """A client's name for files and headings."""
    return client.name.rpartition("@")[0].rpartition("/")[2] if client.is_node else client.name


CLIENTS = {
    name_of(client): client
    for client in (OPENAI, ANTHROPIC, LANGCHAIN, LITELLM, INSTRUCTOR, LM_EVAL, GUIDELLM, *AGENTS, SCHEMATHESIS)
}
RESULTS = HERE.parent / "results" / "clients"
PAGE = HERE.parents[1] / "docs" / "clients.md"


def run(client: Client, environment: Path, stamp: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Runs one client against a server of its own.

    Args:
        client: to run.
        environment: folder of its environment; made if it is not there.
        stamp: of the result; made before the first result changes the checkout.
        quick: make a short run.

    Returns:
        What it found, with what is needed to find it again.
    """
    if client.is_node:
        python, version = make_node(environment, client.name)
    else:
        python = make(environment, client.packages)
        version = versions(python, [client.name])[client.name]
    with tempfile.TemporaryDirectory() as folder:
        made = not isinstance(client.model, str)
        path = (
            client.model(Path(folder) / "agent") if not isinstance(client.model, str) else _save(client.model, folder)
        )
        name = path.name if made else str(client.model)
        arguments = ("--model", str(path) if made else name, *client.options)
        with serve(arguments, Path(folder), client.program) as server:
            began = time.perf_counter()
            found = client.run(Setting(python, server, name, path, Path(folder), quick))
    return {
        "client": name_of(client),
        "version": version,
        "server": " ".join(("selfspec serve --model", name, *client.options)),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "found": found,
        "stamp": stamp,
    }


def _save(model: str, folder: str) -> Path:
    """A new folder with a model's float32 weights and its tokenizer."""
    loaded, tokenizer = load_model(model, dtype="float32", unpack=True)
    assert tokenizer is not None
    for each in (loaded, tokenizer):
        each.save_pretrained(Path(folder) / "model")
    return Path(folder) / "model"


def main() -> int:
    """Runs what the command line names; the exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*CLIENTS, "all", "report"])
    parser.add_argument("--quick", action="store_true", help="a short run; the results are printed and not kept")
    parser.add_argument("--environments", type=Path, default=HERE.parents[1] / ".clients", help="where they are kept")
    given = parse_and_check(parser, writes=lambda given: not given.quick and given.what != ["report"])
    names = list(CLIENTS) if "all" in given.what else [name for name in given.what if name != "report"]
    holds, stamp = True, make_stamp(torch.device("cpu"))
    for name in names:
        result = run(CLIENTS[name], given.environments / name, stamp, quick=given.quick)
        text = json.dumps(result, indent=1)
        holds = holds and result["found"]["holds"]
        print(
            text if given.quick else f"{name}: {'holds' if result['found']['holds'] else 'DOES NOT HOLD'}", flush=True
        )
        if not given.quick:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(text + "\n")
    if not given.quick:
        files = {name: RESULTS / f"{name}.json" for name in CLIENTS}
        PAGE.write_text(render({name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
