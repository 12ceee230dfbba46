"""The merge of neighbouring live buckets, as an operation on a topic's manifest.

Owns: its precondition and effect, and which buckets are neighbours.
Does not own: the rows of the merged bucket (`formats.merge`), which buckets are merged, committing (`commit`).

It carries no epoch: any process may merge. What the owner commits meanwhile either leaves the sources live, and what
it says of them counts for the merged bucket as far as it was copied; or lets one of them leave, and the merge is
refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from storage_backends import topic_manifest
from storage_backends.formats import merge
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import LiveBucket, Progress, TopicManifest
from storage_backends.formats.position_bitmap import PositionSet


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MergeSource:
    """A bucket that is merged. `kept`: that of its own metadata. `dropped`: the positions that were not copied."""

    name: str
    kept: tuple[KeptRows, ...]
    dropped: PositionSet


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Merge:
    """`bucket` takes the place of the sources, neighbours in one index; None when no row of them is left.

    `dropped_hash`: of the rows that were not copied; they must be gone on the tip too. `incarnation`: the topic's, when
    it was planned. `progress_of`: the progress of a manifest, wherever that has it; may raise the store's errors. The
    sources may be deleted after `delete_after_ms` (Unix time).
    """

    sources: tuple[MergeSource, ...]
    bucket: LiveBucket | None
    dropped_hash: tuple[int, int]
    incarnation: int
    progress_of: Callable[[TopicManifest], Progress]
    delete_after_ms: int

    def __post_init__(self) -> None:
        if not self.sources or len({source.name for source in self.sources}) < len(self.sources):
            raise ValueError(f"a merge has different sources, not {[source.name for source in self.sources]}")

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return topic_manifest.NO_TOPIC
        if tip.deleted:
            return topic_manifest.TOPIC_DELETED
        if tip.incarnation != self.incarnation:
            return f"the incarnation is {tip.incarnation}, not {self.incarnation}"
        merging = self._merging(tip)
        missing = {source.name for source in self.sources} - {live.object.name for live in merging}
        if missing:
            return f"buckets {sorted(missing)} are not live"
        reasons = (self._not_neighbours(tip, merging), self._not_bringable(tip, merging), self._not_conserved(merging))
        return next((reason for reason in reasons if reason is not None), None) or self._not_gone(tip)

    def _merging(self, tip: TopicManifest) -> list[LiveBucket]:
        """The sources that are live."""
        names = {source.name for source in self.sources}
        return [bucket for bucket in tip.live if bucket.object.name in names]

    def _not_neighbours(self, tip: TopicManifest, merging: Sequence[LiveBucket]) -> str | None:
        quarantined = sorted(bucket.object.name for bucket in merging if bucket.quarantined)
        if quarantined:
            return f"buckets {quarantined} are quarantined"
        indexes = {bucket.subscription_id for bucket in merging}
        if len(indexes) > 1:
            return f"the buckets are of several indexes: {sorted(indexes)}"
        names = {bucket.object.name for bucket in merging}
        order = [bucket.object.name for bucket in adjacent_order(tip.live)]
        first = next(place for place, name in enumerate(order) if name in names)
        between = sorted(set(order[first : first + len(names)]) - names)
        return f"buckets {between} lie between the buckets" if between else None

    def _not_bringable(self, tip: TopicManifest, merging: Sequence[LiveBucket]) -> str | None:
        if self.bucket is None:
            return None
        if self.bucket.subscription_id != merging[0].subscription_id:
            return f"the bucket is of index {self.bucket.subscription_id}, its sources of {merging[0].subscription_id}"
        return topic_manifest.not_bringable(tip, self.bucket.object)

    def _not_conserved(self, merging: Sequence[LiveBucket]) -> str | None:
        rows = sum(bucket.rows for bucket in merging)
        copied = 0 if self.bucket is None else self.bucket.rows
        dropped = sum(len(source.dropped) for source in self.sources)
        if rows != copied + dropped:
            return f"the sources have {rows} rows, {copied} were copied and {dropped} dropped"
        written = (0, 0) if self.bucket is None else (self.bucket.hash_low, self.bucket.hash_high)
        try:
            merge.check_conserved(merging, written, self.dropped_hash)
        except merge.NotConserved as error:
            return str(error)
        return None

    def _not_gone(self, tip: TopicManifest) -> str | None:
        if not any(source.dropped for source in self.sources):
            return None
        progress = merge.concerning(self.progress_of(tip), ((source.name, source.kept) for source in self.sources))
        for source in self.sources:
            waiting = source.dropped - merge.bits_of(source.name, source.kept, progress).gone
            if waiting:
                return f"{len(waiting)} rows of bucket {source.name} were dropped and are not gone"
        return None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = topic_manifest.existing(tip)
        merging = self._merging(tip)
        made: tuple[LiveBucket, ...] = ()
        if self.bucket is not None:
            level = 1 + max(source.level for source in merging)
            made = (dataclasses.replace(self.bucket, level=level),)
        place = tip.live.index(merging[0])
        names = {source.object.name for source in merging}
        after = tuple(bucket for bucket in tip.live[place:] if bucket.object.name not in names)
        return topic_manifest.with_live(tip, (*tip.live[:place], *made, *after), self.delete_after_ms)

    def landed(self, tip: TopicManifest) -> bool:
        """A merge that left no bucket shows nothing of itself: committed again, it finds no sources and is refused."""
        return self.bucket is not None and self.bucket.object.name in topic_manifest.names_in(tip)


def adjacent_order(live: Iterable[LiveBucket]) -> list[LiveBucket]:
    """The buckets that may be merged, neighbours side by side: those of one index together, by ledgers and name."""

    def place(bucket: LiveBucket) -> tuple[int, int, int, str]:
        return bucket.subscription_id, bucket.first_ledger_id, bucket.last_ledger_id, bucket.object.name

    return sorted((bucket for bucket in live if not bucket.quarantined), key=place)
