"""A nats-server with JetStream on a free port of loopback, in a directory of its own, ended with the block that it is
used in.

Owns: finding the program, its settings, start, kill and start again.
Does not own: what is asked of it.

What it has answered survives its own end. Of a machine that fails it may lose two minutes, as is its default: told to
synchronise always, it does so for each message by itself, some hundreds a second.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples import processes

MISSING = "nats-server is not on the PATH, nor beside this Python, where its wheel puts it."


def find() -> Path | None:
    """The program: that on the PATH, or else that of the wheel."""
    found = shutil.which("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))
    return None if found is None else Path(found)


class NatsServer(processes.ChildProcess):
    """`start` after `kill` starts it again on the same port and on what its directory holds. `more`: its own flags."""

    def __init__(self, program: Path, directory: Path, more: Sequence[str] = ()) -> None:
        super().__init__("nats", directory, {})
        self.port = processes.free_port()
        self._program = program
        self._directory = directory
        self._more = more

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the process runs; it may not answer yet."""
        listen = ("--addr", "127.0.0.1", "--port", str(self.port))
        self._spawn(str(self._program), *listen, "--jetstream", "--store_dir", str(self._directory), *self._more)

    def wait_until_loaded(self, timeout_s: float = 300.0) -> None:
        """Returns when it answers, which it does when it has read what it had stored. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_listening():
            self._check_waiting(deadline_s, f"did not answer within {timeout_s:g} s")

    def suspend(self) -> None:
        """Suspend the process, and return when it does nothing more."""
        self.stop()
        while not re.search(r"^State:\s+T", Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8"), re.MULTILINE):
            self._check_waiting(time.monotonic() + 300.0, "was not suspended")

    def _is_listening(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0
