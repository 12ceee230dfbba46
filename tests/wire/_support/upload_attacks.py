"""Uploads that must not take a daemon's memory, beside a client that behaves.

    python -m tests.wire._support.upload_attacks [--checkout FOLDER] [--megabytes 15] [ATTACK ...]

An attack is `adds` (24 connections, each with three adds of too many rows at once), `foreign` (the same by an identity
without a right to the topic), `stalled` (40 uploads without a token, whose last byte never comes) or `stalled-token`
(the same with a token); `quiet` is none, for comparison. For each it starts a daemon of the checkout with identities,
and prints what its memory and the lateness of the other client were.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import tarry
from examples.processes import REPOSITORY, DaemonProcess
from tarry.packed_fields import nested, tag_bytes, varint
from tarry.v1 import delayed_delivery_pb2 as pb
from tests._support.door_files import door_files, identity, token_of

ADD = "/tarry.v1.DelayedDelivery/AddMessages"
CONNECTIONS, ADDS_AT_ONCE, UPLOADS = 24, 3, 40
# How long uploads that do not end are held (seconds)
HELD_S = 8.0
_TAGS = tag_bytes(pb.AddMessagesRequest)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an attack did to the daemon (bytes), and the lateness of the client beside it (ms)."""

    before_bytes: int
    most_bytes: int
    after_bytes: int
    answers: dict[str, int]
    sent_bytes: int
    lateness_p99_ms: float
    lateness_max_ms: float
    rows: int

    @property
    def cost_bytes(self) -> int:
        return self.most_bytes - self.before_bytes


def add_of(topic: str, size_bytes: int) -> bytes:
    """An add of so many bytes, most of them entries."""
    entries = np.arange(size_bytes // 8 - 16, dtype="<u8").tobytes()
    one = struct.pack("<Q", 3_600_000)
    return b"".join(
        (
            nested(_TAGS["topic"], topic.encode()),
            nested(_TAGS["ledger_id"], one),
            nested(_TAGS["entry_id"], entries),
            nested(_TAGS["delay_ms"], one),
        )
    )


class Upload:
    """One call on a connection of its own that sends all of its message but the last byte, as far as it may."""

    def __init__(self, address: str, headers: list[tuple[str, str]], size_bytes: int) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._windows = {0: 65_535, 1: 65_535}
        self._initial = 65_535
        self._is_over = False
        self._changed = threading.Condition()
        self.sent_bytes = 0
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0))
        threading.Thread(target=self._read, daemon=True).start()
        block = b"".join(
            b"\x00" + _hpack_text(name) + _hpack_text(value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", ADD),
                (":authority", address),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                *headers,
            )
        )
        self._socket.sendall(_frame(1, 4, 1, block))
        self._left = struct.pack(">BI", 0, size_bytes) + bytes(size_bytes - 1)

    def send(self, until_s: float) -> None:
        """Send what the windows let, until the time or the end of the call."""
        while self._left:
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: self._is_over or min(self._windows.values()) > 0, max(0.0, until_s - time.monotonic())
                )
                if not ready or self._is_over:
                    return
                size = min(16_384, len(self._left), *self._windows.values())
                for stream in self._windows:
                    self._windows[stream] -= size
            try:
                self._socket.sendall(_frame(0, 0, 1, self._left[:size]))
            except OSError:
                return
            self._left = self._left[size:]
            self.sent_bytes += size

    def wait(self, until_s: float) -> bool:
        """Wait for the end of the call; return whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = self._exactly(9)
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
                body = self._exactly(int.from_bytes(head[:3], "big"))
                if kind in (4, 6) and not flags & 1:
                    self._socket.sendall(_frame(kind, 1, 0, body if kind == 6 else b""))
                with self._changed:
                    self._take(kind, flags, stream, body)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == 4 and not flags & 1:
            for name, value in struct.iter_unpack(">HI", body):
                if name == 4:
                    self._windows[1] += value - self._initial
                    self._initial = value
        elif kind == 8:
            self._windows[stream] += int.from_bytes(body, "big")
        elif (kind == 1 and flags & 1) or kind == 3:
            self._is_over = True

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            if not (more := self._socket.recv(size - len(found))):
                raise EOFError
            found += more
        return found


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def _hpack_text(text: str) -> bytes:
    size = len(text)
    return (bytes((size,)) if size < 127 else b"\x7f" + varint(size - 127)) + text.encode()


@contextlib.contextmanager
def beside(address: str) -> Iterator[Callable[[], list[float]]]:
    """A client with 200 rows a second, one second ahead; yields what stops it, and returns how late rows were (ms)."""
    stopped = threading.Event()
    lateness: list[float] = []
    with tarry.Client(address, token=token_of("good"), timeout_s=120) as client:
        client.create_subscription("own/good", "s")

        def receive() -> None:
            with client.subscribe("own/good", "s") as subscription:
                while not stopped.is_set():
                    batch = subscription.receive(timeout_s=0.5)
                    if batch is not None and len(batch):
                        now_ms = time.time() * 1000
                        lateness.extend((now_ms - batch.deliver_at_ms.astype(np.float64)).tolist())
                        subscription.ack(batch)

        def add() -> None:
            entry_id = 0
            with client.producer("own/good") as producer:
                while not stopped.wait(0.005):
                    producer.add(1, entry_id, delay_ms=1_000)
                    entry_id += 1

        threads = [threading.Thread(target=each, daemon=True) for each in (receive, add)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        lateness.clear()

        def stop() -> list[float]:
            time.sleep(2)
            stopped.set()
            for thread in threads:
                thread.join(60)
            return lateness

        yield stop


def adds(address: str, topic: str, token: str, size_bytes: int) -> tuple[dict[str, int], int]:
    """Send the adds of all connections at once; return how often each answer came, and the bytes."""
    request = add_of(topic, size_bytes)
    answers: dict[str, int] = {}
    lock = threading.Lock()

    def connection(_: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options=options) as channel:
            call: Any = channel.unary_unary(ADD)
            metadata = (("authorization", f"Bearer {token}"),)
            for answer in [call.future(request, metadata=metadata, timeout=120) for _ in range(ADDS_AT_ONCE)]:
                with lock:
                    name = answer.code().name
                    answers[name] = answers.get(name, 0) + 1

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(connection, range(CONNECTIONS)))
    return answers, CONNECTIONS * ADDS_AT_ONCE * len(request)


def stalled(address: str, token: str | None, size_bytes: int) -> tuple[dict[str, int], int]:
    """Hold uploads; return how many ended and how many did not, and the bytes that were sent."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    uploads = [Upload(address, headers, size_bytes) for _ in range(UPLOADS)]
    until_s = time.monotonic() + HELD_S
    with ThreadPoolExecutor(UPLOADS) as pool:
        list(pool.map(lambda each: each.send(until_s), uploads))
    ended = sum(each.wait(until_s) for each in uploads)
    for each in uploads:
        each.close()
    return {"ended": ended, "held": UPLOADS - ended}, sum(each.sent_bytes for each in uploads)


