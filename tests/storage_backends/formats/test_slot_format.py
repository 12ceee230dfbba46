from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from storage_backends.formats import format_errors, framing, index_ids, record_columns, slot_format
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.position_bitmap import PositionBitmap, position_bitmaps, positions_of
from storage_backends.formats.record_columns import COLUMNS
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import (
    AcknowledgeRecord,
    AddRecord,
    DeadLetterReason,
    DeadLetterRecord,
    GoneReason,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    SlotBuilder,
    SlotHeader,
    WaiveRecord,
)
from tests._support import parts
from tests.storage_backends.formats._support import examples
from tests.storage_backends.formats._support.examples import detail, plain

topics = st.sampled_from(["first", "second"])
small = st.integers(0, 2)


def gone(topic_id: str, incarnation: int, subscription_id: int, rows: Rows) -> GoneRecord:
    positions = position_bitmaps(rows.ledger_id, rows.entry_id)
    return GoneRecord(topic_id, incarnation, subscription_id, GoneReason.TRIMMED, positions)


def cancelled(topic_id: str, incarnation: int, subscription_id: int, rows: Rows) -> GoneRecord:
    return dataclasses.replace(gone(topic_id, incarnation, subscription_id, rows), reason=GoneReason.CANCELLED)


def waive(topic_id: str, incarnation: int, subscription_id: int, rows: Rows) -> WaiveRecord:
    return WaiveRecord(topic_id, incarnation, subscription_id, position_bitmaps(rows.ledger_id, rows.entry_id))


indexes = st.sampled_from([index_ids.SHARED, 2, index_ids.batch_parts_of(2)])
some_rows = examples.rows(max_size=6)
positions_alone = examples.rows(max_size=6, keyed=False, with_ids=False)


@st.composite
def acknowledgements(draw: st.DrawFn) -> AcknowledgeRecord:
    return AcknowledgeRecord(draw(topics), draw(small), 2, draw(positions_alone), draw(indexes))


@st.composite
def nacks(draw: st.DrawFn) -> NackRecord:
    rows, added = draw(some_rows), draw(st.booleans())
    if not added:
        rows = dataclasses.replace(rows, schedule_ids=None)
    counts = draw(examples.u32_column(len(rows)))
    times = draw(examples.u64_column(len(rows)))
    return NackRecord(draw(topics), draw(small), 2, draw(indexes), rows, times, counts, added)


@st.composite
def dead_letters(draw: st.DrawFn) -> DeadLetterRecord:
    rows = draw(some_rows)
    return DeadLetterRecord(
        draw(topics),
        draw(small),
        2,
        draw(indexes),
        rows,
        draw(examples.u32_column(len(rows))),
        draw(examples.u64_column(len(rows))),
        draw(examples.u64_column(len(rows))),
        draw(st.sampled_from(DeadLetterReason)),
        draw(st.sampled_from(["", "no such order", "\N{SNOWMAN}" * 300])),
    )


@st.composite
def replays(draw: st.DrawFn) -> ReplayRecord:
    rows = draw(some_rows)
    index_id = draw(st.sampled_from([2, index_ids.batch_parts_of(2)]))
    return ReplayRecord(draw(topics), draw(small), 2, index_id, rows, draw(examples.u64_column(len(rows))))


records: st.SearchStrategy[Record] = st.one_of(
    st.builds(AddRecord, topics, small, small, examples.rows(max_size=6), small),
    acknowledgements(),
    nacks(),
    dead_letters(),
    replays(),
    st.builds(PurgeRecord, topics, small, small, examples.u64_column()),
    st.builds(RescheduleRecord, topics, small, small, examples.rows(max_size=6)),
    st.builds(cancelled, topics, small, small, examples.rows(max_size=6)),
    st.builds(gone, topics, small, small, examples.rows(max_size=6)),
    st.builds(waive, topics, small, small, examples.rows(max_size=6)),
)


