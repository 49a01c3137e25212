"""``selfspec serve``: an HTTP server with the interface of OpenAI's API."""

import importlib.util
import json
import os
import re
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options
from selfspec.cli.inputs import read_settings
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import EngineFailedError, InvalidParameterError, MissingPackageError

API_KEY = "SELFSPEC_API_KEY"
"""The environment variable with the key that requests need."""

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_FAILED = 1
"""The exit status where the engine failed, after which a supervisor should start the server again."""

_NETWORK, _LIMITS = "Network", "Limits"

Name = Annotated[list[str] | None, typer.Option(help="Name of the model for clients; repeatable. Default: --model's.")]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Methods that requests may name, with commas between them; all are prepared first. Default: those that "
        "need no preparation.",
    ),
]
StateSeconds = Annotated[
    float, typer.Option(min=0.05, help="Seconds between two savings of the state while requests come.")
]

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free port.", rich_help_panel=_NETWORK)]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Key that requests need; repeatable. Visible in the list of processes, so rather set {API_KEY}.",
        rich_help_panel=_NETWORK,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Name by which clients may call the server; repeatable, * allows any. Default: local names where the "
        "server is local and needs no key, otherwise any.",
        rich_help_panel=_NETWORK,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Origin whose pages may call the server; repeatable.", rich_help_panel=_NETWORK),
]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate, for HTTPS.", rich_help_panel=_NETWORK)]
PrivateKey = Annotated[Path | None, typer.Option(help="Private key of the certificate.", rich_help_panel=_NETWORK)]

MaxBatch = Annotated[int, typer.Option(min=1, help="Maximum number of running requests.", rich_help_panel=_LIMITS)]
MaxWaiting = Annotated[
    int, typer.Option(min=1, help="Maximum number of waiting requests; more get status 429.", rich_help_panel=_LIMITS)
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Maximum memory for keys and values, in GiB; requests wait for it. Default: half of what is free.",
        rich_help_panel=_LIMITS,
    ),
]
PrefixCache = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Size of the prefix cache in GiB (part of --memory-limit); 0 disables it. Default: half.",
        rich_help_panel=_LIMITS,
    ),
]
MaxPromptChars = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of characters of a prompt, or of a chat with its tools. Default: 16 for each token of the "
        "context.",
        rich_help_panel=_LIMITS,
    ),
]
MaxPromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of tokens of a prompt.", rich_help_panel=_LIMITS)
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of tokens of a completion.", rich_help_panel=_LIMITS)
]
DefaultNewTokens = Annotated[
    int, typer.Option(min=1, help="max_tokens of a chat request that sets none.", rich_help_panel=_LIMITS)
]
MaxChoices = Annotated[
    int,
    typer.Option(min=1, help="Maximum number of completions per request (prompts × n).", rich_help_panel=_LIMITS),
]
MaxLogprobs = Annotated[
    int,
    typer.Option(
        min=1, help="Maximum number of log-probabilities per request, alternatives included.", rich_help_panel=_LIMITS
    ),
]
MaxConnections = Annotated[
    int,
    typer.Option(min=1, help="Maximum number of connections; those that wait longest go.", rich_help_panel=_LIMITS),
]
IdleSeconds = Annotated[
    float,
    typer.Option(
        min=0.1, help="Seconds for a client to send headers or a body, or to read on.", rich_help_panel=_LIMITS
    ),
]
Readers = Annotated[
    int, typer.Option(min=1, help="Number of processes that parse and encode requests.", rich_help_panel=_LIMITS)
]
ReadSeconds = Annotated[
    float, typer.Option(min=0.1, help="Seconds to parse and encode a request.", rich_help_panel=_LIMITS)
]
RequestSeconds = Annotated[
    float, typer.Option(min=0.1, help="Seconds until an answer has to be complete.", rich_help_panel=_LIMITS)
]
MaxBody = Annotated[
    float, typer.Option(min=0.001, help="Maximum size of a request's body, in MiB.", rich_help_panel=_LIMITS)
]
DrainSeconds = Annotated[
    float, typer.Option(min=0, help="Seconds to let running requests finish after SIGTERM.", rich_help_panel=_LIMITS)
]


@options.with_engine_options
def serve(
    engine: options.EngineChoice,
    name: Name = None,
    methods: Methods = None,
    state: options.State = None,
    state_seconds: StateSeconds = 60.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    ssl_certfile: Certificate = None,
    ssl_keyfile: PrivateKey = None,
    max_batch: MaxBatch = 16,
    max_waiting: MaxWaiting = 256,
    memory_limit: MemoryLimit = None,
    prefix_cache: PrefixCache = None,
    max_prompt_chars: MaxPromptChars = None,
    max_prompt_tokens: MaxPromptTokens = None,
    max_new_tokens: MaxNewTokens = None,
    default_new_tokens: DefaultNewTokens = 1024,
    max_choices: MaxChoices = 128,
    max_logprobs: MaxLogprobs = 2**17,
    max_body: MaxBody = 4.0,
    max_connections: MaxConnections = 1024,
    idle_seconds: IdleSeconds = 20.0,
    readers: Readers = 2,
    read_seconds: ReadSeconds = 20.0,
    request_seconds: RequestSeconds = 3600.0,
    drain_seconds: DrainSeconds = 60.0,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI's API and a page to try it at /."""
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(f"`selfspec serve` needs {', '.join(missing)}; run: pip install 'selfspec[serve]'")
    method_settings = read_settings(engine.method, engine.settings, state)

    from selfspec.serve.address import Address

    keys = _api_keys(api_key)
    address = Address(host, port, ssl_certfile, ssl_keyfile)
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

    limits = RequestLimits(
        body_bytes=int(max_body * 2**20),
        body_seconds=idle_seconds,
        read_seconds=read_seconds,
        request_seconds=request_seconds,
        logprobs=max_logprobs,
        prompt_chars=max_prompt_chars,
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        default_new_tokens=default_new_tokens,
        choices=max_choices,
    )
    load = partial(
        engine.load,
        settings=method_settings,
        max_batch=max_batch,
        max_waiting=max_waiting,
        memory_limit=_bytes(memory_limit),
        prefix_cache=_bytes(prefix_cache),
    )
    names = name or [Path(engine.model).name or engine.model]
    named = None if methods is None else split_methods(methods)
    served = ServedEngine(load, methods=named, state=state, state_seconds=state_seconds)
    service = Service(served, names, limits, ReaderPool(readers, read_seconds))
    silence_libraries()
    set_up_logs()
    if not address.is_local and not keys:
        reachable = f"{host} can be reached from other machines, and no key is needed"
        log(f"{reachable}: set {API_KEY}, or listen on 127.0.0.1", WARNING)
    try:
        run_server(
            create_app(
                service,
                api_keys=keys,
                cors_origins=cors_origin or [],
                hosts=address.allowed_hosts(allowed_host, needs_key=bool(keys)),
            ),
            service,
            address,
            listening,
            drain_seconds=drain_seconds,
            connections=ConnectionLimits(max_connections, seconds=idle_seconds),
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
