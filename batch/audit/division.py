"""Lists a shard for an audit, and divides manifests, log slots and objects into jobs with their costs.

The listing keeps everything: manifests, objects, and foreign keys. `driver` alone uses this module; it stands apart
because it only lists and computes: it runs no job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from batch.audit.log_audit import LogRun
from batch.audit.manifest_audit import ManifestRun
from batch.audit.object_audit import Item, ObjectRun, Role
from batch.audit.reading import Place, WallClock
from batch.audit.row_audit import LeftoversRun, Unnamed
from batch.engine.root import Root
from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.object_store import ListedObject
from storage_backends.shard_listing import Listed, ShardListing

T = TypeVar("T")

OBJECT_BYTES: Final = 64 << 10
"""The cost of asking for one more object, in bytes that could be read meanwhile"""

PORTION_BYTES_MIN: Final = 4 << 20
PORTION_BYTES_MAX: Final = 256 << 20


@dataclasses.dataclass(slots=True)
class ListedShard:
    """Everything that was listed of one shard.

    `foreign` are keys that no shard has, `astray` those among manifests that no manifest has.
    """

    shard: int
    listing: ShardListing
    modified_ms: dict[str, int] = dataclasses.field(default_factory=dict)
    foreign: list[str] = dataclasses.field(default_factory=list)
    astray: list[str] = dataclasses.field(default_factory=list)
    objects: int = 0

    def add(self, entry: ListedObject) -> None:
        self.objects += 1
        parts = entry.key.removeprefix(names.shard_prefix(self.shard)).split("/")
        try:
            if parts[0] == "topics":
                names.topic_id_of(entry.key)
        except format_errors.FormatError:
            self.foreign.append(entry.key)
            return
        folder = f"{entry.key.rpartition('/')[0]}/"
        match parts:
            case ["manifest", _] | ["topics", _, "manifest", _] if names.number_in(folder, entry.key) is not None:
                pass
            case ["checkpoint", _] | ["topics", _, "buckets" | "progress" | "properties", _] if _is_based(entry.key):
                self.modified_ms[entry.key] = entry.modified_ms
            case _:
                (self.astray if "manifest" in parts[:-1] else self.foreign).append(entry.key)
                return
        self.listing.add([entry])


def _is_based(key: str) -> bool:
    try:
        names.number_of(key)
    except format_errors.FormatError:
        return False
    return True


def list_shard(root: Root, shard: int, topic_ids: Sequence[str] | None) -> ListedShard:
    """List a shard, or some of its topics. Raises the store's errors."""
    found = ListedShard(shard, ShardListing(shard))
    if topic_ids is None:
        prefixes = [names.shard_prefix(shard)]
    else:
        prefixes = [names.topic_prefix(shard, topic_id) for topic_id in topic_ids]
    for prefix in prefixes:
        for entry in root.store.list(prefix):
            found.add(entry)
    return found


