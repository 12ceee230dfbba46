"""Starts the `tarry` command.

Without the extra `cli` it prints what to install; `tarry.cli.commands` has the commands.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line and exit with its status."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"tarry: {' and '.join(missing)} missing: install tarry with its extra, tarry[cli]: docs/INSTALL.md",
            file=sys.stderr,
        )
        sys.exit(1)
    from tarry.cli import commands

    commands.tarry()
