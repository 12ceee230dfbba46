"""What `BucketDelayedDeliveryTrackerThreadSafetyTest` is after. The daemon is one loop: its threads are its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import processes
from tests._support.processes import Daemons
from tests.peers import many_clients, planted_daemon

# Small, so that buckets are sealed and a checkpoint is written while clients read.
SETTINGS: dict[str, object] = {
    "daemon.shards": 1,
    "bucket.min_index_count_per_bucket": 500,
    "bucket.rows_max": 1_500,
    "journal.checkpoint_slots": 40,
}


def test_counts_of_16_producers_are_exact_and_20_readers_see_all_that_was_answered(
    daemons: Daemons, tmp_path: Path
) -> None:
    daemon = daemons.make("tarryd", SETTINGS | processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    count = many_clients.Load(daemon.address).run()
    assert count.breaches == []
    assert count.reads > many_clients.READERS, "nobody looked meanwhile: the test shows nothing"
    assert count.buckets > 1, "nothing was sealed meanwhile: the test shows nothing"


class PlantedDaemon(processes.DaemonProcess):
    """A daemon with a bug of `planted_daemon`."""

    def __init__(self, bug: str, directory: Path, settings: dict[str, object]) -> None:
        super().__init__("planted", directory, settings)
        self._bug = bug

    def _spawn(self, *command: str) -> None:
        python, option, _, *rest = command
        super()._spawn(python, option, "tests.peers.planted_daemon", self._bug, *rest)


@pytest.mark.rotating
@pytest.mark.parametrize("bug", planted_daemon.BUGS)
def test_a_planted_bug_is_found_by_them(bug: str, tmp_path: Path) -> None:
    daemon = PlantedDaemon(bug, tmp_path, SETTINGS | processes.local_store(tmp_path / "root"))
    try:
        daemon.start_serving()
        assert many_clients.Load(daemon.address).run().breaches
    finally:
        daemon.kill()
