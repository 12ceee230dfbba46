"""Defines the operations of garbage collection on manifests, of a shard and of a topic alike.

They carry no epoch: any process may collect. An object is deleted before the commit that drops its tombstone, and
deleting it once more succeeds. The daemon's `collection_pass` alone commits them; they stand here next to the other
operations on manifests.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

from storage_backends.formats.manifest import ShardManifest, TopicManifest

Collected = TypeVar("Collected", ShardManifest, TopicManifest)

_NO_MANIFEST = "there is no manifest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetFloor(Generic[Collected]):
    """The raising of the orphan floor.

    No manifest names again an object that was started from a manifest below the floor, unless a manifest names it now.
    The floor only rises.
    """

    floor: int

    def precondition(self, tip: Collected | None) -> str | None:
        if tip is None:
            return _NO_MANIFEST
        if self.floor <= tip.head.orphan_floor:
            return f"the orphan floor is {tip.head.orphan_floor}, it cannot become {self.floor}"
        if self.floor > tip.head.number:
            return f"the orphan floor cannot become {self.floor}, above manifest {tip.head.number}"
        return None

    def apply(self, tip: Collected | None) -> Collected:
        tip = _existing(tip)
        return dataclasses.replace(tip, head=dataclasses.replace(tip.head, orphan_floor=self.floor))

    def landed(self, tip: Collected) -> bool:
        return tip.head.orphan_floor >= self.floor


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectTombstones(Generic[Collected]):
    """The results of deleting the objects of some tombstones, by name.

    The tombstones of `deleted` and `given_up` are dropped; those of `failed` count one attempt more. If all attempts
    failed, the operation does not recognise itself, and counts them twice if it is committed again.
    """

    deleted: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(self._dropped | self.failed) < len(self.deleted) + len(self.failed) + len(self.given_up):
            raise ValueError("an object must be exactly one of deleted, failed and given up")

    @property
    def _dropped(self) -> frozenset[str]:
        return self.deleted | self.given_up

    def precondition(self, tip: Collected | None) -> str | None:
        if tip is None:
            return _NO_MANIFEST
        missing = (self._dropped | self.failed) - _buried(tip)
        return f"objects {sorted(missing)} are not tombstones" if missing else None

    def apply(self, tip: Collected | None) -> Collected:
        tip = _existing(tip)
        left = tuple(
            dataclasses.replace(tombstone, attempts=tombstone.attempts + 1)
            if tombstone.object.name in self.failed
            else tombstone
            for tombstone in tip.tombstones
            if tombstone.object.name not in self._dropped
        )
        return dataclasses.replace(tip, tombstones=left)

    def landed(self, tip: Collected) -> bool:
        return bool(self._dropped) and self._dropped.isdisjoint(_buried(tip))


def _existing(tip: Collected | None) -> Collected:
    if tip is None:
        raise ValueError(_NO_MANIFEST)
    return tip


def _buried(tip: ShardManifest | TopicManifest) -> set[str]:
    return {tombstone.object.name for tombstone in tip.tombstones}
