"""What a topic needs of its log, and a large trim of it: how long they take, and how long another topic waits for it.

The rows of the large topic lie in many buckets, and each bucket has rows of every ledger in no order: the worst case.
The other topic has one row a tick: it is added, due at once, received and acknowledged, in a process of its own.

Owns: the load, the statistics. Does not own: the heartbeat of the daemon (`seal_pause`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Mapping
from multiprocessing.connection import Connection

import numpy as np

import tarry
import tarry.aio
from benchmarks import load, report, seal_pause, side_process, tarry_load, workbench
from examples import processes

NAME = "retention"
OTHER, SUBSCRIPTION = "retention-other", "dispatcher"
LEDGERS = 1_000
TICK_S = 0.01
SETTLE_S = 3.0
PATIENCE_S = 120.0
EVERY, NAMED, TRIM = "retention of every ledger", "retention of named ledgers", "trim"
ALONE, BESIDE = "other topic alone", "other topic beside the trim"
ADDED, CAME = "add answered", "row received"


def run(bench: workbench.Workbench) -> report.Result:
    count, buckets = bench.size(10_000_000, 40_000), bench.size(200, 20)
    rounds = workbench.Rounds(bench, NAME)
    for number in range(1, bench.rounds + 1):
        rounds.turn(f"round {number} of {bench.rounds}", functools.partial(_turn, bench, rounds, count, buckets))
    figures = [rounds.figure(name, "ms") for name in (EVERY, f"{EVERY}, longest pause", NAMED, TRIM)]
    for name in (ADDED, CAME):
        figures += [rounds.figure(f"{ALONE}, {name}, p99", "ms")]
        figures += [rounds.figure(f"{BESIDE}, {name}, p99", "ms", report.Goal(most=50))]
        figures += [rounds.figure(f"{BESIDE}, {name}, max", "ms")]
    parameters = {"rows": count, "buckets": buckets, "ledgers": LEDGERS, "rows_trimmed": count // 20}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, count: int, buckets: int) -> Mapping[str, float]:
    settings = {
        "bucket.rows_max": count // buckets,
        "bucket.min_index_count_per_bucket": count // buckets,
        "bucket.max_num_buckets": 10 * buckets,
    }
    with bench.daemon(settings=settings) as daemon, tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        added = 0
        for batch in _scattered(count, bench.seed).batches(bench.batch_rows):
            added += client.add(NAME, batch.ledger_id, batch.entry_id, deliver_at_ms=batch.deliver_at_ms).accepted
        rounds.check_count("added", added, count)
        tarry_load.wait_for(client, NAME, "sealed it", lambda stats: stats.mutable_rows < count // buckets)
        figures = _looks(client, daemon, rounds)
        with side_process.SideProcess(_tick, daemon.address) as other:
            time.sleep(SETTLE_S)
            began_s = time.monotonic()
            trimmed = client.trim(NAME, range(LEDGERS), count // LEDGERS // 20 - 1)
            ended_s = time.monotonic()
            time.sleep(1.0)
            other.send("stop")
            sent_s, answered_s, received_s, problem = other.result()
        rounds.check("other topic", problem)
        rounds.check_count("trimmed", trimmed, count // 20)
    figures[TRIM] = 1000 * (ended_s - began_s)
    beside = (answered_s >= began_s) & (sent_s <= ended_s)
    for name, until_s in ((ADDED, answered_s), (CAME, received_s)):
        waited_ms = 1000 * (until_s - sent_s)
        for who, chosen in ((ALONE, received_s < began_s), (BESIDE, beside)):
            figures[f"{who}, {name}, p99"] = float(np.percentile(waited_ms[chosen], 99))
            figures[f"{who}, {name}, max"] = float(waited_ms[chosen].max())
    return figures


def _scattered(count: int, seed: int) -> load.Rows:
    """Entries of every ledger in no order, due on another day."""
    number = np.random.default_rng(seed).permutation(count).astype(np.uint64)
    due = load.over_a_day(count, seed=seed) + np.uint64(load.DAY_MS)
    return load.Rows(number % np.uint64(LEDGERS), number // np.uint64(LEDGERS), due)


def _looks(client: tarry.Client, daemon: processes.DaemonProcess, rounds: workbench.Rounds) -> dict[str, float]:
    before = seal_pause.beats(daemon)
    began_s = time.monotonic()
    needed = client.retention(NAME)
    every_ms = 1000 * (time.monotonic() - began_s)
    pause_ms = 1000 * seal_pause.longest_s(before, seal_pause.beats(daemon))
    rounds.check_count("ledgers", len(needed.ledger_id), LEDGERS)
    began_s = time.monotonic()
    named = client.retention(NAME, range(LEDGERS))
    rounds.check_count("ledgers that were named", len(named.ledger_id), LEDGERS)
    return {
        EVERY: every_ms,
        f"{EVERY}, longest pause": pause_ms,
        NAMED: 1000 * (time.monotonic() - began_s),
    }


def _tick(address: str, results: Connection) -> None:
    asyncio.run(_Ticking(address, results).run())


class _Ticking:
    """The other topic: of each row when it was sent, when its add was answered, and when it came; of a clock that all
    processes share.
    """

    def __init__(self, address: str, results: Connection) -> None:
        self._address = address
        self._results = results
        self._added = asyncio.Event()
        self._sent_s: list[float] = []
        self._answered_s: dict[int, float] = {}
        self._came_s: dict[int, float] = {}

    async def run(self) -> None:
        async with (
            tarry.aio.Client(self._address, timeout_s=PATIENCE_S) as client,
            client.subscribe(OTHER, SUBSCRIPTION, create=True, permits=1_000) as subscription,
        ):
            receiving = asyncio.create_task(self._receive(subscription))
            self._results.send("ready")
            adding = [asyncio.create_task(self._add(client, number)) async for number in self._ticks()]
            await asyncio.gather(*adding)
            self._added.set()
            await asyncio.wait_for(receiving, PATIENCE_S)
        order = range(len(self._sent_s))
        columns = [np.array([of[number] for number in order]) for of in (self._answered_s, self._came_s)]
        early = sum(self._came_s[number] < self._sent_s[number] for number in order)
        self._results.send((np.array(self._sent_s), *columns, f"{early} rows came early" if early else None))

    async def _ticks(self) -> AsyncIterator[int]:
        began_s = time.monotonic()
        number = 0
        while not self._results.poll():
            await asyncio.sleep(max(0.0, began_s + number * TICK_S - time.monotonic()))
            self._sent_s.append(time.monotonic())
            yield number
            number += 1

    async def _add(self, client: tarry.aio.Client, number: int) -> None:
        await client.add(OTHER, 1, number, delay_ms=0)
        self._answered_s[number] = time.monotonic()

    async def _receive(self, subscription: tarry.aio.Subscription) -> None:
        while not (self._added.is_set() and len(self._came_s) == len(self._sent_s)):
            batch = await subscription.receive(TICK_S)
            if batch is not None:
                now_s = time.monotonic()
                self._came_s.update((number, now_s) for number in batch.entry_id.tolist())
                _ = subscription.ack(batch)
