"""What the logs of daemons hold of shards, as somebody reads it who owns nothing while they are being written.

Owns: how far a log goes now, and the sections of shards above a slot: each log read once for all shards.
Does not own: which sections count and what makes a shard complete (`storage_backends.log_reading`), and reading again
what changed meanwhile (the callers).

Whatever is wrong here may be so because the manifest is old by now: an owner has deleted what nobody needs any more. So
a caller that finds damage reads the manifest again before it believes it (`log_reading.judged`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from storage_backends import log_fence, object_store, sections
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_reading import LogEnd, ShardSections, read_logs
from storage_backends.sections import DecodedSection
from storage_backends.slot_log import SlotLogs

NO_NUMBER: Final = 0
"""Of the log of an open range, where no range is open."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ShardTail:
    """The sections of a shard above a slot, by one manifest. `keys`: of the log slot of each. `last_slot`: the last
    shard slot, or the one above which was read. `end`: how far the log of the open range was read.
    """

    sections: tuple[DecodedSection, ...]
    keys: tuple[str, ...]
    last_slot: int
    end: int


def end_of(logs: SlotLogs, log_id: str) -> LogEnd:
    """How far a log goes that a manifest names. Raises Damaged when its highest slot is not there or cannot be read."""
    slots = logs.log(log_id)
    try:
        number = slots.highest()
        if number is None:
            raise object_store.Damaged(names.log_prefix(log_id), "a manifest names the log, but the log has no slot")
        slot = log_fence.read_one(slots, number)
        if slot is None:
            raise object_store.Damaged(names.log_slot_key(log_id, number), "the highest slot of the log is missing")
        return LogEnd(number, slot.header.heads)
    finally:
        slots.close()


def read_tails(
    logs: SlotLogs, wanted: Iterable[tuple[ShardManifest, int]]
) -> dict[int, ShardTail | object_store.Damaged]:
    """The tails of shards, each by its manifest and above a shard slot, or why it is not complete; by shard.

    Raises the store's errors.
    """
    tips = {tip.shard: (tip, from_slot) for tip, from_slot in wanted}
    ends: dict[str, LogEnd | object_store.Damaged] = {}
    for tip, _ in tips.values():
        owned = tip.open_range
        if owned is not None and owned.log_id not in ends:
            try:
                ends[owned.log_id] = end_of(logs, owned.log_id)
            except object_store.Damaged as error:
                ends[owned.log_id] = error
    known = {log_id: end for log_id, end in ends.items() if isinstance(end, LogEnd)}
    readable = {
        shard: ShardSections(tip, from_slot)
        for shard, (tip, from_slot) in tips.items()
        if tip.open_range is None or tip.open_range.log_id in known
    }
    read_logs(logs, readable.values(), known)
    found: dict[int, ShardTail | object_store.Damaged] = {}
    for shard, (tip, from_slot) in tips.items():
        owned = tip.open_range
        end = None if owned is None else ends[owned.log_id]
        if isinstance(end, object_store.Damaged):
            found[shard] = end
            continue
        try:
            found[shard] = _tail(readable[shard], from_slot, known, NO_NUMBER if end is None else end.number)
        except object_store.Damaged as error:
            found[shard] = error
    return found


def _tail(read: ShardSections, from_slot: int, known: dict[str, LogEnd], end: int) -> ShardTail:
    complete = read.complete(known)
    return ShardTail(
        sections=tuple(sections.decoded(read.shard, complete)),
        keys=tuple(names.log_slot_key(each.log_id, each.number) for each in complete),
        last_slot=complete[-1].slot if complete else from_slot,
        end=end,
    )


def read_tail(logs: SlotLogs, tip: ShardManifest, from_slot: int) -> ShardTail:
    """The tail of one shard. Raises Damaged when it is not complete, and the store's errors."""
    found = read_tails(logs, [(tip, from_slot)])[tip.shard]
    if isinstance(found, object_store.Damaged):
        raise found
    return found
