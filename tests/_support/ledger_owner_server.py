"""An owner of ledgers who is asked by HTTP, in a thread: it compares, and deletes what it has.

Owns: the server, its ledgers, and which of its answers are lost.
Does not own: what it must answer (`docs/DELETION.md`), and its faults' effect; that is the test's to say.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final


class LedgerOwnerServer:
    """It listens when it is made, and serves from `start` to `stop`.

    `ledgers`: metadata by ledger id. `before_deletion`: told of a ledger that is about to be deleted. `answers_lost`:
    so many of the next deletions are carried out and not answered. `status`: of every answer; other than 200 it does
    nothing.
    """

    def __init__(self) -> None:
        self.ledgers: dict[int, Mapping[str, str]] = {}
        self.in_use: set[int] = set()
        self.before_deletion: Callable[[int], None] = lambda ledger_id: None
        self.answers_lost = 0
        self.status = 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._thread = threading.Thread(target=self._server.serve_forever, name="ledger-owner", daemon=True)
        self.url: Final = f"http://127.0.0.1:{self._server.server_port}/ledgers/delete"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, asked: Mapping[str, Any]) -> str | None:
        """The result; None: it is lost."""
        ledger_id = int(asked["ledger_id"])
        stored = self.ledgers.get(ledger_id)
        if stored is None:
            return "gone"
        if ledger_id in self.in_use:
            return "in_use"
        expected: Mapping[str, str | None] = asked["metadata"]
        if any(stored.get(key) != value for key, value in expected.items()):
            return "mismatch"
        self.before_deletion(ledger_id)
        del self.ledgers[ledger_id]
        if self.answers_lost:
            self.answers_lost -= 1
            return None
        return "deleted"

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                result = owner.answer(asked) if owner.status == 200 else "error"
                if result is None:
                    self.close_connection = True
                    return
                body = json.dumps({"result": result}).encode()
                self.send_response(owner.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Do nothing: a line for each request is of no use here."""

        return Handler


@contextmanager
def ledger_owner_server() -> Iterator[LedgerOwnerServer]:
    """A server that serves while the block runs."""
    server = LedgerOwnerServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
