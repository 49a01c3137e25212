"""Where a server listens: the socket, opened before any model is loaded, and the files of TLS."""

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.errors import ServeError

BACKLOG = 1536
"""Connections that wait to be accepted; all of them are accepted at once, for which everybody waits (some 50 us each).

A connection for which there is no place is tried again a second later.
"""


@dataclass(frozen=True)
class Address:
    """Where to listen: port 0 takes any that is free; without ``certfile`` it is plain HTTP.

    ``keyfile`` is the certificate's private key, if that is not in ``certfile``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certfile: Path | None = None
    keyfile: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def allowed_hosts(self, given: Sequence[str] | None, *, needs_key: bool) -> list[str] | None:
        """The names by which clients may call the server; ``None`` for any.

        A server of this machine alone, without a key, is called by names of this machine: others are those of pages
        whose names were made to lead here.
        """
        if given is None and (needs_key or not self.is_local):
            return None
        names = [*(given or ()), "localhost", "127.0.0.1", "::1", self.host]
        return None if "*" in names else names

    def check_tls(self) -> None:
        """Raises ``ServeError`` if a file is missing, or certificate and key do not belong together."""
        if self.certfile is None:
            if self.keyfile is not None:
                raise ServeError("--ssl-keyfile needs --ssl-certfile; give both")
            return
        for option, path in (("--ssl-certfile", self.certfile), ("--ssl-keyfile", self.keyfile)):
            if path is not None and not path.is_file():
                raise ServeError(f"{option}: there is no file '{path}'")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except (ssl.SSLError, OSError) as error:
            key = "" if self.keyfile is None else f" with the key '{self.keyfile}'"
            raise ServeError(f"invalid TLS certificate '{self.certfile}'{key}: {error}") from error

    def listen(self) -> socket.socket:
        """Opens the socket; from now on no other server can have the port.

        Raises ``ServeError`` if the port is in use, or the host is not one of this machine.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: of a host such as 0.0.0..0
            raise ServeError(f"cannot bind to '{self.host}': {getattr(error, 'strerror', None) or error}") from error
        except OverflowError as error:
            raise ServeError(f"invalid port {self.port}; give one from 0 to 65535") from error
        except OSError as error:
            raise ServeError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}; stop what uses it, or choose another "
                "--port"
            ) from error

    def url(self, listening: socket.socket) -> str:
        """The server's URL, as a client on this machine may use it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.certfile is None else 'https'}://{host}:{listening.getsockname()[1]}"
