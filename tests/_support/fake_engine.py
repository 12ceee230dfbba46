"""An engine that is all in memory: the facade of `daemon.owner.engine`, to test the edge without storage.

It is real as far as a caller sees: adds are idempotent, what is due is handed out in order against permits or leased,
acknowledgements count what they ignored, trims and policies do what they say. It has no journal and no recovery.
Faults: `fail_with` is raised by every call; while `hold` is set, calls stay unanswered; `former_owner_s` is
for how long a former owner may still act; `rebuild_needed` is what a
damaged bucket would leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from daemon import call_values, config, errors
from daemon.core import limits
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome, AddRow
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleBatch, RescheduleOutcome
from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.containment import Contained, EntryRanges
from daemon.core.quotas import Caller
from daemon.topic import leases, topic_settings
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicDelayLevels, TopicPolicy
from storage_backends.formats.row_columns import U32, U64
from tests._support.fake_claims import FakeClaims, rows_of
from tests._support.fake_dead_letters import FakeDeadLetters
from tests._support.fake_levels import FakeLevels
from tests._support.fake_stream import FakeDispatchStream
from tests._support.fake_topic import EPOCH, Lease, Position, Row, Subscription, Topic
from tests._support.fake_views import FakeViews

OWNER = "fake"
ADDRESS = "127.0.0.1:1"
DEFAULT_POLICY = TopicPolicy(
    delay_max_ms=315_360_000_000,
    min_index_count_per_bucket=50_000,
    bucket_rows_max=200_000,
    bucket_bytes_max=16 << 20,
    bucket_age_max_ms=1_800_000,
    max_time_step_per_bucket_snapshot_segment_seconds=300,
    max_indexes_per_bucket_snapshot_segment=5000,
    min_indexes_per_bucket_snapshot_segment=1000,
    compatible_form=False,
    shared_index=True,
    max_num_buckets=50,
    merge_buckets_max=10,
    merge_rows_max=2_000_000,
    tick_ms=5,
    pending_rows_max=0,
    due_rows_per_second_max=0,
    client_rows_per_second_max=0,
    client_bytes_per_second_max=0,
    two_phase_deletion_enabled=True,
)


class FakeEngine(FakeClaims, FakeDeadLetters, FakeLevels, FakeViews):
    """See the module. Use it from one event loop."""

    deletion_requests = None
    """It has no deletions of ledgers: what is said of those is tested with the real engine."""

    def __init__(self, settings: config.Config, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000):
        self.settings = settings
        self.now_ms = now_ms
        self.topics: dict[str, Topic] = {}
        self.tables: dict[str, TopicDelayLevels] = {}
        self.rebuild_needed: tuple[RebuildNeeded, ...] = ()
        self.fail_with: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.former_owner_s = 0.0
        self.calls_begun = 0
        self.callers: list[Caller | None] = []
        """Of each add."""
        self.streams_opened = 0
        self._happened = asyncio.Event()
        self._last_subscription_id = 0
        self._incarnations: dict[str, int] = {}
        self._health = call_values.Health(serving=True, reason="")
        self._on_health_change: list[Callable[[call_values.Health], None]] = []

    @property
    def requests(self) -> FakeEngine:
        """The calls of the engine are its own."""
        return self

    async def add(
        self,
        topic: str,
        batch: AddBatch,
        subscription: str | None = None,
        caller: Caller | None = None,
    ) -> AddOutcome:
        self.callers.append(caller)
        now_ms = await self._begin()
        request_limits = self.settings.limits
        limits.check_name("topic", topic, request_limits.topic_bytes_max)
        limits.check_rows("entry_id", len(batch.entry_id), request_limits.rows_per_request_max)
        refused = self.refused_of(topic, batch, now_ms)
        if len(refused) == len(batch.entry_id):
            return AddOutcome.nothing(refused)
        places = refused.others(len(batch.entry_id))
        batch = batch.take(places)
        times = limits.absolute_times(
            batch.deliver_at_ms,
            self.delays_of(topic, batch),
            now_ms=now_ms,
            delay_max_ms=request_limits.delay_max_ms,
        )
        rows = self._topic_to_write(topic).rows if subscription is None else self.find(topic, subscription).own
        hashes = np.zeros(len(times), np.uint32) if batch.key_hash is None else batch.key_hash
        accepted, late, returned = 0, 0, []
        columns = (batch.ledger_id.tolist(), batch.entry_id.tolist(), times.tolist(), hashes.tolist())
        for index, (ledger_id, entry_id, due, key_hash) in enumerate(zip(*columns, strict=True)):
            if (ledger_id, entry_id) in rows:
                continue
            late += due <= now_ms
            if due <= now_ms and batch.return_already_due:
                returned.append(index)
                continue
            rows[ledger_id, entry_id] = (due, key_hash)
            accepted += 1
        for each in self.topics[topic].subscriptions.values():
            each.wake()
        return AddOutcome(
            accepted=accepted,
            duplicates=len(times) - accepted - len(returned),
            returned_index=np.array(returned, np.uint32),
            late_on_arrival=late,
            raised_index=np.empty(0, np.uint32),
            raised_deliver_at_ms=np.empty(0, np.uint64),
        ).placed(places, refused)

    def add_at_once(self, topic: str, batch: AddBatch, caller: Caller) -> None:
        """Nothing is known at once."""

    def add_row(self, topic: str, row: AddRow, caller: Caller) -> None:
        """Each row goes by itself."""

    async def cancel(self, topic: str, subscription: str | None, ledger_id: U64, entry_id: U64) -> CancelOutcome:
        now_ms = await self._begin()
        self._check_positions(topic, subscription, ledger_id, entry_id)
        known = self._topic(topic)
        positions: list[Position] = list(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))
        owner = None if subscription is None else self.find(topic, subscription)
        found, refused = known.withdraw(owner, positions, now_ms)
        for position, tables in zip(positions, found, strict=True):
            for table in tables:
                del table[position]
        return CancelOutcome(
            cancelled=sum(map(bool, found)),
            not_found=_column(refused["not_found"]),
            already_due=_column(refused["already_due"]),
            in_flight=_column(refused["in_flight"]),
        )

    async def reschedule(self, topic: str, subscription: str | None, batch: RescheduleBatch) -> RescheduleOutcome:
        now_ms = await self._begin()
        self._check_positions(topic, subscription, batch.ledger_id, batch.entry_id)
        times = limits.absolute_times(
            batch.deliver_at_ms, batch.delay_ms, now_ms=now_ms, delay_max_ms=self.settings.limits.delay_max_ms
        )
        hashes = np.zeros(len(times), np.uint32) if batch.key_hash is None else batch.key_hash
        known = self._topic(topic)
        positions: list[Position] = list(zip(batch.ledger_id.tolist(), batch.entry_id.tolist(), strict=True))
        owner = None if subscription is None else self.find(topic, subscription)
        found, refused = known.withdraw(owner, positions, now_ms)
        for position, tables, due, key_hash in zip(positions, found, times.tolist(), hashes.tolist(), strict=True):
            for table in tables:
                table[position] = (due, key_hash)
        for each in known.subscriptions.values():
            each.wake()
        return RescheduleOutcome(
            rescheduled=sum(map(bool, found)),
            not_found=_column(refused["not_found"]),
            already_due=_column(refused["already_due"]),
            in_flight=_column(refused["in_flight"]),
            raised_index=_column([]),
            raised_deliver_at_ms=np.empty(0, np.uint64),
        )

    def _check_positions(self, topic: str, subscription: str | None, ledger_id: U64, entry_id: U64) -> None:
        self._check_names(topic, subscription)
        limits.check_rows("entry_id", len(entry_id), self.settings.limits.rows_per_request_max)
        limits.check_distinct(ledger_id, entry_id)

    async def contains(self, topic: str, asked: EntryRanges, subscription: str | None) -> Contained:
        now_ms = await self._begin()
        self._check_names(topic, subscription)
        limits.check_rows("entry_id", len(asked.ledger_id), self.settings.limits.rows_per_request_max)
        backwards = asked.last_entry_id < asked.first_entry_id
        if backwards.any():
            index = int(backwards.argmax())
            first, last = asked.first_entry_id[index], asked.last_entry_id[index]
            raise errors.InvalidArgument(
                f"last_entry_id[{index}] is {last}, before entry_id[{index}], which is {first}"
            )
        known = self.topics.get(topic, Topic())
        if topic not in self.topics or subscription is None:
            return known.contains(asked, known.owed, now_ms)
        return known.contains(asked, self.find(topic, subscription).owes, now_ms)

    async def trim(
        self,
        topic: str,
        subscription: str | None,
        ranges: LedgerRanges,
        *,
        dead_letter: bool = False,
    ) -> call_values.Trimmed:
        now_ms = await self._begin()
        self._check_names(topic, subscription)
        if dead_letter and subscription is None:
            raise errors.InvalidArgument("dead_letter is set, and subscription is empty")
        limits.check_rows("ledger_id", len(ranges.ledger_id), self.settings.limits.rows_per_request_max)
        ledgers = ranges.ledger_id.tolist()
        if ranges.all_lower_ledgers and len(ledgers) > 1:
            raise errors.InvalidArgument(f"all_lower_ledgers is set, and ledger_id has {len(ledgers)}; it must have 1")
        for ledger_id in ledgers:
            if ledgers.count(ledger_id) > 1:
                raise errors.InvalidArgument(f"ledger_id names ledger {ledger_id} twice; once is enough")
        last = dict(zip(ledgers, ranges.last_entry_id.tolist(), strict=True))
        lower = ledgers[0] if ranges.all_lower_ledgers else 0

        def chosen(position: Position) -> bool:
            return position[0] < lower or position[1] <= last.get(position[0], -1)

        if dead_letter and subscription is not None:
            rows = self._topic(topic).dead_letter(self.find(topic, subscription), chosen, now_ms)
            return call_values.Trimmed(rows, dead_lettered=rows, more=False)
        return call_values.Trimmed(self._drop(topic, subscription, chosen), dead_lettered=0, more=False)

    async def clear(self, topic: str, subscription: str | None) -> int:
        await self._begin()
        self._check_names(topic, subscription)
        return self._drop(topic, subscription, lambda _: True)

    def _drop(self, topic: str, subscription: str | None, chosen: Callable[[Position], bool]) -> int:
        known = self._topic(topic)
        return known.drop(None if subscription is None else self.find(topic, subscription), chosen)

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        policy: SubscriptionPolicy,
        properties: NamedValues,
    ) -> call_values.SubscriptionCreated:
        now_ms = await self._begin()
        self._check_names(topic, subscription)
        topic_settings.check_subscription_policy(policy, delay_max_ms=self.settings.limits.delay_max_ms)
        topic_settings.check_properties(properties)
        mine = self._topic_to_write(topic).subscriptions
        created = subscription not in mine
        if created:
            most = self.settings.limits.subscriptions_per_topic_max
            if len(mine) >= most:
                raise errors.QuotaExceeded(
                    f"subscription: the topic has {len(mine)}, the limit is {most}", retry_after_ms=1000
                )
            self._last_subscription_id += 1
            mine[subscription] = Subscription(self._last_subscription_id, now_ms if mine else 0, policy, properties)
        known = mine[subscription]
        if (known.policy, known.properties) != (policy, properties):
            raise errors.AlreadyExists(f"subscription {subscription!r} exists with another policy")
        return call_values.SubscriptionCreated(
            subscription_id=known.subscription_id, since_ms=known.since_ms, created=created
        )

    async def update_subscription(
        self,
        topic: str,
        subscription: str,
        policy: SubscriptionPolicy,
        properties: NamedValues,
    ) -> None:
        await self._begin()
        topic_settings.check_subscription_policy(policy, delay_max_ms=self.settings.limits.delay_max_ms)
        topic_settings.check_properties(properties)
        known = self.find(topic, subscription)
        known.policy, known.properties = policy, properties

    async def delete_subscription(self, topic: str, subscription: str) -> int:
        await self._begin()
        dead_letters = len(self.find(topic, subscription).dead_letters)
        del self.topics[topic].subscriptions[subscription]
        return dead_letters

    async def open_dispatch(self, topic: str, subscription: str, held: HeldPositions) -> FakeDispatchStream:
        await self._begin()
        known = self.find(topic, subscription)
        backlog = set(self.topics[topic].backlog(known, self.now_ms()))
        stream = FakeDispatchStream(self, topic, subscription, known)
        self.check_claims(held, least=0)
        not_held = []
        for place, row in enumerate(rows_of(held)):
            if row in backlog and row[1:] not in known.in_flight:
                known.in_flight[row[1:]] = stream
                stream.held += 1
            else:
                not_held.append(place)
        stream.not_held = np.array(not_held, np.intp)
        known.streams.append(stream)
        self.streams_opened += 1
        self._happened.set()
        return stream

    async def get_scheduled(
        self, topic: str, subscription: str, *, max_rows: int, lease_ms: int, wait_ms: int
    ) -> call_values.Leased:
        await self._begin()
        known = self.find(topic, subscription)
        leases.check_get(max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
        lease_ms = lease_ms or known.policy.lease_ms or topic_settings.LEASE_DEFAULT_MS
        rows: list[Row] = []
        lease, changed = Lease(), asyncio.Event()
        known.pullers.add(changed)
        self._happened.set()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while not (rows := self.take(topic, known, lease, max_rows)):
                    changed.clear()
                    await self.changed_or_due(topic, changed)
        except TimeoutError:
            rows = self.take(topic, known, lease, max_rows)
        finally:
            known.pullers.discard(changed)
        if rows:
            self.end_later(known, lease, lease_ms)
        return call_values.Leased(self.handed_out(topic, known, rows), lease_ms, self.rebuild_needed)

    def take(self, topic: str, subscription: Subscription, holder: FakeDispatchStream | Lease, limit: int) -> list[Row]:
        """What is handed out now; nothing of a topic that was deleted."""
        return self.topics[topic].take(subscription, holder, limit, self.now_ms()) if topic in self.topics else []

    async def changed_or_due(self, topic: str, changed: asyncio.Event) -> None:
        """Returns at a change, and when the next row comes due."""
        next_due_ms = self.topics[topic].next_due_ms(self.now_ms()) if topic in self.topics else 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), (next_due_ms - self.now_ms()) / 1000 if next_due_ms else None)

    async def set_topic_policy(self, topic: str, policy: TopicPolicy) -> TopicPolicy:
        await self._begin()
        self._check_names(topic)
        topic_settings.check_topic_policy(policy)
        self._topic_to_write(topic).policy = policy
        return _effective(policy)

    async def topic_policy(self, topic: str) -> call_values.TopicPolicies:
        await self._begin()
        stored = self._topic(topic).policy
        return call_values.TopicPolicies(stored=stored, effective=_effective(stored))

    async def seal(self, topic: str) -> call_values.Sealed:
        await self._begin()
        known = self._topic(topic)
        if not known.mutable:
            return call_values.Sealed(rows=0, bucket="")
        name, positions = f"bucket-{len(known.buckets)}", known.mutable
        known.buckets[name] = positions
        return call_values.Sealed(rows=len(positions), bucket=name)

    async def merge(self, topic: str, buckets_max: int) -> call_values.Merged:
        await self._begin()
        known = self._topic(topic)
        merged = len(known.buckets) - (buckets_max or 1) + 1
        if merged < 2:
            return call_values.Merged(merges=0, merged_buckets=0, buckets=len(known.buckets))
        positions = [known.buckets.pop(name) for name in list(known.buckets)[:merged]]
        known.buckets[f"merged-{len(known.buckets)}"] = type(positions[0])().union(*positions)
        return call_values.Merged(merges=1, merged_buckets=merged, buckets=len(known.buckets))

    async def delete_topic(self, topic: str) -> call_values.TopicDeleted:
        await self._begin()
        known = self._topic(topic)
        gone = errors.NotFound(f"topic: {topic!r} was deleted")
        for subscription in known.subscriptions.values():
            for stream in subscription.streams:
                stream.lose(gone)
        del self.topics[topic]
        self._incarnations[topic] = known.incarnation
        return call_values.TopicDeleted(rows=len(known.rows), incarnation=known.incarnation)

    async def lookup(self, topic: str) -> call_values.TopicLocation:
        await self._begin()
        self._check_names(topic)
        return call_values.TopicLocation(shard=0, owner_address=ADDRESS, owner=OWNER, epoch=EPOCH, served_here=True)

    @property
    def health(self) -> call_values.Health:
        return self._health

    def on_health_change(self, callback: Callable[[call_values.Health], None]) -> None:
        self._on_health_change.append(callback)

    def set_health(self, health: call_values.Health) -> None:
        self._health = health
        for callback in self._on_health_change:
            callback(health)

    def find(self, topic: str, subscription: str) -> Subscription:
        self._check_names(topic, subscription)
        if topic not in self.topics or subscription not in self.topics[topic].subscriptions:
            raise errors.NotFound(f"subscription: there is no {subscription!r} of topic {topic!r}")
        return self.topics[topic].subscriptions[subscription]

    def _topic(self, topic: str) -> Topic:
        self._check_names(topic)
        if topic not in self.topics:
            raise errors.NotFound(f"topic: there is no {topic!r}")
        return self.topics[topic]

    def _topic_to_write(self, topic: str) -> Topic:
        if topic not in self.topics:
            self.topics[topic] = Topic(incarnation=self._incarnations.get(topic, 0) + 1)
        return self.topics[topic]

    def _check_names(self, topic: str, subscription: str | None = None) -> None:
        limits.check_name("topic", topic, self.settings.limits.topic_bytes_max)
        if subscription is not None:
            limits.check_name("subscription", subscription, self.settings.limits.subscription_bytes_max)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until calls and streams have made the condition true; fails after minutes."""
        async with asyncio.timeout(300):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    def alone_in_s(self, topic: str) -> float:
        return self.former_owner_s

    async def _begin(self) -> int:
        """The time of the call, when nothing holds it up."""
        self.calls_begun += 1
        self._happened.set()
        if self.fail_with is not None:
            raise self.fail_with
        if self.hold is not None:
            await self.hold.wait()
        return self.now_ms()


def _effective(policy: TopicPolicy) -> TopicPolicy:
    given = {name: value for name, value in dataclasses.asdict(policy).items() if value is not None}
    return dataclasses.replace(DEFAULT_POLICY, **given)


def _column(rows: list[int]) -> U32:
    return np.array(rows, np.uint32)
