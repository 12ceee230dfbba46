"""The operations on a topic's manifest with the commit primitive: lost answers, zombies, deletion and rebirth; and what
happens when one part of an operation is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from storage_backends import commit, topic_manifest
from storage_backends.formats import names, requirements
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicManifest
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged
from storage_backends.topic_manifest import (
    Create,
    DeleteTopic,
    DropBuckets,
    Quarantine,
    RequireOfTopic,
    Seal,
    SetDelayLevels,
    SetPolicy,
)
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.virtual_clock import VirtualClock
from tests.storage_backends._support.topic_manifests import (
    CLAIM,
    CREATE,
    CREATE_AGAIN,
    DELETE,
    DROP,
    EPOCH,
    LEVELS,
    POLICY,
    QUARANTINE,
    REQUIREMENT,
    SUBSCRIPTIONS,
    TOPIC_ID,
    Operation,
    bucket,
    reference,
    seal_with,
)


def log_of(store: MemoryStore | FaultStore, name: str = "id") -> commit.ManifestLog[TopicManifest]:
    """The manifests of a topic whose objects have short names here."""
    log = topic_log_of(TOPIC_ID, store, name)
    log.codec = topic_manifest.CODEC
    return log


def topic_log_of(topic_id: str, store: MemoryStore | FaultStore, name: str = "id") -> commit.ManifestLog[TopicManifest]:
    clock, ids = VirtualClock(), (f"{name}-{number}" for number in itertools.count())
    return topic_manifest.topic_log(
        store,
        3,
        topic_id,
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
    (dataclasses.replace(QUARANTINE, bucket="b3"), (FIRST_SEAL,)),
    (POLICY, ()),
    (LEVELS, ()),
    (DELETE, (FIRST_SEAL,)),
    (CREATE_AGAIN, (FIRST_SEAL, DELETE)),
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


def test_a_topic_is_deleted_and_born_again_under_one_history() -> None:
    store = with_topic(FIRST_SEAL, SUBSCRIPTIONS, DELETE, CREATE_AGAIN)
    tip = log_of(store).read_tip()
    assert tip is not None
    assert (tip.number, tip.manifest.incarnation, tip.manifest.deleted) == (5, 2, False)
    assert [each.object.name for each in tip.manifest.tombstones] == ["b3"]
    assert (tip.manifest.last_subscription_id, len(tip.manifest.head.lineage)) == (6, 5)


def test_a_damaged_manifest_refuses_its_topic_by_name_and_offset() -> None:
    store = with_topic(FIRST_SEAL)
    key = names.topic_manifest_key(3, TOPIC_ID, 2)
    body = bytearray(store.get(key))
    body[20] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(Damaged, match=f"{key}: topic manifest is damaged at byte {len(body) - 4}"):
        put(log_of(store), CLAIM)


def test_a_manifest_of_another_topic_is_damage() -> None:
    store = with_topic(FIRST_SEAL)
    log = topic_log_of("another", store)
    store.put(log.key(1), store.get(names.topic_manifest_key(3, TOPIC_ID, 1)))
    with pytest.raises(Damaged, match=f"{log.key(1)}: topic manifest is damaged at byte 16: it is of topic 'flights'"):
        log.read_tip()


def test_the_reference_to_an_object_has_its_size_and_hash() -> None:
    made = topic_manifest.reference_to("k", 4, b"body")
    assert (made.name, made.base, made.size_bytes, made.sha256.hex()[:8]) == ("k", 4, 4, "230d8358")


# ---- planted bugs: a part of a precondition or of an effect that is left out lets happen what the tables above forbid


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


class SealOfADeletedTopic(Seal):
    """A seal does not look whether there is a topic."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return super().precondition(None if tip is None else dataclasses.replace(tip, deleted=False))


class DropWhatIsQuarantined(DropBuckets):
    """What cannot be read counts as gone."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        live = () if tip is None else tuple(dataclasses.replace(each, quarantined=False) for each in tip.live)
        return super().precondition(None if tip is None else dataclasses.replace(tip, live=live))


class QuarantineWithoutEpoch(Quarantine):
    """A zombie may say what is damaged."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return super().precondition(None if tip is None else dataclasses.replace(tip, owner_epoch=self.epoch))


