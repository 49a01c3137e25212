"""``selfspec serve``: an HTTP server with the interface of OpenAI's API."""

import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.choices import Choice, option
from selfspec.cli import collection, options
from selfspec.cli.inputs import read_settings
from selfspec.cli.terminal import own_warnings, silence_libraries
from selfspec.errors import EngineFailedError, InvalidParameterError, MissingPackageError
from selfspec.serve.capacity import Limits
from selfspec.serve.keys import API_KEY, api_keys
from selfspec.serve.waits import brief_waits

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.serve.address import Address
    from selfspec.serve.serving import ServeOptions

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_FAILED = 1
"""The exit status where the engine failed, after which a supervisor should start the server again."""

_STATE_SECONDS = 60.0


@dataclass(frozen=True)
class NetworkChoice(Choice):
    """Where the server listens, and who may call it."""

    panel = "Network"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes any free port.", min=0, max=65535)
    max_connections: int = option(1024, "Maximum number of connections; those that wait longest go.", min=1)
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
class RayChoice(Choice):
    """Whether Ray Serve runs the application, in how many processes, and where."""

    panel = "Ray Serve"

    ray: bool = option(False, "Run replicas with Ray Serve, each a process with a model of its own.", "--ray")
    replicas: int | None = option(None, "Number of replicas; the processors are shared out. Default: 1.", min=1)
    ray_address: str | None = option(
        None, "A cluster that runs. Default: RAY_ADDRESS, or a Ray of its own on this machine.", metavar="HOST:PORT"
    )


@options.with_engine_options
def serve(
    engine: options.EngineChoice,
    adapters: options.AdapterChoice,
    network: NetworkChoice,
    limits: Limits,
    cluster: RayChoice,
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
    ] = _STATE_SECONDS,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI's API and a page to try it at /.

    An adapter is a model for clients: a request names it as its model.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(f"`selfspec serve` needs {', '.join(missing)}; run: pip install 'selfspec[serve]'")
    if state is None and state_seconds != _STATE_SECONDS:
        raise InvalidParameterError("--state-seconds needs --state; give it, or leave this out")
    method_settings = read_settings(engine.method, engine.settings, state)

    from selfspec.serve.address import Address

    address = Address(network.host, network.port, network.ssl_certfile, network.ssl_keyfile)
    address.check_tls()
    served = {
        **asdict(engine),
        **asdict(limits),
        **{key: getattr(network, key) for key in ("api_key", "allowed_host", "cors_origin")},
        "settings": method_settings,
        "adapter": adapters.adapter,
        "name": name,
        "methods": methods,
    }
    try:
        if cluster.ray:
            _check_for_ray(state, network)
            _serve_with_ray(served, address, cluster)
        else:
            _check_without_ray(cluster)
            _serve_here(engine, served, address, network.max_connections, (state, state_seconds))
    except EngineFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_FAILED) from error


def _serve_here(
    engine: options.EngineChoice,
    served: dict[str, Any],
    address: "Address",
    connections: int,
    state: tuple[Path | None, float],
) -> None:
    """Serves in this process; ``state`` is the file of the state, and the seconds between two savings."""
    listening = address.listen()  # a port that is in use is said before a model is loaded
    os.environ.update(brief_waits())
    engine.begin()

    from selfspec.serve.connection import ConnectionLimits
    from selfspec.serve.server import run_server
    from selfspec.serve.serving import ServeOptions, check_options

    given = check_options(served, ServeOptions)

    def load() -> "Engine":
        try:
            with own_warnings():
                return given.load()
        finally:
            collection.resume()

    keys = _prepare(given, address)
    service = given.service(load, state=state[0], state_seconds=state[1])
    run_server(
        given.app(service, keys, address),
        service,
        address,
        listening,
        drain_seconds=given.drain_seconds,
        connections=ConnectionLimits(connections, seconds=given.idle_seconds),
        started=lambda: _greet(address.url(listening), given),
    )


def _serve_with_ray(served: dict[str, Any], address: "Address", cluster: RayChoice) -> None:
    """Serves with replicas of Ray Serve."""
    from selfspec.serve.ray import check_ray_options
    from selfspec.serve.ray_server import run_with_ray

    given = check_ray_options({**served, "replicas": cluster.replicas or 1})
    _prepare(given, address)
    collection.resume()
    run_with_ray(given, address, ray_address=cluster.ray_address, started=lambda url: _greet(url, given))


def _prepare(given: "ServeOptions", address: "Address") -> list[str]:
    """Sets up the log, in which it says so where everybody may use the model who reaches the port; the keys."""
    from selfspec.serve.logs import log, set_up_logs

    keys = api_keys(given.api_key)
    silence_libraries()
    set_up_logs()
    if not address.is_local and not keys:
        reachable = f"{address.host} can be reached from other machines, and no key is needed"
        log(f"{reachable}: set {API_KEY}, or listen on 127.0.0.1", WARNING)
    return keys


def _greet(url: str, given: "ServeOptions") -> None:
    typer.echo(greeting(url, given.names[0], needs_key=bool(api_keys(given.api_key))))


def _check_for_ray(state: Path | None, network: NetworkChoice) -> None:
    """Refuses options that a replica does not have."""
    if state is not None:
        raise InvalidParameterError("--state is not for --ray: every replica would write the same file; leave it out")
    if network.max_connections != NetworkChoice().max_connections:
        raise InvalidParameterError(
            "--max-connections is not for --ray, whose proxies accept connections; leave it out"
        )


def _check_without_ray(cluster: RayChoice) -> None:
    """Refuses options that only Ray has."""
    for name in ("replicas", "ray_address"):
        if getattr(cluster, name) is not None:
            raise InvalidParameterError(f"--{name.replace('_', '-')} needs --ray; give it, or leave this out")


def greeting(url: str, model: str, *, needs_key: bool) -> str:
    """What is printed when the server takes requests: its URL, and a line to try it."""
    key = f' -H "Authorization: Bearer ${API_KEY}"' if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    body = body.replace("'", "'\\''")
    return (
        f"selfspec serves {model} at {url} (Ctrl-C ends it)\n"
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
