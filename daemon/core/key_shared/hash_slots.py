"""Defines hash slots, the unit of key order (the low 16 bits of a key hash), and ranges of them.

Clients compute the hash; `hash_selectors` assigns hash slots to consumers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from daemon.errors import InvalidArgument
from storage_backends.formats.row_columns import U32

HASH_SLOTS = 1 << 16

U16 = npt.NDArray[np.uint16]
Slots = npt.NDArray[np.intp]

ALL_SLOTS: U16 = np.arange(HASH_SLOTS).astype(np.uint16)
ALL_SLOTS.flags.writeable = False


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class HashRange:
    """The hash slots from the first to the last, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def slots_of(key_hash: U32) -> U16:
    """Return the hash slot of each hash; hash 0, which means no key, has hash slot 0."""
    return key_hash.astype(np.uint16)


def check_ranges(field: str, ranges: Sequence[HashRange]) -> None:
    """Raise InvalidArgument if a range is not within the hash slots, or overlaps another one."""
    for each in ranges:
        if not 0 <= each.first <= each.last < HASH_SLOTS:
            raise InvalidArgument(
                f"{field}: {each} is no range of hash slots; it must go from a first to a last of 0 to {HASH_SLOTS - 1}"
            )
    for lower, upper in itertools.pairwise(sorted(ranges)):
        if upper.first <= lower.last:
            raise InvalidArgument(f"{field}: {upper} and {lower} overlap; a slot is given once")


def slots_in(firsts: Slots, counts: Slots) -> Slots:
    """Return the hash slots of ranges, one after the other, by the first of each range and its size.

    The hash slots are a ring: after the last one comes 0, and a first one may be negative.
    """
    ends = np.cumsum(counts)
    slots: Slots = np.repeat(firsts + counts - ends, counts) + np.arange(counts.sum())
    return slots % HASH_SLOTS


def ranges_where(owners: U16, ordinal: int) -> list[HashRange]:
    """Return the hash slots of one owner as the fewest ranges, ascending. `owners` is u16[65536]."""
    slots = np.flatnonzero(owners == ordinal)
    ends = np.flatnonzero(np.diff(slots, append=2 * HASH_SLOTS) > 1)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    return [HashRange(first, last) for first, last in zip(slots[starts].tolist(), slots[ends].tolist(), strict=True)]
