"""Slots of a log as tests write them: one shard has a section in each.

Owns: small slots and what is in them. Does not own: the rules of a log.
"""

from __future__ import annotations

from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, Writer

LOG_ID = "01KB2Q0000000000000000000A"
OTHER_LOG_ID = "01KB2Q0000000000000000000B"
OWNER = Writer("daemon-1", "127.0.0.1:7461", "0.1.0")
FENCER = Writer("daemon-2", "127.0.0.1:7462", "0.1.0")
SHARD = 3
EPOCH = 1


def opening(log_id: str = LOG_ID) -> bytes:
    header = LogSlotHeader(log_id=log_id, number=1, kind=LogSlotKind.OPEN, writer=OWNER)
    return log_slot_format.encode_log_slot(header)


def data(number: int, content: bytes = b"", *, log_id: str = LOG_ID) -> bytes:
    """Its section is shard slot `number` - 1."""
    header = LogSlotHeader(log_id=log_id, number=number, kind=LogSlotKind.DATA, heads={SHARD: Head(EPOCH, number - 1)})
    return log_slot_format.encode_log_slot(header, {SHARD: content or f"section {number}".encode()})


def fence(number: int, *, log_id: str = LOG_ID) -> bytes:
    """Behind the slot that `data` gives."""
    heads = {SHARD: Head(EPOCH, number - 2)} if number > 2 else {}
    header = LogSlotHeader(log_id=log_id, number=number, kind=LogSlotKind.FENCE, heads=heads, writer=FENCER)
    return log_slot_format.encode_log_slot(header)


def slot(number: int, *, log_id: str = LOG_ID) -> bytes:
    """OPEN, then DATA."""
    return opening(log_id) if number == 1 else data(number, log_id=log_id)
