"""Gives up the damaged or lost newest slots of a dead daemon's log, for `tarryd give-up` alone.

    the newest slot that can be read        shows how far the log certainly goes for each shard
    each later slot                         may have had one section of each shard, with unknown content
    as many sections without a record       are written after the end; then the log can be fenced like any other
    damaged sections of the newest slot     are replaced in it by sections without a record, once the log has its end

The numbers of sections that are given up are not used again. Topics and checkpoints may have recorded them as applied,
and would skip new content under these numbers.

The model of the log protocol found these limits. A fence, or the end of the command, may come between several slots
that are written; a topic that was sealed as of a later number is then refused until other topics use up the numbers.
Damage above a FENCE that is not the highest slot is counted from that FENCE. A shard that was reclaimed in the damaged
log stays damaged if its last section before that is given up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import ulid

from daemon.errors import Corruption
from daemon.owner import heartbeat
from daemon.owner.traces import Traces
from daemon.shard import checkpointing, range_operations
from storage_backends import (
    commit,
    log_fence,
    object_store,
    root_format,
    shard_manifests,
    store_opening,
    topic_manifest,
)
from storage_backends.formats import checkpoint_format, format_errors, log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import Head, LogSlot, LogSlotHeader, LogSlotKind, ShardSlot, Writer
from storage_backends.formats.manifest import CheckpointCut, LogRange, ShardManifest, TopicManifest
from storage_backends.shard_listing import ShardListing
from storage_backends.slot_log import SlotLog


class StillWritten(Exception):
    """The error if another process has written after the end of the log, or a manifest of the shard."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard whose manifest names an owner. `known` is the highest shard slot that any stored object mentions."""

    tip: ShardManifest
    known: int

    @classmethod
    def of(cls, tip: ShardManifest, topics: Iterable[TopicManifest]) -> OwnedShard:
        """Make it from the shard's manifest, and the newest manifest of each of its topics."""
        return cls(tip, max((tip.checkpoint_slot, *(int(each.applied) for each in topics))))

    def range_in(self, log_id: str) -> LogRange | None:
        """Return the range that is open in the log, or None if its owner writes another one."""
        owned = self.tip.open_range
        return owned if owned is not None and owned.log_id == log_id else None


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """The content that is given up: that of the log's slots with after < number <= through.

    `highest` is the highest slot that exists. `heads` says how far each shard certainly goes. `sections` is the number
    of sections without a record to write for each shard that the log's daemon owned. `first` has the first slot that
    may have them, for shards that begin behind the end of the log.
    """

    log_id: str
    after: int
    through: int
    highest: int
    heads: Mapping[int, Head]
    sections: Mapping[int, int]
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def slots(self) -> list[tuple[int, bytes]]:
        """Return the slots to write: numbers and bytes. Raises Damaged if one would have no section."""
        heads, made = dict(self.heads), []
        begins = {shard: self.first.get(shard, self.highest + 1) for shard in self.sections}
        ends = {shard: begins[shard] + count for shard, count in self.sections.items()}
        for number in range(self.highest + 1, max(ends.values())):
            these = [shard for shard in self.sections if begins[shard] <= number < ends[shard]]
            heads |= {shard: Head(heads[shard].epoch, heads[shard].last_slot + 1) for shard in these}
            bodies = _without_records({shard: heads[shard] for shard in these})
            if not bodies:
                raise object_store.Damaged(
                    names.log_slot_key(self.log_id, number),
                    "it is missing, and the manifests say that no shard had a section there: restore it, or restore "
                    "log and manifests as of one time",
                )
            whole = LogSlotHeader(log_id=self.log_id, number=number, kind=LogSlotKind.DATA, heads=dict(heads))
            made.append((number, log_slot_format.encode_log_slot(whole, bodies)))
        return made

    def describe(self) -> str:
        """Describe the loss to the operator, who has to accept it."""
        lost = [
            f"shard {shard} sections {self.heads[shard].last_slot + 1} to {self.heads[shard].last_slot + count}"
            for shard, count in sorted(self.sections.items())
            if count
        ]
        return (
            f"log {self.log_id}: nothing is known of what slots {self.after + 1} to {max(self.through, self.highest)} "
            f"held: the last that was added, acknowledged or changed is lost, if anything: {', '.join(lost)}"
        )


