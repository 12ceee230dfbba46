"""Two daemons of one root, one of which serves while the other stands by."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from examples import processes
from tests._support import patience
from tests.wire._support import traffic

# Small, so that every round seals, loads, writes checkpoints and deletes slots, and objects that left are collected.
SETTINGS: dict[str, object] = {
    "daemon.shards": 4,
    "bucket.min_index_count_per_bucket": 500,
    "bucket.rows_max": 1_000,
    "bucket.max_indexes_per_bucket_snapshot_segment": 200,
    "bucket.min_indexes_per_bucket_snapshot_segment": 50,
    "bucket.max_num_buckets": 4,
    "journal.checkpoint_slots": 40,
    "delivery.lookahead_ms": 2_000,
    "collection.interval_s": 2,
    "collection.grace_s": 5,
    "ownership.heartbeat_interval_s": 1,
}


class Pair:
    """The two, and which of them serves. `topics`: some that there are."""

    def __init__(self, pair: Sequence[processes.DaemonProcess], topics: Sequence[str]) -> None:
        self.pair = pair
        self._topics = topics

    def start(self) -> None:
        """Start both; the first one serves."""
        self.pair[0].start_serving()
        self.pair[1].start()

    def owner_and_other(self) -> tuple[processes.DaemonProcess, processes.DaemonProcess]:
        """Who serves, and who stands by."""
        serving: list[processes.DaemonProcess] = []

        def look() -> bool:
            serving[:] = [daemon for daemon in self.pair if daemon.is_serving(traffic.PATIENCE_S)]
            return len(serving) == 1

        patience.wait_until(look, "one of the two serves", timeout_s=traffic.PATIENCE_S)
        return serving[0], next(daemon for daemon in self.pair if daemon is not serving[0])

    def epoch_at(self, daemon: processes.DaemonProcess) -> int:
        """The lowest of all topics; one that is being loaded, or that it does not own yet, is waited for."""
        epochs: list[int] = []

        def look() -> bool:
            try:
                epochs[:] = [traffic.stats(daemon.address, topic).epoch for topic in self._topics]
            except grpc.RpcError as error:
                if traffic.code_of(error) not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
                    raise
                return False
            return True

        patience.wait_until(look, f"{daemon.name} has loaded its topics", timeout_s=traffic.PATIENCE_S)
        return min(epochs)
