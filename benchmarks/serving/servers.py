"""Servers to measure: started for it, one at a time, and ended after it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from selfspec.loading import load_model
from serving.gguf_file import write_bfloat16
from serving.http import Server, get_json
from serving.processors import on_processors

START_SECONDS = 180
"""Most time for a server to load its model."""

HOST = "127.0.0.1"

_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""The environment of servers, where it says nothing else: vLLM takes OMP_NUM_THREADS threads, as all do, and 1 GiB."""


@dataclass(frozen=True)
class Files:
    """A model in the forms that servers read.

    Attributes:
        model: what selfspec reads: the folder, or the GGUF file.
        folder: as transformers saves it, in bfloat16; ``None`` where a GGUF file is served as it is.
        gguf: a GGUF file with the same numbers and the tokenizer; ``None`` without one.
    """

    model: str
    folder: Path | None = None
    gguf: Path | None = None

    @property
    def name(self) -> str:
        """Of the model in requests."""
        return Path(self.model).name


@dataclass(frozen=True)
class Started:
    """A server that takes requests.

    Attributes:
        server: where it listens.
        process: its own process; others may be its children.
        log: what it has written to stdout and stderr.
    """

    server: Server
    process: subprocess.Popen[bytes]
    log: Path


def command_of(kind: str, files: Files, port: int) -> list[str]:
    """The command that starts a server; it serves the model as ``files.name``.

    Args:
        kind: ``selfspec:METHOD``, ``selfspec-ray:METHOD`` (one replica of Ray Serve), ``selfspec-ray-2:METHOD`` (two),
            ``transformers``, ``transformers-cb`` (with continuous batching), ``llama.cpp``, ``vllm``, or
            ``vllm-eager`` (without compiling).
        files: of the model.
        port: where to listen.

    Raises:
        ValueError: the kind is unknown, or needs a file that is not given.
        FileNotFoundError: the program is not installed.
    """
    name, _, method = kind.partition(":")
    options = ["--host", HOST, "--port", str(port)]
    if name in ("selfspec", "selfspec-ray", "selfspec-ray-2"):
        served = ["--model", files.model, "--method", method or "auto"]
        if "ray" in name:
            served += ["--ray", "--replicas", "2" if name.endswith("2") else "1"]
        return [sys.executable, "-m", "selfspec", "serve", *served, *options]
    if name == "llama.cpp":
        if files.gguf is None:
            raise ValueError("llama.cpp needs --gguf FILE, a GGUF file of the model")
        threads = os.environ.get("OMP_NUM_THREADS", "2")
        slots = ["--parallel", "16", "--ctx-size", str(16 * 2048), "--threads", threads, "--threads-batch", threads]
        return [_program("llama-server"), "--model", str(files.gguf), "--alias", files.name, *slots, *options]
    if name not in ("transformers", "transformers-cb", "vllm", "vllm-eager"):
        raise ValueError(f"there is no server '{kind}'; choose selfspec:METHOD, transformers, llama.cpp or vllm")
    if files.folder is None:
        raise ValueError(f"{kind} serves no GGUF file; measure it with the name of a model")
    if name.startswith("transformers"):
        batching = ["--continuous-batching"] if name.endswith("-cb") else []
        served = [str(files.folder), "--device", "cpu", "--dtype", "bfloat16"]
        return [_program("transformers"), "serve", *served, *batching, *options]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "16", "--served-model-name", files.name]
    eager = ["--enforce-eager"] if name.endswith("-eager") else []
    return [_program("vllm"), "serve", str(files.folder), "--dtype", "bfloat16", *limits, *eager, *options]


def served_name(kind: str, files: Files) -> str:
    """The name that requests give the model; transformers knows it as a folder."""
    return str(files.folder) if kind.startswith("transformers") else files.name


@contextmanager
def running(
    command: list[str], model: str, port: int, folder: Path, processors: tuple[int, ...] | None = None
) -> Iterator[Started]:
    """Starts a server, waits until it takes requests, and ends it after the block.

    Args:
        command: from ``command_of``; its processes are a group of their own.
        model: name of the model in requests.
        port: where it will listen.
        folder: for its log.
        processors: which it runs on; ``None`` for any.

    Raises:
        RuntimeError: it ended, or is not ready in time.
    """
    log = folder / f"server-{port}.log"
    with log.open("wb") as output, on_processors(processors):
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**_SETTINGS, **os.environ}
        )
    started = Started(Server(HOST, port, model), process, log)
    try:
        _wait_until_ready(started)
        yield started
    finally:
        _end(process)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def processes_of(process_id: int) -> list[int]:
    """A process and all that descend from it (Linux)."""
    found = [process_id]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


@contextmanager
def saved(model: str, gguf: Path | None = None) -> Iterator[Files]:
    """The files of a model, in a temporary folder. All servers compute with the same numbers.

    Args:
        model: a GGUF file, which is served as it is; or a name that selfspec knows, for its weights in bfloat16.
        gguf: of the named model a GGUF file of any type, for llama.cpp; ``None`` if that is not measured.
    """
    if model.endswith(".gguf"):
        yield Files(model, gguf=Path(model))
        return
    with tempfile.TemporaryDirectory(prefix="selfspec-serving-") as parent:
        folder = Path(parent) / model
        loaded, tokenizer = load_model(model, dtype="bfloat16", device="cpu", unpack=True)
        loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if gguf is not None:
            write_bfloat16(gguf, folder.with_suffix(".gguf"))
        yield Files(str(folder), folder, None if gguf is None else folder.with_suffix(".gguf"))


def _program(name: str) -> str:
    found = os.environ.get(name.upper().replace("-", "_")) or shutil.which(name)
    if found is None:
        variable = name.upper().replace("-", "_")
        raise FileNotFoundError(f"{name} is not installed; put it on PATH, or its path into {variable}")
    return found


def _wait_until_ready(started: Started) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if started.process.poll() is not None:
            break
        try:
            status, _ = asyncio.run(get_json(started.server, "/health"))
            if status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    tail = started.log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"the server did not start within {START_SECONDS} seconds; it wrote:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what is left of its processes
    process.wait()
