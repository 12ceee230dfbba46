"""Reads the checkpoint of a shard and the sections above it, and divides them by topic.

A damaged or missing checkpoint falls back to the one before it. `log_reading` finds the sections, `formats` decodes
them. They make the state of a topic like this:

    state as of max(applied, p)  =  manifest, and where `applied` < p and the checkpoint has a part for the topic,
                                    that part in place of the manifest's progress
    state now                    =  that, and the decisions of the slots above: those that the part carries, then those
                                    of the sections above the checkpoint's slot

`p` is the part's slot: the checkpoint's, or, if the part was carried over, that of the checkpoint it was written for; 0
if there is no part.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from storage_backends import object_store
from storage_backends.formats import checkpoint_format, format_errors, log_slot_format, manifest, names, slot_format
from storage_backends.formats.checkpoint_format import CarriedSlot, SealingPart
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_reading import LogEnd, Section, ShardSections, read_logs
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The newest readable checkpoint, and the section number above which sections continue it.

    `checkpoint` is None before the first one. `key` names the object that it was read from.
    """

    checkpoint: checkpoint_format.Checkpoint | None
    slot: ShardSlot
    key: str = ""


def read_checkpoint(
    store: object_store.ObjectStore, shard: int, reference: manifest.CheckpointCut
) -> checkpoint_format.Checkpoint:
    """Read one checkpoint.

    Raises Damaged, NotFound if it is missing, and the store's errors if it cannot be reached.
    """
    key = reference.object.name
    body = store.get(key)
    try:
        manifest.check_bytes(reference.object, body, "checkpoint")
        checkpoint = checkpoint_format.decode_checkpoint(body)
    except format_errors.FormatError as error:
        raise object_store.unreadable(key, error) from error
    if (checkpoint.shard, checkpoint.slot) != (shard, reference.slot):
        raise object_store.Damaged(key, f"it is of slot {checkpoint.slot} of shard {checkpoint.shard}")
    for part in checkpoint.topics:
        if not names.is_topic_id(part.topic_id):
            raise object_store.Damaged(key, f"a part names {part.topic_id!r}, which is not a topic id")
    return checkpoint


def read_newest(
    store: object_store.ObjectStore, tip: manifest.ShardManifest, *, damaged: Callable[[str], None]
) -> LoadedCheckpoint:
    """Read the checkpoint that `tip` names, or the one before it if that is damaged or missing.

    In the second case `damaged` is called with the key of the damaged one. Before the second checkpoint no section has
    been dropped, so together they replace a damaged first one. Raises Damaged or NotFound if the predecessor cannot be
    read either, NewerObject for one that only a newer release reads, and the store's errors.
    """
    if tip.checkpoint is None:
        return LoadedCheckpoint(None, log_slot_format.BEFORE_THE_FIRST)
    try:
        return _loaded(store, tip.shard, tip.checkpoint)
    except object_store.NewerObject:
        raise
    except (object_store.Damaged, object_store.NotFound) as error:
        damaged(error.key)
        log.error("shard %d falls back to the previous checkpoint: %s", tip.shard, error)
    previous = tip.previous_checkpoint
    if previous is None:
        return LoadedCheckpoint(None, log_slot_format.BEFORE_THE_FIRST)
    return _loaded(store, tip.shard, previous)


def _loaded(store: object_store.ObjectStore, shard: int, reference: manifest.CheckpointCut) -> LoadedCheckpoint:
    checkpoint = read_checkpoint(store, shard, reference)
    return LoadedCheckpoint(checkpoint, checkpoint.slot, reference.object.name)


class SectionDamaged(object_store.Damaged):
    """The error of a section that cannot be read.

    `key` names its log slot; `offset` counts in the bytes of the section.
    """

    def __init__(self, shard: int, section: Section, offset: int, detail: str) -> None:
        super().__init__(
            names.log_slot_key(section.log_id, section.number),
            f"the section of shard {shard}, shard slot {section.slot}, is damaged at byte {offset}: {detail}",
        )
        self.offset = offset
        self.detail = detail


class DecodedSection(NamedTuple):
    """The records of a section in the order in which they are applied, those of topics not decoded yet."""

    slot: ShardSlot
    epoch: int
    records: tuple[slot_format.StoredRecord, ...]
    deletions: tuple[slot_format.DeletionRecord, ...]
    size_bytes: int


def sections_of_shard(
    logs: SlotLogs, manifest: ShardManifest, from_slot: int, ends: Mapping[str, LogEnd]
) -> list[DecodedSection]:
    """Read every section of one shard above section number `from_slot`, as its manifest lists them.

    `ends` holds the end of the log of an open range. Raises Damaged if sections are missing or unreadable, and the
    store's errors.
    """
    wanted = ShardSections(manifest, from_slot)
    read_logs(logs, [wanted], ends)
    return decoded_section(manifest.shard, wanted.complete(ends))


