"""Traces which files an add, a nack, a seal and a takeover pass, and which calls go up to a higher room.

A daemon runs in this process, on a directory of its own, and a client in a thread next to it. For each story the calls
between the files of this checkout are noted, except those that an idle daemon makes as well. The rooms and their order
are those of the contract of imports in pyproject.toml. A turn is a pair of files: the first is in a lower room than the
second, which it calls, through a port or a callback.

Run it in the environment of the checkout: `python scripts/trace_rooms.py`; `--edges` prints every turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

CHECKOUT = Path.cwd()
PACKAGES = {"daemon": "daemon", "storage_backends": "storage_backends", "client/src/tarry": "tarry"}
GENERATED = "_pb2.py"
TOPIC = "trace"
IDLE_S = 3.0
# No row with this delay comes due while the stories run.
FAR_MS = 3_600_000

Call = tuple[str, str, str]
"""The file that calls, the one that is called, and its function"""


@dataclasses.dataclass(frozen=True)
class Rooms:
    """The floors of the daemon's modules: 0 is the highest room. Storage is below all of them."""

    floors: dict[str, int]

    @classmethod
    def of_checkout(cls) -> Rooms:
        settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
        contract = next(
            each for each in settings["tool"]["importlinter"]["contracts"] if "daemon's layers" in each["name"]
        )
        return cls({room.strip(): floor for floor, rooms in enumerate(contract["layers"]) for room in rooms.split("|")})

    def floor(self, file: str) -> int | None:
        """Return the floor of a file, or None for one outside the rooms of daemon and storage."""
        package, _, rest = file.partition("/")
        if package == "storage_backends":
            return len(self.floors)
        return self.floors.get(rest.partition("/")[0].removesuffix(".py")) if package == "daemon" else None

    def turns(self, calls: set[Call]) -> list[tuple[str, str]]:
        edges = {(caller, callee) for caller, callee, _ in calls}
        return sorted(edge for edge in edges if self._is_turn(*edge))

    def _is_turn(self, caller: str, callee: str) -> bool:
        below, above = self.floor(caller), self.floor(callee)
        return below is not None and above is not None and below > above


class Tracer:
    """A recorder of calls, of all threads that begin after `watch`, and of the one that calls it, while it is on."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._calls: set[Call] | None = None

    def watch(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def during(self, story: Callable[[], object]) -> set[Call]:
        self._calls = calls = set[Call]()
        try:
            story()
        finally:
            self._calls = None
        return calls

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        calls = self._calls
        # Neither modules nor classes that are being made
        if calls is None or event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        callee = self._file(frame.f_code.co_filename)
        caller = "" if frame.f_back is None else self._file(frame.f_back.f_code.co_filename)
        if callee:
            calls.add((caller, callee, frame.f_code.co_name))

    def _file(self, path: str) -> str:
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = _own_name(path)
        return found


def _own_name(path: str) -> str:
    """Return its name below its package, or an empty text for a file that is not ours or was generated."""
    for folder, package in PACKAGES.items():
        root = f"{CHECKOUT / folder}/"
        if path.startswith(root) and not path.endswith(GENERATED):
            return f"{package}/{path[len(root) :]}"
    return ""


class Stories:
    """The actions of a client, one after the other."""

    def __init__(self, tracer: Tracer, ready: Path) -> None:
        self.found: dict[str, set[Call]] = {}
        self._tracer = tracer
        self._ready = ready

    def tell(self) -> None:
        try:
            self.found["takeover"] = self._tracer.during(self._until_ready)
            self._ask()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _until_ready(self) -> None:
        while not self._ready.exists():
            time.sleep(0.02)

    def _ask(self) -> None:
        import tarry

        with tarry.Client(json.loads(self._ready.read_text())["grpc"]) as client:
            client.create_subscription(TOPIC, "s")
            with client.subscribe(TOPIC, "s") as subscription:
                self._add_and_take(client, subscription, 0)
                idle = self._tracer.during(lambda: time.sleep(IDLE_S))
                self.found["add, hand-out, acknowledgement"] = (
                    self._tracer.during(lambda: self._add_and_take(client, subscription, 1)) - idle
                )
                client.add(TOPIC, 1, [2], delay_ms=300)
                batch = subscription.receive(timeout_s=60)
                self.found["negative acknowledgement, redelivery"] = (
                    self._tracer.during(lambda: self._nack(subscription, batch)) - idle
                )
                client.add(TOPIC, 1, [3], delay_ms=FAR_MS)
                self.found["seal"] = self._tracer.during(lambda: client.seal(TOPIC)) - idle

    def _add_and_take(self, client: Any, subscription: Any, entry: int) -> None:
        client.add(TOPIC, 1, [entry], delay_ms=300)
        batch = subscription.receive(timeout_s=60)
        subscription.ack(batch).result(60)

    def _nack(self, subscription: Any, batch: Any) -> None:
        subscription.nack(batch, delay_ms=300).result(60)
        subscription.receive(timeout_s=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", action="store_true", help="every turn")
    chosen = parser.parse_args()
    tracer, rooms = Tracer(), Rooms.of_checkout()
    with tempfile.TemporaryDirectory(prefix="tarry-trace-") as folder:
        ready = Path(folder, "ready")
        stories = Stories(tracer, ready)
        tracer.watch()
        threading.Thread(target=stories.tell, daemon=True).start()
        from daemon.main import main as tarryd

        sys.argv = ["tarryd"]
        tarryd(
            [
                f"--set=store.path={folder}/root",
                "--set=grpc.listen=127.0.0.1:0",
                "--set=metrics.listen=127.0.0.1:0",
                "--set=log.level=warning",
                f"--ready-file={ready}",
            ]
        )
        sys.setprofile(None)
    for name, calls in stories.found.items():
        files = {callee for _, callee, _ in calls}
        turns = rooms.turns(calls)
        print(f"{name}: {len(files)} files, {len(turns)} turns")
        for caller, callee in turns if chosen.edges else ():
            print(f"    {caller} -> {callee}")


if __name__ == "__main__":
    main()
