"""What may follow what in a topic's manifest, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from storage_backends import commit, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.manifest import (
    BucketProgress,
    LiveBucket,
    ManifestHead,
    ObjectReference,
    Progress,
    Subscription,
    Tombstone,
    TopicManifest,
)
from storage_backends.memory import MemoryStore
from storage_backends.object_store import Damaged
from storage_backends.topic_manifest import Claim, Create, DropBuckets, Seal, SetSubscriptions
from tests.support.fault_store import Fault, FaultStore, Script
from tests.support.virtual_clock import VirtualClock

TOPIC = "flights"
TOPIC_ID = names.topic_id(TOPIC)
EPOCH = 4
APPLIED = 100
FLOOR = 10
DELETE_AFTER_MS = 9_000

Operation = commit.Operation[TopicManifest]


def reference(name: str, base: int = 20) -> ObjectReference:
    return ObjectReference(name=name, base=base, size_bytes=7, sha256=b"\2" * 32)


def bucket(name: str, base: int = 20) -> LiveBucket:
    return LiveBucket(
        object=reference(name, base),
        rows=3,
        first_ledger_id=1,
        last_ledger_id=2,
        min_deliver_at_ms=5,
        max_deliver_at_ms=6,
        hash_low=1,
        hash_high=2,
    )


def subscription(number: int) -> Subscription:
    return Subscription(subscription_id=number, name=f"s{number}", since_ms=0, created_slot=1)


def progress(*buckets: str) -> Progress:
    return Progress(buckets=tuple(BucketProgress(bucket=each) for each in buckets))


def tombstone(name: str) -> Tombstone:
    return Tombstone(object=reference(name), removed_in=3, delete_after_ms=1)


TIP = TopicManifest(
    head=ManifestHead(
        number=30, previous_sha256=b"", commit_id="c", writer="w", created_ms=1, lineage=("c",), orphan_floor=FLOOR
    ),
    topic=TOPIC,
    topic_id=TOPIC_ID,
    incarnation=1,
    owner_epoch=EPOCH,
    applied=APPLIED,
    live=(bucket("b1"), bucket("b2")),
    tombstones=(tombstone("dead"),),
    subscriptions=(subscription(1), subscription(3)),
    last_subscription_id=5,
    progress=progress("b1", "b2"),
)

CREATE = Create(topic=TOPIC, topic_id=TOPIC_ID, incarnation=1, epoch=EPOCH, applied=50)
CLAIM = Claim(epoch=EPOCH + 1)
SEAL = Seal(
    buckets=(bucket("b3"),),
    progress=progress("b1", "b3"),
    progress_object=None,
    slot_from=APPLIED,
    slot_to=APPLIED + 20,
    epoch=EPOCH,
    replaced_delete_after_ms=DELETE_AFTER_MS,
)
DROP = DropBuckets(buckets=("b1",), epoch=EPOCH, delete_after_ms=DELETE_AFTER_MS)
SUBSCRIPTIONS = SetSubscriptions(subscriptions=(subscription(6),), last_subscription_id=6, epoch=EPOCH)


def tip_with(**changes: object) -> TopicManifest:
    return dataclasses.replace(TIP, **changes)  # type: ignore[arg-type]


def seal_with(**changes: object) -> Seal:
    return dataclasses.replace(SEAL, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "tip"),
    [
        (CREATE, None),
        (CLAIM, TIP),
        (CLAIM, tip_with(owner_epoch=1)),
        (SEAL, TIP),
        (seal_with(buckets=()), TIP),
        (seal_with(buckets=(bucket("b3", base=FLOOR),)), TIP),
        (seal_with(buckets=(bucket("b3"), bucket("b4"))), TIP),
        (seal_with(progress=None, progress_object=reference("p", base=FLOOR)), TIP),
        (seal_with(slot_to=APPLIED), TIP),
        (DROP, TIP),
        (dataclasses.replace(DROP, buckets=("b1", "b2")), TIP),
        (SUBSCRIPTIONS, TIP),
        (dataclasses.replace(SUBSCRIPTIONS, subscriptions=(), last_subscription_id=5), TIP),
    ],
    ids=str,
)
def test_an_operation_is_accepted_when_all_of_its_precondition_holds(
    operation: Operation, tip: TopicManifest | None
) -> None:
    assert operation.precondition(tip) is None
    assert tip is None or not operation.landed(tip)


@pytest.mark.parametrize(
    ("operation", "tip", "reason"),
    [
        (CREATE, TIP, "topic flights exists"),
        (CLAIM, None, "the topic does not exist"),
        (CLAIM, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not below 5"),
        (CLAIM, tip_with(owner_epoch=EPOCH + 2), "owner epoch is 6, not below 5"),
        (SEAL, None, "the topic does not exist"),
        (SEAL, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (SEAL, tip_with(owner_epoch=EPOCH - 1), "owner epoch is 3, not 4"),
        (SEAL, tip_with(applied=APPLIED + 1), "applied is 101, not 100"),
        (SEAL, tip_with(applied=APPLIED - 1), "applied is 99, not 100"),
        (seal_with(slot_to=APPLIED - 1), TIP, "applied is 100, it cannot become 99"),
        (seal_with(buckets=(bucket("b3", base=9),)), TIP, "object b3 was started below the orphan floor 10"),
        (
            seal_with(progress=None, progress_object=reference("p", base=9)),
            TIP,
            "object p was started below the orphan floor 10",
        ),
        (seal_with(buckets=(bucket("b2"),)), TIP, "object b2 is named twice"),
        (seal_with(buckets=(bucket("b3"), bucket("b3"))), TIP, "object b3 is named twice"),
        (seal_with(buckets=(bucket("dead"),)), TIP, "object dead is named twice"),
        (DROP, None, "the topic does not exist"),
        (DROP, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (dataclasses.replace(DROP, buckets=("b1", "b9")), TIP, "buckets ['b9'] are not live"),
        (SUBSCRIPTIONS, None, "the topic does not exist"),
        (SUBSCRIPTIONS, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (SUBSCRIPTIONS, tip_with(last_subscription_id=7), "the last subscription id is 7, it cannot become 6"),
        (
            dataclasses.replace(SUBSCRIPTIONS, last_subscription_id=5),
            TIP,
            "the last subscription id is 6, it cannot become 5",
        ),
    ],
    ids=str,
)
def test_an_operation_is_refused_when_one_part_of_its_precondition_fails(
    operation: Operation, tip: TopicManifest | None, reason: str
) -> None:
    assert operation.precondition(tip) == reason


def test_a_topic_is_born_empty_and_owned() -> None:
    assert CREATE.apply(None) == TopicManifest(
        head=commit.NO_HEAD, topic=TOPIC, topic_id=TOPIC_ID, incarnation=1, owner_epoch=EPOCH, applied=50
    )


def test_a_claim_changes_the_owner_epoch_and_nothing_else() -> None:
    assert CLAIM.apply(TIP) == tip_with(owner_epoch=EPOCH + 1)


def test_a_seal_adds_its_buckets_moves_applied_and_replaces_the_progress() -> None:
    assert SEAL.apply(TIP) == tip_with(
        live=(bucket("b1"), bucket("b2"), bucket("b3")), applied=APPLIED + 20, progress=progress("b1", "b3")
    )


def test_a_seal_leaves_out_the_progress_of_buckets_that_are_live_no_longer() -> None:
    sealed = seal_with(progress=progress("b1", "dropped", "b2", "b3", "")).apply(TIP)
    assert sealed.progress == progress("b1", "b2", "b3")


def test_a_seal_without_rows_moves_applied_and_replaces_the_progress() -> None:
    sealed = seal_with(buckets=(), progress=progress()).apply(TIP)
    assert sealed == tip_with(applied=APPLIED + 20, progress=progress())


def test_progress_as_an_object_replaces_the_inline_one_and_its_successor_buries_it() -> None:
    first = seal_with(progress=None, progress_object=reference("p1")).apply(TIP)
    assert (first.progress, first.progress_object, first.tombstones) == (None, reference("p1"), TIP.tombstones)
    second = seal_with(buckets=(), progress=None, progress_object=reference("p2")).apply(first)
    buried = Tombstone(object=reference("p1"), removed_in=31, delete_after_ms=DELETE_AFTER_MS)
    assert (second.progress, second.progress_object) == (None, reference("p2"))
    assert second.tombstones == (*TIP.tombstones, buried)
    third = seal_with(buckets=()).apply(first)
    assert (third.progress, third.progress_object, third.tombstones[-1]) == (progress("b1", "b3"), None, buried)


@pytest.mark.parametrize("both", [(None, None), (progress(), reference("p"))])
def test_a_seal_has_its_progress_in_exactly_one_place(both: tuple[Progress | None, ObjectReference | None]) -> None:
    with pytest.raises(ValueError, match="inline or as an object"):
        seal_with(progress=both[0], progress_object=both[1])


def test_dropped_buckets_become_tombstones_and_their_progress_leaves_with_them() -> None:
    dropped = DROP.apply(TIP)
    buried = Tombstone(object=reference("b1"), removed_in=31, delete_after_ms=DELETE_AFTER_MS)
    assert dropped == tip_with(live=(bucket("b2"),), tombstones=(*TIP.tombstones, buried), progress=progress("b2"))


def test_dropping_buckets_leaves_a_progress_object_as_it_is() -> None:
    tip = tip_with(progress=None, progress_object=reference("p"))
    dropped = DROP.apply(tip)
    assert (dropped.progress, dropped.progress_object) == (None, reference("p"))


def test_subscriptions_are_set_as_a_whole() -> None:
    assert SUBSCRIPTIONS.apply(TIP) == tip_with(subscriptions=(subscription(6),), last_subscription_id=6)


@pytest.mark.parametrize("operation", [CLAIM, SEAL, DROP, SUBSCRIPTIONS], ids=str)
def test_nothing_but_a_creation_is_applied_to_no_topic(operation: Operation) -> None:
    with pytest.raises(ValueError, match="the topic does not exist"):
        operation.apply(None)


# ---- what shows that an operation has landed


@pytest.mark.parametrize(
    ("operation", "tip"),
    [
        (CREATE, None),
        (CLAIM, TIP),
        (SEAL, TIP),
        (seal_with(buckets=()), TIP),
        (seal_with(buckets=(), progress=None, progress_object=reference("p")), TIP),
        (DROP, TIP),
        (SUBSCRIPTIONS, TIP),
    ],
    ids=str,
)
def test_an_operation_finds_itself_in_the_manifest_that_it_made(
    operation: Operation, tip: TopicManifest | None
) -> None:
    assert operation.landed(operation.apply(tip))


@pytest.mark.parametrize(
    ("operation", "later"),
    [
        (SEAL, Claim(epoch=9)),
        (SEAL, DropBuckets(buckets=("b3",), epoch=EPOCH, delete_after_ms=1)),
        (SEAL, seal_with(buckets=(bucket("b4"),), slot_from=120, slot_to=130)),
        (DROP, Claim(epoch=9)),
        (seal_with(buckets=(), progress=None, progress_object=reference("p")), seal_with(slot_from=120, slot_to=130)),
    ],
    ids=str,
)
def test_an_operation_with_an_object_finds_itself_also_after_what_came_later(
    operation: Operation, later: Operation
) -> None:
    tip = operation.apply(TIP)
    assert later.precondition(tip) is None
    assert operation.landed(later.apply(tip))


@pytest.mark.parametrize(
    ("operation", "tip"),
    [
        (CREATE, tip_with(owner_epoch=EPOCH + 1)),
        (CREATE, tip_with(incarnation=2)),
        (seal_with(buckets=()), tip_with(applied=APPLIED + 20, owner_epoch=EPOCH + 1)),
        (SUBSCRIPTIONS, dataclasses.replace(SUBSCRIPTIONS.apply(TIP), owner_epoch=EPOCH + 1)),
        (SUBSCRIPTIONS, tip_with(last_subscription_id=6)),
    ],
    ids=str,
)
def test_an_operation_does_not_take_another_ones_manifest_for_its_own(operation: Operation, tip: TopicManifest) -> None:
    assert not operation.landed(tip)


# ---- with the primitive


def log_of(store: MemoryStore | FaultStore, name: str = "id") -> commit.ManifestLog[TopicManifest]:
    clock, ids = VirtualClock(), (f"{name}-{number}" for number in itertools.count())
    return topic_manifest.topic_log(
        store,
        3,
        TOPIC_ID,
        monotonic=clock.now,
        sleep=clock.block,
        jitter=lambda: 0.5,
        new_id=lambda: next(ids),
    )


def put(log: commit.ManifestLog[TopicManifest], operation: Operation) -> TopicManifest:
    return commit.commit(log, operation, writer="d", created_ms=1, deadline_s=10.0).manifest


def with_topic(*operations: Operation) -> MemoryStore:
    store = MemoryStore()
    for operation in (CREATE, *operations):
        put(log_of(store, str(id(operation))), operation)
    return store


FIRST_SEAL = seal_with(slot_from=50, slot_to=60)
TO_RETRY: list[tuple[Operation, tuple[Operation, ...]]] = [
    (CLAIM, ()),
    (FIRST_SEAL, ()),
    (dataclasses.replace(FIRST_SEAL, buckets=()), ()),
    (DropBuckets(buckets=("b3",), epoch=EPOCH, delete_after_ms=1), (FIRST_SEAL,)),
    (SUBSCRIPTIONS, ()),
]


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE])
@pytest.mark.parametrize(("operation", "before"), TO_RETRY, ids=str)
def test_an_operation_whose_outcome_is_unknown_is_committed_again_and_applied_once(
    operation: Operation, before: tuple[Operation, ...], fault: Fault
) -> None:
    script = Script()
    script.plan("put_if_absent", fault)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    inner = with_topic(*before)
    number = 2 + len(before)
    store = FaultStore(inner, script)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(store), operation)
    again = put(log_of(inner, "again"), operation)
    store.deliver_late()
    assert again.head.number == number
    tip = log_of(inner).read_tip()
    assert tip is not None
    assert tip.manifest == again


def test_a_creation_whose_outcome_is_unknown_is_committed_again_and_applied_once() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    store = FaultStore(MemoryStore(), script)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(store), CREATE)
    assert put(log_of(store.inner, "again"), CREATE).head.number == 1  # type: ignore[arg-type]


def test_a_seal_of_a_replaced_owner_is_refused_and_its_object_left_alone() -> None:
    store = with_topic()
    store.put("b3", b"rows")
    put(log_of(store, "successor"), CLAIM)
    with pytest.raises(commit.Refused, match="owner epoch is 5, not 4"):
        put(log_of(store), FIRST_SEAL)
    assert store.get("b3") == b"rows"


def test_a_damaged_manifest_refuses_its_topic_by_name_and_offset() -> None:
    store = with_topic(FIRST_SEAL)
    key = names.topic_manifest_key(3, TOPIC_ID, 2)
    body = bytearray(store.get(key))
    body[20] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(Damaged, match=f"{key}: topic manifest is damaged at byte {len(body) - 4}"):
        put(log_of(store), CLAIM)


def test_the_reference_to_an_object_has_its_size_and_hash() -> None:
    made = topic_manifest.reference_to("k", 4, b"body")
    assert (made.name, made.base, made.size_bytes, made.sha256.hex()[:8]) == ("k", 4, 4, "230d8358")


# ---- planted bugs: a precondition that is left out lets happen what the tables above forbid


class SealWithoutEpoch(Seal):
    """A zombie may seal."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None and tip.applied == self.slot_from else "applied"


