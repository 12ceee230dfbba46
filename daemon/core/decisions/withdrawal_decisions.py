"""Decides cancellations and reschedules: rows leave before they are due, or get another time.

    pending in every index that has it, and due in none -> leaving -(its slot is applied)-> gone, or a new row

A leaving row is never passed: its slot becomes durable, or the topic's memory is lost. A request is decided only after
everything due has been passed, and when nothing staged names its positions, so the decisions of one slot may be applied
in any order. `daemon.topic` ensures both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.decisions import add_decisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import UNKNOWN_KEY, KeyedRows, bitmap_of, contained, keys_of
from daemon.errors import InvalidArgument, InvariantViolated
from storage_backends.formats.index_ids import SHARED
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.formats.slot_format import GoneReason, GoneRecord, RescheduleRecord, WaiveRecord

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RescheduleBatch:
    """Positions and their new times: columns of n rows, with exactly one of `deliver_at_ms` and `delay_ms`.

    `schedule_ids` are those of n rows, or None if none has one.
    """

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64 | None
    delay_ms: U64 | None
    key_hash: U32 | None
    schedule_ids: ScheduleIds | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CancelOutcome:
    """The outcome of a cancellation: how many positions were cancelled, and the unchanged rows of the request.

    Unchanged rows ascend, by their furthest state: `already_due` ones are at no dispatcher, `in_flight` ones at one, or
    being acknowledged.
    """

    cancelled: int
    not_found: U32
    already_due: U32
    in_flight: U32


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RescheduleOutcome:
    """The outcome of a reschedule: how many positions were rescheduled, and the unchanged rows of the request.

    Unchanged rows ascend, by their furthest state: `already_due` ones are at no dispatcher, `in_flight` ones at one, or
    being acknowledged. `raised_index` are rows stored with a later time than asked for, `raised_deliver_at_ms`.
    """

    rescheduled: int
    not_found: U32
    already_due: U32
    in_flight: U32
    raised_index: U32
    raised_deliver_at_ms: U64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """The positions of a request in one index: keys, UNKNOWN_KEY if no bucket has the page, and their set."""

    index: Index
    keys: U64
    named: BitMap64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WithdrawalTarget:
    """The n distinct positions of a request, in the indexes that it concerns."""

    rows: int
    parts: tuple[_Part, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Leave:
    """The rows that leave one index: the mask of the request, and the set of keys."""

    index: Index
    chosen: Mask
    keys: BitMap64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Decision:
    """The rows that leave, by index, and the rows of the request that do not, by reason."""

    leaves: tuple[_Leave, ...]
    leaving_rows: int
    not_found: U32
    already_due: U32
    in_flight: U32


class WithdrawalDecisions:
    """The cancellations and reschedules of one topic. Rows that are staged to leave are in `Indexes.leaving`."""

    def __init__(
        self, topic_id: str, incarnation: int, indexes: Indexes, subscriptions: Mapping[int, SubscriptionState]
    ) -> None:
        self._topic_id = topic_id
        self._incarnation = incarnation
        self._indexes = indexes
        self._subscriptions = subscriptions

    # ---- requests

    def asked(self, ledger_id: U64, entry_id: U64, subscription_id: int | None) -> WithdrawalTarget:
        """Find distinct positions in every index, or in that of one subscription alone."""
        indexes: Iterable[Index] = self._indexes.of_entries()
        if subscription_id is not None:
            own = self._indexes.get(subscription_id)
            indexes = () if own is None else (own,)
        return WithdrawalTarget(len(entry_id), tuple(_part(index, ledger_id, entry_id) for index in indexes))

    def is_staged(self, asked: WithdrawalTarget) -> bool:
        """Return whether a staged add, cancellation or reschedule names one of the positions."""
        leaving = self._indexes.leaving
        return any(
            (staged and staged.intersect(part.named))
            for part in asked.parts
            for staged in (leaving, part.index.staged.keys)
        )

    def is_leaving(self, asked: WithdrawalTarget) -> bool:
        """Return whether one of the positions is staged to leave."""
        leaving = self._indexes.leaving
        return bool(leaving) and any(leaving.intersect(part.named) for part in asked.parts)

    def stage_cancel(
        self, asked: WithdrawalTarget, *, rows_max: int | None = None
    ) -> tuple[tuple[GoneRecord, ...], CancelOutcome]:
        """Stage the rows that may leave: (records for one slot, outcome).

        Everything due must have been passed, and nothing may be staged. Raises InvalidArgument if several positions
        have more than `rows_max` rows over all indexes.
        """
        decision = self._decide(asked, rows_max)
        self._leave(decision)
        records = tuple(
            GoneRecord(
                self._topic_id,
                self._incarnation,
                leave.index.index_id,
                GoneReason.CANCELLED,
                leave.index.pages.to_stored(leave.keys),
            )
            for leave in decision.leaves
        )
        return records, CancelOutcome(
            decision.leaving_rows, decision.not_found, decision.already_due, decision.in_flight
        )

    def stage_reschedule(
        self,
        asked: WithdrawalTarget,
        rows: Rows,
        *,
        floor_ms: int,
        admit: add_decisions.Admit = add_decisions.admit_all,
        rows_max: int | None = None,
    ) -> tuple[tuple[RescheduleRecord | WaiveRecord, ...], RescheduleOutcome]:
        """Stage the rows that may leave, and new rows for them: (records for one slot, outcome).

        Everything due must have been passed, and nothing may be staged. `rows` are the new rows of the positions, in
        their order; in the shared index all are stored later than `floor_ms`. `admit` is called with the new rows
        before anything changes. Raises InvalidArgument as `stage_cancel` does, and if a row would lose its schedule id;
        raises the errors of `admit`.
        """
        decision = self._decide(asked, rows_max)
        for leave in decision.leaves:
            _check_ids_named(leave, rows)
        records: list[RescheduleRecord] = []
        raised_index = np.empty(0, np.uint32)
        raised_rows, raised = add_decisions.raised(rows, floor_ms)
        for leave in decision.leaves:
            number = leave.index.index_id
            if number == SHARED and raised is not None:
                raised_index = _rows(leave.chosen & raised)
            new = raised_rows if number == SHARED else rows
            new = new if leave.chosen.all() else new.take(leave.chosen)
            records.append(RescheduleRecord(self._topic_id, self._incarnation, number, new))
        if records:
            admit([record.rows for record in records])
        self._leave(decision)
        return (*records, *self._still_waived(decision)), RescheduleOutcome(
            decision.leaving_rows,
            decision.not_found,
            decision.already_due,
            decision.in_flight,
            raised_index,
            raised_rows.deliver_at_ms[raised_index],
        )

    def _decide(self, asked: WithdrawalTarget, rows_max: int | None) -> _Decision:
        """Decide which rows may leave each index. See `stage_cancel`."""
        waiting, due, held = (np.zeros(asked.rows, np.bool_) for _ in range(3))
        found: list[tuple[_Part, Mask]] = []
        for part in asked.parts:
            still_waiting, passed = _states_of(part)
            # Rows that were delivered may seem not to be due after a recovery and a step back of the clock.
            counts = [state.counts.among(still_waiting) for state in self._subscriptions.values()]
            redelivered = BitMap64.union(BitMap64(), *counts)
            if redelivered:
                still_waiting, passed = still_waiting - redelivered, passed | redelivered
            if passed:
                due |= _members(part.keys, passed)
                held |= _members(part.keys, self._held_among(passed))
            if still_waiting:
                found.append((part, _members(part.keys, still_waiting)))
                waiting |= found[-1][1]
        leaves = []
        rows = 0
        for part, mask in found:
            chosen = mask & ~due
            if chosen.any():
                rows += int(np.count_nonzero(chosen))
                if rows_max is not None and rows > rows_max and asked.rows > 1:
                    raise InvalidArgument(
                        f"entry_id has {asked.rows} positions that are in up to {len(found)} indexes; a request may "
                        f"take out {rows_max} rows: name fewer positions"
                    )
                keys = part.named if chosen.all() else bitmap_of(part.keys[chosen])
                leaves.append(_Leave(part.index, chosen, keys))
        not_found = ~(waiting | due)
        leaving_rows = int(np.count_nonzero(waiting & ~due))
        return _Decision(tuple(leaves), leaving_rows, _rows(not_found), _rows(due & ~held), _rows(held))

    def _still_waived(self, decision: _Decision) -> Iterator[WaiveRecord]:
        """Release the claims to new rows of subscriptions for which the old ones were trimmed.

        This needs a record, since the bucket of the old row may be dropped before the slot is replayed.
        """
        for leave in decision.leaves:
            for subscription_id, keys in sorted(entitlement.acknowledged_among(leave.index, leave.keys).items()):
                positions = leave.index.pages.to_stored(keys)
                yield WaiveRecord(self._topic_id, self._incarnation, subscription_id, positions)

    def _leave(self, decision: _Decision) -> None:
        """Mark the rows as leaving."""
        for leave in decision.leaves:
            self._indexes.leaving |= leave.keys

    def _held_among(self, passed: BitMap64) -> BitMap64:
        return BitMap64.union(BitMap64(), *[state.held_among(passed) for state in self._subscriptions.values()])

    # ---- applying decisions

    def cancelled(self, index: Index, keys: BitMap64) -> None:
        """Remove positions, none of which was due, from one index."""
        if index.remove(keys):
            raise InvariantViolated(f"topic {self._topic_id}: a position left by its withdrawal that was due")
        self._indexes.leaving -= keys

    def rescheduled(self, index: Index, rows: Rows, *, elapsed_ms: int) -> None:
        """Replace rows, none of which was due, by new ones of the same positions."""
        keyed = KeyedRows(rows, index.pages.intern(rows.ledger_id, rows.entry_id))
        keys = bitmap_of(keyed.keys)
        self.cancelled(index, keys)
        index.mutable.add(keyed, keys, elapsed_ms=elapsed_ms)


def _part(index: Index, ledger_id: U64, entry_id: U64) -> _Part:
    keys = index.pages.find(ledger_id, entry_id)
    known = keys != UNKNOWN_KEY
    return _Part(index, keys, bitmap_of(keys if known.all() else keys[known]))


def _check_ids_named(leave: _Leave, rows: Rows) -> None:
    """Raise InvalidArgument unless the new row of each row with a schedule id has one: the old row is not read."""
    with_ids = leave.index.with_ids_among(leave.keys)
    if not with_ids:
        return
    keys = leave.index.pages.find(rows.ledger_id, rows.entry_id)
    lost = leave.chosen & contained(keys, with_ids)
    if rows.schedule_ids is not None:
        lost &= rows.schedule_ids.lengths == 0
    if lost.any():
        place = int(np.flatnonzero(lost)[0])
        raise InvalidArgument(
            f"schedule_id is empty for ledger {rows.ledger_id[place]}, entry {rows.entry_id[place]}, whose row has a "
            "schedule id; it must be named to reschedule the row"
        )


def _states_of(part: _Part) -> tuple[BitMap64, BitMap64]:
    """Return (positions of a part that are pending in its index, positions that are due there)."""
    there: list[BitMap64] = []
    due = BitMap64()
    left = len(part.named)
    for bucket in part.index.that_may_have(part.named):
        if not left:
            break
        here = bucket.present & part.named
        if here:
            there.append(here)
            left -= len(here)
            if bucket.passed_rows:
                due |= here & bucket.passed
    if not left and not due:
        return part.named, due
    return BitMap64.union(BitMap64(), *there) - due, due


def _members(keys: U64, members: BitMap64) -> Mask:
    """Return the mask of keys that are in the set, all of whose members are keys."""
    if len(members) == len(keys):
        return np.ones(len(keys), np.bool_)
    hits = keys_of(members)
    if not len(hits):
        return np.zeros(len(keys), np.bool_)
    places = np.searchsorted(hits, keys)
    places[places == len(hits)] = 0
    return np.equal(hits[places], keys)


def _rows(mask: Mask) -> U32:
    return np.flatnonzero(mask).astype(np.uint32)
