"""Which rows go to whom, as far as columns decide it.

Owns: how permits and the order of each hash cut what might be sent.
Does not own: which consumer has a hash and what a row waits for (`key_shared`).
"""

from __future__ import annotations

import numpy as np

from daemon.core.in_flight import Mask
from daemon.core.key_shared.consumers import I64
from daemon.core.key_shared.hash_slots import U16


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
    if (np.bincount(wanted, minlength=len(permits)) > permits).any():
        order = np.argsort(wanted, kind="stable")
        ordered = wanted[order]
        first = np.searchsorted(ordered, ordered)
        ranks = np.empty(len(wanted), np.int64)
        ranks[order] = np.arange(len(wanted)) - first
        places = places[ranks < permits[wanted]]
    places = places[:limit]
    shared[places] = consumers[places]
    return shared


def before_refused(slots: U16, refused: Mask) -> Mask:
    """Which rows no refused row of their slot stands before, themselves included."""
    places = np.flatnonzero(refused)
    if not len(places):
        return np.ones(len(slots), np.bool_)
    refused_slots, first = np.unique(slots[places], return_index=True)
    found = np.searchsorted(refused_slots, slots)
    found[found == len(refused_slots)] = 0
    behind: Mask = (refused_slots[found] == slots) & (np.arange(len(slots)) >= places[first][found])
    return ~behind
