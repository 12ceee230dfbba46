"""Reads the sections of shards out of logs: each log once for all shards, and for each shard all or none.

A shard is complete if it has every section that its manifest lists (L9). A log that the store cannot read fails the
shards that need it, and no other: `complete` raises for them.

A hole is damage of its shard alone, named by log, slot and section number. Before a caller reports one, and after it
has read the end of an open range, it reads the shard's manifest again: `judged` says what a change means. Callers read
the manifests and apply the records.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from storage_backends import log_fence, object_store
from storage_backends.formats import format_errors, names
from storage_backends.formats.log_slot_format import Head, Heads, LogSlot
from storage_backends.formats.manifest import LogRange, ShardManifest
from storage_backends.slot_log import SlotLog, SlotLogs

# Slots read and decoded at once, which bounds the memory in use
BATCH_SLOTS = 256


class Section(NamedTuple):
    """A section as it was found. `slot` is its section number, `body` its bytes (`slot_format`)."""

    epoch: int
    slot: int
    body: bytes
    log_id: str
    number: int


class LogEnd(NamedTuple):
    """The highest slot of a log: its number, and how far the log goes for each shard."""

    number: int
    heads: Heads


class Extent(NamedTuple):
    """The slots of a log with after < number <= through."""

    log_id: str
    after: int
    through: int


class EndDamaged(object_store.Damaged):
    """The error of a section in the last slot of a range, and so in the newest one of a log that has ended."""

    def __init__(self, log_id: str, number: int, reason: str) -> None:
        super().__init__(names.log_slot_key(log_id, number), reason)
        self.log_id = log_id


class Verdict(enum.Enum):
    """The verdict of a manifest on slots that were read by an older one.

    `SUPERSEDED` means that another owner has claimed the shard, `BEGIN_AGAIN` that slots may have been deleted while
    they were read, `STANDS` that the result is valid.
    """

    SUPERSEDED = enum.auto()
    BEGIN_AGAIN = enum.auto()
    STANDS = enum.auto()


def judged(read_by: ShardManifest, now: ShardManifest) -> Verdict:
    """Judge by `now`, read after the slots, what was read by `read_by`."""
    if now.epoch != read_by.epoch:
        return Verdict.SUPERSEDED
    for log_id in {each.log_id for each in read_by.ranges}:
        before, after = read_by.lowest_after(log_id), now.lowest_after(log_id)
        if before != after:
            return Verdict.BEGIN_AGAIN
    return Verdict.STANDS


class ShardSections:
    """The sections of one shard above a checkpoint, as its manifest lists them.

    It takes every slot of the logs, the logs in any order, and is complete at the end or not. Section numbers above
    `from_slot` are wanted.
    """

    def __init__(self, manifest: ShardManifest, from_slot: int) -> None:
        self._shard = manifest.shard
        self._from_slot = from_slot
        self._ranges = manifest.ranges
        self._found: dict[int, Section] = {}
        # (log id, number) -> why the slot, or the section in it, cannot be read
        self._damage: dict[tuple[str, int], str] = {}
        # Those of them whose slot is known to have a section of the shard
        self._damaged_sections: set[tuple[str, int]] = set()
        # The second section found for a section number, which is damage
        self._twice: Section | None = None
        # The store's error for a log that is needed
        self._unread: object_store.StoreError | None = None

    @property
    def shard(self) -> int:
        return self._shard

    def extents(self, ends: Mapping[str, LogEnd]) -> list[Extent]:
        """Return the extents to read, without ranges that have no wanted section.

        `ends` holds the end of each log that an open range names.
        """
        return [
            Extent(each.log_id, each.after, ends[each.log_id].number if each.through is None else each.through)
            for each in self._ranges
            if self._last_slot(each, ends) > self._from_slot
        ]

    def take(self, log_id: str, number: int, slot: LogSlot) -> None:
        """Take a slot of a log. Ignores a section that no range covers: it is not the shard's."""
        head = slot.header.heads.get(self._shard)
        if head is None or head.last_slot <= self._from_slot:
            return
        if not any(each.covers(log_id, number, head) for each in self._ranges):
            return
        try:
            body = slot.section(self._shard)
        except format_errors.FormatError as error:
            self._damage[log_id, number] = str(error)
            self._damaged_sections.add((log_id, number))
            return
        section = Section(head.epoch, head.last_slot, body, log_id, number)
        if self._found.setdefault(section.slot, section) is not section:
            self._twice = section

    def take_damaged(self, log_id: str, number: int, damage: str) -> None:
        """Take a slot that cannot be decoded; density shows whether it had a section of the shard."""
        self._damage[log_id, number] = damage

    def take_unread(self, error: object_store.StoreError) -> None:
        """Take the error that kept needed slots, if there are any, from being read."""
        self._unread = error

    def complete(self, ends: Mapping[str, LogEnd]) -> list[Section]:
        """Return every section, ascending.

        `ends` holds the end of each log that an open range names. Raises Damaged for a hole, for a section that is
        damaged or stored twice, and for an epoch that falls. Raises the store's error if a log could not be read: then
        no damage is known.
        """
        if self._unread is not None:
            raise self._unread
        last = self._from_slot
        for each in self._ranges:
            through = self._last_slot(each, ends)
            for slot in range(max(each.first_slot, last + 1), through + 1):
                found = self._found.get(slot)
                if found is None:
                    raise self._damaged(each, slot, "it is missing")
                if found.epoch != each.epoch:
                    raise self._damaged(each, slot, f"it is of epoch {found.epoch}, not {each.epoch}")
            if each.first_slot > last + 1:
                raise self._damaged(each, last + 1, "no log range has it")
            last = max(last, through)
        if self._twice is not None:
            log_id, number, slot = self._twice.log_id, self._twice.number, self._twice.slot
            first = self._found[slot]
            raise object_store.Damaged(
                names.log_slot_key(log_id, number),
                f"shard {self._shard}, shard slot {slot} is also in slot {first.number} of log {first.log_id}",
            )
        return [self._found[slot] for slot in sorted(self._found)]

    def _last_slot(self, each: LogRange, ends: Mapping[str, LogEnd]) -> int:
        if each.last_slot is not None:
            return each.last_slot
        head = ends[each.log_id].heads.get(self._shard, Head(0, 0))
        return head.last_slot if head.epoch == each.epoch else each.first_slot - 1

    def _damaged(self, each: LogRange, slot: int, detail: str) -> object_store.Damaged:
        """Return the error that names the slots of the log between which the section must lie."""
        lower = [found.number for found in self._found.values() if found.log_id == each.log_id and found.slot < slot]
        upper = [found.number for found in self._found.values() if found.log_id == each.log_id and found.slot > slot]
        after, before = max(lower, default=each.after), min(upper, default=(each.through or 0) + 1)
        reasons = [
            damage
            for (log_id, number), damage in sorted(self._damage.items())
            if log_id == each.log_id and after < number and (number < before or not upper)
        ]
        between = f"after slot {after}" + (f" and before slot {before}" if upper or each.through else "")
        why = f" ({'; '.join(reasons[:3])})" if reasons else ""
        reason = f"shard {self._shard}, shard slot {slot}, {between}: {detail}{why}"
        if each.through is not None and (each.log_id, each.through) in self._damaged_sections:
            return EndDamaged(each.log_id, each.through, reason)
        return object_store.Damaged(names.log_prefix(each.log_id), reason)