class SetPolicyWithoutEpoch(SetPolicy):
    """A zombie may set the policy."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None else "none"


class RequireWithoutEpoch(RequireOfTopic):
    """A zombie may require something."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None else "none"


class RequireForgetsOthers(RequireOfTopic):
    """What was required before is required no longer."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(super().apply(tip), requires=(self.requirement,))


class DeleteForgetsRequirements(DeleteTopic):
    """Rows of the deleted topic may still be in sections."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(super().apply(tip), requires=())


class SetDelayLevelsWithoutEpoch(SetDelayLevels):
    """A zombie may set the delay levels."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None else "none"


class DeleteForgetsDelayLevels(DeleteTopic):
    """The next topic of the name would have them."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        kept = None if tip is None else tip.delay_levels
        return dataclasses.replace(super().apply(tip), delay_levels=kept)


class DeleteWithoutEpoch(DeleteTopic):
    """A zombie may delete the topic."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is not None and not tip.deleted else "none"


class DeleteForgetsIncarnation(DeleteTopic):
    """The next topic of the name has the same incarnation."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        deleted = super().apply(tip)
        return dataclasses.replace(deleted, incarnation=deleted.incarnation - 1)


class DeleteForgetsProgress(DeleteTopic):
    """The progress object leaves without a tombstone."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return super().apply(None if tip is None else dataclasses.replace(tip, progress_object=None))


class DeleteForgetsSubscriptionIds(DeleteTopic):
    """Ids of subscriptions are given again."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(super().apply(tip), last_subscription_id=0)


class CreateWithoutEpoch(Create):
    """A zombie may bring back what its successor deleted."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is None or tip.deleted else "exists"


class CreateAnew(Create):
    """A topic born again begins like one that never was."""

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return super().apply(None)


def planted(kind: type[Operation], operation: Operation) -> Operation:
    """The same operation with the bug."""
    fields = dataclasses.fields(operation)  # type: ignore[arg-type]
    return kind(**{field.name: getattr(operation, field.name) for field in fields})


def after_a_claim(operation: Operation) -> Callable[[type[Operation]], None]:
    """A successor has claimed the topic before the former owner's operation arrives."""

    def scenario(kind: type[Operation]) -> None:
        store = with_topic(FIRST_SEAL)
        put(log_of(store, "successor"), CLAIM)
        with pytest.raises(commit.Refused):
            put(log_of(store), planted(kind, operation))

    return scenario


def seal_twice(kind: type[Operation]) -> None:
    """The answer to a seal was lost, and it is committed again."""
    store = with_topic()
    made = planted(kind, FIRST_SEAL)
    put(log_of(store), made)
    again = put(log_of(store, "again"), made)
    assert [each.object.name for each in again.live] == ["b3"]


def seal_after_a_deletion(kind: type[Operation]) -> None:
    """A seal that was cut before the topic was deleted arrives after."""
    store = with_topic(dataclasses.replace(DELETE, slot=ShardSlot(50)))
    with pytest.raises(commit.Refused):
        put(log_of(store), planted(kind, FIRST_SEAL))


def drop_a_quarantined_bucket(kind: type[Operation]) -> None:
    """Every row of a bucket seems gone, and it is quarantined."""
    store = with_topic(FIRST_SEAL, dataclasses.replace(QUARANTINE, bucket="b3"))
    with pytest.raises(commit.Refused):
        put(log_of(store), planted(kind, dataclasses.replace(DROP, buckets=("b3",))))


def delete_a_full_topic(kind: type[Operation]) -> None:
    """A topic with buckets, a progress object, subscriptions and delay levels is deleted, its name used again."""
    full = dataclasses.replace(FIRST_SEAL, progress=None, progress_object=reference("p"))
    store = with_topic(full, SUBSCRIPTIONS, LEVELS)
    before = log_of(store, "reader").read_tip()
    deleted = put(log_of(store), planted(kind, DELETE))
    assert before is not None
    assert deleted.incarnation > before.manifest.incarnation
    assert {each.object.name for each in deleted.tombstones} == {"b3", "p"}
    assert deleted.last_subscription_id == before.manifest.last_subscription_id
    assert deleted.delay_levels is None


