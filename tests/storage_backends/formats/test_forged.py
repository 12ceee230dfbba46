"""Stored objects with the right checksum and any content: each is read, or refused as damage, and takes little memory.

A number of rows, a width, a frame of zstd or a bitmap may say more in 50 bytes than fits into memory.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf import message as protobuf
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_backends.formats import (
    column_format,
    deletion_format,
    format_errors,
    log_slot_format,
    segment,
    slot_format,
)
from storage_backends.formats.column_format import Columns
from storage_backends.formats.generated import deletion_pb2
from storage_backends.formats.position_bitmap import PositionBitmap, PositionSet
from tests._support import parts
from tests.storage_backends.formats._support import examples, forging
from tests.storage_backends.formats._support.forging import KINDS, constant, full_bitmap, zeros

MEMORY_MAX_BYTES = 64 << 20
MANY = 100_000_000


def damage_of(read: Callable[[bytes], object], data: bytes) -> format_errors.FormatError | None:
    """The damage that it is refused with, or None if it is read; either takes little memory."""
    found, is_traced = None, tracemalloc.is_tracing()
    if is_traced:
        tracemalloc.reset_peak()
    else:
        tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    try:
        read(data)
    except format_errors.FormatError as error:
        found = error
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        if not is_traced:
            tracemalloc.stop()
    assert peak_bytes - before_bytes < MEMORY_MAX_BYTES
    return found


def copy_of(name: str) -> Any:
    message = type(KINDS[name].message)()
    message.CopyFrom(KINDS[name].message)
    return message


def refused(name: str, message: protobuf.Message) -> str:
    kind = KINDS[name]
    found = damage_of(kind.read, kind.sealed(message))
    assert found is not None
    return str(found)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_forged_is_read(name: str) -> None:
    assert damage_of(KINDS[name].read, KINDS[name].sealed(KINDS[name].message)) is None


# ---- one number of rows for a few bytes

ROW_COLUMNS = ("deliver_at_ms", "ledger_id", "entry_id", "key_hash")
MORE_COLUMNS = {
    "add": (),
    "acknowledge": (),
    "reschedule": (),
    "negative_acknowledge": ("redeliver_at_ms", "redelivery_count"),
    "dead_letter": ("redelivery_count", "dead_letter_id", "dead_at_ms"),
    "replay": ("dead_letter_id",),
    "purge": ("dead_letter_id",),
}


def fill(message: Any, column: bytes, *more: str) -> None:
    for name in (*ROW_COLUMNS, *more):
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, column)


BOMBS = {"constant": constant(), "packed": zeros(MANY), "packed and wide": zeros(MANY, 8)}
every_bomb = pytest.mark.parametrize("column", BOMBS.values(), ids=BOMBS)


@every_bomb
@pytest.mark.parametrize("decision", MORE_COLUMNS)
def test_a_record_of_many_rows_in_few_bytes_is_damage(decision: str, column: bytes) -> None:
    message = copy_of("section of redeliveries")
    del message.records[1:]
    del message.deletions[:]
    message.records[0].rows = MANY
    stored = getattr(message.records[0], decision)
    stored.SetInParent()
    fill(stored, column, *MORE_COLUMNS[decision])
    for field in stored.DESCRIPTOR.fields:
        if field.is_required and not stored.HasField(field.name):
            setattr(stored, field.name, 1)
    found = refused("section of redeliveries", message)
    assert found.startswith(f"journal slot record 0 is damaged at byte {slot_format.HEADER_BYTES}: it says {MANY} rows")


@every_bomb
@pytest.mark.parametrize("place", ["mutable_rows", "own_rows", "sealing"])
def test_a_checkpoint_of_many_rows_in_few_bytes_is_damage(place: str, column: bytes) -> None:
    message = copy_of("checkpoint")
    part = message.topics[0]
    added: Any = part
    if place == "own_rows":
        added = part.own_rows.add(subscription_id=2)
    elif place == "sealing":
        added = part.sealing[0]
    added.mutable_rows.rows = MANY
    fill(added.mutable_rows.columns, column)
    assert f"it says {MANY} rows" in refused("checkpoint", message)


@every_bomb
def test_redeliveries_of_many_rows_in_few_bytes_are_damage(column: bytes) -> None:
    for field, more in (
        ("nacked", ("redeliver_at_ms",)),
        (
            "dead_letters",
            ("dead_letter_id", "batch_index", "redelivery_count", "dead_at_ms", "reason", "text_index"),
        ),
    ):
        message = copy_of("redeliveries")
        (each,) = message.progress.redeliveries
        stored = each.nacked[0] if field == "nacked" else each.dead_letters
        stored.rows = MANY
        fill(stored, column, *more)
        assert f"it says {MANY} rows" in refused("redeliveries", message)


@every_bomb
def test_a_segment_of_many_rows_in_few_bytes_is_damage(column: bytes) -> None:
    message = copy_of("segment")
    message.rows = MANY
    fill(message, column)
    assert "bucket segment 1 column is damaged at byte" in (found := refused("segment", message))
    assert f"it says {MANY} rows" in found


@every_bomb
def test_ledgers_in_use_that_are_many_in_few_bytes_are_damage_or_one(column: bytes) -> None:
    ledgers = deletion_pb2.InUseLedgers(
        ledger_type=deletion_pb2.PendingDelete.LEDGER, ledgers=MANY, ledger_id=column, uuid_msb=column, uuid_lsb=column
    )
    message = copy_of("section of deletions")
    stored = message.deletions.add().in_use
    stored.topic, stored.change = "orders", deletion_pb2.ChangeInUse.RECORD
    stored.ledgers.CopyFrom(ledgers)
    kind = KINDS["section of deletions"]
    found = damage_of(kind.read, kind.sealed(message))
    assert (found is None) == (column == constant())
    of_checkpoint = copy_of("checkpoint of deletions")
    of_checkpoint.deletions.in_use.add(topic="orders").ledgers.add().CopyFrom(ledgers)
    kind = KINDS["checkpoint of deletions"]
    found = damage_of(kind.read, kind.sealed(of_checkpoint))
    assert (found is None) == (column == constant())


def test_one_ledger_that_a_request_names_often_is_in_use_once() -> None:
    alike = np.full(4_000, 7, np.uint64)
    ledgers = deletion_format.InUseLedgers(deletion_format.LedgerType.LEDGER, alike, alike, alike)
    message = deletion_pb2.DeletionRecord()
    deletion_format.fill_record(
        message, deletion_format.ChangeInUse("orders", deletion_format.InUseChange.RECORD, ledgers)
    )
    found = deletion_format.record_of(message, "slot", 0)
    assert isinstance(found, deletion_format.ChangeInUse)
    assert found.ledgers.ledger_id.tolist() == [7]


def test_a_count_of_4_billion_bits_is_damage() -> None:
    message = copy_of("redeliveries")
    message.progress.redeliveries[0].counts[0].bit = (1 << 32) - 1
    assert "has bit 4294967295" in refused("redeliveries", message)


def test_a_policy_that_no_daemon_accepts_is_damage() -> None:
    message = copy_of("key order")
    message.subscriptions[0].policy.key_shared.points_per_consumer = (1 << 32) - 1
    assert "4294967295 points per consumer" in refused("key order", message)
    message = copy_of("key order")
    message.subscriptions[0].policy.nack_precision_bits = (1 << 32) - 1
    assert "4294967295 nack precision bits" in refused("key order", message)


def test_metadata_with_more_positions_than_rows_is_damage() -> None:
    for part in ("positions", "kept"):
        message = copy_of("metadata")
        stored = message.positions if part == "positions" else message.kept[0].positions
        stored[0].entries = full_bitmap(2_000)
        assert "131072000 of one row origin" in refused("metadata", message) or part == "positions"
        assert refused("metadata", message).startswith("bucket metadata is damaged at byte 16: it says 120 rows")


def test_a_mask_of_few_rows_expands_no_more_entries_than_these() -> None:
    everything = PositionSet.of([PositionBitmap(1, 0, full_bitmap(2_000))])
    ledger_id, entry_id = examples.column([1, 1, 1]), examples.column([5, 131_071_999, 131_072_000])
    found: list[bool] = []
    assert damage_of(lambda _: found.extend(everything.mask_of(ledger_id, entry_id).tolist()), b"") is None
    assert found == [True, True, False]


# ---- what is legitimate and takes few bytes is read


@pytest.mark.parametrize("rows", [1, 2, 8_192, 8_193, 300_000])
def test_rows_of_one_time_in_the_order_of_their_entries_are_read(rows: int) -> None:
    entries = np.arange(rows, dtype=np.uint64) + np.uint64(9)
    zstd = segment.compressor()
    ledger, entry = column_format.encode_u64(np.full(rows, 5, np.uint64), zstd), column_format.encode_u64(entries, zstd)
    assert len(entry) < 200
    columns = Columns(rows, (ledger, entry), what="rows", offset=0)
    assert (columns.u64("entry_id", entry) == entries).all()
    assert (columns.u64("ledger_id", ledger) == 5).all()


@pytest.mark.parametrize("form", [0x40, 0x50, 0x60, 0x70])
@pytest.mark.parametrize("width", range(1, 9))
def test_the_first_rows_of_many_are_compared_in_every_form(form: int, width: int) -> None:
    rows = 20_000
    offsets = np.zeros(rows, np.uint64)
    offsets[1:] = 1 if form & 0x20 else np.arange(1, rows) % (1 << min(8 * width, 32) - 1)
    matrix = offsets.astype("<u8").view(np.uint8).reshape(rows, 8)[:, :width]
    content = (matrix.T if form & 0x10 else matrix).tobytes()
    packed = segment.compressor().compress(content)
    column = struct.pack("<BQ", form | width, 3) + packed
    if len(column) > rows:
        return
    read = np.cumsum(offsets) if form & 0x20 else offsets
    distinct = len(np.unique(read[:1_024])) == 1_024
    if distinct:
        found = Columns(rows, (column,), what="rows", offset=0).u64("entry_id", column)
        assert (found == read + np.uint64(3)).all()
    else:
        with pytest.raises(format_errors.FormatError, match="two of its first rows are the same"):
            Columns(rows, (column,), what="rows", offset=0)


def test_more_rows_than_the_limit_are_damage_though_all_differ() -> None:
    entries = np.arange(1_000, dtype=np.uint64)
    column = column_format.encode_u64(entries, segment.compressor())
    with pytest.raises(format_errors.FormatError, match=f"the limit is {column_format.ROWS_MAX} rows"):
        Columns(column_format.ROWS_MAX + 1, (column,), what="rows", offset=0)


# ---- anything else

_NUMBERS = (0, 1, 31, 127, 8_193, MANY, (1 << 31) - 1, (1 << 32) - 1, (1 << 63), (1 << 64) - 1)
_BYTES = (
    b"",
    constant(),
    zeros(20_000),
    zeros(MANY),
    zeros(MANY, 8),
    forging.frame_of_zeros(MANY),
    full_bitmap(1),
    full_bitmap(500),
    b"\xff" * 40,
)


def places_in(message: Any) -> list[tuple[Any, Any, int | None]]:
    """Every field that the message has, and each item of it: (its message, field, place in it)."""
    found: list[tuple[Any, Any, int | None]] = []
    for field, value in message.ListFields():
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            items = list(value)
            found += [(message, field, number) for number in range(len(items))]
        else:
            items = [value]
            found.append((message, field, None))
        if field.message_type is not None:
            for item in items:
                found += places_in(item)
    return found


@st.composite
def forged(draw: st.DrawFn, name: str) -> bytes:
    message = copy_of(name)
    number = draw(st.sampled_from(_NUMBERS))
    for _ in range(draw(st.integers(1, 5))):
        places = places_in(message)
        if not places:
            break
        of, field, place = draw(st.sampled_from(places))
        _change(draw, of, field, place, number)
    return KINDS[name].sealed(message)


def _change(draw: st.DrawFn, of: Any, field: Any, place: int | None, number: int) -> None:
    if field.message_type is not None:
        if place is None:
            of.ClearField(field.name)
        elif draw(st.booleans()):
            getattr(of, field.name).add().CopyFrom(getattr(of, field.name)[place])
        else:
            del getattr(of, field.name)[place]
        return
    former = getattr(of, field.name) if place is None else getattr(of, field.name)[place]
    if isinstance(former, bytes):
        new: Any = draw(st.sampled_from(_BYTES) | st.binary(max_size=20) | flipped(former))
    elif isinstance(former, str):
        new = draw(st.text(max_size=5))
    elif isinstance(former, bool):
        new = not former
    elif isinstance(former, float):
        new = float(number)
    elif field.enum_type is not None:
        new = draw(st.sampled_from([each.number for each in field.enum_type.values]))
    else:
        narrow = field.type in (field.TYPE_UINT32, field.TYPE_FIXED32)
        signed = field.type == field.TYPE_INT32
        new = number & (0x7FFFFFFF if signed else 0xFFFFFFFF if narrow else (1 << 64) - 1)
    if place is None:
        setattr(of, field.name, new)
    else:
        getattr(of, field.name)[place] = new


def flipped(data: bytes) -> st.SearchStrategy[bytes]:
    def flip(bit: int) -> bytes:
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        return bytes(altered)

    return st.integers(0, 8 * len(data) - 1).map(flip) if data else st.just(b"\0")


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=parts.examples(40))
@given(st.data())
def test_a_forged_object_is_read_or_damage_and_takes_little_memory(name: str, data: st.DataObject) -> None:
    damage_of(KINDS[name].read, data.draw(forged(name)))


@settings(max_examples=parts.examples(60))
@given(st.sampled_from(("log-slot-1.bin", "log-slot-fence-1.bin")), st.data())
def test_a_forged_log_slot_is_read_or_damage_and_takes_little_memory(name: str, data: st.DataObject) -> None:
    slot = bytearray((forging.GOLDEN / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(6, len(slot) - 8))
        value = data.draw(st.sampled_from((b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x01\0\0\0\0\0\0\0")))
        slot[place : place + len(value)] = value

    def read(body: bytes) -> None:
        found = log_slot_format.decode_log_slot(body)
        for shard in found.shards:
            found.section(shard)

    damage_of(read, forging.with_header_checksum(bytes(slot)))


@settings(max_examples=parts.examples(60))
@given(st.integers(0, 255), st.sampled_from(_NUMBERS), st.sampled_from(_NUMBERS[:-2]), st.sampled_from(_BYTES))
def test_a_forged_column_is_read_or_damage_and_takes_little_memory(
    form: int, base: int, rows: int, body: bytes
) -> None:
    column = struct.pack("<BQ", form, base) + body
    damage_of(lambda data: Columns(rows, (data,), what="rows", offset=0).u64("entry_id", data), column)


@settings(max_examples=parts.examples(60))
@given(st.sampled_from(_BYTES) | st.sampled_from(_BYTES).flatmap(flipped) | st.binary(max_size=60))
def test_a_forged_bitmap_is_read_or_damage_and_takes_little_memory(entries: bytes) -> None:
    bitmap = PositionBitmap(1, 0, entries)
    damage_of(lambda _: bitmap.bitmap(), b"")
    ledger_id, entry_id = examples.column([1, 1]), examples.column([0, 70_000])
    damage_of(lambda _: PositionSet.of([bitmap]).mask_of(ledger_id, entry_id), b"")
