"""A proxy before an S3 server that loses answers.

Fault model: a request may take effect while its answer is lost (the connection is closed without a byte, or stays
silent); its body may be cut off in the middle; a request may be answered with an error, or its connection reset, before
it takes effect. Nothing else: requests arrive as they were sent, other answers are whole.

Owns: the proxy, and which answer it loses. Does not own: what was the fault's effect; that is the test's to say.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

_HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})
_UPSTREAM_TIMEOUT_S: Final = 300.0
_CONDITIONAL_PUT: Final = "conditional PUT"


class Loss(Enum):
    """How an answer is lost."""

    CLOSED = "the connection is closed without an answer"
    SILENT = "no answer comes, until the client gives up"
    CUT = "the connection is closed in the middle of the body"
    RESET = "the connection is reset, and the request takes no effect"


Fault: TypeAlias = Loss | int | None
"""An answer that is lost, or a status that is answered before the request takes effect; None: it is forwarded."""


class Asked(NamedTuple):
    """A request that arrived. `target`: its path and what is asked there, as it came."""

    method: str
    target: str
    conditional: bool


def no_fault(asked: Asked) -> Fault:
    """What becomes of requests for which nothing was planned."""
    return None


class LostAnswerProxy:
    """The proxy; it listens when it is made, and forwards from `start` to `stop`.

    `otherwise`: the fault of each request for which none was planned; called in any thread, one at a time.

    `requests` counts what arrived by method, `conditional_puts` the conditional PUTs among it, `lost_answers` what
    was not answered. All may be read at any time.
    """

    def __init__(self, upstream_url: str, otherwise: Callable[[Asked], Fault] = no_fault) -> None:
        self._otherwise = otherwise
        self._upstream: Final = urlsplit(upstream_url).netloc
        self._lock = threading.Lock()
        self._faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._stopping = threading.Event()
        self.requests: Counter[str] = Counter()
        self.conditional_puts = 0
        self.lost_answers = 0
        self._server = _Server(("127.0.0.1", 0), self._handler_class())
        self._thread = threading.Thread(target=self._server.serve_forever, name="lost-answer-proxy", daemon=True)
        self.endpoint_url: Final = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def drop_next_put_answer(self, *, count: int = 1, loss: Loss = Loss.CLOSED) -> None:
        """The next conditional PUTs reach the server; their answers reach nobody."""
        with self._lock:
            self._faults[_CONDITIONAL_PUT].extend([loss] * count)

    def answer_next_put_with(self, status: int) -> None:
        """The next conditional PUT is answered with this status and does not reach the server."""
        with self._lock:
            self._faults[_CONDITIONAL_PUT].append(status)

    def answer_next_with(self, method: str, status: int, *, count: int = 1) -> None:
        """The next requests of this method are answered with this status and do not reach the server."""
        with self._lock:
            self._faults[method].extend([status] * count)

    def drop_next_answer(self, method: str, *, count: int = 1, loss: Loss = Loss.CLOSED) -> None:
        """The next requests of this method (PUT: unconditional ones) reach the server; their answers reach nobody."""
        with self._lock:
            self._faults[method].extend([loss] * count)

    def _next_fault(self, handler: BaseHTTPRequestHandler) -> Fault:
        conditional = handler.command == "PUT" and "If-None-Match" in handler.headers
        with self._lock:
            self.requests[handler.command] += 1
            self.conditional_puts += conditional
            # A daemon's probe goes on beside serving: what is planned is meant for the daemon's own requests.
            is_probe = "/probe/" in handler.path
            faults = self._faults[_CONDITIONAL_PUT if conditional else handler.command]
            asked = Asked(handler.command, handler.path, conditional)
            fault = faults.popleft() if faults and not is_probe else self._otherwise(asked)
            self.lost_answers += isinstance(fault, Loss)
            return fault

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                self.upstream = http.client.HTTPConnection(proxy._upstream, timeout=_UPSTREAM_TIMEOUT_S)

            def finish(self) -> None:
                self.upstream.close()
                super().finish()

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                fault = proxy._next_fault(self)
                if isinstance(fault, int):
                    self.answer(fault, {}, b"")
                    return
                if fault is Loss.RESET:
                    self.close_connection = True
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                status, headers, answer = _forward(self, self.upstream, body)
                if fault is Loss.SILENT:
                    proxy._stopping.wait(_UPSTREAM_TIMEOUT_S)
                if fault is not None:
                    self.close_connection = True
                if fault is None or fault is Loss.CUT:
                    self.answer(status, headers, answer, cut=fault is Loss.CUT)

            def answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if self.command == "HEAD" and "Content-Length" in headers:
                    pass  # the length of what a GET would bring
                else:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

            def log_message(self, format: str, *args: object) -> None:
                """Do nothing: a line for each request is of no use here."""

        return Handler


def _forward(
    handler: BaseHTTPRequestHandler, upstream: http.client.HTTPConnection, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """The server's answer: status, headers, body."""
    headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_BY_HOP}
    headers["Content-Length"] = str(len(body))
    upstream.request(handler.command, handler.path, body, headers)
    response = upstream.getresponse()
    answer = response.read()
    kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
    length = response.getheader("Content-Length")
    if handler.command == "HEAD" and length is not None:
        kept["Content-Length"] = length
    return response.status, kept, answer


@contextmanager
def lost_answer_proxy(upstream_url: str, otherwise: Callable[[Asked], Fault] = no_fault) -> Iterator[LostAnswerProxy]:
    """A proxy that forwards while the block runs."""
    proxy = LostAnswerProxy(upstream_url, otherwise)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection beyond the queue waits for a second and more

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients that give up while an answer is withheld are what this proxy is for."""
