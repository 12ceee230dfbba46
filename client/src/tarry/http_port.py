"""Serves small pages over HTTP or HTTPS within fixed limits: the ports of the daemon and of the relay.

One thread with an event loop serves every connection, so a slow caller keeps no thread. A connection carries one
request, and has `CONNECTION_MAX_S` in all, from its handshake to the last byte of the answer: neither a byte now and
then nor a slow reader makes that longer. A connection beyond `CONNECTIONS_MAX` ends the oldest one, so callers that
only wait do not keep others out.

A page is made in the thread of the port. It is kept, and is made again only while that takes at most a tenth of one
core, so a flood of requests costs the process little.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import functools
import gzip
import http.client
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias

CONNECTIONS_MAX: Final = 32
CONNECTION_MAX_S: Final = 20.0
HEAD_BYTES_MAX: Final = 16 << 10
"""Longest request line with its headers (bytes)"""
RENEWAL_SHARE: Final = 0.1
"""Part of a core that making one page may take"""
RENEWAL_BURST_S: Final = 1.0
"""Time whose share may be used at once (seconds)"""
# Part of an answer that a connection buffers (bytes)
_PORTION_BYTES: Final = 64 << 10
_SEND_BUFFER_BYTES: Final = 256 << 10
# Pause after the system refused a connection, such as for want of file descriptors (seconds)
_ACCEPT_AGAIN_S: Final = 1.0

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A page, or a refusal."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()


Headers: TypeAlias = email.message.Message


class Port:
    """A server of pages."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], Answer]],
        *,
        refuse: Callable[[Headers], Answer | None] = lambda _: None,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """Bind and serve; port 0 takes a free one. Raise `OSError` if the address cannot be bound.

        `pages` has the maker of each path. `refuse` returns the answer to a caller that may not see them, or None.
        `context` returns that of a new connection, or None for HTTP.
        """
        self._pages = {path: _KeptPage(make) for path, make in pages.items()}
        self._refuse, self._context = refuse, context
        self._socket = _listening(host, port)
        # The oldest first
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """End the connections and the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait((accepting, closing), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except ConnectionError:
                continue
            except OSError as error:
                log.warning("the HTTP port cannot take a connection: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._serve_connection(connection))
            self._open[task] = None
            task.add_done_callback(functools.partial(self._ended, connection))
            # The system may have more connections at once: those before them are served meanwhile.
            await asyncio.sleep(0)

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        connection.close()

    async def _serve_connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(HEAD_BYTES_MAX, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        # A caller may leave, be too slow or speak another protocol.
        with contextlib.suppress(OSError, EOFError):
            async with asyncio.timeout(CONNECTION_MAX_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context())
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                try:
                    for portion in await self._portions(reader):
                        writer.write(portion)
                        await writer.drain()
                    writer.close()
                    await writer.wait_closed()
                finally:
                    # asyncio cannot abort what it has closed.
                    if connection.fileno() >= 0:
                        transport.abort()

    async def _portions(self, reader: asyncio.StreamReader) -> Iterator[bytes | memoryview]:
        """Read a request, and return its answer in portions. Raises `EOFError` if the caller leaves before its end."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, _, rest = head.partition(b"\r\n")
            headers = http.client.parse_headers(io.BytesIO(rest))
        except (asyncio.LimitOverrunError, http.client.HTTPException):
            return _portions(Answer(b"the headers are too long\n", status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        match first.decode("latin-1").split(" "):
            case [("GET" | "HEAD") as method, target, version] if version.startswith("HTTP/1."):
                return _portions(self._answer(target, headers), has_body=method == "GET")
            case [_, _, version] if version.startswith("HTTP/1."):
                allowed = (("Allow", "GET, HEAD"),)
                refusal = Answer(b"GET and HEAD are served\n", status=HTTPStatus.METHOD_NOT_ALLOWED, headers=allowed)
                return _portions(refusal)
        return _portions(Answer(b"this is no request of HTTP/1\n", status=HTTPStatus.BAD_REQUEST))

    def _answer(self, target: str, headers: Headers) -> Answer:
        refusal = self._refuse(headers)
        if refusal is not None:
            return refusal
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            served = " and ".join(self._pages)
            return Answer(f"only {served} can be read here\n".encode(), status=HTTPStatus.NOT_FOUND)
        return page.answer(gzipped="gzip" in headers.get("Accept-Encoding", ""))


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: the system buffers little for a caller that reads slowly.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.bind((host, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


class _KeptPage:
    """A page with the last answer of its maker."""

    def __init__(self, make: Callable[[], Answer]) -> None:
        self._make = make
        self._kept: dict[bool, Answer] = {}
        # Up to then the time spent so far uses up the share of this page.
        self._paid_until_s = 0.0

    def answer(self, *, gzipped: bool) -> Answer:
        start_s = time.monotonic()
        if not self._kept or self._paid_until_s - start_s <= RENEWAL_BURST_S:
            try:
                self._kept = {False: self._make()}
            except Exception:
                log.exception("a page of the HTTP port cannot be made, by a bug of this program")
                failure = b"the page cannot be made; the log has the reason\n"
                self._kept = {False: Answer(failure, status=HTTPStatus.INTERNAL_SERVER_ERROR)}
        if gzipped not in self._kept:
            plain = self._kept[False]
            headers = (*plain.headers, ("Content-Encoding", "gzip"))
            self._kept[True] = plain._replace(body=gzip.compress(plain.body), headers=headers)
        spent_s = time.monotonic() - start_s
        self._paid_until_s = max(self._paid_until_s, start_s) + spent_s / RENEWAL_SHARE
        return self._kept[gzipped]


def _portions(answer: Answer, *, has_body: bool = True) -> Iterator[bytes | memoryview]:
    headers = (("Content-Type", answer.kind), ("Content-Length", str(len(answer.body))), ("Connection", "close"))
    lines = (f"{name}: {value}" for name, value in (*headers, *answer.headers))
    yield "\r\n".join((f"HTTP/1.1 {answer.status.value} {answer.status.phrase}", *lines, "", "")).encode("latin-1")
    if has_body:
        body = memoryview(answer.body)
        for start in range(0, len(body), _PORTION_BYTES):
            yield body[start : start + _PORTION_BYTES]
