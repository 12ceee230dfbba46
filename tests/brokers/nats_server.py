"""A nats-server with JetStream on a free port of loopback, in a directory of its own, ended with the block that it is
used in.

Owns: finding the program, its settings, start, kill and start again.
Does not own: what is asked of it.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from pathlib import Path

from examples import processes

# JetStream calls a message stored when it is written; here, as of Redis and of Tarry, it is synchronised by then.
_SETTINGS = """
listen: "127.0.0.1:{port}"
jetstream {{
    store_dir: "{directory}"
    sync_interval: "always"
}}
"""
MISSING = "nats-server is not on the PATH, nor beside this Python, where its wheel puts it."


def find() -> Path | None:
    """The program: that on the PATH, or else that of the wheel."""
    found = shutil.which("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))
    return None if found is None else Path(found)


class NatsServer(processes.ChildProcess):
    """`start` after `kill` starts it again on the same port and on what its directory holds."""

    def __init__(self, program: Path, directory: Path) -> None:
        super().__init__("nats", directory, {})
        self.port = processes.free_port()
        self._program = program
        self._settings = directory / "nats.conf"
        self._settings.write_text(_SETTINGS.format(port=self.port, directory=directory / "jetstream"))

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the process runs; it may not answer yet."""
        self._spawn(str(self._program), "--config", str(self._settings))

    def wait_until_loaded(self, timeout_s: float = 300.0) -> None:
        """Returns when it answers, which it does when it has read what it had stored. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_listening():
            self._check_waiting(deadline_s, f"did not answer within {timeout_s:g} s")

    def _is_listening(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0
