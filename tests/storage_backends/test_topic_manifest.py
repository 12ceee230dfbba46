"""What may follow what in a topic's manifest, and what it leaves behind."""

from __future__ import annotations

import dataclasses

import pytest

from storage_backends import commit
from storage_backends.formats import index_ids
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    CountPlane,
    DeadLetters,
    LevelRows,
    NackedRows,
    ObjectReference,
    Progress,
    Redeliveries,
    SubscriptionPolicy,
    TopicManifest,
    TopicPolicy,
)
from storage_backends.topic_manifest import ClaimTopic, DropBuckets
from tests.storage_backends._support.topic_manifests import (
    APPLIED,
    CLAIM,
    CREATE,
    CREATE_AGAIN,
    DELETE,
    DELETED,
    DROP,
    EPOCH,
    FLOOR,
    LEVELS,
    POLICY,
    QUARANTINE,
    QUARANTINED,
    SEAL,
    SUBSCRIPTIONS,
    TIP,
    TOPIC,
    TOPIC_ID,
    Operation,
    bucket,
    buried,
    progress,
    reference,
    seal_with,
    subscription,
    tip_with,
)


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
        (dataclasses.replace(DROP, buckets=("b1", "merged")), TIP),
        (SUBSCRIPTIONS, TIP),
        (seal_with(buckets=(bucket("b3", subscription_id=9),)), TIP),
        (dataclasses.replace(SUBSCRIPTIONS, subscriptions=(), last_subscription_id=5), TIP),
        (QUARANTINE, TIP),
        (dataclasses.replace(QUARANTINE, bucket="b2"), QUARANTINED),
        (POLICY, TIP),
        (LEVELS, TIP),
        (DELETE, TIP),
        (DELETE, QUARANTINED),
        (dataclasses.replace(DELETE, slot=ShardSlot(APPLIED)), TIP),
        (dataclasses.replace(DELETE, slot=ShardSlot(APPLIED + 9)), CREATE_AGAIN.apply(DELETED)),
        (dataclasses.replace(DROP, buckets=("b2",)), QUARANTINED),
        (CREATE_AGAIN, DELETED),
        (dataclasses.replace(CREATE_AGAIN, epoch=EPOCH + 1), DELETED),
        (dataclasses.replace(CREATE_AGAIN, applied=ShardSlot(APPLIED + 7)), DELETED),
        (CLAIM, DELETED),
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
        (SUBSCRIPTIONS, None, "the topic does not exist"),
        (SUBSCRIPTIONS, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (SUBSCRIPTIONS, tip_with(last_subscription_id=7), "the last subscription id is 7, it cannot become 6"),
        (
            dataclasses.replace(SUBSCRIPTIONS, last_subscription_id=5),
            TIP,
            "the last subscription id is 6, it cannot become 5",
        ),
        (DROP, QUARANTINED, "buckets ['b1'] are quarantined"),
        (dataclasses.replace(DROP, buckets=("b1", "b2")), QUARANTINED, "buckets ['b1'] are quarantined"),
        (QUARANTINE, None, "the topic does not exist"),
        (QUARANTINE, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (dataclasses.replace(QUARANTINE, bucket="dead"), TIP, "bucket dead is not live"),
        (
            dataclasses.replace(QUARANTINE, damage="its head is damaged"),
            QUARANTINED,
            "bucket b1 is quarantined: segment 3 is damaged",
        ),
        (POLICY, None, "the topic does not exist"),
        (LEVELS, None, "the topic does not exist"),
        (POLICY, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (DELETE, None, "the topic does not exist"),
        (DELETE, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (dataclasses.replace(DELETE, slot=ShardSlot(APPLIED - 1)), TIP, "applied is 100, it cannot become 99"),
        (dataclasses.replace(CREATE_AGAIN, epoch=EPOCH - 1), DELETED, "owner epoch is 4, above 3"),
        (
            dataclasses.replace(CREATE_AGAIN, applied=ShardSlot(APPLIED + 6)),
            DELETED,
            "applied is 107, it cannot become 106",
        ),
        (seal_with(slot_from=APPLIED + 7), DELETED, "the topic was deleted"),
        (DROP, DELETED, "the topic was deleted"),
        (SUBSCRIPTIONS, DELETED, "the topic was deleted"),
        (QUARANTINE, DELETED, "the topic was deleted"),
        (POLICY, DELETED, "the topic was deleted"),
        (LEVELS, tip_with(owner_epoch=EPOCH + 1), "owner epoch is 5, not 4"),
        (LEVELS, DELETED, "the topic was deleted"),
        (dataclasses.replace(DELETE, slot=ShardSlot(APPLIED + 8)), DELETED, "the topic was deleted"),
    ],
    ids=str,
)
def test_an_operation_is_refused_when_one_part_of_its_precondition_fails(
    operation: Operation, tip: TopicManifest | None, reason: str
) -> None:
    assert operation.precondition(tip) == reason


def test_a_topic_is_born_empty_and_owned() -> None:
    assert CREATE.apply(None) == TopicManifest(
        head=commit.NO_HEAD, topic=TOPIC, topic_id=TOPIC_ID, incarnation=1, owner_epoch=EPOCH, applied=ShardSlot(50)
    )


def test_a_claim_changes_the_owner_epoch_and_nothing_else() -> None:
    assert CLAIM.apply(TIP) == tip_with(owner_epoch=EPOCH + 1)


def test_a_seal_adds_its_buckets_moves_applied_and_replaces_the_progress() -> None:
    assert SEAL.apply(TIP) == tip_with(
        live=(bucket("b1"), bucket("b2"), bucket("b3")), applied=APPLIED + 20, progress=progress("b1", "b3")
    )


def test_the_progress_of_a_seal_may_name_buckets_that_have_been_merged_since() -> None:
    named = progress("b1", "merged", "b2", "b3")
    assert seal_with(progress=named).apply(TIP).progress == named


def test_a_sealed_bucket_of_a_subscription_that_is_no_more_is_buried_and_not_live() -> None:
    sealed = seal_with(buckets=(bucket("b3", subscription_id=9), bucket("b4", subscription_id=3))).apply(TIP)
    assert sealed.live == (*TIP.live, bucket("b4", subscription_id=3))
    assert sealed.tombstones == (*TIP.tombstones, *buried("b3"))


@pytest.mark.parametrize("owes", [False, True])
def test_a_seal_that_leaves_no_bucket_leaves_progress_only_where_a_subscription_may_have_dead_letters(
    owes: bool,
) -> None:
    subscriptions = TIP.subscriptions if owes else ()
    unowed = seal_with(buckets=(bucket("b3", subscription_id=9),), progress=None, progress_object=reference("p2"))
    sealed = unowed.apply(
        tip_with(live=(), progress=None, progress_object=reference("p1"), subscriptions=subscriptions)
    )
    left = buried("p1", "b3") if owes else buried("p1", "b3", "p2")
    assert sealed == tip_with(
        live=(),
        applied=APPLIED + 20,
        subscriptions=subscriptions,
        progress=None,
        progress_object=reference("p2") if owes else None,
        tombstones=(*TIP.tombstones, *left),
    )
    assert unowed.landed(sealed)


def test_the_batch_parts_of_a_subscription_are_sealed_while_it_is_there() -> None:
    parts = [bucket(f"parts of {owner}", subscription_id=index_ids.batch_parts_of(owner)) for owner in (3, 9)]
    sealed = seal_with(buckets=tuple(parts)).apply(TIP)
    assert sealed.live == (*TIP.live, parts[0])
    assert sealed.tombstones == (*TIP.tombstones, *buried("parts of 9"))


def test_a_seal_without_rows_moves_applied_and_replaces_the_progress() -> None:
    sealed = seal_with(buckets=(), progress=progress()).apply(TIP)
    assert sealed == tip_with(applied=APPLIED + 20, progress=progress())


def test_progress_as_an_object_replaces_the_inline_one_and_its_successor_buries_it() -> None:
    first = seal_with(progress=None, progress_object=reference("p1")).apply(TIP)
    assert (first.progress, first.progress_object, first.tombstones) == (None, reference("p1"), TIP.tombstones)
    second = seal_with(buckets=(), progress=None, progress_object=reference("p2")).apply(first)
    assert (second.progress, second.progress_object) == (None, reference("p2"))
    assert second.tombstones == (*TIP.tombstones, *buried("p1"))
    third = seal_with(buckets=()).apply(first)
    assert (third.progress, third.progress_object) == (progress("b1", "b3"), None)
    assert third.tombstones[-1:] == buried("p1")


@pytest.mark.parametrize("both", [(None, None), (progress(), reference("p"))])
def test_a_seal_has_its_progress_in_exactly_one_place(both: tuple[Progress | None, ObjectReference | None]) -> None:
    with pytest.raises(ValueError, match="inline or as an object"):
        seal_with(progress=both[0], progress_object=both[1])


def test_dropped_buckets_become_tombstones_and_progress_stays_as_it_is() -> None:
    assert DROP.apply(TIP) == tip_with(live=(bucket("b2"),), tombstones=(*TIP.tombstones, *buried("b1")))


def test_a_bucket_that_was_merged_before_it_could_be_dropped_has_left_already() -> None:
    both = dataclasses.replace(DROP, buckets=("b1", "merged"))
    assert both.apply(TIP) == DROP.apply(TIP)
    assert both.landed(DROP.apply(TIP))
    assert dataclasses.replace(DROP, buckets=("merged",)).landed(TIP)


DROP_ALL = dataclasses.replace(DROP, buckets=("b1", "b2"))


def test_the_last_bucket_takes_the_progress_of_buckets_with_it() -> None:
    assert DROP_ALL.apply(TIP) == tip_with(live=(), progress=None, tombstones=(*TIP.tombstones, *buried("b1", "b2")))


def test_the_last_bucket_takes_a_progress_object_with_it_when_there_is_no_subscription() -> None:
    tip = tip_with(progress=None, progress_object=reference("p"))
    assert DROP_ALL.apply(tip).progress_object == reference("p")
    alone = dataclasses.replace(tip, subscriptions=())
    assert DROP_ALL.apply(alone) == dataclasses.replace(
        alone, live=(), progress_object=None, tombstones=(*TIP.tombstones, *buried("b1", "b2", "p"))
    )


def test_dead_letters_and_their_highest_id_outlive_the_last_bucket_and_leave_with_their_subscription() -> None:
    with_value = (field for field in dataclasses.fields(DeadLetters) if field.default is dataclasses.MISSING)
    columns = {field.name: b"" for field in with_value if field.name not in ("rows", "texts")}
    letters = DeadLetters(rows=0, **columns)  # type: ignore[arg-type]
    nacked = NackedRows(index_id=0, rows=0, deliver_at_ms=b"", ledger_id=b"", entry_id=b"", redeliver_at_ms=b"")
    kept = (
        Redeliveries(subscription_id=1, dead_letters=letters, last_dead_letter_id=8),
        Redeliveries(subscription_id=3, last_dead_letter_id=2),
    )
    full = dataclasses.replace(
        progress("b1", "b2"),
        redeliveries=(
            dataclasses.replace(kept[0], nacked=(nacked,), counts=(CountPlane(index_id=0, bit=0),)),
            kept[1],
            Redeliveries(subscription_id=4, dead_letters=letters, last_dead_letter_id=1),
            Redeliveries(subscription_id=5, nacked=(nacked,)),
        ),
        levels=(LevelRows(index_id=0, delay_level=3),),
    )
    tip = tip_with(progress=full)
    assert DROP.apply(tip).progress == full
    dropped = DROP_ALL.apply(tip)
    assert dropped.progress == Progress(redeliveries=kept)
    left = dataclasses.replace(SUBSCRIPTIONS, subscriptions=(subscription(3),)).apply(dropped)
    assert left.progress == Progress(redeliveries=kept[1:])
    assert DELETE.apply(dropped).progress is None


def test_dropping_buckets_leaves_a_progress_object_as_it_is() -> None:
    tip = tip_with(progress=None, progress_object=reference("p"))
    dropped = DROP.apply(tip)
    assert (dropped.progress, dropped.progress_object) == (None, reference("p"))


def test_subscriptions_are_set_as_a_whole() -> None:
    assert SUBSCRIPTIONS.apply(TIP) == tip_with(subscriptions=(subscription(6),), last_subscription_id=6)


def test_the_buckets_of_a_subscription_leave_with_it_also_quarantined_ones() -> None:
    own = bucket("own", subscription_id=3)
    lost = dataclasses.replace(bucket("lost", subscription_id=3), quarantined=True)
    kept = bucket("kept", subscription_id=1)
    tip = tip_with(live=(bucket("b1"), own, lost, kept))
    left = dataclasses.replace(SUBSCRIPTIONS, subscriptions=(subscription(1),)).apply(tip)
    assert left == tip_with(
        live=(bucket("b1"), kept),
        subscriptions=(subscription(1),),
        last_subscription_id=6,
        tombstones=(*TIP.tombstones, *buried("own", "lost")),
    )


def test_the_last_bucket_of_the_last_subscription_takes_the_progress_with_it() -> None:
    parts = bucket("parts", subscription_id=index_ids.batch_parts_of(3))
    tip = tip_with(live=(bucket("own", subscription_id=3), parts), progress=None, progress_object=reference("p"))
    left = dataclasses.replace(SUBSCRIPTIONS, subscriptions=()).apply(tip)
    assert (left.live, left.progress_object, left.tombstones[1:]) == ((), None, buried("own", "parts", "p"))


def test_a_quarantined_bucket_stays_live_with_its_progress_and_says_what_was_found() -> None:
    assert QUARANTINE.apply(TIP) == QUARANTINED
    sealed = seal_with(progress=progress("b1", "b3")).apply(QUARANTINED)
    assert (sealed.live[:2], sealed.progress) == (QUARANTINED.live, progress("b1", "b3"))


def test_a_policy_is_set_as_a_whole() -> None:
    assert POLICY.apply(tip_with(policy=TopicPolicy(bucket_rows_max=3))) == tip_with(policy=POLICY.policy)


def test_delay_levels_are_set_and_unset_as_a_whole_and_a_new_topic_of_the_name_has_none() -> None:
    assert LEVELS.apply(TIP) == tip_with(delay_levels=LEVELS.levels)
    assert dataclasses.replace(LEVELS, levels=None).apply(LEVELS.apply(TIP)) == TIP
    deleted = DELETE.apply(LEVELS.apply(TIP))
    assert deleted.delay_levels is None
    assert dataclasses.replace(CREATE, applied=deleted.applied).apply(deleted).delay_levels is None


def test_a_deletion_buries_every_object_and_empties_the_topic_but_gives_no_id_and_no_incarnation_again() -> None:
    deleted = DELETE.apply(tip_with(progress=None, progress_object=reference("p"), policy=POLICY.policy))
    assert deleted == tip_with(
        incarnation=2,
        applied=APPLIED + 7,
        live=(),
        tombstones=(*TIP.tombstones, *buried("b1", "b2", "p")),
        subscriptions=(),
        progress=None,
        progress_object=None,
        policy=TopicPolicy(),
        deleted=True,
    )
    assert (deleted.last_subscription_id, deleted.head) == (5, TIP.head)


def test_the_properties_before_are_buried_when_others_take_their_place_and_stay_named_otherwise() -> None:
    given = dataclasses.replace(SUBSCRIPTIONS, properties_object=reference("q1"))
    first = given.apply(TIP)
    assert (first.properties_object, first.tombstones) == (reference("q1"), TIP.tombstones)
    assert given.apply(first).tombstones == TIP.tombstones
    assert given.precondition(first) is None, "what is named already is not brought in"
    for after in (None, reference("q2")):
        second = dataclasses.replace(given, properties_object=after).apply(first)
        assert (second.properties_object, second.tombstones) == (after, (*TIP.tombstones, *buried("q1")))
    deleted = DELETE.apply(first)
    assert deleted.properties_object is None
    assert buried("q1")[0] in deleted.tombstones
    for operation in (SEAL, DROP, QUARANTINE, POLICY, LEVELS):
        assert operation.apply(first).properties_object == reference("q1")


def test_properties_from_below_the_floor_or_that_have_left_are_not_brought_in() -> None:
    below = dataclasses.replace(SUBSCRIPTIONS, properties_object=reference("q", base=FLOOR - 1))
    assert "below the orphan floor" in (below.precondition(TIP) or "")
    left = dataclasses.replace(SUBSCRIPTIONS, properties_object=TIP.tombstones[0].object)
    assert left.precondition(TIP) is not None


def test_a_change_of_properties_alone_tells_whether_it_has_landed() -> None:
    given = dataclasses.replace(SUBSCRIPTIONS, properties_object=reference("q1"))
    assert not given.landed(SUBSCRIPTIONS.apply(TIP))
    assert given.landed(given.apply(TIP))
    assert not SUBSCRIPTIONS.landed(given.apply(TIP))


def test_a_deletion_buries_quarantined_buckets_too() -> None:
    assert [each.object.name for each in DELETE.apply(QUARANTINED).tombstones] == ["dead", "b1", "b2"]


def test_a_topic_born_again_keeps_what_its_deletion_raised_and_what_is_buried() -> None:
    born = dataclasses.replace(CREATE_AGAIN, epoch=EPOCH + 1).apply(DELETED)
    assert born == dataclasses.replace(DELETED, deleted=False, owner_epoch=EPOCH + 1, applied=ShardSlot(APPLIED + 9))
    assert (born.incarnation, born.last_subscription_id, born.head) == (2, 5, TIP.head)


def test_the_policy_of_a_subscription_is_set_with_it() -> None:
    ours = dataclasses.replace(subscription(6), policy=SubscriptionPolicy(lease_ms=5))
    changed = dataclasses.replace(SUBSCRIPTIONS, subscriptions=(ours,))
    assert changed.apply(SUBSCRIPTIONS.apply(TIP)).subscriptions == (ours,)
    assert not changed.landed(SUBSCRIPTIONS.apply(TIP))


@pytest.mark.parametrize("operation", [CLAIM, SEAL, DROP, SUBSCRIPTIONS, QUARANTINE, POLICY, LEVELS, DELETE], ids=str)
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
        (QUARANTINE, TIP),
        (POLICY, TIP),
        (LEVELS, TIP),
        (DELETE, TIP),
        (CREATE_AGAIN, DELETED),
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
        (SEAL, ClaimTopic(epoch=9)),
        (SEAL, DropBuckets(buckets=("b3",), epoch=EPOCH, delete_after_ms=1)),
        (SEAL, seal_with(buckets=(bucket("b4"),), slot_from=120, slot_to=130)),
        (DROP, ClaimTopic(epoch=9)),
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
        (CREATE, tip_with(owner_epoch=EPOCH + 1, applied=50)),
        (CREATE, TIP),
        (CREATE_AGAIN, DELETED),
        (CREATE_AGAIN, dataclasses.replace(CREATE_AGAIN.apply(DELETED), owner_epoch=EPOCH - 1)),
        (CREATE_AGAIN, dataclasses.replace(CREATE_AGAIN.apply(DELETED), deleted=True)),
        (QUARANTINE, dataclasses.replace(QUARANTINED, owner_epoch=EPOCH + 1)),
        (dataclasses.replace(QUARANTINE, damage="its head is damaged"), QUARANTINED),
        (POLICY, dataclasses.replace(POLICY.apply(TIP), owner_epoch=EPOCH + 1)),
        (LEVELS, dataclasses.replace(LEVELS.apply(TIP), owner_epoch=EPOCH + 1)),
        (dataclasses.replace(LEVELS, levels=None), DELETED),
        (dataclasses.replace(POLICY, policy=TopicPolicy()), DELETED),
        (DELETE, dataclasses.replace(DELETED, owner_epoch=EPOCH + 1)),
        (DELETE, dataclasses.replace(DELETED, applied=ShardSlot(APPLIED + 8))),
        (DELETE, CREATE_AGAIN.apply(DELETED)),
        (dataclasses.replace(SUBSCRIPTIONS, subscriptions=(), last_subscription_id=5), DELETED),
        (seal_with(buckets=()), tip_with(applied=APPLIED + 20, owner_epoch=EPOCH + 1)),
        (SUBSCRIPTIONS, dataclasses.replace(SUBSCRIPTIONS.apply(TIP), owner_epoch=EPOCH + 1)),
        (SUBSCRIPTIONS, tip_with(last_subscription_id=6)),
    ],
    ids=str,
)
def test_an_operation_does_not_take_another_ones_manifest_for_its_own(operation: Operation, tip: TopicManifest) -> None:
    assert not operation.landed(tip)