def find_loss(slots: SlotLog, shards: Iterable[OwnedShard], *, told: int) -> Loss | None:
    """Find damaged or lost slots at the end of a log; change nothing. Returns None if the log can be fenced as it is.

    `told` is the slot that was certain to the log's daemon, by its heartbeat; manifests may name later ones. Raises
    Damaged if the log has no slot, if its daemon owns no shard, or if more is lost than can be; and the store's errors.
    """
    numbers = slots.numbers()
    if not numbers:
        raise object_store.Damaged(names.log_prefix(slots.log_id), "it has no slot: there is nothing to go by")
    highest = numbers[-1]
    newest = _newest_whole(slots, numbers)
    owned = {each.tip.shard: (each, of_log) for each in shards if (of_log := each.range_in(slots.log_id)) is not None}
    named = max((0, *(number for each, _ in owned.values() for number in each.tip.certain_in(slots.log_id))))
    if newest is not None and newest.header.kind.ends and newest.header.number == highest >= told and highest > named:
        return None
    if not owned:
        raise object_store.Damaged(
            names.log_prefix(slots.log_id), "its daemon owns no shard: nothing waits for its end"
        )
    if newest is None:
        after = min(of_log.after for _, of_log in owned.values())
    else:
        # A fence that is not the end has the number of an emptied slot, and the heads of the slot before it.
        after = newest.header.number - newest.header.kind.ends
    heads = {} if newest is None else dict(newest.header.heads)
    for shard, (each, of_log) in owned.items():
        if shard not in heads or heads[shard].epoch != of_log.epoch:
            before = of_log.first_slot - 1
            heads[shard] = Head(of_log.epoch, max(before, each.tip.checkpoint_slot) if newest is None else before)
    # The fence relies on the slot that is written last, so one at least is needed if the highest cannot be read.
    through = max(highest, told, named)
    first = {shard: of_log.after + 1 for shard, (_, of_log) in owned.items() if of_log.after > highest}
    sections = {
        shard: max(
            through - max(after, first.get(shard, 0) - 1), each.known - heads[shard].last_slot, int(newest is None), 0
        )
        for shard, (each, _) in owned.items()
    }
    if not any(sections.values()):
        return None
    if max(*sections.values(), through - highest) > LOST_MAX:
        raise object_store.Damaged(
            names.log_prefix(slots.log_id),
            f"it ends at slot {highest}, and heartbeat, manifests or topics name slot {through} or sections that are "
            f"more than {LOST_MAX} later: they are wrong; restore them, or delete the heartbeat if it is wrong",
        )
    return Loss(slots.log_id, after, through, highest, heads, sections, first)


def fill_lost_slots(slots: SlotLog, loss: Loss) -> None:
    """Write slots in place of the lost ones. After an error, find the loss again and give up that one.

    Raises StillWritten if the log continues, and the store's errors.
    """
    for number, body in loss.slots():
        try:
            slots.create(number, body)
        except (object_store.AlreadyExists, object_store.OutcomeUnknown) as error:
            found = slots.head(number)
            if found is None:
                raise
            if found != log_slot_format.identity_of(body):
                raise StillWritten(f"slot {number} of log {loss.log_id} is there: its daemon lives") from error


@dataclasses.dataclass(frozen=True, slots=True)
class LostSections:
    """The damaged sections, by shard, of the newest slot of a log; `kept` are those that are whole."""

    header: LogSlotHeader
    kept: Mapping[int, bytes]
    lost: Mapping[int, Head]

    def slot(self) -> bytes:
        """Return the slot to write in place of the damaged one."""
        return log_slot_format.encode_log_slot(self.header, {**self.kept, **_without_records(self.lost)})

    def describe(self) -> str:
        """Describe the loss to the operator, who has to accept it."""
        lost = [f"shard {shard} section {head.last_slot}" for shard, head in sorted(self.lost.items())]
        return (
            f"log {self.header.log_id}: sections of slot {self.header.number}, its newest one, are damaged: what was "
            f"added, acknowledged or changed last is lost, in part or whole: {', '.join(lost)}"
        )


