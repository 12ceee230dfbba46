"""Random stories of one topic whose buckets are sealed, merged by its owner and by another process, and deleted at the
earliest moment, while rows are added, cancelled, rescheduled, trimmed and acknowledged, subscriptions come and go, and
daemons are killed: in the end each subscription gets exactly what it is owed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from daemon.core.decisions.withdrawal_decisions import RescheduleBatch
from storage_backends import bucket_merging, commit
from storage_backends.formats.row_columns import U32
from storage_backends.object_store import Damaged, NotFound
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.merging_process import MergingProcess
from tests.daemon._support.calling import trim, up_to

STEPS = 60
LEDGERS = 5
SHARED = ""
# What is due later than this from now is not due before a call has returned.
MARGIN_MS = 3_000
Position = tuple[int, int]
Row = tuple[int, int, int]


@dataclasses.dataclass(eq=False, slots=True)
class Owed:
    """A row of an index: when it is due, and which subscriptions are owed it no longer."""

    deliver_at_ms: int
    done: set[str] = dataclasses.field(default_factory=set)


class Story:
    """One topic, its daemon, and what every subscription is owed: `rows` by index, `SHARED` or a subscription."""

    def __init__(self, machines: EngineFixture, seed: int) -> None:
        self.machines = machines
        self.random = random.Random(seed)
        self.settings = (
            "bucket.min_index_count_per_bucket=30",
            "bucket.rows_max=30",
            "delivery.lookahead_ms=500",
            f"bucket.max_num_buckets={self.random.choice([-1, 1, 2, 4])}",
            f"bucket.merge_buckets_max={self.random.choice([2, 3, 10])}",
            f"journal.checkpoint_slots={self.random.choice([3, 10, 10_000])}",
        )
        self.other = MergingProcess(machines.store)
        self.written: list[bucket_merging.WrittenMerge] = []
        self.rows: dict[str, dict[Position, Owed]] = {SHARED: {}}
        self.since_ms: dict[str, int] = {}
        self.receivers: dict[str, Receiver] = {}
        # What each subscription acknowledged, and what was cancelled or given another time: it does not come (again).
        self.acknowledged: dict[str, set[Row]] = {}
        self.cancelled: set[Row] = set()
        self.asked: list[Position] = []
        self.daemon: Daemon
        self._next_entry = 0

    async def told(self) -> None:
        self.daemon = await self.machines.served_by("one", *self.settings)
        await self.create("s")
        steps: list[Callable[[], Awaitable[None]]] = [
            *[self.add] * 8,
            *[self.acknowledge] * 6,
            *[self.wait] * 6,
            *[self.cancel] * 2,
            *[self.reschedule] * 2,
            *[self.plan_merge] * 4,
            *[self.commit_merge] * 4,
            *[self.collect] * 3,
            *[self.seal] * 3,
            self.trim,
            self.come_or_go,
            self.crash,
        ]
        for _ in range(STEPS):
            await self.random.choice(steps)()
        if self.random.random() < 0.7:
            await self.crash()
        await self.check()

    # ---- what the daemon is asked

    async def add(self) -> None:
        index = self.random.choice([SHARED, SHARED, *self.since_ms])
        ledger_id = self.random.randrange(LEDGERS)
        entries = list(range(self._next_entry, self._next_entry + self.random.randrange(1, 15)))
        self._next_entry = entries[-1] + self.random.randrange(1, 3)
        # Some come again, or are in another index already.
        again = {
            entry for ledger, entry in self.asked if ledger == ledger_id and not self.is_in(index, (ledger, entry))
        }
        entries += self.random.sample(sorted(again), min(3, len(again)))
        delay_ms = self.random.choice([1_000, 5_000, 20_000, 60_000, 400_000]) + (index != SHARED)
        at_ms = self.machines.now_ms() + delay_ms
        outcome = await self.daemon.add("t", ledger_id, entries, delay_ms, subscription=index or None)
        assert (outcome.accepted, outcome.duplicates) == (len(entries), 0)
        for entry in entries:
            self.rows[index][ledger_id, entry] = Owed(at_ms)
            self.cancelled.discard((ledger_id, entry, at_ms))
            self.asked.append((ledger_id, entry))

    async def acknowledge(self) -> None:
        for name, receiver in self.receivers.items():
            owed = self.owed(name)
            chosen = [row for row in receiver.rows if row in owed and self.random.random() < 0.4]
            if chosen:
                assert await receiver.acknowledge(chosen) == 0
                self.acknowledged[name].update(chosen)
                for row in chosen:
                    self.leaves(name, row)
                self.forget_gone()

    async def cancel(self) -> None:
        chosen = self.some_positions()
        now_ms = self.machines.now_ms()
        columns = [np.array([position[column] for position in chosen], np.uint64) for column in range(2)]
        outcome = await self.daemon.call(self.daemon.engine.requests.cancel("t", None, *columns))
        for position in self.changed(chosen, now_ms, outcome.not_found, outcome.already_due, outcome.in_flight):
            for rows in self.holding(position):
                self.cancelled.add((*position, rows.pop(position).deliver_at_ms))

    async def reschedule(self) -> None:
        chosen = [each for each in self.some_positions() if sum(self.is_in(index, each) for index in self.rows) < 2]
        if not chosen:
            return
        now_ms = self.machines.now_ms()
        at_ms = now_ms + self.random.choice([5_002, 50_002, 300_002])
        batch = RescheduleBatch(
            ledger_id=np.array([ledger_id for ledger_id, _ in chosen], np.uint64),
            entry_id=np.array([entry_id for _, entry_id in chosen], np.uint64),
            deliver_at_ms=np.full(len(chosen), at_ms, np.uint64),
            delay_ms=None,
            key_hash=None,
        )
        outcome = await self.daemon.call(self.daemon.engine.requests.reschedule("t", None, batch))
        for position in self.changed(chosen, now_ms, outcome.not_found, outcome.already_due, outcome.in_flight):
            for rows in self.holding(position):
                self.cancelled.add((*position, rows[position].deliver_at_ms))
                rows[position].deliver_at_ms = at_ms
                self.cancelled.discard((*position, at_ms))

    def some_positions(self) -> list[Position]:
        found = sorted(set(self.asked))
        return self.random.sample(found, min(8, len(found))) or [(0, 10**6)]

    def changed(self, chosen: list[Position], now_ms: int, *unchanged: U32) -> list[Position]:
        """The positions that were cancelled or rescheduled; checks that they could be, and the others could not."""
        kept = {int(row) for rows in unchanged for row in rows}
        missing = {int(row) for row in unchanged[0]}
        for number, position in enumerate(chosen):
            times = [rows[position].deliver_at_ms for rows in self.holding(position)]
            assert (number in missing) == (not times), f"{position} with times {times}"
            if times and min(times) > now_ms + MARGIN_MS:
                assert number not in kept, f"{position} waits"
            if times and min(times) <= now_ms:
                assert number in kept, f"{position} is due"
        return [position for number, position in enumerate(chosen) if number not in kept]

    async def trim(self) -> None:
        ledger_id, last = self.random.randrange(LEDGERS), self._next_entry - self.random.randrange(60)
        if last < 0:
            return
        name = self.random.choice([None, *self.since_ms])
        await trim(self.daemon, up_to(last, ledger_id), subscription=name)
        for index, rows in self.rows.items():
            for position in [each for each in rows if each[0] == ledger_id and each[1] <= last]:
                if name is None or index == name:
                    del rows[position]
                elif index == SHARED:
                    rows[position].done.add(name)
        self.forget_gone()

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.01, 1.0, 7.0, 40.0]))

    async def seal(self) -> None:
        _ = self.daemon.call(self.daemon.engine.requests.seal("t"))
        await asyncio.sleep(self.random.choice([0.0, 1.0]))

    async def come_or_go(self) -> None:
        name = self.random.choice(["u", "v"])
        if name in self.since_ms:
            await self.daemon.call(self.daemon.engine.requests.delete_subscription("t", name))
            for by_name in (self.since_ms, self.rows, self.receivers):
                del by_name[name]
            for owed in self.rows[SHARED].values():
                owed.done.discard(name)
            self.forget_gone()
        else:
            await self.create(name)

    async def create(self, name: str) -> None:
        created = await self.daemon.call(self.daemon.engine.requests.create_subscription("t", name))
        assert created.created
        self.since_ms[name] = created.since_ms
        self.rows[name] = {}
        self.acknowledged[name] = set()
        self.receivers[name] = await self.daemon.receiver("t", name)

    async def crash(self) -> None:
        self.check_received()
        self.daemon.kill()
        self.daemon = await self.machines.served_by("one", *self.settings)
        for name in self.since_ms:
            self.receivers[name] = await self.daemon.receiver("t", name)

    # ---- what others do

    async def plan_merge(self) -> None:
        live = self.other.live(
            self.random.choice(sorted({each.subscription_id for each in self.other.tip().live} or {0}))
        )
        if len(live) > 1:
            first = self.random.randrange(len(live) - 1)
            run = live[first : first + self.random.randrange(2, 4)]
            self.written.append(self.other.write(run))

    async def commit_merge(self) -> None:
        if self.written:
            written = self.written.pop(self.random.randrange(len(self.written)))
            try:
                self.other.commit(written)
            except (commit.Refused, Damaged, NotFound):
                # A source has left since, or the progress was replaced while it was read.
                return

    async def collect(self) -> None:
        """Everything that may go is deleted at once."""
        for tombstone in self.other.tip().tombstones:
            self.machines.store.delete(tombstone.object.name)

    # ---- what is owed

    def is_in(self, index: str, position: Position) -> bool:
        owed = self.rows[index].get(position)
        return owed is not None and (index != SHARED or any(self.is_owed(name, owed) for name in self.since_ms))

    def holding(self, position: Position) -> list[dict[Position, Owed]]:
        return [rows for index, rows in self.rows.items() if self.is_in(index, position)]

    def forget_gone(self) -> None:
        """A row that no subscription is owed is owed to none that comes later."""
        for position in [each for each in self.rows[SHARED] if not self.is_in(SHARED, each)]:
            del self.rows[SHARED][position]

    def is_owed(self, name: str, owed: Owed) -> bool:
        """Of a row of the shared index."""
        return name not in owed.done and owed.deliver_at_ms > self.since_ms[name]

    def owed(self, name: str) -> set[Row]:
        shared = {
            (*position, each.deliver_at_ms) for position, each in self.rows[SHARED].items() if self.is_owed(name, each)
        }
        return shared | {(*position, each.deliver_at_ms) for position, each in self.rows[name].items()}

    def leaves(self, name: str, row: Row) -> None:
        position = row[:2]
        own = self.rows[name].get(position)
        if own is not None and own.deliver_at_ms == row[2]:
            del self.rows[name][position]
        else:
            self.rows[SHARED][position].done.add(name)

    def check_received(self) -> None:
        for receiver in self.receivers.values():
            assert not receiver.early
            assert len(receiver.rows) == len(set(receiver.rows)), "no row twice"
            assert not self.cancelled & set(receiver.rows)

    async def check(self) -> None:
        self.check_received()
        before = {name: frozenset(rows) for name, rows in self.acknowledged.items()}
        for name, receiver in self.receivers.items():
            receiver.stream.close()
            self.receivers[name] = await self.daemon.receiver("t", name)
        await asyncio.sleep(1_000)
        self.check_received()
        for name, receiver in self.receivers.items():
            assert set(receiver.rows) == self.owed(name), f"what {name} is owed"
            assert not before[name] & set(receiver.rows)
        assert self.daemon.engine.health.serving
        assert not any(live.quarantined for live in self.other.tip().live)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(20))
async def test_each_subscription_gets_exactly_what_it_is_owed(machines: EngineFixture, seed: int) -> None:
    await Story(machines, seed).told()