def portion_bytes(total_bytes: int, parallelism: int) -> int:
    """Return the size of a task (bytes).

    There are several tasks for each that runs at once, neither tiny nor so large that all wait for one.
    """
    return max(PORTION_BYTES_MIN, min(PORTION_BYTES_MAX, total_bytes // (4 * parallelism)))


def portions(items: Iterable[T], cost_bytes: Callable[[T], int], limit_bytes: int) -> Iterator[list[T]]:
    """Yield the items in their order, cut where a portion has reached the limit."""
    portion: list[T] = []
    reached = 0
    for item in items:
        portion.append(item)
        reached += cost_bytes(item)
        if reached >= limit_bytes:
            yield portion
            portion, reached = [], 0
    if portion:
        yield portion


MANIFESTS_BYTES: Final = 32 << 20
"""The size of a run of manifests (bytes); each run decodes once what its manifests share."""

LOG_RUN_SLOTS: Final = 2048
"""Log slots in a run. If logs are files, each run reads the files that it begins and ends in."""


class Job(Protocol):
    """A part of the work, as a value; its result has a `tally`."""

    def run(self, root: Root) -> Any: ...


def unnamed_items(place: Place, topic: str, found: Mapping[str, tuple[int, int]]) -> Iterator[Item]:
    """Yield the listed objects that no manifest names.

    `found` holds base and size by key. `topic` is the topic's name, "" if unknown.
    """
    for key, (_, size_bytes) in found.items():
        yield Item(place=place, key=key, size_bytes=size_bytes, role=Role.UNNAMED, topic=topic or place.topic_id)


def object_runs(
    items: Sequence[Item], *, clock: WallClock, overdue_ms: int, parallelism: int
) -> Iterator[tuple[Job, int]]:
    """Yield the objects in portions of about the same size."""

    def cost(item: Item) -> int:
        return OBJECT_BYTES + (item.size_bytes if item.in_full else 0)

    # The large ones come first: all tasks would wait for one that began with a large one late.
    ordered = sorted(items, key=cost, reverse=True)
    limit = portion_bytes(sum(map(cost, items)), parallelism)
    for portion in portions(ordered, cost, limit):
        job = ObjectRun(items=tuple(portion), clock=clock, overdue_ms=overdue_ms)
        yield job, sum(map(cost, portion))


def leftovers_runs(
    leftovers: Mapping[int, Sequence[tuple[Place, tuple[Unnamed, ...]]]], *, clock: WallClock, orphan_age_ms: int
) -> Iterator[tuple[Job, int]]:
    """Yield the unnamed objects by shard, so that a shard's sections are read once."""
    for shard, objects in leftovers.items():
        job = LeftoversRun(
            shard=shard,
            objects=tuple(objects),
            clock=clock,
            orphan_age_ms=orphan_age_ms,
        )
        yield job, PORTION_BYTES_MIN


def manifest_runs(place: Place, listed: Listed) -> Iterator[tuple[Job, int]]:
    """Yield the manifests of a place in runs; each knows the one before its first."""
    ordered = listed.in_order()
    before: int | None = None
    for portion in portions(ordered, _cost, MANIFESTS_BYTES):
        numbers = tuple(number for number, _ in portion)
        is_last = numbers[-1] == ordered[-1][0]
        job = ManifestRun(place=place, numbers=numbers, before=before, is_last=is_last)
        yield job, sum(map(_cost, portion))
        before = numbers[-1]


def log_runs(log_id: str, numbers: Sequence[int]) -> Iterator[tuple[LogRun, int]]:
    """Yield the slots of a log, by ascending number, in runs; each knows the one before its first."""
    for first in range(0, len(numbers), LOG_RUN_SLOTS):
        portion = tuple(numbers[first : first + LOG_RUN_SLOTS])
        before = numbers[first - 1] if first else None
        yield LogRun(log_id=log_id, numbers=portion, before=before), len(portion) * OBJECT_BYTES


def _cost(numbered: tuple[int, int]) -> int:
    return OBJECT_BYTES // 4 + numbered[1]


def named_items(
    tip: TopicManifest | ShardManifest | None, place: Place, is_sampled: Callable[[], bool]
) -> Iterator[Item]:
    """Yield every object that the manifest names."""
    if tip is None:
        return
    for each in tip.tombstones:
        yield Item(
            place=place,
            key=each.object.name,
            size_bytes=each.object.size_bytes,
            role=Role.TOMBSTONE,
            topic=tip.topic if isinstance(tip, TopicManifest) else "",
            reference=each.object,
            delete_after_ms=each.delete_after_ms,
        )
    if isinstance(tip, ShardManifest):
        yield from _checkpoints_of(tip, place)
        return
    for live in tip.live:
        yield Item(
            place=place,
            key=live.object.name,
            size_bytes=live.object.size_bytes,
            role=Role.LIVE,
            topic=tip.topic,
            topic_name=tip.topic,
            live=live,
            reference=live.object,
            in_full=live.quarantined or is_sampled(),
        )
    for reference in tip.beside_buckets:
        yield Item(
            place=place,
            key=reference.name,
            size_bytes=reference.size_bytes,
            role=Role.LIVE,
            topic=tip.topic,
            reference=reference,
        )


def _checkpoints_of(tip: ShardManifest, place: Place) -> Iterator[Item]:
    for each in (tip.checkpoint, tip.previous_checkpoint):
        if each is not None:
            yield Item(
                place=place,
                key=each.object.name,
                size_bytes=each.object.size_bytes,
                role=Role.LIVE,
                reference=each.object,
                checkpoint=each,
            )
