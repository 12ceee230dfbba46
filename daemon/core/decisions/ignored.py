"""What a request named in vain, and why.

Owns: the reasons, and finding the one of each position from what is known of it without reading anything.
Does not own: what requests decide (`ack_decisions`, `nack_decisions`), and the wire.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import Mask, Places
from daemon.core.decisions.claims import HeldPositions, matched
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index.index import Index
from daemon.core.index.positions import KeyedRows, bitmap_of, contained

U8 = npt.NDArray[np.uint8]


class IgnoredReason(enum.IntEnum):
    """Why nothing happened to a position that a request named; numbers as in `tarry.v1.IgnoredReason`. Where several
    hold, for the rows of several indexes, the highest is told.
    """

    # The subscription is owed no row of it.
    NOT_THERE = 1
    # Its row is not due yet, by this daemon's clock.
    NOT_DUE = 2
    # Its row has another time.
    OTHER_TIME = 3
    # It is that row, and another hand-out of it.
    OTHER_DELIVERY = 4
    # It was taken back, since it is behind a row of its key that was negatively acknowledged.
    TAKEN_BACK = 5
    # Who asks does not hold it.
    NOT_HELD = 6


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Ignored:
    """Positions that were ignored: `index`, their places in the request, ascending, and of each the reason."""

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
    """Why the positions that are left of a request are ignored. `indexes`: those that their rows may be in. `found`,
    `any_time`: of `find_in_backlog`.
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
        # The reason that knows most: they are in that order.
        reason = np.maximum(reason, of_index)
    return Ignored(left.places(), reason)


def are_kept_back(state: SubscriptionState, found: KeyedRows) -> BitMap64:
    """Which rows of the backlog wait for a NACKED one of their key: who had them does not hold them any more."""
    if state.key_shared is None or not len(found):
        return BitMap64()
    kept_back = found.keys[state.key_shared.are_kept_back(found)]
    named = bitmap_of(kept_back)
    return named - state.set_aside_among(named) - state.in_flight.among(named)