def find_lost_sections(slots: SlotLog, tips: Iterable[ShardManifest]) -> LostSections | None:
    """Find damaged sections of the newest slot that the shards need; None if there are none, or if it is unreadable.

    A section below a shard's checkpoint is not needed. Raises the store's errors.
    """
    number = slots.highest() or 0
    try:
        slot = log_fence.read_one(slots, number)
        if slot is not None and slot.header.kind.ends:
            slot = log_fence.read_one(slots, number - 1)
    except object_store.Damaged:
        return None
    if slot is None or slot.header.kind is not LogSlotKind.DATA:
        return None
    kept, damaged = {}, {}
    for shard in slot.shards:
        try:
            kept[shard] = slot.section(shard)
        except format_errors.FormatError:
            damaged[shard] = slot.header.heads[shard]
    lost = {
        tip.shard: head
        for tip in tips
        if (head := damaged.get(tip.shard)) is not None
        and head.last_slot > tip.checkpoint_slot
        and any(each.covers(slots.log_id, slot.header.number, head) for each in tip.ranges)
    }
    return LostSections(slot.header, kept, lost) if lost else None


def replace_lost_sections(slots: SlotLog, loss: LostSections, *, told: int) -> None:
    """Fence the log, and write sections without a record in place of the lost ones. May be repeated after an error.

    Raises StillWritten if the log continues, and the store's errors.
    """
    writer = Writer("tarryd give-up", "", "")
    fence = log_fence.fence_log(slots, writer, told=told, delays_s=iter(()), sleep=time.sleep)
    if fence.end != loss.header.number:
        raise StillWritten(f"log {slots.log_id} goes on after slot {loss.header.number}: its daemon has written it")
    slots.replace(loss.header.number, loss.slot())


def _without_records(heads: Mapping[int, Head]) -> dict[int, bytes]:
    """Return sections without a record, which only use their numbers up."""
    return {
        shard: slot_format.encode_slot(slot_format.SlotHeader(shard, head.epoch, ShardSlot(head.last_slot), 0), ())
        for shard, head in heads.items()
    }


def _newest_whole(slots: SlotLog, numbers: Sequence[int]) -> LogSlot | None:
    for number in reversed(numbers):
        try:
            found = log_fence.read_one(slots, number)
        except object_store.Damaged:
            continue
        if found is not None:
            return found
    return None


THREADS = 8
DEADLINE_S = 30.0
# Slots or sections that may be given up: a heartbeat or a manifest that is wrong may name any number.
LOST_MAX = 1_000_000


class _Ways(TypedDict):
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    jitter: Callable[[], float]
    new_id: Callable[[], str]


_WAYS: _Ways = {
    "monotonic": time.monotonic,
    "sleep": time.sleep,
    "jitter": random.random,
    "new_id": lambda: str(ulid.ULID()),
}


def resolve_loss(store: object_store.ObjectStore, log_id: str, *, accepted: bool, say: Callable[[str], object]) -> bool:
    """Return whether the log can be fenced now. With `accepted`, damaged and lost slots are given up.

    Otherwise nothing is written. Calls `say` with each line for the operator. Raises Corruption if there is no root,
    StillWritten if the log continues, and the store's errors.
    """
    root = root_format.read(store)
    if root is None:
        raise Corruption("there is no FORMAT: this is no root")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        slots = store_opening.open_logs(root.log_form, store, threads).log(log_id)
        with contextlib.closing(slots):
            told = heartbeat.last_told(heartbeat.read_heartbeats(store), log_id)
            tips = [tip for tip in _tips(store, root.shards) if any(each.log_id == log_id for each in tip.ranges)]
            owned = [OwnedShard.of(tip, _topics_of(store, tip.shard)) for tip in tips]
            loss = find_loss(slots, owned, told=told) or find_lost_sections(slots, tips)
            if loss is None:
                say(f"log {log_id}: no shard needs anything damaged at its end, a standby can take over")
                return True
            say(loss.describe())
            if not accepted:
                say("nothing was written; with --accept-loss this is given up, and a standby can take over")
                return False
            if isinstance(loss, LostSections):
                replace_lost_sections(slots, loss, told=told)
            else:
                fill_lost_slots(slots, loss)
    say("it was given up: a standby can take over")
    return True


