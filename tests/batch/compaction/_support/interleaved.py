"""A job, and whatever may happen to its topics at each of its crash points, drawn from a seed.

Owns: the owner, another merger and the collector as they act between two steps of a job, that the job is killed there,
and the account of the rows. Does not own: the job's world (`jobs_in_process`), and the owner's operations (`roots`).

The account is a dict: of each index and position that is stored and not gone by a manifest, when it is due. What is
gone in the owner's memory alone is still stored. What must hold after each job: the live buckets hold exactly these
rows, once; every object that a manifest names is there and whole; none was named that was begun below the orphan floor;
the job deleted nothing and wrote no object twice; left alone it merges everything, and then finds nothing to merge.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from batch.compaction.job import Options
from batch.compaction.tally import Outcome, Status
from storage_backends import bucket_reading, commit, crash_points, manifest_collection
from storage_backends.formats import merge, names
from storage_backends.formats.format_errors import FormatError
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.object_store import StoreError
from storage_backends.storage_settings import Bucket
from storage_backends.topic_manifest import Create, DeleteTopic, DropBuckets, SetSubscriptions
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests.batch.compaction._support.jobs_in_process import World
from tests.batch.engine._support import roots
from tests.batch.engine._support.roots import StoredTopic
from tests.storage_backends._support.topic_manifests import subscription

Key = tuple[int, int, int]
"""Index, ledger, entry."""

OWN_INDEX = 1
# At a crash point something happens with this probability, and then the job is killed with that one.
HAPPENS, KILLED = 0.35, 0.04
JOBS_MAX = 3


class Killed(BaseException):
    """The job is no more."""


class Broken(AssertionError):
    """A rule does not hold."""


class Topic:
    """One topic, what its owner has in memory, and what must be stored of it."""

    def __init__(self, world: World, name: str, rng: random.Random) -> None:
        self.on_store = StoredTopic(world.memory, name)
        self.stored: dict[Key, int] = {}
        self._rng = rng
        self._world = world
        self._cancelled: set[Key] = set()
        self._next_ledger = 1
        # By object: what may be named although it was begun below the floor, since it was named before.
        self._named_before: set[str] = set()
        self._floor = 0
        self._subscribe()
        for _ in range(rng.randint(3, 12)):
            self.seal()
            if rng.random() < 0.5:
                self.cancel()

    def _subscribe(self) -> None:
        self.on_store.commit(
            SetSubscriptions(
                subscriptions=(subscription(OWN_INDEX),),
                last_subscription_id=5,
                epoch=self.on_store.epoch,
                delete_after_ms=roots.NOW_MS,
            )
        )

    # ---- what the owner does

    def cancel(self) -> None:
        """In memory: some rows, or all of some bucket."""
        known = sorted(self.stored.keys() - self._cancelled)
        if self._rng.random() < 0.3 and known:
            ledger = self._rng.choice(known)[1]
            self._cancelled.update(key for key in known if key[1] == ledger)
        else:
            self._cancelled.update(self._rng.sample(known, min(len(known), self._rng.randint(0, 6))))

    def seal(self) -> None:
        """What is gone is gone by the manifest now; new rows are a bucket, also rows that are there again."""
        gone, made = self._gone_by_bucket(), []
        for key in self._cancelled:
            del self.stored[key]
        again = sorted(key for key in self._cancelled if self._rng.random() < 0.3)
        self._cancelled.clear()
        index = self._rng.choice((0, 0, OWN_INDEX))
        keys = [(index, self._next_ledger, entry) for entry in range(self._rng.randint(0, 8))]
        keys += [key for key in again if key[0] == index]
        self._next_ledger += 1
        if keys:
            rows = rows_of(keys, self._rng)
            made.append(self.on_store.write(rows, index=index))
            columns = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
            self.stored |= {(index, ledger, entry): due for ledger, entry, due in zip(*columns, strict=True)}
        self.on_store.seal(made, gone=gone)

    def quarantine(self) -> None:
        """What a bucket holds is not known any more."""
        live = [each for each in self.tip().live if not each.quarantined]
        if live:
            chosen = self._rng.choice(live)
            # The driver commits in a thread of its own: it may be merged by now.
            with contextlib.suppress(commit.Refused):
                self.on_store.quarantine(chosen.object.name)
                for key in self._rows_of(chosen):
                    self.stored.pop(key, None)
                    self._cancelled.discard(key)

    def drop(self) -> None:
        """Buckets every row of which is gone by the manifest."""
        empty = [each.object.name for each in self.tip().live if not each.quarantined and not self._rows_of(each)]
        if empty:
            owner = self.on_store
            operation = DropBuckets(buckets=tuple(empty), epoch=owner.epoch, delete_after_ms=roots.NOW_MS)
            owner.commit(operation)

    def be_born_again(self) -> None:
        """The topic is deleted; one of its name begins with other rows at the same positions."""
        owner = self.on_store
        owner.commit(DeleteTopic(slot=ShardSlot(owner.slot + 1), epoch=owner.epoch, delete_after_ms=roots.NOW_MS))
        owner.slot += 2
        owner.commit(
            Create(topic=owner.name, topic_id=owner.topic_id, epoch=owner.epoch, applied=ShardSlot(owner.slot))
        )
        self._next_ledger = 1
        self.stored.clear()
        self._cancelled.clear()
        self._subscribe()
        self.seal()
        self.seal()

    # ---- what others do

    def merge_beside(self) -> None:
        other = MergingProcess(self._world.memory, self.on_store.name, shard=self.on_store.shard)
        runs = other.runs(self._rng.choice((2, 3)))
        if runs:
            with contextlib.suppress(commit.Refused):
                other.commit(other.write(self._rng.choice(runs)))

    def collect(self) -> None:
        """The floor rises to the tip; what is below it and unnamed is deleted, and so is what is buried."""
        tip = self.tip()
        if tip.head.number <= tip.head.orphan_floor:
            return
        self.on_store.commit(manifest_collection.SetFloor[TopicManifest](floor=tip.head.number))
        tip = self.tip()
        self._floor = tip.head.orphan_floor
        self._named_before = {live.object.name for live in tip.live}
        buried = frozenset(each.object.name for each in tip.tombstones)
        for name in self._objects() - self._named_before:
            if name in buried or names.number_of(name) < self._floor:
                self._world.memory.delete(name)
        if buried:
            self.on_store.commit(manifest_collection.CollectTombstones[TopicManifest](deleted=buried))

    # ---- what must hold

    def check(self) -> None:
        """Raises Broken."""
        found: dict[Key, int] = {}
        objects = self._objects()
        for live in self.tip().live:
            name = live.object.name
            if name not in objects:
                raise Broken(f"{name} is live, and not there")
            if name not in self._named_before and live.object.base < self._floor:
                raise Broken(f"{name} was named below the floor {self._floor}")
            if live.quarantined:
                continue
            for key, due in self._rows_of(live).items():
                if key in found:
                    raise Broken(f"{key} is stored twice")
                found[key] = due
        if found != self.stored:
            lost, more = self.stored.keys() - found.keys(), found.keys() - self.stored.keys()
            raise Broken(f"lost: {sorted(lost)}; came from nowhere: {sorted(more)}")

    def tip(self) -> TopicManifest:
        return self.on_store.tip()

    def _objects(self) -> set[str]:
        prefix = f"shards/{self.on_store.shard:02d}/topics/{self.on_store.topic_id}/buckets/"
        return {entry.key for entry in self._world.memory.list(prefix)}

    def _rows_of(self, live: LiveBucket) -> dict[Key, int]:
        """Those that are not gone by the manifest."""
        tip = self.tip()
        metadata, rows = bucket_reading.read_bucket(self._world.memory, live)
        progress = bucket_reading.progress_of(self._world.memory, tip)
        gone = merge.bits_of(live.object.name, metadata.kept, progress).gone
        left = rows.take(~gone.mask_of(rows.ledger_id, rows.entry_id))
        columns = (left.ledger_id.tolist(), left.entry_id.tolist(), left.deliver_at_ms.tolist())
        return {(live.subscription_id, ledger, entry): due for ledger, entry, due in zip(*columns, strict=True)}

    def _gone_by_bucket(self) -> dict[str, dict[int, list[int]]]:
        found: dict[str, dict[int, list[int]]] = {}
        for live in self.tip().live:
            if live.quarantined or not self._cancelled:
                continue
            for _, ledger, entry in sorted(self._rows_of(live).keys() & self._cancelled):
                found.setdefault(live.object.name, {}).setdefault(ledger, []).append(entry)
        return found


class Interleaved:
    """One run: topics, jobs, and what happens between their steps."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._happens = True
        self.world = World(patch)
        # With few tasks at once the driver commits while workers work: two threads come to crash points.
        self.world.engine.parallelism = self._rng.choice((1, 100, 100))
        rows_max = self._rng.choice((5, 20, 1_000))
        self.world.settings = msgspec.structs.replace(self.world.settings, bucket=Bucket(merge_rows_max=rows_max))
        self.topics = [Topic(self.world, name, self._rng) for name in ("flights", "trains")]

    def run(self) -> None:
        """Jobs, one after the other, until nothing is left to do. Raises Broken."""
        with crash_points.intercepted(self._come):
            for _ in range(self._rng.randint(1, JOBS_MAX)):
                with contextlib.suppress(Killed):
                    self._job()
                self.check()
            self._happens = False
            self._finish()

    def check(self) -> None:
        """Raises Broken."""
        for topic in self.topics:
            topic.check()
        calls = self.world.store.calls
        if deleted := [call.key for call in calls if call.operation == "delete"]:
            raise Broken(f"a job deleted {deleted}")
        # Hints are left again with each wave.
        objects = (call.key for call in calls if call.operation == "put" and not call.key.startswith("hints/"))
        written = collections.Counter(objects)
        if twice := [key for key, count in written.items() if count > 1]:
            raise Broken(f"a job wrote {twice} more than once")

    def _job(self) -> None:
        options = Options(sources_max=self._rng.choice((2, 3, 64)), soon_ms=0, attempts_max=self._rng.choice((1, 3, 5)))
        done = self.world.compact(options)
        if done.status not in (Status.DONE, Status.CONFLICTS):
            failed = [each for each in done.run_results if each.outcome is Outcome.FAILED]
            raise Broken(f"a job ended as {done.status}: {done.reason}; {failed}")

    def _finish(self) -> None:
        """Nothing happens any more: everything that is planned is done, and then nothing is left to plan."""
        done = self.world.compact(Options(soon_ms=0))
        self.check()
        refused = [each for each in done.run_results if each.outcome is not Outcome.COMMITTED]
        if done.status is not Status.DONE or refused:
            raise Broken(f"a job alone ended as {done.status}: {refused}")
        for _ in self.topics:
            again = self.world.compact(Options(soon_ms=0))
            if not again.run_results:
                break
        else:
            raise Broken("there is always something left to merge")
        for topic in self.topics:
            topic.collect()
        self.check()

    def _come(self, name: str) -> None:
        """A crash point."""
        if not name.startswith("compaction.") or not self._happens:
            return
        with self._lock:
            while self._rng.random() < HAPPENS:
                self._let_something_happen(self._rng.choice(self.topics))
            if self._rng.random() < KILLED:
                raise Killed(name)

    def _let_something_happen(self, topic: Topic) -> None:
        often = [topic.cancel, topic.cancel, topic.seal, topic.seal, topic.merge_beside, topic.collect]
        seldom = [topic.drop, topic.quarantine, topic.be_born_again, topic.on_store.take_over, self._lose_an_answer]
        self._rng.choice(often * 2 + seldom)()

    def _lose_an_answer(self) -> None:
        """The next manifest that the job writes is there, and it is not told."""
        self.world.script.plan("put_if_absent", Fault.FAIL_AFTER)


def breach_of(seed: int, plant: Callable[[pytest.MonkeyPatch], None] | None = None) -> str | None:
    """What a run of that seed breaks, with a bug planted or without; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        try:
            Interleaved(patch, seed).run()
        except (Broken, StoreError, FormatError) as breach:
            return f"{type(breach).__name__}: {breach}"
    return None


def rows_of(keys: Sequence[Key], rng: random.Random) -> Rows:
    """New rows at these positions."""
    due = [rng.randint(*roots.LATER_MS) for _ in keys]
    ledgers, entries = [key[1] for key in keys], [key[2] for key in keys]
    return Rows(np.array(due, np.uint64), np.array(ledgers, np.uint64), np.array(entries, np.uint64))
