"""`tarry-spark`, as it is installed.

Owns: being there without the extra `spark`, to say what to install.
Does not own: the commands (`batch.cli.entry`).
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
