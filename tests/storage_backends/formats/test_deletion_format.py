from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import checkpoint_format, deletion_format, format_errors, slot_format
from storage_backends.formats.deletion_format import (
    RECORDS,
    ChangeInUse,
    DeletionRecord,
    DeletionState,
    InUseChange,
    InUseLedgers,
    LedgerType,
    PurgeDeletes,
)
from storage_backends.formats.generated import deletion_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AddRecord, SlotBuilder, SlotHeader
from tests.storage_backends.formats._support import deletion_examples, examples
from tests.storage_backends.formats._support.deletion_examples import plain


def slot_of(*decided: DeletionRecord, records: tuple[slot_format.Record, ...] = ()) -> bytes:
    header = SlotHeader(3, 7, ShardSlot(1_234), len(decided) + len(records))
    return slot_format.encode_slot(header, records, decided)


@given(st.lists(deletion_examples.records, max_size=4))
def test_decisions_come_back_from_a_slot_as_they_were_and_in_their_order(decided: list[DeletionRecord]) -> None:
    stored = slot_format.read_slot(slot_of(*decided))
    assert [plain(record) for record in stored.deletions] == [plain(record) for record in decided]
    assert [type(record) for record in stored.deletions] == [type(record) for record in decided]


def test_there_is_an_example_of_each_decision_and_of_each_change() -> None:
    decided = deletion_examples.one_of_each_record()
    assert {type(record) for record in decided} == set(RECORDS)
    assert {record.change for record in decided if isinstance(record, ChangeInUse)} == set(InUseChange)


@given(st.lists(deletion_examples.records, max_size=3), st.lists(examples.rows(max_size=4), max_size=3))
def test_decisions_on_deletions_stand_beside_those_on_topics(decided: list[DeletionRecord], added: list[Rows]) -> None:
    builder = SlotBuilder()
    for number in range(max(len(decided), len(added))):
        if number < len(decided):
            builder.append_deletions(decided[number])
        if number < len(added):
            builder.append(AddRecord("id", 1, number, added[number]))
    records = builder.freeze()
    stored = slot_format.read_slot(slot_of(*builder.deletions, records=records))
    assert [plain(record) for record in stored.deletions] == [plain(record) for record in decided]
    assert len(stored.records) == len(records)
    assert stored.header.records == len(records) + len(decided) == len(builder)


@given(st.lists(deletion_examples.records, min_size=1, max_size=4))
def test_a_decision_takes_no_more_of_a_slot_than_was_said_before(decided: list[DeletionRecord]) -> None:
    size_bytes = len(slot_of(*decided)) - len(slot_of())
    assert size_bytes <= sum(map(deletion_format.size_max, decided))


def test_the_size_of_a_decision_is_not_said_to_be_many_times_what_it_is() -> None:
    for record in deletion_examples.one_of_each_record():
        assert deletion_format.size_max(record) < 3 * (len(slot_of(record)) - len(slot_of())) + 150


@given(deletion_examples.states)
def test_the_state_of_deletions_comes_back_from_a_checkpoint_as_it_was(state: DeletionState) -> None:
    value = checkpoint_format.Checkpoint(1, 2, ShardSlot(3), (), state)
    stored = checkpoint_format.decode_checkpoint(checkpoint_format.encode_checkpoint(value)).deletions
    assert stored is not None
    assert plain(stored) == plain(state)


@given(st.lists(deletion_examples.deletions, max_size=6), st.lists(deletion_examples.topics_in_use, max_size=2))
def test_very_many_deletions_come_back_from_a_checkpoint_in_their_order(
    some: list[deletion_format.Deletion], in_use: list[deletion_format.TopicInUse]
) -> None:
    state = DeletionState(9, tuple(some), tuple(in_use))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion_format, "_PORTION_DELETIONS", 2)
        body = checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(1, 2, ShardSlot(3), (), state))
    stored = checkpoint_format.decode_checkpoint(body).deletions
    assert stored is not None
    assert plain(stored) == plain(state)
    assert len(stored.deletions) == len(some)
    assert [stored.deletions[place] for place in range(len(some))] == some
    assert list(stored.deletions[1:3]) == some[1:3]


