"""Which jobs an audit has, and what each costs.

Owns: the division of manifests, log slots and objects into jobs, and which objects a manifest names. Pure.
Does not own: what a job does (`manifest_task`, `log_task`, `object_task`, `row_tasks`), and which jobs make a task
(`driver`).

What a listing of a shard shows an audit, and how reading it is split.

Owns: the listing with everything in it: manifests, objects, and what is none of these; and portions of work.
Does not own: the reading of listed keys (`storage_backends.shard_listing`), tasks and their order (`driver`).
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
"""What asking for one more object costs, in bytes that could be read meanwhile."""

PORTION_BYTES_MIN: Final = 4 << 20
PORTION_BYTES_MAX: Final = 256 << 20


@dataclasses.dataclass(slots=True)
class ListedShard:
    """Everything that was listed of one shard. `foreign`: keys that are of nothing that a shard has; `astray`: those
    that lie among manifests, where they keep the newest one from being read.
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
        try:
            number = names.number_of(entry.key)
            is_numbered = entry.key == f"{entry.key.rpartition('/')[0]}/{number:020d}"
            match parts:
                case ["manifest", _] | ["topics", _, "manifest", _] if not is_numbered:
                    self.astray.append(entry.key)
                    return
                case ["manifest", _] | ["topics", _, "manifest", _]:
                    pass
                case ["checkpoint", _] | ["topics", _, "buckets" | "progress" | "properties", _]:
                    self.modified_ms[entry.key] = entry.modified_ms
                case _:
                    self.foreign.append(entry.key)
                    return
        except format_errors.FormatError:
            (self.astray if "manifest" in parts[:-1] else self.foreign).append(entry.key)
            return
        self.listing.add([entry])


def list_shard(root: Root, shard: int, topic_ids: Sequence[str] | None) -> ListedShard:
    """Lists a shard, or some of its topics. Raises the store's errors."""
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
    """How much makes a task: several for each that runs at once, neither tiny nor so large that one is waited for."""
    return max(PORTION_BYTES_MIN, min(PORTION_BYTES_MAX, total_bytes // (4 * parallelism)))


def portions(items: Iterable[T], cost_bytes: Callable[[T], int], limit_bytes: int) -> Iterator[list[T]]:
    """The items in their order, cut where a portion has reached the limit."""
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
"""So much of manifests makes a run: what they have in common is decoded once in each."""

LOG_RUN_SLOTS: Final = 2048
"""So many log slots make a run. Where logs are files, each run reads the files that it begins and ends in."""


class Job(Protocol):
    """A part of the work, as a value; its result has a `tally`."""

    def run(self, root: Root) -> Any: ...


def unnamed_items(place: Place, topic: str, found: Mapping[str, tuple[int, int]]) -> Iterator[Item]:
    """Objects that were listed and are not named, by key: base and size. `topic`: its name, "" if not known."""
    for key, (_, size_bytes) in found.items():
        yield Item(place=place, key=key, size_bytes=size_bytes, role=Role.UNNAMED, topic=topic or place.topic_id)


def object_runs(
    items: Sequence[Item], *, clock: WallClock, overdue_ms: int, parallelism: int
) -> Iterator[tuple[Job, int]]:
    """The objects in portions of like size."""

    def cost(item: Item) -> int:
        return OBJECT_BYTES + (item.size_bytes if item.in_full else 0)

    # The large ones first: whoever begins with one late is waited for.
    ordered = sorted(items, key=cost, reverse=True)
    limit = portion_bytes(sum(map(cost, items)), parallelism)
    for portion in portions(ordered, cost, limit):
        job = ObjectRun(items=tuple(portion), clock=clock, overdue_ms=overdue_ms)
        yield job, sum(map(cost, portion))


def leftovers_runs(
    leftovers: Mapping[int, Sequence[tuple[Place, tuple[Unnamed, ...]]]], *, clock: WallClock, orphan_age_ms: int
) -> Iterator[tuple[Job, int]]:
    """What is unnamed, by shard: its sections are read once."""
    for shard, objects in leftovers.items():
        job = LeftoversRun(
            shard=shard,
            objects=tuple(objects),
            clock=clock,
            orphan_age_ms=orphan_age_ms,
        )
        yield job, PORTION_BYTES_MIN


def manifest_runs(place: Place, listed: Listed) -> Iterator[tuple[Job, int]]:
    """The manifests of a place in runs; each knows the one before its first."""
    ordered = listed.in_order()
    before: int | None = None
    for portion in portions(ordered, _cost, MANIFESTS_BYTES):
        numbers = tuple(number for number, _ in portion)
        is_last = numbers[-1] == ordered[-1][0]
        job = ManifestRun(place=place, numbers=numbers, before=before, is_last=is_last)
        yield job, sum(map(_cost, portion))
        before = numbers[-1]


def log_runs(log_id: str, numbers: Sequence[int]) -> Iterator[tuple[LogRun, int]]:
    """The slots of a log, by ascending number, in runs; each knows the one before its first."""
    for first in range(0, len(numbers), LOG_RUN_SLOTS):
        portion = tuple(numbers[first : first + LOG_RUN_SLOTS])
        before = numbers[first - 1] if first else None
        yield LogRun(log_id=log_id, numbers=portion, before=before), len(portion) * OBJECT_BYTES


def _cost(numbered: tuple[int, int]) -> int:
    return OBJECT_BYTES // 4 + numbered[1]


def named_items(
    tip: TopicManifest | ShardManifest | None, place: Place, is_sampled: Callable[[], bool]
) -> Iterator[Item]:
    """Every object that the manifest names."""
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
