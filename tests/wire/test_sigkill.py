"""SIGKILL at random moments, round after round on one root that grows."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from examples import processes
from tests._support.delivery_history import DeliveryHistory
from tests._support.processes import Daemons
from tests.wire._support import traffic

ROUNDS, LONG_ROUNDS = 8, 20
TOPICS = ("north", "south")
# Small, so that every round seals, loads, writes checkpoints and deletes slots.
SETTINGS: dict[str, object] = {
    "daemon.shards": 4,
    "bucket.min_index_count_per_bucket": 1_000,
    "bucket.rows_max": 4_000,
    "bucket.max_indexes_per_bucket_snapshot_segment": 200,
    "bucket.min_indexes_per_bucket_snapshot_segment": 50,
    "bucket.max_time_step_per_bucket_snapshot_segment_seconds": 1,
    "journal.checkpoint_slots": 40,
    "delivery.lookahead_ms": 2_000,
}


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [
        *(pytest.param(seed, ROUNDS, marks=pytest.mark.rotating) for seed in range(2013, 2017)),
        *(pytest.param(seed, LONG_ROUNDS, marks=pytest.mark.long) for seed in range(5)),
    ],
)
def test_what_was_answered_comes_and_nothing_early_through_kills_at_random_moments(
    seed: int, rounds: int, daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(seed)
    history = DeliveryHistory()
    daemon = daemons.make("tarryd", SETTINGS | processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    far_ms = traffic.now_ms() + 2_500 * rounds

    def due(rng: random.Random, base_ms: int) -> int:
        kind = rng.random()
        if kind < 0.2:
            return base_ms - rng.randint(0, 1_000)
        if kind < 0.7 or base_ms > far_ms:
            return base_ms + rng.randint(0, 3_000)
        return rng.randint(base_ms, far_ms)

    for topic in TOPICS:
        traffic.create_subscription(daemon.address, topic)
    with_seed = [random.Random(rng.random()) for _ in range(2 * len(TOPICS))]
    senders = [
        traffic.Sender(daemon.address, topic, history, rng=with_seed.pop(), due=due, ledgers_from=1_000_000 * number)
        for number, topic in enumerate(TOPICS, start=1)
    ]
    receivers = [traffic.Receiver(daemon.address, topic, history, rng=with_seed.pop()) for topic in TOPICS]
    for caller in (*senders, *receivers):
        caller.__enter__()
        request.addfinalizer(caller.stop)

    _kill_round_after_round(daemon, rng, rounds)
    for sender in senders:
        sender.finish()
    for receiver in receivers:
        receiver.finish()
    history.wait_for(lambda: history.missing == 0, 600, "every answered row comes")
    for topic in TOPICS:
        traffic.wait_until_nothing_is_left(daemon.address, topic)

    assert history.breaches() == []
    assert history.stale == 0
    assert history.repeats > 0, "no kill met rows in flight: the test shows nothing"
    assert any(sender.refusals for sender in senders), "no kill met an add: the test shows nothing"


def _kill_round_after_round(daemon: processes.DaemonProcess, rng: random.Random, rounds: int) -> None:
    """Every kill comes at a random moment: of serving, and in each fourth round of starting and recovering."""
    moment = threading.Event()
    for number in range(rounds):
        if number % 4 == 3:
            moment.wait(rng.uniform(0.0, 0.6))
        else:
            daemon.wait_for_health(serving=True)
            moment.wait(rng.uniform(0.2, 2.5))
        daemon.kill()
        daemon.start()
    daemon.wait_for_health(serving=True)
