"""What is in a root on a local directory, seen past every process: bucket objects, and the manifests that name them.

Owns: reading it. Does not own: who wrote it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from storage_backends import topic_manifest
from storage_backends.formats.manifest import TopicManifest
from storage_backends.local_directory import LocalDirectory

_TRANSIENT = {"logs", ".logs", "daemons", "checkpoint", ".locks", ".temporary"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """`files`: of bucket objects, by the last part of the key. `live`, `buried`: what tips of topics name, alike;
    `merged`: those of `live` that a merge made.
    """

    files: frozenset[str]
    live: frozenset[str]
    merged: frozenset[str]
    buried: frozenset[str]

    @property
    def orphans(self) -> frozenset[str]:
        """What no manifest names."""
        return self.files - self.live - self.buried

    @property
    def lost(self) -> frozenset[str]:
        """What is served from, and is not there."""
        return self.live - self.files


def look(root: Path) -> Stored:
    """As of now; the tips first, so that what is on its way into one counts as an orphan, never as lost."""
    found = tips(root)
    live = {last_part(bucket.object.name) for tip in found for bucket in tip.live}
    merged = {last_part(bucket.object.name) for tip in found for bucket in tip.live if bucket.level}
    buried = {last_part(tombstone.object.name) for tip in found for tombstone in tip.tombstones}
    files = {path.name for path in root.glob("shards/*/topics/*/buckets/*") if not path.name.startswith(".")}
    return Stored(frozenset(files), frozenset(live), frozenset(merged), frozenset(buried))


def tips(root: Path) -> list[TopicManifest]:
    """The newest manifest of each topic."""
    store = LocalDirectory(root)
    found = []
    for folder in sorted(root.glob("shards/*/topics/*")):
        shard, topic_id = int(folder.parent.parent.name), folder.name
        log = topic_manifest.topic_log(
            store, shard, topic_id, monotonic=lambda: 0.0, sleep=lambda _: None, jitter=lambda: 0.5, new_id=lambda: ""
        )
        tip = log.read_tip()
        if tip is not None:
            found.append(tip.manifest)
    return found


def everything(root: Path) -> frozenset[str]:
    """Every file that a process could leave behind, without those of the living daemon's log and heartbeat, and
    without temporaries: those of a dead process go when another one opens the root.
    """
    return frozenset(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and not _TRANSIENT & set(path.relative_to(root).parts)
    )


def last_part(key: str) -> str:
    return key.rpartition("/")[2]
