"""Connects KEY_SHARED subscriptions with the indexes of their topic.

Owns: that a position that has a row is never planned, and that nothing is handed out before an earlier row that is due
and not read.
Does not own: who receives what (`key_share`), and streams (the engine).

While a segment that is due is not in memory, rows are read from the backlog in due order instead of being fed, up to
the first due row that the head has not passed. A merged-away bucket whose object is gone holds up the order, too, until
the merged one is served; a damaged bucket does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from daemon.core import limits
from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions import feeding
from daemon.core.decisions.claims import HeldPositions, are_owed
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained
from daemon.core.index.runs import Place
from daemon.core.index.segments import SegmentRange
from daemon.core.key_shared.key_share import KeyShared
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32, Rows


class MakesReader(Protocol):
    """The port that makes a reader of the backlog at the head, or at the beginning."""

    def __call__(self, state: SubscriptionState, *, at_head: bool) -> BacklogReader: ...


class KeySharedBacklogs:
    """The KEY_SHARED subscriptions of one topic. `reader` makes a reader of a backlog."""

    def __init__(self, indexes: Indexes, reader: MakesReader) -> None:
        self._indexes = indexes
        self._reader = reader

    def begin(self, state: SubscriptionState, *, elapsed_ms: int = 0) -> FrozenNacks | None:
        """Open a subscription as KEY_SHARED for the first time; return NACKED rows that must be read, or None.

        The rows are read in a thread and passed to `finish` before anything is delivered.
        """
        key_shared = state.share_by_key(self._indexes.places, elapsed_ms=elapsed_ms)
        if key_shared.nacks is None or not len(state.nacks):
            return None
        key_shared.is_whole = False
        return state.nacks.freeze()

    def learn(self, state: SubscriptionState, nacked: KeyedRows) -> None:
        """Learn some of the rows that `begin` returned; some of them may have left since."""
        _shared(state).learn_nacked(nacked.take(contained(nacked.keys, state.nacks.keys)))

    def finish(self, state: SubscriptionState, nacked: KeyedRows) -> None:
        """Learn the last of the rows that `begin` returned: from then on rows are delivered."""
        self.learn(state, nacked)
        _shared(state).knows_nacked()

    def find_let_go(self, state: SubscriptionState, limit: int) -> list[SegmentRange]:
        """Look through about `limit` rows for evicted ones; return the segments to load first. Call when `reads_on`."""
        key_shared = _shared(state)
        if key_shared.let_go is None:
            return []
        if key_shared.let_go.reader is None:
            key_shared.seek_let_go(self._reader(state, at_head=False))
        return feeding.find_let_go(
            self._indexes.serving(state.subscription_id), self._indexes.cache, state, limit, self.bound(state)
        )

    def hold_up(self, states: Iterable[SubscriptionState], now_ms: int) -> None:
        """Stop feeding subscriptions that have due rows which are not read, before later rows are passed.

        The passed rows would overtake them; instead they are read from the backlog afterwards.
        """
        for state in states:
            if (
                state.key_shared is not None
                and state.is_fed
                and self._indexes.has_unread(state.subscription_id, now_ms)
            ):
                state.reader = self._reader(state, at_head=True)

    def bound(self, state: SubscriptionState) -> Place | None:
        """Return a due point that is not passed: nothing at or after it in due order may be delivered now.

        Returns None if there is none, or the subscription is not shared by key.
        """
        return None if state.key_shared is None else self._indexes.first_unpassed(state.subscription_id)

    def hold(self, state: SubscriptionState, found: KeyedRows, numbers: U32, *, elapsed_ms: int) -> Mask:
        """Put rows of the backlog IN_FLIGHT at consumers that declared to hold them; return their mask.

        `numbers` is u32[n], the consumers' numbers.
        """
        named = bitmap_of(found.keys)
        held = ~contained(found.keys, state.set_aside_among(named) | state.held_among(named))
        places = np.flatnonzero(held)
        if len(places):
            rows = state.counted(found.take(places))
            held[places] = _shared(state).hold(rows, numbers[places], elapsed_ms=elapsed_ms)
        return held

    def hold_planned(
        self, state: SubscriptionState, stream: int, positions: Rows, numbers: U32, *, elapsed_ms: int
    ) -> Mask:
        """Hold positions without a row that were planned for a stream of a former owner; return their mask."""
        held = self._have_no_row(state, positions)
        places = np.flatnonzero(held)
        if len(places):
            held[places] = _shared(state).plans.hold(
                stream, positions.take(places), numbers[places], elapsed_ms=elapsed_ms
            )
        return held

    def plan(
        self, state: SubscriptionState, stream: int, positions: Rows, *, may_hand_out: bool, elapsed_ms: int
    ) -> U32:
        """Return the consumer of a stream that receives each undelayed position now, 0 if it is HELD.

        A position that has a row is delivered by that row. Without `may_hand_out` no consumer receives anything that it
        does not hold. Raises InvalidArgument, QuotaExceeded.
        """
        limits.check_distinct(positions.ledger_id, positions.entry_id, None)
        answers = np.zeros(len(positions), np.uint32)
        places = np.flatnonzero(self._have_no_row(state, positions))
        if len(places):
            answers[places] = _shared(state).plans.plan(
                stream, positions.take(places), may_hand_out=may_hand_out, elapsed_ms=elapsed_ms
            )
        return answers

    def _have_no_row(self, state: SubscriptionState, positions: Rows) -> Mask:
        """Return the mask of positions without a row that the subscription is owed, whatever its time."""
        entries = HeldPositions(positions.ledger_id, positions.entry_id, positions.deliver_at_ms)
        return ~are_owed(self._indexes.of_entries(state.subscription_id), state, entries)


def _shared(state: SubscriptionState) -> KeyShared:
    if state.key_shared is None:
        raise InvariantViolated(f"subscription {state.stored.name} is not shared by key")
    return state.key_shared