def header(count: int) -> SlotHeader:
    return SlotHeader(shard=3, epoch=7, slot=ShardSlot(1_234), records=count)


def built(some: list[Record]) -> tuple[Record, ...]:
    builder = SlotBuilder()
    for record in some:
        builder.append(record)
    return builder.freeze()


@given(st.lists(records, max_size=6))
def test_a_slot_comes_back_as_it_was(some: list[Record]) -> None:
    found, decoded = slot_format.decode_slot(slot_format.encode_slot(header(len(some)), some))
    assert found == header(len(some))
    assert [plain(record) for record in decoded] == [plain(record) for record in some]


def test_the_header_is_the_documented_one() -> None:
    data = slot_format.encode_slot(SlotHeader(3, 7, ShardSlot(1_234), 0), ())
    head = b"TyJS" + struct.pack("<HBBIQQIQ", 1, 1, 0, 3, 7, 1_234, 0, 0)
    assert data == head + struct.pack("<I", google_crc32c.value(head))


def test_the_header_alone_is_read_from_a_whole_slot() -> None:
    assert slot_format.decode_header(slot_format.encode_slot(header(0), ())) == header(0)


def test_a_header_that_counts_other_records_is_refused_at_encode_and_at_decode() -> None:
    with pytest.raises(ValueError, match="says 2 records, there are 0"):
        slot_format.encode_slot(header(2), ())
    data = bytearray(slot_format.encode_slot(header(0), ()))
    struct.pack_into("<I", data, 28, 2)
    struct.pack_into("<I", data, 40, google_crc32c.value(bytes(data[:40])))
    with pytest.raises(format_errors.FormatError, match="says 2 records, the payload has 0"):
        slot_format.decode_slot(bytes(data))


@given(st.lists(records, max_size=12))
def test_size_bytes_is_an_upper_bound_of_the_encoded_slot(some: list[Record]) -> None:
    builder = SlotBuilder()
    for record in some:
        builder.append(record)
    frozen = builder.freeze()
    assert len(slot_format.encode_slot(header(len(frozen)), frozen)) <= builder.size_bytes
    assert len(builder) == len(frozen)


def test_size_bytes_holds_for_the_widest_values() -> None:
    wide = examples.column([0, examples.U64_MAX] * 500)
    record = AddRecord(
        "t" * 32, examples.U64_MAX, examples.U64_MAX, Rows(wide, wide, wide, np.arange(1_000, dtype="u4"))
    )
    builder = SlotBuilder()
    builder.append(record)
    assert len(slot_format.encode_slot(header(1), builder.freeze())) <= builder.size_bytes


@given(st.lists(records, max_size=12))
def test_merging_keeps_every_row_of_every_kind_topic_and_subscription_in_its_order(some: list[Record]) -> None:
    def flat(records_of: list[Record] | tuple[Record, ...]) -> dict[object, list[tuple[int, int]]]:
        rows: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for record in records_of:
            key = (type(record), record.topic_id, record.incarnation, record.subscription_id, detail(record))
            if isinstance(record, GoneRecord | WaiveRecord):
                ledger_id, entry_id = positions_of(record.positions)
            elif isinstance(record, PurgeRecord):
                ledger_id = entry_id = record.dead_letter_id
            else:
                ledger_id, entry_id = record.rows.ledger_id, record.rows.entry_id
            rows.setdefault(key, []).extend(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))
        return {
            key: sorted(set(positions)) if key[0] in (GoneRecord, WaiveRecord) else positions
            for key, positions in rows.items()
            if positions
        }

    assert flat(built(some)) == flat(some)


