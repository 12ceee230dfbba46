"""The audit of a root: whether everything that is stored is whole, and says what it should, while daemons serve.

    list         everything of a few shards
    manifests    every manifest that is kept, read in runs: what may not follow, what is not there
    objects      all that the newest manifests name and all that was listed, by their bytes; rows that are held twice;
                 what no manifest names, and whether its rows are anywhere else
    logs         behind all shards, as each has sections of many: every slot; what shards need, and what is not there

Owns: that order, what is read by which task, and the report.
Does not own: what is checked (the other modules of this package), the engine that runs the tasks, and the command.

It writes nothing. The manifests are read after the listing, so that what they do not name and was listed is unnamed;
what is then not there, or named since, is judged by manifests that are read once more (R9).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from batch.audit import division, listed_shard, manifest_task
from batch.audit.division import Job
from batch.audit.findings import Finding, Kind, Report, Severity, Tally
from batch.audit.listed_shard import OBJECT_BYTES, ListedShard
from batch.audit.log_phase import LogPhase
from batch.audit.log_rules import AppliedTopic
from batch.audit.manifest_task import ManifestRun, ManifestsSeen
from batch.audit.object_task import Item, Role
from batch.audit.reading import SYSTEM_CLOCK, Place, WallClock
from batch.audit.row_tasks import TwiceRun, Unnamed
from batch.engine.engine_port import Engine
from batch.engine.job_settings import Settings
from batch.engine.root import Root
from storage_backends import object_store
from storage_backends.formats import names
from storage_backends.formats.manifest import RootFormat, ShardManifest, TopicManifest
from storage_backends.object_store import ObjectStore
from storage_backends.shard_listing import Listed

OBJECTS_AT_ONCE: Final = 500_000
"""Shards are looked at together until they have so many objects: the driver knows the keys of all of them."""

LISTING_THREADS: Final = 8

Opener: TypeAlias = Callable[[], ObjectStore]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is under way, how many tasks of it have ended, and how many there are."""


