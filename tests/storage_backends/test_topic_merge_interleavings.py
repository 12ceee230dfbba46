"""Every order of a topic's owner, two mergers and a garbage collector, within bounds, with real rows: seals between a
merge's plan and its commit, positions that leave and are added again, drops, quarantine, a deletion, a subscription
that leaves with its own index, a floor that rises. Every planted bug is found in one of the orders.

Invariants, for every manifest of the history: exactly the rows wait that the owner's decisions up to `applied` leave
waiting, each in one bucket; an object that becomes live was begun at or above the floor; at the end every live bucket
is stored. The owner is refused only where a merge has taken the bucket that it would quarantine. What was reported is
in the history.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest

from storage_backends import commit, topic_manifest
from storage_backends.formats import manifest, merge, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import Progress, TopicManifest
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.manifest_collection import SetFloor
from storage_backends.memory_store import MemoryStore
from storage_backends.topic_manifest import (
    Create,
    DeleteTopic,
    DropBuckets,
    Merge,
    Quarantine,
    Seal,
    SetSubscriptions,
    adjacent_order,
)
from tests._support import parts
from tests.planted import registry
from tests.storage_backends._support import interleavings
from tests.storage_backends._support.interleavings import Bounds, Broken, Choices, Run, SteppedStore
from tests.storage_backends._support.merges import Buckets, Waiting, gone, rows_at
from tests.storage_backends._support.topic_manifests import CREATE, EPOCH, TOPIC, TOPIC_ID, Operation, subscription

SHARD = 3
PREFIX = names.topic_manifest_prefix(SHARD, TOPIC_ID)
OWN = 1
# How often an operation whose outcome is unknown is committed again.
TRIES = 2

STORED = Buckets()
B1 = STORED.write("b1", rows_at(1, 2, 3, due_ms=100))
B2 = STORED.write("b2", rows_at(4, 5, due_ms=200))
B3 = STORED.write("b3", rows_at(6, due_ms=300))
OWN1 = STORED.write("own1", rows_at(20, due_ms=100), subscription_id=OWN)
OWN2 = STORED.write("own2", rows_at(21, 22, due_ms=100), subscription_id=OWN)
# Entry 1 is added again, after it left b1; and 4, which leaves b2 with the seal that brings it in.
B4 = STORED.write("b4", rows_at(1, 4, 9, due_ms=400))
OWN3 = STORED.write("own3", rows_at(23, due_ms=400), subscription_id=OWN)

FIRST_PROGRESS = gone(b1=[1], own2=[21])
SECOND_PROGRESS = gone(b1=[1, 2], b2=[4, 5], own2=[21])
FIRST_WAITING = {(0, 2, 100), (0, 3, 100), (0, 4, 200), (0, 5, 200), (0, 6, 300), (OWN, 20, 100), (OWN, 22, 100)}
SECOND_WAITING = {
    (0, 3, 100),
    (0, 6, 300),
    (0, 1, 400),
    (0, 4, 400),
    (0, 9, 400),
    (OWN, 20, 100),
    (OWN, 22, 100),
    (OWN, 23, 400),
}
WAITING: dict[int, set[Waiting]] = {50: set(), 60: FIRST_WAITING, 70: SECOND_WAITING}


def seal(buckets: tuple[manifest.LiveBucket, ...], told: Progress, slot_from: int, slot_to: int) -> Seal:
    return Seal(
        buckets=buckets,
        progress=told,
        progress_object=None,
        slot_from=ShardSlot(slot_from),
        slot_to=ShardSlot(slot_to),
        epoch=EPOCH,
        replaced_delete_after_ms=1,
    )


BEFORE: list[Operation] = [
    CREATE,
    SetSubscriptions(subscriptions=(subscription(OWN),), last_subscription_id=OWN, epoch=EPOCH, delete_after_ms=1),
    seal((B1, B2, B3, OWN1, OWN2), FIRST_PROGRESS, 50, 60),
]
SECOND_SEAL = seal((B4, OWN3), SECOND_PROGRESS, 60, 70)
DROP = DropBuckets(buckets=("b2",), epoch=EPOCH, delete_after_ms=1)
QUARANTINE = Quarantine(bucket="b2", damage="its head is damaged", slot=ShardSlot(61), epoch=EPOCH)
NO_SUBSCRIPTION = SetSubscriptions(subscriptions=(), last_subscription_id=OWN, epoch=EPOCH, delete_after_ms=1)
DELETE = DeleteTopic(slot=ShardSlot(80), epoch=EPOCH, delete_after_ms=1)
CREATE_AGAIN = Create(topic=TOPIC, topic_id=TOPIC_ID, epoch=EPOCH, applied=ShardSlot(90))

OWNERS: dict[str, list[Operation]] = {
    "seals": [SECOND_SEAL],
    "seals and drops": [SECOND_SEAL, DROP],
    "quarantines": [QUARANTINE, SECOND_SEAL],
    "deletes the subscription": [NO_SUBSCRIPTION, SECOND_SEAL],
    "deletes the topic": [DELETE, CREATE_AGAIN],
}
# The neighbours that each merger takes, by their places among those of its index.
MERGERS: dict[str, list[tuple[int, slice]]] = {
    "first two and all": [(0, slice(0, 2)), (0, slice(0, None))],
    "last two and first two": [(0, slice(-2, None)), (0, slice(0, 2))],
    "own index twice": [(OWN, slice(0, None)), (OWN, slice(0, 2))],
}


@dataclasses.dataclass(slots=True)
class World:
    """One run: the stored buckets, and what each actor was told."""

    run: Run
    buckets: Buckets
    committed: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def log_of(store: MemoryStore, run: Run, name: str) -> commit.ManifestLog[TopicManifest]:
    """The manifests of a topic whose objects have short names here."""
    ids = (f"{name}-{number}" for number in itertools.count())
    log = topic_manifest.topic_log(
        store,
        SHARD,
        TOPIC_ID,
        monotonic=run.clock.now,
        sleep=run.clock.block,
        jitter=lambda: 0.5,
        new_id=lambda: next(ids),
    )
    log.codec = topic_manifest.CODEC
    return log


def committed(world: World, name: str, place: int, operation: Operation) -> TopicManifest | None:
    """The manifest that holds the operation; None when its outcome stays unknown. Raises Refused."""
    log = log_of(SteppedStore(world.run), world.run, f"{name}{place}")
    for _ in range(TRIES):
        try:
            tip = commit.commit(log, operation, writer=name, created_ms=place, deadline_s=0.0)
        except commit.CommitOutcomeUnknown:
            continue
        world.committed.setdefault(name, []).append(place)
        return tip.manifest
    return None


def owner(world: World, operations: Sequence[Operation]) -> Callable[[], None]:
    def act() -> None:
        for place, operation in enumerate(operations):
            try:
                if committed(world, "owner", place, operation) is None:
                    return
            except commit.Refused as refused:
                if (
                    isinstance(operation, Seal)
                    and "below the orphan floor" in refused.reason
                    and refused.tip is not None
                ):
                    committed(world, "owner", place, begun_at(operation, refused.tip.number))
                elif not isinstance(operation, Quarantine):
                    raise Broken(f"the owner is refused: {refused}") from refused

    return act


def begun_at(operation: Seal, number: int) -> Seal:
    """The same seal, its buckets written again."""
    return dataclasses.replace(
        operation,
        buckets=tuple(
            dataclasses.replace(live, object=dataclasses.replace(live.object, base=number))
            for live in operation.buckets
        ),
    )


def merger(world: World, name: str, chosen: tuple[int, slice]) -> Callable[[], None]:
    """Plans once from the tip, and commits what it planned, whatever has happened since."""
    index, places = chosen

    def act() -> None:
        tip = log_of(SteppedStore(world.run), world.run, name).read_tip()
        if tip is None:
            raise Broken("there was a topic")
        order = [live.object.name for live in adjacent_order(tip.manifest.live) if live.subscription_id == index]
        if not order[places]:
            return
        try:
            operation = world.buckets.merge(tip.manifest, order[places], f"{name} of {tip.number}")
            committed(world, name, 0, operation)
        except merge.NotConserved as error:
            raise Broken(f"{name} finds {error}") from error
        except commit.Refused:
            return

    return act


def collector(world: World) -> Callable[[], None]:
    """Takes the floor up to the tip, and deletes what was begun below it and is not named by the manifest with it."""

    def act() -> None:
        tip = log_of(SteppedStore(world.run), world.run, "collector").read_tip()
        if tip is None:
            raise Broken("there was a topic")
        raised = committed(world, "collector", 0, SetFloor(floor=tip.number))
        if raised is None:
            return
        named = topic_manifest.names_in(raised)
        for name in list(world.buckets.bodies):
            made = name in STORED.bodies
            if not made and name not in named and int(name.rsplit(" ", 1)[1]) < raised.head.orphan_floor:
                del world.buckets.bodies[name]

    return act


def explore(
    bounds: Bounds, operations: Sequence[Operation], mergers: Sequence[tuple[int, slice]], collect: bool
) -> int:
    """Makes every run; how many there were. Raises Broken with the steps that led to it."""

    def once(choices: Choices) -> None:
        run = Run(choices, bounds, PREFIX)
        world = World(run, Buckets(dict(STORED.bodies)))
        for number, operation in enumerate(BEFORE):
            log = log_of(run.store, run, f"before{number}")
            commit.commit(log, operation, writer="before", created_ms=0, deadline_s=1.0)
        actors = {"collector": collector(world)} if collect else {}
        actors["owner"] = owner(world, operations)
        for number, chosen in enumerate(mergers):
            actors[f"merger{number}"] = merger(world, f"merger{number}", chosen)
        try:
            run.run(actors)
            check(history(run.store), world)
        except Broken as broken:
            broken.add_note(" | ".join(run.trace))
            raise

    return interleavings.explore(once)


def history(store: MemoryStore) -> list[TopicManifest]:
    keys = sorted(entry.key for entry in store.list(PREFIX))
    return [manifest.decode_topic_manifest(store.get(key)) for key in keys]


def expected(made: TopicManifest) -> list[Waiting]:
    indexes = {0, *(each.subscription_id for each in made.subscriptions)}
    return sorted(row for row in WAITING.get(made.applied, set()) if row[0] in indexes)


def check(made: Sequence[TopicManifest], world: World) -> None:
    for name, places in world.committed.items():
        written = [each.head.created_ms for each in made if each.head.writer == name]
        # A floor that is higher already, and buckets that have been merged, count as committed.
        told = [place for place in places if name != "collector" and not dropped_by_merge(name, place, made)]
        if len(set(written)) < len(written) or not set(told) <= set(written):
            raise Broken(f"{name} was told of {places}, the history has {written}")
    for before, after in itertools.pairwise(made):
        new = {live.object.name: live for live in after.live}
        for live in before.live:
            new.pop(live.object.name, None)
        low = [name for name, live in new.items() if live.object.base < before.head.orphan_floor]
        if low:
            raise Broken(f"manifest {after.head.number} names {low}, begun below {before.head.orphan_floor}")
    missing = {live.object.name for live in made[-1].live} - world.buckets.bodies.keys()
    if missing:
        raise Broken(f"live buckets {sorted(missing)} were collected")
    everything = Buckets({**world.buckets.bodies})
    for each in made:
        if {live.object.name for live in each.live} <= everything.bodies.keys():
            found = everything.waiting(each)
            if found != expected(each):
                raise Broken(f"in manifest {each.head.number} {found} wait, not {expected(each)}")


def dropped_by_merge(name: str, place: int, made: Sequence[TopicManifest]) -> bool:
    """Whether the owner's drop found its bucket merged."""
    return name == "owner" and place == 1 and any(each.head.writer.startswith("merger") for each in made)


