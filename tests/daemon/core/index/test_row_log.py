"""Rows in the order in which they came: what is read does not change, and a row by itself leaves no object behind."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np

from daemon.core.index.mutable_bucket import MutableBucket, RowLog
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.schedule_ids import IdPieces, ScheduleIds


def keyed(pages: PageTable, entries: range, *, key_hash: int | None = None) -> KeyedRows:
    """Rows of ledger 7, due at 1,000 ms and their entry."""
    entry_id = np.array(entries, np.uint64)
    ledger_id = np.full(len(entries), 7, np.uint64)
    hashes = None if key_hash is None else np.full(len(entries), key_hash, np.uint32)
    rows = Rows(entry_id + np.uint64(1_000), ledger_id, entry_id, hashes)
    return KeyedRows(rows, pages.intern(ledger_id, entry_id))


def test_rows_are_read_in_the_order_in_which_they_came_by_one_and_by_many() -> None:
    pages = PageTable()
    log = RowLog(pages, IdPieces())
    for first, end in ((5, 6), (100, 900), (6, 7), (0, 5)):
        log.append(keyed(pages, range(first, end)))
    entries = [5, *range(100, 900), 6, *range(5)]
    taken = log.take(slice(0, len(log)))
    assert taken.rows.entry_id.tolist() == entries
    assert taken.rows.deliver_at_ms.tolist() == [1_000 + entry for entry in entries]
    assert set(taken.rows.ledger_id.tolist()) == {7}
    assert log.take(np.array([801, 0])).rows.entry_id.tolist() == [6, 5]


def test_what_was_read_stays_as_it_was_when_more_rows_come() -> None:
    pages = PageTable()
    log = RowLog(pages, IdPieces())
    log.append(keyed(pages, range(3)))
    read, keys = log.take(slice(0, 3)), log.keys
    log.append(keyed(pages, range(3, 5_000)))
    assert read.rows.entry_id.tolist() == [0, 1, 2]
    assert len(keys) == 3
    assert np.array_equal(keys, log.keys[:3])


def test_rows_without_a_key_hash_have_0_beside_rows_with_one() -> None:
    pages = PageTable()
    log = RowLog(pages, IdPieces())
    log.append(keyed(pages, range(2)))
    assert log.key_hash is None
    log.append(keyed(pages, range(2, 4), key_hash=9))
    log.append(keyed(pages, range(4, 200)))
    assert log.take(slice(0, 6)).key_hash().tolist() == [0, 0, 9, 9, 0, 0]


def test_rows_that_come_due_one_by_one_leave_no_object_each() -> None:
    pages = PageTable()
    bucket = MutableBucket(pages, horizon_ms=0)
    rows = keyed(pages, range(2_000))
    bucket.add(rows, bitmap_of(rows.keys), elapsed_ms=0)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for row in range(1_000):
        bucket.pass_rows(rows.take(slice(row, row + 1)))
    before = objects()
    for row in range(1_000, 2_000):
        bucket.pass_rows(rows.take(slice(row, row + 1)))
    assert len(bucket.passed_log) == 2_000
    assert objects() - before < 100


def with_ids(pages: PageTable, entries: range, ids: list[bytes]) -> KeyedRows:
    rows = keyed(pages, entries)
    column = ScheduleIds.of_piece(np.array(list(map(len, ids)), np.uint64), b"".join(ids))
    return dataclasses.replace(rows, rows=dataclasses.replace(rows.rows, schedule_ids=column))


def test_ids_come_with_their_rows_whether_they_came_by_one_or_by_many() -> None:
    pages = PageTable()
    log = RowLog(pages, IdPieces())
    log.append(keyed(pages, range(3)))
    assert log.schedule_ids is None
    ids = [b"", b"", b""]
    for entry in range(3, 200):
        log.append(with_ids(pages, range(entry, entry + 1), [b"order-%d" % entry]))
        ids.append(b"order-%d" % entry)
    many = [b"cart/%d" % entry if entry % 5 else b"" for entry in range(2_000)]
    log.append(with_ids(pages, range(1_000, 3_000), many))
    read = log.take(slice(0, 150))
    log.append(keyed(pages, range(3_000, 3_100)))
    for entry in range(3_100, 3_300):
        log.append(with_ids(pages, range(entry, entry + 1), [b"late-%d" % entry]))
    ids += many + [b""] * 100 + [b"late-%d" % entry for entry in range(3_100, 3_300)]
    assert log.take(slice(0, len(log))).rows.listed_ids() == ids
    assert log.take(np.array([1_000, 4, 0])).rows.listed_ids() == [ids[1_000], b"order-4", b""]
    assert read.rows.listed_ids() == ids[:150]


def test_a_row_that_comes_by_itself_with_an_id_leaves_no_object_behind() -> None:
    pages = PageTable()
    log, passed = (RowLog(pages, pieces) for pieces in [IdPieces()] * 2)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    def come(first: int, end: int) -> None:
        for entry in range(first, end):
            log.append(with_ids(pages, range(entry, entry + 1), [b"order-%d" % entry]))
            passed.append(log.take(slice(len(log) - 1, len(log))))

    come(0, 1_000)
    before = objects()
    come(1_000, 3_000)
    assert objects() - before < 100
    # The bytes of an id are there once.
    assert log.take(slice(0, 1)).rows.schedule_ids.pieces == passed.take(slice(0, 1)).rows.schedule_ids.pieces  # type: ignore[union-attr]
    assert passed.take(slice(0, 3_000)).rows.listed_ids() == [b"order-%d" % entry for entry in range(3_000)]


def test_ids_of_few_rows_do_not_keep_those_of_many() -> None:
    pages = PageTable()
    rows = with_ids(pages, range(5_000), [b"order-%d" % entry for entry in range(5_000)])
    kept = rows.take(slice(10, 20)).compact().rows.schedule_ids
    assert kept is not None
    assert sum(map(len, kept.pieces)) == kept.size_bytes == 80
    joined = KeyedRows.concat([rows.take(np.array([row])).compact() for row in range(0, 5_000, 50)]).rows.schedule_ids
    assert joined is not None
    assert len(joined.pieces) == 1
    assert joined.tolist() == [b"order-%d" % row for row in range(0, 5_000, 50)]
    most = rows.take(slice(0, 4_000))
    assert most.compact() is most


def test_of_two_rows_of_a_position_that_differ_in_their_ids_alone_the_last_one_is_passed() -> None:
    pages = PageTable()
    bucket = MutableBucket(pages, horizon_ms=0)
    old, new = with_ids(pages, range(3), [b"a", b"", b"c"]), with_ids(pages, range(3), [b"", b"b", b"d"])
    keys = bitmap_of(old.keys)
    bucket.add(old, keys, elapsed_ms=0)
    bucket.remove(keys)
    bucket.add(new, keys, elapsed_ms=0)
    assert bucket.pass_rows(KeyedRows.concat([old, new])).rows.listed_ids() == [b"", b"b", b"d"]
