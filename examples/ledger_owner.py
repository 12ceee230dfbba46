"""Owns ledgers: deletes them on request, and reports which are in use: docs/DELETION.md as a program.

    python -m examples.ledger_owner --directory DIR [--port 0] [--authorization-file FILE]

    DIR/topics.json                 {"persistent://t/n/x": {"ledger": [4, 5], "offloaded_ledger": [3]}}: in use
    DIR/ledgers/<id>/metadata.json  {"application": "pulsar", ...}
    DIR/ledgers/<id>/data           whatever the ledger holds

It prints one line of JSON when it serves, `{"delete_url": ..., "in_use_url": ...}`.

A ledger is renamed before it is removed, so that it is whole or gone, whatever is killed. A thread of the same process
changes `topics.json` under `Ledgers.lock`.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import shutil
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REQUEST_BYTES_MAX = 1 << 20
TIMEOUT_S = 30.0
DELETING = ".deleting-"

Result = dict[str, str]


class Ledgers:
    """The ledgers in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The ledgers in use must not change between the check and the deletion.
        self.lock = threading.Lock()
        (directory / "ledgers").mkdir(parents=True, exist_ok=True)
        for leftover in (directory / "ledgers").glob(f"{DELETING}*"):
            shutil.rmtree(leftover)

    def delete(self, record: Mapping[str, Any]) -> Result:
        """Delete the ledger if it is not in use and matches the record. May be repeated."""
        ledger_id = record["ledger_id"]
        if record["ledger_type"] != "ledger" or not ledger_id.isdecimal():
            return {"result": "malformed", "text": "ledgers with a number are kept here, and nothing else"}
        folder = self.directory / "ledgers" / str(int(ledger_id))
        with self.lock:
            if self.in_use(record)["result"] == "in_use":
                return {"result": "in_use"}
            try:
                found = json.loads((folder / "metadata.json").read_bytes())
            except FileNotFoundError:
                return {"result": "gone"}
            for key, wanted in record["metadata"].items():
                if found.get(key) != wanted:
                    return {"result": "mismatch", "text": f"{key} is {found.get(key)!r}, not {wanted!r}"}
            removed = folder.with_name(f"{DELETING}{folder.name}")
            folder.rename(removed)
            _synchronise(removed.parent)
        shutil.rmtree(removed)
        return {"result": "deleted"}

    def in_use(self, record: Mapping[str, Any]) -> Result:
        topics = json.loads((self.directory / "topics.json").read_bytes())
        if record["topic"] not in topics:
            return {"result": "no_such_topic"}
        used = topics[record["topic"]].get(record["ledger_type"], [])
        return {"result": "in_use" if int(record["ledger_id"]) in used else "not_in_use"}


class Owner(ThreadingHTTPServer):
    """The HTTP server, which serves from `serve_forever` to `shutdown`.

    `authorization` is the required value of the header; None means no requirement.
    """

    daemon_threads = True

    def __init__(self, ledgers: Ledgers, *, port: int = 0, authorization: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answers = {"/delete": ledgers.delete, "/in-use": ledgers.in_use}
        self.authorization = authorization

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Owner
    timeout = TIMEOUT_S

    def do_POST(self) -> None:
        if not self._is_authorized():
            return self._answer(401, {"text": "authorization is missing or wrong"})
        if self.path not in self.server.answers:
            return self._answer(404, {"text": "no such path"})
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > REQUEST_BYTES_MAX:
            return self._answer(413, {"text": f"a request has at most {REQUEST_BYTES_MAX} bytes, and says how many"})
        try:
            record = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return self._answer(400, {"text": "the request is not JSON"})
        try:
            result = self.server.answers[self.path](record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # The fate of the ledger is unknown: the status makes the daemon ask again.
            return self._answer(500, {"text": f"{type(error).__name__}: {error}"})
        return self._answer(200, result)

    def log_message(self, format: str, *arguments: object) -> None:
        """Do nothing: a line for each request is of no use here."""

    def _is_authorized(self) -> bool:
        wanted = self.server.authorization
        given = self.headers.get("Authorization", "")
        return wanted is None or hmac.compare_digest(given.encode(), wanted.encode())

    def _answer(self, status: int, answer: Result) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _synchronise(folder: Path) -> None:
    """Make the names in a folder, and their absence, survive a power failure."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="An owner of ledgers on loopback.")
    parser.add_argument("--directory", type=Path, required=True, help="where the ledgers are")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--authorization-file", type=Path, help="the value that the Authorization header has to have")
    arguments = parser.parse_args()
    authorization = arguments.authorization_file and arguments.authorization_file.read_text().strip()
    with Owner(Ledgers(arguments.directory), port=arguments.port, authorization=authorization) as owner:
        print(json.dumps({"delete_url": owner.url("/delete"), "in_use_url": owner.url("/in-use")}), flush=True)
        owner.serve_forever()


if __name__ == "__main__":
    main()