ORDERS = [
    (owner_name, merger_name)
    for owner_name, merger_name in itertools.product(OWNERS, MERGERS)
    if owner_name != "seals" and (owner_name == "deletes the subscription") == (merger_name == "own index twice")
]


@pytest.mark.parametrize(("does", "merges"), parts.first_and_rotating(ORDERS))
def test_in_every_order_of_owner_and_mergers_no_row_is_lost_or_held_twice(does: str, merges: str) -> None:
    bounds = Bounds(preemptions=2, lost_puts=0, collections=0)
    assert explore(bounds, OWNERS[does], MERGERS[merges], collect=False) > 50


@pytest.mark.parametrize("does", ["seals", pytest.param("deletes the topic", marks=pytest.mark.rotating)])
def test_in_every_order_of_owner_merger_and_collector_nothing_live_is_collected(does: str) -> None:
    bounds = Bounds(preemptions=2, lost_puts=0, collections=0)
    assert explore(bounds, OWNERS[does], MERGERS["first two and all"][:1], collect=True) > 50


@pytest.mark.rotating
def test_in_every_order_with_a_lost_answer_a_merge_is_applied_once() -> None:
    bounds = Bounds(preemptions=1, lost_puts=1, collections=0)
    assert explore(bounds, OWNERS["seals and drops"], MERGERS["first two and all"][1:], collect=False) > 50


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("does", "merges"), ORDERS)
def test_in_every_order_within_wider_bounds_nothing_is_lost_either(does: str, merges: str) -> None:
    one = MERGERS[merges][:1]
    assert explore(Bounds(preemptions=3, lost_puts=0, collections=0), OWNERS[does], one, collect=False) > 100
    assert explore(Bounds(preemptions=1, lost_puts=1, collections=0), OWNERS[does], MERGERS[merges], collect=True) > 500


