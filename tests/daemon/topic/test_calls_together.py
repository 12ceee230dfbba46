"""All calls on one topic at the same time, with lost answers and crashes, by a seed.

Owns: a plain record of what was asked and answered, and what may and must be handed out by it.
Does not own: several daemons, and a whole cluster's faults (`tests/simulation`).

Every position is added once, and again only until that is answered. So a row that is handed out can be judged by what
was answered before, and what the last streams hand out, when nothing else is left, by everything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from daemon.core.decisions.add_decisions import AddBatch, AddRow
from daemon.core.index.containment import EntryRanges
from daemon.core.quotas import Caller
from daemon.errors import TarryError
from storage_backends.formats.manifest import SubscriptionPolicy, TopicPolicy
from tests._support.engine_fixture import EngineFixture, Receiver, no_positions
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import (
    Row,
    acknowledge,
    cancel,
    create,
    delete_topic,
    extend,
    get,
    reschedule,
    results,
    rows_of,
    trim,
    up_to,
)

SUBSCRIPTIONS = ("a", "b")
LEDGERS = 4
SETTINGS = (
    "bucket.min_index_count_per_bucket=12",
    "bucket.rows_max=25",
    "journal.checkpoint_slots=9",
    "bucket.max_indexes_per_bucket_snapshot_segment=5",
    "bucket.min_indexes_per_bucket_snapshot_segment=1",
    "delivery.ready_rows_max=15",
)
Position = tuple[int, int]


@dataclasses.dataclass
class Trim:
    """`covered`: what had been answered to be there when it began; `named`: everything that it may drop."""

    scope: tuple[str, ...]
    ledger_id: int
    last_entry_id: int
    covered: set[Position]
    ended: bool = False

    def names(self, position: Position) -> bool:
        return position[0] == self.ledger_id and position[1] <= self.last_entry_id


class Record:
    """What was asked and answered.

    `times`: those that a row may have; several while a reschedule is not answered. `leaving`: what was asked to be
    cancelled and not answered. `withdrawing`: what a request is about that is under way.
    """

    def __init__(self) -> None:
        self.times: dict[Position, set[int]] = {}
        self.leaving: set[Position] = set()
        self.cancelled: set[Position] = set()
        self.withdrawing: set[Position] = set()
        self.added: set[Position] = set()
        self.trims: list[Trim] = []
        self.acknowledging: dict[str, set[Position]] = {name: set() for name in SUBSCRIPTIONS}
        self.acknowledged: dict[str, set[Position]] = {name: set() for name in SUBSCRIPTIONS}
        self.in_hand: dict[str, list[Row]] = {name: [] for name in SUBSCRIPTIONS}

    def handed_out(self, subscription: str, rows: list[Row], now_ms: int) -> None:
        for row in rows:
            position = row[:2]
            assert row[2] <= now_ms, f"{row} is early"
            assert row[2] in self.times[position], f"{row} has another time"
            assert position not in self.cancelled, f"{row} was cancelled"
            assert position not in self.acknowledged[subscription], f"{row} was acknowledged"
            for each in self.trims:
                gone = each.ended and subscription in each.scope and position in each.covered
                assert not gone, f"{row} was trimmed"
        self.in_hand[subscription] += rows

    def times_handed_out(self, position: Position) -> set[int]:
        return {row[2] for rows in self.in_hand.values() for row in rows if row[:2] == position}

    def answered(
        self, positions: list[Position], outcome: tuple[int, list[int], list[int], list[int]]
    ) -> set[Position]:
        """What became of positions to cancel or to reschedule may be; those that were."""
        left, not_found, already_due, in_flight = outcome
        due = {positions[row] for row in already_due + in_flight}
        missing = {positions[row] for row in not_found}
        withdrawn = {*positions} - due - missing
        assert len(withdrawn) == left
        for name in SUBSCRIPTIONS:
            assert not missing & self.must_be_left(name), "there, and not found"
        return withdrawn

    def must_be_left(self, subscription: str) -> set[Position]:
        left = self.added - self.acknowledging[subscription] - self.leaving - self.cancelled
        for each in self.trims:
            if subscription in each.scope:
                left = {position for position in left if not each.names(position)}
        return left

    def may_be_left(self, subscription: str) -> set[Position]:
        left = set(self.times) - self.acknowledged[subscription] - self.cancelled
        for each in self.trims:
            if each.ended and subscription in each.scope:
                left -= each.covered
        return left


class Story:
    """One seed: actions at random times, several at once."""

    def __init__(self, machines: EngineFixture, seed: int) -> None:
        self.machines = machines
        self.random = random.Random(seed)
        self.record = Record()
        self.receivers: list[tuple[str, Receiver, list[int]]] = []
        self.entries = [0] * LEDGERS
        self.actions: list[Callable[[], Awaitable[object]]] = [
            *[self.add] * 6,
            *[self.acknowledge] * 5,
            *[self.get] * 4,
            *[self.trim] * 2,
            *[self.cancel] * 2,
            *[self.reschedule] * 3,
            self.extend,
            self.open,
            self.close,
            self.seal,
            self.contains,
            self.set_policies,
            self.lose_an_answer,
        ]

    async def run(self, actions: int) -> None:
        self.daemon = await self.machines.served_by("one", *SETTINGS)
        for name in SUBSCRIPTIONS:
            self.since_ms = (await create(self.daemon, name)).since_ms
        under_way: set[asyncio.Task[None]] = set()
        for number in range(actions):
            action = self.random.choice(self.actions)
            under_way.add(asyncio.ensure_future(self.attempt(action)))
            await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.05, 0.5]))
            self.look()
            if number % 40 == 39:
                self.daemon.kill()
                self.receivers.clear()
                self.daemon = await self.machines.served_by("one", *SETTINGS)
            for task in [task for task in under_way if task.done()]:
                under_way.discard(task)
                task.result()
        await asyncio.gather(*under_way)
        await self.end()

    async def attempt(self, action: Callable[[], Awaitable[object]]) -> None:
        try:
            await action()
        except (TarryError, asyncio.CancelledError):
            # Refused, or its daemon died: the record says only what was asked.
            return

    def look(self) -> None:
        """What streams have received since."""
        for subscription, receiver, seen in self.receivers:
            fresh = receiver.rows[seen[0] :]
            seen[0] += len(fresh)
            self.record.handed_out(subscription, fresh, self.machines.now_ms())

    # ---- actions

    async def add(self) -> None:
        ledger, count = self.random.randrange(LEDGERS), self.random.randint(1, 12)
        first = self.entries[ledger]
        self.entries[ledger] += count
        delay_ms = self.random.choice([0, 10, 500, 3_000])
        # The subscriptions were created before: a time that is not after theirs would be raised.
        due_ms = self.machines.now_ms() + 10 + delay_ms
        positions = [(ledger, entry) for entry in range(first, first + count)]
        self.record.times |= {position: {due_ms} for position in positions}
        columns = np.array(positions, np.uint64)
        batch = AddBatch(
            columns[:, 0].copy(), columns[:, 1].copy(), np.full(count, due_ms, np.uint64), None, None, False
        )
        while True:
            try:
                # Every other one row by row.
                by_row = first % 2 == 0
                await self.daemon.call(self.add_rows(positions, due_ms) if by_row else self.add_batch(batch))
            except (TarryError, asyncio.CancelledError):
                await asyncio.sleep(0.3)
                continue
            self.record.added |= set(positions)
            return

    async def add_batch(self, batch: AddBatch) -> None:
        await self.daemon.engine.requests.add("t", batch)

    async def add_rows(self, positions: list[Position], due_ms: int) -> None:
        """Each row by a call of its own, all at once."""
        requests, caller = self.daemon.engine.requests, Caller("client", 50)

        async def add_row(row: AddRow) -> None:
            answer = requests.add_row("t", row, caller)
            await (requests.add("t", row.batch()) if answer is None else answer)

        await asyncio.gather(*(add_row(AddRow(*position, due_ms, None)) for position in positions))

    async def acknowledge(self) -> None:
        subscription = self.random.choice(SUBSCRIPTIONS)
        held = self.record.in_hand[subscription]
        if held:
            rows = list(set(self.random.choices(held, k=self.random.randint(1, 8))))
            positions = {row[:2] for row in rows}
            self.record.acknowledging[subscription] |= positions
            ignored = await acknowledge(self.daemon, rows, subscription=subscription)
            # What was handed out before the answer.
            self.look()
            if not ignored:
                self.record.acknowledged[subscription] |= positions

    async def get(self) -> None:
        subscription = self.random.choice(SUBSCRIPTIONS)
        lease_ms, wait_ms = self.random.choice([50, 2_000]), self.random.choice([0, 0, 400])
        leased = await get(
            self.daemon, self.random.randint(1, 15), subscription=subscription, lease_ms=lease_ms, wait_ms=wait_ms
        )
        self.look()
        self.record.handed_out(subscription, rows_of(leased), self.machines.now_ms())

    async def extend(self) -> None:
        subscription = self.random.choice(SUBSCRIPTIONS)
        held = self.record.in_hand[subscription]
        if held:
            rows = list(set(self.random.choices(held, k=4)))
            await extend(self.daemon, rows, self.random.choice([0, 500]), subscription=subscription)

    async def trim(self) -> None:
        ledger = self.random.randrange(LEDGERS)
        last = self.random.randint(0, self.entries[ledger] + 3)
        subscription = self.random.choice([None, *SUBSCRIPTIONS])
        scope = SUBSCRIPTIONS if subscription is None else (subscription,)
        made = Trim(scope, ledger, last, set())
        made.covered = {position for position in self.record.added if made.names(position)}
        self.record.trims.append(made)
        await trim(self.daemon, up_to(last, ledger), subscription=subscription)
        self.look()
        made.ended = True

    def chosen(self) -> list[Position]:
        """Some positions of one ledger that were added, and that no other request takes out."""
        ledger = self.random.randrange(LEDGERS)
        free = sorted(at for at in self.record.added - self.record.withdrawing if at[0] == ledger)
        return self.random.sample(free[-20:], min(len(free[-20:]), self.random.randint(1, 8)))

    async def cancel(self) -> None:
        record, positions = self.record, self.chosen()
        if not positions:
            return
        known = record.leaving & {*positions}
        record.leaving |= {*positions}
        record.withdrawing |= {*positions}
        try:
            outcome = results(await cancel(self.daemon, positions[0][0], [entry for _, entry in positions]))
        finally:
            record.withdrawing -= {*positions}
        self.look()
        record.leaving -= {*positions} - known
        withdrawn = record.answered(positions, outcome)
        for position in withdrawn:
            assert not record.times_handed_out(position), f"{position} is cancelled, and was handed out"
        record.cancelled |= withdrawn
        # What is due was not cancelled before either.
        record.leaving -= {positions[row] for row in outcome[2] + outcome[3]}

    async def reschedule(self) -> None:
        record, positions = self.record, self.chosen()
        if not positions:
            return
        delay_ms = self.random.choice([-500, 0, 300, 2_000, 4_000])
        due_ms = self.daemon.now_ms() + delay_ms
        before = {position: set(record.times[position]) for position in positions}
        record.withdrawing |= {*positions}
        for position in positions:
            record.times[position] |= {due_ms, self.since_ms + 1} if due_ms <= self.since_ms else {due_ms}
        try:
            answer = await reschedule(self.daemon, positions[0][0], [entry for _, entry in positions], delay_ms)
        finally:
            record.withdrawing -= {*positions}
        self.look()
        withdrawn = record.answered(positions, results(answer))
        for position in positions:
            if position in withdrawn:
                record.times[position] -= before[position] - {due_ms}
                assert record.times_handed_out(position) <= record.times[position], f"{position} came with another time"
            else:
                record.times[position] = before[position]

    async def open(self) -> None:
        subscription = self.random.choice(SUBSCRIPTIONS)
        daemon = self.daemon
        stream = await daemon.call(daemon.engine.requests.open_dispatch("t", subscription, no_positions()))
        stream.grant(self.random.randint(1, 60))
        if daemon is self.daemon:
            self.receivers.append((subscription, Receiver(daemon, "t", stream), [0]))

    async def close(self) -> None:
        if self.receivers:
            self.look()
            _, receiver, _ = self.receivers.pop(self.random.randrange(len(self.receivers)))
            receiver.stream.close()

    async def seal(self) -> None:
        await self.daemon.call(self.daemon.engine.requests.seal("t"))

    async def contains(self) -> None:
        ranges = EntryRanges(*(np.array([value], np.uint64) for value in (1, 0, 1 << 40)))
        subscription = self.random.choice([None, *SUBSCRIPTIONS])
        await self.daemon.call(self.daemon.engine.requests.contains("t", ranges, subscription))

    async def set_policies(self) -> None:
        requests = self.daemon.engine.requests
        await self.daemon.call(
            requests.set_topic_policy("t", TopicPolicy(bucket_rows_max=self.random.choice([None, 5, 40])))
        )
        rows_max = self.random.choice([None, 10, 30])
        policy = SubscriptionPolicy(in_flight_rows_max=rows_max)
        await self.daemon.call(requests.update_subscription("t", self.random.choice(SUBSCRIPTIONS), policy))

    async def lose_an_answer(self) -> None:
        fault = self.random.choice([Fault.FAIL_AFTER, Fault.FAIL_BEFORE])
        key_part = self.random.choice([JOURNAL, "/topics/", "/checkpoint/"])
        self.daemon.script.plan("put_if_absent", fault, key_part=key_part)

    # ---- the end

    async def end(self) -> None:
        """Nothing is held any more, and what is left is exactly what it must be."""
        self.look()
        for _, receiver, _ in self.receivers:
            receiver.stream.close()
        for name in SUBSCRIPTIONS:
            await self.daemon.call(self.daemon.engine.requests.update_subscription("t", name, SubscriptionPolicy()))
        await asyncio.sleep(10)
        core = self.daemon.topic("t").core
        assert core.index.pending_rows == 0
        last = [(name, await self.daemon.receiver("t", name)) for name in SUBSCRIPTIONS]
        await asyncio.sleep(10)
        states = {state.stored.name: state for state in core.subscriptions.values()}
        for name, receiver in last:
            assert len(receiver.rows) == len(receiver.positions)
            assert self.record.must_be_left(name) <= receiver.positions <= self.record.may_be_left(name)
            assert states[name].backlog == len(states[name].in_flight) == len(receiver.rows)
            assert not len(states[name].acknowledging)
            assert states[name].leased_rows == 0
        for _, receiver in last:
            if receiver.rows:
                assert await receiver.acknowledge(receiver.rows) == 0
        assert sum(bucket.present_rows for bucket in core.index.buckets) == 0
        assert all(state.backlog == 0 for state in states.values())
        await self.daemon.until(lambda: not core.index.sealed)
        assert (await delete_topic(self.daemon)).rows == 0


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(12))
async def test_calls_at_the_same_time_hand_out_what_they_must_and_nothing_else(
    machines: EngineFixture, seed: int
) -> None:
    machines.faults_may_miss = True
    await Story(machines, seed).run(110)
