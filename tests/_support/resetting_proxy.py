"""A TCP proxy for one connection, whose far end is reset with answers unread, as when a client is killed."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class ResettingProxy:
    """A context manager. After `hold_answers` it reads nothing of what the server says; at its end it resets."""

    def __init__(self, upstream_port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._far = socket.create_connection(("127.0.0.1", upstream_port))
        self._near: socket.socket | None = None
        self._ended = threading.Event()
        self._holds = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="resetting-proxy", daemon=True) for run in (self._forth, self._back)
        ]
        self._accepted = threading.Event()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._holds.set()
        self._ended.set()
        # Nobody reads it now: closing sends a RST.
        self._far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert self._near is not None
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._far, self._near, self._listener):
            each.close()

    def hold_answers(self) -> None:
        self._holds.set()

    def _forth(self) -> None:
        self._near, _ = self._listener.accept()
        self._accepted.set()
        with contextlib.suppress(OSError):
            while chunk := self._near.recv(_CHUNK_BYTES):
                self._far.sendall(chunk)

    def _back(self) -> None:
        self._accepted.wait()
        assert self._near is not None
        self._far.settimeout(0.01)
        with contextlib.suppress(OSError):
            while not self._holds.is_set():
                try:
                    chunk = self._far.recv(_CHUNK_BYTES)
                except TimeoutError:
                    continue
                self._near.sendall(chunk)
