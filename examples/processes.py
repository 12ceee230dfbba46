"""Runs servers as child processes: started on free ports, killed, stopped, and never left behind.

`DaemonProcess` is a `tarryd` that can be killed and started again on its root and its ports; `S3ServerProcess` is an S3
server. Both report the resources that they use. The module ends only processes that it started.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2
from prometheus_client import parser

import tarry
from tarry import credentials, in_threads

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

REPOSITORY = Path(__file__).resolve().parent.parent
TARRYD = (sys.executable, "-m", "daemon.main")
# Below the range from which Linux takes the ports of outgoing connections: a client that retries the port of a dead
# daemon must not end up connected to itself.
PORTS = range(20_000, 32_000)
_POLL_S = 0.01
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LOG_TAIL_CHARACTERS = 6_000
# Accepted by no real server; the S3 server here requires some.
S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


# Replaced by tests that start many processes of the same program
open_process: Callable[..., Any] = functools.partial(subprocess.Popen, start_new_session=True)


class ProcessFailed(Exception):
    """The error of a child process that ended or stayed silent; the message ends with the end of its log."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources that a process uses.

    They are resident bytes now and at most so far, and CPU seconds (user and system) since its start.
    """

    resident_bytes: int
    resident_bytes_max: int
    cpu_s: float


def free_port(among: Sequence[int] = PORTS) -> int:
    """Return a port of 127.0.0.1 on which no process listens, and which no other process got from here."""
    folder = Path(tempfile.gettempdir(), "tarry-ports")
    folder.mkdir(exist_ok=True)
    while True:
        port = random.choice(among)
        # The lock ends with this process: between here and the start of a server another one would get the port, too.
        taken = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(taken)
            continue
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                os.close(taken)
                continue
        return port


def usage(pid: int) -> Usage:
    """Read usage from /proc. Raises `OSError` if the process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Usage(
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        resident_bytes_max=int(status["VmHWM"].split()[0]) * 1024,
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


# Reads `+pid` and `-pid`, a line each, until the writer's end: then it kills the remaining processes.
_GUARD = """
import os, signal, sys
left = set()
for line in sys.stdin:
    (left.add if line[0] == "+" else left.discard)(int(line[1:]))
for pid in left:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class _Guard:
    """A process that ends the children of this process when it is gone, even by SIGKILL.

    It reads a pipe until its end. The kernel's own signal for that is sent when the thread ends that started the child,
    which is too early.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0

    def watch(self, pid: int) -> None:
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Forget a process that has ended and was waited for: another process may get its number."""
        self._say(f"-{pid}")

    def _say(self, line: str) -> None:
        with self._lock:
            # A forked process has children of its own.
            if self._process is None or self._pid != os.getpid():
                self._process, self._pid = self._start(), os.getpid()
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


guard = _Guard()


class ChildProcess:
    """One child with its log in a file.

    Leaving the context kills it, and so does the end of this process. `checkout` is its working directory.
    """

    def __init__(
        self, name: str, directory: Path, environment: Mapping[str, str], *, checkout: Path = REPOSITORY
    ) -> None:
        self.name = name
        self._checkout = checkout
        self.log = directory / f"{name}.log"
        self._environment = {
            name: value
            for name, value in os.environ.items()
            # An installed program runs from bytecode: compiling it at each start takes as long as everything else.
            if not name.startswith(("AWS_", "TARRY_")) and name != "PYTHONDONTWRITEBYTECODE"
        } | dict(environment)
        self._process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return int(self._running().pid)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        guard.forget(self._process.pid)

    def stop(self) -> None:
        """Send SIGSTOP: the process keeps everything and does nothing."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float = 300.0) -> int:
        """Send SIGTERM; return the exit status. Raises `ProcessFailed` if it does not end in time."""
        process = self._running()
        process.terminate()
        try:
            status: int = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {timeout_s:g} s of SIGTERM") from None
        guard.forget(process.pid)
        return status

    def usage(self) -> Usage:
        return usage(self.pid)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for_log(self, text: str, timeout_s: float = 300.0) -> None:
        """Wait until the log holds `text`. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log_text():
            self._check_waiting(deadline_s, f"did not log {text!r} within {timeout_s:g} s")

    def failed(self, what: str) -> ProcessFailed:
        return ProcessFailed(f"{self.name} {what}; the end of {self.log}:\n{self.log_text()[-_LOG_TAIL_CHARACTERS:]}")

    def _spawn(self, *command: str) -> None:
        if self.alive:
            raise ProcessFailed(f"{self.name} is running")
        with self.log.open("ab") as log:
            # An interrupt at the terminal is for the program that started it, which then ends its children.
            self._process = open_process(
                command,
                cwd=self._checkout,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        guard.watch(self._process.pid)

    def _wait_for_file(self, path: Path, timeout_s: float) -> bytes:
        """Wait for a file that is put in place whole."""
        deadline_s = time.monotonic() + timeout_s
        while not path.exists():
            self._check_waiting(deadline_s, f"did not write {path.name} within {timeout_s:g} s")
        return path.read_bytes()

    def _check_waiting(self, deadline_s: float, too_late: str) -> None:
        """Do one step of waiting. Raises `ProcessFailed` if the process has ended or the time is over."""
        process = self._running()
        if process.poll() is not None:
            raise self.failed(f"ended with status {process.returncode}")
        if time.monotonic() >= deadline_s:
            raise self.failed(too_late)
        time.sleep(_POLL_S)

    def _running(self) -> Any:
        if self._process is None:
            raise ProcessFailed(f"{self.name} was never started")
        return self._process


class DaemonProcess(ChildProcess):
    """A `tarryd`.

    `start` after `kill` or `terminate` starts it again on the same ports, so that clients find it. `settings` maps
    `section.key` to a value, including the store (`local_store`, `S3ServerProcess.settings`). `configuration` is TOML,
    for what a single value cannot say. `program` replaces `tarryd`. `checkout` is the one whose code runs. `tls` is
    what its clients need, including the health checks here, or None without TLS.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: Mapping[str, object],
        *,
        daemon_id: str | None = None,
        configuration: str = "",
        program: Sequence[str] = TARRYD,
        checkout: Path = REPOSITORY,
        tls: tarry.Tls | None = None,
    ) -> None:
        super().__init__(name, directory, {**S3_CREDENTIALS, "PYTHONPATH": str(checkout)}, checkout=checkout)
        self._program = program
        self._tls = tls
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics_address = f"127.0.0.1:{free_port()}"
        self._settings = {
            "daemon.id": daemon_id or name,
            "grpc.listen": self.address,
            "metrics.listen": self.metrics_address,
            **settings,
        }
        self._ready_file = directory / f"{name}.ready"
        self._configuration_file = directory / f"{name}.toml"
        self._configuration_file.write_text(configuration)

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the daemon; return when its ports are bound. Raises `ProcessFailed`."""
        self._ready_file.unlink(missing_ok=True)
        overrides = [f"--set={name}={_text(value)}" for name, value in self._settings.items()]
        files = ("--config", str(self._configuration_file), "--ready-file", str(self._ready_file))
        self._spawn(*self._program, *files, *overrides)
        ready = json.loads(self._wait_for_file(self._ready_file, timeout_s))
        if ready["grpc"] != self.address:
            raise self.failed(f"listens on {ready['grpc']}, not on {self.address}")

    def start_serving(self, timeout_s: float = 300.0) -> float:
        """Start the daemon and wait until its health is SERVING; return the time it took (seconds).

        Raises `ProcessFailed`.
        """
        began_s = time.monotonic()
        self.start(timeout_s)
        self.wait_for_health(serving=True, timeout_s=timeout_s - (time.monotonic() - began_s))
        return time.monotonic() - began_s

    def wait_for_health(self, *, serving: bool, timeout_s: float = 300.0) -> None:
        """Watch health until it is SERVING, or NOT_SERVING. Raises `ProcessFailed`."""
        status = _SERVING if serving else _NOT_SERVING
        deadline_s = time.monotonic() + timeout_s
        with self._channel() as channel:
            method = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            while True:
                # Cut into short watches, to notice the end of the process
                watch = method(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                try:
                    if any(response.status == status for response in watch):
                        watch.cancel()
                        return
                except grpc.RpcError as error:
                    if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                        raise
                wanted = "SERVING" if serving else "NOT_SERVING"
                self._check_waiting(deadline_s, f"was not {wanted} within {timeout_s:g} s")

    def is_serving(self, timeout_s: float = 5.0) -> bool:
        """Return whether its health is SERVING now. Raises `grpc.RpcError`."""
        with self._channel() as channel:
            method = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = method(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
            return bool(answer.status == _SERVING)

    def _channel(self) -> grpc.Channel:
        shown = credentials.Credentials(self._tls).shown_to(self.address)
        return in_threads.open_channel(
            self.address, shown.channel, server_name=None if self._tls is None else self._tls.server_name
        )

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series over the samples that have these labels, or 0.0 if there are none."""
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples that it exports under that name now: (labels, value)."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as response:
            families = parser.text_string_to_metric_families(response.read().decode())
        return [
            (dict(sample.labels), sample.value) for each in families for sample in each.samples if sample.name == name
        ]


