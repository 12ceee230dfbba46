"""What kind of test each is, by where it stands: `pytest -m wire`.

Owns: the kinds and the folders. Does not own: the markers' texts (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Mapping

# The first that fits; a test that fits none is a unit test: one thing, in this process, without sockets.
KINDS: Mapping[str, tuple[str, ...]] = {
    "simulation": ("simulation/", "planted/", "models/"),
    "wire": (
        "wire/",
        "benchmarks/",
        "brokers/",
        "client/cli/",
        "client/conformance/",
        "compaction/test_job_sigkill",
        "compaction/test_jobs_at_once",
        "compaction/test_live_job",
        "compaction/test_submitted_job",
        "deploy/",
        "golden_root/",
        "peers/test_many_clients",
        "relay/brokers/",
        "test_installed",
    ),
    "integration": (
        "audit/",
        "compaction/",
        "contract/",
        "daemon/engine/",
        "daemon/grpc_services/",
        "daemon/hot_paths/",
        "daemon/owner/",
        "daemon/shard/",
        "daemon/topic/",
        "forecast/",
        "job_commands/",
        "jobs/",
        "peers/",
        "spark_tables/",
    ),
}


def kind_of(name: str) -> str:
    """Of a test by its node id below `tests/`."""
    return next((kind for kind, places in KINDS.items() if name.startswith(places)), "unit")
