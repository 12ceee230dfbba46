from __future__ import annotations

import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import errors, framing, journal
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.journal import (
    AcknowledgeRecord,
    AddRecord,
    GoneReason,
    GoneRecord,
    Record,
    SlotBuilder,
    SlotHeader,
    SlotKind,
)
from storage_backends.formats.rows import Rows
from tests.storage_backends.formats import examples

topics = st.sampled_from(["first", "second"])
small = st.integers(0, 2)


def gone(topic_id: str, incarnation: int, subscription_id: int, rows: Rows) -> GoneRecord:
    return GoneRecord(topic_id, incarnation, subscription_id, GoneReason.NO_SUBSCRIPTION, rows.ledger_id, rows.entry_id)


records = st.one_of(
    st.builds(AddRecord, topics, small, small, examples.rows(max_size=6)),
    st.builds(AcknowledgeRecord, topics, small, small, examples.rows(max_size=6, keyed=False)),
    st.builds(gone, topics, small, small, examples.rows(max_size=6)),
)


def plain(record: Record) -> tuple[object, ...]:
    head = (type(record), record.topic_id, record.incarnation, record.subscription_id)
    if isinstance(record, GoneRecord):
        return (*head, record.reason, record.ledger_id.tolist(), record.entry_id.tolist())
    return (*head, examples.tuples(record.rows))


def header(count: int, *, kind: SlotKind = SlotKind.DATA) -> SlotHeader:
    return SlotHeader(shard=3, epoch=7, slot=1_234, kind=kind, records=count)


def built(some: list[Record]) -> tuple[Record, ...]:
    builder = SlotBuilder()
    for record in some:
        builder.append(record)
    return builder.freeze()


@given(st.lists(records, max_size=6), st.sampled_from(SlotKind))
def test_a_slot_comes_back_as_it_was(some: list[Record], kind: SlotKind) -> None:
    found, decoded = journal.decode_slot(journal.encode_slot(header(len(some), kind=kind), some))
    assert found == header(len(some), kind=kind)
    assert [plain(record) for record in decoded] == [plain(record) for record in some]


def test_the_header_is_the_documented_one() -> None:
    data = journal.encode_slot(SlotHeader(3, 7, 1_234, SlotKind.FENCE, 0), ())
    head = b"TyJS" + struct.pack("<HBBIQQIQ", 1, 2, 0, 3, 7, 1_234, 0, 0)
    assert data == head + struct.pack("<I", google_crc32c.value(head))


def test_the_header_alone_is_read_from_a_whole_slot() -> None:
    assert journal.decode_header(journal.encode_slot(header(0), ())) == header(0)


def test_a_header_that_counts_other_records_is_refused_at_encode_and_at_decode() -> None:
    with pytest.raises(ValueError, match="says 2 records, there are 0"):
        journal.encode_slot(header(2), ())
    data = bytearray(journal.encode_slot(header(0), ()))
    struct.pack_into("<I", data, 28, 2)
    struct.pack_into("<I", data, 40, google_crc32c.value(bytes(data[:40])))
    with pytest.raises(errors.FormatError, match="says 2 records, the payload has 0"):
        journal.decode_slot(bytes(data))


@given(st.lists(records, max_size=12))
def test_size_bytes_is_an_upper_bound_of_the_encoded_slot(some: list[Record]) -> None:
    builder = SlotBuilder()
    for record in some:
        builder.append(record)
    frozen = builder.freeze()
    assert len(journal.encode_slot(header(len(frozen)), frozen)) <= builder.size_bytes
    assert len(builder) == len(frozen)


def test_size_bytes_holds_for_the_widest_values() -> None:
    wide = examples.column([0, examples.U64_MAX] * 500)
    record = AddRecord(
        "t" * 32, examples.U64_MAX, examples.U64_MAX, Rows(wide, wide, wide, np.arange(1_000, dtype="u4"))
    )
    builder = SlotBuilder()
    builder.append(record)
    assert len(journal.encode_slot(header(1), builder.freeze())) <= builder.size_bytes


