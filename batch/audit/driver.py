"""Audits a root while daemons serve: checks that everything stored is whole and consistent, in this order.

    list         everything of a few shards
    manifests    every manifest that is kept, read in runs: which may not follow, which are missing
    objects      all that the newest manifests name and all that was listed, by their bytes; rows that are held twice;
                 objects that no manifest names, and whether their rows are anywhere else
    logs         after all shards, as each has sections of many: every slot; which shards need, and which are missing

It writes nothing. The manifests are read after the listing; therefore a listed object that they do not name is unnamed.
A missing object, or one that was named since, is judged by manifests that are read once more (R9). The manifests of
shards are read before the logs, and daemons go on: contradictions between them are read again, too.

The other modules of this package do the checks. `batch.cli.audit` alone uses this one, which needs no command line.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from batch.audit import division, log_audit, manifest_audit, reading
from batch.audit.division import OBJECT_BYTES, Job, ListedShard
from batch.audit.findings import Finding, Kind, Report, Severity, Tally
from batch.audit.log_audit import AppliedTopic, LogRun, LogSeen, ReadLog, Suspicion
from batch.audit.manifest_audit import ManifestRun, ManifestsSeen
from batch.audit.object_audit import Item, Role
from batch.audit.reading import SYSTEM_CLOCK, Beat, Place, WallClock
from batch.audit.row_audit import TwiceRun, Unnamed
from batch.engine.engine_port import TaskEngine
from batch.engine.job_settings import Settings
from batch.engine.root import Root
from storage_backends import checkpoints, log_reading, object_store
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import RootFormat, ShardManifest, TopicManifest
from storage_backends.log_reading import Verdict
from storage_backends.object_store import ObjectStore
from storage_backends.shard_listing import Listed
from storage_backends.slot_log import SlotLogs

TRIES_MAX: Final = 5
"""Most times that a contradiction is read again before it counts as moved on"""

Do: TypeAlias = Callable[[str, Sequence[tuple[Job, int]]], Iterator[tuple[Job, Any]]]
Tips: TypeAlias = Mapping[int, ShardManifest | None]
"""Shard -> newest manifest, None if no daemon ever owned it; a shard whose manifest cannot be read is absent"""


@dataclasses.dataclass(frozen=True, slots=True)
class LogPhase:
    """The phase that reads all logs.

    `tips` and `applied` are as they were read before. `do` does jobs on the engine.
    """

    root: Root
    tips: Tips
    applied: Mapping[int, Sequence[AppliedTopic]]
    do: Do

    def run(self) -> Tally:
        """Read the logs and return the findings that the jobs themselves have not counted."""
        tally = Tally()
        # Read before the logs, which go on: what was certain at a beat is there afterwards.
        beats = reading.heartbeats(self.root.store)
        listed = self._listed(tally)
        jobs = [job for log_id, numbers in listed.items() for job in division.log_runs(log_id, numbers)]
        runs: dict[str, list[LogSeen]] = {log_id: [] for log_id in listed}
        for job, seen in self.do("reading logs", jobs):
            if isinstance(job, LogRun):
                runs[job.log_id].append(seen)
        logs = {log_id: ReadLog.of(log_id, numbers, runs[log_id]) for log_id, numbers in listed.items()}
        tally.moved_on += sum(len(seen.absent) for each in runs.values() for seen in each)
        found = log_audit.suspicions(self.tips, logs, self.applied)
        if found:
            self._look_again(found, logs, tally)
        for beat in beats:
            # Not what was read of it: a daemon that goes on deletes listed slots before they are read.
            self._check_beat(beat, max(listed.get(beat.log_id, [0])), tally)
        return tally

    def _check_beat(self, beat: Beat, highest: int, tally: Tally) -> None:
        """Check that what a daemon reported is there: its log up to a slot, and a manifest of each of its shards.

        `highest` is the newest slot that was listed of the log, 0 if there was none.
        """
        if highest < beat.last_slot:
            key = names.log_slot_key(beat.log_id, beat.last_slot)
            detail = f"daemon {beat.daemon_id} reported slot {beat.last_slot}, but the log ends at slot {highest}"
            tally.find(Finding(kind=Kind.SLOT_MISSING, severity=Severity.ERROR, object=key, detail=detail))
        for shard in beat.shards:
            if shard in self.tips and self.tips[shard] is None and self.root.shard_tip(shard) is None:
                key = names.shard_manifest_prefix(shard)
                detail = (
                    f"there is no manifest, but daemon {beat.daemon_id} reported that it owns the shard: it was lost"
                )
                tally.find(
                    Finding(kind=Kind.NO_MANIFEST, severity=Severity.ERROR, object=key, detail=detail, shard=shard)
                )

    # ---- the listing

    def _listed(self, tally: Tally) -> dict[str, list[int]]:
        """Return the numbers of every log that has slots. A foreign name among them becomes a finding."""
        with _logs(self.root) as logs:
            for name in logs.foreign():
                detail = "it is stored among logs, and is none"
                tally.find(Finding(kind=Kind.FOREIGN, severity=Severity.WARNING, object=name, detail=detail))
            listed = {log_id: _numbers(logs, log_id) for log_id in sorted(logs.log_ids())}
            return {log_id: numbers for log_id, numbers in listed.items() if numbers}

    # ---- contradictions

    def _look_again(self, found: Sequence[Suspicion], logs: Mapping[str, ReadLog], tally: Tally) -> None:
        """Read manifests, the logs concerned, and the manifests again, until nothing has changed meanwhile."""
        first = len(found)
        known = dict(logs)
        try:
            for _ in range(TRIES_MAX):
                before = self._tips_now()
                read = {log_id for each in found for log_id in each.logs}
                read |= {log_id for each in found for log_id in _named(before, each.shards)}
                for log_id in read:
                    self._read_again(log_id, known)
                found = log_audit.suspicions(before, known, self.applied)
                after = self._tips_now()
                if all(each.logs <= read and _stands(each.shards, before, after) for each in found):
                    for each in found:
                        tally.find(each.finding)
                    tally.moved_on += max(first - len(found), 0)
                    return
        except object_store.StoreError as error:
            tally.find(Finding(kind=Kind.UNREADABLE, severity=Severity.ERROR, object=error.key, detail=error.reason))
            return
        tally.moved_on += len(found)

    def _tips_now(self) -> Tips:
        tips: dict[int, ShardManifest | None] = {}
        for shard in self.tips:
            try:
                tip = self.root.shard_tip(shard)
            except object_store.Damaged:
                # The damage is new: the next audit finds it.
                continue
            tips[shard] = None if tip is None else tip.manifest
        return tips

    def _read_again(self, log_id: str, known: dict[str, ReadLog]) -> None:
        """Read a log again, here and without findings, since its damage has been counted. Raises the store's errors."""
        with _logs(self.root) as logs:
            numbers = _numbers(logs, log_id)
        if not numbers:
            known.pop(log_id, None)
            return
        seen = [job.run(self.root) for job, _ in division.log_runs(log_id, numbers)]
        known[log_id] = ReadLog.of(log_id, numbers, seen)