def decoded_section(shard: int, sections: Iterable[Section]) -> list[DecodedSection]:
    """Decode the sections of a shard, in the order in which they are given.

    Raises SectionDamaged, and NewerObject for one that only a newer release reads.
    """
    return [_decoded(shard, section) for section in sections]


def _decoded(shard: int, section: Section) -> DecodedSection:
    try:
        header, records, deletions = slot_format.read_slot(section.body)
    except format_errors.FormatError as error:
        if isinstance(error, format_errors.NewerFormat):
            key = names.log_slot_key(section.log_id, section.number)
            of = f"the section of shard {shard}, shard slot {section.slot}: "
            raise object_store.unreadable(key, error, of) from error
        raise SectionDamaged(shard, section, error.offset, error.detail) from error
    if (header.shard, header.epoch, header.slot) != (shard, section.epoch, section.slot):
        detail = f"it is shard slot {header.slot} of shard {header.shard}, of epoch {header.epoch}"
        raise SectionDamaged(shard, section, 0, detail)
    for topic_id in {record.topic_id for record in records}:
        if not names.is_topic_id(topic_id):
            detail = f"a record names {topic_id!r}, which is not a topic id"
            raise SectionDamaged(shard, section, slot_format.HEADER_BYTES, detail)
    return DecodedSection(ShardSlot(header.slot), header.epoch, records, deletions, len(section.body))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicTail:
    """The content of checkpoint and sections for a topic, apart from its manifest.

    `part` is its part of the checkpoint, which always says its slot, or None if it has none. `slots` are the decisions
    above it, ascending. Most are never decoded, because a later seal holds the rows.
    """

    part: checkpoint_format.TopicPart | None = None
    slots: tuple[CarriedSlot, ...] = ()

    @property
    def part_slot(self) -> ShardSlot:
        if self.part is None or self.part.slot is None:
            return log_slot_format.BEFORE_THE_FIRST
        return self.part.slot

    def slots_above(self, tip: manifest.TopicManifest) -> Iterator[CarriedSlot]:
        """Yield the decisions that are in neither the manifest nor the part."""
        state_slot = max(tip.applied, self.part_slot)
        return (slot for slot in self.slots if slot.slot > state_slot)


NOTHING = TopicTail()


def tails_of(
    loaded: checkpoint_format.Checkpoint | None,
    slots: Iterable[tuple[ShardSlot, Sequence[slot_format.AnyRecord]]],
    *,
    only: Container[str] | None = None,
) -> dict[str, TopicTail]:
    """Return the tails by topic id, of all topics that the checkpoint or the slots name.

    `slots` are the records of each slot, ascending. `only` restricts the result to these topic ids.
    """
    parts: dict[str, checkpoint_format.TopicPart] = {}
    above: dict[str, list[CarriedSlot]] = {}
    covered = log_slot_format.BEFORE_THE_FIRST if loaded is None else loaded.slot
    for part in () if loaded is None else loaded.topics:
        if only is not None and part.topic_id not in only:
            continue
        above[part.topic_id] = list(part.carried)
        of = covered if part.slot is None else part.slot
        parts[part.topic_id] = dataclasses.replace(part, slot=of, carried=())
    for slot, records in slots:
        if slot <= covered:
            continue
        named: dict[str, list[slot_format.AnyRecord]] = {}
        for record in records:
            if only is None or record.topic_id in only:
                named.setdefault(record.topic_id, []).append(record)
        for topic_id, own in named.items():
            above.setdefault(topic_id, []).append(CarriedSlot(slot, tuple(own)))
    return {topic_id: TopicTail(parts.get(topic_id), tuple(own)) for topic_id, own in above.items()}


def counting_part(tip: manifest.TopicManifest, tail: TopicTail) -> checkpoint_format.TopicPart | None:
    """Return the topic's part of the checkpoint if it is newer than the manifest, else None."""
    part = tail.part
    if part is None or tip.applied >= tail.part_slot or part.incarnation != tip.incarnation:
        return None
    return part


def still_sealing(tip: manifest.TopicManifest, part: checkpoint_format.TopicPart) -> Iterator[SealingPart]:
    """Yield the buckets of the part whose seal the manifest does not have.

    Their rows are rows of the mutable bucket. For all other buckets the rows come from the bucket, and only the bits of
    the part's progress count.
    """
    return (sealing for sealing in part.sealing if tip.applied < sealing.slot)
