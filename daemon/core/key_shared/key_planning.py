"""Decides which rows may go, and to which consumer, by the rules of key order.

Columns of rows in order are compared with the tables of hashes (`hash_selectors`, `draining_hashes`, `nack_blocks`,
`last_sent_position`). `key_share` keeps the rows that must wait.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from daemon.core.backlog.in_flight import Places
from daemon.core.index.position_keys import KeyedRows, Mask, PositionOrder
from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_selectors import HashSelector
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16
from daemon.core.key_shared.key_consumers import I64
from daemon.core.key_shared.last_sent_position import LastSentPosition
from daemon.core.key_shared.nack_blocks import NackBlocks


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planning:
    """The tables that apply; one that the policy does not ask for is None."""

    selector: HashSelector
    draining: DrainingHashes | None
    blocks: NackBlocks | None
    joined_behind: LastSentPosition | None
    order: PositionOrder

    def choose(
        self, rows: KeyedRows, places: Places, slots: U16, permits: I64, room: int, refused: Mask | None = None
    ) -> U16:
        """Return the consumer of each of the rows at these places, 0 for none now; at most `room` rows get one.

        `slots` are the hash slots of these rows, and `permits` are by ordinal. `refused` is bool[65536], hash slots in
        which an earlier row must wait; hash slots in which a row has to wait here are added.
        """
        consumers = self.selector.owners[slots]
        chosen = np.zeros(len(slots), np.uint16)
        able = np.flatnonzero(permits[consumers] > 0)
        if not len(able) or room <= 0:
            return chosen
        slots, consumers = slots[able], consumers[able]
        may_go = self._may_go(rows, places[able], slots, consumers)
        if self.joined_behind is not None:
            # Some rows of one hash may go while others must wait.
            if refused is not None:
                may_go &= ~refused[slots]
                refused[slots[~may_go]] = True
            may_go &= before_refused(slots, ~may_go)
        chosen[able] = share_out(consumers, may_go, permits, room)
        return chosen

    def are_able(self, slots: U16, permits: I64) -> Mask:
        """Return the mask of hash slots whose rows may go, if they were never delivered."""
        consumers = self.selector.owners[slots]
        able: Mask = permits[consumers] > 0
        if self.blocks is not None and self.blocks.any_blocked:
            able &= ~self.blocks.are_blocked(slots)
        if self.draining is not None:
            able &= self.draining.may_receive(slots, consumers)
        if self.joined_behind is not None and self.joined_behind.has_recent:
            recent = [consumer for consumer, _ in self.joined_behind.after_mark_delete()]
            able &= ~np.isin(consumers, np.array(recent, np.uint16))
        return able

    def _may_go(self, rows: KeyedRows, places: Places, slots: U16, consumers: U16) -> Mask:
        may_go = np.ones(len(slots), np.bool_)
        if self.blocks is not None and self.blocks.any_blocked:
            may_go &= ~self.blocks.are_blocked(slots)
        if self.draining is not None:
            free = self.draining.may_receive(slots, consumers)
            if not free.all():
                self.draining.blocked(slots[may_go & ~free])
                may_go &= free
        if self.joined_behind is not None and self.joined_behind.has_recent:
            ledger_id, entry_id, _ = self.order.columns(rows.take(places))
            may_go &= self.joined_behind.may_receive(ledger_id, entry_id, consumers)
        return may_go


def share_out(consumers: U16, may_go: Mask, permits: I64, limit: int) -> U16:
    """Return the consumer of each row, 0 for none now.

    Each consumer receives the first of the rows that may go, up to its permits; `limit` bounds all of them together.
    """
    shared = np.zeros(len(consumers), np.uint16)
    places = np.flatnonzero(may_go)
    places = places[permits[consumers[places]] > 0]
    if not len(places):
        return shared
    wanted = consumers[places]
    counts = np.bincount(wanted, minlength=len(permits))
    if (counts > permits).any():
        order = np.argsort(wanted, kind="stable")
        ranks = np.arange(len(wanted)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = places[np.sort(order[ranks < np.repeat(permits, counts)])]
    places = places[:limit]
    shared[places] = consumers[places]
    return shared


def before_refused(slots: U16, refused: Mask) -> Mask:
    """Return the mask of rows before the first refused row of their hash slot."""
    places = np.flatnonzero(refused)
    if not len(places):
        return np.ones(len(slots), np.bool_)
    # numpy keeps the last of several values assigned to one place.
    first = np.full(HASH_SLOTS, len(slots))
    first[slots[places[::-1]]] = places[::-1]
    before: Mask = np.arange(len(slots)) < first[slots]
    return before
