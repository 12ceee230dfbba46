"""Collects what a listing of a shard shows, and finds the orphans in it.

R4: an object may go only if its base is below the orphan floor of a manifest that does not name it: a process that
brings in such an object from then on is refused, because its base is below the floor. R9: a listing only shows
candidates. Callers list, move the orphan floor and delete.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence, Set

from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import ListedObject


class Listed:
    """The listed objects of one sequence of manifests: the manifests, and what they may name."""

    def __init__(self) -> None:
        self.manifests = array.array("Q")
        self._manifest_bytes = array.array("Q")
        # Key -> (base, size in bytes)
        self.objects: dict[str, tuple[int, int]] = {}

    def add_manifest(self, number: int, size_bytes: int) -> None:
        self.manifests.append(number)
        self._manifest_bytes.append(size_bytes)

    def in_order(self) -> list[tuple[int, int]]:
        """Return the numbers of the manifests, ascending, with their sizes: a listing has no order."""
        return sorted(zip(self.manifests, self._manifest_bytes, strict=True))

    def forget(self, deleted: Iterable[str]) -> None:
        """Forget objects that were deleted since."""
        for key in deleted:
            self.objects.pop(key, None)

    def unnamed(self, named: Set[str]) -> dict[str, tuple[int, int]]:
        """Return the objects that no manifest names, yet or ever."""
        return {key: found for key, found in self.objects.items() if key not in named}


class ShardListing:
    """Everything that was listed of one shard. `size_bytes` is the size of all of it."""

    def __init__(self, shard: int) -> None:
        self.size_bytes = 0
        self.shard = Listed()
        self.topics: dict[str, Listed] = {}
        self._prefix = names.shard_prefix(shard)

    def add(self, entries: Iterable[ListedObject]) -> None:
        """Add listed objects. A key outside the layout adds only its size."""
        for entry in entries:
            self.size_bytes += entry.size_bytes
            parts = entry.key.removeprefix(self._prefix).split("/")
            try:
                self._add(parts, entry)
            except format_errors.FormatError:
                continue

    def _add(self, parts: Sequence[str], entry: ListedObject) -> None:
        match parts:
            case ["manifest", _]:
                if (number := names.number_in(f"{self._prefix}manifest/", entry.key)) is not None:
                    self.shard.add_manifest(number, entry.size_bytes)
            case ["checkpoint", _]:
                self.shard.objects[entry.key] = names.number_of(entry.key), entry.size_bytes
            case ["topics", _, "manifest", _]:
                topic_id = names.topic_id_of(entry.key)
                if (number := names.number_in(f"{self._prefix}topics/{topic_id}/manifest/", entry.key)) is not None:
                    self._topic(topic_id).add_manifest(number, entry.size_bytes)
            case ["topics", _, "buckets" | "progress" | "properties", _]:
                found = names.number_of(entry.key), entry.size_bytes
                self._topic(names.topic_id_of(entry.key)).objects[entry.key] = found

    def _topic(self, topic_id: str) -> Listed:
        return self.topics.setdefault(topic_id, Listed())


def named_by_shard(manifest: ShardManifest) -> frozenset[str]:
    """Return the names of all objects that the manifest names."""
    checkpoints = (manifest.checkpoint, manifest.previous_checkpoint)
    live = {each.object.name for each in checkpoints if each is not None}
    return frozenset(live | {each.object.name for each in manifest.tombstones})


def orphans(listed: Listed, named: Set[str], floor: int) -> list[tuple[str, int]]:
    """Return keys and sizes of the objects that no manifest will ever name again.

    `named` are the names in a manifest that has the orphan floor `floor`, or was read after one that has.
    """
    return [(key, size_bytes) for key, (base, size_bytes) in listed.unnamed(named).items() if base < floor]
