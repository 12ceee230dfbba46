"""Sections of shards as they were read: decoded, and what is wrong with one told as damage.

Owns: decoding a section, that it is what its log slot says, and reading those of one shard.
Does not own: which sections count (`log_reading`), what the records do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from storage_backends import object_store
from storage_backends.formats import format_errors, names, slot_format
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.log_reading import LogEnd, Section, ShardSections, read_logs
from storage_backends.slot_log import SlotLogs


class SectionDamaged(object_store.Damaged):
    """A section cannot be read. `key`: of its log slot; `offset`: in the bytes of the section."""

    def __init__(self, shard: int, section: Section, offset: int, detail: str) -> None:
        super().__init__(
            names.log_slot_key(section.log_id, section.number),
            f"the section of shard {shard}, shard slot {section.slot}, is damaged at byte {offset}: {detail}",
        )
        self.offset = offset
        self.detail = detail


class DecodedSection(NamedTuple):
    """The records of a section in the order in which they are applied, those on topics not decoded yet."""

    slot: ShardSlot
    epoch: int
    records: tuple[slot_format.StoredRecord, ...]
    deletions: tuple[slot_format.DeletionRecord, ...]
    size_bytes: int


def of_shard(
    logs: SlotLogs, manifest: ShardManifest, from_slot: int, ends: Mapping[str, LogEnd]
) -> list[DecodedSection]:
    """Every section of one shard above a shard slot, as its manifest has them. `ends`: of the log of an open range.

    Raises Damaged when they are not complete or one cannot be read, and the store's errors.
    """
    wanted = ShardSections(manifest, from_slot)
    read_logs(logs, [wanted], ends)
    return decoded(manifest.shard, wanted.complete(ends))


def decoded(shard: int, sections: Iterable[Section]) -> list[DecodedSection]:
    """The sections of a shard, in the order in which they are given. Raises SectionDamaged."""
    return [_decoded(shard, section) for section in sections]


def _decoded(shard: int, section: Section) -> DecodedSection:
    try:
        header, records, deletions = slot_format.read_slot(section.body)
    except format_errors.FormatError as error:
        raise SectionDamaged(shard, section, error.offset, error.detail) from error
    if (header.shard, header.epoch, header.slot) != (shard, section.epoch, section.slot):
        detail = f"it is shard slot {header.slot} of shard {header.shard}, of epoch {header.epoch}"
        raise SectionDamaged(shard, section, 0, detail)
    for topic_id in {record.topic_id for record in records}:
        if not names.is_topic_id(topic_id):
            detail = f"a record names topic id {topic_id!r}, which is none"
            raise SectionDamaged(shard, section, slot_format.HEADER_BYTES, detail)
    return DecodedSection(ShardSlot(header.slot), header.epoch, records, deletions, len(section.body))
