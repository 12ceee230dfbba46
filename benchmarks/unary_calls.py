"""Makes unary calls from many connections at once, each with one call in flight; serves empty calls.

gRPC's own clients in Python take as much CPU for a call as its server does, so that with two cores the client would be
the limit. This one takes a fifth: it speaks as much of HTTP/2 as a unary call needs. Its windows are so large that they
are never used up, its requests so small that the server's never are. An answer is checked by its bytes: a refused call
has none, only a status. `add` alone uses this module, which knows nothing of Tarry's messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

EMPTY_METHOD = "/tarry.benchmark/Empty"
TIMEOUT_S = 300.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = 4
_WINDOW_MAX = (1 << 31) - 1
_WINDOW_AT_FIRST = (1 << 16) - 1
_FRAME_HEAD_BYTES = 9
# HPACK's `:method: POST` and `:scheme: http`, by their places in its table
_POST_HTTP = b"\x83\x86"
_READ_BYTES = 1 << 16


class CallFailed(Exception):
    """The error of a call that was not answered as expected."""


@dataclasses.dataclass(frozen=True)
class Called:
    """The cost of the calls: seconds, and CPU seconds of the caller."""

    seconds: float
    cpu_s: float


def call(address: str, method: str, requests: Sequence[bytes], answer: bytes, *, connections: int) -> Called:
    """Make a call for each request. Raises `CallFailed` if one is not answered with `answer`."""
    with contextlib.ExitStack() as stack:
        waiting = iter(requests)
        opened = [stack.enter_context(_Connection.opened(address, method, answer)) for _ in range(connections)]
        selector = stack.enter_context(selectors.DefaultSelector())
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        unanswered = sum(connection.send_next(waiting) for connection in opened)
        for connection in opened:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while unanswered:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise CallFailed(f"{unanswered} calls of {method} were not answered within {TIMEOUT_S:g} s")
            for key, _ in ready:
                if key.data.read():
                    unanswered -= not key.data.send_next(waiting)
        return Called(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


class _Connection:
    """One connection, with at most one call in flight."""

    def __init__(self, connected: socket.socket, authority: str, method: str, answer: bytes) -> None:
        self.socket = connected
        self._method = method
        self._answer = _message(answer)
        self._stream = -1
        self._answered = b""
        self._unread = b""
        # The first request puts its headers into the table of the connection, the last one at the first place, 62.
        named = ((b"\x44", method), (b"\x41", authority), (b"\x40\x02te", "trailers"), (b"\x5f", "application/grpc"))
        self._headers = _POST_HTTP + b"".join(name + _text(value) for name, value in named)
        self._headers_again = _POST_HTTP + bytes(0x80 | place for place in (65, 64, 63, 62))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, address: str, method: str, answer: bytes) -> Iterator[_Connection]:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            settings = struct.pack("!HI", _INITIAL_WINDOW_SIZE, _WINDOW_MAX)
            window = struct.pack("!I", _WINDOW_MAX - _WINDOW_AT_FIRST)
            connected.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))
            yield cls(connected, address, method, answer)

    def send_next(self, requests: Iterator[bytes]) -> bool:
        """Make the call of the next request. Returns False if there is none."""
        request = next(requests, None)
        if request is None:
            return False
        self._stream += 2
        self.socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, self._headers)
            + _frame(_DATA, _END_STREAM, self._stream, _message(request))
        )
        self._headers = self._headers_again
        return True

    def read(self) -> bool:
        """Read the bytes that have come; return whether the call is answered. Raises `CallFailed`."""
        came = self.socket.recv(_READ_BYTES)
        if not came:
            raise CallFailed(f"a call of {self._method} was broken off")
        data, place, answered = self._unread + came, 0, False
        while place + _FRAME_HEAD_BYTES <= len(data):
            begin = place + _FRAME_HEAD_BYTES
            end = begin + int.from_bytes(data[place : place + 3], "big")
            if end > len(data):
                break
            answered |= self._take(data[place + 3], data[place + 4], data[begin:end])
            place = end
        self._unread = data[place:]
        return answered

    def _take(self, kind: int, flags: int, payload: bytes) -> bool:
        """Take a frame; return whether it ends the call."""
        if kind == _DATA:
            self._answered += payload
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            raise CallFailed(f"calls of {self._method}: the server has closed the connection: {payload!r}")
        if kind not in (_DATA, _HEADERS) or not flags & _END_STREAM:
            return False
        answer, self._answered = self._answered, b""
        if answer != self._answer:
            raise CallFailed(f"a call of {self._method} was answered with {answer!r} and {payload!r}")
        return True


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack("!BBI", kind, flags, stream) + payload


def _message(body: bytes) -> bytes:
    """Frame a message as gRPC does, not compressed."""
    return struct.pack("!BI", 0, len(body)) + body


def _text(value: str) -> bytes:
    """Encode a text of at most 126 bytes as HPACK does."""
    return bytes((len(value),)) + value.encode()


def serve_empty(parent: Connection) -> None:
    """Serve empty calls with empty answers, by grpc.aio in a side process.

    Sends that it is ready, then its address; ends at any message.
    """
    asyncio.run(_serve_empty(parent))


async def _serve_empty(parent: Connection) -> None:
    async def empty(_: bytes, __: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return b""

    service, _, name = EMPTY_METHOD[1:].partition("/")
    server = grpc.aio.server()
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(empty)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    parent.send("ready")
    parent.send(f"127.0.0.1:{port}")
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(parent.fileno(), told.set)
    await told.wait()
    await server.stop(None)
