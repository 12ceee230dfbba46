"""What is true of logs and of the ranges of shards: which slots count, where logs end, and what must be kept of them.

Owns: the rules for what lands in a log, for claims and other changes of ranges, and for deletions of slots.
Does not own: what the records of a section do (`oracle`), objects that manifests name (`objects`).

A slot counts when it lands in a number that never had one. In a number that was emptied a copy of its own slot says
nothing new, and a FENCE stops nobody.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from storage_backends.formats import log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import Head, LogSlot, LogSlotKind
from storage_backends.formats.manifest import LogRange, ShardManifest
from tests.simulation.history import History


@dataclasses.dataclass(slots=True)
class _Log:
    """`highest`: the highest number that ever had a slot, of kind `kind` and with `heads`. `bodies`: of what counts.
    `there`: what was not deleted. `sections`: by number, the shard slots in it.
    """

    highest: int = 0
    kind: LogSlotKind = LogSlotKind.OPEN
    heads: dict[int, Head] = dataclasses.field(default_factory=dict)
    bodies: dict[int, bytes] = dataclasses.field(default_factory=dict)
    there: dict[int, LogSlotKind] = dataclasses.field(default_factory=dict)
    sections: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)


class Place(NamedTuple):
    """Where a section lies."""

    log_id: str
    number: int
    epoch: int


class Decisions(NamedTuple):
    """What a section decides."""

    header: slot_format.SlotHeader
    records: list[slot_format.Record]
    deletions: tuple[slot_format.DeletionRecord, ...]


class Logs:
    """Told of every slot and every manifest of a shard that lands, and of deletions before they take effect."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._logs: dict[str, _Log] = {}
        self._tips: dict[int, ShardManifest] = {}
        self._last: dict[int, Head] = {}
        # By shard and shard slot, those that a replay from the checkpoint before the newest needs.
        self._places: dict[int, dict[int, Place]] = {}

    def last(self, shard: int) -> Head:
        """Epoch and shard slot of the last section that landed."""
        return self._last.get(shard, Head(0, 0))

    # ---- slots that land

    def landed(self, key: str, body: bytes) -> list[Decisions]:
        """What a slot decides."""
        slot = log_slot_format.decode_log_slot(body)
        header = slot.header
        if key != names.log_slot_key(header.log_id, header.number):
            self._history.breach(f"{key} is slot {header.number} of log {header.log_id}")
        log = self._logs.setdefault(header.log_id, _Log())
        log.there[header.number] = header.kind
        if header.number <= log.highest:
            if header.kind is not LogSlotKind.FENCE and log.bodies[header.number] != body:
                self._history.breach(f"{key} was emptied, and lands with other bytes")
            return []
        if header.number > log.highest + 1:
            self._history.breach(f"{key} lands behind slot {log.highest}")
        if log.kind.ends:
            self._history.breach(f"{key} lands behind the {log.kind.name} of its log")
        self._check_heads(log, slot, key)
        log.highest, log.kind, log.heads = header.number, header.kind, dict(header.heads)
        log.bodies[header.number] = body
        return [self._section(log, slot, shard) for shard in slot.shards]

    def _check_heads(self, log: _Log, slot: LogSlot, key: str) -> None:
        """Each says how far the log goes, and goes on where its shard was."""
        told = {shard: head for shard, head in slot.header.heads.items() if shard not in slot.shards}
        known = {shard: head for shard, head in log.heads.items() if shard not in slot.shards}
        if told != known:
            self._history.breach(f"{key} has the heads {told}, the slot before it {known}")

    def _section(self, log: _Log, slot: LogSlot, shard: int) -> Decisions:
        log_id, number, head = slot.header.log_id, slot.header.number, slot.header.heads[shard]
        what = f"shard {shard}: slot {head.last_slot} of epoch {head.epoch}"
        stored = slot_format.read_slot(slot.section(shard))
        header = stored.header
        if (header.shard, header.epoch, header.slot) != (shard, *head):
            self._history.breach(f"{what} says that it is {header}")
        last = self.last(shard)
        if head.last_slot != last.last_slot + 1:
            self._history.breach(f"{what} lands after slot {last.last_slot}")
        if head.epoch < last.epoch:
            self._history.breach(f"{what} follows epoch {last.epoch}")
        tip = self._tips.get(shard)
        owned = None if tip is None else tip.open_range
        if owned is None or not owned.covers(log_id, number, head):
            self._history.breach(f"{what} lands in slot {number} of log {log_id}, and the shard is {owned}")
        self._last[shard] = head
        self._places.setdefault(shard, {})[head.last_slot] = Place(log_id, number, head.epoch)
        log.sections.setdefault(number, []).append((shard, head.last_slot))
        return Decisions(header, [record.decoded() for record in stored.records], stored.deletions)

    # ---- manifests that land

    def shard_landed(self, landed: ShardManifest) -> None:
        shard, before = landed.shard, self._tips.get(landed.shard)
        self._tips[shard] = landed
        if (landed.open_range is None) != (not landed.owner):
            self._history.breach(f"shard {shard}: the owner is {landed.owner!r}, and its range {landed.open_range}")
        if before is None or landed.epoch != before.epoch:
            self._claimed(before, landed)
        elif before.open_range is not None and landed.open_range is not None:
            kept, moved = before.open_range, landed.open_range
            if moved != dataclasses.replace(kept, after=max(kept.after, moved.after)):
                self._history.breach(f"shard {shard}: its open range was {kept}, and is {moved}")
        places = self._places.setdefault(shard, {})
        for slot in [slot for slot in places if slot <= landed.previous_slot]:
            del places[slot]
        for slot, place in places.items():
            self._check_covered(landed, slot, place)
        for each in landed.ranges:
            self._check_closed(landed, each)

    def _claimed(self, before: ShardManifest | None, landed: ShardManifest) -> None:
        what = f"shard {landed.shard}: the claim of epoch {landed.epoch}"
        epoch, former = (0, None) if before is None else (before.epoch, before.open_range)
        owned, last_slot = landed.open_range, self.last(landed.shard).last_slot
        if landed.epoch != epoch + 1:
            self._history.breach(f"{what} follows epoch {epoch}")
        if owned is None:
            self._history.breach(f"{what} names no log")
            return
        if owned.first_slot != last_slot + 1:
            self._history.breach(f"{what} begins at slot {owned.first_slot}, and the last one is {last_slot}")
        log = self._logs.get(owned.log_id, _Log())
        if owned.after < 1 or owned.after > log.highest:
            self._history.breach(f"{what} begins behind slot {owned.after} of a log that has {log.highest}")
        if former is not None and former.log_id != owned.log_id and not self._logs[former.log_id].kind.ends:
            self._history.breach(f"{what} follows the owner of log {former.log_id}, which has no end")

    def _check_covered(self, landed: ShardManifest, slot: int, place: Place) -> None:
        head = Head(place.epoch, slot)
        key = names.log_slot_key(place.log_id, place.number)
        if not any(each.covers(place.log_id, place.number, head) for each in landed.ranges):
            self._history.breach(
                f"shard {landed.shard}: slot {slot} lies in {key}, manifest {landed.head.number} has the ranges "
                f"{landed.ranges}, and the checkpoint before its newest covers {landed.previous_slot}"
            )
        elif place.number not in self._logs[place.log_id].there:
            self._history.breach(f"shard {landed.shard}: slot {slot} lies in {key}, which was deleted")

    def _check_closed(self, landed: ShardManifest, each: LogRange) -> None:
        last = self.last(landed.shard).last_slot
        if each.last_slot is not None and not each.first_slot <= each.last_slot <= last:
            self._history.breach(f"shard {landed.shard}: {each} is closed, and the last slot is {last}")

    # ---- slots that are deleted

    def deleting(self, key: str) -> None:
        """Somebody deletes a slot, or does so again."""
        log_id, number = key.split("/")[1], names.number_of(key)
        log = self._logs.get(log_id, _Log())
        kind = log.there.pop(number, None)
        if kind is None:
            if number > log.highest:
                self._history.breach(f"{key} is deleted, and never was there")
            return
        if kind.ends:
            self._history.breach(f"{kind.name} {key} is deleted")
        if number == log.highest:
            self._history.breach(f"{key} is deleted, and is the highest slot of its log")
        for shard, slot in log.sections.get(number, ()):
            if slot in self._places[shard]:
                covered = self._tips[shard].previous_slot
                self._history.breach(
                    f"{key} is deleted, it has slot {slot} of shard {shard}, and the checkpoint before the newest "
                    f"covers {covered}"
                )
        for tip in self._tips.values():
            for each in tip.ranges:
                if self._needs(log_id, log, tip.shard, each) and each.after < number <= (each.through or number):
                    self._history.breach(f"{key} is deleted, and shard {tip.shard} has the range {each}")

    @staticmethod
    def _needs(log_id: str, log: _Log, shard: int, each: LogRange) -> bool:
        """Whether a range needs slots of the log. A claim that lands when its log has an end, and may be collected, has
        no section there, and never will.
        """
        if each.log_id != log_id:
            return False
        head = log.heads.get(shard)
        return not log.kind.ends or (head is not None and head.epoch == each.epoch)
