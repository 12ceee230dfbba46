"""A DNS server on loopback: every name has the same addresses, in the same order.

Owns: the answers to questions of type A; any other type has no answer. Does not own: how a client uses them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

_HEADER = struct.Struct(">HHHHHH")
_TYPE_A, _CLASS_IN = 1, 1
_ANSWERED = 0x8180
# The name of the question, which begins behind the header
_SAME_NAME = 0xC000 | _HEADER.size


@contextlib.contextmanager
def name_server(addresses: Sequence[str]) -> Iterator[str]:
    """Yields host:port of the server while it answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        thread = threading.Thread(target=_serve, args=(server, addresses), name="name-server", daemon=True)
        thread.start()
        try:
            yield f"{host}:{port}"
        finally:
            # An empty message is the end.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
                ending.sendto(b"", (host, port))
            thread.join()


def _serve(server: socket.socket, addresses: Sequence[str]) -> None:
    while True:
        asked, caller = server.recvfrom(512)
        if not asked:
            return
        end = asked.index(b"\0", _HEADER.size) + 5
        (kind,) = struct.unpack_from(">H", asked, end - 4)
        records = [
            struct.pack(">HHHIH", _SAME_NAME, _TYPE_A, _CLASS_IN, 1, 4) + socket.inet_aton(each)
            for each in (addresses if kind == _TYPE_A else ())
        ]
        (number, *_) = _HEADER.unpack_from(asked)
        header = _HEADER.pack(number, _ANSWERED, 1, len(records), 0, 0)
        server.sendto(b"".join((header, asked[_HEADER.size : end], *records)), caller)
