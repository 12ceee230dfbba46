"""What may be deleted, and when: decisions on what was read and listed.

Owns: which tombstones are due, how far the orphan floor may move, which manifests have served, and when a pass would
delete suspiciously much.
Does not own: which objects are orphans (`storage_backends.shard_listing`), reading, listing, deleting (`garbage`) and
when that is done (`daemon.owner.collection_pass`).

R4: an object may go only if its base is below the orphan floor of a manifest that does not name it: who brings in an
object from then on is refused, since its base is below the floor. R9: time decides only how far the floor moves, and a
listing only shows what there is to decide on.

How many objects, and how large they are together.

Owns: the value and its arithmetic. Does not own: what is counted.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

from storage_backends.formats.manifest import Tombstone
from storage_backends.shard_listing import Listed


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectCount:
    """Objects and their bytes."""

    objects: int = 0
    size_bytes: int = 0

    def __add__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects + other.objects, self.size_bytes + other.size_bytes)

    def __sub__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects - other.objects, self.size_bytes - other.size_bytes)


NOTHING: Final = ObjectCount()


FIRST_RETRY_MS: Final = 600_000
LAST_RETRY_MS: Final = 6 * 3_600_000
"""An object whose deletion failed is tried again after the first, doubled each time up to the last."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a pass did; fields as in `tarry.v1.GarbageSummary`."""

    tombstones: ObjectCount = NOTHING
    orphans: ObjectCount = NOTHING
    manifests: ObjectCount = NOTHING
    journal_slots: ObjectCount = NOTHING
    waiting: ObjectCount = NOTHING
    failed: ObjectCount = NOTHING
    given_up: ObjectCount = NOTHING
    refused: ObjectCount = NOTHING

    def __add__(self, other: Summary) -> Summary:
        fields = (field.name for field in dataclasses.fields(self))
        return Summary(**{name: getattr(self, name) + getattr(other, name) for name in fields})


NOTHING_DONE: Final = Summary()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectionLimits:
    """`orphan_age_ms`: how long an object may be on its way from its first byte to the manifest that names it.
    `manifests_kept`, `manifests_age_ms`: both must be exceeded. `attempts_max`: failed deletions after which an object
    is given up. `guard_share`, `guard_bytes`: orphans that exceed both, as a part of their shard and in bytes, stay.
    """

    orphan_age_ms: int
    manifests_kept: int
    manifests_age_ms: int
    attempts_max: int
    guard_share: float
    guard_bytes: int


# ---- tombstones


def due_at_ms(tombstone: Tombstone) -> int:
    """When it may be tried to delete the object, for the first time or again; Unix time."""
    if tombstone.attempts == 0:
        return tombstone.delete_after_ms
    # What came before: 1 + 2 + 4 ... steps.
    steps = (1 << min(tombstone.attempts, 16)) - 1
    doubled_ms = min(FIRST_RETRY_MS * steps, LAST_RETRY_MS * tombstone.attempts)
    return tombstone.delete_after_ms + doubled_ms


def due(tombstones: Iterable[Tombstone], now_ms: int) -> list[Tombstone]:
    """The tombstones whose time has come."""
    return [each for each in tombstones if due_at_ms(each) <= now_ms]


def next_due_at_ms(tombstones: Iterable[Tombstone]) -> int | None:
    """When the first of them is due; None when there is none."""
    return min(map(due_at_ms, tombstones), default=None)


def count(tombstones: Iterable[Tombstone]) -> ObjectCount:
    sizes = [each.object.size_bytes for each in tombstones]
    return ObjectCount(len(sizes), sum(sizes))


# ---- orphans


def tip_at(numbers: Sequence[int], created_ms: Callable[[int], int | None], at_ms: int) -> int | None:
    """The highest of these ascending manifest numbers that was created at or before `at_ms`; None when none was.

    `created_ms`: when a manifest was created, None when that cannot be told: then it counts as later. Clocks of writers
    differ; where times do not ascend, the answer is one manifest after which a later one was created.
    """

    def is_later(number: int) -> bool:
        number_ms = created_ms(number)
        return number_ms is None or number_ms > at_ms

    place = bisect.bisect_right(numbers, False, key=is_later)
    return None if place == 0 else numbers[place - 1]


def is_suspicious(found: ObjectCount, shard_bytes: int, limits: CollectionLimits) -> bool:
    """Whether so many orphans are more likely a mistake than garbage."""
    return found.size_bytes > limits.guard_bytes and found.size_bytes > limits.guard_share * shard_bytes


# ---- manifests


def needs_look(listed: Listed, named: Set[str], kept: int) -> bool:
    """Whether there may be something to collect, by a manifest that may be old."""
    return len(listed.manifests) > kept or any(key not in named for key in listed.objects)


def beyond_kept(listed: Listed, tip: int, kept: int) -> list[tuple[int, int]]:
    """Numbers, ascending, and sizes of the manifests that are not among the newest `kept`; never the tip."""
    return [each for each in listed.in_order() if each[0] <= tip - max(kept, 1)]
