"""SIGKILL of the owner while consumers on two dispatchers share keys, and another daemon takes over."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from examples import processes
from tests._support.processes import Daemons
from tests.wire._support import key_traffic, traffic
from tests.wire._support.key_history import KeyHistory

ADDED, PLANNED = 3_000, 2_000
CONSUMERS_OF_DISPATCHER = 3
BATCH, PAUSE_S = 20, 0.04
SETTINGS: dict[str, object] = {
    "daemon.shards": 2,
    "bucket.min_index_count_per_bucket": 500,
    "bucket.rows_max": 1_000,
    "journal.checkpoint_slots": 40,
    "delivery.lookahead_ms": 1_000,
    # That a process has ended is told by its lock: no heartbeat is missed because the machine is busy.
    "ownership.heartbeat_interval_s": 60,
}


@pytest.mark.parametrize("seed", [282, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5))])
def test_keys_keep_their_order_and_one_consumer_though_their_owner_is_killed(
    seed: int, daemons: Daemons, tmp_path: Path
) -> None:
    settings = SETTINGS | processes.local_store(tmp_path / "root")
    owner, successor = (daemons.make(name, settings) for name in ("owner", "successor"))
    owner.start_serving()
    successor.start()
    asyncio.run(through_a_takeover(owner, successor, random.Random(seed), seed))


async def through_a_takeover(
    owner: processes.DaemonProcess, successor: processes.DaemonProcess, rng: random.Random, seed: int
) -> None:
    addresses = (owner.address, successor.address)
    await key_traffic.create_subscription(owner.address)
    delays, added, planned = key_traffic.rows_of(rng, added=ADDED, planned=PLANNED)
    history = KeyHistory([*added, *planned])
    adder = key_traffic.Adder(addresses, history, delays)
    dispatchers = [
        key_traffic.Dispatcher(name, addresses, history, consumers=CONSUMERS_OF_DISPATCHER, planned=log, seed=seed)
        for name, log in (("planning", planned), ("other", []))
    ]
    batches = [added[first : first + BATCH] for first in range(0, ADDED, BATCH)]
    running = [
        asyncio.ensure_future(work)
        for work in (adder.run(batches, PAUSE_S), *(dispatcher.run() for dispatcher in dispatchers))
    ]
    try:
        await key_traffic.reached(lambda: history.acknowledged > len(history.rows) / 3, running, history)
        await key_traffic.reached(lambda: all(each.under_way and each.held for each in dispatchers), running, history)
        owner.kill()
        killed_at = history.acknowledged
        await key_traffic.reached(lambda: history.all_acknowledged, running, history)
        await nothing_left(successor.address)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    assert history.breaches[:5] == []
    assert killed_at < 0.9 * len(history.rows), "the kill came when nearly all was done: the test shows nothing"
    assert sum(row.in_time for row in added) > ADDED / 2, "most rows were late: the test shows nothing"
    assert all(dispatcher.streams > 1 for dispatcher in dispatchers), "no takeover: the test shows nothing"
    assert sum(dispatcher.declared - dispatcher.not_held for dispatcher in dispatchers), "nothing was held on"
    assert history.taken_back, "nothing was taken back: the test shows nothing"
    assert history.moved_slots, "no key moved: the test shows nothing"
    assert dispatchers[0].planned_again, "nothing was planned again: the test shows nothing"


async def nothing_left(address: str) -> None:
    """Waits until the backlog is empty, of what is to come back, too."""
    async with asyncio.timeout(600):
        while True:
            stats = await asyncio.to_thread(traffic.stats, address, key_traffic.TOPIC)
            left = [(each.backlog, each.nacked, each.in_flight) for each in stats.subscriptions]
            if not stats.pending and left == [(0, 0, 0)]:
                return
            await asyncio.sleep(PAUSE_S)
