"""The application as a deployment of Ray Serve: ``serve run selfspec.serve.ray:app model=smollm2``.

Needs the extra ``ray``. Ray starts replicas, spreads requests over them, replaces those that fail, and ends them.
"""

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from selfspec.errors import InvalidParameterError, MissingPackageError
from selfspec.memory import available_bytes
from selfspec.serve.address import Address
from selfspec.serve.keys import api_keys
from selfspec.serve.logs import set_up_logs
from selfspec.serve.server import settle_process
from selfspec.serve.serving import ServeOptions, check_options
from selfspec.serve.waits import brief_waits

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from ray.serve import Application

APP = "selfspec"
"""Name of the application, and of its deployment, which a configuration file may change."""

HEALTH_SECONDS = 2.0
"""Between two looks at whether an engine failed; Ray replaces a replica after three."""

_LOOK_SECONDS = 0.5
"""Between two looks at whether a replica that is to end has answered its last request."""

METRICS_SECONDS = 5.0
"""Between two updates of Ray's metrics."""

_FREE_SHARE = 0.5
"""Of free memory, for keys and values of all replicas of a machine."""

_NOT_HERE = {
    "host": "http_options.host of a configuration file",
    "port": "http_options.port of a configuration file",
    "ssl_certfile": "http_options.ssl_certfile of a configuration file",
    "ssl_keyfile": "http_options.ssl_keyfile of a configuration file",
    "max_connections": "the proxies of Ray Serve, which accept connections",
    "state": "nothing: every replica would write the same file",
    "state_seconds": "nothing: every replica would write the same file",
}
"""Options of ``selfspec serve`` that replicas do not have, and what does the same."""


@dataclass(frozen=True)
class RayOptions(ServeOptions):
    """The options of a deployment: those of ``selfspec serve``, how many replicas, and the processors of each."""

    replicas: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[float, Field(gt=0)] = 1.0


def check_ray_options(given: Mapping[str, Any]) -> RayOptions:
    """The options of a mapping; raises ``InvalidParameterError`` for one that is unknown, wrong, or not for Ray."""
    for name in given:
        if name in _NOT_HERE:
            raise InvalidParameterError(f"'{name}' is not for Ray Serve, where it is the work of {_NOT_HERE[name]}")
    return check_options(given, RayOptions)


def require_ray() -> None:
    """Raises ``MissingPackageError`` if Ray Serve is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "starlette", "aiohttp")):
        raise MissingPackageError("Ray Serve is not installed; run: pip install 'selfspec[ray]'")


def app(args: dict[str, Any]) -> "Application":
    """Builds the application; a deployment configuration may change replicas, autoscaling, routing and resources.

    Args:
        args: the options of ``selfspec serve`` by name, ``_`` for ``-``, with ``replicas`` and ``cpus`` of a replica.

    Raises:
        MissingPackageError: Ray Serve is not installed.
        InvalidParameterError: an option is unknown, wrong, or not for Ray.
    """
    return deploy(check_ray_options(args))


def deploy(options: RayOptions) -> "Application":
    """The application with these options; requests beyond ``max_batch`` for each replica wait in Ray's proxies."""
    require_ray()
    from ray import serve

    keys = api_keys(options.api_key)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=APP,
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_batch,
        max_queued_requests=options.max_waiting,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={"num_cpus": options.cpus, "runtime_env": {"env_vars": brief_waits()}},
    )
    built: Application = deployment.bind(options, keys)
    return built


class Replica:
    """The application in a process that Ray starts, which takes requests once its model is loaded."""

    def __init__(self, options: RayOptions, keys: Sequence[str]) -> None:
        if options.memory_limit is None:
            options = replace(options, memory_limit=_memory_limit())
        self._options, self._keys = options, list(keys)
        self._service = options.service()
        self._mirror: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:  # a name of Ray Serve's
        """Loads the model, and makes the application of this process; raises what makes that impossible."""
        set_up_logs()
        await self._service.start()
        if self._service.failure is not None:
            raise self._service.failure
        settle_process()
        self._mirror = asyncio.create_task(_show_metrics(self._service.metrics.registry))
        return self._options.app(self._service, self._keys, Address())

    async def check_health(self) -> None:
        """Raises an error if the engine failed, for which Ray replaces this replica."""
        self._service.check_health()


def _memory_limit() -> float | None:
    """GiB for keys and values: half of what is free, by this replica's share of the machine's processors.

    ``None``, which is half of what is free, where the replica has an accelerator, or free memory is unknown.
    """
    import ray

    context = ray.get_runtime_context()
    assigned, free = context.get_assigned_resources(), available_bytes()
    if free is None or assigned.get("GPU"):
        return None
    node = next(each for each in ray.nodes() if each["NodeID"] == context.get_node_id())
    share = min(1.0, assigned.get("CPU", 0.0) / node["Resources"].get("CPU", 1.0)) or 1.0
    return max(0.001, _FREE_SHARE * share * free / 2**30)


async def _show_metrics(registry: "CollectorRegistry") -> None:
    """Shows the metrics of this replica among those of Ray, by their names and labels with ``_`` for ``:``.

    Each sample, also of a counter or a histogram, is a gauge of Ray's: it has no other way to set a value.
    """
    from ray.serve.metrics import Gauge

    gauges: dict[str, Gauge] = {}
    while True:
        for metric in registry.collect():
            for sample in metric.samples:
                name = sample.name.replace(":", "_")
                if name not in gauges:
                    gauges[name] = Gauge(name, metric.documentation, tuple(sample.labels))
                gauges[name].set(sample.value, dict(sample.labels))
        await asyncio.sleep(METRICS_SECONDS)
