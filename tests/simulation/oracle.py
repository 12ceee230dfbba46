"""What is true: every row and subscription by what has landed in the store, in plain dicts.

A slot counts from the moment at which its PUT takes effect, whoever has been answered; so the truth is certain where
the clients are not. It is naive: one record after the other, one position at a time.

Owns: the truth, and the rules that hold for what lands: one row for each position, epochs that only grow, nothing
removed that nobody asked to remove.
Does not own: logs (`log_truth`), objects (`objects`), answers (`promises`), and what a daemon has in memory (`quiet`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from daemon.settings import DeletionSettings, LimitsSettings
from storage_backends.formats import index_ids, manifest, names, slot_format
from storage_backends.formats.row_columns import Rows
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA
from tests._support import fault_places
from tests.simulation.deletion_truth import ShardDeletions
from tests.simulation.history import History
from tests.simulation.log_truth import Logs
from tests.simulation.objects import Objects, positions_of
from tests.simulation.positions import Position, entry_of, in_index, index_of, is_part, named, owner_of
from tests.simulation.redelivery_truth import Asked, Nacked, Redeliveries, RedeliveryTruth
from tests.simulation.refusals import Refusals, facts_of, facts_of_deletions

# That a topic or a subscription was deleted is in no slot: its owner may apply so many before it is told.
UNKNOWN_SLOTS = 10_000


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """A row that is not gone. `slot`: the slot that brought it, `since`: the one since which its position has had a
    row, at one time or another. `acknowledged`: by which subscription in which slot. `index`: 0 is the shared one.
    `was_due_ms`: the earliest time that it had before it was rescheduled. `nacked`: by subscription; `handed_out`: the
    last epoch under which it was handed out to a subscription, and the slot of its `nacked` then, `handed_out_s`: when.
    `level`: the delay level that it was added by, `key_hash`: of its key, 0 without one. `schedule_id`: empty without
    one.
    """

    deliver_at_ms: int
    slot: int
    since: int
    acknowledged: dict[int, int] = dataclasses.field(default_factory=dict)
    index: int = 0
    was_due_ms: int | None = None
    nacked: dict[int, Nacked] = dataclasses.field(default_factory=dict)
    handed_out: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    handed_out_s: dict[int, float] = dataclasses.field(default_factory=dict)
    level: int = 0
    key_hash: int = 0
    schedule_id: bytes = b""

    def generation(self, subscription_id: int) -> tuple[int, int]:
        """Another one means that a subscription may be handed it out again."""
        nacked = self.nacked.get(subscription_id)
        return self.slot, 0 if nacked is None else nacked.slot

    def count(self, subscription_id: int) -> int:
        """How often the subscription has handed it back."""
        nacked = self.nacked.get(subscription_id)
        return 0 if nacked is None else nacked.count

    @property
    def earliest_ms(self) -> int:
        return self.deliver_at_ms if self.was_due_ms is None else min(self.was_due_ms, self.deliver_at_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """A row that left before it was due. `slot`: of its cancellation or reschedule, `row`: the slot that brought it."""

    slot: int
    row: int
    deliver_at_ms: int


@dataclasses.dataclass(slots=True)
class TopicTruth:
    """What is true of one topic.

    `added`, `removed`: the slots that brought and removed the latest row of a position. `asked`: the times that adds
    were sent with, None for a delay. `buckets`: the live ones that can be read, and the slot of each seal.
    `keys`: by ledger and entry, the positions in any index that have ever had a row.
    `missing`: rows of those that were quarantined, until they are added again. Where a bucket does not say any more
    what it held, nobody can tell which of them a trim removed; `trimmed`: whether there was one. `left`: how the latest
    row of a position left before it was due, if it did. `sharing_changed`: whether the policy has ever said otherwise
    than before if subscriptions share an index. `withdrawn`: how often rows of an entry left otherwise than by an
    acknowledgement. `waived`: what is kept, since a slot, from subscriptions that are not in the manifest yet.
    """

    name: str = ""
    incarnation: int = 0
    deleted: bool = False
    epoch: int = 0
    rows: dict[Position, Row] = dataclasses.field(default_factory=dict)
    subscriptions: dict[int, manifest.Subscription] = dataclasses.field(default_factory=dict)
    added: dict[Position, int] = dataclasses.field(default_factory=dict)
    removed: dict[Position, int] = dataclasses.field(default_factory=dict)
    removed_at_s: dict[Position, float] = dataclasses.field(default_factory=dict)
    newest: manifest.TopicManifest | None = None
    left: dict[Position, Left] = dataclasses.field(default_factory=dict)
    asked: dict[Position, set[int | None]] = dataclasses.field(default_factory=dict)
    missing: dict[Position, Row] = dataclasses.field(default_factory=dict)
    keys: dict[Position, set[Position]] = dataclasses.field(default_factory=dict)
    buckets: dict[str, int] = dataclasses.field(default_factory=dict)
    quarantined: set[str] = dataclasses.field(default_factory=set)
    trimmed: bool = False
    sharing_changed: bool = False
    redeliveries: Redeliveries = dataclasses.field(default_factory=Redeliveries)
    withdrawn: collections.Counter[Position] = dataclasses.field(default_factory=collections.Counter)
    waived: list[tuple[int, slot_format.WaiveRecord]] = dataclasses.field(default_factory=list)

    @property
    def shared_index(self) -> bool:
        """Whether a row for everybody is one row."""
        return self.newest is None or self.newest.deleted or self.newest.policy.shared_index is not False

    def asked_as(self, number: int, position: Position) -> Asked:
        """What a subscription's requests name a position."""
        return self.subscriptions[number].name, *named(position)

    def owes(self, row: Row) -> Iterator[int]:
        """The subscriptions that are owed the row and have not acknowledged it."""
        if row.index:
            owner = index_ids.subscription_of(row.index)
            if owner in self.subscriptions and owner not in row.acknowledged:
                yield owner
            return
        for number, stored in self.subscriptions.items():
            if row.deliver_at_ms > stored.since_ms and number not in row.acknowledged:
                yield number


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Removal:
    """A request that removes rows: a subscription is deleted, or (`positions`) rows are trimmed, for one subscription
    or (None) for all, or (everything) the topic is deleted; or (`cancels`) rows are cancelled. `buries`: what is
    trimmed becomes dead letters.
    """

    topic: str
    subscription: str | None
    positions: Callable[[Position], bool] | None = None
    cancels: bool = False
    buries: bool = False

    def names(self, position: Position) -> bool:
        return self.positions is not None and self.positions(entry_of(position))


