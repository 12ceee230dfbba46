"""Deletions for tests of formats: strategies for decisions and states, one of each kind, and how they are compared."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    Deletion,
    DeletionAnswer,
    DeletionOutcome,
    DeletionRecord,
    DeletionState,
    InUseChange,
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
    TopicInUse,
)
from tests.storage_backends.formats._support import examples
from tests.storage_backends.formats._support.examples import u64

U32_MAX = (1 << 32) - 1

# Short ones, such as take several bytes a character, and long ones.
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.sampled_from(["", "persistent://tenant/namespace/orders", "\N{SNOWMAN}" * 200, "x" * 20_000]),
)
names = texts.filter(bool)
ids = st.lists(u64, max_size=5).map(tuple)
contexts = st.builds(
    OffloadContext, u64, u64, texts, st.dictionaries(texts, texts, max_size=3).map(lambda each: tuple(each.items()))
)
deletes = st.builds(
    PendingDelete,
    st.sampled_from(LedgerComponent),
    st.sampled_from(LedgerType),
    u64,
    st.none() | texts,
    st.none() | texts,
    st.none() | contexts,
)
answers = st.builds(DeletionAnswer, u64, st.sampled_from(DeletionOutcome), u64, u64, st.booleans(), texts)


@st.composite
def in_use_ledgers(draw: st.DrawFn) -> InUseLedgers:
    """With UUIDs, without, or of both kinds. One that is repeated alone would come back once."""
    ledger_id = draw(examples.u64_column())
    columns = [np.zeros(len(ledger_id), np.uint64) for _ in range(2)]
    if draw(st.booleans()):
        columns = [draw(examples.u64_column(len(ledger_id))) for _ in range(2)]
    columns = [ledger_id, *columns]
    if len(set(zip(*columns, strict=True))) == 1:
        columns = [column[:1] for column in columns]
    return InUseLedgers(draw(st.sampled_from(LedgerType)), *columns)


records: st.SearchStrategy[DeletionRecord] = st.one_of(
    st.builds(RecordDeletes, texts, u64, st.lists(deletes, max_size=4).map(tuple), st.booleans()),
    st.builds(BeginDeletes, u64, ids),
    st.builds(AnswerDeletes, st.lists(answers, max_size=4).map(tuple)),
    st.builds(RetryDeletes, u64, ids),
    st.builds(PurgeDeletes, ids),
    st.builds(ChangeInUse, texts, st.sampled_from(InUseChange), in_use_ledgers()),
)

deletions = st.builds(
    Deletion,
    u64,
    texts,
    deletes,
    u64,
    st.booleans(),
    st.sampled_from(DeletionOutcome),
    st.booleans(),
    st.booleans(),
    st.integers(0, U32_MAX),
    u64,
    u64,
    texts,
    st.booleans(),
)
topics_in_use = st.builds(
    TopicInUse,
    texts,
    st.lists(in_use_ledgers(), max_size=2).map(tuple),
    st.sets(st.sampled_from(LedgerType)).map(lambda types: tuple(sorted(types))),
)
states = st.builds(
    DeletionState, u64, st.lists(deletions, max_size=3).map(tuple), st.lists(topics_in_use, max_size=3).map(tuple)
)


def plain(value: DeletionRecord | DeletionState | TopicInUse | InUseLedgers) -> object:
    """What can be compared: columns as lists."""
    match value:
        case ChangeInUse():
            return (value.topic, value.change, plain(value.ledgers))
        case InUseLedgers():
            columns = (value.ledger_id.tolist(), value.uuid_msb.tolist(), value.uuid_lsb.tolist())
            return (value.ledger_type, columns)
        case TopicInUse():
            return (value.topic, [plain(ledgers) for ledgers in value.ledgers], value.complete)
        case DeletionState():
            return (value.last_id, tuple(value.deletions), [plain(topic) for topic in value.in_use])
        case _:
            return value


def one_of_each_delete() -> tuple[PendingDelete, ...]:
    """A delete of each component and type that there is."""
    context = OffloadContext(1 << 63, 7, "aws-s3", (("bucket", "offloaded"), ("region", "")))
    of_components = (
        PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 7),
        PendingDelete(LedgerComponent.MANAGED_CURSOR, LedgerType.LEDGER, 8, cursor_name="reader"),
        PendingDelete(LedgerComponent.SCHEMA_STORAGE, LedgerType.LEDGER, 9, schema_id="tenant/namespace/orders"),
    )
    offloaded = (
        dataclasses.replace(each, ledger_type=LedgerType.OFFLOADED_LEDGER, offload_context=context)
        for each in of_components
    )
    return (*of_components, *offloaded)


def in_use_of_both_kinds(ledger_type: LedgerType) -> InUseLedgers:
    columns = (np.array(values, np.uint64) for values in ([5, 7, 7], [0, 0, 1 << 63], [0, 0, 7]))
    return InUseLedgers(ledger_type, *columns)


def one_of_each_record() -> tuple[DeletionRecord, ...]:
    """A decision of each kind, and a change of each."""
    answers_of_all = tuple(
        DeletionAnswer(number, outcome, 1_000 + number, text=f"answer {number}")
        for number, outcome in enumerate(DeletionOutcome, start=1)
        if outcome is not DeletionOutcome.PENDING
    )
    failed = DeletionAnswer(9, DeletionOutcome.FAILED, 1_009, 601_009, True, "the store does not answer")
    changes = (
        ChangeInUse("orders", change, in_use_of_both_kinds(LedgerType.OFFLOADED_LEDGER)) for change in InUseChange
    )
    return (
        RecordDeletes("orders", 1_000, one_of_each_delete()),
        RecordDeletes("orders", 1_000, one_of_each_delete()[:1], by_sweeper=True),
        BeginDeletes(1_001, (1, 2, 3)),
        AnswerDeletes((*answers_of_all, failed)),
        RetryDeletes(1_002, (4, 5)),
        PurgeDeletes((6,)),
        *changes,
    )


def a_state() -> DeletionState:
    """A deletion in each state, and what is in use of two topics."""
    waiting, begun, dead, held, ended, partly = one_of_each_delete()
    return DeletionState(
        12,
        (
            Deletion(1, "orders", waiting, 1_000, next_attempt_at_ms=1_000),
            Deletion(2, "orders", begun, 1_000, begun=True, failures=3, text="the store does not answer"),
            Deletion(
                4, "orders", dead, 1_000, outcome=DeletionOutcome.GIVEN_UP, failures=11, ended_at_ms=9_000, text="no"
            ),
            Deletion(5, "orders", held, 1_000, outcome=DeletionOutcome.IN_USE, ended_at_ms=2_000, held=True),
            Deletion(6, "orders", ended, 1_000, True, outcome=DeletionOutcome.DELETED, ended_at_ms=3_000),
            Deletion(12, "orders", partly, 1_000, maybe_deleted=True, failures=1, next_attempt_at_ms=601_000),
        ),
        (
            TopicInUse(
                "orders",
                (in_use_of_both_kinds(LedgerType.LEDGER), in_use_of_both_kinds(LedgerType.OFFLOADED_LEDGER)),
                (LedgerType.OFFLOADED_LEDGER,),
            ),
            TopicInUse("of which nothing is in use", (), (LedgerType.LEDGER, LedgerType.OFFLOADED_LEDGER)),
        ),
    )