@given(st.lists(records, max_size=12))
def test_no_record_is_moved_across_a_waive_record_or_gone_record_but_a_cancellation_of_its_topic(
    some: list[Record],
) -> None:
    def kinds(records_of: list[Record] | tuple[Record, ...], topic_id: str) -> list[type[Record] | None]:
        """Which runs of a topic's records are such records."""
        runs: list[type[Record] | None] = []
        for record in records_of:
            commutes = isinstance(record, GoneRecord) and record.reason is GoneReason.CANCELLED
            kind = type(record) if isinstance(record, GoneRecord | WaiveRecord) and not commutes else None
            if record.topic_id == topic_id and runs[-1:] != [kind]:
                runs.append(kind)
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


def test_cancellations_and_reschedules_of_one_topic_become_one_record_each_though_others_stand_between() -> None:
    rows = [examples.random_delays(9).take(slice(start, start + 3)) for start in (0, 3, 6)]
    frozen = built(
        [
            cancelled("t", 1, 0, rows[0]),
            RescheduleRecord("t", 1, 0, rows[1]),
            AddRecord("t", 1, 0, rows[0]),
            cancelled("t", 1, 0, rows[2]),
            RescheduleRecord("t", 1, 0, rows[0]),
        ]
    )
    assert [plain(record) for record in frozen] == [
        plain(cancelled("t", 1, 0, Rows.concat([rows[0], rows[2]]))),
        plain(RescheduleRecord("t", 1, 0, Rows.concat([rows[1], rows[0]]))),
        plain(AddRecord("t", 1, 0, rows[0])),
    ]


def test_a_cancellation_is_not_moved_across_a_trim() -> None:
    rows = examples.random_delays(3)
    some: list[Record] = [cancelled("t", 1, 0, rows), gone("t", 1, 0, rows), cancelled("t", 1, 0, rows)]
    assert [plain(record) for record in built(some)] == [plain(record) for record in some]


def test_acknowledgements_of_a_subscriptions_own_index_and_of_the_shared_one_stay_apart() -> None:
    rows = examples.random_delays(3)
    shared = AcknowledgeRecord("t", 1, 4, rows)
    assert len(built([shared, dataclasses.replace(shared, index_id=4), shared])) == 2


def test_adds_of_different_delay_levels_stay_apart() -> None:
    rows = examples.random_delays(3)
    plainly, by_level = AddRecord("t", 1, 0, rows), AddRecord("t", 1, 0, rows, 3)
    frozen = built([plainly, by_level, plainly, by_level])
    assert [(record.row_count, detail(record)) for record in frozen] == [
        (6, detail(plainly)),
        (6, detail(by_level)),
    ]


def a_nack(entries: range, *, index_id: int = 0, added: bool = False) -> NackRecord:
    rows = examples.random_delays(100).take(slice(entries.start, entries.stop))
    counts = np.full(len(rows), 2, np.uint32)
    return NackRecord("t", 1, 4, index_id, rows, rows.deliver_at_ms + np.uint64(1), counts, added)


def test_nacks_of_one_index_become_one_record_and_those_that_add_rows_another() -> None:
    parts = index_ids.batch_parts_of(4)
    frozen = built(
        [
            a_nack(range(3)),
            a_nack(range(3, 5), index_id=4, added=True),
            a_nack(range(5, 9)),
            a_nack(range(9, 11), index_id=4),
            a_nack(range(11, 12), index_id=parts, added=True),
            a_nack(range(12, 14), index_id=4, added=True),
        ]
    )
    assert [plain(record) for record in frozen][:1] == [
        plain(
            dataclasses.replace(
                a_nack(range(9)),
                rows=Rows.concat([a_nack(range(3)).rows, a_nack(range(5, 9)).rows]),
                redeliver_at_ms=np.concatenate([a_nack(range(3)).redeliver_at_ms, a_nack(range(5, 9)).redeliver_at_ms]),
                redelivery_count=np.full(7, 2, np.uint32),
            )
        )
    ]
    assert [(record.row_count, detail(record)) for record in frozen[1:]] == [
        (4, detail(a_nack(range(1), index_id=4, added=True))),
        (2, detail(a_nack(range(1), index_id=4))),
        (1, detail(a_nack(range(1), index_id=parts, added=True))),
    ]


