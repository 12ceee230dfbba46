"""What becomes of objects, by what has landed: a merge keeps every row, and nothing is deleted that may be needed.

Owns: the rules for merges that land, for deletions of objects that manifests name, and for what leaves the tombstones
of a manifest.
Does not own: which rows there are (`oracle`), slots of logs (`log_truth`), and when things are deleted.

Time is in none of these rules: at its earliest moment collection must be as harmless as a day later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from storage_backends.formats import bucket_format, index_ids, manifest, names, position_bitmap
from tests.simulation.given_properties import StoredProperties
from tests.simulation.history import History

Position = tuple[int, int]
# A row that a bucket object holds: its position, and when it is due.
StoredRow = tuple[Position, int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a bucket object holds. `kept`: by source, the positions that a merge copied."""

    rows: tuple[StoredRow, ...]
    kept: Mapping[str, frozenset[Position]]

    @property
    def positions(self) -> frozenset[Position]:
        return frozenset(position for position, _ in self.rows)


@dataclasses.dataclass(slots=True)
class _Sequence:
    """The newest manifest of a shard or topic: the objects that it needs, its tombstones, and its orphan floor."""

    needed: frozenset[str] = frozenset()
    buried: frozenset[str] = frozenset()
    floor: int = 0


class Objects:
    """Told of everything that lands, and of deletions before they take effect."""

    def __init__(self, history: History) -> None:
        self.buckets: dict[str, Stored] = {}
        """Every bucket object that was ever written, by key."""
        self.unreadable: set[Position] = set()
        """What damaged bucket objects hold: of these rows it is not known any more whether they are due."""
        self.properties = StoredProperties()
        self._history = history
        self._sequences: dict[str, _Sequence] = {}
        self._ever_buried: set[str] = set()
        self._deleted: set[str] = set()
        self._given_up: set[str] = set()

    # ---- what lands

    def bucket_written(self, key: str, body: bytes) -> None:
        metadata, rows = bucket_format.decode_bucket(body)
        columns = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
        self.buckets[key] = Stored(
            tuple(((ledger_id, entry_id), time) for ledger_id, entry_id, time in zip(*columns, strict=True)),
            {each.source: frozenset(positions_of(each.positions)) for each in metadata.kept},
        )

    def damaged(self, key: str) -> None:
        if key in self.buckets:
            self.unreadable |= self.buckets[key].positions

    def given_up(self, key: str) -> None:
        """An object is recorded as one that cannot be deleted."""
        self._given_up.add(key.removeprefix(names.dead_objects_prefix()))

    def shard_landed(self, landed: manifest.ShardManifest) -> None:
        checkpoints = [each for each in (landed.checkpoint, landed.previous_checkpoint) if each is not None]
        needed = frozenset(each.object.name for each in checkpoints)
        self._follow(names.shard_prefix(landed.shard), needed, landed)

    def topic_landed(self, shard: int, before: manifest.TopicManifest | None, landed: manifest.TopicManifest) -> None:
        needed = {live.object.name for live in landed.live}
        needed |= {each.name for each in (landed.progress_object, landed.properties_object) if each is not None}
        self._follow(names.topic_prefix(shard, landed.topic_id), frozenset(needed), landed)
        for flaw in self.properties.flaws(landed):
            self._history.breach(f"manifest {landed.head.number} of topic {landed.topic}: {flaw}")
        indexes = {0, *(each.subscription_id for each in landed.subscriptions)}
        for live in landed.live:
            if index_ids.subscription_of(live.subscription_id) not in indexes:
                self._history.breach(f"bucket {live.object.name} is live, and its subscription is no more")
        if before is None:
            return
        known = {live.object.name for live in before.live}
        for live in landed.live:
            if live.level and live.object.name not in known:
                self._check_merge(live.object.name, before, known - needed)

    def _follow(
        self, prefix: str, needed: frozenset[str], landed: manifest.ShardManifest | manifest.TopicManifest
    ) -> None:
        before = self._sequences.get(prefix, _Sequence())
        buried = frozenset(each.object.name for each in landed.tombstones)
        for name in sorted(before.buried - buried - self._deleted - self._given_up):
            self._history.breach(f"the tombstone of {name} is dropped, and nobody has deleted it")
        for name in sorted(needed & self._deleted):
            self._history.breach(f"{name} is named by a manifest, and was deleted")
        for name in sorted(before.needed - needed - buried - before.buried):
            self._history.breach(f"{name} leaves its manifest without a tombstone")
        self._ever_buried |= buried
        self._sequences[prefix] = _Sequence(needed, buried, landed.head.orphan_floor)

    def _check_merge(self, name: str, before: manifest.TopicManifest, sources: set[str]) -> None:
        """Each row of the sources is in the merged bucket once, or was gone at the manifest before."""
        merged = self.buckets[name]
        stored = [row for source in sorted(sources) for row in self.buckets[source].rows]
        if len(set(merged.positions)) < len(merged.rows):
            self._history.breach(f"merged bucket {name} holds a position twice")
        if invented := sorted(set(merged.rows) - set(stored)):
            self._history.breach(f"merged bucket {name} holds {invented}, and none of its sources does")
        if before.progress_object is not None:
            return
        for source in sorted(sources):
            gone = self._gone(source, before.progress or manifest.Progress())
            held = self.buckets[source].positions
            kept = merged.kept.get(source, frozenset())
            if lost := sorted(held - kept - gone):
                self._history.breach(f"merged bucket {name} lacks {lost} of {source}, which were not gone")
            for former, positions in self.buckets[source].kept.items():
                if forgotten := sorted(positions & kept - merged.kept.get(former, frozenset())):
                    self._history.breach(f"merged bucket {name} does not say that {forgotten} come from {former}")
            if kept - held or kept - merged.positions:
                self._history.breach(f"merged bucket {name} kept {sorted(kept)} of {source}, which has {sorted(held)}")

    def _gone(self, name: str, progress: manifest.Progress) -> set[Position]:
        """What a manifest's progress says is gone of a bucket, by its own name and by those of its sources."""
        kept = self.buckets[name].kept
        gone: set[Position] = set()
        for part in progress.buckets:
            said = set(positions_of(part.gone))
            if part.bucket == name:
                gone |= said
            gone |= said & kept.get(part.bucket, frozenset())
        return gone

    # ---- what is deleted

    def deleting(self, key: str) -> None:
        """Somebody deletes an object, or does so again."""
        parts = key.split("/")
        if parts[0] != "shards":
            return
        if "manifest" in parts:
            self._history.breach(f"manifest {key} is deleted, and is young")
        elif key not in self._deleted:
            self._check_object(key, parts)
        self._deleted.add(key)

    def _check_object(self, key: str, parts: list[str]) -> None:
        prefix = "/".join(parts[:4] if parts[2] == "topics" else parts[:2]) + "/"
        sequence = self._sequences.get(prefix, _Sequence())
        if key in sequence.needed:
            self._history.breach(f"{key} is deleted, and the newest manifest names it")
        elif key not in self._ever_buried and names.number_of(key) >= sequence.floor:
            self._history.breach(f"{key} is deleted as an orphan, and the orphan floor is {sequence.floor}")


def positions_of(stored: tuple[position_bitmap.PositionBitmap, ...]) -> Iterator[Position]:
    ledger_id, entry_id = position_bitmap.positions_of(stored)
    return zip(ledger_id.tolist(), entry_id.tolist(), strict=True)
