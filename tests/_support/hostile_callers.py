"""Callers of an HTTP port that are slow, silent or rude, as sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import urllib.request
from collections.abc import Iterator

TIMEOUT_S = 300
ASK = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


@contextlib.contextmanager
def crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that begin a request and do not end it."""
    with contextlib.ExitStack() as open_ones:
        callers = [open_ones.enter_context(connected(port)) for _ in range(count)]
        for each in callers:
            # The port may have ended the oldest already.
            with contextlib.suppress(OSError):
                each.sendall(ASK[:-2])
        yield callers


def reset(caller: socket.socket) -> None:
    """End a connection as a process does that is killed with unread answers: by a RST."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


def is_ended(caller: socket.socket) -> bool:
    """Wait for the end of a connection; return False if the port answers instead."""
    try:
        return caller.recv(1) == b""
    except ConnectionError:
        return True


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())
