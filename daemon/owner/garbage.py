"""Deletes what lies beside one sequence of manifests, a shard's or a topic's, and is not needed any more.

    tombstones   read the tip, delete what is past its grace, then drop the tombstones: a crash between the two deletes
                 once more, and that there is nothing left is success
    orphans      commit the floor, and only then read which objects the manifest names: R4
    manifests    those with enough later ones that are old enough: R3

Owns: these orders, for one sequence, in one thread; giving up what cannot be deleted, and trying that again.
Does not own: the decisions (`garbage_rules`), slots of logs (`daemon.owner.log_collection`), listing and when it is
done (`daemon.owner.collection_pass`).

Any process may do it, also several at once: its commits carry no epoch, and each holds for every owner.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final, Generic, TypeVar

from daemon.core import garbage_rules
from daemon.core.garbage_rules import NOTHING_DONE, Limits, Summary
from daemon.core.object_count import NOTHING, ObjectCount
from storage_backends import commit, manifest_collection, object_store, shard_listing, topic_manifest
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import DeadObject, ShardManifest, Tombstone, TopicManifest
from storage_backends.shard_listing import Listed

log = logging.getLogger(__name__)

BATCH: Final = 500
"""Objects that are deleted in one step: the threads have other work."""

DEADLINE_S: Final = 10.0
"""So long a step tries to find out what became of its commit; the next pass tries again."""

ERROR_CHARACTERS_MAX: Final = 500
"""So much of what the store said stands in the record of an object that was given up."""


M = TypeVar("M", ShardManifest, TopicManifest)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of objects that were to be deleted: their names. `failed` are tried again, `given_up` are not."""

    deleted: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()

    def among(self, known: frozenset[str]) -> Outcome:
        """Returns what became of these objects only."""
        return Outcome(self.deleted & known, self.failed & known, self.given_up & known)

    @property
    def names(self) -> frozenset[str]:
        return self.deleted | self.failed | self.given_up


