"""Decides which stored objects may be deleted, and when, from what was read and listed.

`daemon.owner.collection_pass` reads, lists and deletes; `storage_backends.shard_listing` finds the orphans.

R4: an object may go only if its base is below the orphan floor of a manifest that does not name it. A writer that
brings in such an object later is refused, since its base is below the floor. R9: time decides only how far the floor
moves, and a listing only shows what there is to decide on.
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
    """A number of objects and their size (bytes)."""

    objects: int = 0
    size_bytes: int = 0

    def __add__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects + other.objects, self.size_bytes + other.size_bytes)

    def __sub__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects - other.objects, self.size_bytes - other.size_bytes)


NOTHING: Final = ObjectCount()


FIRST_RETRY_MS: Final = 600_000
LAST_RETRY_MS: Final = 6 * 3_600_000
"""Delays before a failed deletion is tried again: the first, and the last up to which it doubles (ms)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a pass; fields as in `tarry.v1.GarbageSummary`."""

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
    """The limits of a pass.

    `orphan_age_ms` is how long an object may be in flight, from its first byte to the manifest that names it. A
    manifest goes only when it exceeds both `manifests_kept` and `manifests_age_ms`. An object is given up after
    `attempts_max` failed deletions. Orphans stay if they exceed both `guard_share` (a part of their shard) and
    `guard_bytes`.
    """

    orphan_age_ms: int
    manifests_kept: int
    manifests_age_ms: int
    attempts_max: int
    guard_share: float
    guard_bytes: int


# ---- tombstones


def due_at_ms(tombstone: Tombstone) -> int:
    """Return when the object may be deleted, for the first time or again (Unix ms)."""
    if tombstone.attempts == 0:
        return tombstone.delete_after_ms
    # The delays of the attempts so far: 1 + 2 + 4 ... steps.
    steps = (1 << min(tombstone.attempts, 16)) - 1
    doubled_ms = min(FIRST_RETRY_MS * steps, LAST_RETRY_MS * tombstone.attempts)
    return tombstone.delete_after_ms + doubled_ms


def due(tombstones: Iterable[Tombstone], now_ms: int) -> list[Tombstone]:
    """Return the tombstones that are due."""
    return [each for each in tombstones if due_at_ms(each) <= now_ms]


def next_due_at_ms(tombstones: Iterable[Tombstone]) -> int | None:
    """Return when the first tombstone is due (Unix ms), or None if there is none."""
    return min(map(due_at_ms, tombstones), default=None)


def count(tombstones: Iterable[Tombstone]) -> ObjectCount:
    sizes = [each.object.size_bytes for each in tombstones]
    return ObjectCount(len(sizes), sum(sizes))


# ---- orphans


def tip_at(numbers: Sequence[int], created_ms: Callable[[int], int | None], at_ms: int) -> int | None:
    """Return the highest manifest number that was created at or before `at_ms`, or None.

    `numbers` ascend. `created_ms` returns when a manifest was created, or None if that is unknown: such a manifest
    counts as later. Clocks of writers differ: if times do not ascend, the result is a manifest after which a later one
    was created.
    """

    def is_later(number: int) -> bool:
        number_ms = created_ms(number)
        return number_ms is None or number_ms > at_ms

    place = bisect.bisect_right(numbers, False, key=is_later)
    return None if place == 0 else numbers[place - 1]


def is_suspicious(found: ObjectCount, shard_bytes: int, limits: CollectionLimits) -> bool:
    """Return whether this many orphans are more likely a mistake than garbage."""
    return found.size_bytes > limits.guard_bytes and found.size_bytes > limits.guard_share * shard_bytes


# ---- manifests


def needs_look(listed: Listed, named: Set[str], kept: int) -> bool:
    """Return whether there may be something to collect, judged by a manifest that may be old."""
    return len(listed.manifests) > kept or any(key not in named for key in listed.objects)


def beyond_kept(listed: Listed, tip: int, kept: int) -> list[tuple[int, int]]:
    """Return (number, size in bytes) of the manifests older than the newest `kept`, ascending; never the tip."""
    return [each for each in listed.in_order() if each[0] <= tip - max(kept, 1)]
