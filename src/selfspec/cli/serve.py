"""``selfspec serve``: an HTTP server with the interface of OpenAI's API."""

import importlib.util
import json
import os
from collections.abc import Mapping
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selfspec.cli import options
from selfspec.cli import serve_options as given
from selfspec.cli.engine import EngineChoice, with_engine_options
from selfspec.cli.inputs import read_settings
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import EngineFailedError, InvalidParameterError, MissingPackageError

if TYPE_CHECKING:
    from socket import socket

    from selfspec.serve.address import Address
    from selfspec.serve.inputs import RequestLimits
    from selfspec.serve.served_engine import ServedEngine

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_MIB = 2**20
_FAILED = 1
"""The exit status where the engine failed, after which a supervisor should start the server again."""


@with_engine_options
def serve(
    ctx: typer.Context,
    engine: EngineChoice,
    name: given.Name = None,
    state: options.State = None,
    state_seconds: given.StateSeconds = 60.0,
    host: given.Host = "127.0.0.1",
    port: given.Port = 8000,
    api_key: given.ApiKeys = None,
    cors_origin: given.CorsOrigin = None,
    ssl_certfile: given.Certificate = None,
    ssl_keyfile: given.PrivateKey = None,
    max_batch: given.MaxBatch = 16,
    max_waiting: given.MaxWaiting = 256,
    memory_limit: given.MemoryLimit = None,
    prefix_cache: given.PrefixCache = None,
    max_prompt_tokens: given.MaxPromptTokens = None,
    max_new_tokens: given.MaxNewTokens = None,
    default_new_tokens: given.DefaultNewTokens = 1024,
    max_choices: given.MaxChoices = 128,
    max_body: given.MaxBody = 4.0,
    drain_seconds: given.DrainSeconds = 60.0,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI's API and a page to try it at /."""
    _check_packages()
    method_settings = read_settings(engine.method, engine.settings, state)

    from selfspec.serve.address import Address

    keys = _api_keys(api_key)
    address = Address(host, port, ssl_certfile, ssl_keyfile)
    address.check_tls()
    listening = address.listen()  # a port that is in use is said before a model is loaded
    served = _served(engine, ctx.params, method_settings)
    _run(served, name or [Path(engine.model).name or engine.model], address, listening, keys, ctx.params)


def _run(
    engine: "ServedEngine",
    names: list[str],
    address: "Address",
    listening: "socket",
    keys: list[str],
    params: Mapping[str, Any],
) -> None:
    """Answers requests until a signal ends the process, or the engine fails."""
    from selfspec.serve.app import create_app
    from selfspec.serve.logs import set_up_logs
    from selfspec.serve.server import run_server
    from selfspec.serve.service import Service

    silence_libraries()
    set_up_logs()
    _warn_if_open(address, keys)
    service = Service(engine, names, _limits(params))
    try:
        run_server(
            create_app(service, api_keys=keys, cors_origins=params["cors_origin"] or []),
            service,
            address,
            listening,
            drain_seconds=params["drain_seconds"],
            started=lambda: typer.echo(greeting(address.url(listening), names[0], needs_key=bool(keys))),
        )
    except EngineFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_FAILED) from error


def _warn_if_open(address: "Address", keys: list[str]) -> None:
    from selfspec.serve.logs import log

    if not address.is_local and not keys:
        log(
            f"{address.host} can be reached from other machines, and no key is needed: set {given.API_KEY}, or listen "
            "on 127.0.0.1",
            WARNING,
        )


def greeting(url: str, model: str, *, needs_key: bool) -> str:
    """What is printed when the server takes requests: its URL, and a line to try it.

    Args:
        url: of the server.
        model: its name.
        needs_key: whether requests need a key.
    """
    key = f' -H "Authorization: Bearer ${given.API_KEY}"' if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    body = body.replace("'", "'\\''")
    return (
        f"selfspec serves {model} at {url} (Ctrl-C ends it)\n"
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _limits(params: Mapping[str, Any]) -> "RequestLimits":
    from selfspec.serve.inputs import RequestLimits

    return RequestLimits(
        body_bytes=int(params["max_body"] * _MIB),
        prompt_tokens=params["max_prompt_tokens"],
        new_tokens=params["max_new_tokens"],
        default_new_tokens=params["default_new_tokens"],
        choices=params["max_choices"],
    )


def _served(engine: EngineChoice, params: Mapping[str, Any], settings: Mapping[str, str]) -> "ServedEngine":
    from selfspec.serve.served_engine import ServedEngine

    load = partial(
        engine.load,
        settings,
        max_batch=params["max_batch"],
        max_waiting=params["max_waiting"],
        memory_limit=_bytes(params["memory_limit"]),
        prefix_cache=_bytes(params["prefix_cache"]),
    )
    return ServedEngine(load, state=params["state"], state_seconds=params["state_seconds"])


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"`selfspec serve` needs {', '.join(missing)}; run: pip install 'selfspec[serve]'")


def _api_keys(keys_given: list[str] | None) -> list[str]:
    """The keys of the command line and of the environment.

    Raises:
        InvalidParameterError: one is empty or has characters that a header cannot have.
    """
    keys = list(keys_given or ())
    if given.API_KEY in os.environ:
        keys.append(os.environ[given.API_KEY])
    for key in keys:
        if not key or not key.isascii() or any(character.isspace() for character in key):
            raise InvalidParameterError(
                f"a key of --api-key or {given.API_KEY} is empty, or has spaces or characters that are not ASCII; give "
                "a longer one, or unset it"
            )
    return keys