def quiet() -> tuple[dict[str, int], int]:
    """Do nothing, for comparison."""
    time.sleep(HELD_S)
    return {}, 0


def attack(name: str, folder: Path, size_bytes: int, *, checkout: Path = REPOSITORY) -> Outcome:
    """Start a daemon of the checkout, attack it, and return what that cost."""
    everything = ["add", "dispatch", "inspect", "admin"]
    files = door_files(folder, identity("good", everything, ["own/"]), identity("other", everything, ["elsewhere/"]))
    settings = {"store.path": folder / "store", "access.identities_file": files.identities}
    with DaemonProcess("attacked", folder, settings, checkout=checkout) as daemon:
        daemon.start()
        address = daemon.address
        calls: dict[str, tuple[Any, ...]] = {
            "adds": (adds, address, "own/good", token_of("good"), size_bytes),
            "foreign": (adds, address, "own/good", token_of("other"), size_bytes),
            "stalled": (stalled, address, None, size_bytes),
            "stalled-token": (stalled, address, token_of("other"), size_bytes),
            "quiet": (quiet,),
        }
        # In a process of its own, so that the client beside it keeps its interpreter
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker, beside(address) as stop:
            attacker.submit(time.sleep, 0).result()
            before_bytes = daemon.usage().resident_bytes
            Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
            answers, sent_bytes = attacker.submit(*calls[name]).result()
            lateness = sorted(stop())
        used = daemon.usage()
    p99_ms = lateness[math.ceil(0.99 * len(lateness)) - 1] if lateness else math.inf
    last_ms = lateness[-1] if lateness else math.inf
    return Outcome(
        before_bytes, used.resident_bytes_max, used.resident_bytes, answers, sent_bytes, p99_ms, last_ms, len(lateness)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("attacks", nargs="*", default=["adds", "foreign", "stalled", "stalled-token"])
    parser.add_argument("--checkout", type=Path, default=REPOSITORY)
    parser.add_argument("--megabytes", type=float, default=15)
    asked = parser.parse_args()
    for name in asked.attacks:
        with tempfile.TemporaryDirectory() as folder:
            found = attack(name, Path(folder), int(asked.megabytes * 1e6), checkout=asked.checkout)
        lines = (
            f"{name} of {asked.megabytes:g} MB: {found.before_bytes / 1e6:.0f} MB, +{found.cost_bytes / 1e6:.0f}",
            f"at most, {found.after_bytes / 1e6:.0f} after; {found.sent_bytes / 1e6:.0f} MB sent, {found.answers};",
            f"the client beside it: {found.rows} rows, p99 {found.lateness_p99_ms:.0f} ms late,",
            f"at most {found.lateness_max_ms:.0f} ms",
        )
        print(*lines, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
