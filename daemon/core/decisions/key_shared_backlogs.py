"""A KEY_SHARED subscription and the indexes of its topic: what has a row, and what is NACKED, when keys are shared.

Owns: that a position that has a row is never planned, and that nothing is handed out before an earlier row that is due
and not read.
Does not own: who receives what (`key_share`), and streams (the engine).
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
    """Makes a reader of the backlog that stands at the head, or at the beginning."""

    def __call__(self, state: SubscriptionState, *, at_head: bool) -> BacklogReader: ...


class KeySharedBacklogs:
    """The KEY_SHARED subscriptions of one topic. `reader`: makes one of a backlog."""

    def __init__(self, indexes: Indexes, reader: MakesReader) -> None:
        self._indexes = indexes
        self._reader = reader

    def begin(self, state: SubscriptionState, *, elapsed_ms: int = 0) -> FrozenNacks | None:
        """A subscription is about to be opened as KEY_SHARED for the first time: what must be read, in a thread, and
        given to `finish`, before anything is handed out; None when nothing must be.
        """
        key_shared = state.share_by_key(self._indexes.places, elapsed_ms=elapsed_ms)
        if key_shared.nacks is None or not len(state.nacks):
            return None
        key_shared.is_whole = False
        return state.nacks.freeze()

    def learn(self, state: SubscriptionState, nacked: KeyedRows) -> None:
        """`nacked`: some of the rows of what `begin` gave, of which some may have left since."""
        _shared(state).learn_nacked(nacked.take(contained(nacked.keys, state.nacks.keys)))

    def finish(self, state: SubscriptionState, nacked: KeyedRows) -> None:
        """Learns the last of the rows of what `begin` gave, of which some may have left since: from then on rows are
        handed out.
        """
        self.learn(state, nacked)
        _shared(state).knows_nacked()

    def find_let_go(self, state: SubscriptionState, limit: int) -> list[SegmentRange]:
        """Looks at about `limit` rows for those that wait for their key and were let go for want of room; the segments
        to load first, if any. Call when `reads_on`.
        """
        key_shared = _shared(state)
        if key_shared.let_go is None:
            return []
        if key_shared.let_go.reader is None:
            key_shared.seek_let_go(self._reader(state, at_head=False))
        return feeding.find_let_go(
            self._indexes.serving(state.subscription_id), self._indexes.cache, state, limit, self.bound(state)
        )

    def hold_up(self, states: Iterable[SubscriptionState], now_ms: int) -> None:
        """Rows are about to be passed: where some are due that are not read, and those would overtake them, they are
        read from the backlog when these have been passed.
        """
        for state in states:
            if (
                state.key_shared is not None
                and state.is_fed
                and self._indexes.has_unread(state.subscription_id, now_ms)
            ):
                state.reader = self._reader(state, at_head=True)

    def bound(self, state: SubscriptionState) -> Place | None:
        """Nothing at or behind that place is handed out to the subscription now: a due row comes first that is not
        passed. None when there is none, or when it is not shared by key.
        """
        return None if state.key_shared is None else self._indexes.first_unpassed(state.subscription_id)

    def hold(self, state: SubscriptionState, found: KeyedRows, numbers: U32, *, elapsed_ms: int) -> Mask:
        """Rows of the backlog are IN_FLIGHT at consumers that declared to hold them, u32[n] of their numbers; which of
        them are.
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
        """Holds positions without a row, which were planned for a stream of a former owner; a mask of those held."""
        held = self._have_no_row(state, positions)
        places = np.flatnonzero(held)
        if len(places):
            held[places] = _shared(state).plans.hold(
                stream, positions.take(places), numbers[places], elapsed_ms=elapsed_ms
            )
        return held

    def plan(self, state: SubscriptionState, stream: int, positions: Rows, *, elapsed_ms: int) -> U32:
        """Who of the consumers of a stream receives each of some positions that are not delayed: their numbers, 0 where
        it is HELD; one that has a row comes by itself. Raises InvalidArgument, QuotaExceeded.
        """
        limits.check_distinct(positions.ledger_id, positions.entry_id, None)
        answers = np.zeros(len(positions), np.uint32)
        places = np.flatnonzero(self._have_no_row(state, positions))
        if len(places):
            answers[places] = _shared(state).plans.plan(stream, positions.take(places), elapsed_ms=elapsed_ms)
        return answers

    def _have_no_row(self, state: SubscriptionState, positions: Rows) -> Mask:
        """A mask of the positions of which the subscription is owed no row, with whatever time."""
        entries = HeldPositions(positions.ledger_id, positions.entry_id, positions.deliver_at_ms)
        return ~are_owed(self._indexes.of_entries(state.subscription_id), state, entries)


def _shared(state: SubscriptionState) -> KeyShared:
    if state.key_shared is None:
        raise InvariantViolated(f"subscription {state.stored.name} is not shared by key")
    return state.key_shared
