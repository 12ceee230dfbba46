"""CONSISTENT_HASHING: every consumer has points on a ring, and the hash slots just before them (as Pulsar's
ConsistentHashingStickyKeyConsumerSelector).

Owns: the points, their order on the ring, and which slots lie before each.
Does not own: the column of owners and the counts (`slot_owners`).

The ring has 2^32 places and slot s stands at s << 16; a slot belongs to the first point at or after it. Where the
points of a consumer lie depends on its name and its instance number alone; of points at one place that of the first
name, and then of the lowest number, counts. So who has which slot depends on who is there, not on who came first or who
was there once. Consumers of one name have numbers of their own: one that joins gets the lowest that is free, and keeps
it, so that the others of its name keep their slots when it leaves. Of two points that no slot lies between the upper
one has none: with many consumers, or few points, a consumer may have no slot at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from daemon.core.key_shared import slot_owners
from daemon.core.key_shared.hash_slots import HASH_SLOTS, Slots, slots_in
from daemon.core.key_shared.slot_owners import Joiner
from daemon.errors import QuotaExceeded
from storage_backends.formats.row_columns import U32

Places = npt.NDArray[np.intp]

SLOT_BITS = 16
# A change costs milliseconds with so many, and is made while everybody waits.
POINTS_MAX = 1_000_000
POINTS_RETRY_MS = 5_000


def points_of(name: str, instance: int, count: int) -> U32:
    """Where the points of an instance lie, by their number. More of them begin with those that fewer have."""
    stream = hashlib.shake_128(f"{instance} {name}".encode())
    return np.frombuffer(stream.digest(4 * count), "<u4").astype(np.uint32)


@dataclasses.dataclass(slots=True)
class _Instances:
    """The numbers of the consumers of one name: below `end`, but for those that are free (a heap)."""

    end: int = 0
    free: list[int] = dataclasses.field(default_factory=list)

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.end += 1
        return self.end - 1

    def give_back(self, number: int) -> None:
        heapq.heappush(self.free, number)

    @property
    def are_none(self) -> bool:
        return len(self.free) == self.end


class ConsistentHashing(slot_owners.SlotOwners):
    """A change moves the slots of who comes or goes, and no others: 1 in n, some of everybody's. Its cost is that of
    inserting into, or deleting from, two columns of all points, 6 bytes each.
    """

    def __init__(self, points_per_consumer: int) -> None:
        super().__init__()
        self._points_per_consumer = points_per_consumer
        # All points, ascending, and whose they are.
        self._points = np.empty(0, np.uint32)
        self._ordinals = np.empty(0, np.uint16)
        self._members: dict[int, tuple[str, int]] = {}
        self._instances: dict[str, _Instances] = {}

    def join(self, joiners: Sequence[Joiner]) -> None:
        """All or none. InvalidArgument when one says which slots it has, QuotaExceeded for too many points."""
        slot_owners.refuse_ranges(joiners, "CONSISTENT_HASHING")
        self._check_points(len(joiners))
        self.admit(joiners)
        if not joiners:
            return
        for joiner in joiners:
            instance = self._instances.setdefault(joiner.name, _Instances()).take()
            self._members[joiner.ordinal] = joiner.name, instance
        count = self._points_per_consumer
        points = np.concatenate([points_of(*self._members[joiner.ordinal], count) for joiner in joiners])
        ordinals = np.repeat(np.array([joiner.ordinal for joiner in joiners], np.uint16), count)
        order = np.argsort(points)
        points = points[order]
        places = np.searchsorted(self._points, points)
        self._points = np.insert(self._points, places, points)
        self._ordinals = np.insert(self._ordinals, places, ordinals[order])
        places += np.arange(len(places))
        self._order_collisions(places)
        slots, lengths = self._slots_before(places)
        # The first of a new point's place is among these, be it another one's by now.
        self.give(slots, np.repeat(self._ordinals[places], lengths))

    def _check_points(self, joining: int) -> None:
        consumers, count = len(self._members) + joining, self._points_per_consumer
        if consumers * count > POINTS_MAX:
            raise QuotaExceeded(
                f"{consumers} consumers with {count} points each; a ring has at most {POINTS_MAX} points, ask for "
                "fewer in the subscription's policy",
                retry_after_ms=POINTS_RETRY_MS,
            )

    def leave(self, ordinals: Collection[int]) -> None:
        """All or none; the order does not matter."""
        self.check_joined(ordinals)
        if not ordinals:
            return
        leaves = np.zeros(slot_owners.ORDINAL_MAX + 1, np.bool_)
        leaves[list(ordinals)] = True
        going = leaves[self._ordinals]
        places = np.flatnonzero(going)
        slots, lengths = self._slots_before(places)
        stays = ~going
        self._points, self._ordinals = self._points[stays], self._ordinals[stays]
        heirs = np.full(len(places), slot_owners.NOBODY, np.uint16)
        if len(self._ordinals):
            # As many stay before a point as come before it and do not go.
            heirs = self._ordinals[(places - np.arange(len(places))) % len(self._ordinals)]
        self.give(slots, np.repeat(heirs, lengths))
        self.dismiss(ordinals)
        for ordinal in ordinals:
            name, instance = self._members.pop(ordinal)
            self._instances[name].give_back(instance)
            if self._instances[name].are_none:
                del self._instances[name]

    def _slots_before(self, places: Places) -> tuple[Slots, Slots]:
        """The slots that belong to points, given by their places, ascending; and how many each of these has."""
        cells = self._points >> np.uint32(SLOT_BITS)
        last = cells[places].astype(np.intp)
        # The first point's slots begin behind the last point.
        before = cells[places - 1].astype(np.intp) - HASH_SLOTS * (places == 0)
        lengths = last - before
        return slots_in(before + 1, lengths), lengths

    def _order_collisions(self, places: Places) -> None:
        """Sorts points that share a place on the ring, with one of these among them, by name and instance."""
        here = self._points[places]
        behind = self._points[(places + 1) % len(self._points)]
        collides = (self._points[places - 1] == here) | (behind == here)
        for point in np.unique(here[collides]):
            first, end = (int(np.searchsorted(self._points, point, side)) for side in ("left", "right"))
            shared = sorted(self._ordinals[first:end].tolist(), key=self._members.__getitem__)
            self._ordinals[first:end] = shared