def begin_anew(store: object_store.ObjectStore, shard: int, *, accepted: bool, say: Callable[[str], object]) -> bool:
    """Return whether the shard can be claimed. With `accepted`, one that has lost its manifests begins anew.

    Its topics are as they were sealed last, since their manifests hold that; what only checkpoints and logs had is
    given up. The numbers of epochs and sections that are known are not used again. Otherwise nothing is written. Calls
    `say` with each line for the operator. Raises Corruption if there is no such shard, StillWritten if it has got a
    manifest meanwhile, Damaged, and the store's errors.
    """
    root = root_format.read(store)
    if root is None or not 0 <= shard < root.shards:
        raise Corruption(f"there is no FORMAT of a root that has shard {shard}")
    manifests = shard_manifests.shard_log(store, shard, **_WAYS)
    if manifests.read_tip() is not None:
        say(f"shard {shard}: it has a manifest, a standby can claim it")
        return True
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        logs = store_opening.open_logs(root.log_form, store, threads)
        heads = dict(Traces(store, logs, lambda: ()).heads_of(shard))
    topics = [*_topics_of(store, shard)]
    slot = max((*(head.last_slot for head in heads.values()), *(int(each.applied) for each in topics)), default=0)
    # An owner that lives is superseded, also one that has not written anything.
    reported = [
        epoch
        for beat in heartbeat.read_heartbeats(store)
        for number, epoch in zip(beat.shards, beat.epochs, strict=False)
        if number == shard
    ]
    epoch = 1 + max(
        (*reported, *(head.epoch for head in heads.values()), *(each.owner_epoch for each in topics)), default=0
    )
    say(
        f"shard {shard}: it has no manifest. {len(topics)} topics are left as they were sealed; what checkpoints and "
        f"logs had of them, up to section {slot}, is lost, and so are topics without a manifest"
    )
    if not accepted:
        say("nothing was written; with --accept-loss this is given up, and a standby can claim the shard")
        return False
    known = {each.topic_id: each.head.number for each in topics}
    body = checkpoint_format.Checkpoint(shard, epoch, ShardSlot(slot), known=known)
    stored = checkpointing.write_checkpoint(store, body, base=0, unique=_WAYS["new_id"]())
    cut = CheckpointCut(object=stored, slot=slot, log_id=max(heads, default=_WAYS["new_id"]()), at=0)
    operation = range_operations.BeginAnew(shard=shard, epoch=epoch, cut=cut)
    try:
        commit.commit(
            manifests, operation, writer="tarryd give-up", created_ms=time.time_ns() // 1_000_000, deadline_s=DEADLINE_S
        )
    except commit.Refused as refused:
        raise StillWritten(f"shard {shard}: {refused.reason} by now: a standby can claim it") from refused
    say("it was given up: a standby can claim the shard")
    return True


def _tips(store: object_store.ObjectStore, shards: int) -> Iterator[ShardManifest]:
    for shard in range(shards):
        tip = shard_manifests.shard_log(store, shard, **_WAYS).read_tip()
        if tip is not None:
            yield tip.manifest


def _topics_of(store: object_store.ObjectStore, shard: int) -> Iterator[TopicManifest]:
    listing = ShardListing(shard)
    listing.add(store.list(names.topics_prefix(shard)))
    for topic_id in listing.topics:
        tip = topic_manifest.topic_log(store, shard, topic_id, **_WAYS).read_tip()
        if tip is not None:
            yield tip.manifest
