"""Prints the table of planted bugs: `python -m tests.planted`."""

from __future__ import annotations

import sys

from tests.planted import bug, registry, table
from tests.simulation.run import AS_IT_COMES

# More than any of them needs.
SEEDS_MAX = 200


def main() -> int:
    """0 when every planted bug is found."""
    missed = 0
    say(f"{'breaks':<15}{'planted bug':<68}{'found by':<24}{'after':<34}broken first")
    for planted in table.BUGS:
        found = bug.search(planted, SEEDS_MAX)
        how = "simulation" if planted.directed is AS_IT_COMES else "simulation, directed"
        after = "NOT FOUND" if found is None else f"{found.seeds} runs, seed {found.seed}, {found.steps} steps"
        breach = "" if found is None else found.breach
        say(f"{planted.breaks:<15}{planted.name:<68}{how:<24}{after:<34}{breach[:90]}")
        missed += found is None
    for rule, suite in table.BY_OTHERS.items():
        say(f"{rule}: found by {suite}")
    others = registry.of_all_suites()
    say("", f"Beside these, {len(others)} planted bugs have a test of their own in the suite that finds them:")
    for row in others:
        say(f"{row.suite:<40}{row.name}")
    return 1 if missed else 0


def say(*lines: str) -> None:
    sys.stdout.write("\n".join((*lines, "")))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
