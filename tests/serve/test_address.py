"""Where a server listens, and what is wrong with it before a model is loaded."""

import socket
from pathlib import Path

import pytest

from selfspec.cli.serve import greeting
from selfspec.errors import ServeError
from selfspec.serve.address import Address


def test_a_port_is_of_one_server() -> None:
    with Address(port=0).listen() as first:
        port = first.getsockname()[1]
        with pytest.raises(ServeError, match=rf"cannot listen on 127.0.0.1:{port}: .*another --port"):
            Address(port=port).listen()
    with Address(port=port).listen():
        pass


def test_hosts() -> None:
    with pytest.raises(ServeError, match=r"cannot bind to 'no\.such\.host\.invalid'"):
        Address("no.such.host.invalid", 0).listen()
    with pytest.raises(ServeError, match=r"cannot bind to '0\.0\.0\.\.0'"):
        Address("0.0.0..0", 0).listen()
    assert [Address(host).is_local for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_the_url_can_be_used_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert Address().url(listening) == f"http://127.0.0.1:{port}"
        assert Address("0.0.0.0").url(listening) == f"http://127.0.0.1:{port}"
        assert Address("::1", certfile=Path("x")).url(listening) == f"https://[::1]:{port}"


def test_files_of_tls(tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    for address, message in (
        (Address(keyfile=wrong), "needs --ssl-certfile"),
        (Address(certfile=tmp_path / "none.pem"), "--ssl-certfile: there is no file"),
        (Address(certfile=wrong, keyfile=tmp_path / "none.pem"), "--ssl-keyfile: there is no file"),
        (Address(certfile=wrong), "invalid TLS certificate"),
    ):
        with pytest.raises(ServeError, match=message):
            address.check_tls()
    Address().check_tls()


def test_the_line_to_try_fits_a_shell() -> None:
    text = greeting("http://x", "it's", needs_key=True)
    assert '-H "Authorization: Bearer $SELFSPEC_API_KEY"' in text
    assert "it'\\''s" in text
    assert "Authorization" not in greeting("http://x", "m", needs_key=False)