def create_after_a_successors_deletion(kind: type[Operation]) -> None:
    """The former owner has not heard that its successor deleted the topic."""
    store = with_topic(CLAIM, dataclasses.replace(DELETE, epoch=EPOCH + 1))
    with pytest.raises(commit.Refused):
        put(log_of(store), planted(kind, CREATE_AGAIN))


def create_after_a_deletion(kind: type[Operation]) -> None:
    """The name of a deleted topic is used again."""
    store = with_topic(FIRST_SEAL, SUBSCRIPTIONS, DELETE)
    born = put(log_of(store), planted(kind, CREATE_AGAIN))
    assert (born.incarnation, born.last_subscription_id, len(born.tombstones)) == (2, 6, 1)


def require_twice(kind: type[Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things are required, one after the other."""
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "KNOWN", frozenset({"another", "schedule_ids"}))
        store = with_topic(dataclasses.replace(REQUIREMENT, requirement="another"))
        assert put(log_of(store), planted(kind, REQUIREMENT)).requires == ("another", "schedule_ids")


def delete_and_create_what_requires_something(kind: type[Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "KNOWN", frozenset({"schedule_ids"}))
        store = with_topic(FIRST_SEAL, SUBSCRIPTIONS, REQUIREMENT)
        assert put(log_of(store), planted(kind, DELETE)).requires == ("schedule_ids",)
        assert put(log_of(store), CREATE_AGAIN).requires == ("schedule_ids",)


@pytest.mark.parametrize(
    ("right", "bug", "scenario"),
    [
        (RequireOfTopic, RequireForgetsOthers, require_twice),
        (DeleteTopic, DeleteForgetsRequirements, delete_and_create_what_requires_something),
    ],
)
def test_what_is_required_stays(
    right: type[Operation],
    bug: type[Operation],
    scenario: Callable[[type[Operation], pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario(right, monkeypatch)
    with pytest.raises(AssertionError):
        scenario(bug, monkeypatch)


@pytest.mark.parametrize(
    ("right", "bug", "scenario"),
    [
        (Seal, SealWithoutEpoch, after_a_claim(seal_with(slot_from=60, slot_to=61, buckets=(bucket("b4"),)))),
        (Seal, SealWithoutApplied, seal_twice),
        (Seal, SealOfADeletedTopic, seal_after_a_deletion),
        (DropBuckets, DropWhatIsQuarantined, drop_a_quarantined_bucket),
        (Quarantine, QuarantineWithoutEpoch, after_a_claim(dataclasses.replace(QUARANTINE, bucket="b3"))),
        (SetPolicy, SetPolicyWithoutEpoch, after_a_claim(POLICY)),
        (RequireOfTopic, RequireWithoutEpoch, after_a_claim(REQUIREMENT)),
        (SetDelayLevels, SetDelayLevelsWithoutEpoch, after_a_claim(LEVELS)),
        (DeleteTopic, DeleteWithoutEpoch, after_a_claim(DELETE)),
        (DeleteTopic, DeleteForgetsIncarnation, delete_a_full_topic),
        (DeleteTopic, DeleteForgetsProgress, delete_a_full_topic),
        (DeleteTopic, DeleteForgetsDelayLevels, delete_a_full_topic),
        (DeleteTopic, DeleteForgetsSubscriptionIds, delete_a_full_topic),
        (Create, CreateWithoutEpoch, create_after_a_successors_deletion),
        (Create, CreateAnew, create_after_a_deletion),
    ],
)
def test_a_planted_bug_of_an_operation_is_found(
    right: type[Operation], bug: type[Operation], scenario: Callable[[type[Operation]], None]
) -> None:
    scenario(right)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario(bug)
