"""What a listing of a shard shows an audit, and how reading it is split.

Owns: the listing with everything in it: manifests, objects, and what is none of these; and portions of work.
Does not own: the reading of listed keys (`storage_backends.shard_listing`), tasks and their order (`driver`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from batch.engine.root import Root
from storage_backends.formats import format_errors, names
from storage_backends.object_store import ListedObject
from storage_backends.shard_listing import ShardListing

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
