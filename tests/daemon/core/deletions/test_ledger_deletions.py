from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from daemon.core.deletions import ledger_deletions
from daemon.core.deletions.ledger_deletions import ALL, DeletionQuery, LedgerDeletions, ListedState
from daemon.core.deletions.ledgers_in_use import InUse
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    DeletionAnswer,
    DeletionOutcome,
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
)

METADATA = (("bucket", "offloaded"), ("region", "eu-central-1"), ("serviceEndpoint", "https://s3.example.org"))


def offloaded(ledger_id: int) -> PendingDelete:
    context = OffloadContext(ledger_id * 7919 % (1 << 64), 1 << 63, "aws-s3", METADATA)
    return PendingDelete(
        LedgerComponent.MANAGED_LEDGER, LedgerType.OFFLOADED_LEDGER, ledger_id, offload_context=context
    )


def record(*ledger_ids: int, topic: str = "orders", at_ms: int = 1_000) -> RecordDeletes:
    return RecordDeletes(topic, at_ms, tuple(map(offloaded, ledger_ids)))


def in_use(*ledger_ids: int) -> InUseLedgers:
    none = np.zeros(len(ledger_ids), np.uint64)
    return InUseLedgers(LedgerType.OFFLOADED_LEDGER, np.array(ledger_ids, np.uint64), none, none)


def answer(*ids: int, outcome: DeletionOutcome = DeletionOutcome.DELETED, at_ms: int = 2_000) -> AnswerDeletes:
    return AnswerDeletes(tuple(DeletionAnswer(each, outcome, at_ms) for each in ids))


def listed(deletions: LedgerDeletions, state: ListedState) -> list[int]:
    return [each.deletion_id for each in deletions.page(state, ALL, 0, 10_000)[0]]


def test_where_nothing_was_ever_decided_there_is_nothing_to_say() -> None:
    assert LedgerDeletions.restored(None).cut() is None
    assert LedgerDeletions.restored(DeletionState()).cut() is None


def test_ids_are_never_given_again_also_when_nothing_is_left() -> None:
    deletions = LedgerDeletions.restored(None)
    deletions.apply(record(1))
    deletions.apply(BeginDeletes(1_001, (1,)))
    deletions.apply(answer(1, outcome=DeletionOutcome.GIVEN_UP))
    deletions.apply(PurgeDeletes((1,)))
    cut = deletions.cut()
    assert cut is not None
    again = LedgerDeletions.restored(cut.state())
    assert again.apply(record(1)) == ledger_deletions.Recorded((2,), ())


def test_an_owner_that_takes_its_statement_back_last_has_its_ledger_deleted() -> None:
    deletions = LedgerDeletions.restored(None)
    deletions.apply(ChangeInUse("orders", InUseChange.RECORD, in_use(7)))
    deletions.apply(record(7))
    assert deletions.due(1_000, 10) == [1]
    begun = deletions.apply(BeginDeletes(1_001, (1,)))
    assert isinstance(begun, ledger_deletions.Begun)
    assert begun.attempts == ()
    assert (deletions.counts.in_flight, deletions.counts.held, deletions.next_due_ms) == (0, 1, None)
    assert deletions.apply(record(7)) == ledger_deletions.Recorded((), (0,))
    assert deletions.apply(ChangeInUse("orders", InUseChange.FORGET, in_use(7))) == ledger_deletions.InUseChanged(
        1, (), 1
    )
    assert deletions.due(0, 10) == [1]
    assert deletions.apply(BeginDeletes(1_002, (1,))) != begun


def test_a_dead_letter_that_is_retried_is_as_old_as_its_retry() -> None:
    deletions = LedgerDeletions.restored(None)
    deletions.apply(record(1, at_ms=1_000))
    deletions.apply(BeginDeletes(1_001, (1,)))
    deletions.apply(answer(1, outcome=DeletionOutcome.GIVEN_UP))
    deletions.apply(RetryDeletes(9_000, (1,)))
    assert deletions.counts.oldest_ms == 9_000
    assert deletions.next_due_ms == 9_000


def test_the_last_thousand_that_ended_are_kept() -> None:
    deletions = LedgerDeletions.restored(None)
    ids = tuple(range(1, 1_051))
    deletions.apply(record(*ids))
    deletions.apply(BeginDeletes(1_001, ids))
    for each in ids:
        deletions.apply(answer(each, at_ms=2_000 + each))
    assert listed(deletions, ListedState.ENDED) == list(range(51, 1_051))
    with pytest.raises(KeyError):
        deletions[50]


def test_a_page_looks_at_a_bounded_number_and_says_where_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_deletions, "LOOKED_AT_MAX", 10)
    deletions = LedgerDeletions.restored(None)
    deletions.apply(record(*range(25)))
    deletions.apply(record(99, topic="rare"))
    pages, after_id = 0, None
    while True:
        page, after_id = deletions.page(ListedState.PENDING, DeletionQuery(topic="rare"), after_id or 0, 5)
        pages += 1
        if after_id is None:
            break
        assert page == []
    assert (pages, [each.topic for each in page]) == (3, ["rare"])


def test_what_is_taken_back_from_workers_is_due_again() -> None:
    deletions = LedgerDeletions.restored(None)
    deletions.apply(record(1, 2, 3))
    assert deletions.due(1_000, 2) == [1, 2]
    assert (deletions.due(1_000, 2), deletions.next_due_ms) == ([3], None)
    deletions.take_back([2, 3, 77])
    assert deletions.due(1_000, 5) == [2, 3]


@pytest.mark.parametrize(("deletes_a_topic", "size_max"), [(100, 400), (1, 750)])
def test_a_pending_deletion_takes_few_bytes(deletes_a_topic: int, size_max: int) -> None:
    count = 5_000
    tracemalloc.start()
    try:
        deletions = LedgerDeletions.restored(None)
        for first in range(0, count, deletes_a_topic):
            topic = f"persistent://tenant/namespace/topic-{first:06}"
            # As read from a slot: nothing is shared with what was recorded before.
            ids = tuple(range((1 << 40) + first, (1 << 40) + first + deletes_a_topic))
            deletions.apply(record(*ids, topic=topic, at_ms=1_700_000_000_000 + first))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert deletions.counts.in_flight == count
    assert size_bytes / count < size_max


@pytest.mark.parametrize(("has_uuids", "size_max"), [(False, 50), (True, 115)])
def test_an_offloaded_ledger_in_use_takes_few_bytes(has_uuids: bool, size_max: int) -> None:
    count = 50_000
    random = np.random.default_rng(1)
    tracemalloc.start()
    try:
        said = InUse()
        for _ in range(0, count, 1_000):
            columns = [random.integers(0, 1 << 40, 1_000, np.uint64) for _ in range(3)]
            if not has_uuids:
                columns[1:] = [np.zeros(1_000, np.uint64)] * 2
            said.change("orders", InUseChange.RECORD, InUseLedgers(LedgerType.OFFLOADED_LEDGER, *columns))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said.ledgers == count
    assert size_bytes / count < size_max
