"""Restores a log slot whose header or table is damaged, from its sections and from the slot before it.

A log slot says most things twice. Each section has its shard, epoch and number, and a checksum of its own; the table
follows from these and from the heads of the slot before. What is made of both is the slot that was written if it has
the checksum that is stored, or all of the stored bytes but those of that checksum. Otherwise nothing is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from storage_backends.formats import format_errors, log_slot_format, slot_format
from storage_backends.formats.log_slot_format import Head, LogSlot, LogSlotHeader, LogSlotKind


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