@dataclasses.dataclass(frozen=True, slots=True)
class Kind(Generic[M]):
    """What there is to know of a kind of manifest. `is_over`: nothing will be named there before it begins anew."""

    named: Callable[[M], Set[str]]
    is_over: Callable[[M], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """What a collector works with. `executor` deletes in parallel and must not be the one that runs the collector.
    `writer`, `now_ms`: for the manifests; times decide nothing that would be lost with them.
    """

    store: object_store.ObjectStore
    executor: concurrent.futures.Executor
    now_ms: Callable[[], int]
    writer: str
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Step(Generic[M]):
    """What a step did. `tip`: the newest manifest that it saw. `more`: the same step has more to do."""

    tip: commit.Tip[M] | None
    summary: Summary = NOTHING_DONE
    deleted: frozenset[str] = frozenset()
    more: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Orphans(Generic[M]):
    """Keys and sizes of the objects that no manifest will ever name."""

    tip: commit.Tip[M] | None
    found: Sequence[tuple[str, int]] = ()
    count: ObjectCount = NOTHING


class Collector(Generic[M]):
    """The collector of one sequence of manifests. Each method may be repeated after any error.

    With `dry_run` nothing is deleted and nothing committed; what would be is counted.
    """

    def __init__(self, manifests: commit.ManifestLog[M], kind: Kind[M], tools: Tools) -> None:
        self._log: commit.ManifestLog[M] = manifests
        self._kind: Kind[M] = kind
        self._tools = tools
        self._created_ms: dict[int, int | None] = {}

    # ---- tombstones

    def collect_tombstones(self, warm: commit.Tip[M] | None, *, dry_run: bool = False) -> Step[M]:
        """Deletes some of the objects that left a manifest and are past their grace.

        Raises the store's errors, Damaged among them, and CommitOutcomeUnknown.
        """
        tip = self._log.read_tip(warm)
        if tip is None:
            return Step(None)
        due = garbage_rules.due(tip.manifest.tombstones, self._tools.now_ms())
        if dry_run or not due:
            return Step(tip, Summary(tombstones=garbage_rules.count(due)))
        batch = due[:BATCH]
        outcome = self._outcome(batch, self._delete([each.object.name for each in batch]))
        tip = self._drop(outcome, tip)
        return Step(tip, _summary(batch, outcome), outcome.deleted, more=len(due) > len(batch))

    def _outcome(self, tombstones: Sequence[Tombstone], failures: Mapping[str, str]) -> Outcome:
        deleted, failed, given_up = set(), set(), set()
        for tombstone in tombstones:
            name = tombstone.object.name
            if name not in failures:
                deleted.add(name)
            elif tombstone.attempts + 1 >= self._tools.limits.attempts_max and self._record(tombstone, failures[name]):
                given_up.add(name)
            else:
                failed.add(name)
        return Outcome(frozenset(deleted), frozenset(failed), frozenset(given_up))

    def _record(self, tombstone: Tombstone, error: str) -> bool:
        """Records that an object is given up; whether that is durable. The record comes first: without it nobody would
        know of the object once its tombstone is dropped.
        """
        given_up = DeadObject(
            object=tombstone.object.name,
            size_bytes=tombstone.object.size_bytes,
            attempts=tombstone.attempts + 1,
            error=error[:ERROR_CHARACTERS_MAX],
            given_up_ms=self._tools.now_ms(),
        )
        key = names.dead_object_key(given_up.object)
        try:
            self._create(key, manifest.encode_dead_object(given_up))
        except object_store.StoreError as failure:
            log.warning("object %s is not given up yet: %s", given_up.object, failure)
            return False
        log.error(
            "object %s cannot be deleted and is given up attempts=%d: %s", given_up.object, given_up.attempts, error
        )
        return True

    def _create(self, key: str, body: bytes) -> None:
        """That there is one already is success. Raises the store's errors when it is not known that there is one."""
        try:
            self._tools.store.put_if_absent(key, body, metadata={})
        except object_store.AlreadyExists:
            # 409 is answered also while nobody has won.
            self._tools.store.head(key)

    def _drop(self, outcome: Outcome, tip: commit.Tip[M]) -> commit.Tip[M]:
        """Drops the tombstones of what is deleted or given up, and counts the attempts of what is neither."""
        while outcome.names:
            operation: manifest_collection.CollectTombstones[M] = manifest_collection.CollectTombstones(
                deleted=outcome.deleted, failed=outcome.failed, given_up=outcome.given_up
            )
            try:
                return self._commit(operation, tip)
            except commit.Refused as refused:
                if refused.tip is None:
                    raise
                # Another collector has dropped some of them.
                tip = refused.tip
                outcome = outcome.among(frozenset(each.object.name for each in tip.manifest.tombstones))
        return tip

    # ---- orphans

    def find_orphans(
        self, listed: Listed, warm: commit.Tip[M] | None, *, given_up: frozenset[str], dry_run: bool = False
    ) -> Orphans[M]:
        """The orphans among what was listed; the floor is moved for it. `given_up`: left alone.

        Raises the store's errors, Damaged among them, and CommitOutcomeUnknown.
        """
        tip = self._log.read_tip(warm)
        if tip is None:
            return Orphans(None)
        if not listed.unnamed(self._kind.named(tip.manifest) | given_up):
            return Orphans(tip)
        floor = self._tip_at(listed, tip, self._tools.now_ms() - self._tools.limits.orphan_age_ms)
        if floor > tip.manifest.head.orphan_floor and not dry_run:
            tip = self._move_floor(floor, tip)
        # Named is what a manifest names that was read after the floor: who brings in an object from here on is refused.
        floor = max(floor, tip.manifest.head.orphan_floor) if dry_run else tip.manifest.head.orphan_floor
        named = self._kind.named(tip.manifest) | given_up
        found = shard_listing.orphans(listed, named, floor)
        return Orphans(tip, found, _count(found))

    def _move_floor(self, floor: int, tip: commit.Tip[M]) -> commit.Tip[M]:
        try:
            return self._commit(manifest_collection.SetFloor(floor=floor), tip)
        except commit.Refused as refused:
            if refused.tip is None:
                raise
            # Another collector has moved it further, and its manifest was read after that.
            return refused.tip

    def delete_orphans(self, found: Sequence[tuple[str, int]]) -> Summary:
        """Deletes objects that `find_orphans` found."""
        failures = self._delete([key for key, _ in found])
        return Summary(
            orphans=_count(each for each in found if each[0] not in failures),
            failed=_count(each for each in found if each[0] in failures),
        )

    # ---- manifests

    def collect_manifests(self, listed: Listed, tip: commit.Tip[M], *, dry_run: bool = False) -> Summary:
        """Deletes listed manifests that are neither among those that are kept nor young. `tip`: read after the listing.

        Raises the store's errors.
        """
        limits = self._tools.limits
        kept = 1 if self._kind.is_over(tip.manifest) else limits.manifests_kept
        beyond = garbage_rules.beyond_kept(listed, tip.number, kept)
        if not beyond:
            return NOTHING_DONE
        oldest_kept = self._tip_at(listed, tip, self._tools.now_ms() - limits.manifests_age_ms)
        sizes = {self._log.key(number): size_bytes for number, size_bytes in beyond if number < oldest_kept}
        keys = list(sizes)
        failures: dict[str, str] = {}
        if not dry_run:
            for start in range(0, len(keys), BATCH):
                failures |= self._delete(keys[start : start + BATCH])
        return Summary(
            manifests=_count((key, sizes[key]) for key in keys if key not in failures),
            failed=_count((key, sizes[key]) for key in failures),
        )

    # ---- reading, deleting, committing

    def _tip_at(self, listed: Listed, tip: commit.Tip[M], at_ms: int) -> int:
        """The number of the manifest that was the tip then; 0 when none is left that is so old."""
        if tip.manifest.head.created_ms <= at_ms:
            return tip.number
        numbers = [number for number, _ in listed.in_order() if number < tip.number]
        return garbage_rules.tip_at(numbers, self._created_at_ms, at_ms) or 0

    def _created_at_ms(self, number: int) -> int | None:
        """When a manifest before the tip was created; None when it is damaged."""
        if number not in self._created_ms:
            self._created_ms[number] = self._read_created_ms(number)
        return self._created_ms[number]

    def _read_created_ms(self, number: int) -> int | None:
        key = self._log.key(number)
        try:
            return self._log.codec.decode(self._tools.store.get(key)).head.created_ms
        except object_store.NotFound:
            # Another collector has deleted it: it was old.
            return 0
        except (object_store.Damaged, format_errors.FormatError) as error:
            log.warning("manifest %s cannot be read: %s", key, error)
            return None

    def _delete(self, keys: Iterable[str]) -> dict[str, str]:
        """Deletes objects; by key what the store said of those that it did not delete."""
        return dict(failure for failure in self._tools.executor.map(self._try_to_delete, keys) if failure is not None)

    def _try_to_delete(self, key: str) -> tuple[str, str] | None:
        try:
            self._tools.store.delete(key)
        except object_store.StoreError as error:
            log.warning("object %s is not deleted yet: %s", key, error)
            return key, str(error)
        return None

    def _commit(self, operation: commit.Operation[M], tip: commit.Tip[M]) -> commit.Tip[M]:
        return commit.commit(
            self._log,
            operation,
            writer=self._tools.writer,
            created_ms=self._tools.now_ms(),
            warm=tip,
            deadline_s=DEADLINE_S,
        )


def _summary(batch: Iterable[Tombstone], outcome: Outcome) -> Summary:
    by_name = {each.object.name: each for each in batch}
    return Summary(
        tombstones=garbage_rules.count(by_name[name] for name in outcome.deleted),
        failed=garbage_rules.count(by_name[name] for name in outcome.failed),
        given_up=garbage_rules.count(by_name[name] for name in outcome.given_up),
    )


def _count(objects: Iterable[tuple[str, int]]) -> ObjectCount:
    sizes = [size_bytes for _, size_bytes in objects]
    return ObjectCount(len(sizes), sum(sizes))


TOPIC: Final[Kind[TopicManifest]] = Kind(named=topic_manifest.names_in, is_over=lambda newest: newest.deleted)
SHARD: Final[Kind[ShardManifest]] = Kind(named=shard_listing.named_by_shard, is_over=lambda newest: False)


# ---- objects that were given up


def given_up_in(store: object_store.ObjectStore, prefix: str) -> frozenset[str]:
    """The objects under the prefix that were given up. Raises the store's errors."""
    start = names.dead_objects_prefix()
    return frozenset(entry.key.removeprefix(start) for entry in store.list(f"{start}{prefix}"))


def retry_given_up(
    store: object_store.ObjectStore, name: str, is_live: Callable[[str], bool], *, dry_run: bool = False
) -> Summary:
    """Deletes an object that was given up, and then the record of it.

    `is_live`: whether the manifest that it belongs to names an object; called after it was read. Raises the store's
    errors when the record cannot be read.
    """
    key = names.dead_object_key(name)
    try:
        record = manifest.decode_dead_object(store.get(key))
    except object_store.NotFound:
        return NOTHING_DONE
    except (object_store.Damaged, format_errors.FormatError) as error:
        log.error("the record %s of an object that was given up cannot be read: %s", key, error)
        return Summary(failed=ObjectCount(1, 0))
    found = ObjectCount(1, record.size_bytes)
    if record.object != name or is_live(name):
        log.error("the record %s names %s, which may not be deleted", key, record.object)
        return Summary(failed=found)
    if not dry_run:
        try:
            store.delete(name)
            store.delete(key)
        except object_store.StoreError as error:
            log.warning("object %s still cannot be deleted: %s", name, error)
            return Summary(failed=found)
    return Summary(tombstones=found)
