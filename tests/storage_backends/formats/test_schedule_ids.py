"""Schedule ids stay with their rows, whatever is taken and joined. Stored ones come back; what is none is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import column_format, format_errors, schedule_ids, segment
from storage_backends.formats.column_format import Columns
from storage_backends.formats.row_columns import HASH_ROWS, Rows, id_hash
from storage_backends.formats.schedule_ids import IdPieces, ScheduleIds
from tests.storage_backends.formats._support import examples, forging

MEMORY_MAX_BYTES = 64 << 20


def as_order(number: int) -> bytes:
    return b"order-%d" % number if number % 4 else b""


def many(count: int) -> list[bytes]:
    return [as_order(number) for number in range(count)]


@given(st.lists(st.integers(0, 6).flatmap(examples.id_columns) | st.integers(0, 3), max_size=6), st.data())
def test_ids_are_taken_and_joined_as_a_list_of_them_would_be(
    parts: list[ScheduleIds | int], data: st.DataObject
) -> None:
    columns = [None if isinstance(part, int) else part for part in parts]
    rows = [part if isinstance(part, int) else len(part) for part in parts]
    expected = [each for part in parts for each in ([b""] * part if isinstance(part, int) else part.tolist())]
    joined = ScheduleIds.concat(columns, rows)
    if joined is None:
        assert not any(expected)
        return
    chosen = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=40)) if expected else []
    taken = joined.take(np.array(chosen, np.int64))
    expected = [expected[number] for number in chosen]
    assert taken.tolist() == taken.copied().tolist() == expected
    assert taken.gathered() == b"".join(expected)
    assert bool(taken) == any(expected)


@pytest.mark.parametrize("count", [1, 16, 17, 20_000])
def test_ids_of_many_rows_are_gathered_in_any_order(count: int) -> None:
    listed = many(count)
    ids = examples.ids_of(listed)
    assert ids.gathered() == b"".join(listed)
    order = np.random.default_rng(2).permutation(count)
    parts = [ids.take(order[start : start + 700]) for start in range(0, count, 700)]
    parts = [part.copied() if number % 2 else part for number, part in enumerate(parts)]
    joined = ScheduleIds.concat(parts, list(map(len, parts)))
    assert joined is not None
    assert joined.gathered() == b"".join(listed[number] for number in order.tolist())
    # Parts of one column share its piece.
    assert len(joined.pieces) == 1 + sum(number % 2 for number in range(len(parts)))


def test_a_row_refers_to_its_id_in_8_bytes() -> None:
    ids = examples.ids_of(many(1_000))
    assert ids.take(slice(0, 10)).references.nbytes == 80
    assert ids.take(slice(0, 10)).pieces is ids.pieces


@pytest.mark.parametrize(
    ("lengths", "piece", "wrong"),
    [
        ([257], b"x" * 257, "a schedule id has 257 bytes; the limit is 256"),
        ([1 << 63], b"", f"a schedule id has {1 << 63} bytes"),
        ([3, 2], b"abcd", "the schedule ids have 5 bytes by their lengths, and 4 are there"),
        ([2, 2], b"\xff\xfeab", "the schedule ids are not UTF-8 at byte 0"),
        ([1, 2], b"\xe2\x82\xac", "a schedule id begins within a character of UTF-8"),
    ],
)
def test_what_is_no_id_is_refused(lengths: list[int], piece: bytes, wrong: str) -> None:
    assert schedule_ids.wrong_with(examples.column(lengths), piece).startswith(wrong)
    with pytest.raises(ValueError, match="schedule id"):
        ScheduleIds.of_piece(examples.column(lengths), piece)


def test_the_ids_of_rows_are_as_many() -> None:
    rows = examples.random_delays(3)
    with pytest.raises(ValueError, match="there are 2 schedule ids for 3 rows"):
        Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id, None, examples.ids_of([b"a", b"b"]))


# ---- the sum over rows and ids


def documented(rows: Rows) -> tuple[int, ...]:
    """Worked out with Python's integers: what another implementation must find."""
    found = []
    for seed, multiplier in ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9), (0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD)):
        total = 0
        for deliver_at_ms, ledger_id, entry_id, key_hash, schedule_id in rows_of(rows):
            words = [int.from_bytes(schedule_id[at : at + 8], "little") for at in range(0, len(schedule_id), 8)]
            state = seed
            for value in (key_hash, ledger_id, entry_id, deliver_at_ms, len(schedule_id), *words):
                state = (state ^ value) * multiplier % (1 << 64)
                state ^= state >> 32
            total += state if schedule_id else 0
        found.append(total % (1 << 64))
    return tuple(found)


def rows_of(rows: Rows) -> list[tuple[int, int, int, int, bytes]]:
    hashes = [0] * len(rows) if rows.key_hash is None else rows.key_hash.tolist()
    ids = [b""] * len(rows) if rows.schedule_ids is None else rows.schedule_ids.tolist()
    columns = (rows.deliver_at_ms.tolist(), rows.ledger_id.tolist(), rows.entry_id.tolist(), hashes, ids)
    return list(zip(*columns, strict=True))


@given(examples.rows())
def test_the_hash_of_ids_is_the_documented_mix(rows: Rows) -> None:
    assert id_hash(rows) == documented(rows)


