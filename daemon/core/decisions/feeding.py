"""Feeds subscriptions with rows that were just passed, or from a backlog that is read again.

It decides which rows a subscription is owed, counts them once, and finds those that no subscription is owed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyroaring import BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.bucket import SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.indexes import Passed
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, bitmap_of, contained
from daemon.core.index.runs import Place, in_due_order
from daemon.core.index.segments import SegmentCache, SegmentRange
from storage_backends.formats.index_ids import subscription_of

# Rows read in one turn, however few of them are left
LOOKED_AT_MAX = 10_000


def feed(
    passed: Sequence[Passed],
    states: Sequence[SubscriptionState],
    coming: SubscriptionState | None,
    reader: Callable[[SubscriptionState], BacklogReader],
) -> BitMap64:
    """Add passed rows to the backlogs; return those that no subscription is owed, empty without subscriptions.

    `coming` is a subscription that is being created, for which rows passed now are counted. `reader` makes a reader
    that stands at the head.
    """
    shared = passed
    for each in passed:
        if each.bucket.index_id:
            shared = [each for each in passed if not each.bucket.index_id]
            break
    everything: KeyedRows | None = None
    owed_by: list[list[KeyedRows]] = []
    owed_whole = not states
    for state in states:
        owed, complete = owed_of(state, shared)
        owed_by.append(owed)
        owed_whole = owed_whole or complete
        came = shared
        if len(shared) < len(passed):
            own = [each for each in passed if subscription_of(each.bucket.index_id) == state.subscription_id]
            came = [*shared, *own]
            owed = [*owed, *(each.rows for each in own)]
            complete = complete and not own
        is_fed = state.is_fed
        if not is_fed:
            state.pass_by(owed)
        for rows in owed:
            state.backlog += len(rows.keys)
        if not is_fed:
            if state.reader is not None:
                for each, rows in zip(came, owed, strict=True):
                    if each.late:
                        state.reader.passed_late(each.bucket, rows)
            continue
        if complete:
            if everything is None:
                everything = owed[0] if len(owed) == 1 else in_due_order(owed)
            state.feed(everything)
        else:
            state.feed(_staying(state, in_due_order(owed)))
        if state.is_full:
            state.reader = reader(state)
    if coming is not None:
        owed, complete = owed_of(coming, shared)
        owed_by.append(owed)
        owed_whole = owed_whole or complete
        coming.pass_by(owed)
        coming.backlog += sum(map(len, owed))
    return BitMap64() if owed_whole else _owed_to_none(shared, owed_by)


def _staying(state: SubscriptionState, rows: KeyedRows) -> KeyedRows:
    """Return the rows without those that a staged decision takes out of the backlog.

    These are messages of a batch that was acknowledged as a whole before they were due.
    """
    if not state.acknowledging:
        return rows
    leaving = contained(rows.keys, state.acknowledging)
    return rows.take(~leaving) if leaving.any() else rows


def _owed_to_none(passed: Sequence[Passed], owed_by: Sequence[Sequence[KeyedRows]]) -> BitMap64:
    rest = BitMap64()
    for number, each in enumerate(passed):
        parts = [owed[number] for owed in owed_by]
        if all(len(part) < len(each.rows) for part in parts):
            rest |= BitMap64.difference(bitmap_of(each.rows.keys), *[bitmap_of(part.keys) for part in parts])
    return rest


def owed_of(state: SubscriptionState, passed: Sequence[Passed]) -> tuple[list[KeyedRows], bool]:
    """Return the passed rows of the shared index that the subscription is owed, and whether these are all.

    Acknowledged rows are left out. Rows that it is not owed count as acknowledged by it from here on.
    """
    owed = []
    complete = True
    for each in passed:
        kept = each.rows
        mask = state.owes(kept)
        acknowledged = each.bucket.acknowledged.get(state.subscription_id)
        if mask is not None:
            each.bucket.acknowledged_by(state.subscription_id).update(bitmap_of(kept.keys[~mask]))
            kept = kept.take(mask)
        if acknowledged and len(kept):
            kept = each.bucket.unacknowledged(kept, state.subscription_id)
        complete = complete and (kept is each.rows or len(kept) == len(each.rows))
        owed.append(kept)
    return owed, complete


def catch_up(
    indexes: Sequence[Index], cache: SegmentCache, state: SubscriptionState, limit: int, bound: Place | None = None
) -> list[SegmentRange]:
    """Derive about `limit` READY rows for a subscription that is behind; return the segments to load first.

    `indexes` have the rows that it is owed. Rows at or after `bound` are not derived yet. When nothing is left to
    derive, the subscription is fed again. A call reads a bounded number of rows, and perhaps none of them is READY:
    then there is more to derive as long as there is a reader that is not held up.
    """
    if state.reader is None or state.is_full:
        return []
    reading = _Reading(indexes, cache, state, state.reader, bound)
    rows = reading.read(limit)
    if rows is not None:
        state.derived(rows)
    elif reading.is_at_end:
        state.reader = None
    return reading.needed


def find_let_go(
    indexes: Sequence[Index], cache: SegmentCache, state: SubscriptionState, limit: int, bound: Place | None = None
) -> list[SegmentRange]:
    """Look through about `limit` rows for evicted ones that can go; return the segments to load first.

    The subscription is shared by key and receives what is found.
    """
    key_shared = state.key_shared
    if key_shared is None or key_shared.let_go is None or key_shared.let_go.reader is None:
        return []
    reading = _Reading(indexes, cache, state, key_shared.let_go.reader, bound)
    rows = reading.read(limit)
    found = KeyedRows.empty() if rows is None else state.counted(rows)
    key_shared.found_let_go(found, KeyedRows.concat(reading.passed_over), are_all=reading.is_at_end)
    return reading.needed


class _Reading:
    """One pass of a reader over a bounded number of rows, none at or behind `bound`.

    `needed` are segments to load first. `passed_over` are the rows that are READY.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        cache: SegmentCache,
        state: SubscriptionState,
        reader: BacklogReader,
        bound: Place | None,
    ) -> None:
        self.needed: list[SegmentRange] = []
        self.passed_over: list[KeyedRows] = []
        self.is_at_end = False
        self._sealed = [bucket for index in indexes for bucket in index.expected]
        self._memory = [bucket for index in indexes for bucket in index.memory_buckets]
        self._cache = cache
        self._state = state
        self._reader = reader
        self._bound = bound

    def read(self, limit: int) -> KeyedRows | None:
        """Return about `limit` rows, in due order, that are owed, unacknowledged and not elsewhere, or None."""
        looked_at_rows = 0
        while looked_at_rows < LOOKED_AT_MAX:
            self.needed = self._reader.needs(self._sealed, self._cache)
            if self.needed:
                return None
            taken = self._reader.take(self._sealed, self._memory, self._cache, limit, self._bound)
            if not taken:
                self.is_at_end = not self._reader.is_held_up
                return None
            looked_at_rows += sum(len(rows) for _, rows in taken)
            rows = self._owed(taken)
            if len(rows):
                return rows.take(rows.rows.due_order())
        return None

    def _owed(self, taken: Sequence[tuple[SealedBucket | MutableBucket, KeyedRows]]) -> KeyedRows:
        state = self._state
        named = BitMap64.union(BitMap64(), *[bitmap_of(rows.keys) for _, rows in taken])
        left_out = state.in_hand_among(named) | state.set_aside_among(named)
        ready = state.ready_among(named)
        if ready:
            self.passed_over += [rows.take(contained(rows.keys, ready)) for _, rows in taken]
        parts = []
        for bucket, rows in taken:
            owed = bucket.unacknowledged(rows, state.subscription_id, left_out)
            mask = state.owes(owed) if len(owed) and not bucket.index_id else None
            parts.append(owed if mask is None else owed.take(mask))
        return KeyedRows.concat(parts)
