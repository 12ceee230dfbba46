"""The deletions of a shard and a list of records side by side: whatever is decided, in whatever order, with restarts.

Owns: the rules of the state machine, and limits so small that a few deletions are many.
Does not own: what is right (`oracle`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daemon.core.deletions import ledger_deletions, sorted_keys
from daemon.core.deletions.ledger_deletions import (
    Answered,
    Begun,
    DeletionCut,
    DeletionQuery,
    InUseChanged,
    LedgerDeletions,
    ListedState,
    Purged,
    Recorded,
    Result,
    Retried,
)
from storage_backends.formats import deletion_format as formats
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
)
from storage_backends.formats.generated import deletion_pb2
from tests.daemon.core.deletions._support.oracle import BEGUN, DEAD, ENDED, HELD, WAITING, Oracle, Told

ENDED_KEPT = 3
NEVER_MS = (1 << 64) - 1
TOPICS = ("a", "b")
# Among them such as end in zeros, are zero, or are the highest there is.
LEDGERS = (0, 1, 256, (1 << 64) - 1)
UUIDS = ((0, 1), (1, 0), (1 << 63, 256))
DRIVERS = (("aws-s3", (("bucket", "one"),)), ("aws-s3", (("bucket", "two"),)))

topics = st.sampled_from(TOPICS)
times = st.integers(0, 40)
ids = st.lists(st.integers(0, 12), max_size=4).map(tuple)
ledger_ids = st.sampled_from(LEDGERS)
components = st.sampled_from(LedgerComponent)
deletes = st.one_of(
    st.builds(PendingDelete, components, st.just(LedgerType.LEDGER), ledger_ids),
    st.builds(
        lambda component, ledger_id, uuid, driver, cursor_name: PendingDelete(
            component,
            LedgerType.OFFLOADED_LEDGER,
            ledger_id,
            cursor_name,
            offload_context=OffloadContext(*uuid, *driver),
        ),
        components,
        ledger_ids,
        st.sampled_from(UUIDS),
        st.sampled_from(DRIVERS),
        st.sampled_from([None, "cursor"]),
    ),
)
named = st.lists(st.tuples(ledger_ids, st.sampled_from([(0, 0), *UUIDS])), max_size=5)
picks = st.lists(st.integers(0, 1 << 8), min_size=1, max_size=3)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Inside, a few deletions are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_deletions, "ENDED_KEPT_MAX", ENDED_KEPT)
        patch.setattr(ledger_deletions, "LOOKED_AT_MAX", 2)
        patch.setattr(sorted_keys, "CHUNK_KEYS", 4)
        yield


class DeletionsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.deletions = LedgerDeletions.restored(None)
        self.oracle = Oracle(ENDED_KEPT)
        self.handed_out: set[int] = set()
        # One taken at some moment, what was decided since, and what it was then.
        self.cut: DeletionCut | None = None
        self.since: list[DeletionRecord] = []

    # ---- decisions

    @rule(topic=topics, some=st.lists(deletes, min_size=1, max_size=4), at_ms=times, by_sweeper=st.booleans())
    def record(self, topic: str, some: list[PendingDelete], at_ms: int, by_sweeper: bool) -> None:
        self.apply(RecordDeletes(topic, at_ms, tuple(some), by_sweeper))

    @rule(named_ids=ids, at_ms=times)
    def begin_any(self, named_ids: tuple[int, ...], at_ms: int) -> None:
        self.apply(BeginDeletes(at_ms, named_ids))

    @precondition(lambda self: self.in_state(WAITING))
    @rule(places=picks, at_ms=times)
    def begin(self, places: list[int], at_ms: int) -> None:
        self.apply(BeginDeletes(at_ms, self.picked(places, WAITING)))

    @rule(named_ids=ids, outcome=st.sampled_from(DeletionOutcome), at_ms=times)
    def answer_any(self, named_ids: tuple[int, ...], outcome: DeletionOutcome, at_ms: int) -> None:
        self.apply(AnswerDeletes(tuple(DeletionAnswer(each, outcome, at_ms) for each in named_ids)))

    @precondition(lambda self: self.in_state(BEGUN))
    @rule(
        places=picks,
        outcome=st.sampled_from(
            [DeletionOutcome.DELETED, DeletionOutcome.FAILED, DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP]
        ),
        at_ms=times,
        retry_at_ms=times,
        maybe_deleted=st.booleans(),
        text=st.sampled_from(["", "the store said \N{SNOWMAN}"]),
    )
    def answer(
        self,
        places: list[int],
        outcome: DeletionOutcome,
        at_ms: int,
        retry_at_ms: int,
        maybe_deleted: bool,
        text: str,
    ) -> None:
        retried = outcome is DeletionOutcome.FAILED
        self.apply(
            AnswerDeletes(
                tuple(
                    DeletionAnswer(each, outcome, at_ms, retry_at_ms if retried else 0, maybe_deleted, text)
                    for each in self.picked(places, BEGUN)
                )
            )
        )

    @rule(named_ids=ids, at_ms=times)
    def retry_any(self, named_ids: tuple[int, ...], at_ms: int) -> None:
        self.apply(RetryDeletes(at_ms, named_ids))

    @precondition(lambda self: self.in_state(DEAD))
    @rule(places=picks, at_ms=times)
    def retry(self, places: list[int], at_ms: int) -> None:
        self.apply(RetryDeletes(at_ms, self.picked(places, DEAD)))

    @rule(named_ids=ids)
    def purge_any(self, named_ids: tuple[int, ...]) -> None:
        self.apply(PurgeDeletes(named_ids))

    @precondition(lambda self: self.in_state(DEAD))
    @rule(places=picks)
    def purge(self, places: list[int]) -> None:
        self.apply(PurgeDeletes(self.picked(places, DEAD)))

    @rule(topic=topics, change=st.sampled_from(InUseChange), ledger_type=st.sampled_from(LedgerType), rows=named)
    def say(
        self, topic: str, change: InUseChange, ledger_type: LedgerType, rows: list[tuple[int, tuple[int, int]]]
    ) -> None:
        named = [] if change is InUseChange.COMPLETE else rows
        self.apply(ChangeInUse(topic, change, in_use_ledgers(ledger_type, named)))

    @rule(topic=topics, ledger_type=st.sampled_from(LedgerType), rows=named)
    def ask_what_else_is_in_use(
        self, topic: str, ledger_type: LedgerType, rows: list[tuple[int, tuple[int, int]]]
    ) -> None:
        in_use = self.deletions.in_use.of(topic, ledger_type)
        beside = in_use.beside(in_use_ledgers(ledger_type, rows))
        said = {row[1:] for row in self.oracle.in_use.get(topic, ()) if row[0] is ledger_type}
        found = zip(beside.ledger_id.tolist(), beside.uuid_msb.tolist(), beside.uuid_lsb.tolist(), strict=True)
        assert sorted((ledger_id, (msb, lsb)) for ledger_id, msb, lsb in found) == sorted(said - set(rows))
        assert len(in_use) == self.deletions.in_use.ledgers_of(topic, ledger_type) == len(said)

    def apply(self, record: DeletionRecord) -> None:
        record = through_its_bytes(record)
        result = self.deletions.apply(record)
        self.since.append(record)
        check_result(record, result, self.oracle.apply(record))
        self.handed_out &= set(self.in_state(WAITING))
        if isinstance(record, BeginDeletes):
            self.handed_out -= set(record.deletion_id)

    def in_state(self, *states: str) -> list[int]:
        return [told.number for told in self.oracle.told if told.state in states]

    def picked(self, places: list[int], state: str) -> tuple[int, ...]:
        there = self.in_state(state)
        return tuple({there[place % len(there)]: None for place in places})

    # ---- workers

    @rule(now_ms=times, limit=st.integers(0, 3))
    def due(self, now_ms: int, limit: int) -> None:
        waiting = sorted((told.due_ms, told.number) for told in self.not_handed_out() if told.due_ms <= now_ms)
        due = self.deletions.due(now_ms, limit)
        assert due == [number for _, number in waiting[:limit]]
        self.handed_out |= set(due)

    @rule(named_ids=ids)
    def take_back(self, named_ids: tuple[int, ...]) -> None:
        self.deletions.take_back(named_ids)
        self.handed_out -= set(named_ids)

    def not_handed_out(self) -> list[Told]:
        return [told for told in self.oracle.told if told.state == WAITING and told.number not in self.handed_out]

    # ---- restarts

    @rule()
    def take_a_cut(self) -> None:
        self.cut, self.since = self.deletions.cut(), []

    @rule()
    def restart(self) -> None:
        """The state as of the cut, whatever was decided since it was taken, and that applied again."""
        self.deletions = LedgerDeletions.restored(restored_state(self.cut))
        for record in self.since:
            self.deletions.apply(record)
        self.handed_out = set()

    # ---- contents

    @invariant()
    def the_state_is_the_one_that_was_told(self) -> None:
        check_state(self.deletions.cut(), self.oracle)

    @invariant()
    def counts_are_right(self) -> None:
        check_counts(self.deletions.counts, self.oracle.told)
        cut = self.deletions.cut()
        for topic in TOPICS if cut is not None else ():
            assert cut is not None
            check_counts(cut.counts(topic), [told for told in self.oracle.told if told.topic == topic])

    @invariant()
    def what_waits_is_found_and_what_has_begun(self) -> None:
        due_ms = min((told.due_ms for told in self.not_handed_out()), default=None)
        assert self.deletions.next_due_ms == due_ms
        assert self.deletions.begun_before() == self.in_state(BEGUN)

    @invariant()
    def ledgers_are_found(self) -> None:
        for ledger_id in LEDGERS:
            for uuid in UUIDS:
                recorded = [
                    told.uuid == uuid and told.delete.ledger_id == ledger_id and told.state != ENDED
                    for told in self.oracle.told
                ]
                assert self.deletions.has_record(*uuid, ledger_id) == any(recorded)
                self.in_use_is_known(ledger_id, uuid)

    def in_use_is_known(self, ledger_id: int, uuid: tuple[int, int]) -> None:
        held = [
            (LedgerType.OFFLOADED_LEDGER, ledger_id, stated) in said
            for said in self.oracle.in_use.values()
            for stated in (uuid, (0, 0))
        ]
        assert self.deletions.in_use.holds(*uuid, ledger_id) == any(held)
        exactly = [(LedgerType.OFFLOADED_LEDGER, ledger_id, uuid) in said for said in self.oracle.in_use.values()]
        assert self.deletions.in_use.holds_exactly(*uuid, ledger_id) == any(exactly)
        context = OffloadContext(*uuid, "any")
        for topic in TOPICS:
            for delete in (
                PendingDelete(LedgerComponent.SCHEMA_STORAGE, LedgerType.LEDGER, ledger_id),
                PendingDelete(
                    LedgerComponent.MANAGED_CURSOR, LedgerType.OFFLOADED_LEDGER, ledger_id, offload_context=context
                ),
            ):
                assert self.deletions.in_use.is_in_use(topic, delete) == self.oracle.is_in_use(topic, delete)

    @invariant()
    def topics_are_known(self) -> None:
        for topic in TOPICS:
            complete = (topic, LedgerType.OFFLOADED_LEDGER) in self.oracle.complete
            assert self.deletions.in_use.knows(topic) == complete
            said = self.oracle.in_use.get(topic, set())
            assert self.deletions.in_use.ledgers_of(topic) == len(said)
            for ledger_type in LedgerType:
                of_type = sum(row[0] is ledger_type for row in said)
                assert self.deletions.in_use.ledgers_of(topic, ledger_type) == of_type
                assert len(self.deletions.in_use.of(topic, ledger_type)) == of_type
        assert self.deletions.in_use.ledgers == sum(map(len, self.oracle.in_use.values()))

    @rule(
        state=st.sampled_from(ListedState),
        wanted=st.builds(
            DeletionQuery,
            st.sampled_from(["", *TOPICS]),
            st.none() | components,
            st.none() | st.sampled_from(LedgerType),
            st.none() | ledger_ids,
            st.none() | st.frozensets(st.integers(0, 12), max_size=4),
        ),
        limit=st.integers(1, 3),
    )
    def list_all(self, state: ListedState, wanted: DeletionQuery, limit: int) -> None:
        pages: list[Deletion] = []
        after_id: int | None = 0
        while after_id is not None:
            page, next_after = self.deletions.page(state, wanted, after_id, limit)
            assert len(page) <= limit
            assert next_after is None or next_after > after_id
            pages += page
            after_id = next_after
        states = {ListedState.PENDING: (WAITING, BEGUN), ListedState.DEAD: (DEAD,), ListedState.ENDED: (HELD, ENDED)}
        expected = [told for told in self.oracle.told if told.state in states[state] and is_wanted(told, wanted)]
        assert [each.deletion_id for each in pages] == [told.number for told in expected]
        assert pages == [as_stored(told) for told in expected]
        if state is ListedState.DEAD:
            assert set(self.deletions.dead_ids(wanted, 0, limit)[0]) <= {told.number for told in expected}


def in_use_ledgers(ledger_type: LedgerType, rows: Sequence[tuple[int, tuple[int, int]]]) -> InUseLedgers:
    columns = [
        np.array([row[0] for row in rows], np.uint64),
        np.array([row[1][0] for row in rows], np.uint64),
        np.array([row[1][1] for row in rows], np.uint64),
    ]
    return InUseLedgers(ledger_type, *columns)


def through_its_bytes(record: DeletionRecord) -> DeletionRecord:
    """As a slot gives it back."""
    message = deletion_pb2.DeletionRecord()
    formats.fill_record(message, record)
    return formats.record_of(deletion_pb2.DeletionRecord.FromString(message.SerializeToString()), "slot", 0)


def restored_state(cut: DeletionCut | None) -> DeletionState | None:
    """As a checkpoint gives it back."""
    if cut is None:
        return None
    message = deletion_pb2.DeletionState()
    formats.fill_state(message, cut.state())
    return formats.state_of(deletion_pb2.DeletionState.FromString(message.SerializeToString()), "checkpoint", 0)


def check_result(record: DeletionRecord, result: Result, told: object) -> None:
    match result:
        case Recorded():
            assert isinstance(told, list)
            assert list(result.new) == [number for number in told if number is not None]
            assert list(result.already) == [place for place, number in enumerate(told) if number is None]
        case Begun():
            assert isinstance(told, dict)
            assert isinstance(record, BeginDeletes)
            in_order = list(dict.fromkeys(record.deletion_id))
            assert [each.deletion_id for each in result.attempts] == [at for at in in_order if told[at] == "attempt"]
            assert [each.deletion_id for each in result.ended] == [at for at in in_order if told[at] == "in use"]
            assert all(each.begun for each in result.attempts)
            assert {each.outcome for each in result.ended} <= {DeletionOutcome.IN_USE}
        case Answered():
            assert isinstance(told, list)
            for became, some in (("ended", result.ended), ("failed", result.failed), ("given up", result.given_up)):
                assert [each.deletion_id for each in some] == [number for number, what in told if what == became]
        case Retried():
            assert result.retried == told
        case Purged():
            assert result.purged == told
        case InUseChanged():
            assert (result.changed, list(result.being_deleted), result.revived) == told


def check_state(cut: DeletionCut | None, oracle: Oracle) -> None:
    if cut is None:
        assert not oracle.given
        assert not oracle.in_use
        return
    state = cut.state()
    assert state.last_id == oracle.given
    assert list(state.deletions) == [as_stored(told) for told in oracle.told]
    assert [topic.topic for topic in state.in_use] == list(oracle.in_use)
    for topic in state.in_use:
        rows = [
            (ledgers.ledger_type, ledger_id, (msb, lsb))
            for ledgers in topic.ledgers
            for ledger_id, msb, lsb in zip(
                ledgers.ledger_id.tolist(), ledgers.uuid_msb.tolist(), ledgers.uuid_lsb.tolist(), strict=True
            )
        ]
        assert rows == sorted(oracle.in_use[topic.topic])
        assert list(topic.complete) == sorted(kind for name, kind in oracle.complete if name == topic.topic)
        assert len({ledgers.ledger_type for ledgers in topic.ledgers}) == len(topic.ledgers)


def as_stored(told: Told) -> Deletion:
    return Deletion(
        told.number,
        told.topic,
        told.delete,
        told.recorded_at_ms,
        told.by_sweeper,
        told.outcome,
        told.state == BEGUN,
        told.maybe_deleted,
        told.failures,
        told.due_ms if told.state == WAITING else 0,
        told.ended_at_ms,
        told.text,
        told.state == HELD,
    )


def check_counts(counts: ledger_deletions.DeletionCounts, told: list[Told]) -> None:
    in_flight = [each for each in told if each.state in (WAITING, BEGUN)]
    assert counts.in_flight == len(in_flight)
    assert counts.begun == sum(each.state == BEGUN for each in told)
    assert counts.dead == sum(each.state == DEAD for each in told)
    assert counts.held == sum(each.state == HELD for each in told)
    assert counts.oldest_ms == min((each.recorded_at_ms for each in in_flight), default=0)
    of_kind = {
        (each.delete.component, each.delete.ledger_type): [
            other
            for other in told
            if (other.delete.component, other.delete.ledger_type) == (each.delete.component, each.delete.ledger_type)
        ]
        for each in told
        if each.state != ENDED
    }
    assert {(kind.component, kind.ledger_type) for kind in counts.kinds} == set(of_kind)
    for kind in counts.kinds:
        same = of_kind[kind.component, kind.ledger_type]
        flying = [each.recorded_at_ms for each in same if each.state in (WAITING, BEGUN)]
        assert (kind.in_flight, kind.oldest_ms) == (len(flying), min(flying, default=0))
        assert kind.begun == sum(each.state == BEGUN for each in same)
        assert kind.dead == sum(each.state == DEAD for each in same)
        assert kind.held == sum(each.state == HELD for each in same)


def is_wanted(told: Told, wanted: DeletionQuery) -> bool:
    return (
        (not wanted.topic or told.topic == wanted.topic)
        and (wanted.component is None or told.delete.component is wanted.component)
        and (wanted.ledger_type is None or told.delete.ledger_type is wanted.ledger_type)
        and (wanted.ledger_id is None or told.delete.ledger_id == wanted.ledger_id)
        and (wanted.deletion_ids is None or told.number in wanted.deletion_ids)
    )
