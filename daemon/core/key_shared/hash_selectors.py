"""Assigns the hash slots to consumers, by one of three selectors.

`draining_hashes` and `last_sent_position` decide when the positions of a moved hash slot may follow it.

AUTO_SPLIT (as Pulsar's HashRangeAutoSplit): every consumer has one range of hash slots, and all hash slots are in one.
A consumer that joins gets the upper half of the largest range, the lowest one if several are equal; the lower half
keeps the odd slot. A consumer that leaves gives its range to the nearest consumer below, or to the lowest one if there
is none below: joining and leaving again changes nothing. Every consumer always has a hash slot: there are fewer
ordinals than hash slots, so the largest range has at least two while an ordinal is free.

CONSISTENT_HASHING (as Pulsar's ConsistentHashingStickyKeyConsumerSelector): every consumer has points on a ring, and
the hash slots just before them. The ring has 2^32 places and hash slot s stands at s << 16; a hash slot belongs to the
first point at or after it. The points of a consumer depend only on its name and its instance number. If points share a
place, the one of the first name wins, then the one of the lowest number. So the assignment depends on which consumers
are present, not on their order or on former ones. Consumers of one name get the lowest free instance number and keep
it, so that the others keep their hash slots when one leaves. If no hash slot lies between two points, the upper one has
none: with many consumers, or few points, a consumer may have no hash slot at all.

AUTO_SPLIT: every consumer has one range of hash slots, and all slots are in one (as Pulsar's HashRangeAutoSplit).

Owns: which range is split when a consumer joins, and who has a range when its consumer leaves.
Does not own: the column of owners and the counts (`HashSelector`).

Who joins has the upper half of the largest range, the lowest of several; of an odd number of slots the lower half keeps
one more. Who leaves gives its range to the nearest consumer below, or, where there is none, to the lowest one: joining
and leaving again changes nothing. Everybody always has a slot: there are fewer ordinals than slots, so that the largest
range has two while there is one to give away.

CONSISTENT_HASHING: every consumer has points on a ring, and the hash slots just before them (as Pulsar's
ConsistentHashingStickyKeyConsumerSelector).

Owns: the points, their order on the ring, and which slots lie before each.
Does not own: the column of owners and the counts (`HashSelector`).

The ring has 2^32 places and slot s stands at s << 16; a slot belongs to the first point at or after it. Where the
points of a consumer lie depends on its name and its instance number alone; of points at one place that of the first
name, and then of the lowest number, counts. So who has which slot depends on who is there, not on who came first or who
was there once. Consumers of one name have numbers of their own: one that joins gets the lowest that is free, and keeps
it, so that the others of its name keep their slots when it leaves. Of two points that no slot lies between the upper
one has none: with many consumers, or few points, a consumer may have no slot at all.

STICKY: every consumer has the hash slots that it says (as Pulsar's HashRangeExclusive).

Owns: that no slot has two consumers. Does not own: the column of owners and the counts (`HashSelector`).

Slots that nobody has said are nobody's: positions there wait for a consumer.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import heapq
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from daemon.core.key_shared import hash_slots
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, HashRange, Slots, ranges_where, slots_in
from daemon.errors import InvalidArgument, InvariantViolated, QuotaExceeded
from storage_backends.formats.manifest import HashSelector as HashSelectorKind
from storage_backends.formats.row_columns import U32

NOBODY = 0
ORDINAL_MAX = (1 << 16) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Joiner:
    """A consumer that joins: an instance, known by its ordinal, 1 to 65,535, as long as it is present.

    `hash_ranges` are the hash slots that it asks for; only with STICKY.
    """

    ordinal: int
    name: str
    hash_ranges: tuple[HashRange, ...] = ()


class HashSelector(abc.ABC):
    """The owners of the hash slots, and their counts; a subclass divides the slots.

    `owners` is u16[65536]: the ordinal of each slot's consumer, 0 if it has none. It is changed in place: copy it to
    keep it as it is now. A refused change changes nothing.
    """

    def __init__(self) -> None:
        self.owners: U16 = np.zeros(HASH_SLOTS, np.uint16)
        self._slots: dict[int, int] = {}

    @abc.abstractmethod
    def join(self, joiners: Sequence[Joiner]) -> None:
        """Add consumers, all or none.

        Raises InvalidArgument for ranges where the selector takes none, no ranges where it needs some, and ranges that
        overlap; InvariantViolated for an ordinal that has joined.
        """

    @abc.abstractmethod
    def leave(self, ordinals: Collection[int]) -> None:
        """Remove consumers, all or none. Raises InvariantViolated for an ordinal that has not joined."""

    def slots_of_consumer(self, ordinal: int) -> int:
        """Return how many slots a consumer has, maybe none; O(1). Raises InvariantViolated if it has not joined."""
        slots = self._slots.get(ordinal)
        if slots is None:
            raise InvariantViolated(f"consumer {ordinal} has not joined")
        return slots

    def ranges_of(self, ordinal: int) -> list[HashRange]:
        """Return the slots of a consumer, ascending; no two ranges touch. Raises as `slots_of_consumer`."""
        return ranges_where(self.owners, ordinal) if self.slots_of_consumer(ordinal) else []

    def check_new(self, joiners: Sequence[Joiner]) -> None:
        """Raise InvariantViolated if a joiner is present or listed twice, or its ordinal is out of range."""
        ordinals = {joiner.ordinal for joiner in joiners}
        if len(ordinals) < len(joiners) or ordinals & self._slots.keys():
            raise InvariantViolated(f"a consumer of {sorted(ordinals)} joins twice")
        if ordinals and not 0 < min(ordinals) <= max(ordinals) <= ORDINAL_MAX:
            raise InvariantViolated(f"ordinals {min(ordinals)} to {max(ordinals)} are not within 1 to {ORDINAL_MAX}")

    def admit(self, joiners: Sequence[Joiner]) -> None:
        """Add new consumers without hash slots."""
        self.check_new(joiners)
        self._slots.update((joiner.ordinal, 0) for joiner in joiners)

    def check_joined(self, ordinals: Collection[int]) -> None:
        """Raise InvariantViolated if a consumer is not present, or is named twice."""
        if len(set(ordinals)) < len(ordinals) or not self._slots.keys() >= set(ordinals):
            raise InvariantViolated(f"of consumers {sorted(ordinals)} one has not joined, or leaves twice")

    def dismiss(self, ordinals: Collection[int]) -> None:
        """Remove consumers, which must have no hash slots left."""
        for ordinal in ordinals:
            if left := self._slots.pop(ordinal):
                raise InvariantViolated(f"consumer {ordinal} leaves with {left} hash slots")

    def give(self, slots: Slots, owners: U16) -> None:
        """Give each hash slot, named once, to a present consumer or, with 0, to none."""
        before = self.owners[slots]
        self.owners[slots] = owners
        for sign, changed in ((-1, before), (1, owners)):
            ordinals, counts = np.unique_counts(changed)
            for ordinal, count in zip(ordinals.tolist(), counts.tolist(), strict=True):
                if ordinal != NOBODY:
                    self._slots[ordinal] += sign * count


def refuse_ranges(joiners: Sequence[Joiner], selector: str) -> None:
    """Raise InvalidArgument if a joiner asks for hash slots."""
    for joiner in joiners:
        if joiner.hash_ranges:
            raise InvalidArgument(
                f'hash_ranges of consumer "{joiner.name}" has {len(joiner.hash_ranges)} ranges; with {selector} it '
                "must be empty"
            )


class AutoSplit(HashSelector):
    """The selector AUTO_SPLIT. A change affects one or two other consumers, and costs a pass over the consumers.

    Until some leave, no consumer has more than twice as many hash slots as another.
    """

    def __init__(self) -> None:
        super().__init__()
        # The first hash slot and the consumer of each range, ascending
        self._firsts = np.empty(0, np.intp)
        self._ordinals = np.empty(0, np.uint16)

    def join(self, joiners: Sequence[Joiner]) -> None:
        """Add all joiners or none, one after the other. Raise InvalidArgument if one asks for hash slots."""
        refuse_ranges(joiners, "AUTO_SPLIT")
        self.admit(joiners)
        for joiner in joiners:
            self._split(joiner.ordinal)
        new = np.isin(self._ordinals, [joiner.ordinal for joiner in joiners])
        self._give_ranges(new, self._ordinals[new])

    def leave(self, ordinals: Collection[int]) -> None:
        """Remove all consumers or none; their order does not matter."""
        self.check_joined(ordinals)
        stays = np.isin(self._ordinals, list(ordinals), invert=True)
        staying = self._ordinals[stays]
        heirs = np.full(len(stays), NOBODY, np.uint16)
        if len(staying):
            heirs = staying[np.maximum(np.cumsum(stays) - 1, 0)]
        self._give_ranges(~stays, heirs[~stays])
        self._firsts, self._ordinals = self._firsts[stays], staying
        self._firsts[:1] = 0
        self.dismiss(ordinals)

    def _split(self, ordinal: int) -> None:
        place, first = 0, 0
        if len(self._firsts):
            sizes = self._sizes()
            largest = int(sizes.argmax())
            size = int(sizes[largest])
            place, first = largest + 1, int(self._firsts[largest]) + size - size // 2
        self._firsts = np.insert(self._firsts, place, first)
        self._ordinals = np.insert(self._ordinals, place, ordinal)

    def _sizes(self) -> Slots:
        return np.diff(self._firsts, append=HASH_SLOTS)

    def _give_ranges(self, which: npt.NDArray[np.bool_], owners: U16) -> None:
        sizes = self._sizes()[which]
        self.give(slots_in(self._firsts[which], sizes), np.repeat(owners, sizes))


Places = npt.NDArray[np.intp]

SLOT_BITS = 16
# With this many a change takes milliseconds, during which the event loop stands still.
POINTS_MAX = 1_000_000
POINTS_RETRY_MS = 5_000


def points_of(name: str, instance: int, count: int) -> U32:
    """Return the points of an instance, by their number. A longer result begins with the shorter one."""
    stream = hashlib.shake_128(f"{instance} {name}".encode())
    return np.frombuffer(stream.digest(4 * count), "<u4").astype(np.uint32)


@dataclasses.dataclass(slots=True)
class _Instances:
    """The instance numbers of the consumers of one name: those below `end`, except for `free` ones (a heap)."""

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


class ConsistentHashing(HashSelector):
    """The selector CONSISTENT_HASHING.

    A change moves the hash slots of the consumers that join or leave, and no others. These are 1 in n, some of every
    consumer's. The cost is that of inserting into, or deleting from, two columns of all points, 6 bytes each.
    """

    def __init__(self, points_per_consumer: int) -> None:
        super().__init__()
        self._points_per_consumer = points_per_consumer
        # All points, ascending, and their consumers
        self._points = np.empty(0, np.uint32)
        self._ordinals = np.empty(0, np.uint16)
        self._members: dict[int, tuple[str, int]] = {}
        self._instances: dict[str, _Instances] = {}

    def join(self, joiners: Sequence[Joiner]) -> None:
        """Add all joiners or none.

        Raises InvalidArgument if one asks for hash slots, and QuotaExceeded for too many points.
        """
        refuse_ranges(joiners, "CONSISTENT_HASHING")
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
        # The first point at a new point's place is among these, even if it is now another consumer's.
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
        """Remove all consumers or none; their order does not matter."""
        self.check_joined(ordinals)
        if not ordinals:
            return
        leaves = np.zeros(ORDINAL_MAX + 1, np.bool_)
        leaves[list(ordinals)] = True
        going = leaves[self._ordinals]
        places = np.flatnonzero(going)
        slots, lengths = self._slots_before(places)
        stays = ~going
        self._points, self._ordinals = self._points[stays], self._ordinals[stays]
        heirs = np.full(len(places), NOBODY, np.uint16)
        if len(self._ordinals):
            # The heir's index is the number of points before this one that stay.
            heirs = self._ordinals[(places - np.arange(len(places))) % len(self._ordinals)]
        self.give(slots, np.repeat(heirs, lengths))
        self.dismiss(ordinals)
        for ordinal in ordinals:
            name, instance = self._members.pop(ordinal)
            self._instances[name].give_back(instance)
            if self._instances[name].are_none:
                del self._instances[name]

    def _slots_before(self, places: Places) -> tuple[Slots, Slots]:
        """Return the hash slots of points, given by ascending places, and how many each point has."""
        cells = self._points >> np.uint32(SLOT_BITS)
        last = cells[places].astype(np.intp)
        # The hash slots of the first point begin behind the last point.
        before = cells[places - 1].astype(np.intp) - HASH_SLOTS * (places == 0)
        lengths = last - before
        return slots_in(before + 1, lengths), lengths

    def _order_collisions(self, places: Places) -> None:
        """Sort points that share a place on the ring with one of these by name and instance."""
        here = self._points[places]
        behind = self._points[(places + 1) % len(self._points)]
        collides = (self._points[places - 1] == here) | (behind == here)
        for point in np.unique(here[collides]):
            first, end = (int(np.searchsorted(self._points, point, side)) for side in ("left", "right"))
            shared = sorted(self._ordinals[first:end].tolist(), key=self._members.__getitem__)
            self._ordinals[first:end] = shared


class Sticky(HashSelector):
    """The selector STICKY. Nothing moves: a consumer keeps its hash slots until it leaves; then they have none."""

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[int, Joiner] = {}

    def join(self, joiners: Sequence[Joiner]) -> None:
        """Add all joiners or none.

        Raises InvalidArgument if ranges are missing or invalid, or if another consumer, present or joining, has a hash
        slot.
        """
        self.check_new(joiners)
        members = self._members | {joiner.ordinal: joiner for joiner in joiners}
        owners = self.owners.copy()
        for joiner in joiners:
            field = f'hash_ranges of consumer "{joiner.name}"'
            if not joiner.hash_ranges:
                raise InvalidArgument(f"{field} is empty; with STICKY it must have at least one range")
            hash_slots.check_ranges(field, joiner.hash_ranges)
            for each in joiner.hash_ranges:
                had = owners[each.first : each.last + 1]
                if had.any():
                    other = members[int(had[had != NOBODY][0])]
                    overlapped = next(
                        one for one in other.hash_ranges if one.first <= each.last and one.last >= each.first
                    )
                    raise InvalidArgument(
                        f'{field}: {each} overlaps {overlapped} of consumer "{other.name}"; a slot has one consumer'
                    )
                had[:] = joiner.ordinal
        self.admit(joiners)
        self._members = members
        slots = np.flatnonzero(owners != self.owners)
        self.give(slots, owners[slots])

    def leave(self, ordinals: Collection[int]) -> None:
        """Remove all consumers or none."""
        self.check_joined(ordinals)
        slots = np.flatnonzero(np.isin(self.owners, list(ordinals)))
        self.give(slots, np.full(len(slots), NOBODY, np.uint16))
        self.dismiss(ordinals)
        for ordinal in ordinals:
            del self._members[ordinal]


def selector_of(kind: HashSelectorKind, points_per_consumer: int) -> HashSelector:
    """Create a selector without consumers. `points_per_consumer` is used by CONSISTENT_HASHING."""
    match kind:
        case HashSelectorKind.AUTO_SPLIT:
            return AutoSplit()
        case HashSelectorKind.CONSISTENT_HASHING:
            return ConsistentHashing(points_per_consumer)
        case HashSelectorKind.STICKY:
            return Sticky()
