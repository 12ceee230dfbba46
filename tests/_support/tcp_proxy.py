"""A TCP proxy that can be shut, as when the network between a daemon and its store goes away, and that can hold back
what clients say.

Fault model: while it is shut, open connections are closed and new ones are refused. While it holds back, what clients
say waits, and what servers say is passed on. Nothing is changed.

Owns: the listening port, which stays the same, and the connections. Does not own: what is said on them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class TcpProxy:
    """A context manager; it is open when it is entered."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._passes = threading.Event()
        self._passes.set()
        self.port = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shut()

    def open(self) -> None:
        """Accepts connections."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        with self._lock:
            self._listener = listener
        self._start(self._accept, listener)

    def hold_back(self) -> None:
        """What clients say from now on waits."""
        self._passes.clear()

    def let_pass(self) -> None:
        """What was held back is passed on, and what comes."""
        self._passes.set()

    def shut(self) -> None:
        """Refuses new connections and closes the open ones."""
        self.let_pass()
        with self._lock:
            listener, self._listener = self._listener, None
            connections = list(self._connections)
            self._connections.clear()
        if listener is not None:
            # Closing alone does not wake a thread that accepts.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in connections:
            _close(connection)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self, run: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=run, args=arguments, name="tcp-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._upstream_port))
            except OSError:
                _close(near)
                continue
            with self._lock:
                if self._listener is not listener:
                    _close(near)
                    _close(far)
                    return
                self._connections |= {near, far}
                self._start(self._copy_held, near, far)
                self._start(self._copy, far, near)

    def _copy_held(self, source: socket.socket, sink: socket.socket) -> None:
        self._copy(source, sink, self._passes)

    def _copy(self, source: socket.socket, sink: socket.socket, passes: threading.Event | None = None) -> None:
        """Passes on what comes, when it `passes`, and its end, until either side is gone."""
        try:
            while chunk := source.recv(_CHUNK_BYTES):
                if passes is not None:
                    passes.wait()
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            with self._lock:
                self._connections -= {source, sink}
            _close(source)
            _close(sink)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # A thread that reads it is woken by this, not by closing.
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
