"""``selfspec serve --ray``: deploys the application, waits for a signal, and takes it down."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from typing import Any

from selfspec.errors import InvalidParameterError, ServeError, first_line
from selfspec.loading import resolve_name
from selfspec.serve.address import Address
from selfspec.serve.logs import log
from selfspec.serve.ray import APP, RayOptions, deploy, require_ray

OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray that is started here: requests and answers do not pass through its store."""

_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_CLOSING_SECONDS = 15.0
"""For Ray to end a replica that has answered its last request."""

_MOST_SHARING = 64
"""Replicas that may share a processor."""


def run_with_ray(
    options: RayOptions, address: Address, *, ray_address: str | None = None, started: Callable[[str], None]
) -> None:
    """Deploys an application and lets it answer until a signal; calls ``started`` with its URL when it takes requests.

    Without ``ray_address``, and without ``RAY_ADDRESS`` in the environment, a Ray of this machine is started and ended
    here. ``cpus`` of the options are then what the processors allow; an address leaves them to the cluster's.

    Raises:
        MissingPackageError: Ray Serve is not installed.
        ModelLoadError: there is no such model on this machine.
        ServeError: no Ray runs at the address, the port is in use, or no replica can be started.
    """
    require_ray()
    ray_address = ray_address or os.environ.get("RAY_ADDRESS") or None
    address, url = _reserve(address, ours=ray_address is None)
    if ray_address is None:
        resolve_name(options.model)  # else the machines of a cluster know
    with _ray(ray_address), _signals() as stopped:  # Ray sets a signal's handler too
        from ray import serve

        if ray_address is not None:
            _check_free(serve.status())
        serve.start(http_options=_http_options(address))
        options = replace(options, cpus=cpus_of_replicas(_processors(), options.replicas))
        try:
            serve.run_many([serve.RunTarget(deploy(options), APP, "/")], wait_for_applications_running=False)
            if _wait_until_running(stopped):
                started(url)
                stopped.wait()
                log("draining")
        finally:
            _delete(options.drain_seconds)
    log("ended")


def cpus_of_replicas(nodes: Sequence[float], replicas: int) -> float:
    """The most processors that each of some replicas can have, whole ones or the ``n``-th part of one.

    Args:
        nodes: number of processors of each machine.
        replicas: to be placed, each on one machine.

    Raises:
        InvalidParameterError: there are too many replicas.
    """
    whole = (float(count) for count in range(int(max(nodes, default=0)), 0, -1))
    shares = (*whole, *(1 / count for count in range(2, _MOST_SHARING + 1)))
    for share in shares:
        if sum(int(node / share + 1e-9) for node in nodes) >= replicas:
            return share
    raise InvalidParameterError(
        f"{replicas} replicas are too many for {sum(nodes):g} processors, of which {_MOST_SHARING} may share each; "
        "give fewer --replicas"
    )


def _processors() -> list[float]:
    """The number of processors of each machine of the cluster."""
    import ray

    return [float(node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["Alive"]]


def _reserve(address: Address, *, ours: bool) -> tuple[Address, str]:
    """The address with its port, and its URL; raises ``ServeError`` if the port of a Ray of ours is in use."""
    if ours:
        with address.listen() as listening:
            port = listening.getsockname()[1]
            return Address(address.host, port, address.certfile, address.keyfile), address.url(listening)
    if address.port == 0:
        raise ServeError("--port 0 is for one machine: all machines of a cluster listen on the same --port; give one")
    return address, f"{'http' if address.certfile is None else 'https'}://{address.host}:{address.port}"


def _http_options(address: Address) -> dict[str, Any]:
    files = (address.certfile, address.keyfile)
    named = {"ssl_certfile": files[0] and str(files[0]), "ssl_keyfile": files[1] and str(files[1])}
    return {"host": address.host, "port": address.port, **{name: file for name, file in named.items() if file}}


@contextmanager
def _ray(ray_address: str | None) -> Iterator[None]:
    """A connection to a cluster, or a Ray of this machine, which ends with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    try:
        if ray_address is None:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, namespace="serve")
        else:
            _check_reachable(ray_address)
            ray.init(ray_address, namespace="serve")
    except Exception as error:  # Ray's own are of this class
        if ray_address is None:
            raise ServeError(f"Ray does not start on this machine: {first_line(error)}") from error
        raise ServeError(
            f"no Ray answers at '{ray_address}': {first_line(error)}; start one with `ray start --head`, or leave out "
            "--ray-address and RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        if ray_address is None:
            serve.shutdown()
        ray.shutdown()


def _check_reachable(ray_address: str) -> None:
    """Raises an ``OSError`` if nothing listens at ``HOST:PORT``, for which Ray itself would wait ten minutes."""
    host, _, port = ray_address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def _check_free(status: Any) -> None:
    """Raises ``ServeError`` if the cluster has an application of this name, which would be replaced."""
    if APP in status.applications:
        raise ServeError(f"an application '{APP}' runs there already; end it first: `serve shutdown`, or by its file")
    if status.proxies:
        log("Ray Serve runs already, so --host, --port and the certificate are those it was started with", WARNING)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second one ends the process at once."""
    stopped = threading.Event()

    def stop(number: int, _: object) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    former = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait_until_running(stopped: threading.Event) -> bool:
    """Whether the application takes requests; a signal while models are loaded says no.

    Raises ``ServeError`` if no replica can be started.
    """
    from ray import serve

    while not stopped.wait(_POLL_SECONDS):
        status = serve.status().applications.get(APP)
        if status is None:
            continue
        if status.status == "RUNNING":
            return True
        if status.status == "DEPLOY_FAILED":
            raise ServeError(f"Ray cannot start a replica: {_cause(status)}")
    return False


def _cause(status: Any) -> str:
    """The error of a replica, in a line."""
    texts = [status.message, *(each.message for each in status.deployments.values())]
    found = re.findall(r"^selfspec\.errors\.\w+: (.+)$", "\n".join(texts), re.MULTILINE)
    return found[-1] if found else " ".join(status.message.split())


def _delete(seconds: float) -> None:
    """Takes the application down, after its last answers, or ``seconds`` later."""
    from ray import serve

    until = time.monotonic() + seconds + _CLOSING_SECONDS
    serve.delete(APP, _blocking=False)
    while APP in serve.status().applications and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
