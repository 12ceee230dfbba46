"""A KEY_SHARED subscription and the indexes of its topic: what has a row, and what is NACKED, when keys are shared.

Owns: that a position that has a row is never planned, and that what waits for a NACKED row cannot be held or named.
Does not own: who receives what (`key_shared`), and streams (the engine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from daemon.core import limits
from daemon.core.backlog_reader import BacklogReader
from daemon.core.claims import HeldPositions, are_owed
from daemon.core.in_flight import Mask
from daemon.core.index import Index
from daemon.core.key_shared.key_shared import KeyShared
from daemon.core.nack_tracker import FrozenNacks
from daemon.core.positions import KeyedRows, PagePlaces, bitmap_of, contained
from daemon.core.subscription import SubscriptionState
from daemon.errors import InvariantViolated
from storage_backends.formats.rows import U32, Rows


def begin(
    state: SubscriptionState,
    places: PagePlaces,
    reader_at_head: Callable[[], BacklogReader],
    *,
    elapsed_ms: int,
) -> FrozenNacks | None:
    """Shares a subscription by key. What must be read before anything is handed out, None when nothing must be."""
    key_shared = state.share_by_key(places, reader_at_head, elapsed_ms=elapsed_ms)
    if key_shared.nacks is None or not len(state.nacks):
        return None
    key_shared.is_whole = False
    return state.nacks.freeze()


def finish(state: SubscriptionState, nacked: KeyedRows) -> None:
    """`nacked`: what was read; some of it may have left since. Nothing where nobody shares it any more."""
    if state.key_shared is not None:
        state.key_shared.knew_nacked(nacked.take(contained(nacked.keys, state.nacks.keys)))


def not_kept_back(state: SubscriptionState, found: KeyedRows) -> KeyedRows:
    """Those rows of the backlog that do not wait for a NACKED one: who names others does not hold them any more."""
    if state.key_shared is None or not len(found):
        return found
    kept_back = state.key_shared.are_kept_back(found)
    if kept_back.any():
        kept_back &= ~contained(found.keys, state.set_aside_among(bitmap_of(found.keys)))
        found = found.take(~kept_back)
    return found


def hold(state: SubscriptionState, found: KeyedRows, numbers: U32, *, elapsed_ms: int) -> Mask:
    """Rows of the backlog are IN_FLIGHT at consumers that declared to hold them, u32[n]; which of them are."""
    named = bitmap_of(found.keys)
    held = ~contained(found.keys, state.set_aside_among(named) | state.held_among(named))
    places = np.flatnonzero(held)
    if len(places):
        rows = state.counted(found.take(places))
        held[places] = _shared(state).hold(rows, numbers[places], elapsed_ms=elapsed_ms)
    return held


def hold_planned(
    indexes: Sequence[Index],
    state: SubscriptionState,
    stream: int,
    positions: Rows,
    numbers: U32,
    *,
    elapsed_ms: int,
) -> Mask:
    """The same of positions of which no index has a row. `indexes`: of entries that the subscription is owed."""
    held = ~are_owed(indexes, state, _entries(positions))
    places = np.flatnonzero(held)
    if len(places):
        held[places] = _shared(state).hold_planned(
            stream, positions.take(places), numbers[places], elapsed_ms=elapsed_ms
        )
    return held


def plan(indexes: Sequence[Index], state: SubscriptionState, stream: int, positions: Rows, *, elapsed_ms: int) -> U32:
    """See `Topic.plan`. A position that has a row is HELD: it comes by itself."""
    limits.check_distinct(positions.ledger_id, positions.entry_id, None)
    answers = np.zeros(len(positions), np.uint32)
    places = np.flatnonzero(~are_owed(indexes, state, _entries(positions)))
    if len(places):
        answers[places] = _shared(state).plan(stream, positions.take(places), elapsed_ms=elapsed_ms)
    return answers


def _shared(state: SubscriptionState) -> KeyShared:
    if state.key_shared is None:
        raise InvariantViolated(f"subscription {state.stored.name} is not shared by key")
    return state.key_shared


def _entries(positions: Rows) -> HeldPositions:
    return HeldPositions(positions.ledger_id, positions.entry_id, positions.deliver_at_ms)