def extents_once(wanted: Iterable[Extent]) -> list[Extent]:
    """Return the slots of the extents, each once: extents that overlap or meet become one."""
    by_log: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for log_id, after, through in wanted:
        if after < through:
            by_log[log_id].append((after, through))
    joined = []
    for log_id, parts in by_log.items():
        begin, end = min(parts)
        for after, through in sorted(parts):
            if after > end:
                joined.append(Extent(log_id, begin, end))
                begin, end = after, through
            end = max(end, through)
        joined.append(Extent(log_id, begin, end))
    return joined


def read_logs(logs: SlotLogs, shards: Iterable[ShardSections], ends: Mapping[str, LogEnd]) -> None:
    """Give each of the shards every slot that one of them needs; each slot is read once.

    `ends` holds the end of each log that an open range names. The shards take damage, too. If the store fails for a
    log, the shards that need more of it than was read take the error, and the log is not read further.
    """
    by_shard = {each.shard: each for each in shards}
    needed = {each: each.extents(ends) for each in by_shard.values()}
    failed: set[str] = set()
    for extent in extents_once(itertools.chain.from_iterable(needed.values())):
        if extent.log_id in failed:
            continue
        read_through = extent.after
        try:
            for number, slot in _slots(logs, extent):
                _tell(by_shard, extent.log_id, number, slot)
                read_through = number
        except object_store.StoreError as error:
            failed.add(extent.log_id)
            for each, extents in needed.items():
                if any(need.log_id == extent.log_id and need.through > read_through for need in extents):
                    each.take_unread(error)


def _tell(by_shard: Mapping[int, ShardSections], log_id: str, number: int, slot: LogSlot | str) -> None:
    if isinstance(slot, LogSlot):
        for shard in by_shard.keys() & set(slot.shards):
            by_shard[shard].take(log_id, number, slot)
    else:
        for each in by_shard.values():
            each.take_damaged(log_id, number, slot)


def _restored(slots: SlotLog, number: int) -> LogSlot | None:
    """Read a slot again that cannot be decoded, and restore it by the slot before it; None if that is not possible."""
    try:
        return log_fence.read_one(slots, number)
    except object_store.Damaged:
        return None


def _slots(logs: SlotLogs, extent: Extent) -> Iterator[tuple[int, LogSlot | str]]:
    """Yield the number and the slot, or why it cannot be read, ascending."""
    slots = logs.log(extent.log_id)
    try:
        after, through = extent.after, extent.through
        while after < through:
            read = slots.read(after, min(after + BATCH_SLOTS, through))
            if not read:
                # A manifest may say any number: nothing is read behind the end.
                through = min(through, slots.highest() or 0)
            after += BATCH_SLOTS
            for number, body, damage in read:
                try:
                    yield number, log_fence.decoded(extent.log_id, number, body, damage)
                except object_store.Damaged as error:
                    # A slot that is missing is not read again: a log may lack thousands.
                    yield number, (None if body is None else _restored(slots, number)) or str(error)
    finally:
        slots.close()
