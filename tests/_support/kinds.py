"""What kind of test each is, by where it stands and what it takes: `pytest -m wire`.

Owns: the kinds, the folders and the fixtures. Does not own: the markers' texts (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# The first that fits; a test that fits none, and takes no whole daemon, is a unit test: one thing, in this process,
# without sockets.
KINDS: Mapping[str, tuple[str, ...]] = {
    "simulation": ("simulation/", "planted/", "models/"),
    "wire": (
        "wire/",
        "batch/compaction/test_job_sigkill",
        "batch/compaction/test_jobs_at_once",
        "batch/compaction/test_live_job",
        "batch/compaction/test_submitted_job",
        "benchmarks/",
        "brokers/",
        "client/cli/",
        "client/conformance/",
        "deploy/",
        "golden_root/",
        "peers/test_many_clients",
        "relay/brokers/",
        "test_installed",
    ),
    "integration": (
        "batch/",
        "contract/",
        "daemon/group_commit/test_log_walks",
        "daemon/grpc_services/",
        "daemon/hot_paths/",
        "daemon/ledger_deletion/",
        "daemon/owner/",
        "daemon/shard/",
        "daemon/topic/",
        "peers/",
    ),
}


# The fixture with which a test of any other folder is one of several rooms together.
WHOLE_DAEMONS = "machines"


def kind_of(name: str, fixtures: Collection[str] = ()) -> str:
    """Of a test by its node id below `tests/`, and its fixtures."""
    kind = next((kind for kind, places in KINDS.items() if name.startswith(places)), "unit")
    return "integration" if kind == "unit" and WHOLE_DAEMONS in fixtures else kind
