"""Finds the rows that requests claim to have been delivered, and explains why claims are ignored.

The shared index comes first, then the subscription index. `ack_decisions` and `nack_decisions` decide on the rows;
`rows_claimed` finds those that a reconnecting dispatcher declares to hold.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import Places
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index.index import Index, SeenRows, are_of_time
from daemon.core.index.position_keys import UNKNOWN_KEY, KeyedRows, Mask, bitmap_of, contained, firsts
from daemon.core.index.segments import SegmentRange
from storage_backends.formats.index_ids import NO_BATCH_INDEX, part_entry_id
from storage_backends.formats.row_columns import U32, U64, Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldPositions:
    """Positions with the time that they were delivered with, columns of one length.

    `batch_index` selects a message of each entry, or the whole entry with `NO_BATCH_INDEX`; None means whole entries
    only. A message is in the index of batch parts only, an entry as a whole in the others only. `redelivery_count`
    selects the delivery; None means any. `place` is the place of each in the request; None means in this order.
    """

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64
    batch_index: U32 | None = None
    redelivery_count: U32 | None = None
    place: Places | None = None

    def __len__(self) -> int:
        return len(self.ledger_id)

    def take(self, chosen: Mask | Places) -> HeldPositions:
        return HeldPositions(
            self.ledger_id[chosen],
            self.entry_id[chosen],
            self.deliver_at_ms[chosen],
            None if self.batch_index is None else self.batch_index[chosen],
            None if self.redelivery_count is None else self.redelivery_count[chosen],
            self.places()[chosen],
        )

    def places(self) -> Places:
        """Return the place of each claim in the request."""
        return np.arange(len(self)) if self.place is None else self.place

    @staticmethod
    def concat(one: HeldPositions, other: HeldPositions) -> HeldPositions:
        return HeldPositions(
            np.concatenate([one.ledger_id, other.ledger_id]),
            np.concatenate([one.entry_id, other.entry_id]),
            np.concatenate([one.deliver_at_ms, other.deliver_at_ms]),
            np.concatenate([one._batch_indexes(), other._batch_indexes()]),
        )

    def _batch_indexes(self) -> U32:
        return np.full(len(self), NO_BATCH_INDEX, np.uint32) if self.batch_index is None else self.batch_index

    def are_parts(self) -> Mask:
        """Return the mask of positions that are one message of an entry."""
        parts: Mask = self._batch_indexes() != NO_BATCH_INDEX
        return parts

    def entries(self) -> HeldPositions:
        """Return the entries of the positions, each as a whole, with any delivery."""
        return HeldPositions(self.ledger_id, self.entry_id, self.deliver_at_ms)

    def with_entries(self) -> HeldPositions:
        """Return the positions, and the entries of those that are messages of a batch."""
        parts = self.are_parts()
        return HeldPositions.concat(self, self.take(parts).entries()) if parts.any() else self

    def rows_in(self, index: Index) -> Rows:
        """Return the positions as rows of an index that may have them."""
        entry_id = self.entry_id
        if self.batch_index is not None and index.of_batch_parts:
            entry_id = part_entry_id(entry_id, self.batch_index)
        return Rows(self.deliver_at_ms, self.ledger_id, entry_id)

    def keys_in(self, index: Index) -> U64:
        """Return the keys of the positions in an index.

        The key is UNKNOWN_KEY if no bucket has the page, and for positions that such an index cannot have.
        """
        if self.batch_index is None:
            if index.of_batch_parts:
                return np.full(len(self), UNKNOWN_KEY, np.uint64)
            return index.pages.find(self.ledger_id, self.entry_id)
        rows = self.rows_in(index)
        keys = index.pages.find(rows.ledger_id, rows.entry_id)
        keys[self.are_parts() != index.of_batch_parts] = UNKNOWN_KEY
        return keys


_NOTHING = np.empty(0, np.uint64)
NO_CLAIMS = HeldPositions(_NOTHING, _NOTHING, _NOTHING)


def possibly_due(indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions) -> HeldPositions:
    """Return the claims that may be in the backlog. Only the rows show whether the times are right."""
    chosen = np.zeros(len(claims), np.bool_)
    for index in indexes:
        chosen |= _may_be_due(index, state, claims.keys_in(index))
    return claims.take(chosen)


def _may_be_due(index: Index, state: SubscriptionState, keys: U64) -> Mask:
    due = BitMap64()
    asked = bitmap_of(keys)
    for bucket in index.buckets:
        here = asked & bucket.passed
        if here:
            here -= bucket.acknowledged.get(state.subscription_id, BitMap64())
            due |= here
    due -= state.acknowledging
    return contained(keys, due)


def find_in_backlog(
    indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions, seen: SeenRows, *, any_time: bool = False
) -> tuple[KeyedRows, list[SegmentRange]]:
    """Find the rows of the backlog with the claimed positions and times, in each index, whatever their counts.

    Returns (rows, segments that must be loaded first). `seen` is empty at the first call, and passed again with the
    same claims after loading. With `any_time`, a claim with time 0 matches any time.
    """
    parts: list[KeyedRows] = []
    missing: list[SegmentRange] = []
    for index in indexes:
        here = claims.take(_may_be_due(index, state, claims.keys_in(index)))
        if not len(here):
            continue
        found, lacking = index.find_loaded(here.keys_in(index), here.deliver_at_ms, seen, any_time=any_time)
        missing += lacking
        owed = state.owes(found) if len(found) and not index.index_id else None
        parts.append(found if owed is None else found.take(owed))
    return KeyedRows.concat(parts), missing


def are_owed(indexes: Sequence[Index], state: SubscriptionState, entries: HeldPositions) -> Mask:
    """Return the mask of entries with a row, applied or staged, that the subscription is owed, with any time.

    `indexes` have entries and rows that the subscription is owed.
    """
    owed = np.zeros(len(entries), np.bool_)
    for index in indexes:
        keys = entries.keys_in(index)
        asked = bitmap_of(keys[keys != UNKNOWN_KEY])
        there = entitlement.owed_among(index, asked, state.subscription_id) | (index.staged.keys & asked)
        owed |= contained(keys, there)
    return owed


# Returns the mask of rows that match their claims; each row is given with its claim.
Fits = Callable[[KeyedRows, HeldPositions], Mask]


def claimed_in(
    index: Index, claims: HeldPositions, found: KeyedRows, fits: Fits
) -> tuple[KeyedRows, HeldPositions, HeldPositions]:
    """Match claims with rows of an index: (rows, their claims, claims that are left).

    `found` is the result of `find_in_backlog`. If several claims match a row, the first one gets it.
    """
    rows, here = matched(claims.keys_in(index), claims.deliver_at_ms, found)
    places = np.flatnonzero(here)
    fitting = np.flatnonzero(fits(rows, claims.take(places)))
    fitting = fitting[firsts(rows.keys[fitting])]
    left = np.ones(len(claims), np.bool_)
    left[places[fitting]] = False
    return rows.take(fitting), claims.take(~left), claims.take(left)


def matched(keys: U64, deliver_at_ms: U64, found: KeyedRows, *, any_time: bool = False) -> tuple[KeyedRows, Mask]:
    """Return (rows found with these keys and times, in the order of the keys; the mask of these keys).

    `found` ascends by key within each index; a key may be asked for several times. For `any_time` see
    `find_in_backlog`.
    """
    if not len(found) or not len(keys):
        return KeyedRows.empty(), np.zeros(len(keys), np.bool_)
    order = np.argsort(found.keys, kind="stable")
    places = np.searchsorted(found.keys, keys, sorter=order)
    places[places == len(found)] = 0
    places = order[places]
    here = (found.keys[places] == keys) & are_of_time(found.rows.deliver_at_ms[places], deliver_at_ms, any_time)
    return found.take(places[here]), here


U8 = npt.NDArray[np.uint8]


class IgnoredReason(enum.IntEnum):
    """The reason why nothing happened to a named position; numbers as in `tarry.v1.IgnoredReason`.

    If rows of several indexes give several reasons, the highest is reported.
    """

    # The subscription is owed no row of it.
    NOT_THERE = 1
    # Its row is not due yet, by this daemon's clock.
    NOT_DUE = 2
    # Its row has another time.
    OTHER_TIME = 3
    # The row matches, but another delivery of it was named.
    OTHER_DELIVERY = 4
    # It was taken back, since it comes after a row of its key that was negatively acknowledged.
    TAKEN_BACK = 5
    # The caller does not hold it.
    NOT_HELD = 6


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Ignored:
    """Ignored positions: `index` has their places in the request, ascending, and `reason` the reason of each."""

    index: Places
    reason: U8

    def __len__(self) -> int:
        return len(self.index)

    @staticmethod
    def nothing() -> Ignored:
        return Ignored(np.empty(0, np.intp), np.empty(0, np.uint8))

    @staticmethod
    def all_of(claims: HeldPositions, reason: IgnoredReason) -> Ignored:
        return Ignored(claims.places(), np.full(len(claims), reason, np.uint8))


def why_ignored(
    indexes: Sequence[Index],
    state: SubscriptionState,
    left: HeldPositions,
    found: KeyedRows,
    *,
    now_ms: int,
    any_time: bool = False,
) -> Ignored:
    """Return why the positions that are left of a request are ignored.

    `indexes` may have their rows. `found` and `any_time` are those of `find_in_backlog`.
    """
    if not len(left):
        return Ignored.nothing()
    reason = np.full(len(left), IgnoredReason.NOT_THERE, np.uint8)
    early: Mask = left.deliver_at_ms > np.uint64(now_ms)
    if any_time:
        early |= left.deliver_at_ms == 0
    for index in indexes:
        keys = left.keys_in(index)
        asked = bitmap_of(keys)
        owed = entitlement.owed_among(index, asked, state.subscription_id) - state.acknowledging
        due = entitlement.backlog_among(index, asked, state.subscription_id) & owed
        waits = contained(keys, (owed - due) | (index.staged.keys & asked))
        of_index = np.select(
            [waits & early, waits | contained(keys, due)],
            [np.uint8(IgnoredReason.NOT_DUE), np.uint8(IgnoredReason.OTHER_TIME)],
            np.uint8(0),
        )
        rows, here = matched(keys, left.deliver_at_ms, found, any_time=any_time)
        here &= contained(keys, due)
        of_index[here] = IgnoredReason.OTHER_DELIVERY
        of_index[here & contained(keys, are_kept_back(state, rows))] = IgnoredReason.TAKEN_BACK
        # The most specific reason: the numbers are in that order.
        reason = np.maximum(reason, of_index)
    return Ignored(left.places(), reason)


def are_kept_back(state: SubscriptionState, found: KeyedRows) -> BitMap64:
    """Return the rows of the backlog that wait for a NACKED one of their key: their dispatcher no longer holds them."""
    if state.key_shared is None or not len(found):
        return BitMap64()
    kept_back = found.keys[state.key_shared.are_kept_back(found)]
    named = bitmap_of(kept_back)
    return named - state.set_aside_among(named) - state.in_flight.among(named)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ClaimedRows:
    """Rows that claims are for: `claims` has the place of the claim of each row, among `claims_count`."""

    rows: KeyedRows
    claims: Places
    claims_count: int

    def of_claims(self, of_rows: Mask) -> Mask:
        """Turn a mask of rows into a mask of claims; it is false for claims without a row."""
        of_claims = np.zeros(self.claims_count, np.bool_)
        of_claims[self.claims] = of_rows
        return of_claims


def rows_claimed(
    indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions, found: KeyedRows
) -> ClaimedRows:
    """Return the claimed rows with the named count that do not wait for a NACKED row of their key.

    `indexes` may have the rows, and are tried in order. `found` is the result of `find_in_backlog`. If several claims
    are for one row, the first one gets it.
    """
    kept_back = are_kept_back(state, found)

    def fits(rows: KeyedRows, named: HeldPositions) -> Mask:
        free = ~contained(rows.keys, kept_back)
        if named.redelivery_count is None:
            return free
        same: Mask = state.counted(rows).counts() == named.redelivery_count
        return free & same

    parts, places, left = [KeyedRows.empty()], [np.empty(0, np.intp)], claims
    for index in indexes:
        rows, taken, left = claimed_in(index, left, found, fits)
        parts.append(rows)
        places.append(taken.places())
    return ClaimedRows(KeyedRows.concat(parts), np.concatenate(places), len(claims))
