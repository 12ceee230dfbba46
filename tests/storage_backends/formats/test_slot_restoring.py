"""A log slot whose header or table is damaged is what its sections and the slot before it say, or unknown."""

from __future__ import annotations

import random
import time

import pytest

from storage_backends.formats import log_slot_format, slot_format, slot_restoring
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, ShardSlot, Writer

LOG_ID = "01KB2Q0000000000000000000A"
BEFORE = LogSlotHeader(
    log_id=LOG_ID, number=7, kind=LogSlotKind.DATA, heads={1: Head(2, 30), 4: Head(2, 9), 9: Head(1, 1)}
)


def section(shard: int, head: Head) -> bytes:
    return slot_format.encode_slot(slot_format.SlotHeader(shard, head.epoch, ShardSlot(head.last_slot), 0), ())


def data(*shards: int) -> bytes:
    """Slot 8, with the next section of each of the shards."""
    heads = dict(BEFORE.heads)
    for shard in shards:
        head = heads.get(shard, Head(2, 0))
        heads[shard] = Head(head.epoch, head.last_slot + 1)
    header = LogSlotHeader(log_id=LOG_ID, number=8, kind=LogSlotKind.DATA, heads=heads)
    return log_slot_format.encode_log_slot(header, {shard: section(shard, heads[shard]) for shard in shards})


CLOSE = log_slot_format.encode_log_slot(
    LogSlotHeader(log_id=LOG_ID, number=8, kind=LogSlotKind.CLOSE, heads=BEFORE.heads)
)
FENCE = log_slot_format.encode_log_slot(
    LogSlotHeader(log_id=LOG_ID, number=8, kind=LogSlotKind.FENCE, heads=BEFORE.heads, writer=Writer("d", "a:1", "1"))
)
SLOTS = {"of one shard": data(4), "of all": data(1, 4, 9), "of new ones": data(0, 4, 17), "CLOSE": CLOSE}


def flipped(body: bytes, *bits: int) -> bytes:
    made = bytearray(body)
    for bit in bits:
        made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def before_sections(body: bytes) -> int:
    """How many bits header and table have."""
    return 8 * log_slot_format.sections_begin(len(log_slot_format.decode_log_slot(body).header.heads))


@pytest.mark.parametrize("which", SLOTS)
def test_each_wrong_bit_of_header_and_table_is_mended(which: str) -> None:
    body = SLOTS[which]
    whole = log_slot_format.decode_log_slot(body)
    for bit in range(before_sections(body)):
        found = slot_restoring.restored(flipped(body, bit), BEFORE)
        assert found is not None, bit
        assert found.header == whole.header
        assert {shard: found.section(shard) for shard in found.shards} == {
            shard: whole.section(shard) for shard in whole.shards
        }


@pytest.mark.parametrize("which", SLOTS)
def test_several_wrong_bytes_of_header_and_table_are_mended(which: str) -> None:
    body, draw = SLOTS[which], random.Random(1)
    # All but the checksum, which is the proof
    begin, end = log_slot_format.HEADER_BYTES, before_sections(body) // 8
    wrong = draw.randbytes(begin - 4) + body[begin - 4 : begin] + draw.randbytes(end - begin) + body[end:]
    found = slot_restoring.restored(wrong, BEFORE)
    assert found is not None
    assert found.header == log_slot_format.decode_log_slot(body).header


def test_what_is_not_proved_is_not_restored() -> None:
    body = data(1, 4)
    table = before_sections(body)
    assert slot_restoring.restored(flipped(body, 3, table + 300), BEFORE) is None, "a section is wrong, too"
    assert slot_restoring.restored(flipped(body, 3, 8 * log_slot_format.HEADER_BYTES - 1), BEFORE) is None
    assert slot_restoring.restored(flipped(FENCE, 3), BEFORE) is None
    other = LogSlotHeader(log_id=LOG_ID, number=7, kind=LogSlotKind.DATA, heads={**BEFORE.heads, 4: Head(2, 8)})
    assert slot_restoring.restored(flipped(data(1), 3), other) is None, "the slot before says something else"
    for length in range(len(body)):
        assert slot_restoring.restored(body[:length], BEFORE) is None
    assert slot_restoring.restored(b"damaged", BEFORE) is None


@pytest.mark.parametrize("begins", [b"", slot_format.MAGIC], ids=["noise", "many sections that are none"])
def test_a_large_slot_that_cannot_be_restored_takes_no_longer_than_to_read_it(begins: bytes) -> None:
    part = begins + bytes(log_slot_format.ENTRY_BYTES - len(begins))
    before_s = time.process_time()
    assert slot_restoring.restored(bytes(log_slot_format.sections_begin(3)) + part * (1 << 16), BEFORE) is None
    assert time.process_time() - before_s < 0.5