def a_dead_letter(dead_letter_id: int, text: str = "", *, index_id: int = 0) -> DeadLetterRecord:
    return DeadLetterRecord(
        "t",
        1,
        4,
        index_id,
        examples.random_delays(1, seed=dead_letter_id),
        np.array([3], np.uint32),
        examples.column([dead_letter_id]),
        examples.column([dead_letter_id * 10]),
        DeadLetterReason.REJECTED,
        text,
    )


def test_the_ids_of_dead_letters_of_a_subscription_ascend_over_the_records_of_a_slot() -> None:
    frozen = built(
        [
            a_dead_letter(1),
            a_nack(range(3)),
            a_dead_letter(2),
            a_dead_letter(3, "bad"),
            a_dead_letter(4, "bad"),
            a_dead_letter(5),
            a_dead_letter(6, index_id=4),
            dataclasses.replace(a_dead_letter(7), subscription_id=5),
            a_dead_letter(8, index_id=4),
        ]
    )
    ids = [record.dead_letter_id.tolist() for record in frozen if isinstance(record, DeadLetterRecord)]
    assert ids == [[1, 2], [3, 4], [5], [6, 8], [7]]


def test_replays_and_purges_of_a_subscription_become_one_record_each() -> None:
    rows = examples.random_delays(4)

    def replay(first: int) -> ReplayRecord:
        part = rows.take(slice(first, first + 2))
        return ReplayRecord("t", 1, 4, 4, part, part.entry_id)

    purges = [PurgeRecord("t", 1, 4, examples.column([number])) for number in (8, 9)]
    replayed, purged = built([replay(0), purges[0], replay(2), purges[1]])
    assert plain(replayed) == plain(ReplayRecord("t", 1, 4, 4, rows, rows.entry_id))
    assert plain(purged) == plain(PurgeRecord("t", 1, 4, examples.column([8, 9])))


def test_no_nack_is_moved_across_a_trim() -> None:
    some: list[Record] = [a_nack(range(3)), waive("t", 1, 4, examples.random_delays(3)), a_nack(range(3, 5))]
    assert [plain(record) for record in built(some)] == [plain(record) for record in some]


@pytest.mark.parametrize("index_id", [5, index_ids.batch_parts_of(5), index_ids.batch_parts_of(0)])
def test_a_record_names_an_index_that_serves_its_subscription(index_id: int) -> None:
    some_records: list[Record] = [
        AcknowledgeRecord("t", 1, 4, examples.random_delays(1), 4),
        a_nack(range(1)),
        a_dead_letter(1),
        ReplayRecord("t", 1, 4, 4, examples.random_delays(1), examples.column([1])),
    ]
    for record in some_records:
        with pytest.raises(ValueError, match=f"index {index_id} does not serve subscription 4"):
            dataclasses.replace(record, index_id=index_id)  # type: ignore[arg-type]


def test_a_stored_record_of_an_index_that_does_not_serve_its_subscription_is_refused() -> None:
    message = journal_pb2.Record()
    record_columns.fill(message, a_nack(range(2), index_id=4))
    message.negative_acknowledge.index_id = 5
    with pytest.raises(
        format_errors.FormatError, match=r"journal slot record 0 .*index 5 does not serve subscription 4"
    ):
        slot_format.decode_slot(slot_of(message))


def test_a_stored_acknowledgement_of_two_indexes_is_refused() -> None:
    message = journal_pb2.Record()
    record_columns.fill(message, AcknowledgeRecord("t", 1, 4, examples.random_delays(1), 4))
    message.acknowledge.of_batch_indexes = True
    with pytest.raises(format_errors.FormatError, match=r"journal slot record 0 .*its rows are of two indexes"):
        slot_format.decode_slot(slot_of(message))