def test_a_deletion_of_no_component_is_refused_before_it_is_read() -> None:
    message = deletion_pb2.DeletionState()
    deletion_format.fill_state(message, deletion_examples.a_state())
    message.deletions[2].pending_delete.component = deletion_pb2.PendingDelete.COMPONENT_UNSPECIFIED
    with pytest.raises(format_errors.FormatError, match="deletion 4 has no component"):
        deletion_format.state_of(message, "checkpoint", 9)


def test_a_checkpoint_that_says_nothing_of_deletions_is_not_one_that_says_there_are_none() -> None:
    for state in (None, DeletionState()):
        value = checkpoint_format.Checkpoint(1, 2, ShardSlot(3), (), state)
        stored = checkpoint_format.decode_checkpoint(checkpoint_format.encode_checkpoint(value)).deletions
        assert (stored is None) == (state is None)


def test_a_decision_of_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        format_errors.FormatError,
        match="slot is damaged at byte 9: this release does not know the kind of a decision on deletions",
    ):
        deletion_format.record_of(deletion_pb2.DeletionRecord(), "slot", 9)


def test_columns_of_other_lengths_than_are_said_are_refused() -> None:
    column = np.arange(3, dtype=np.uint64)
    message = deletion_pb2.DeletionRecord()
    deletion_format.fill_record(
        message,
        ChangeInUse("orders", InUseChange.RECORD, InUseLedgers(LedgerType.OFFLOADED_LEDGER, column, column, column)),
    )
    for rows in (2, 4):
        message.in_use.ledgers.ledgers = rows
        with pytest.raises(format_errors.FormatError, match="slot ledger_id is damaged at byte"):
            deletion_format.record_of(message, "slot", 9)
    message.in_use.ledgers.ledgers = 3
    message.in_use.ledgers.ClearField("uuid_lsb")
    with pytest.raises(format_errors.FormatError, match="slot uuid_lsb is damaged at byte"):
        deletion_format.record_of(message, "slot", 9)


def test_a_number_that_stands_for_nothing_is_refused() -> None:
    for unspecified in (
        deletion_pb2.DeletionRecord(
            in_use=deletion_pb2.ChangeInUse(
                topic="orders",
                change=deletion_pb2.ChangeInUse.CHANGE_UNSPECIFIED,
                ledgers=deletion_pb2.InUseLedgers(
                    ledger_type=deletion_pb2.PendingDelete.LEDGER, ledgers=0, ledger_id=b""
                ),
            )
        ),
        deletion_pb2.DeletionRecord(
            record=deletion_pb2.RecordDeletes(
                topic="orders",
                recorded_at_ms=1,
                deletes=[
                    deletion_pb2.PendingDelete(
                        component=deletion_pb2.PendingDelete.COMPONENT_UNSPECIFIED,
                        ledger_type=deletion_pb2.PendingDelete.LEDGER,
                        ledger_id=1,
                    )
                ],
            )
        ),
    ):
        with pytest.raises(format_errors.FormatError, match="slot is damaged at byte 9"):
            deletion_format.record_of(unspecified, "slot", 9)


def test_in_use_ledgers_are_columns_of_one_length() -> None:
    column = np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match=r"uuid_lsb is uint64\(3,\), it must be uint64\(2,\)"):
        InUseLedgers(LedgerType.LEDGER, column, column, np.zeros(3, np.uint64))
    with pytest.raises(ValueError, match=r"uuid_msb is int64\(2,\), it must be uint64\(2,\)"):
        InUseLedgers(LedgerType.LEDGER, column, np.zeros(2, np.int64), column)


def test_a_decision_without_an_id_is_one() -> None:
    (stored,) = slot_format.read_slot(slot_of(PurgeDeletes(()))).deletions
    assert stored == PurgeDeletes(())
