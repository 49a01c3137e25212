"""``selfspec serve``: an HTTP server with the interface of OpenAI's API."""

import importlib.util
import json
import os
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli import options
from selfspec.cli.generate import parse_assignments
from selfspec.cli.state import check_state
from selfspec.cli.terminal import silence_libraries
from selfspec.errors import InvalidParameterError, MissingPackageError

if TYPE_CHECKING:
    from selfspec.serve.address import Address
    from selfspec.serve.backend import Backend
    from selfspec.serve.engine_options import EngineOptions, StateFile
    from selfspec.serve.limits import Limits

API_KEY = "SELFSPEC_API_KEY"
"""The environment variable with the key that requests need."""

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_NETWORK, _LIMITS, _MIB = "Network", "Limits", 2**20


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; repeatable. Default: --model's.")
    ] = None,
    state: options.State = None,
    state_seconds: Annotated[
        float, typer.Option(min=0.05, help="How often what was learned is saved while requests come.")
    ] = 60.0,
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    keep_copies: options.KeepCopies = False,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Run the model in this many processes, which are started again if they end. 0 runs it in the server's "
            "process.",
        ),
    ] = 0,
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes any that is free.", rich_help_panel=_NETWORK)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Requests need this key; repeatable. Others see it in the list of processes: better set {API_KEY}.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Pages of this origin may call the server; repeatable.", rich_help_panel=_NETWORK
        ),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for HTTPS.", rich_help_panel=_NETWORK)] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.", rich_help_panel=_NETWORK)] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most requests that run at a time, in each process.", rich_help_panel=_LIMITS)
    ] = 16,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Most requests that wait; more are refused (429).", rich_help_panel=_LIMITS)
    ] = 256,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Most memory for keys and values, in GiB; requests wait for it. Default: half of what is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefix_cache: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Most of it for texts that later prompts may begin with, in GiB; 0 keeps none. Default: half.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt.", rich_help_panel=_LIMITS)
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.", rich_help_panel=_LIMITS)] = None,
    default_new_tokens: Annotated[
        int,
        typer.Option(min=1, help="Longest answer to a chat that sets no max_tokens.", rich_help_panel=_LIMITS),
    ] = 1024,
    max_choices: Annotated[
        int, typer.Option(min=1, help="Most prompts times n of a request.", rich_help_panel=_LIMITS)
    ] = 128,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="Largest body of a request, in MiB.", rich_help_panel=_LIMITS)
    ] = 4.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Most time for running answers after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 60.0,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI's API and a page to try it at /."""
    _check_packages()
    method_settings = parse_assignments(settings or ())
    if state is not None:
        check_state(method, state)

    from selfspec.serve.address import Address
    from selfspec.serve.engine_options import EngineOptions, StateFile
    from selfspec.serve.limits import Limits

    keys = _api_keys(api_key)
    address = Address(host, port, ssl_certfile, ssl_keyfile)
    address.check_tls()
    limits = Limits(
        body_bytes=int(max_body * _MIB),
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        default_new_tokens=default_new_tokens,
        choices=max_choices,
        waiting=max_waiting,
    )
    engine = EngineOptions(
        model,
        method,
        method_settings,
        dtype,
        device,
        weights,
        runtime,
        keep_copies,
        max_batch,
        max_waiting,
        _bytes(memory_limit),
        _bytes(prefix_cache),
    )
    backend = _backend(engine, workers, None if state is None else StateFile(state, state_seconds))
    names = name or [Path(model).name or model]
    _run(backend, names, limits, address, keys, cors_origin or [], drain_seconds)


def _run(
    backend: "Backend",
    names: list[str],
    limits: "Limits",
    address: "Address",
    keys: list[str],
    origins: list[str],
    drain_seconds: float,
) -> None:
    from selfspec.serve.app import AppOptions, create_app
    from selfspec.serve.logs import log, set_up_logs
    from selfspec.serve.server import serve as run_server
    from selfspec.serve.service import Service

    listening = address.listen()  # a port that is in use is said before a model is loaded
    silence_libraries()
    set_up_logs()
    if not address.is_local and not keys:
        log(
            f"{address.host} can be reached from other machines, and no key is needed: set {API_KEY}, or listen on "
            "127.0.0.1",
            WARNING,
        )
    service = Service(backend, names, limits)
    app = create_app(service, AppOptions(keys, origins))
    run_server(
        app,
        service,
        address,
        listening,
        drain_seconds=drain_seconds,
        started=lambda: typer.echo(greeting(address.url(listening), names[0], needs_key=bool(keys))),
    )


def greeting(url: str, model: str, *, needs_key: bool) -> str:
    """What is printed when the server takes requests: its URL, and a line to try it.

    Args:
        url: of the server.
        model: its name.
        needs_key: whether requests need a key.
    """
    key = f' -H "Authorization: Bearer ${API_KEY}"' if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    body = body.replace("'", "'\\''")
    return (
        f"selfspec serves {model} at {url} (Ctrl-C ends it)\n"
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _backend(engine: "EngineOptions", workers: int, state: "StateFile | None") -> "Backend":
    if workers:
        from selfspec.serve.pool import WorkerPool

        return WorkerPool(engine, workers, state=state)
    from selfspec.serve.local import LocalBackend

    return LocalBackend(engine, state=state)


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"`selfspec serve` needs {', '.join(missing)}; run: pip install 'selfspec[serve]'")


def _api_keys(given: list[str] | None) -> list[str]:
    """The keys of the command line and of the environment.

    Raises:
        InvalidParameterError: one is empty or has characters that a header cannot have.
    """
    keys = list(given or ())
    if API_KEY in os.environ:
        keys.append(os.environ[API_KEY])
    for key in keys:
        if not key or not key.isascii() or any(character.isspace() for character in key):
            raise InvalidParameterError(
                f"a key of --api-key or {API_KEY} is empty, or has spaces or characters that are not ASCII; give a "
                "longer one, or unset it"
            )
    return keys
