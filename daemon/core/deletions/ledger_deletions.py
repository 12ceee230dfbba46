"""The deletions of a shard: what each decision comes to.

Owns: the deletions with their states, what is in use, and finding the one and the other. Everything follows from the
decisions in their order; which ones were handed out to workers is the only thing that is known here alone.
Does not own: slots, times of retries (`retrying`), what may be recorded at all (`checking`), stores and workers.

The life of one deletion: what state it is in, and what it becomes.

Owns: the transitions, each a new value of the deletion.
Does not own: which decisions there are and in what order (`ledger_deletions`), and when an attempt may begin.

Which deletions wait for their next attempt, and when it is due.

Owns: the order of due times, and which were handed out for an attempt that has not begun yet.
Does not own: the deletions.

How many deletions there are, of what, and since when.

Owns: the counts, kept up to date so that asking costs nothing.
Does not own: the deletions, and counts of one topic, which nobody keeps (`LedgerDeletions.cut`, `count`).

Which deletions are asked for.

Owns: the filter, and finding what it holds for, page by page.
Does not own: the deletions (`kept`).

When a failed attempt is followed by another one, and when by none.

Owns: the answer that is recorded of a failure: decided once, and then durable, so that a change of the policy changes
nothing of what was decided.
Does not own: what is a failure (the ledger stores), what the answer comes to (`life`), and randomness, which is passed
in.
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
    # Given up: a dead letter.
    DEAD = enum.auto()
    # In use, as its owner has said and may take back.
    HELD = enum.auto()
    ENDED = enum.auto()


def state_of(deletion: Deletion) -> State:
    if deletion.outcome is DeletionOutcome.PENDING:
        return State.BEGUN if deletion.begun else State.WAITING
    if deletion.outcome is DeletionOutcome.GIVEN_UP:
        return State.DEAD
    return State.HELD if deletion.held else State.ENDED


def newly_recorded(deletion_id: int, topic: str, delete: PendingDelete, at_ms: int, *, by_sweeper: bool) -> Deletion:
    """A new one, due at once."""
    return Deletion(deletion_id, topic, delete, at_ms, by_sweeper, next_attempt_at_ms=at_ms)


def after_begin(deletion: Deletion) -> Deletion:
    """The next attempt has begun. An attempt before that was never answered may still delete at any moment: whoever
    made it may only have been stopped for a while.
    """
    maybe_deleted = deletion.maybe_deleted or deletion.begun
    return dataclasses.replace(deletion, begun=True, maybe_deleted=maybe_deleted, next_attempt_at_ms=0)


def after_found_in_use(deletion: Deletion, at_ms: int) -> Deletion:
    """The deletion ends before its attempt begins, as long as its owner says so."""
    return dataclasses.replace(_ended(deletion, DeletionOutcome.IN_USE, at_ms, IN_USE_TEXT), held=True)


def after_revival(deletion: Deletion) -> Deletion:
    """A held one whose ledger is in use no longer: pending again, due at once."""
    return dataclasses.replace(deletion, outcome=DeletionOutcome.PENDING, ended_at_ms=0, held=False)


def after_answer(deletion: Deletion, answer: DeletionAnswer) -> Deletion:
    """What comes of one whose attempt has begun, by any answer but PENDING."""
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
    """A dead letter that is pending again, as if it were recorded now; what may have been deleted stays so."""
    return dataclasses.replace(
        deletion,
        outcome=DeletionOutcome.PENDING,
        recorded_at_ms=at_ms,
        failures=0,
        next_attempt_at_ms=at_ms,
        ended_at_ms=0,
    )


def too_late_to_use(deletion: Deletion) -> bool:
    """Whether its ledger cannot be said to be in use any more: something of it is, or may have been, deleted."""
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
    """Deletions that wait. Those handed out are known to nobody else: after a restart they are due again."""

    def __init__(self) -> None:
        # Due time and id in one number, which takes half of what a pair does.
        self._due: SortedList[int] = SortedList()
        self._handed_out: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._handed_out)

    @property
    def next_due_ms(self) -> int | None:
        """When the first of those that were not handed out is due."""
        return self._due[0] >> _ID_BITS if self._due else None

    def add(self, due_ms: int, deletion_id: int) -> None:
        self._due.add((due_ms << _ID_BITS) | deletion_id)

    def remove(self, due_ms: int, deletion_id: int) -> None:
        """One that waits for that time, handed out or not. Raises ValueError when it is not there."""
        if self._handed_out.pop(deletion_id, None) is None:
            self._due.remove((due_ms << _ID_BITS) | deletion_id)

    def hand_out(self, now_ms: int, limit: int, latest_ms: int) -> list[int]:
        """Ids that are due, the longest due first, then such as wait for what is after `latest_ms`; each once."""
        last, latest = (now_ms << _ID_BITS) | _ID_MASK, (latest_ms << _ID_BITS) | _ID_MASK
        in_time, misdated = self._due.irange(maximum=last), self._due.irange(minimum=latest, inclusive=(False, True))
        chosen = list(islice(chain(in_time, misdated), max(0, limit)))
        for due in chosen:
            self._due.remove(due)
            self._handed_out[due & _ID_MASK] = due
        return [due & _ID_MASK for due in chosen]

    def take_back(self, ids: Iterable[int]) -> None:
        """Takes back ids that were handed out, and of which no attempt begins for now: they are due as before."""
        self._due.update([due for each in ids if (due := self._handed_out.pop(each, None)) is not None])


@dataclasses.dataclass(frozen=True, slots=True)
class KindCount:
    """`oldest_ms`: when the first of those in flight was recorded, or retried; 0 when there is none. `dead`: those that
    were given up. `held`: those that ended as their owner says that the ledger is in use.
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
    """`kinds`: those that have any in flight, dead or held. In flight are those that wait or have begun."""

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
        # When those in flight were recorded; a time stands there once for each.
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
    """Counts deletions by component and type."""
    counting = Counting()
    for deletion in deletions:
        counting.add(deletion)
    return counting.counts()