class SealWithoutApplied(Seal):
    """A seal is applied wherever it comes."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None and tip.owner_epoch == self.epoch else "epoch"

    def landed(self, tip: TopicManifest) -> bool:
        return False


def seal_after_a_claim(kind: type[Seal]) -> None:
    """A successor has claimed the topic before the former owner's seal arrives."""
    store = with_topic()
    put(log_of(store, "successor"), CLAIM)
    zombie = kind(**{field.name: getattr(FIRST_SEAL, field.name) for field in dataclasses.fields(Seal)})
    with pytest.raises(commit.Refused):
        put(log_of(store), zombie)


def seal_twice(kind: type[Seal]) -> None:
    """The answer to a seal was lost, and it is committed again."""
    store = with_topic()
    made = kind(**{field.name: getattr(FIRST_SEAL, field.name) for field in dataclasses.fields(Seal)})
    put(log_of(store), made)
    again = put(log_of(store, "again"), made)
    assert [each.object.name for each in again.live] == ["b3"]


@pytest.mark.parametrize(
    ("scenario", "bug"), [(seal_after_a_claim, SealWithoutEpoch), (seal_twice, SealWithoutApplied)]
)
def test_a_planted_bug_of_a_seal_is_found(scenario: Callable[[type[Seal]], None], bug: type[Seal]) -> None:
    scenario(Seal)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario(bug)