def test_a_stored_replay_into_the_shared_index_is_refused() -> None:
    rows = examples.random_delays(1)
    with pytest.raises(ValueError, match="not replayed into the shared index"):
        ReplayRecord("t", 1, 4, 0, rows, rows.entry_id)
    message = journal_pb2.Record()
    record_columns.fill(message, ReplayRecord("t", 1, 4, 4, rows, rows.entry_id))
    message.replay.index_id = 0
    with pytest.raises(format_errors.FormatError, match=r"journal slot record 0 .*not replayed into the shared index"):
        slot_format.decode_slot(slot_of(message))


def test_a_stored_dead_letter_without_a_reason_is_refused() -> None:
    message = journal_pb2.Record()
    record_columns.fill(message, a_dead_letter(1))
    message.dead_letter.reason = journal_pb2.DeadLetter.UNSPECIFIED
    with pytest.raises(format_errors.FormatError, match=r"journal slot record 0 .*0 is not a valid DeadLetterReason"):
        slot_format.decode_slot(slot_of(message))


@pytest.mark.parametrize(
    "record",
    [a_nack(range(3)), a_dead_letter(1), ReplayRecord("t", 1, 4, 4, examples.random_delays(1), examples.column([1]))],
    ids=lambda record: type(record).__name__,
)
def test_a_column_beside_the_rows_has_their_number_of_values_and_its_type(record: Record) -> None:
    for name in COLUMNS[type(record)]:
        column = getattr(record, name)
        for wrong in (column[:-1], column.astype(np.int64)):
            with pytest.raises(ValueError, match=f"{name} is .*, it must be"):
                dataclasses.replace(record, **{name: wrong})


@pytest.mark.parametrize("other", [("second", 1, 0), ("first", 2, 0), ("first", 1, 4)])
def test_records_of_another_topic_incarnation_or_subscription_stay_apart(other: tuple[str, int, int]) -> None:
    rows = examples.random_delays(3)
    assert len(built([AddRecord("first", 1, 0, rows), AddRecord(*other, rows)])) == 2


def test_a_decision_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        format_errors.FormatError, match=r"journal slot record 0 .* does not know the kind of its decision"
    ):
        slot_format.decode_slot(slot_of(journal_pb2.Record(topic_id="t", incarnation=1, rows=0)))


def test_a_slot_kind_that_is_not_known_is_refused() -> None:
    data = bytearray(slot_format.encode_slot(header(0), ()))
    data[6] = 9
    struct.pack_into("<I", data, 40, google_crc32c.value(bytes(data[:40])))
    with pytest.raises(format_errors.FormatError, match="slot kind 9"):
        slot_format.decode_slot(bytes(data))


@pytest.mark.parametrize("make", [gone, waive])
def test_gone_and_waive_records_of_one_kind_become_one_that_names_each_position_once(
    make: Callable[[str, int, int, Rows], Record],
) -> None:
    rows = examples.random_delays(9)
    (merged,) = built([make("t", 1, 0, rows.take(slice(0, 5))), make("t", 1, 0, rows.take(slice(3, 9)))])
    assert plain(merged) == plain(make("t", 1, 0, rows))
    assert merged.row_count == 9


def test_a_gone_record_between_two_waive_records_keeps_them_apart() -> None:
    rows = examples.random_delays(3)
    some: list[Record] = [waive("t", 1, 1, rows), gone("t", 1, 0, rows), waive("t", 1, 1, rows)]
    assert [plain(record) for record in built(some)] == [plain(record) for record in some]


def test_gone_records_of_different_reasons_stay_apart() -> None:
    some = [gone("t", 1, 0, examples.random_delays(3))]
    assert len(built([*some, dataclasses.replace(some[0], reason=GoneReason.NOT_OWED)])) == 2