class UnknownTopic(Exception):
    """A topic that was named does not exist in the root."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`manifests_kept`, `orphan_age_ms`: as collection has them. `overdue_ms`: so long after its grace an object that
    left should be deleted.
    """

    manifests_kept: int
    orphan_age_ms: int
    overdue_ms: int

    @staticmethod
    def of(settings: Settings) -> Limits:
        """What the daemons' settings of collection make of them."""
        collection = settings.collection
        # Topics that are not served are looked at when their shard is listed.
        late_s = 2 * (collection.interval_s + collection.orphan_interval_s)
        return Limits(
            manifests_kept=collection.manifests_kept,
            orphan_age_ms=int(collection.orphan_age_s * 1000),
            overdue_ms=int(late_s * 1000),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is audited. `topics`: names, none = everything. `sample`: the part of the live buckets that is read in full;
    of the others table and entry 0. `seed`: which ones. `store`: its name, for the report.
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
    engine: Engine,
    request: Request,
    *,
    open_store: Opener,
    progress: Progress = lambda what, done, total: None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Report:
    """Audits a root; `engine` runs. `open_store`: opens the store in a task; it can be pickled.

    Raises RootAbsent, UnknownTopic, WorkFailed, and the store's errors when it cannot be listed.
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
    """The manifests of one place: what was listed, what was seen of them, and the newest."""

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
    def __init__(self, root: Root, engine: Engine, request: Request, open_store: Opener, progress: Progress) -> None:
        self.tally = Tally()
        self.topics = 0
        self._root = root
        self._engine = engine
        self._request = request
        self._open_store = open_store
        self._progress = progress
        self._random = random.Random(request.seed)
        self._given_up: frozenset[str] = frozenset()
        # By shard; as `LogPhase` has them.
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
            self.tally.add(LogPhase(self._root, self._tips, self._applied, self.do).run())

    def _waves(self) -> Iterator[list[ListedShard]]:
        """The shards, as many at once as the driver can know all keys of."""
        wanted = self._wanted()
        wave: list[ListedShard] = []
        with concurrent.futures.ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="list") as threads:
            for start in range(0, len(wanted), LISTING_THREADS):
                self._progress("listing shards", start, len(wanted))
                some = wanted[start : start + LISTING_THREADS]
                for listed in threads.map(lambda each: listed_shard.list_shard(self._root, *each), some):
                    if self._request.topics:
                        self._check_listed(listed)
                    wave.append(listed)
                    if sum(each.objects for each in wave) >= OBJECTS_AT_ONCE:
                        yield wave
                        wave = []
        if wave:
            yield wave

    def _wanted(self) -> list[tuple[int, tuple[str, ...] | None]]:
        """Each shard, with the ids of its topics if only some are wanted."""
        if not self._request.topics:
            return [(shard, None) for shard in range(self._root.shards)]
        places = sorted(self._root.topics(self._request.topics))
        grouped = itertools.groupby(places, key=lambda place: place.shard)
        return [(shard, tuple(place.topic_id for place in group)) for shard, group in grouped]

    def _check_listed(self, listed: ListedShard) -> None:
        """Raises UnknownTopic when the root has nothing of a topic that is asked for by name and lies in the listed
        shard.
        """
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
        """The newest manifest of a shard; None: nobody ever owned it."""
        self._tips[shard] = tip

    def knows_applied(self, shard: int, topic: AppliedTopic) -> None:
        """A topic may be ahead of its shard: the logs will tell."""
        self._applied.setdefault(shard, []).append(topic)

    def is_sampled(self) -> bool:
        return self._request.sample >= 1 or self._random.random() < self._request.sample

    def do(self, what: str, jobs: Sequence[tuple[Job, int]]) -> Iterator[tuple[Job, Any]]:
        """Does the jobs (each with what it costs, in bytes) on the engine; each with its result, in any order."""
        limit = listed_shard.portion_bytes(sum(cost for _, cost in jobs), self._engine.parallelism)
        tasks = [
            _Task(self._open_store, self._root.format, tuple(job for job, _ in portion))
            for portion in listed_shard.portions(jobs, lambda each: each[1], limit)
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
        """`records`: of objects that were given up, of any shard; read here."""
        self._find_foreign()
        self._read_sequences()
        for sequence in self._sequences.values():
            self._check_sequence(sequence)
        self._audit.topics += sum(1 for place in self._sequences if place.topic_id)
        self._read_objects(records)

    def _find_foreign(self) -> None:
        for listed in self._shards:
            place = Place(listed.shard)
            for key in listed.foreign:
                self._audit.find(Kind.FOREIGN, Severity.INFO, key, "it is no object of a shard", place=place)
            for key in listed.astray:
                detail = "it is among manifests, and hides the newest one"
                self._audit.find(Kind.FOREIGN, Severity.ERROR, key, detail, place=place)

    # ---- manifests

    def _read_sequences(self) -> None:
        jobs: list[tuple[Job, int]] = []
        for sequence in self._sequences.values():
            jobs += division.manifest_runs(sequence.place, sequence.listed)
        for job, result in self._audit.do("reading manifests", jobs):
            if isinstance(job, ManifestRun):
                self._sequences[job.place].seen.append(result)

    def _check_sequence(self, sequence: _Sequence) -> None:
        """Whether manifests are missing, and what the newest one says of the shard."""
        place, tip, root = sequence.place, sequence.tip, self._audit.root
        topic = tip.topic if isinstance(tip, TopicManifest) else ""
        try:
            if not sequence.numbers:
                self._check_nothing(sequence)
                return
            newest = sequence.numbers[-1] if tip is None else tip.head.number
            kept = self._audit.request.limits.manifests_kept
            candidates = manifest_task.not_there(sequence.numbers, sequence.seen, newest, kept)
            lost = manifest_task.lost(root, place, candidates, kept)
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
            self._unreadable(place, topic, error)

    def _check_nothing(self, sequence: _Sequence) -> None:
        """Objects, and no manifest that was listed: it may have been created since."""
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
        """No topic is of an owner that its shard never had. Raises the store's errors."""
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

    def _unreadable(self, place: Place, topic: str, error: object_store.StoreError) -> None:
        # Damage of a tip has a finding of its own.
        if not isinstance(error, object_store.Damaged):
            self._audit.find(Kind.UNREADABLE, Severity.ERROR, error.key, error.reason, place=place, topic=topic)

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
                leftovers.setdefault(place.shard, []).append((place, tuple(self._unnamed(place.shard, unnamed))))
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

    def _unnamed(self, shard: int, found: dict[str, tuple[int, int]]) -> Iterator[Unnamed]:
        modified_ms = next(each.modified_ms for each in self._shards if each.shard == shard)
        for key, (base, size_bytes) in found.items():
            yield Unnamed(key, base, size_bytes, modified_ms[key])
