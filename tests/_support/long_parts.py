"""The parts of `make test-long`: each test belongs to one of them, by where it stands.

Owns: their names and places. Does not own: the sixteenths that a run of every test has (`parts`), the option
(`tests.conftest`), and the part `mutants`, which is a program (`tests.planted.mutants`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tests._support import kinds

# The first that fits; what fits none is of `PROCESSES` when it is of the kind `wire`, and of `REST` otherwise.
PLACES: Mapping[str, tuple[str, ...]] = {
    "simulation": (
        "simulation/",
        "planted/",
        "models/",
        "batch/audit/test_audit_simulation",
        "batch/compaction/test_interleaved_job",
    ),
    "relay": ("relay/",),
    "spark": ("batch/",),
}
BROKERS = "brokers"
PROCESSES = "processes"
REST = "rest"
NAMES = (*PLACES, BROKERS, PROCESSES, REST)


def part_of(name: str) -> str:
    """Return the part of a test by its node id below `tests/`."""
    if name.startswith("brokers/") or (name.startswith("relay/brokers/") and "kafka" in name):
        return BROKERS
    part = next((part for part, places in PLACES.items() if name.startswith(places)), None)
    if part is not None:
        return part
    return PROCESSES if kinds.kind_of(name) == "wire" else REST
