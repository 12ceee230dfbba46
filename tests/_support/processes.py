"""Processes for a test: they end with it, whatever becomes of it, and the logs of daemons are shown when it fails.

Owns: the list of daemons that a test started, and the end of other children. Does not own: the daemons themselves
(`examples.processes`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tarry
from examples.processes import REPOSITORY, TARRYD, DaemonProcess, guard
from tests._support import forked

_LOG_TAIL_CHARACTERS = 8_000


@contextlib.contextmanager
def child(command: Sequence[str], **named: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process with the arguments of `subprocess.Popen`. It is killed at the end of the block, and when this process
    is gone.
    """
    with subprocess.Popen(command, **named) as process:
        guard.watch(process.pid)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            guard.forget(process.pid)


def run_child(command: Sequence[str], *, timeout_s: float = 600.0, **named: Any) -> subprocess.CompletedProcess[str]:
    """Its status and what it printed. Raises `subprocess.TimeoutExpired`, when it is ended."""
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **named) as process:
        output, log = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, output, log)


def run_program(
    command: Sequence[str], *, folder: Path = REPOSITORY, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """As `run_child`; what is one of `forked.PROGRAMS` begins with its program loaded."""
    module = forked.program_of(command)
    if module is None:
        return run_child(command, cwd=folder, env=environment)
    return forked.run(module, command[3:], environment=environment, folder=folder)


class Daemons:
    """Makes daemons whose ports, logs and ready files are their own; `end` kills them, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[DaemonProcess] = []

    def make(
        self,
        name: str,
        settings: Mapping[str, object],
        *,
        daemon_id: str | None = None,
        configuration: str = "",
        program: Sequence[str] = TARRYD,
        tls: tarry.Tls | None = None,
    ) -> DaemonProcess:
        """A daemon that is not started yet. `name` names its log, and is its id unless `daemon_id` says otherwise.
        `program`: what takes the place of `tarryd`. `tls`: what its clients need, None without TLS.
        """
        daemon = DaemonProcess(
            name, self._directory, settings, daemon_id=daemon_id, configuration=configuration, program=program, tls=tls
        )
        self._made.append(daemon)
        return daemon

    def end(self) -> None:
        """Kills what is alive. pytest shows what is printed here with a test that failed."""
        for daemon in self._made:
            daemon.kill()
            sys.stdout.write(f"---- the end of the log of {daemon.name}\n{daemon.log_text()[-_LOG_TAIL_CHARACTERS:]}\n")
