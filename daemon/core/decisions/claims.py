"""Positions that a dispatcher claims to have been handed out, and finding them in the backlog of a subscription.

Owns: claims, and in which of the subscription's indexes they are: the shared one is asked first, then its own.
Does not own: what is in hand (`in_flight`), and what an acknowledgement does (`ack_decisions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import Mask, Places
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index.index import Index, SeenRows, are_of_time
from daemon.core.index.positions import UNKNOWN_KEY, KeyedRows, bitmap_of, contained, firsts
from daemon.core.index.segments import SegmentRange
from storage_backends.formats.index_ids import NO_BATCH_INDEX, part_entry_id
from storage_backends.formats.row_columns import U32, U64, Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldPositions:
    """Positions with the time they were handed out with, columns of one length.

    `batch_index`: of each the message of the entry that is meant, `NO_BATCH_INDEX` for the entry as a whole; None: all
    are. A message of an entry is in the index of batch parts, and in no other; an entry as a whole in any other.
    `redelivery_count`: of each which hand-out of it is meant, by its count; None: any. `place`: of each its place in
    the request; None: as they stand.
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
        """The place of each claim in the request."""
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
        """Which of the positions are one message of an entry."""
        parts: Mask = self._batch_indexes() != NO_BATCH_INDEX
        return parts

    def entries(self) -> HeldPositions:
        """The entries of the positions, each as a whole; any hand-out of it."""
        return HeldPositions(self.ledger_id, self.entry_id, self.deliver_at_ms)

    def with_entries(self) -> HeldPositions:
        """The positions, and the entries of those that are messages of a batch."""
        parts = self.are_parts()
        return HeldPositions.concat(self, self.take(parts).entries()) if parts.any() else self

    def rows_in(self, index: Index) -> Rows:
        """The positions as rows of an index that they may be in."""
        entry_id = self.entry_id
        if self.batch_index is not None and index.of_batch_parts:
            entry_id = part_entry_id(entry_id, self.batch_index)
        return Rows(self.deliver_at_ms, self.ledger_id, entry_id)

    def keys_in(self, index: Index) -> U64:
        """The keys of the positions in an index; UNKNOWN_KEY where no bucket holds the page, and of what cannot be in
        such an index.
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


def that_may_be_due(indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions) -> HeldPositions:
    """The claims that may be in the backlog; whether the times are right only the rows can tell."""
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
    """The rows of the backlog that have the positions and the times of claims, in each of the indexes, whatever their
    counts: (rows, segments that must be loaded first to tell).

    `seen`: empty at the first call, and handed in again with the same claims after loading. `any_time`: a claim with
    time 0 is for a row with any time.
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
    """Which of the entries have a row, or are about to, that the subscription is owed, with whatever time.

    `indexes`: of entries, that the subscription is owed rows of.
    """
    owed = np.zeros(len(entries), np.bool_)
    for index in indexes:
        keys = entries.keys_in(index)
        asked = bitmap_of(keys[keys != UNKNOWN_KEY])
        there = entitlement.owed_among(index, asked, state.subscription_id) | (index.staged.keys & asked)
        owed |= contained(keys, there)
    return owed


# Which rows the claims, each for one of them, may be for.
Fits = Callable[[KeyedRows, HeldPositions], Mask]


def claimed_in(
    index: Index, claims: HeldPositions, found: KeyedRows, fits: Fits
) -> tuple[KeyedRows, HeldPositions, HeldPositions]:
    """Claims that are for rows of an index: (these rows, their claims, the claims that are left).

    `found`: of `find_in_backlog`. Of claims for one row the first one that fits counts.
    """
    rows, here = matched(claims.keys_in(index), claims.deliver_at_ms, found)
    places = np.flatnonzero(here)
    fitting = np.flatnonzero(fits(rows, claims.take(places)))
    fitting = fitting[firsts(rows.keys[fitting])]
    left = np.ones(len(claims), np.bool_)
    left[places[fitting]] = False
    return rows.take(fitting), claims.take(~left), claims.take(left)


def matched(keys: U64, deliver_at_ms: U64, found: KeyedRows, *, any_time: bool = False) -> tuple[KeyedRows, Mask]:
    """Returns the rows of the keys that are found with that time, in the order of the keys, and a mask of these keys.

    `found`: by ascending key within each index; a key may be asked for several times. `any_time`: as of
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
