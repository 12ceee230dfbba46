"""The deletions of a shard: what each decision comes to.

Owns: the deletions with their states, what is in use, and finding the one and the other. Everything follows from the
decisions in their order; which ones were handed out to workers is the only thing that is known here alone.
Does not own: slots, times of retries (`retrying`), what may be recorded at all (`checking`), stores and workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from pyroaring import BitMap64
from sortedcontainers import SortedList

from daemon.core.deletions import counting, life, listing
from daemon.core.deletions.by_ledger import DeletionsByLedger
from daemon.core.deletions.counting import Counting, DeletionCounts
from daemon.core.deletions.in_use import FrozenInUse, InUse
from daemon.core.deletions.kept import FrozenDeletions, KeptDeletions, kind_of
from daemon.core.deletions.life import State
from daemon.core.deletions.listing import DeletionFilter, ListedState
from daemon.core.deletions.recorded_ledgers import RecordedLedgers
from daemon.core.deletions.waiting import Waiting
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    Deletion,
    DeletionOutcome,
    DeletionRecord,
    DeletionState,
    InUseChange,
    InUseLedgers,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)
from storage_backends.formats.row_columns import U64

# How many of those that ended are kept, for operators; held ones are not among them.
ENDED_KEPT_MAX = 1_000

_ID_BITS = 64
_ID_MASK = (1 << _ID_BITS) - 1
_U64_MAX = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """`new`: ids, in the order of the record. `already`: which of the record were there before."""

    new: tuple[int, ...]
    already: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """`attempts`: whose attempt has begun. `ended`: those that are in use."""

    attempts: tuple[Deletion, ...]
    ended: tuple[Deletion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """`ended`: over. `failed`: they wait again. `given_up`: dead letters."""

    ended: tuple[Deletion, ...]
    failed: tuple[Deletion, ...]
    given_up: tuple[Deletion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Retried:
    retried: int


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    purged: int


@dataclasses.dataclass(frozen=True, slots=True)
class InUseChanged:
    """`changed`: ledgers that are in use now and were not, and such as were and are no longer. `being_deleted`: which
    of the record are too late, and are not in use. `revived`: deletions that are pending again.
    """

    changed: int
    being_deleted: tuple[int, ...]
    revived: int


Result: TypeAlias = Recorded | Begun | Answered | Retried | Purged | InUseChanged


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeletionCut:
    """The deletions of a shard as they were at one moment."""

    last_id: int
    deletions: FrozenDeletions
    in_use: FrozenInUse

    def state(self) -> DeletionState:
        """O(n): for a thread."""
        return DeletionState(self.last_id, self.deletions.all(), self.in_use.state())

    def counts(self, topic: str) -> DeletionCounts:
        """Counts the deletions of one topic by component and type. O(n): for a thread."""
        return counting.count(self.deletions.of_topic(topic))


class LedgerDeletions:
    def __init__(self) -> None:
        self.in_use = InUse()
        self._last_id = 0
        self._deletions = KeptDeletions()
        self._recorded = RecordedLedgers(self._deletions.kind_number_of)
        self._being_deleted = DeletionsByLedger(self._deletions.__getitem__)
        self._held = DeletionsByLedger(self._deletions.__getitem__)
        self._waiting = Waiting()
        self._counting = Counting()
        self._ids = {listed: BitMap64() for listed in ListedState}
        self._begun: set[int] = set()
        # When it ended and its id in one number.
        self._ended: SortedList[int] = SortedList()

    @classmethod
    def restored(cls, state: DeletionState | None) -> LedgerDeletions:
        """Rebuilds the deletions from a checkpoint's state; None: nothing was ever decided."""
        made = cls()
        if state is not None:
            made._last_id = state.last_id
            made.in_use = InUse.restored(state.in_use)
            for deletion in state.deletions:
                made._add(deletion)
        return made

    def apply(self, record: DeletionRecord) -> Result:
        """What a decision comes to. Ids that are not known, or are in another state than the decision is about, are
        left as they are. As much work as the record is long.
        """
        match record:
            case RecordDeletes():
                return self._record(record)
            case BeginDeletes():
                return self._begin(record)
            case AnswerDeletes():
                return self._answer(record)
            case RetryDeletes():
                return self._retry(record)
            case PurgeDeletes():
                return self._purge(record)
            case ChangeInUse():
                return self._change_in_use(record)

    # ---- what there is

    def __getitem__(self, deletion_id: int) -> Deletion:
        """The deletion of that id. Raises KeyError when it is not there."""
        return self._deletions[deletion_id]

    def due(self, now_ms: int, limit: int, latest_ms: int = _U64_MAX) -> list[int]:
        """Ids of those whose next attempt is due, the longest due first. Each is handed out once: until its attempt
        begins and fails, or it is taken back. What waits for a time after `latest_ms`, not before `now_ms`, was decided
        by a clock that was ahead: it is due.
        """
        return self._waiting.hand_out(now_ms, limit, latest_ms)

    def take_back(self, ids: Iterable[int]) -> None:
        """Takes back what `due` handed out, and for which no BeginDeletes will be decided: they are due as before."""
        self._waiting.take_back(ids)

    @property
    def next_due_ms(self) -> int | None:
        """When the next one of those that were not handed out is due."""
        return self._waiting.next_due_ms

    def begun_before(self) -> list[int]:
        """Ids of those whose attempt has begun and was not answered. Asked after a restart: nobody is at them, and each
        gets another BeginDeletes.
        """
        return sorted(self._begun)

    @property
    def counts(self) -> DeletionCounts:
        return self._counting.counts()

    def has_record(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Whether an offloaded ledger is pending or a dead letter, of any topic."""
        return self._recorded.has(uuid_msb, uuid_lsb, ledger_id)

    def page(
        self, state: ListedState, wanted: DeletionFilter, after_id: int, limit: int
    ) -> tuple[list[Deletion], int | None]:
        """Deletions with ids above `after_id`, ascending, at most `limit`; and the `after_id` of the next page, None
        when there is none. A page may be short, or empty, and yet have a next.
        """
        return listing.page(self._deletions, self._ids[state], wanted, after_id, limit)

    def dead_ids(self, wanted: DeletionFilter, after_id: int, limit: int) -> tuple[list[int], int | None]:
        """Lists ids of dead letters, ascending, above `after_id`, at most `limit`; and the `after_id` of the next page,
        None when there is none.
        """
        found, after = self.page(ListedState.DEAD, wanted, after_id, limit)
        return [deletion.deletion_id for deletion in found], after

    def cut(self) -> DeletionCut | None:
        """Returns the deletions as they are now; None when nothing was ever decided. Copies pointers only."""
        if not self._last_id and not self.in_use.topics:
            return None
        return DeletionCut(self._last_id, self._deletions.freeze(), self.in_use.freeze())

    # ---- decisions

    def _record(self, record: RecordDeletes) -> Recorded:
        new: list[int] = []
        already: list[int] = []
        for place, delete in enumerate(record.deletes):
            kind = self._deletions.kind_number(kind_of(record.topic, delete))
            if kind is not None and self._recorded.find(delete, kind) is not None:
                already.append(place)
                continue
            self._last_id += 1
            deletion = life.recorded(
                self._last_id, record.topic, delete, record.recorded_at_ms, by_sweeper=record.by_sweeper
            )
            self._add(deletion)
            new.append(self._last_id)
        return Recorded(tuple(new), tuple(already))

    def _begin(self, record: BeginDeletes) -> Begun:
        attempts: list[Deletion] = []
        ended: list[Deletion] = []
        for deletion in self._in_state(record.deletion_id, State.WAITING, State.BEGUN):
            # Never so of one that has begun, or may be deleted in part: for its ledger it was too late.
            if self.in_use.is_in_use(deletion.topic, deletion.pending_delete):
                ended.append(self._become(deletion, life.found_in_use(deletion, record.at_ms)))
            else:
                attempts.append(self._become(deletion, life.begun(deletion)))
        return Begun(tuple(attempts), tuple(ended))

    def _answer(self, record: AnswerDeletes) -> Answered:
        ended: list[Deletion] = []
        failed: list[Deletion] = []
        given_up: list[Deletion] = []
        for answer in record.answers:
            if answer.outcome is DeletionOutcome.PENDING:
                continue
            for deletion in self._in_state((answer.deletion_id,), State.BEGUN):
                answered = self._become(deletion, life.answered(deletion, answer))
                match life.state_of(answered):
                    case State.WAITING:
                        failed.append(answered)
                    case State.DEAD:
                        given_up.append(answered)
                    case _:
                        ended.append(answered)
        return Answered(tuple(ended), tuple(failed), tuple(given_up))

    def _retry(self, record: RetryDeletes) -> Retried:
        retried = 0
        for deletion in self._in_state(record.deletion_id, State.DEAD):
            self._become(deletion, life.retried(deletion, record.at_ms))
            retried += 1
        return Retried(retried)

    def _purge(self, record: PurgeDeletes) -> Purged:
        purged = 0
        for deletion in self._in_state(record.deletion_id, State.DEAD):
            self._remove(deletion)
            purged += 1
        return Purged(purged)

    def _change_in_use(self, record: ChangeInUse) -> InUseChanged:
        ledgers, too_late = record.ledgers, np.zeros(len(record.ledgers), np.bool_)
        if record.change in (InUseChange.RECORD, InUseChange.REPLACE):
            too_late = self._being_deleted.mask(record.topic, ledgers)
            ledgers = InUseLedgers(
                ledgers.ledger_type,
                ledgers.ledger_id[~too_late],
                ledgers.uuid_msb[~too_late],
                ledgers.uuid_lsb[~too_late],
            )
        taken_back = self._taken_back(record.topic, record.change, ledgers)
        changed = self.in_use.change(record.topic, record.change, ledgers)
        revived = self._revive(self._held.of(record.topic, ledgers.ledger_type, taken_back))
        return InUseChanged(changed, tuple(np.flatnonzero(too_late).tolist()), revived)

    def _taken_back(self, topic: str, change: InUseChange, ledgers: InUseLedgers) -> U64:
        """Ids of ledgers of which the change may leave some in use no longer, as far as any deletion is held."""
        if self._held and change is InUseChange.FORGET:
            return ledgers.ledger_id
        if self._held and change is InUseChange.REPLACE:
            return self.in_use.of(topic, ledgers.ledger_type).beside(ledgers).ledger_id
        return np.empty(0, np.uint64)

    def _revive(self, held: Iterable[Deletion]) -> int:
        revived = 0
        for deletion in held:
            if not self.in_use.is_in_use(deletion.topic, deletion.pending_delete):
                self._become(deletion, life.revived(deletion))
                revived += 1
        return revived

    # ---- states

    def _in_state(self, ids: Iterable[int], *states: State) -> Iterable[Deletion]:
        for deletion_id in dict.fromkeys(ids):
            if deletion_id in self._deletions:
                deletion = self._deletions[deletion_id]
                if life.state_of(deletion) in states:
                    yield deletion

    def _add(self, deletion: Deletion) -> None:
        kind = self._deletions.add(deletion)
        if life.state_of(deletion) is not State.ENDED:
            self._recorded.add(deletion.pending_delete, kind, deletion.deletion_id)
        self._enter(deletion)

    def _become(self, before: Deletion, after: Deletion) -> Deletion:
        self._leave(before)
        self._deletions.change(after)
        if life.state_of(after) is State.ENDED:
            self._recorded.remove(after.pending_delete, self._deletions.kind_number_of(after.deletion_id))
        self._enter(after)
        return after

    def _remove(self, deletion: Deletion) -> None:
        self._leave(deletion)
        if life.state_of(deletion) is not State.ENDED:
            self._recorded.remove(deletion.pending_delete, self._deletions.kind_number_of(deletion.deletion_id))
        self._deletions.remove(deletion.deletion_id)

    def _enter(self, deletion: Deletion) -> None:
        state = life.state_of(deletion)
        self._ids[_LISTED[state]].add(deletion.deletion_id)
        self._counting.add(deletion)
        if life.too_late_to_use(deletion):
            self._being_deleted.add(deletion)
        match state:
            case State.WAITING:
                self._waiting.add(deletion.next_attempt_at_ms, deletion.deletion_id)
            case State.BEGUN:
                self._begun.add(deletion.deletion_id)
            case State.HELD:
                self._held.add(deletion)
            case State.ENDED:
                self._ended.add((deletion.ended_at_ms << _ID_BITS) | deletion.deletion_id)
                if len(self._ended) > ENDED_KEPT_MAX:
                    self._remove(self._deletions[self._ended[0] & _ID_MASK])

    def _leave(self, deletion: Deletion) -> None:
        state = life.state_of(deletion)
        self._ids[_LISTED[state]].remove(deletion.deletion_id)
        self._counting.remove(deletion)
        if life.too_late_to_use(deletion):
            self._being_deleted.remove(deletion)
        match state:
            case State.WAITING:
                self._waiting.remove(deletion.next_attempt_at_ms, deletion.deletion_id)
            case State.BEGUN:
                self._begun.remove(deletion.deletion_id)
            case State.HELD:
                self._held.remove(deletion)
            case State.ENDED:
                self._ended.remove((deletion.ended_at_ms << _ID_BITS) | deletion.deletion_id)


_LISTED = {
    State.WAITING: ListedState.PENDING,
    State.BEGUN: ListedState.PENDING,
    State.DEAD: ListedState.DEAD,
    State.HELD: ListedState.ENDED,
    State.ENDED: ListedState.ENDED,
}