class S3ServerProcess(ChildProcess):
    """An S3 server, moto, with one empty bucket.

    It serves one request at a time, because otherwise its conditional PUT is not atomic.
    """

    BUCKET = "tarry"

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory, S3_CREDENTIALS)
        self.port = free_port()
        self._ready_file = directory / f"{name}.ready"

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the server; return when the bucket exists. Raises `ProcessFailed`."""
        self._ready_file.unlink(missing_ok=True)
        program = (sys.executable, "-m", "examples.s3_server")
        self._spawn(*program, "--port", str(self.port), "--ready-file", str(self._ready_file))
        self._wait_for_file(self._ready_file, timeout_s)
        self._client().create_bucket(Bucket=self.BUCKET)

    def settings(self, *, port: int | None = None) -> dict[str, object]:
        """Return the settings of a daemon that uses it, through `port` if a proxy stands between."""
        return {
            "store.kind": "s3",
            "store.s3.bucket": self.BUCKET,
            "store.s3.endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "store.s3.addressing": "path",
        }

    def stored_bytes(self) -> int:
        """Return the size of all objects in the bucket (bytes)."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.BUCKET)
        return sum(found["Size"] for page in pages for found in page.get("Contents", ()))

    def _client(self) -> S3Client:
        # It takes as long to load as everything else here, and most callers have no S3 server.
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=S3_CREDENTIALS["AWS_DEFAULT_REGION"],
        )


def local_store(path: Path) -> dict[str, object]:
    """Return the settings of a daemon on a local directory."""
    return {"store.kind": "local", "store.path": path}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
