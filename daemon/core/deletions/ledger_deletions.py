"""Applies decisions to the ledger deletions of a shard: states, due order, counts, pages and retries.

Everything follows from the decisions in their order, except which deletions are handed to workers: that is known only
here. `deletion_checks` decides what may be recorded at all; `daemon.ledger_deletion` has slots and workers.

The answer of a failed attempt is decided once, with randomness passed in, and then durable: a change of the retry
policy does not affect it. Counts of a shard are kept up to date, so reading them is free; those of one topic are
counted on demand (`DeletionCut.counts`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
from pyroaring import BitMap64
from sortedcontainers import SortedList

from daemon.core.deletions.kept_deletions import (
    DeletionKind,
    DeletionsByLedger,
    FrozenDeletions,
    KeptDeletions,
    RecordedLedgers,
    kind_of,
)
from daemon.core.deletions.ledgers_in_use import FrozenInUse, InUse
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
    PendingDelete,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)
from storage_backends.formats.row_columns import U64

IN_USE_TEXT = "recorded as in use"


class State(enum.Enum):
    WAITING = enum.auto()
    BEGUN = enum.auto()
    # Given up: a dead letter
    DEAD = enum.auto()
    # In use, as its owner reported and may revoke
    HELD = enum.auto()
    ENDED = enum.auto()


def state_of(deletion: Deletion) -> State:
    if deletion.outcome is DeletionOutcome.PENDING:
        return State.BEGUN if deletion.begun else State.WAITING
    if deletion.outcome is DeletionOutcome.GIVEN_UP:
        return State.DEAD
    return State.HELD if deletion.held else State.ENDED


def newly_recorded(deletion_id: int, topic: str, delete: PendingDelete, at_ms: int, *, by_sweeper: bool) -> Deletion:
    """Create a deletion that is due at once."""
    return Deletion(deletion_id, topic, delete, at_ms, by_sweeper, next_attempt_at_ms=at_ms)


def after_begin(deletion: Deletion) -> Deletion:
    """Return the deletion with its next attempt begun.

    An earlier attempt that was never answered may still delete at any moment: its worker may only have been stopped for
    a while.
    """
    maybe_deleted = deletion.maybe_deleted or deletion.begun
    return dataclasses.replace(deletion, begun=True, maybe_deleted=maybe_deleted, next_attempt_at_ms=0)


def after_found_in_use(deletion: Deletion, at_ms: int) -> Deletion:
    """Return the deletion ended before its attempt, for as long as its owner reports the ledger in use."""
    return dataclasses.replace(_ended(deletion, DeletionOutcome.IN_USE, at_ms, IN_USE_TEXT), held=True)


def after_revival(deletion: Deletion) -> Deletion:
    """Return a held deletion, whose ledger is no longer in use, as pending and due at once."""
    return dataclasses.replace(deletion, outcome=DeletionOutcome.PENDING, ended_at_ms=0, held=False)


def after_answer(deletion: Deletion, answer: DeletionAnswer) -> Deletion:
    """Return a deletion whose attempt has begun after any answer except PENDING."""
    if answer.outcome not in (DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP):
        return _ended(deletion, answer.outcome, answer.at_ms, answer.text)
    failed = dataclasses.replace(
        deletion,
        begun=False,
        failures=deletion.failures + 1,
        maybe_deleted=deletion.maybe_deleted or answer.maybe_deleted,
        text=answer.text,
    )
    if answer.outcome is DeletionOutcome.GIVEN_UP:
        return dataclasses.replace(failed, outcome=DeletionOutcome.GIVEN_UP, ended_at_ms=answer.at_ms)
    return dataclasses.replace(failed, next_attempt_at_ms=answer.retry_at_ms)


def after_retry(deletion: Deletion, at_ms: int) -> Deletion:
    """Return a dead letter as pending, as if it were recorded now; what may have been deleted stays so."""
    return dataclasses.replace(
        deletion,
        outcome=DeletionOutcome.PENDING,
        recorded_at_ms=at_ms,
        failures=0,
        next_attempt_at_ms=at_ms,
        ended_at_ms=0,
    )


def too_late_to_use(deletion: Deletion) -> bool:
    """Return whether its ledger can no longer be reported in use: part of it is, or may have been, deleted."""
    return deletion.outcome in (DeletionOutcome.PENDING, DeletionOutcome.GIVEN_UP) and (
        deletion.begun or deletion.maybe_deleted
    )


def _ended(deletion: Deletion, outcome: DeletionOutcome, at_ms: int, text: str) -> Deletion:
    return dataclasses.replace(
        deletion, outcome=outcome, begun=False, next_attempt_at_ms=0, ended_at_ms=at_ms, text=text
    )


_ID_BITS = 64
_ID_MASK = (1 << _ID_BITS) - 1


class RetryQueue:
    """Deletions that wait for their next attempt. After a restart those handed out are due again."""

    def __init__(self) -> None:
        # Due time and id in one number, which takes half the memory of a pair.
        self._due: SortedList[int] = SortedList()
        self._handed_out: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._handed_out)

    @property
    def next_due_ms(self) -> int | None:
        """The due time of the first deletion that was not handed out (Unix ms), or None."""
        return self._due[0] >> _ID_BITS if self._due else None

    def add(self, due_ms: int, deletion_id: int) -> None:
        self._due.add((due_ms << _ID_BITS) | deletion_id)

    def remove(self, due_ms: int, deletion_id: int) -> None:
        """Remove a deletion that waits for that time, handed out or not. Raise ValueError if there is none."""
        if self._handed_out.pop(deletion_id, None) is None:
            self._due.remove((due_ms << _ID_BITS) | deletion_id)

    def hand_out(self, now_ms: int, limit: int, latest_ms: int) -> list[int]:
        """Return due ids, the longest due first, then ids that wait for a time after `latest_ms`; each once."""
        last, latest = (now_ms << _ID_BITS) | _ID_MASK, (latest_ms << _ID_BITS) | _ID_MASK
        in_time, misdated = self._due.irange(maximum=last), self._due.irange(minimum=latest, inclusive=(False, True))
        chosen = list(islice(chain(in_time, misdated), max(0, limit)))
        for due in chosen:
            self._due.remove(due)
            self._handed_out[due & _ID_MASK] = due
        return [due & _ID_MASK for due in chosen]

    def take_back(self, ids: Iterable[int]) -> None:
        """Take back ids that were handed out without an attempt: they are due as before."""
        self._due.update([due for each in ids if (due := self._handed_out.pop(each, None)) is not None])


@dataclasses.dataclass(frozen=True, slots=True)
class KindCount:
    """The number of deletions of one component and type.

    `oldest_ms` is when the first of those in flight was recorded or retried (Unix ms), 0 if there is none. `dead` ones
    were given up. `held` ones ended because their owner reports the ledger in use.
    """

    component: LedgerComponent
    ledger_type: LedgerType
    in_flight: int
    begun: int
    oldest_ms: int
    dead: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionCounts:
    """Counts by kind. `kinds` are those with deletions in flight (waiting or begun), dead or held."""

    kinds: tuple[KindCount, ...] = ()

    @property
    def in_flight(self) -> int:
        return sum(kind.in_flight for kind in self.kinds)

    @property
    def begun(self) -> int:
        return sum(kind.begun for kind in self.kinds)

    @property
    def dead(self) -> int:
        return sum(kind.dead for kind in self.kinds)

    @property
    def held(self) -> int:
        return sum(kind.held for kind in self.kinds)

    @property
    def oldest_ms(self) -> int:
        return min((kind.oldest_ms for kind in self.kinds if kind.in_flight), default=0)


class _Count:
    def __init__(self) -> None:
        # Times at which those in flight were recorded (Unix ms), one for each
        self.recorded_ms: SortedList[int] = SortedList()
        self.begun = 0
        self.dead = 0
        self.held = 0


class Counting:
    def __init__(self) -> None:
        self._kinds = {(component, kind): _Count() for component in LedgerComponent for kind in LedgerType}

    def add(self, deletion: Deletion) -> None:
        count, state = self._count(deletion), state_of(deletion)
        if state in (State.WAITING, State.BEGUN):
            count.recorded_ms.add(deletion.recorded_at_ms)
        count.begun += state is State.BEGUN
        count.dead += state is State.DEAD
        count.held += state is State.HELD

    def remove(self, deletion: Deletion) -> None:
        count, state = self._count(deletion), state_of(deletion)
        if state in (State.WAITING, State.BEGUN):
            count.recorded_ms.remove(deletion.recorded_at_ms)
        count.begun -= state is State.BEGUN
        count.dead -= state is State.DEAD
        count.held -= state is State.HELD

    def counts(self) -> DeletionCounts:
        return DeletionCounts(
            tuple(
                KindCount(
                    component,
                    kind,
                    len(count.recorded_ms),
                    count.begun,
                    count.recorded_ms[0] if count.recorded_ms else 0,
                    count.dead,
                    count.held,
                )
                for (component, kind), count in self._kinds.items()
                if count.recorded_ms or count.dead or count.held
            )
        )

    def _count(self, deletion: Deletion) -> _Count:
        return self._kinds[deletion.pending_delete.component, deletion.pending_delete.ledger_type]


def count_deletions(deletions: Iterable[Deletion]) -> DeletionCounts:
    """Count deletions by component and type."""
    counting = Counting()
    for deletion in deletions:
        counting.add(deletion)
    return counting.counts()


# Deletions read for one page, however few of them the filter leaves
LOOKED_AT_MAX = 1_000
_ID_MAX = (1 << 64) - 1


class ListedState(enum.Enum):
    # Waiting, or an attempt has begun
    PENDING = enum.auto()
    # Given up
    DEAD = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionQuery:
    """A filter of deletions that all given conditions must match. An empty `topic` means every topic."""

    topic: str = ""
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletion_ids: frozenset[int] | None = None

    def holds_for_kind(self, kind: DeletionKind) -> bool:
        """Return whether topic, component and type of a kind match; ledger and ids are not checked."""
        return (
            self.topic in ("", kind.topic)
            and self.component in (None, kind.component)
            and self.ledger_type in (None, kind.ledger_type)
        )


ALL = DeletionQuery()


def deletion_page(
    deletions: KeptDeletions, ids: BitMap64, wanted: DeletionQuery, after_id: int, limit: int
) -> tuple[list[Deletion], int | None]:
    """Return a page of at most `limit` matching `ids` above `after_id`, ascending, and the next `after_id`.

    The next `after_id` is None if there is no further page. A bounded number is read: a page may be short, or empty,
    and yet have a next one.
    """
    found: list[Deletion] = []
    looked_at = after_id
    kinds: dict[int, bool] = {}
    for deletion_id in islice(_above(ids, wanted, after_id), LOOKED_AT_MAX):
        kind = deletions.kind_number_of(deletion_id)
        is_wanted = kinds.get(kind)
        if is_wanted is None:
            is_wanted = kinds[kind] = wanted.holds_for_kind(deletions.kind(kind))
        if is_wanted and wanted.ledger_id in (None, deletions.ledger_id_of(deletion_id)):
            if len(found) == limit:
                return found, looked_at
            found.append(deletions[deletion_id])
        looked_at = deletion_id
    more = next(_above(ids, wanted, looked_at), None) is not None
    return found, looked_at if more else None


def _above(ids: BitMap64, wanted: DeletionQuery, after_id: int) -> Iterator[int]:
    if after_id >= _ID_MAX:
        return iter(())
    if wanted.deletion_ids is None:
        return iter(ids.iter_equal_or_larger(after_id + 1))
    return iter(sorted(each for each in wanted.deletion_ids if each > after_id and each in ids))


# Ended deletions that are kept for operators, not counting held ones
ENDED_KEPT_MAX = 1_000

_U64_MAX = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The result of RecordDeletes: `new` ids in the order of the record, and indices of those recorded `already`."""

    new: tuple[int, ...]
    already: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """The result of BeginDeletes: `attempts` have begun, and `ended` ones have ledgers in use."""

    attempts: tuple[Deletion, ...]
    ended: tuple[Deletion, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """The result of AnswerDeletes: `ended` are over, `failed` wait again, and `given_up` are dead letters."""

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
    """The result of ChangeInUse.

    `changed` counts ledgers that are in use now and were not, and the reverse. `being_deleted` are indices of the
    record that come too late: these ledgers are not in use. `revived` counts deletions that are pending again.
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
        """Return the NACKED positions. O(n): runs in a thread."""
        return DeletionState(self.last_id, self.deletions.all(), self.in_use.state())

    def counts(self, topic: str) -> DeletionCounts:
        """Count the deletions of one topic by component and type. O(n): for a thread."""
        return count_deletions(self.deletions.of_topic(topic))


class LedgerDeletions:
    def __init__(self) -> None:
        self.in_use = InUse()
        self._last_id = 0
        self._deletions = KeptDeletions()
        self._recorded = RecordedLedgers(self._deletions.kind_number_of)
        self._being_deleted = DeletionsByLedger(self._deletions.__getitem__)
        self._held = DeletionsByLedger(self._deletions.__getitem__)
        self._waiting = RetryQueue()
        self._counting = Counting()
        self._ids = {listed: BitMap64() for listed in ListedState}
        self._begun: set[int] = set()
        # (when it ended, its id) in one number
        self._ended: SortedList[int] = SortedList()

    @classmethod
    def restored(cls, state: DeletionState | None) -> LedgerDeletions:
        """Rebuild the deletions from a checkpoint's state, or from None if nothing was ever decided."""
        made = cls()
        if state is not None:
            made._last_id = state.last_id
            made.in_use = InUse.restored(state.in_use)
            for deletion in state.deletions:
                made._add(deletion)
        return made

    def apply(self, record: DeletionRecord) -> Result:
        """Apply a decision and return its result, in time proportional to the record's length.

        Ids that are unknown, or in another state than the decision is about, stay as they are.
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

    # ---- reading

    def __getitem__(self, deletion_id: int) -> Deletion:
        """Return the deletion with this id. Raise KeyError if it does not exist."""
        return self._deletions[deletion_id]

    def due(self, now_ms: int, limit: int, latest_ms: int = _U64_MAX) -> list[int]:
        """Hand out ids whose next attempt is due, the longest due first.

        Each is handed out once, until its attempt begins and fails, or it is taken back. One that waits for a time
        after `latest_ms`, which is not before `now_ms`, was decided by a clock that was ahead: it is due.
        """
        return self._waiting.hand_out(now_ms, limit, latest_ms)

    def take_back(self, ids: Iterable[int]) -> None:
        """Take back ids from `due` for which no BeginDeletes will be decided: they are due as before."""
        self._waiting.take_back(ids)

    @property
    def next_due_ms(self) -> int | None:
        """The due time of the first deletion that was not handed out (Unix ms), or None."""
        return self._waiting.next_due_ms

    def begun_before(self) -> list[int]:
        """Return ids whose attempt has begun and was not answered.

        Called after a restart: no worker is at them, and each gets another BeginDeletes.
        """
        return sorted(self._begun)

    @property
    def counts(self) -> DeletionCounts:
        return self._counting.counts()

    def has_record(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Return whether an offloaded ledger is pending, held or a dead letter, of any topic."""
        return self._recorded.has(uuid_msb, uuid_lsb, ledger_id)

    def page(
        self, state: ListedState, wanted: DeletionQuery, after_id: int, limit: int
    ) -> tuple[list[Deletion], int | None]:
        """Return a page of at most `limit` deletions above `after_id`, ascending, and the next `after_id`.

        The next `after_id` is None if there is no further page. A page may be short, or empty, and yet have a next one.
        """
        return deletion_page(self._deletions, self._ids[state], wanted, after_id, limit)

    def dead_ids(self, wanted: DeletionQuery, after_id: int, limit: int) -> tuple[list[int], int | None]:
        """Return a page of at most `limit` ids of dead letters above `after_id`, ascending, and the next `after_id`.

        The next `after_id` is None if there is no further page.
        """
        found, after = self.page(ListedState.DEAD, wanted, after_id, limit)
        return [deletion.deletion_id for deletion in found], after

    def cut(self) -> DeletionCut | None:
        """Return the deletions as they are now, or None if nothing was ever decided. Copies pointers only."""
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
            deletion = newly_recorded(
                self._last_id, record.topic, delete, record.recorded_at_ms, by_sweeper=record.by_sweeper
            )
            self._add(deletion)
            new.append(self._last_id)
        return Recorded(tuple(new), tuple(already))

    def _begin(self, record: BeginDeletes) -> Begun:
        attempts: list[Deletion] = []
        ended: list[Deletion] = []
        for deletion in self._in_state(record.deletion_id, State.WAITING, State.BEGUN):
            # A deletion that has begun, or may be partly deleted, is never in use here: the report came too late.
            if self.in_use.is_in_use(deletion.topic, deletion.pending_delete):
                ended.append(self._become(deletion, after_found_in_use(deletion, record.at_ms)))
            else:
                attempts.append(self._become(deletion, after_begin(deletion)))
        return Begun(tuple(attempts), tuple(ended))

    def _answer(self, record: AnswerDeletes) -> Answered:
        ended: list[Deletion] = []
        failed: list[Deletion] = []
        given_up: list[Deletion] = []
        for answer in record.answers:
            if answer.outcome is DeletionOutcome.PENDING:
                continue
            for deletion in self._in_state((answer.deletion_id,), State.BEGUN):
                answered = self._become(deletion, after_answer(deletion, answer))
                match state_of(answered):
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
            self._become(deletion, after_retry(deletion, record.at_ms))
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
        """Return ids of ledgers that the change may leave unused, if any deletion is held."""
        if self._held and change is InUseChange.FORGET:
            return ledgers.ledger_id
        if self._held and change is InUseChange.REPLACE:
            return self.in_use.of(topic, ledgers.ledger_type).beside(ledgers).ledger_id
        return np.empty(0, np.uint64)

    def _revive(self, held: Iterable[Deletion]) -> int:
        revived = 0
        for deletion in held:
            if not self.in_use.is_in_use(deletion.topic, deletion.pending_delete):
                self._become(deletion, after_revival(deletion))
                revived += 1
        return revived

    # ---- states

    def _in_state(self, ids: Iterable[int], *states: State) -> Iterable[Deletion]:
        for deletion_id in dict.fromkeys(ids):
            if deletion_id in self._deletions:
                deletion = self._deletions[deletion_id]
                if state_of(deletion) in states:
                    yield deletion

    def _add(self, deletion: Deletion) -> None:
        kind = self._deletions.add(deletion)
        if state_of(deletion) is not State.ENDED:
            self._recorded.add(deletion.pending_delete, kind, deletion.deletion_id)
        self._enter(deletion)

    def _become(self, before: Deletion, after: Deletion) -> Deletion:
        self._leave(before)
        self._deletions.change(after)
        if state_of(after) is State.ENDED:
            self._recorded.remove(after.pending_delete, self._deletions.kind_number_of(after.deletion_id))
        self._enter(after)
        return after

    def _remove(self, deletion: Deletion) -> None:
        self._leave(deletion)
        if state_of(deletion) is not State.ENDED:
            self._recorded.remove(deletion.pending_delete, self._deletions.kind_number_of(deletion.deletion_id))
        self._deletions.remove(deletion.deletion_id)

    def _enter(self, deletion: Deletion) -> None:
        state = state_of(deletion)
        self._ids[_LISTED[state]].add(deletion.deletion_id)
        self._counting.add(deletion)
        if too_late_to_use(deletion):
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
        state = state_of(deletion)
        self._ids[_LISTED[state]].remove(deletion.deletion_id)
        self._counting.remove(deletion)
        if too_late_to_use(deletion):
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


# Limit on a store's message, which is kept in memory and in every checkpoint
TEXT_CHARACTERS_MAX = 300
# A day: a longer wait was decided by a clock that was ahead, unless the policy allows more.
_MISDATED_MS = 86_400_000


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries of a failed deletion, at most `max_retry_delete_count` (PIP-186).

    Another attempt may begin `reconsume_later_ms` after a failure, plus or minus the fraction `jitter` (0 to 1) of it.
    """

    reconsume_later_ms: int
    max_retry_delete_count: int
    jitter: float

    def latest_ms(self, now_ms: int) -> int:
        """Return the latest time to which any deletion may wait (Unix ms). Former policies may have waited longer."""
        return now_ms + max(math.ceil(self.reconsume_later_ms * (1 + self.jitter)), _MISDATED_MS)


def answer_of_failure(
    deletion: Deletion,
    *,
    now_ms: int,
    policy: RetryPolicy,
    random: float,
    text: str,
    maybe_deleted: bool,
) -> DeletionAnswer:
    """Decide the answer of a failed attempt: FAILED, or GIVEN_UP after the last retry. `random` is from [0, 1)."""
    text = shortened(text)
    if deletion.failures >= policy.max_retry_delete_count:
        return DeletionAnswer(
            deletion.deletion_id, DeletionOutcome.GIVEN_UP, now_ms, maybe_deleted=maybe_deleted, text=text
        )
    delay_ms = policy.reconsume_later_ms * (1 + policy.jitter * (2 * random - 1))
    return DeletionAnswer(
        deletion.deletion_id,
        DeletionOutcome.FAILED,
        now_ms,
        min(now_ms + math.ceil(max(delay_ms, policy.reconsume_later_ms / 2)), _U64_MAX),
        maybe_deleted,
        text,
    )


def shortened(text: str) -> str:
    """Return the text or its beginning, with `?` for what is not Unicode, as JSON and file names may contain."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
