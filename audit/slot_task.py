"""The task that reads a run of slots of a journal, and which slots should be there.

Owns: the full decoding of slots, what may follow what among them, and telling a slot that was truncated from one that
was lost.
Does not own: which rows the journal holds (`held`).

Owners write one slot after the other; the first slot of an epoch is its fence. Slots up to `replay_from` of the
checkpoint before the newest may have been deleted, but for fences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from audit import content as audit_content
from audit import reading as audit_reading
from audit.findings import Finding, Flaw, Kind, Severity, Tally
from audit.reading import Read
from jobs.root import Root
from storage_backends import object_store
from storage_backends.formats import format_errors, names, slot_format
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import ObjectStore

CHECKED_MAX: Final = 10_000
"""So many missing slots are looked for once more; where more are missing, nobody waits for the last of them."""


@dataclasses.dataclass(slots=True)
class SlotsSeen:
    """What became of a run. `absent`: listed slots that were not there any more. `epoch`: the highest."""

    tally: Tally = dataclasses.field(default_factory=Tally)
    absent: list[int] = dataclasses.field(default_factory=list)
    epoch: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """Slots of one shard, ascending. `before`: the listed slot below them, None if there is none."""

    shard: int
    slots: tuple[int, ...]
    before: int | None

    def run(self, root: Root) -> SlotsSeen:
        seen = SlotsSeen()
        last: slot_format.SlotHeader | None = None
        if self.before is not None:
            last = self._header(
                root.store, audit_reading.read(root.store, self._key(self.before)), self.before, SlotsSeen()
            )
        for slot, found in zip(self.slots, audit_reading.read_all(root.store, map(self._key, self.slots)), strict=True):
            if found.absent:
                seen.absent.append(slot)
            header = self._header(root.store, found, slot, seen)
            if header is not None:
                seen.epoch = max(seen.epoch, header.epoch)
            if last is not None and header is not None and last.slot == slot - 1:
                self._report(seen, slot, _flaws_of_following(last, header))
            last = header
        return seen

    def _key(self, slot: int) -> str:
        return names.journal_slot_key(self.shard, slot)

    def _header(self, store: ObjectStore, found: Read, slot: int, seen: SlotsSeen) -> slot_format.SlotHeader | None:
        """The header of a slot that is whole, and has its number."""
        if found.body is None:
            if found.damage:
                self._report(seen, slot, [Flaw(Kind.DAMAGED, found.damage)])
            elif found.failure:
                self._report(seen, slot, [Flaw(Kind.UNREADABLE, found.failure)])
            return None
        try:
            body, header = audit_reading.decoded(store, found, found.body, _decoded)
        except format_errors.FormatError as error:
            self._report(seen, slot, [audit_content.damaged(error)])
            return None
        seen.tally.saw("journal slot", len(body))
        if (header.shard, header.slot) != (self.shard, slot):
            self._report(seen, slot, [Flaw(Kind.JOURNAL_RULE, f"it is slot {header.slot} of shard {header.shard}")])
            return None
        if header.kind is slot_format.SlotKind.FENCE and header.records:
            self._report(seen, slot, [Flaw(Kind.JOURNAL_RULE, f"it is a fence and has {header.records} records")])
        return header

    def _report(self, seen: SlotsSeen, slot: int, flaws: Iterable[Flaw]) -> None:
        for flaw in flaws:
            seen.tally.find(
                Finding(
                    kind=flaw.kind,
                    severity=Severity.ERROR,
                    object=self._key(slot),
                    detail=flaw.detail,
                    shard=self.shard,
                    offset=flaw.offset,
                )
            )


def _decoded(body: bytes) -> slot_format.SlotHeader:
    """The header, when every record can be decoded. Raises FormatError."""
    stored = slot_format.read_slot(body)
    for record in stored.records:
        record.decoded()
    return stored.header


def _flaws_of_following(before: slot_format.SlotHeader, after: slot_format.SlotHeader) -> list[Flaw]:
    if after.epoch < before.epoch:
        detail = f"its epoch is {after.epoch}, the slot before it has {before.epoch}: a fence did not hold"
        return [Flaw(Kind.JOURNAL_RULE, detail)]
    if after.epoch > before.epoch and after.kind is not slot_format.SlotKind.FENCE:
        return [Flaw(Kind.JOURNAL_RULE, f"it is the first one of epoch {after.epoch}, and no fence")]
    return []


# ---- which should be there


def last_deleted(tip: ShardManifest | None) -> int:
    """The last slot that may have been deleted."""
    return 0 if tip is None or tip.previous_checkpoint is None else tip.previous_checkpoint.replay_from


def not_there(listed: Sequence[int], seen: Iterable[SlotsSeen], tip: ShardManifest | None) -> list[int]:
    """Slots that were not found and are still needed by this tip, ascending."""
    found = set(listed) - {slot for part in seen for slot in part.absent}
    end = max(found, default=0)
    if tip is not None:
        end = max(end, tip.replay_from, 0 if tip.checkpoint is None else tip.checkpoint.slot)
    return [slot for slot in range(last_deleted(tip) + 1, end + 1) if slot not in found]


def lost(root: Root, shard: int, candidates: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges (first, last) of the candidates that are not there and that a newer tip still needs. Raises the store's
    errors.
    """
    looked_for = candidates[:CHECKED_MAX]
    gone = [slot for slot in looked_for if not is_there(root, shard, slot)] + list(candidates[CHECKED_MAX:])
    if not gone:
        return []
    tip = root.shard_tip(shard)
    limit = last_deleted(None if tip is None else tip.manifest)
    ranges: list[tuple[int, int]] = []
    for slot in gone:
        if slot <= limit:
            continue
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1] = ranges[-1][0], slot
        else:
            ranges.append((slot, slot))
    return ranges


def is_there(root: Root, shard: int, slot: int) -> bool:
    """Whether the slot exists, be it damaged. Raises the store's errors."""
    try:
        root.store.head(names.journal_slot_key(shard, slot))
    except object_store.NotFound:
        return False
    except object_store.Damaged:
        return True
    return True