# ---- planted bugs


def leaves_sources_live(patch: pytest.MonkeyPatch) -> None:
    def adds(self: Merge, tip: TopicManifest | None) -> TopicManifest:
        assert tip is not None
        made = () if self.bucket is None else (self.bucket,)
        return dataclasses.replace(tip, live=(*tip.live, *made))

    patch.setattr(Merge, "apply", adds)


def takes_sources_that_are_live_no_longer(patch: pytest.MonkeyPatch) -> None:
    def anywhere(self: Merge, tip: TopicManifest | None) -> str | None:
        return None if tip is not None else "none"

    def adds(self: Merge, tip: TopicManifest | None) -> TopicManifest:
        assert tip is not None
        names = {source.name for source in self.sources}
        left = tuple(live for live in tip.live if live.object.name not in names)
        made = () if self.bucket is None else (self.bucket,)
        return topic_manifest.with_live(tip, (*left, *made), 1)

    patch.setattr(Merge, "precondition", anywhere)
    patch.setattr(Merge, "apply", adds)


def forgets_the_floor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Merge, "_not_bringable", lambda self, tip, merging: None)


def reads_progress_by_name_alone(patch: pytest.MonkeyPatch) -> None:
    """What is told of a source since the plan is lost with it."""
    bits_of = merge.bits_of
    patch.setattr(merge, "bits_of", lambda bucket, kept, progress: bits_of(bucket, (), progress))


