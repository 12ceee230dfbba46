"""SIGKILL while tens of thousands of positions wait for their redelivery, and more are asked for and come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples import processes
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from tests._support.processes import Daemons
from tests.wire._support import traffic
from tests.wire._support.nack_traffic import ROWS, Expected, Key, NackTraffic

# By topic, how exact redelivery times are.
TOPICS = {"exact": 0, "a quarter of a second": 8, "two seconds": 11}
# Small, so that the log is written to checkpoints, and its slots are deleted, all the time.
SETTINGS: dict[str, object] = {
    "daemon.shards": 2,
    # A file of slots goes as a whole.
    "store.log_form": "objects",
    "bucket.min_index_count_per_bucket": 2_000,
    "bucket.rows_max": 4_000,
    "journal.checkpoint_slots": 8,
    "delivery.lookahead_ms": 2_000,
}


def expected_of(rng: random.Random, thousands: int, delay_max_ms: int) -> dict[Key, Expected]:
    """Of a topic, thousands of each: rows that were added, of which a quarter is negatively acknowledged twice;
    messages that Tarry never had, as a whole and as parts of batches.
    """
    rows, due_ms = thousands * ROWS, traffic.now_ms()

    def delay_ms() -> int:
        return rng.randint(0, 3_000) if rng.random() < 0.1 else rng.randint(5_000, delay_max_ms)

    expected: dict[Key, Expected] = {}
    for number in range(rows):
        delays_ms = (rng.randint(0, 500), delay_ms()) if number < rows // 4 else (delay_ms(),)
        expected[1, number, NO_BATCH_INDEX] = Expected(due_ms, delays_ms)
    for number in range(rows):
        expected[rng.choice((2, 1 << 63)), number, NO_BATCH_INDEX] = Expected(0, (delay_ms(),))
    for number in range(rows):
        expected[3, number // 5, number % 5] = Expected(0, (delay_ms(),))
    return expected


# The daemon has work in each millisecond in which something comes back.
@pytest.mark.parametrize(("thousands", "delay_max_ms"), [(4, 9_000), pytest.param(12, 18_000, marks=pytest.mark.long)])
def test_what_was_nacked_comes_back_at_its_time_and_with_its_count_though_the_daemon_is_killed_meanwhile(
    thousands: int, delay_max_ms: int, daemons: Daemons, tmp_path: Path
) -> None:
    rng = random.Random(393)
    daemon = daemons.make("tarryd", SETTINGS | processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    expected = {topic: expected_of(rng, thousands, delay_max_ms) for topic in TOPICS}
    assert sum(map(len, expected.values())) == 9 * thousands * ROWS
    asyncio.run(through_a_kill(daemon, expected, tmp_path / "root"))


async def through_a_kill(
    daemon: processes.DaemonProcess, expected: Mapping[str, dict[Key, Expected]], root: Path
) -> None:
    clients = [NackTraffic(daemon.address, topic, bits, expected[topic]) for topic, bits in TOPICS.items()]
    positions = sum(len(client.expected) for client in clients)
    running = asyncio.gather(*(client.run() for client in clients))

    async with asyncio.timeout(600):
        # Most wait, some come back already, and requests are under way.
        while sum(each.answered for each in clients) < 0.9 * positions or not any(each.under_way for each in clients):
            assert not running.done(), [client.breaches[:3] for client in clients]
            await asyncio.sleep(0.02)
    waiting = sum(client.waiting for client in clients)
    came_back = sum(client.came_back for client in clients)
    slots, last_slots = slots_of(root)
    daemon.kill()
    await asyncio.to_thread(daemon.start_serving)
    async with asyncio.timeout(600):
        await running

    assert [breach for client in clients for breach in client.breaches[:5]] == []
    assert slots < sum(last_slots), "no slot was deleted: the test shows nothing"
    assert waiting >= positions // 3, "hardly anything waited: the test shows nothing"
    assert came_back > 0, "no kill met a hand-out: the test shows nothing"
    for topic in TOPICS:
        left = traffic.stats(daemon.address, topic)
        assert [(each.nacked, each.backlog, each.in_flight) for each in left.subscriptions] == [(0, 0, 0)]


def slots_of(root: Path) -> tuple[int, list[int]]:
    """(how many there are, the highest of each log)."""
    logs = [
        [int(path.name) for path in log.rglob("*") if path.is_file() and path.name.isdigit()]
        for log in (root / "logs").iterdir()
    ]
    return sum(map(len, logs)), [max(each, default=0) for each in logs]
