"""Restores a log slot whose header or table is damaged, from the slot before it and from its sections or a note.

A log slot says most things twice. Each section has its shard, epoch and number, and a checksum of its own; the table
follows from these and from the heads of the slot before. What is made of both is the slot that was written if it has
the checksum that is stored, or all of the stored bytes but those of that checksum. Otherwise its sections are lost, and
a note beside its bytes, if there is one, tells of which shards these were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from storage_backends.formats import format_errors, log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import Head, LogSlot, LogSlotHeader, LogSlotKind, SlotNote, Writer

# OPEN and FENCE say who wrote them, for people alone.
_UNKNOWN_WRITER: Final = Writer("", "", "")
_NO_SECTION: Final = Head(1, 0)


def restored(data: bytes, before: LogSlotHeader) -> LogSlot | None:
    """Return the slot behind `before` that these bytes were when they were written, or None if that is unknown.

    A FENCE, which says who wrote it, is not restored.
    """
    if len(data) < log_slot_format.HEADER_BYTES or before.kind.ends:
        return None
    for kind, heads, sections in _candidates(data, before):
        header = LogSlotHeader(log_id=before.log_id, number=before.number + 1, kind=kind, heads=heads)
        made = log_slot_format.encode_log_slot(header, sections)
        if log_slot_format.differs_in_part(made, data):
            return log_slot_format.decode_log_slot(made)
    return None


def opening(log_id: str, data: bytes) -> LogSlot:
    """Return slot 1 of a log, which is OPEN and has no sections, whatever its bytes are now."""
    header = LogSlotHeader(log_id=log_id, number=1, kind=LogSlotKind.OPEN, writer=_UNKNOWN_WRITER)
    return log_slot_format.without_sections(header, (), data)


def noted(note: SlotNote, before: LogSlotHeader, data: bytes) -> LogSlot | None:
    """Return the slot behind `before` by what is noted of it, its sections lost; None if that says too little."""
    kind, sections = note.identity.kind, note.sections or {}
    if before.kind.ends or kind is LogSlotKind.OPEN or (kind is LogSlotKind.DATA) != bool(sections):
        return None
    if any(not _follows(before.heads.get(shard, _NO_SECTION), head) for shard, head in sections.items()):
        return None
    header = LogSlotHeader(
        log_id=before.log_id,
        number=before.number + 1,
        kind=kind,
        heads={**before.heads, **sections},
        writer=_UNKNOWN_WRITER if kind is LogSlotKind.FENCE else None,
    )
    if kind is LogSlotKind.CLOSE:
        made = log_slot_format.encode_log_slot(header)
        return log_slot_format.decode_log_slot(made) if log_slot_format.identity_of(made) == note.identity else None
    return log_slot_format.without_sections(header, sections, data)


def _follows(before: Head, head: Head) -> bool:
    epochs_rise = before.epoch <= head.epoch <= names.NUMBER_MAX
    return epochs_rise and before.last_slot < head.last_slot <= names.NUMBER_MAX


def _candidates(
    data: bytes, before: LogSlotHeader
) -> Iterator[tuple[LogSlotKind, Mapping[int, Head], Mapping[int, bytes]]]:
    """Yield CLOSE, then DATA with the sections that begin at the first place where the table may end."""
    yield LogSlotKind.CLOSE, before.heads, {}
    begin = first = log_slot_format.sections_begin(len(before.heads))
    while (begin := data.find(slot_format.MAGIC, begin)) >= 0:
        if (begin - first) % log_slot_format.ENTRY_BYTES == 0:
            # No other place is tried: a large slot has many, and reading the sections of one costs as much as the slot.
            sections = dict(_sections(data, begin))
            heads = {**before.heads, **{shard: head for shard, (head, _) in sections.items()}}
            if sections and log_slot_format.sections_begin(len(heads)) == begin:
                yield LogSlotKind.DATA, heads, {shard: body for shard, (_, body) in sections.items()}
            return
        begin += 1


def _sections(data: bytes, begin: int) -> Iterator[tuple[int, tuple[Head, bytes]]]:
    """Yield the whole sections from this place on: shard, head and body."""
    while begin < len(data):
        body = data[begin : begin + slot_format.length_of(data[begin : begin + slot_format.HEADER_BYTES])]
        try:
            header = slot_format.decode_header(body)
        except format_errors.FormatError:
            return
        yield header.shard, (Head(header.epoch, header.slot), body)
        begin += len(body)