@given(st.lists(records, max_size=12))
def test_merging_keeps_every_row_of_every_kind_topic_and_subscription_in_its_order(some: list[Record]) -> None:
    def flat(records_of: list[Record] | tuple[Record, ...]) -> dict[object, list[tuple[int, int]]]:
        rows: dict[object, list[tuple[int, int]]] = {}
        for record in records_of:
            columns = record if isinstance(record, GoneRecord) else record.rows
            key = (type(record), record.topic_id, record.incarnation, record.subscription_id)
            positions = zip(columns.ledger_id.tolist(), columns.entry_id.tolist(), strict=True)
            rows.setdefault(key, []).extend(positions)
        return rows

    assert flat(built(some)) == flat(some)


@given(st.lists(records, max_size=12))
def test_no_record_is_moved_across_a_gone_record_of_its_topic(some: list[Record]) -> None:
    def kinds(records_of: list[Record] | tuple[Record, ...], topic_id: str) -> list[bool]:
        """Which runs of a topic's records are gone records."""
        runs: list[bool] = []
        for record in records_of:
            if record.topic_id == topic_id and runs[-1:] != [isinstance(record, GoneRecord)]:
                runs.append(isinstance(record, GoneRecord))
        return runs

    for topic_id in ("first", "second"):
        assert kinds(built(some), topic_id) == kinds(some, topic_id)


def test_adds_of_one_topic_become_one_record_though_others_stand_between() -> None:
    rows = [examples.random_delays(3, seed=seed) for seed in range(4)]
    frozen = built(
        [
            AddRecord("first", 1, 0, rows[0]),
            AcknowledgeRecord("first", 1, 5, rows[1]),
            AddRecord("second", 1, 0, rows[2]),
            AddRecord("first", 1, 0, rows[3]),
        ]
    )
    assert [plain(record) for record in frozen] == [
        plain(AddRecord("first", 1, 0, Rows.concat([rows[0], rows[3]]))),
        plain(AcknowledgeRecord("first", 1, 5, rows[1])),
        plain(AddRecord("second", 1, 0, rows[2])),
    ]


def test_adds_of_one_topic_stay_apart_when_a_gone_record_stands_between() -> None:
    rows = examples.random_delays(3)
    some: list[Record] = [AddRecord("first", 1, 0, rows), gone("first", 1, 0, rows), AddRecord("first", 1, 0, rows)]
    assert [plain(record) for record in built(some)] == [plain(record) for record in some]


@pytest.mark.parametrize("other", [("second", 1, 0), ("first", 2, 0), ("first", 1, 4)])
def test_records_of_another_topic_incarnation_or_subscription_stay_apart(other: tuple[str, int, int]) -> None:
    rows = examples.random_delays(3)
    assert len(built([AddRecord("first", 1, 0, rows), AddRecord(*other, rows)])) == 2


def test_a_decision_of_an_unknown_kind_is_refused() -> None:
    payload = journal_pb2.Slot(records=[journal_pb2.Record(topic_id="t", incarnation=1, rows=0)]).SerializeToString()
    data = bytearray(journal.encode_slot(header(0), ()))
    struct.pack_into("<IQ", data, 28, 1, len(payload))
    struct.pack_into("<I", data, 40, framing.crc32c(bytes(data[:40]), payload))
    with pytest.raises(errors.FormatError, match=r"journal slot record 0 .* of no kind that is known"):
        journal.decode_slot(bytes(data) + payload)


def test_a_slot_kind_that_is_not_known_is_refused() -> None:
    data = bytearray(journal.encode_slot(header(0), ()))
    data[6] = 9
    struct.pack_into("<I", data, 40, google_crc32c.value(bytes(data[:40])))
    with pytest.raises(errors.FormatError, match="slot kind 9"):
        journal.decode_slot(bytes(data))


def test_gone_columns_of_different_length_are_refused() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="differ in shape"):
        GoneRecord("t", 1, 0, GoneReason.NO_SUBSCRIPTION, one, two)
