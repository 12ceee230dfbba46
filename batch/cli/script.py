"""Starts `tarry-spark` as installed: without the extra `spark`, says what to install.

It imports `batch.cli.entry`, which needs that extra, only if it is there.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line and exit with its status."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        sys.exit(f"tarry-spark: {names} missing; install tarryd[spark] (docs/INSTALL.md)")
    from batch.cli import entry

    entry.main()