def reads_progress_without_kept(patch: pytest.MonkeyPatch) -> None:
    """What is told of a source counts for every row of the position."""
    patch.setattr(merge, "_within", lambda part, within: within_everything(part))


def within_everything(part: manifest.BucketProgress) -> merge.Bits:
    return merge.Bits(PositionSet.of(part.gone), {})


def progress_of_live_buckets_only(patch: pytest.MonkeyPatch) -> None:
    """A seal leaves out what it says of buckets that have been merged."""
    apply = Seal.apply

    def filters(self: Seal, tip: TopicManifest | None) -> TopicManifest:
        made = apply(self, tip)
        if made.progress is None:
            return made
        live = {each.object.name for each in made.live}
        told = tuple(each for each in made.progress.buckets if each.bucket in live)
        return dataclasses.replace(made, progress=Progress(buckets=told))

    patch.setattr(Seal, "apply", filters)


def drops_only_what_is_live(patch: pytest.MonkeyPatch) -> None:
    """The owner's drop is refused when its bucket was merged."""
    precondition = DropBuckets.precondition

    def strict(self: DropBuckets, tip: TopicManifest | None) -> str | None:
        live = set() if tip is None else {each.object.name for each in tip.live}
        return "not live" if set(self.buckets) - live else precondition(self, tip)

    patch.setattr(DropBuckets, "precondition", strict)
    patch.setattr(DropBuckets, "landed", lambda self, tip: False)


def seals_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """The bucket of a subscription that is no more becomes live."""
    patch.setattr(topic_manifest, "_owed", lambda buckets, subscriptions: tuple(buckets))


SHARED = (OWNERS["seals and drops"], MERGERS["first two and all"], False)
OF_A_SUBSCRIPTION = (OWNERS["deletes the subscription"], MERGERS["own index twice"], False)
COLLECTED = (OWNERS["seals"], MERGERS["first two and all"][:1], True)
BUGS = {
    "a merge leaves its sources live": (leaves_sources_live, SHARED),
    "a merge takes sources that are live no longer": (takes_sources_that_are_live_no_longer, SHARED),
    "a merge forgets the floor": (forgets_the_floor, COLLECTED),
    "progress is read by name alone": (reads_progress_by_name_alone, SHARED),
    "progress is read without what was kept": (reads_progress_without_kept, SHARED),
    "a seal filters its progress": (progress_of_live_buckets_only, SHARED),
    "a drop insists on live buckets": (drops_only_what_is_live, SHARED),
    "a seal revives a subscription's index": (seals_for_nobody, OF_A_SUBSCRIPTION),
}


@pytest.mark.rotating
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_in_one_of_the_orders(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, (operations, mergers, collect) = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises(Broken):
        explore(Bounds(preemptions=2, lost_puts=0, collections=0), operations, mergers, collect)


registry.register("orders of an owner, mergers and a collector", BUGS)
