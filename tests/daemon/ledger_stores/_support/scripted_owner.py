"""An owner on loopback that does what a test says, byte by byte.

Owns: the listening port, and what arrived. Does not own: HTTP; what is answered is written as it is.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

Answer = Callable[[socket.socket], None]
TIMEOUT_S = 300.0


class ScriptedOwner:
    """A context manager. Every connection is a request; `answer` writes to it. `requests`: head and body of each."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []
        # Ends answers that wait for ever.
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}{path}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.closing.set()
        # Closing alone does not wake a thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(TIMEOUT_S)
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            head, _, body = received.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(1 << 16)
            self.requests.append((head.decode(), json.loads(body)))
            self.answer(connection)


def answering(status: str, body: bytes, *headers: str) -> Answer:
    """One whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + body)


def saying(**answer: object) -> Answer:
    """200 with this JSON."""
    return answering("200 OK", json.dumps(answer).encode(), "Content-Type: application/json")


def sending(data: bytes) -> Answer:
    """These bytes, and the end of the connection."""
    return lambda connection: connection.sendall(data)
