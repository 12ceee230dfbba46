"""The proxy that these tests shut: it passes everything on, or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests._support.tcp_proxy import TcpProxy


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that says everything back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(1024):
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_it_passes_bytes_and_the_end_on_and_when_shut_closes_and_refuses_until_it_is_opened_again(
    echo_port: int,
) -> None:
    with TcpProxy(echo_port) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=300) as ended:
            ended.sendall(b"one")
            ended.shutdown(socket.SHUT_WR)
            assert ended.recv(10) == b"one"
            assert ended.recv(10) == b""
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=300) as cut:
            cut.sendall(b"two")
            assert cut.recv(10) == b"two"
            proxy.shut()
            assert cut.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=300)
        proxy.open()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=300) as again:
            again.sendall(b"three")
            assert again.recv(10) == b"three"


def test_what_clients_say_waits_while_it_is_held_back(echo_port: int) -> None:
    with TcpProxy(echo_port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=300) as connection:
        connection.sendall(b"one")
        assert connection.recv(10) == b"one"
        proxy.hold_back()
        connection.sendall(b"two")
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(10)
        connection.settimeout(300)
        proxy.let_pass()
        assert connection.recv(10) == b"two"