def everything(position: Position) -> bool:
    """What is removed with a topic, or cleared."""
    return True


class Oracle:
    """Fed by the store in which everything lands."""

    def __init__(
        self, history: History, now_s: Callable[[], float], deletion: DeletionSettings, limits: LimitsSettings
    ) -> None:
        self.now_s = now_s
        self.shard_deletions: dict[int, ShardDeletions] = {}
        """By shard, what its slots say of deletions of ledgers."""
        self._deletion = deletion
        self.topics: dict[str, TopicTruth] = {}
        self.epochs: dict[int, int] = {}
        """By shard: the highest epoch that a shard manifest gave."""
        self.removals: dict[int, Removal] = {}
        """Requests under way that may remove rows."""
        self.began_behind: dict[tuple[int, int], int] = {}
        """By shard and epoch: the last slot before it."""
        self.applied_ms: dict[tuple[int, int], int] = {}
        """By shard and slot: the latest time that a wall clock had shown when its owner had applied it for certain."""
        self.handed_out: dict[tuple[str, Position, int], int] = {}
        """By topic, position and slot of a row: the last epoch under which it was handed out."""
        self.leaving: Callable[[int, int, str], None] = lambda shard, epoch, what: None
        """Told of each row that is decided to leave before it is due: the shard, the epoch, and what."""
        self.latest_ms: Callable[[], int] = lambda: 0
        """The latest time that a wall clock of any daemon has shown."""
        self._history = history
        self._redeliveries = RedeliveryTruth(self, history.breach, limits)
        # By log, the sections of its last slot: shards and their slots. One slot is under way at a time.
        self._under_way: dict[str, list[tuple[int, int]]] = {}
        self._by_name: dict[str, TopicTruth] = {}
        self.objects = Objects(history)
        self.logs = Logs(history)
        self.refusals = Refusals(history)

    def topic(self, name: str) -> TopicTruth:
        topic = self._by_name.get(name)
        if topic is None:
            topic = self._by_name[name] = self.topics.setdefault(names.topic_id(name), TopicTruth(name=name))
        return topic

    def deletions(self, shard: int) -> ShardDeletions:
        found = self.shard_deletions.get(shard)
        if found is None:
            found = self.shard_deletions[shard] = ShardDeletions(self._deletion, self._history.breach)
        return found

    def last_slot(self, shard: int) -> int:
        """The last one that landed."""
        return self.logs.last(shard).last_slot

    # ---- what lands

    def landed(self, key: str, body: bytes) -> None:
        """An object that did not exist was created."""
        parts = key.split("/")
        if fault_places.is_slot(key):
            self._log_slot(key, body)
        elif parts[0] == "dead_objects":
            self.objects.given_up(key)
        elif parts[0] != "shards":
            return
        elif parts[2] == "manifest":
            self._shard_manifest(manifest.decode_shard_manifest(body))
        elif parts[2] == "topics" and parts[4] == "manifest":
            self._topic_manifest(int(parts[1]), manifest.decode_topic_manifest(body))

    def _shard_manifest(self, landed: manifest.ShardManifest) -> None:
        before = self.epochs.get(landed.shard, 0)
        if landed.epoch < before:
            self._history.breach(f"shard {landed.shard}: a manifest of epoch {landed.epoch} follows epoch {before}")
        if landed.epoch != before:
            self.began_behind[landed.shard, landed.epoch] = self.last_slot(landed.shard)
        self.epochs[landed.shard] = landed.epoch
        self.objects.shard_landed(landed)
        self.logs.shard_landed(landed)

    def deleting(self, key: str) -> None:
        """Somebody deletes an object, or does so again."""
        if fault_places.is_slot(key):
            self.logs.deleting(key)
        else:
            self.objects.deleting(key)

    def _topic_manifest(self, shard: int, landed: manifest.TopicManifest) -> None:
        topic = self.topics.setdefault(landed.topic_id, TopicTruth())
        self.objects.topic_landed(shard, topic.newest, landed)
        self.refusals.committed(topic.newest, landed)
        shared = topic.shared_index
        topic.newest = landed
        topic.sharing_changed |= topic.shared_index != shared
        topic.name = landed.topic
        if landed.owner_epoch < topic.epoch:
            self._history.breach(
                f"topic {topic.name}: a manifest of epoch {landed.owner_epoch} follows epoch {topic.epoch}"
            )
        topic.epoch = landed.owner_epoch
        if landed.deleted and not topic.deleted:
            asked = (each for each in self.removals.values() if each.topic == topic.name)
            if not any(each.positions is everything for each in asked):
                self._history.breach(f"topic {topic.name} is deleted and nobody asked for it")
            for position in [*topic.rows, *topic.missing]:
                self._remove(topic, landed.applied + UNKNOWN_SLOTS, position)
        if landed.incarnation != topic.incarnation + (landed.deleted and not topic.deleted) and topic.incarnation:
            self._history.breach(f"topic {topic.name}: incarnation {landed.incarnation} follows {topic.incarnation}")
        topic.incarnation = landed.incarnation
        topic.deleted = landed.deleted
        self._live_buckets(topic, landed)
        topic.subscriptions = {each.subscription_id: each for each in landed.subscriptions}
        topic.redeliveries.keep({number: each.policy for number, each in topic.subscriptions.items()})
        owners = {0, *topic.subscriptions}
        for position in [each for each in (*topic.rows, *topic.missing) if owner_of(each) not in owners]:
            self._remove(topic, landed.applied + UNKNOWN_SLOTS, position)
        for row in topic.rows.values():
            row.acknowledged = {
                number: slot for number, slot in row.acknowledged.items() if number in topic.subscriptions
            }
        waived, topic.waived = topic.waived, []
        for slot, record in waived:
            self._waive(topic, slot, record)

    def _live_buckets(self, topic: TopicTruth, landed: manifest.TopicManifest) -> None:
        """What a quarantined bucket held is missing from now on."""
        names_live = {live.object.name for live in landed.live}
        left = {name: slot for name, slot in topic.buckets.items() if name not in names_live}
        for live in landed.live:
            name = live.object.name
            if not live.quarantined:
                # A merged bucket holds what its sources held.
                sealed_slot = max(left.values(), default=0) if live.level else landed.applied
                topic.buckets.setdefault(name, sealed_slot)
                continue
            sealed_slot = topic.buckets.pop(name, landed.applied)
            if name in topic.quarantined:
                continue
            topic.quarantined.add(name)
            for stored, deliver_at_ms in self.objects.buckets[name].rows:
                position = in_index(stored, live.subscription_id)
                row = topic.rows.get(position)
                if row is not None and row.deliver_at_ms == deliver_at_ms and row.slot <= sealed_slot:
                    topic.missing[position] = topic.rows.pop(position)
                    topic.withdrawn[entry_of(position)] += 1
        topic.buckets = {name: slot for name, slot in topic.buckets.items() if name in names_live}

    def _log_slot(self, key: str, body: bytes) -> None:
        sections = self.logs.landed(key, body)
        if not sections:
            return
        log_id = key.split("/")[1]
        # A slot is sent when the one before it was applied.
        for section in self._under_way.get(log_id, ()):
            self.applied_ms[section] = self.latest_ms()
        self._under_way[log_id] = [(header.shard, header.slot) for header, _, _ in sections]
        for header, records, deletions in sections:
            self._section(header, records)
            for decided in deletions:
                self.deletions(header.shard).landed(decided)
                self.refusals.landed(header, facts_of_deletions(decided))

    def _section(self, header: slot_format.SlotHeader, records: Iterable[slot_format.Record]) -> None:
        for record in records:
            topic = self.topics.setdefault(record.topic_id, TopicTruth())
            if record.incarnation == topic.incarnation:
                self.refusals.landed(header, facts_of(record))
                self._record(topic, header, record)

    def _record(self, topic: TopicTruth, header: slot_format.SlotHeader, record: slot_format.Record) -> None:
        slot = header.slot
        if isinstance(record, slot_format.WaiveRecord):
            self._waive(topic, slot, record)
            return
        index = record.subscription_id
        if index and index_ids.subscription_of(index) not in topic.subscriptions:
            # The subscription was removed.
            return
        if isinstance(record, slot_format.AddRecord):
            for (ledger_id, entry_id, deliver_at_ms), key_hash, schedule_id in _with_keys(record.rows):
                position = in_index((ledger_id, entry_id), index)
                self._add(topic, slot, position, deliver_at_ms, record.delay_level, key_hash, schedule_id)
        elif isinstance(record, slot_format.RescheduleRecord):
            for (ledger_id, entry_id, deliver_at_ms), key_hash, schedule_id in _with_keys(record.rows):
                position = in_index((ledger_id, entry_id), index)
                self._reschedule(topic, header, position, deliver_at_ms, key_hash, schedule_id)
        elif isinstance(record, slot_format.AcknowledgeRecord):
            rows = record.rows
            named = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
            for ledger_id, entry_id, deliver_at_ms in zip(*named, strict=True):
                position = in_index((ledger_id, entry_id), record.index_id)
                self.acknowledged(topic, slot, index, position, deliver_at_ms)
        elif isinstance(record, slot_format.GoneRecord):
            self._gone(topic, header, record)
        else:
            self._redeliveries.landed(topic, header, record)

    def _add(
        self,
        topic: TopicTruth,
        slot: int,
        position: Position,
        deliver_at_ms: int,
        level: int,
        key_hash: int,
        schedule_id: bytes,
    ) -> None:
        if not self._was_asked(topic, position, deliver_at_ms):
            self._history.breach(f"topic {topic.name}: nobody added {position} for {deliver_at_ms}")
        self.new_row(topic, slot, position, deliver_at_ms, level, key_hash, schedule_id)

    def new_row(
        self,
        topic: TopicTruth,
        slot: int,
        position: Position,
        deliver_at_ms: int,
        level: int = 0,
        key_hash: int = 0,
        schedule_id: bytes = b"",
    ) -> None:
        if position in topic.rows:
            self._history.breach(f"topic {topic.name}: position {position} has two rows")
        if position in topic.missing:
            self._remove(topic, slot, position)
        if not is_part(position):
            topic.keys.setdefault(position[:2], set()).add(position)
        topic.rows[position] = Row(
            deliver_at_ms,
            slot,
            slot,
            index=index_of(position),
            level=level,
            key_hash=key_hash,
            schedule_id=schedule_id,
        )
        topic.added[position] = slot

    def _reschedule(
        self,
        topic: TopicTruth,
        header: slot_format.SlotHeader,
        position: Position,
        deliver_at_ms: int,
        key_hash: int,
        schedule_id: bytes,
    ) -> None:
        # That its bucket is quarantined may land between the decision and its slot.
        row = topic.rows.get(position) or topic.missing.get(position)
        if row is None:
            self._history.breach(f"topic {topic.name}: {position} is rescheduled and has no row")
            return
        if not self._was_asked(topic, position, deliver_at_ms):
            self._history.breach(f"topic {topic.name}: nobody rescheduled {position} to {deliver_at_ms}")
        if row.schedule_id and not schedule_id:
            self._history.breach(f"topic {topic.name}: {position} is rescheduled and loses its id {row.schedule_id!r}")
        self._leave(topic, header, position, row)
        # Who is not owed it any more, since it was trimmed for them, is not owed it at another time.
        topic.rows[position] = Row(
            deliver_at_ms,
            header.slot,
            row.since,
            dict(row.acknowledged),
            row.index,
            row.earliest_ms,
            key_hash=key_hash,
            schedule_id=schedule_id,
        )
        topic.added[position] = header.slot

    def _leave(self, topic: TopicTruth, header: slot_format.SlotHeader, position: Position, row: Row) -> None:
        """A row is cancelled or rescheduled."""
        topic.withdrawn[entry_of(position)] += 1
        if self.handed_out.get((topic.name, position, row.slot)) == header.epoch:
            self._history.breach(
                f"topic {topic.name}: {position} of {row.deliver_at_ms} leaves as if it were not due, and was handed "
                f"out under epoch {header.epoch}"
            )
        self.leaving(header.shard, header.epoch, f"topic {topic.name}: {position} is decided to leave")
        self._remove(topic, header.slot, position)
        topic.left[position] = Left(header.slot, row.slot, row.deliver_at_ms)

    def _was_asked(self, topic: TopicTruth, position: Position, deliver_at_ms: int) -> bool:
        raised_ms = max((each.since_ms for each in topic.subscriptions.values()), default=0) + 1
        asked = topic.asked.get(position[:2], set())
        if None in asked or deliver_at_ms in asked:
            return True
        return deliver_at_ms == raised_ms and any(time is not None and time < raised_ms for time in asked)

    def acknowledged(
        self,
        topic: TopicTruth,
        slot: int,
        subscription_id: int,
        position: Position,
        deliver_at_ms: int,
        *,
        died: bool = False,
    ) -> None:
        row = topic.rows.get(position)
        if row is None:
            return
        # A part that leaves with its entry is named without its time.
        if row.deliver_at_ms != deliver_at_ms and not (is_part(position) and not deliver_at_ms):
            self._history.breach(
                f"topic {topic.name}: position {position} of {row.deliver_at_ms} is acknowledged as of {deliver_at_ms}"
            )
        row.acknowledged[subscription_id] = slot
        if not is_part(position):
            count = row.count(subscription_id)
            topic.redeliveries.entry_ended(subscription_id, position[:2], slot, count, died=died)
        if all(topic.subscriptions[number].created_slot >= slot for number in topic.owes(row)):
            self._remove(topic, slot, position)

    def _gone(self, topic: TopicTruth, header: slot_format.SlotHeader, record: slot_format.GoneRecord) -> None:
        for stored in positions_of(record.positions):
            position = in_index(stored, record.subscription_id)
            topic.withdrawn[entry_of(position)] += 1
            row = topic.rows.get(position)
            if row is None:
                missing = topic.missing.get(position)
                if missing is not None and record.reason is slot_format.GoneReason.CANCELLED:
                    self._leave(topic, header, position, missing)
                elif missing is not None:
                    self._remove(topic, header.slot, position)
                continue
            owed: set[str | None] = {topic.subscriptions[number].name for number in topic.owes(row)}
            if not self._may_go(topic, record.reason, position, owed):
                self._history.breach(
                    f"topic {topic.name}: {position} is made gone ({record.reason.name}) and is owed to {owed}"
                )
            if record.reason is slot_format.GoneReason.CANCELLED:
                self._leave(topic, header, position, row)
            else:
                self._remove(topic, header.slot, position)

    def _may_go(
        self, topic: TopicTruth, reason: slot_format.GoneReason, position: Position, owed: Set[str | None]
    ) -> bool:
        asked = [each for each in self.removals.values() if each.topic == topic.name]
        if reason is slot_format.GoneReason.CANCELLED:
            return any(each.cancels and each.names(position) for each in asked)
        asked = [each for each in asked if not each.cancels]
        if reason is slot_format.GoneReason.NOT_OWED:
            return not owed and bool(topic.subscriptions)
        if reason is slot_format.GoneReason.NO_SUBSCRIPTION:
            deleted = {each.subscription for each in asked if each.positions is None}
            return owed <= deleted
        trimmed = {each.subscription for each in asked if each.names(position)}
        return None in trimmed or owed <= trimmed

    def _waive(self, topic: TopicTruth, slot: int, record: slot_format.WaiveRecord) -> None:
        stored = topic.subscriptions.get(record.subscription_id)
        if stored is None:
            topic.waived.append((slot, record))
            return
        if stored.created_slot >= slot:
            # It was meant for another one, which was never in the manifest.
            return
        asked = [
            each.positions
            for each in self.removals.values()
            if (each.topic, each.subscription) == (topic.name, stored.name)
            and each.positions is not None
            and not each.cancels
        ]
        for position in positions_of(record.positions):
            topic.withdrawn[entry_of(position)] += 1
            row = topic.rows.get(position)
            if row is None or record.subscription_id in row.acknowledged:
                # A row that was trimmed before says so again when it is rescheduled.
                continue
            # It was not owed the row that was rescheduled: that one came due before the subscription was created.
            never_owed = row.earliest_ms <= stored.since_ms
            # Or it is due later, by a clock that was ahead.
            never_owed |= row.slot <= stored.created_slot and row.deliver_at_ms <= self.latest_ms()
            if not never_owed and not any(positions(position[:2]) for positions in asked):
                self._history.breach(
                    f"topic {topic.name}: {position} is waived and nobody trimmed it for {stored.name}"
                )
            row.acknowledged[record.subscription_id] = slot

    def _remove(self, topic: TopicTruth, slot: int, position: Position) -> None:
        topic.rows.pop(position, None)
        topic.missing.pop(position, None)
        topic.removed[position] = slot
        topic.removed_at_s[position] = self.now_s()


