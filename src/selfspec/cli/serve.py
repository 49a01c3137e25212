"""``selfspec serve``: an HTTP server with the interface of OpenAI's API."""

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options
from selfspec.cli.inputs import read_settings
from selfspec.cli.options import Choice, option
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import EngineFailedError, InvalidParameterError, MissingPackageError

API_KEY = "SELFSPEC_API_KEY"
"""The environment variable with the key that requests need."""

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_FAILED = 1
"""The exit status where the engine failed, after which a supervisor should start the server again."""


@dataclass(frozen=True)
class NetworkChoice(Choice):
    """Where the server listens, and who may call it."""

    panel = "Network"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes any free port.", min=0, max=65535)
    api_key: list[str] | None = option(
        None, f"Key that requests need; repeatable. Visible in the list of processes, so rather set {API_KEY}."
    )
    allowed_host: list[str] | None = option(
        None,
        "Name by which clients may call the server; repeatable, * allows any. Default: local names where the server "
        "is local and needs no key, otherwise any.",
        metavar="NAME",
    )
    cors_origin: list[str] | None = option(None, "Origin whose pages may call the server; repeatable.", metavar="URL")
    ssl_certfile: Path | None = option(None, "TLS certificate, for HTTPS.")
    ssl_keyfile: Path | None = option(None, "Private key of the certificate.")


@dataclass(frozen=True)
class LimitChoice(Choice):
    """How much the server takes on."""

    panel = "Limits"

    max_batch: int = option(16, "Maximum number of running requests.", min=1)
    max_waiting: int = option(256, "Maximum number of waiting requests; more get status 429.", min=1)
    memory_limit: float | None = option(
        None,
        "Maximum memory for keys and values, in GiB; requests wait for it. Default: half of what is free.",
        min=0.001,
    )
    prefix_cache: float | None = option(
        None, "Size of the prefix cache in GiB (part of --memory-limit); 0 disables it. Default: half.", min=0
    )
    max_prompt_chars: int | None = option(
        None,
        "Maximum number of characters of a prompt, or of a chat with its tools. Default: 16 for each token of the "
        "context.",
        min=1,
    )
    max_prompt_tokens: int | None = option(None, "Maximum number of tokens of a prompt.", min=1)
    max_new_tokens: int | None = option(None, "Maximum number of tokens of a completion.", min=1)
    default_new_tokens: int = option(1024, "max_tokens of a chat request that sets none.", min=1)
    max_choices: int = option(128, "Maximum number of completions per request (prompts × n).", min=1)
    max_logprobs: int = option(2**17, "Maximum number of log-probabilities per request, alternatives included.", min=1)
    max_body: float = option(4.0, "Maximum size of a request's body, in MiB.", min=0.001)
    max_connections: int = option(1024, "Maximum number of connections; those that wait longest go.", min=1)
    idle_seconds: float = option(20.0, "Seconds for a client to send headers or a body, or to read on.", min=0.1)
    readers: int = option(2, "Number of processes that parse and encode requests.", min=1)
    read_seconds: float = option(20.0, "Seconds to parse and encode a request.", min=0.1)
    request_seconds: float = option(3600.0, "Seconds until an answer has to be complete.", min=0.1)
    drain_seconds: float = option(60.0, "Seconds to let running requests finish after SIGTERM.", min=0)


@options.with_engine_options
def serve(
    engine: options.EngineChoice,
    network: NetworkChoice,
    limits: LimitChoice,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; repeatable. Default: --model's.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods that requests may name, with commas between them; all are prepared first. Default: those "
            "that need no preparation.",
        ),
    ] = None,
    state: options.State = None,
    state_seconds: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two savings of the state while requests come.")
    ] = 60.0,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI's API and a page to try it at /."""
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(f"`selfspec serve` needs {', '.join(missing)}; run: pip install 'selfspec[serve]'")
    method_settings = read_settings(engine.method, engine.settings, state)

    from selfspec.serve.address import Address

    keys = _api_keys(network.api_key)
    address = Address(network.host, network.port, network.ssl_certfile, network.ssl_keyfile)
    address.check_tls()
    listening = address.listen()  # a port that is in use is said before a model is loaded

    from selfspec.serve.app import create_app
    from selfspec.serve.connection import ConnectionLimits
    from selfspec.serve.encoding import RequestLimits
    from selfspec.serve.logs import log, set_up_logs
    from selfspec.serve.pool import ReaderPool
    from selfspec.serve.served_engine import ServedEngine
    from selfspec.serve.server import run_server
    from selfspec.serve.service import Service

    requests = RequestLimits(
        body_bytes=int(limits.max_body * 2**20),
        body_seconds=limits.idle_seconds,
        read_seconds=limits.read_seconds,
        request_seconds=limits.request_seconds,
        logprobs=limits.max_logprobs,
        prompt_chars=limits.max_prompt_chars,
        prompt_tokens=limits.max_prompt_tokens,
        new_tokens=limits.max_new_tokens,
        default_new_tokens=limits.default_new_tokens,
        choices=limits.max_choices,
    )
    load = partial(
        engine.load,
        settings=method_settings,
        max_batch=limits.max_batch,
        max_waiting=limits.max_waiting,
        memory_limit=_bytes(limits.memory_limit),
        prefix_cache=_bytes(limits.prefix_cache),
    )
    names = name or [Path(engine.model).name or engine.model]
    named = None if methods is None else split_methods(methods)
    served = ServedEngine(load, methods=named, state=state, state_seconds=state_seconds)
    service = Service(served, names, requests, ReaderPool(limits.readers, limits.read_seconds))
    silence_libraries()
    set_up_logs()
    if not address.is_local and not keys:
        reachable = f"{network.host} can be reached from other machines, and no key is needed"
        log(f"{reachable}: set {API_KEY}, or listen on 127.0.0.1", WARNING)
    try:
        run_server(
            create_app(
                service,
                api_keys=keys,
                cors_origins=network.cors_origin or [],
                hosts=address.allowed_hosts(network.allowed_host, needs_key=bool(keys)),
            ),
            service,
            address,
            listening,
            drain_seconds=limits.drain_seconds,
            connections=ConnectionLimits(limits.max_connections, seconds=limits.idle_seconds),
            started=lambda: typer.echo(greeting(address.url(listening), names[0], needs_key=bool(keys))),
        )
    except EngineFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_FAILED) from error


def greeting(url: str, model: str, *, needs_key: bool) -> str:
    """What is printed when the server takes requests: its URL, and a line to try it."""
    key = f' -H "Authorization: Bearer ${API_KEY}"' if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    body = body.replace("'", "'\\''")
    return (
        f"selfspec serves {model} at {url} (Ctrl-C ends it)\n"
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def split_methods(text: str) -> list[str]:
    """The names of a list with commas, where those in the parentheses of a cascade separate its stages."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _api_keys(given: list[str] | None) -> list[str]:
    """The keys of the command line and of the environment; none may be empty, or not fit into a header."""
    keys = list(given or ())
    if API_KEY in os.environ:
        keys.append(os.environ[API_KEY])
    for key in keys:
        if not key or not key.isascii() or any(character.isspace() for character in key):
            raise InvalidParameterError(
                f"a key of --api-key or {API_KEY} is empty, or has spaces or characters that are not ASCII; give "
                "a longer one, or unset it"
            )
    return keys
