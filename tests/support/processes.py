"""Daemons as processes for a test: they end with it, and their logs are shown when it fails.

Owns: the list of processes that a test started. Does not own: the processes themselves (`examples.processes`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from examples.processes import DaemonProcess

_LOG_TAIL_CHARACTERS = 8_000


class Daemons:
    """Makes daemons whose ports, logs and ready files are their own; `end` kills them, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[DaemonProcess] = []

    def make(
        self, name: str, settings: Mapping[str, object], *, daemon_id: str | None = None, configuration: str = ""
    ) -> DaemonProcess:
        """A daemon that is not started yet. `name` names its log, and is its id unless `daemon_id` says otherwise."""
        daemon = DaemonProcess(name, self._directory, settings, daemon_id=daemon_id, configuration=configuration)
        self._made.append(daemon)
        return daemon

    def end(self) -> None:
        """Kills what is alive. pytest shows what is printed here with a test that failed."""
        for daemon in self._made:
            daemon.kill()
            sys.stdout.write(f"---- the end of the log of {daemon.name}\n{daemon.log_text()[-_LOG_TAIL_CHARACTERS:]}\n")
