"""The end of a dead daemon's log whose newest slots are damaged or lost: an operator gives up what was in them.

    the newest slot that can be read        says how far the log certainly went for each shard
    each slot behind it                     may have had one section of each shard, of which nothing is known
    as many sections without a record       are written behind the end, and then the log can be fenced as any other

The numbers of sections that are given up are not used again: topics and checkpoints may have them already, and would
pass over what is written under them.

Owns: finding what is damaged or lost at the end of a log, and writing in its place.
Does not own: whether to (the operator), the fence and the claims that follow (`fences`, `takeover`).

What `tarryd give-up` does: an operator accepts that the newest slots of a dead daemon's log are damaged or lost.

Owns: reading the root for it, and what the operator is told. Does not own: the store and its settings
(`daemon.command`), what is damaged or lost, and what is written in its place (`daemon.owner.give_up`).
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
from storage_backends import log_fence, object_store, root_format, shard_manifests, store_opening, topic_manifest
from storage_backends.formats import log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import Head, LogSlot, LogSlotHeader, LogSlotKind, ShardSlot
from storage_backends.formats.manifest import LogRange, ShardManifest, TopicManifest
from storage_backends.shard_listing import ShardListing
from storage_backends.slot_log import SlotLog


class StillWritten(Exception):
    """Somebody else has written behind the end of the log."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard of which a manifest names an owner. `known`: the highest shard slot that anything stored tells of."""

    tip: ShardManifest
    known: int

    @classmethod
    def of(cls, tip: ShardManifest, topics: Iterable[TopicManifest]) -> OwnedShard:
        """`topics`: the newest manifest of each of its topics."""
        return cls(tip, max((tip.checkpoint_slot, *(int(each.applied) for each in topics))))

    def range_in(self, log_id: str) -> LogRange | None:
        """The range that is open in the log; None when its owner writes another one."""
        owned = self.tip.open_range
        return owned if owned is not None and owned.log_id == log_id else None


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """What is given up: of the log's slots with after < number <= through nothing is known. `highest`: the highest slot
    that is there. `heads`: how far each shard certainly goes. `sections`: how many sections without a record are to be
    written for each shard that the log's daemon owned.
    """

    log_id: str
    after: int
    through: int
    highest: int
    heads: Mapping[int, Head]
    sections: Mapping[int, int]

    def slots(self) -> list[tuple[int, bytes]]:
        """What is to be written: numbers and bytes."""
        heads, made = dict(self.heads), []
        for place in range(max(self.sections.values())):
            bodies = {}
            for shard, count in self.sections.items():
                if place < count:
                    heads[shard] = Head(heads[shard].epoch, heads[shard].last_slot + 1)
                    header = slot_format.SlotHeader(shard, heads[shard].epoch, ShardSlot(heads[shard].last_slot), 0)
                    bodies[shard] = slot_format.encode_slot(header, ())
            number = self.highest + 1 + place
            whole = LogSlotHeader(log_id=self.log_id, number=number, kind=LogSlotKind.DATA, heads=dict(heads))
            made.append((number, log_slot_format.encode_log_slot(whole, bodies)))
        return made

    def describe(self) -> str:
        """For the operator, who has to accept it."""
        shards = ", ".join(map(str, sorted(self.sections)))
        return (
            f"log {self.log_id}: nothing is known of what slots {self.after + 1} to {max(self.through, self.highest)} "
            f"held: the last that was added, acknowledged or changed in topics of shards {shards} is lost, if anything"
        )


def find_loss(slots: SlotLog, shards: Iterable[OwnedShard], *, told: int) -> Loss | None:
    """What is damaged or lost at the end of a log; None when it can be fenced as it is. Changes nothing.

    `told`: the slot that was certain to the log's daemon, by its heartbeat. Raises Damaged when there is
    nothing to go by, and the store's errors.
    """
    numbers = slots.numbers()
    if not numbers:
        raise object_store.Damaged(names.log_prefix(slots.log_id), "it has no slot: there is nothing to go by")
    highest = numbers[-1]
    newest = _newest_whole(slots, numbers)
    if newest is not None and newest.header.kind.ends and newest.header.number == highest:
        return None
    owned = {each.tip.shard: (each, of_log) for each in shards if (of_log := each.range_in(slots.log_id)) is not None}
    if not owned:
        raise object_store.Damaged(
            names.log_prefix(slots.log_id), "its daemon owns no shard: nothing waits for its end"
        )
    if newest is None:
        after = min(of_log.after for _, of_log in owned.values())
    else:
        # A fence that is not the end stands in a number that was emptied, and has the heads of the slot before it.
        after = newest.header.number - newest.header.kind.ends
    heads = {} if newest is None else dict(newest.header.heads)
    for shard, (each, of_log) in owned.items():
        if shard not in heads or heads[shard].epoch != of_log.epoch:
            before = of_log.first_slot - 1
            heads[shard] = Head(of_log.epoch, max(before, each.tip.checkpoint_slot) if newest is None else before)
    # The fence goes by the slot that is written last: one at least where the highest cannot be read.
    missing = max(max(highest, told) - after, int(newest is None))
    sections = {shard: max(missing, each.known - heads[shard].last_slot, 0) for shard, (each, _) in owned.items()}
    if not any(sections.values()):
        return None
    return Loss(slots.log_id, after, max(highest, told), highest, heads, sections)


def fill_lost_slots(slots: SlotLog, loss: Loss) -> None:
    """Writes in the place of what is lost. After an error it is looked for anew, and given up as it is found then.

    Raises StillWritten when the log goes on, and the store's errors.
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
    """Whether the log can be fenced now. `accepted`: what is damaged or lost is given up; otherwise nothing is written,
    and `say` hears what it is.

    Raises Corruption when it cannot be told, StillWritten when the log goes on, and the store's errors.
    """
    root = root_format.read(store)
    if root is None:
        raise Corruption("there is no FORMAT: this is no root")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        slots = store_opening.open_logs(root.log_form, store, threads).log(log_id)
        with contextlib.closing(slots):
            told = heartbeat.last_told(heartbeat.read_heartbeats(store), log_id)
            owned = [
                OwnedShard.of(tip, _topics_of(store, tip.shard))
                for tip in _tips(store, root.shards)
                if any(each.log_id == log_id for each in tip.ranges)
            ]
            loss = find_loss(slots, owned, told=told)
            if loss is None:
                say(f"log {log_id}: its newest slot is whole, a standby can take over")
                return True
            say(loss.describe())
            if not accepted:
                say("nothing was written; with --accept-loss this is given up, and a standby can take over")
                return False
            fill_lost_slots(slots, loss)
    say("it was given up: a standby can take over")
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