@given(st.lists(records, max_size=6))
def test_rows_counts_the_rows_that_the_records_name(some: list[Record]) -> None:
    builder = SlotBuilder()
    for record in some:
        builder.append(record)
    expected = 0
    for record in some:
        if isinstance(record, GoneRecord | WaiveRecord):
            expected += len(positions_of(record.positions)[0])
        else:
            expected += len(record.dead_letter_id if isinstance(record, PurgeRecord) else record.rows)
    assert builder.rows == expected


@settings(max_examples=parts.examples(60))
@given(st.lists(st.tuples(st.sampled_from(["run", "array", "dense"]), st.integers(0, 65_535)), min_size=1, max_size=5))
def test_size_bytes_holds_for_the_union_of_bitmaps_of_any_containers(parts: list[tuple[str, int]]) -> None:
    shapes = {"run": np.arange(60_000), "array": np.arange(0, 65_536, 17), "dense": np.arange(0, 65_536, 3)}
    builder = SlotBuilder()
    for shape, shift in parts:
        entries = np.unique((shapes[shape] + shift) % 65_536).astype(np.uint64)
        positions = position_bitmaps(np.full(len(entries), 7, np.uint64), entries)
        builder.append(GoneRecord("t", 1, 0, GoneReason.TRIMMED, positions))
    assert len(slot_format.encode_slot(header(1), builder.freeze())) <= builder.size_bytes


def test_bitmaps_that_do_not_ascend_or_name_a_page_twice_are_refused() -> None:
    first, second = PositionBitmap(1, 0, b""), PositionBitmap(1, 1, b"")
    for positions in ((second, first), (first, first)):
        with pytest.raises(ValueError, match="do not ascend by ledger and page"):
            GoneRecord("t", 1, 0, GoneReason.TRIMMED, positions)
        with pytest.raises(ValueError, match="do not ascend by ledger and page"):
            WaiveRecord("t", 1, 1, positions)


def slot_of(record: journal_pb2.Record) -> bytes:
    """A slot of one record, every checksum right."""
    payload = journal_pb2.Slot(records=[record]).SerializeToString()
    data = bytearray(slot_format.encode_slot(header(0), ()))
    struct.pack_into("<IQ", data, 28, 1, len(payload))
    struct.pack_into("<I", data, 40, framing.crc32c(bytes(data[:40]), payload))
    return bytes(data) + payload


ONE = BitMap([1]).serialize()


@pytest.mark.parametrize("kind", ["gone", "waive"])
@pytest.mark.parametrize(
    ("rows", "bitmaps", "detail"),
    [
        (2, [(1, 0, ONE)], r"it says 2 rows, its bitmaps have \[1\]"),
        (1, [(1, 0, ONE), (1, 1, BitMap().serialize())], r"it says 1 rows, its bitmaps have \[1, 0\]"),
        (2, [(2, 0, ONE), (1, 0, ONE)], "its bitmaps do not ascend by ledger and page"),
        (2, [(1, 0, ONE), (1, 0, ONE)], "its bitmaps do not ascend by ledger and page"),
        (1, [(1, 3, ONE + b"x")], "bitmap of ledger 1 page 3 is damaged at byte 44: .* not one whole Roaring bitmap"),
        (1, [(1, 3, b"")], "bitmap of ledger 1 page 3 is damaged at byte 44"),
    ],
)
def test_positions_that_are_no_set_of_so_many_rows_are_refused_though_every_crc_is_right(
    kind: str, rows: int, bitmaps: list[tuple[int, int, bytes]], detail: str
) -> None:
    message = journal_pb2.Record(topic_id="t", incarnation=1, rows=rows)
    if kind == "gone":
        message.gone.reason = journal_pb2.Gone.TRIMMED
    else:
        message.waive.subscription_id = 1
    for ledger_id, page, entries in bitmaps:
        getattr(message, kind).positions.add(ledger_id=ledger_id, page=page, entries=entries)
    with pytest.raises(format_errors.FormatError, match=f"journal slot record 0 .*{detail}"):
        slot_format.decode_slot(slot_of(message))
