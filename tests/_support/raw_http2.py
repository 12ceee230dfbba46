"""A gRPC call as bytes, with headers that no client library sends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

TIMEOUT_S = 300
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _length(number: int) -> bytes:
    """A length of HPACK: seven bits, and the rest in bytes of seven bits."""
    if number < 127:
        return bytes([number])
    found, number = bytearray([127]), number - 127
    while number >= 128:
        found.append(number % 128 + 128)
        number //= 128
    return bytes([*found, number])


def _literal(name: bytes, value: bytes) -> bytes:
    """A header of HPACK that no table takes."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def ended(port: int | str, path: str, headers: Iterable[tuple[bytes, bytes]] = (), message: bytes = b"") -> bytes:
    """Make one call with one message; return what the server has sent when its stream ends.

    `port` is one of loopback, or the path of a Unix socket.
    """
    own = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    block = b"".join(_literal(name, value) for name, value in (*own, *headers))
    with socket.socket(socket.AF_UNIX if isinstance(port, str) else socket.AF_INET) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(port if isinstance(port, str) else ("127.0.0.1", port))
        body = b"\x00" + struct.pack(">I", len(message)) + message
        connection.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM, 1, body)
        )
        received = b""
        while data := connection.recv(1 << 16):
            received += data
            if _has_ended(received):
                break
        return received


def _has_ended(received: bytes) -> bool:
    while len(received) >= 9:
        size, kind, flags = int.from_bytes(received[:3]), received[3], received[4]
        # RST_STREAM, GOAWAY
        if kind in (3, 7) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            return len(received) >= 9 + size
        received = received[9 + size :]
    return False
