"""Which rows may go, and to whom.

Owns: the rules of key order, as columns of rows in order against the tables of hashes.
Does not own: these tables (`selectors`, `draining_hashes`, `nack_blocks`, `last_sent_position`), and what becomes of
rows that must wait (`key_share`).
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
    """The tables that count; None where the policy does not ask for one."""

    selector: HashSelector
    draining: DrainingHashes | None
    blocks: NackBlocks | None
    joined_behind: LastSentPosition | None
    order: PositionOrder

    def choose(
        self, rows: KeyedRows, places: Places, slots: U16, permits: I64, room: int, refused: Mask | None = None
    ) -> U16:
        """Who receives each of the rows at these places, 0: nobody now. `slots`: of these. At most `room` of them.

        `permits`: by ordinal. `refused`: bool[65536], slots of which a row that stands before must wait; those that get
        one here are added.
        """
        consumers = self.selector.owners[slots]
        chosen = np.zeros(len(slots), np.uint16)
        able = np.flatnonzero(permits[consumers] > 0)
        if not len(able) or room <= 0:
            return chosen
        slots, consumers = slots[able], consumers[able]
        may_go = self._may_go(rows, places[able], slots, consumers)
        if self.joined_behind is not None:
            # Of one hash some rows may go and others must wait.
            if refused is not None:
                may_go &= ~refused[slots]
                refused[slots[~may_go]] = True
            may_go &= before_refused(slots, ~may_go)
        chosen[able] = share_out(consumers, may_go, permits, room)
        return chosen

    def are_able(self, slots: U16, permits: I64) -> Mask:
        """A mask of the slots whose rows may go, of rows that never were delivered, if there are any."""
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
    """Who receives each row, 0: nobody now. Of those that may go each consumer receives the first ones, up to its
    permits, and all together the first `limit`.
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
    """Which rows no refused row of their slot stands before, themselves included."""
    places = np.flatnonzero(refused)
    if not len(places):
        return np.ones(len(slots), np.bool_)
    # Of several places that are put in one the last one stays.
    first = np.full(HASH_SLOTS, len(slots))
    first[slots[places[::-1]]] = places[::-1]
    before: Mask = np.arange(len(slots)) < first[slots]
    return before
