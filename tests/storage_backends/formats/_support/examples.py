"""What the tests of the formats share: strategies for rows, realistic rows, and how rows are compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from storage_backends.formats import index_ids, manifest, position_bitmap, redelivery_columns, segment, slot_format
from storage_backends.formats.record_columns import COLUMNS
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds

U64_MAX = (1 << 64) - 1
NOON_MS = 1_700_000_000_000
DAY_MS = 86_400_000

u64 = st.integers(0, U64_MAX)
# Close together as in practice, and at the ends of the range.
times_ms = st.one_of(st.integers(NOON_MS, NOON_MS + 600_000), u64)
ledgers = st.one_of(st.integers(5, 7), u64)
entries = st.one_of(st.integers(0, 300), st.integers((1 << 32) - 3, (1 << 32) + 3), u64)


def column(values: list[int]) -> U64:
    return np.array(values, np.uint64)


@st.composite
def u64_column(draw: st.DrawFn, size: int | None = None) -> U64:
    """So many values, or a few."""
    few = (0, 6) if size is None else (size, size)
    return column(draw(st.lists(u64, min_size=few[0], max_size=few[1])))


@st.composite
def u32_column(draw: st.DrawFn, size: int) -> U32:
    values = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=size, max_size=size))
    return np.array(values, np.uint32)


@st.composite
def rows(
    draw: st.DrawFn, *, min_size: int = 0, max_size: int = 60, keyed: bool | None = None, with_ids: bool | None = None
) -> Rows:
    """Rows of any values; with key hashes and schedule ids, without, or as it comes."""
    drawn = draw(st.lists(st.tuples(times_ms, ledgers, entries), min_size=min_size, max_size=max_size))
    key_hash = None
    if draw(st.booleans()) if keyed is None else keyed:
        hashes = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=len(drawn), max_size=len(drawn)))
        key_hash = np.array(hashes, np.uint32)
    return Rows(
        column([time for time, _, _ in drawn]),
        column([ledger for _, ledger, _ in drawn]),
        column([entry for _, _, entry in drawn]),
        key_hash,
        draw(id_columns(len(drawn))) if (draw(st.booleans()) if with_ids is None else with_ids) else None,
    )


def ids_of(each: list[bytes]) -> ScheduleIds:
    """A column of these ids in one piece; empty bytes stand for none."""
    return ScheduleIds.of_piece(column(list(map(len, each))), b"".join(each))


@st.composite
def id_columns(draw: st.DrawFn, size: int) -> ScheduleIds:
    """Ids of so many rows, none for some of them."""
    texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(["", "order-4711", "\u20ac" * 85])
    return ids_of([text.encode() for text in draw(st.lists(texts, min_size=size, max_size=size))])


def tuples(some: Rows) -> list[tuple[Any, ...]]:
    """The rows one by one: (deliver_at_ms, ledger_id, entry_id, key_hash), and the schedule id if any row has one."""
    hashes = [None] * len(some) if some.key_hash is None else some.key_hash.tolist()
    columns = [some.deliver_at_ms.tolist(), some.ledger_id.tolist(), some.entry_id.tolist(), hashes]
    if some.schedule_ids:
        columns.append(some.schedule_ids.tolist())
    return list(zip(*columns, strict=True))


def plain(record: slot_format.Record) -> tuple[object, ...]:
    """A record, to be compared with others."""
    head = (type(record), record.topic_id, record.incarnation, record.subscription_id, detail(record))
    if isinstance(record, slot_format.GoneRecord | slot_format.WaiveRecord):
        return (*head, record.positions)
    listed = [] if isinstance(record, slot_format.PurgeRecord) else tuples(record.rows)
    return (*head, listed, [getattr(record, name).tolist() for name in COLUMNS.get(type(record), ())])


def detail(record: slot_format.Record) -> tuple[object, ...]:
    """What a record says beside its rows, columns and positions."""
    names = ("index_id", "reason", "text", "added", "delay_level")
    return tuple(getattr(record, name, None) for name in names)


def redelivery_records(some: Rows) -> tuple[slot_format.Record, ...]:
    """A record of each kind that has to do with redelivery, of subscription 2, over the rows of its own index, or the
    same positions as batch parts.
    """
    count, parts = len(some), index_ids.batch_parts_of(2)
    known = dataclasses.replace(some, schedule_ids=None)
    counts = np.arange(1, count + 1, dtype=np.uint32)
    return (
        slot_format.AddRecord("id", 1, 0, some, 18),
        slot_format.AcknowledgeRecord("id", 1, 2, Rows(some.deliver_at_ms, some.ledger_id, some.entry_id), parts),
        slot_format.NackRecord("id", 1, 2, 0, known, some.deliver_at_ms + np.uint64(256), counts),
        slot_format.NackRecord("id", 1, 2, parts, some, some.deliver_at_ms + np.uint64(512), counts, True),
        slot_format.DeadLetterRecord(
            "id",
            1,
            2,
            2,
            some,
            counts,
            counts.astype(np.uint64) + np.uint64(1 << 40),
            some.deliver_at_ms + np.uint64(9),
            slot_format.DeadLetterReason.REJECTED,
            "no such order",
        ),
        slot_format.ReplayRecord("id", 1, 2, 2, some, counts.astype(np.uint64)),
        slot_format.PurgeRecord("id", 1, 2, counts.astype(np.uint64)),
    )


def redelivery_progress(some: Rows) -> manifest.Progress:
    """Every row is nacked in the shared index, counted, dead in the own index, and added by a level."""
    zstd = segment.compressor()
    count = len(some)
    small = np.arange(count, dtype=np.uint32)
    positions = position_bitmap.position_bitmaps(some.ledger_id, some.entry_id)
    letters = redelivery_columns.DeadLetterColumns(
        small.astype(np.uint64) + np.uint64(3),
        some.ledger_id,
        some.entry_id,
        np.where(small % 2, np.uint32(index_ids.NO_BATCH_INDEX), small),
        some.deliver_at_ms,
        np.zeros(count, np.uint32) if some.key_hash is None else some.key_hash,
        small,
        some.deliver_at_ms + np.uint64(5),
        np.full(count, slot_format.DeadLetterReason.TOO_OFTEN, np.uint8),
        small % np.uint32(2),
        ("", "no such order"),
        some.schedule_ids,
    )
    of_subscription = manifest.Redeliveries(
        subscription_id=2,
        nacked=(redelivery_columns.encode_nacked(0, some, some.deliver_at_ms + np.uint64(256), zstd),),
        counts=tuple(
            manifest.CountPlane(index_id=index_id, bit=bit, positions=positions) for index_id, bit in ((0, 0), (2, 3))
        ),
        dead_letters=redelivery_columns.encode_dead_letters(letters, zstd),
        last_dead_letter_id=1_000,
    )
    level = manifest.LevelRows(index_id=0, delay_level=18, positions=positions)
    return manifest.Progress(redeliveries=(of_subscription,), levels=(level,))


def random_delays(count: int, *, span_ms: int = DAY_MS, keyed: bool = False, seed: int = 1) -> Rows:
    """One ledger, entries in arrival order, due at random within the span."""
    generator = np.random.default_rng(seed)
    return Rows(
        (NOON_MS + generator.integers(0, span_ms, count)).astype(np.uint64),
        np.full(count, 77, np.uint64),
        np.arange(count, dtype=np.uint64),
        generator.integers(0, 1 << 32, count, dtype=np.uint32) if keyed else None,
    )


def fixed_delay(count: int, *, gap_ms: float, seed: int = 1) -> Rows:
    """One ledger, entries in arrival order, each due the same time after its random arrival."""
    gaps = np.random.default_rng(seed).exponential(gap_ms, count)
    return Rows(
        (NOON_MS + np.cumsum(gaps)).astype(np.uint64),
        np.full(count, 77, np.uint64),
        np.arange(count, dtype=np.uint64),
    )
