"""A `tarry-relay` as a process, and what it tells of itself.

Owns: its file, start and kill, its metrics and commands. Does not own: what it stands between.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import parser

from examples.processes import ChildProcess
from tests._support.processes import run_program

PROGRAM = (sys.executable, "-m", "tarry_relay.relay_command")


class RelayProcess(ChildProcess):
    """A `tarry-relay run`. `start` after `kill` starts it again."""

    def __init__(
        self, name: str, directory: Path, settings: str, more: str = "", *, program: Sequence[str] = PROGRAM
    ) -> None:
        """`settings`: the file, but for the table `[relay]`. `more`: lines of that."""
        super().__init__(name, directory, {})
        self._program = program
        self.file = directory / f"{name}.toml"
        own = f'[relay]\ntopic = "orders"\nid = "{name}"\nlisten = "127.0.0.1:0"\n'
        self.file.write_text(f"{settings}\n{own}{more}")

    def start(self) -> None:
        """Returns when the process runs."""
        self._spawn(*self._program, "run", str(self.file))

    @property
    def listen(self) -> str:
        """Where it serves metrics and health since its last start. Another process may take a port in between."""
        found = re.findall(r'"message":"serves metrics and health","address":"([^"]+)"', self.log_text())
        return found[-1] if found else "127.0.0.1:1"

    def metric(self, name: str) -> float:
        """The sum of a series; 0.0 while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.listen}/metrics", timeout=10) as response:
                families = list(parser.text_string_to_metric_families(response.read().decode()))
        except OSError:
            return 0.0
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def health(self) -> Any:
        """What it says of its ends."""
        with urllib.request.urlopen(f"http://{self.listen}/health", timeout=10) as response:
            return json.loads(response.read())

    def told(self, command: str) -> Any:
        """What `check` or `status` says."""
        ended = run_program([*self._program, command, str(self.file), "--json"])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return json.loads(ended.stdout)