def _with_keys(rows: Rows) -> Iterator[tuple[tuple[int, int, int], int, bytes]]:
    """(ledger, entry, deliver_at_ms), key hash and schedule id of each row."""
    columns = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
    hashes: list[int] = [0] * len(rows) if rows.key_hash is None else rows.key_hash.tolist()
    yield from zip(zip(*columns, strict=True), hashes, rows.listed_ids(), strict=True)


class WatchedStore(MemoryStore):
    """The store in which everything lands, and the oracle that sees it."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self._oracle = oracle

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        super().put(key, body, metadata=metadata)
        if fault_places.is_slot(key) or "/manifest/" in key:
            self._oracle.landed(key, body)
        elif "/buckets/" in key:
            self._oracle.objects.bucket_written(key, body)
        elif "/properties/" in key:
            self._oracle.objects.properties.written(key, body)

    def damage(self, key: str, place: int | None) -> None:
        """The store loses an object (None), or one of its bytes is another one from now on."""
        self._oracle.objects.damaged(key)
        with self._lock:
            stored = self._objects[key]
            body = stored.body
            if place is None:
                del self._objects[key]
            else:
                damaged = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
                self._objects[key] = dataclasses.replace(stored, body=damaged)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        self._oracle.landed(key, body)

    def delete(self, key: str) -> None:
        self._oracle.deleting(key)
        super().delete(key)
