"""The `tarry` command.

Owns: being there without the extra `cli`, to say what to install.
Does not own: the commands (`tarry.cli.commands`).
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Runs the command line and exits with its status."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"tarry: {' and '.join(missing)} missing: install tarry with its extra, tarry[cli]: docs/INSTALL.md",
            file=sys.stderr,
        )
        sys.exit(1)
    from tarry.cli import commands

    commands.tarry()
