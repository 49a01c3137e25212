"""The hub where there is no network: what was downloaded before is loaded at once."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, is_offline_mode

from selfspec.errors import first_line

SECONDS = 5.0
"""How long a connection to the hub is waited for."""

_PORTS = {"http": 80, "https": 443}


@contextlib.contextmanager
def reaching_hub() -> Iterator[None]:
    """Within, the hub's client asks for nothing if the hub cannot be reached, and takes what was downloaded before.

    Else the client waits half a minute for each file that is not here, and of every model some are looked for that it
    does not have. Behind a proxy it is left to find out by itself.
    """
    if is_offline_mode() or _has_proxy(constants.ENDPOINT) or _is_reachable(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def hub_reason(error: Exception) -> str:
    """Why the hub's client failed, in a line that says so if there is no network."""
    offline = f"{constants.ENDPOINT} cannot be reached, or HF_HUB_OFFLINE is set"
    return offline if is_offline_mode() else first_line(error)


def _has_proxy(address: str) -> bool:
    """Whether a proxy makes the connections to an address."""
    return not getproxies().keys().isdisjoint((urlsplit(address).scheme, "all"))


def _is_reachable(address: str) -> bool:
    """Whether a connection can be made within ``SECONDS``; looking up a name has no deadline of its own."""
    parts, done = urlsplit(address), threading.Event()
    where = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)

    def connect() -> None:
        """Says whether it could connect, once that is known."""
        with contextlib.suppress(OSError), socket.create_connection(where, timeout=SECONDS):
            reached.append(True)
        done.set()

    reached: list[bool] = []
    threading.Thread(target=connect, daemon=True).start()
    done.wait(SECONDS)
    return bool(reached)