@contextlib.contextmanager
def _logs(root: Root) -> Iterator[SlotLogs]:
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="audit") as threads:
        yield root.logs(threads)


def _numbers(logs: SlotLogs, log_id: str) -> list[int]:
    slots = logs.log(log_id)
    try:
        return slots.numbers()
    finally:
        slots.close()


def _named(tips: Tips, shards: Iterable[int]) -> Iterator[str]:
    for shard in shards:
        tip = tips.get(shard)
        if tip is not None:
            yield from log_audit.logs_of(tip)


def _stands(shards: Iterable[int], before: Tips, after: Tips) -> bool:
    """Return whether the manifests of the shards still say the same about the logs."""
    for shard in shards:
        was, now = before.get(shard), after.get(shard)
        if was is None or now is None:
            if was is not now:
                return False
        elif log_reading.judged(was, now) is not Verdict.STANDS:
            return False
    return True


OBJECTS_AT_ONCE: Final = 500_000
"""Shards are audited together until they have so many objects: the driver knows the keys of all of them."""

LISTING_THREADS: Final = 8

Opener: TypeAlias = Callable[[], ObjectStore]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the work in flight, the number of its tasks that have ended, and the number of all."""


class UnknownTopic(Exception):
    """The error for a topic that was named and does not exist in the root."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of collection and lateness.

    `manifests_kept` and `orphan_age_ms` are those of collection. An object that left should be deleted `overdue_ms`
    after its grace.
    """

    manifests_kept: int
    orphan_age_ms: int
    overdue_ms: int

    @staticmethod
    def of(settings: Settings) -> Limits:
        """Derive them from the daemons' settings of collection."""
        collection = settings.collection
        # Topics that are not served are collected when their shard is listed.
        late_s = 2 * (collection.interval_s + collection.orphan_interval_s)
        return Limits(
            manifests_kept=collection.manifests_kept,
            orphan_age_ms=int(collection.orphan_age_s * 1000),
            overdue_ms=int(late_s * 1000),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The subject of an audit.

    `topics` are names; none means everything. `sample` is the part of the live buckets that is read in full; of the
    others only table and entry 0 are read. `seed` selects them. `store` is its name, for the report.
    """

    store: str
    limits: Limits
    clock: WallClock = SYSTEM_CLOCK
    topics: tuple[str, ...] = ()
    sample: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """Jobs that are done one after the other, in one process."""

    open_store: Opener
    format: RootFormat
    jobs: tuple[Job, ...]


def _do(task: _Task) -> list[Any]:
    root = Root(task.open_store(), task.format)
    return [job.run(root) for job in task.jobs]


def audit(
    store: ObjectStore,
    engine: TaskEngine,
    request: Request,
    *,
    open_store: Opener,
    progress: Progress = lambda what, done, total: None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Report:
    """Audit a root; tasks run on `engine`.

    `open_store` opens the store in a task, and can be pickled. Raises RootAbsent, UnknownTopic, WorkFailed, and the
    store's errors if it cannot be listed.
    """
    begun_s, started_ms = monotonic(), request.clock.now_ms()
    tally, shards, topics = Tally(), 0, 0
    try:
        root = Root.open(store)
    except object_store.Damaged as error:
        detail = error.reason
        tally.find(Finding(kind=Kind.DAMAGED, severity=Severity.ERROR, object=names.FORMAT_KEY, detail=detail))
    else:
        running = _Audit(root, engine, request, open_store, progress)
        running.run()
        tally, shards, topics = running.tally, root.shards, running.topics
    return Report(
        store=request.store,
        engine=engine.name,
        started_ms=started_ms,
        seconds=monotonic() - begun_s,
        sample=request.sample,
        shards=shards,
        topics=topics,
        tally=tally,
    )


@dataclasses.dataclass(slots=True)
class _Sequence:
    """The manifests of one place: the listed ones, what was seen of them, and the newest."""

    place: Place
    listed: Listed
    seen: list[ManifestsSeen] = dataclasses.field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.listed.in_order()]

    @property
    def tip(self) -> TopicManifest | ShardManifest | None:
        return next((part.tip for part in self.seen if part.tip is not None), None)


class _Audit:
    def __init__(
        self, root: Root, engine: TaskEngine, request: Request, open_store: Opener, progress: Progress
    ) -> None:
        self.tally = Tally()
        self.topics = 0
        self._root = root
        self._engine = engine
        self._request = request
        self._open_store = open_store
        self._progress = progress
        self._random = random.Random(request.seed)
        self._given_up: frozenset[str] = frozenset()
        # By shard, in the form that `LogPhase` has
        self._tips: dict[int, ShardManifest | None] = {}
        self._applied: dict[int, list[AppliedTopic]] = {}

    def run(self) -> None:
        self.tally.saw("format", len(self._root.store.get(names.FORMAT_KEY)))
        dead = [*self._root.store.list(names.dead_objects_prefix())] if not self._request.topics else []
        self._given_up = frozenset(entry.key.removeprefix(names.dead_objects_prefix()) for entry in dead)
        records = [Item(place=Place(-1), key=entry.key, size_bytes=entry.size_bytes, role=Role.DEAD) for entry in dead]
        for wave in self._waves():
            _Wave(self, wave).run(records)
            records = []
        if not self._request.topics:
            self._check_probe_pass()
            self.tally.add(LogPhase(self._root, self._tips, self._applied, self.do).run())

    def _check_probe_pass(self) -> None:
        """Check the pass of the probe, if there is one. Nothing but the length of a start depends on it."""
        found = reading.read(self._root.store, names.PROBE_PASS_KEY)
        finding = Finding(kind=Kind.DAMAGED, severity=Severity.WARNING, object=found.key, detail=found.damage)
        if found.body is not None:
            self.tally.saw("probe pass", len(found.body))
            try:
                reading.decoded(self._root.store, found, found.body, manifest.decode_probe_pass)
            except format_errors.FormatError as error:
                self.tally.find(dataclasses.replace(finding, detail=str(error), offset=error.offset))
        elif found.damage:
            self.tally.find(finding)
        elif found.failure:
            self.tally.find(dataclasses.replace(finding, kind=Kind.UNREADABLE, detail=found.failure))

    def _waves(self) -> Iterator[list[ListedShard]]:
        """Yield the shards, as many at once as the driver can know all keys of."""
        wanted = self._wanted()
        wave: list[ListedShard] = []
        with concurrent.futures.ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="list") as threads:
            for start in range(0, len(wanted), LISTING_THREADS):
                self._progress("listing shards", start, len(wanted))
                some = wanted[start : start + LISTING_THREADS]
                for listed in threads.map(lambda each: division.list_shard(self._root, *each), some):
                    if self._request.topics:
                        self._check_listed(listed)
                    wave.append(listed)
                    if sum(each.objects for each in wave) >= OBJECTS_AT_ONCE:
                        yield wave
                        wave = []
        if wave:
            yield wave

    def _wanted(self) -> list[tuple[int, tuple[str, ...] | None]]:
        """Return each shard, with the ids of its topics if only some are wanted."""
        if not self._request.topics:
            return [(shard, None) for shard in range(self._root.shards)]
        places = sorted(self._root.topics(self._request.topics))
        grouped = itertools.groupby(places, key=lambda place: place.shard)
        return [(shard, tuple(place.topic_id for place in group)) for shard, group in grouped]

    def _check_listed(self, listed: ListedShard) -> None:
        """Raise UnknownTopic if a topic asked for by name belongs to the listed shard, which has nothing of it."""
        for name in self._request.topics:
            place = self._root.place_of(name)
            if place.shard == listed.shard and place.topic_id not in listed.listing.topics:
                raise UnknownTopic(f"topic {name!r} does not exist in the root")

    # ---- for the waves

    @property
    def root(self) -> Root:
        return self._root

    @property
    def request(self) -> Request:
        return self._request

    @property
    def given_up(self) -> frozenset[str]:
        return self._given_up

    def knows_shard(self, shard: int, tip: ShardManifest | None) -> None:
        """Record the newest manifest of a shard, or None if no daemon ever owned it."""
        self._tips[shard] = tip

    def knows_applied(self, shard: int, topic: AppliedTopic) -> None:
        """Record a topic that may be ahead of its shard; the logs will show it."""
        self._applied.setdefault(shard, []).append(topic)

    def is_sampled(self) -> bool:
        return self._request.sample >= 1 or self._random.random() < self._request.sample

    def do(self, what: str, jobs: Sequence[tuple[Job, int]]) -> Iterator[tuple[Job, Any]]:
        """Do the jobs, each with its cost (bytes), on the engine; yield each with its result, in any order."""
        limit = division.portion_bytes(sum(cost for _, cost in jobs), self._engine.parallelism)
        tasks = [
            _Task(self._open_store, self._root.format, tuple(job for job, _ in portion))
            for portion in division.portions(jobs, lambda each: each[1], limit)
        ]
        if not tasks:
            return
        for place, results in self._engine.run(_do, tasks, lambda done: self._progress(what, done, len(tasks))):
            for job, result in zip(tasks[place].jobs, results, strict=True):
                self.tally.add(result.tally)
                yield job, result

    @property
    def parallelism(self) -> int:
        return self._engine.parallelism

    def find(
        self,
        kind: Kind,
        severity: Severity,
        key: str,
        detail: str,
        *,
        place: Place,
        topic: str = "",
        offset: int | None = None,
    ) -> None:
        self.tally.find(
            Finding(
                kind=kind,
                severity=severity,
                object=key,
                detail=detail,
                shard=place.shard,
                topic=topic or place.topic_id,
                offset=offset,
            )
        )


class _Wave:
    """Some shards, from their listing to the end."""

    def __init__(self, audit: _Audit, shards: Sequence[ListedShard]) -> None:
        self._audit = audit
        self._shards = shards
        self._by_shard = not audit.request.topics
        self._sequences: dict[Place, _Sequence] = {}
        for listed in shards:
            if self._by_shard:
                place = Place(listed.shard)
                self._sequences[place] = _Sequence(place, listed.listing.shard)
            for topic_id, found in listed.listing.topics.items():
                place = Place(listed.shard, topic_id)
                self._sequences[place] = _Sequence(place, found)

    def run(self, records: Sequence[Item]) -> None:
        """Audit the shards, and the `records` of objects of any shard that were given up."""
        self._find_foreign()
        self._read_sequences()
        for sequence in self._sequences.values():
            self._check_sequence(sequence)
        for sequence in self._sequences.values():
            if isinstance(sequence.tip, ShardManifest):
                self._check_known(sequence.tip)
        self._audit.topics += sum(1 for place in self._sequences if place.topic_id)
        self._read_objects(records)

    def _find_foreign(self) -> None:
        for listed in self._shards:
            place = Place(listed.shard)
            for key in listed.foreign:
                self._audit.find(Kind.FOREIGN, Severity.INFO, key, "it is no object of a shard", place=place)
            for key in listed.astray:
                detail = "it is stored among manifests, and is none"
                self._audit.find(Kind.FOREIGN, Severity.WARNING, key, detail, place=place)

    # ---- manifests

    def _read_sequences(self) -> None:
        jobs: list[tuple[Job, int]] = []
        for sequence in self._sequences.values():
            jobs += division.manifest_runs(sequence.place, sequence.listed)
        for job, result in self._audit.do("reading manifests", jobs):
            if isinstance(job, ManifestRun):
                self._sequences[job.place].seen.append(result)

    def _check_sequence(self, sequence: _Sequence) -> None:
        """Find missing manifests, and check the newest one against its shard."""
        place, tip, root = sequence.place, sequence.tip, self._audit.root
        topic = tip.topic if isinstance(tip, TopicManifest) else ""
        try:
            if not sequence.numbers:
                self._check_nothing(sequence)
                return
            newest = sequence.numbers[-1] if tip is None else tip.head.number
            kept = self._audit.request.limits.manifests_kept
            candidates = manifest_audit.not_there(sequence.numbers, sequence.seen, newest, kept)
            lost = manifest_audit.lost(root, place, candidates, kept)
            found_later = sum(len(part.absent) for part in sequence.seen) - len(lost)
            self._audit.tally.moved_on += max(found_later, 0)
            for number in lost:
                key = names.numbered_key(place.manifest_prefix, number)
                detail = f"it is one of the newest {kept}, which must be kept; the newest is {newest}"
                self._audit.find(Kind.MANIFEST_MISSING, Severity.ERROR, key, detail, place=place, topic=topic)
            if isinstance(tip, ShardManifest):
                self._audit.knows_shard(place.shard, tip)
            if isinstance(tip, TopicManifest) and self._by_shard:
                self._check_against_shard(place, tip)
        except object_store.StoreError as error:
            # Damage of a tip has a finding of its own.
            if not isinstance(error, object_store.Damaged):
                self._audit.find(Kind.UNREADABLE, Severity.ERROR, error.key, error.reason, place=place, topic=topic)

    def _check_nothing(self, sequence: _Sequence) -> None:
        """Check a place that has objects and no listed manifest, which may have been created since."""
        place, root = sequence.place, self._audit.root
        shard = next(each for each in self._shards if each.shard == place.shard)
        objects = len(sequence.listed.objects)
        if not place.topic_id:
            objects += len(shard.listing.topics)
        topic = root.tip(place.of_topic) if place.topic_id else None
        shard_tip = None if place.topic_id else root.shard_tip(place.shard)
        if topic is None and shard_tip is None and objects:
            detail = f"{objects} objects belong to it, and there is no manifest: it was lost, what they hold with it"
            self._audit.find(Kind.NO_MANIFEST, Severity.ERROR, place.manifest_prefix, detail, place=place)
        elif not place.topic_id:
            self._audit.knows_shard(place.shard, None if shard_tip is None else shard_tip.manifest)

    def _check_against_shard(self, place: Place, tip: TopicManifest) -> None:
        """Check that the topic's owner has an epoch that its shard has had. Raises the store's errors."""
        key = names.numbered_key(place.manifest_prefix, tip.head.number)
        shard = self._sequences[Place(place.shard)].tip
        if shard is None or not isinstance(shard, ShardManifest):
            return
        if tip.owner_epoch > shard.epoch:
            newer = self._audit.root.shard_tip(place.shard)
            epoch = 0 if newer is None else newer.manifest.epoch
            if tip.owner_epoch > epoch:
                detail = f"its owner has epoch {tip.owner_epoch}, the shard epoch {epoch}"
                self._audit.find(Kind.BEYOND_LOG, Severity.ERROR, key, detail, place=place, topic=tip.topic)
        if tip.applied > shard.checkpoint_slot:
            self._audit.knows_applied(place.shard, AppliedTopic(key=key, topic=tip.topic, applied=tip.applied))

    def _check_known(self, tip: ShardManifest) -> None:
        """Find topics that the shard's checkpoint knows and whose manifests, or the newest of them, are not there."""
        root = self._audit.root
        try:
            loaded = checkpoints.read_newest(root.store, tip, damaged=lambda key: None).checkpoint
            for topic_id, number in {} if loaded is None else loaded.known.items():
                place = Place(tip.shard, topic_id)
                sequence = self._sequences.get(place)
                listed = sequence.numbers if sequence is not None else []
                if listed[-1:] >= [number]:
                    continue
                found = root.tip(place.of_topic)
                if found is None and sequence is None:
                    detail = "the checkpoint of its shard names the topic, and there is no manifest: it was lost"
                    self._audit.find(Kind.NO_MANIFEST, Severity.ERROR, place.manifest_prefix, detail, place=place)
                elif found is not None and found.number < number:
                    key = names.numbered_key(place.manifest_prefix, number)
                    detail = f"the checkpoint of its shard names it, and the newest is {found.number}"
                    self._audit.find(Kind.MANIFEST_MISSING, Severity.ERROR, key, detail, place=place)
        except object_store.StoreError as error:
            # Damage of a checkpoint or a tip has a finding of its own.
            if not isinstance(error, object_store.Damaged | object_store.NotFound):
                place = Place(tip.shard)
                self._audit.find(Kind.UNREADABLE, Severity.ERROR, error.key, error.reason, place=place)

    # ---- objects

    def _read_objects(self, records: Sequence[Item]) -> None:
        items = [*records]
        leftovers: dict[int, list[tuple[Place, tuple[Unnamed, ...]]]] = {}
        twice: list[tuple[Job, int]] = []
        for sequence in self._sequences.values():
            place, tip = sequence.place, sequence.tip
            named = [*division.named_items(tip, place, self._audit.is_sampled)]
            items += named
            known = {item.key for item in named} | self._audit.given_up
            unnamed = sequence.listed.unnamed(known)
            topic = tip.topic if isinstance(tip, TopicManifest) else ""
            items += division.unnamed_items(place, topic, unnamed)
            if unnamed and tip is not None:
                modified_ms = next(each.modified_ms for each in self._shards if each.shard == place.shard)
                found = (Unnamed(key, base, size, modified_ms[key]) for key, (base, size) in unnamed.items())
                leftovers.setdefault(place.shard, []).append((place, tuple(found)))
            if isinstance(tip, TopicManifest) and len(tip.live) > 1:
                twice.append((TwiceRun((place,)), OBJECT_BYTES * len(tip.live)))
        request = self._audit.request
        jobs = [
            *division.object_runs(
                items,
                clock=request.clock,
                overdue_ms=request.limits.overdue_ms,
                parallelism=self._audit.parallelism,
            ),
            *division.leftovers_runs(leftovers, clock=request.clock, orphan_age_ms=request.limits.orphan_age_ms),
            *twice,
        ]
        for _ in self._audit.do("reading objects", jobs):
            pass
