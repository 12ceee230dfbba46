"""Fills and drains Redis' sorted set of `ledger:entry` by due time, with one client process.

Requests are packed before the clock starts and sent with several in flight, so that the server is measured and not the
packing. The script removes the members that it returns: a client that dies then has lost them. Tarry keeps a row until
it is acknowledged.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import socket
import time
from collections.abc import Iterable, Iterator

import hiredis

from benchmarks import load

KEY = "delayed"
RECEIVE_BYTES = 1 << 20
# More arguments than this do not fit a Lua call.
DRAIN_BATCH_MAX = 7_900
DRAIN_SCRIPT = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #due > 0 then redis.call('ZREM', KEYS[1], unpack(due)) end
return due
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """The bytes that are sent at once, and the number of replies to them."""

    data: bytes
    replies: int


def pipelined(rows: load.Rows, batch_rows: int) -> list[Request]:
    """Pack one ZADD a row, so many in one pipeline."""
    return [
        Request(b"".join(_packed("ZADD", KEY, due, member) for due, member in _pairs(batch)), len(batch))
        for batch in rows.batches(batch_rows)
    ]


def variadic(rows: load.Rows, batch_rows: int) -> list[Request]:
    """Pack one ZADD of so many members."""
    return [
        Request(_packed("ZADD", KEY, *itertools.chain.from_iterable(_pairs(batch))), 1)
        for batch in rows.batches(batch_rows)
    ]


def _pairs(rows: load.Rows) -> Iterator[tuple[int, bytes]]:
    columns = zip(rows.deliver_at_ms.tolist(), rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True)
    return ((due, b"%d:%d" % (ledger, entry)) for due, ledger, entry in columns)


def _packed(*words: object) -> bytes:
    return hiredis.pack_command(words)  # type: ignore[arg-type,no-any-return]  # its stub knows tuples of one word


class Connection:
    """A socket with replies parsed by hiredis; a context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._buffer = bytearray(RECEIVE_BYTES)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def reply(self) -> object:
        """Return the next reply. Raises the server's refusal, or ConnectionError."""
        while (reply := self._reader.gets()) is False:
            size = self._socket.recv_into(self._buffer)
            if not size:
                raise ConnectionError("redis closed the connection")
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # any buffer will do
        if isinstance(reply, Exception):
            raise reply
        return reply


def fill(port: int, requests: Iterable[Request], *, in_flight: int) -> tuple[int, float]:
    """Send packed ZADDs; return (members that were new, seconds)."""
    added = 0
    waiting: collections.deque[int] = collections.deque()
    with Connection(port) as connection:
        began_s = time.perf_counter()
        for request in requests:
            if len(waiting) == in_flight:
                added += _sum_of(connection, waiting.popleft())
            connection.send(request.data)
            waiting.append(request.replies)
        added += _sum_of(connection, sum(waiting))
        seconds = time.perf_counter() - began_s
    return added, seconds


def _sum_of(connection: Connection, replies: int) -> int:
    total = 0
    for _ in range(replies):
        reply = connection.reply()
        if not isinstance(reply, int):
            raise TypeError(f"ZADD answered {reply!r}")
        total += reply
    return total


def drain(port: int, due_ms: int, *, batch_rows: int, in_flight: int) -> tuple[list[bytes], float]:
    """Take out all due members; return (members, seconds)."""
    members: list[bytes] = []
    with Connection(port) as connection:
        connection.send(_packed("SCRIPT", "LOAD", DRAIN_SCRIPT))
        call = _packed("EVALSHA", _bytes(connection.reply()), 1, KEY, due_ms, batch_rows)
        began_s = time.perf_counter()
        for _ in range(in_flight):
            connection.send(call)
        waiting, is_empty = in_flight, False
        while waiting:
            taken = connection.reply()
            if not isinstance(taken, list):
                raise TypeError(f"the script answered {taken!r}")
            waiting -= 1
            members += taken
            is_empty = is_empty or not taken
            if not is_empty:
                connection.send(call)
                waiting += 1
        seconds = time.perf_counter() - began_s
    return members, seconds


def _bytes(reply: object) -> bytes:
    if not isinstance(reply, bytes):
        raise TypeError(f"SCRIPT LOAD answered {reply!r}")
    return reply
