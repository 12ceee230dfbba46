"""Starts the `tarry` command with gRPC's own log lines off.

A module outside the package, because gRPC reads its settings when it is loaded, and `import tarry` loads it.
"""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line and exit with its status."""
    # gRPC would print several lines before the command's message about the same failure.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tarry import cli

    cli.main()


if __name__ == "__main__":
    main()