# Deletions that are looked at for one page, whatever the filter leaves of them.
LOOKED_AT_MAX = 1_000
_ID_MAX = (1 << 64) - 1


class ListedState(enum.Enum):
    # They wait, or an attempt has begun.
    PENDING = enum.auto()
    # Given up.
    DEAD = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionQuery:
    """A choice of deletions: everything that is given holds for them. `topic`: empty for every one."""

    topic: str = ""
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletion_ids: frozenset[int] | None = None

    def holds_for_kind(self, kind: DeletionKind) -> bool:
        """Whether the filter admits a kind, by its topic, component and type; the ledger and the
        ids are not looked at.
        """
        return (
            self.topic in ("", kind.topic)
            and self.component in (None, kind.component)
            and self.ledger_type in (None, kind.ledger_type)
        )


ALL = DeletionQuery()


def deletion_page(
    deletions: KeptDeletions, ids: BitMap64, wanted: DeletionQuery, after_id: int, limit: int
) -> tuple[list[Deletion], int | None]:
    """Those of `ids` above `after_id` that the filter holds for, ascending, at most `limit`; and the `after_id` of the
    next page, None when there is none. Looks at a bounded number: a page may be short, or empty, and yet have a next.
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


# How many of those that ended are kept, for operators; held ones are not among them.
ENDED_KEPT_MAX = 1_000

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
        self, state: ListedState, wanted: DeletionQuery, after_id: int, limit: int
    ) -> tuple[list[Deletion], int | None]:
        """Deletions with ids above `after_id`, ascending, at most `limit`; and the `after_id` of the next page, None
        when there is none. A page may be short, or empty, and yet have a next.
        """
        return deletion_page(self._deletions, self._ids[state], wanted, after_id, limit)

    def dead_ids(self, wanted: DeletionQuery, after_id: int, limit: int) -> tuple[list[int], int | None]:
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
            # Never so of one that has begun, or may be deleted in part: for its ledger it was too late.
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


# Of what a store says; it is kept in memory and in every checkpoint.
TEXT_CHARACTERS_MAX = 300
# A day: what waits for longer was decided by a clock that was ahead, unless the policy says more.
_MISDATED_MS = 86_400_000


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`reconsume_later_ms` after a failure, give or take the part `jitter` (0 to 1) of it, another attempt may begin;
    `max_retry_delete_count` times (PIP-186).
    """

    reconsume_later_ms: int
    max_retry_delete_count: int
    jitter: float

    def latest_ms(self, now_ms: int) -> int:
        """Nobody means to wait for longer than until then. Former policies may have waited longer than this one."""
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
    """The answer of a failed attempt: the first one and its retries may fail, the failure of the last retry is
    GIVEN_UP. `random`: from [0, 1).
    """
    text = shortened(text)
    if deletion.failures >= policy.max_retry_delete_count:
        return DeletionAnswer(
            deletion.deletion_id, DeletionOutcome.GIVEN_UP, now_ms, maybe_deleted=maybe_deleted, text=text
        )
    return DeletionAnswer(
        deletion.deletion_id,
        DeletionOutcome.FAILED,
        now_ms,
        min(now_ms + _delay_ms(policy, random), _U64_MAX),
        maybe_deleted,
        text,
    )


def _delay_ms(policy: RetryPolicy, random: float) -> int:
    delay_ms = policy.reconsume_later_ms * (1 + policy.jitter * (2 * random - 1))
    return math.ceil(max(delay_ms, policy.reconsume_later_ms / 2))


def shortened(text: str) -> str:
    """The text, or its beginning; what is no Unicode in it, as JSON and names of files may have it, is `?`."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
