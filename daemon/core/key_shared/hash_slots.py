"""Hash slots, the unit of key order: the low 16 bits of a key hash.

Owns: how many there are, which one a hash has, and ranges of them.
Does not own: the hash (clients), and who has a slot (`selectors`).
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
    """The slots from the first to the last, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def slots_of(key_hash: U32) -> U16:
    """The slot of each hash; that of 0, which is no key, is 0."""
    return key_hash.astype(np.uint16)


def check_ranges(field: str, ranges: Sequence[HashRange]) -> None:
    """InvalidArgument when one of the ranges is not within the slots, or has a slot of another one."""
    for each in ranges:
        if not 0 <= each.first <= each.last < HASH_SLOTS:
            raise InvalidArgument(
                f"{field}: {each} is no range of hash slots; it must go from a first to a last of 0 to {HASH_SLOTS - 1}"
            )
    for lower, upper in itertools.pairwise(sorted(ranges)):
        if upper.first <= lower.last:
            raise InvalidArgument(f"{field}: {upper} and {lower} overlap; a slot is given once")


def slots_in(firsts: Slots, counts: Slots) -> Slots:
    """The slots of ranges, one after the other, by the first slot of each and how many it has. The slots are a ring:
    what is beyond the last one goes on at 0, and a first slot may be negative.
    """
    ends = np.cumsum(counts)
    slots: Slots = np.repeat(firsts + counts - ends, counts) + np.arange(counts.sum())
    return slots % HASH_SLOTS


def ranges_where(owners: U16, ordinal: int) -> list[HashRange]:
    """The slots of one owner, as few ranges as possible, ascending. `owners`: u16[65536]."""
    slots = np.flatnonzero(owners == ordinal)
    ends = np.flatnonzero(np.diff(slots, append=2 * HASH_SLOTS) > 1)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    return [HashRange(first, last) for first, last in zip(slots[starts].tolist(), slots[ends].tolist(), strict=True)]
