"""How a measurement is shown: a table for people, JSON for programs.

Owns: the drawing, and what the daemon used of the machine while it was measured.
Does not own: what is measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time

import rich.box
from rich.console import Console
from rich.table import Table

from examples import processes

Value = float | int | str | bool
_MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Named values, the unit last in each name."""

    name: str
    values: dict[str, Value]

    def show(self, *, as_json: bool) -> None:
        """Prints to standard output."""
        if as_json:
            print(json.dumps({"measurement": self.name, **self.values}, indent=2))
            return
        table = Table(title=self.name, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
        table.add_column()
        table.add_column(justify="right")
        for name, value in self.values.items():
            table.add_row(name, _text(value))
        Console().print(table)


class Usage:
    """CPU of the daemon and of this process from the making on, and the daemon's memory."""

    def __init__(self, daemon: processes.DaemonProcess) -> None:
        self._daemon = daemon
        self._daemon_before = daemon.usage()
        self._own_before = processes.usage(os.getpid())
        self._began_s = time.monotonic()

    def values(self) -> dict[str, Value]:
        """Until now. CPU in percent of one core."""
        seconds = time.monotonic() - self._began_s
        after, own = self._daemon.usage(), processes.usage(os.getpid())
        return {
            "daemon_cpu_percent": round(100 * (after.cpu_s - self._daemon_before.cpu_s) / seconds, 1),
            "client_cpu_percent": round(100 * (own.cpu_s - self._own_before.cpu_s) / seconds, 1),
            "daemon_resident_idle_mib": round(self._daemon_before.resident_bytes / _MEBIBYTE, 1),
            "daemon_resident_mib": round(after.resident_bytes / _MEBIBYTE, 1),
            "daemon_resident_highest_mib": round(after.resident_bytes_max / _MEBIBYTE, 1),
        }


def machine() -> dict[str, Value]:
    """Where it was measured."""
    return {"cores": os.cpu_count() or 0, "python": platform.python_version()}


def _text(value: Value) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
