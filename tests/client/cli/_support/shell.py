"""The command as a user runs it: a process of its own, and pipes.

Owns: running it, and reading what it prints. Does not own: the daemon that it talks to.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests._support import forked
from tests._support.processes import child

TARRY = Path(sys.executable).with_name("tarry")
PATIENCE_S = 600.0


class Shell:
    """Runs command lines of `tarry` against one daemon."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._environment = os.environ | {"TARRY_ADDRESS": address}

    def result(self, line: str, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return forked.run(
            "tarry.cli", line.split(" "), environment=self._environment, stdin=stdin, timeout_s=PATIENCE_S
        )

    def out(self, line: str, *, stdin: str = "") -> str:
        """What it prints; it must succeed."""
        result = self.result(line, stdin=stdin)
        assert result.returncode == 0, f"tarry {line}: {result.stderr}"
        return result.stdout

    @contextlib.contextmanager
    def lines(self, line: str) -> Iterator[Iterator[Any]]:
        """What it prints as it runs, one object of JSON a line; it is ended with the block."""
        with child([str(TARRY), *line.split(" ")], env=self._environment, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            yield map(json.loads, running.stdout)

    def parsed(self, line: str, *, stdin: str = "") -> Any:
        """Its one line of JSON."""
        return json.loads(self.out(f"{line} --json", stdin=stdin))
