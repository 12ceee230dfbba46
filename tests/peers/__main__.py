"""Prints the table: `python -m tests.peers`."""

from __future__ import annotations

import sys

from tests.peers import table

for line in table.lines():
    sys.stdout.write(f"{line}\n")
