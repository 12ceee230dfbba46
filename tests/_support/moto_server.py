"""An S3 server on loopback: moto, made atomic.

Owns: the server, and settings that reach it.
Does not own: faults (`lost_answer_proxy`, `fault_store`).

moto checks a condition and then writes without a lock, so that several threads in it let several writers win. Here one
request at a time is in moto, and a conditional write is one request unless it is meant to be two. Connections have a
thread each, or an idle one would keep all others waiting; a body is read before its request is let in, or a client that
stops half-way (SIGSTOP) would.

`python -m tests._support.moto_server --port 0 --bucket NAME` prints one line of JSON when it serves,
`{"endpoint_url": ..., "bucket": ..., "pid": ...}`, and serves until SIGTERM or SIGINT, or, with `--until-stdin-closes`,
until its standard input ends: it does not outlive the process that started it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from storage_backends.s3 import S3Settings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

ACCESS_KEY_ID: Final = "testing"
SECRET_ACCESS_KEY: Final = "testing-secret"
WINDOW_S: Final = 0.05
"""Time between the two requests of a server that checks first and writes later (seconds)"""


class MotoServer:
    """The server; it listens when it is made, and serves from `start` to `stop`.

    `checks_first` chooses the paths whose conditional writes are two requests: a look whether the object exists, and
    later a write without a condition.
    """

    def __init__(self, port: int = 0, *, checks_first: Callable[[str], bool] | None = None) -> None:
        application: WSGIApplication = _OneAtATime(_moto())
        if checks_first is not None:
            application = _ChecksFirst(application, checks_first)
        self._server = make_server("127.0.0.1", port, application, threaded=True, request_handler=_QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="moto", daemon=True)
        self.endpoint_url: Final = f"http://127.0.0.1:{self._server.server_port}"
        self._buckets: set[str] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def settings(self, bucket: str, *, endpoint_url: str | None = None, **changes: Any) -> S3Settings:
        """Settings for a bucket of this server, which is made if need be; `endpoint_url` of a proxy before it."""
        if bucket not in self._buckets:
            make_bucket(self.endpoint_url, bucket)
            self._buckets.add(bucket)
        return S3Settings(
            bucket=bucket,
            endpoint_url=endpoint_url or self.endpoint_url,
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            **changes,
        )


@contextmanager
def moto_server(port: int = 0, *, checks_first: Callable[[str], bool] | None = None) -> Iterator[MotoServer]:
    """A server that serves while the block runs; `checks_first` as in `MotoServer`."""
    server = MotoServer(port, checks_first=checks_first)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def make_bucket(endpoint_url: str, bucket: str) -> None:
    """Make the bucket; that it exists is no error."""
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(s3={"addressing_style": "path"}),
    )
    try:
        client.create_bucket(Bucket=bucket)
    finally:
        client.close()


def _moto() -> WSGIApplication:
    # The credentials are for moto's own boto3; no request leaves the process.
    os.environ.setdefault("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    # S3 alone: to find out for each request which service it is for takes as long as to answer it.
    application: WSGIApplication = create_backend_app("s3")
    return application


class _OneAtATime:
    """Lets one request at a time into an application, from its first byte to its last."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        if length:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
        with self._lock:
            return list(self._application(environ, start_response))


class _ChecksFirst:
    """Makes two requests of a conditional write to a path that `chosen` chooses."""

    def __init__(self, application: WSGIApplication, chosen: Callable[[str], bool]) -> None:
        self._application = application
        self._chosen = chosen

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ or not self._chosen(environ["PATH_INFO"]):
            return self._application(environ, start_response)
        del environ["HTTP_IF_NONE_MATCH"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if self._exists(environ):
            start_response("412 Precondition Failed", [("Content-Length", "0")])
            return []
        time.sleep(WINDOW_S)
        return self._application(environ | {"wsgi.input": io.BytesIO(body)}, start_response)

    def _exists(self, environ: WSGIEnvironment) -> bool:
        statuses: list[str] = []

        def keep(status: str, *_: object) -> Any:
            statuses.append(status)

        asked = environ | {"REQUEST_METHOD": "HEAD", "CONTENT_LENGTH": "0", "wsgi.input": io.BytesIO()}
        list(self._application(asked, keep))
        return statuses[-1].startswith("200")


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Do nothing: a line for each request is of no use here."""


def main() -> None:
    """Serve as a process of its own."""
    parser = argparse.ArgumentParser(description="An S3 server on loopback for tests and the demo")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--bucket", default="tarry", help="made before the server says that it is ready")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the process that started it")
    arguments = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with moto_server(arguments.port) as server:
        make_bucket(server.endpoint_url, arguments.bucket)
        ready = {"endpoint_url": server.endpoint_url, "bucket": arguments.bucket, "pid": os.getpid()}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        if arguments.until_stdin_closes:
            threading.Thread(target=_set_at_end_of_input, args=(ended,), daemon=True).start()
        ended.wait()


def _set_at_end_of_input(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