def test_the_hash_of_ids_depends_on_which_row_has_which_id_and_not_on_the_order() -> None:
    rows = examples.random_delays(HASH_ROWS + 50, keyed=True)
    listed = many(len(rows))
    with_ids = Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id, rows.key_hash, examples.ids_of(listed))
    order = np.random.default_rng(4).permutation(len(rows))
    assert id_hash(with_ids.take(order)) == id_hash(with_ids)
    assert id_hash(rows) == (0, 0)
    listed[1], listed[2] = listed[2], listed[1]
    exchanged = Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id, rows.key_hash, examples.ids_of(listed))
    assert id_hash(exchanged) != id_hash(with_ids)


# ---- stored


@given(st.integers(0, 40).flatmap(examples.id_columns), st.booleans())
def test_stored_ids_come_back_as_they_were(ids: ScheduleIds, dense: bool) -> None:
    lengths, content = column_format.encode_ids(ids, segment.compressor() if dense else None)
    if not dense:
        assert len(lengths) + len(content) <= column_format.ids_size_max(ids)
    assert columns(len(ids)).schedule_ids(lengths, content).tolist() == ids.tolist()


def columns(rows: int) -> Columns:
    distinct = column_format.encode_u64(np.arange(rows, dtype=np.uint64))
    return Columns(rows, (distinct,), what="rows", offset=9)


def test_dense_ids_take_2_bytes_a_row_beyond_zstd_of_the_ids() -> None:
    listed = [
        b"order-%06d/%08x" % (number * 7919 % 1_000_003, number * 2_654_435_761 % 2**32) for number in range(5_000)
    ]
    zstd = segment.compressor()
    lengths, content = column_format.encode_ids(examples.ids_of(listed), zstd)
    assert len(lengths) + len(content) - len(zstd.compress(b"".join(listed))) <= 2 * len(listed)


def test_one_id_of_many_rows_is_read_whatever_little_it_takes() -> None:
    listed = [b"x" * 256] * 300_000
    ids = examples.ids_of(listed)
    lengths, content = column_format.encode_ids(ids, segment.compressor())
    read = Columns(len(ids), (column_format.encode_u64(np.arange(len(ids), dtype=np.uint64)),), what="rows", offset=0)
    assert read.schedule_ids(lengths, content).gathered() == ids.gathered()


ROWS = 1 << 19


@pytest.mark.parametrize(
    ("lengths", "content", "wrong"),
    [
        (forging.constant(256), b"\1" + forging.frame_of_zeros(256 * ROWS), "cannot have 134217728 bytes of ids"),
        (forging.constant(128), b"\1" + forging.frame_of_zeros(1 << 20), "the zstd frame declares 1048576 bytes"),
        (forging.constant(256), b"\0" + b"x" * 1_000, "by their lengths, and 1000 are there"),
        (forging.constant((1 << 32) - 1), b"\0", "a schedule id has 4294967295 bytes"),
        (forging.constant((1 << 32) - 1), b"\1" + forging.frame_of_zeros(1 << 30), "cannot have"),
        (forging.constant(0), b"", "form '' of ids is not known"),
        (forging.constant(0), b"\2", "form '02' of ids is not known"),
        (forging.constant(1), b"\1not a frame", "zstd"),
    ],
)
def test_ids_of_many_bytes_in_few_are_damage_and_take_little_memory(lengths: bytes, content: bytes, wrong: str) -> None:
    reader = columns(ROWS)
    tracemalloc.start()
    try:
        with pytest.raises(format_errors.FormatError, match=wrong):
            reader.schedule_ids(lengths, content)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < MEMORY_MAX_BYTES


def test_a_segment_ends_before_its_ids_are_too_long_for_a_message() -> None:
    lengths = np.full(3_000_000, 256, np.uint64)
    due = np.zeros(len(lengths), np.uint64)
    limits = segment.SegmentLimits(rows_max=-1)
    assert segment.cut(due, limits, lengths) == [(0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, 3_000_000)]
    assert segment.cut(due, limits) == [(0, 3_000_000)]


def test_ids_of_another_column_stay_as_they_are_when_more_come() -> None:
    """Also if what is unused of a block has the same bytes."""
    one, other = IdPieces(), IdPieces()
    of_one = one.column(one.take_in(examples.ids_of([b"\0\0"])))
    first = other.take_in(examples.ids_of([b"\0"]))
    taken = other.take_in(of_one)
    later = other.take_in(examples.ids_of([b"order"]))
    assert other.column(np.concatenate([first, taken, later])).tolist() == [b"\0", b"\0\0", b"order"]
    assert one.column(one.take_in(of_one)).tolist() == [b"\0\0"]


@given(parts=st.lists(examples.id_columns(3) | examples.id_columns(300), max_size=8), data=st.data())
def test_a_column_that_grows_keeps_its_ids(parts: list[ScheduleIds], data: st.DataObject) -> None:
    pieces, references, expected = IdPieces(), [np.empty(0, np.uint64)], []
    for part in parts:
        references.append(pieces.take_in(part))
        expected += part.tolist()
        if data.draw(st.booleans()):
            # Its own ids come again, as those of rows that have been passed.
            own = pieces.column(np.concatenate(references)).take(slice(0, 5))
            references.append(pieces.take_in(own))
            expected += own.tolist()
    column = pieces.column(np.concatenate(references))
    assert column.tolist() == expected
    assert column.gathered() == b"".join(expected)
    few = column.take(slice(0, 2))
    assert few.compact().tolist() == few.tolist()
