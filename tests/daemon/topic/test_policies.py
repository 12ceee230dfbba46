"""Policies of topics and subscriptions, and seals on request."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from daemon import call_values
from daemon.errors import AlreadyExists, DelayTooLong, InvalidArgument, NotFound, OutcomeUnknown, TarryError
from daemon.topic import topic_settings
from storage_backends.formats.manifest import (
    HashSelector,
    KeyOrder,
    KeySharedPolicy,
    NackOrder,
    SubscriptionPolicy,
    TopicPolicy,
)
from tests._support.engine_fixture import Daemon, EngineFixture, no_positions
from tests._support.fault_store import Fault
from tests._support.outcomes import ignored_by
from tests.daemon._support.calling import create, get, rows_of, stats

TOPICS = "/topics/"


def set_policy(daemon: Daemon, policy: TopicPolicy, topic: str = "t") -> asyncio.Task[TopicPolicy]:
    return daemon.call(daemon.engine.requests.set_topic_policy(topic, policy))


def policies(daemon: Daemon, topic: str = "t") -> asyncio.Task[call_values.TopicPolicies]:
    return daemon.call(daemon.engine.requests.topic_policy(topic))


def update(daemon: Daemon, policy: SubscriptionPolicy, subscription: str = "s") -> asyncio.Task[None]:
    return daemon.call(daemon.engine.requests.update_subscription("t", subscription, policy))


def seal(daemon: Daemon, topic: str = "t") -> asyncio.Task[call_values.Sealed]:
    return daemon.call(daemon.engine.requests.seal(topic))


# ---- topics


async def test_what_is_not_set_has_the_daemons_default(machines: EngineFixture) -> None:
    one = await machines.served_by(
        "one",
        "bucket.rows_max=60000",
        "bucket.form=compatible",
        "bucket.max_num_buckets=-1",
        "delivery.tick_ms=7",
        "limits.pending_rows_per_topic_max=11",
        "limits.pending_rows_max=99",
        "limits.client_bytes_per_second_max=12",
        "deletion.two_phase_deletion_enabled=false",
    )
    effective = await set_policy(one, TopicPolicy(delay_max_ms=5_000))
    assert (effective.max_num_buckets, effective.merge_buckets_max, effective.merge_rows_max) == (-1, 10, 2_000_000)
    assert (effective.shared_index, effective.tick_ms) == (True, 7)
    assert (effective.pending_rows_max, effective.due_rows_per_second_max) == (11, 0)
    assert (effective.client_rows_per_second_max, effective.client_bytes_per_second_max) == (0, 12)
    assert effective.delay_max_ms == 5_000
    assert effective.bucket_rows_max == 60_000
    assert effective.min_index_count_per_bucket == 50_000
    assert effective.compatible_form is True
    assert effective.two_phase_deletion_enabled is False
    assert all(getattr(effective, field.name) is not None for field in dataclasses.fields(TopicPolicy))
    assert (await policies(one)).stored == TopicPolicy(delay_max_ms=5_000)
    effective = await set_policy(one, TopicPolicy(bucket_rows_max=10))
    assert effective.delay_max_ms == one.engine._environment.config.limits.delay_max_ms, "the whole policy is replaced"
    assert effective.min_index_count_per_bucket == 10, "a default gives way to what was set"


async def test_a_policy_counts_at_once_and_after_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(15), delay_ms=60_000)
    await set_policy(one, TopicPolicy(bucket_rows_max=10, delay_max_ms=70_000))
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    with pytest.raises(DelayTooLong, match="70000"):
        await one.add("t", 2, [1], delay_ms=80_000)
    await one.add("u", 2, [1], delay_ms=80_000)
    one.kill()
    two = await machines.served_by("one")
    with pytest.raises(DelayTooLong):
        await two.add("t", 2, [1], delay_ms=80_000)
    await two.add("t", 2, range(10), delay_ms=60_000)
    await two.until(lambda: len(two.topic("t").core.index.sealed) == 2)
    assert (await policies(two)).stored == TopicPolicy(bucket_rows_max=10, delay_max_ms=70_000)


async def test_the_form_and_the_segments_of_new_buckets_follow_the_policy(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(40), delay_ms=60_000)
    await seal(one)
    policy = TopicPolicy(
        compatible_form=True,
        max_indexes_per_bucket_snapshot_segment=10,
        min_indexes_per_bucket_snapshot_segment=1,
    )
    await set_policy(one, policy)
    await one.add("t", 2, range(40), delay_ms=60_000)
    await seal(one)
    page = await one.call(one.engine.requests.list_buckets("t", 10, ""))
    assert [bucket.compatible_form for bucket in page.buckets] == [False, True]
    assert [bucket.segments for bucket in page.buckets] == [1, 4]
    receiver = await one.receiver("t")
    await receiver.received(80)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (TopicPolicy(delay_max_ms=0), "delay_max_ms is 0"),
        (TopicPolicy(delay_max_ms=1 << 60), "delay_max_ms"),
        (TopicPolicy(min_index_count_per_bucket=0), "min_index_count_per_bucket is 0"),
        (TopicPolicy(bucket_rows_max=0), "bucket_rows_max is 0"),
        (TopicPolicy(bucket_bytes_max=0), "bucket_bytes_max is 0"),
        (TopicPolicy(bucket_age_max_ms=0), "bucket_age_max_ms is 0"),
        (TopicPolicy(max_time_step_per_bucket_snapshot_segment_seconds=0), "seconds is 0"),
        (TopicPolicy(max_indexes_per_bucket_snapshot_segment=0), "max_indexes_per_bucket_snapshot_segment is 0"),
        (TopicPolicy(max_indexes_per_bucket_snapshot_segment=-2), "is -2"),
        (TopicPolicy(min_indexes_per_bucket_snapshot_segment=-1), "is -1"),
        (TopicPolicy(max_num_buckets=0), "max_num_buckets is 0; it must be at least 1, or -1 for never"),
        (TopicPolicy(max_num_buckets=-2), "max_num_buckets is -2"),
        (TopicPolicy(merge_buckets_max=1), "merge_buckets_max is 1; it must be 2"),
        (TopicPolicy(merge_rows_max=0), "merge_rows_max is 0"),
        (TopicPolicy(tick_ms=0), "tick_ms is 0; it must be 1 to 500"),
        (TopicPolicy(tick_ms=501), "tick_ms is 501; it must be 1 to 500"),
        (TopicPolicy(pending_rows_max=-1), "pending_rows_max is -1"),
        (TopicPolicy(due_rows_per_second_max=1 << 54), "due_rows_per_second_max"),
        (TopicPolicy(client_rows_per_second_max=1 << 54), "client_rows_per_second_max"),
        (TopicPolicy(client_bytes_per_second_max=1 << 54), "client_bytes_per_second_max"),
        (
            TopicPolicy(min_index_count_per_bucket=11, bucket_rows_max=10),
            "is 11; it must be at most bucket_rows_max, which is 10",
        ),
        (
            TopicPolicy(min_indexes_per_bucket_snapshot_segment=11, max_indexes_per_bucket_snapshot_segment=10),
            "which is 10",
        ),
    ],
)
async def test_a_bad_policy_is_refused_by_name_and_changes_nothing(
    machines: EngineFixture, policy: TopicPolicy, named: str
) -> None:
    one = await machines.served_by()
    await set_policy(one, TopicPolicy(delay_max_ms=5_000))
    with pytest.raises(InvalidArgument, match=named):
        await set_policy(one, policy)
    with pytest.raises(InvalidArgument, match=named):
        await set_policy(one, policy, topic="new")
    assert (await policies(one)).stored == TopicPolicy(delay_max_ms=5_000)
    with pytest.raises(NotFound):
        await policies(one, "new")


async def test_no_limit_on_the_rows_of_a_segment_goes_with_any_least(machines: EngineFixture) -> None:
    one = await machines.served_by()
    policy = TopicPolicy(max_indexes_per_bucket_snapshot_segment=-1, min_indexes_per_bucket_snapshot_segment=100_000)
    assert (await set_policy(one, policy)).min_indexes_per_bucket_snapshot_segment == 100_000


async def test_setting_a_policy_bears_the_topic(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await set_policy(one, TopicPolicy(delay_max_ms=5_000), topic="new")
    with pytest.raises(DelayTooLong):
        await one.add("new", 1, [1], delay_ms=10_000)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
async def test_a_crash_while_a_policy_is_set_leaves_the_old_one_or_the_new_one(
    machines: EngineFixture, fault: Fault
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, [1])
    one.script.plan("put_if_absent", fault, key_part=TOPICS)
    held = one.pause("head", TOPICS)
    setting = set_policy(one, TopicPolicy(delay_max_ms=5_000))
    await held.reached()
    assert (await one.add("t", 1, [2], delay_ms=10_000)).accepted == 1, "adds do not wait for it"
    one.kill()
    await asyncio.wait([setting])
    two = await machines.served_by("one")
    stored = (await policies(two)).stored
    assert stored == (TopicPolicy(delay_max_ms=5_000) if fault is Fault.FAIL_AFTER else TopicPolicy())


async def test_an_owner_that_lost_the_shard_sets_no_policy(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, [1])
    await asyncio.sleep(0.1)
    one.freeze()
    tasks = [set_policy(one, TopicPolicy(delay_max_ms=5_000)), policies(one)]
    two = await machines.served_by("two")
    one.thaw()
    for task in tasks:
        with pytest.raises(TarryError):
            await task
    assert (await policies(two)).stored == TopicPolicy()


# ---- subscriptions


async def test_a_subscription_is_created_again_with_the_same_policy_only(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = SubscriptionPolicy(in_flight_rows_max=10, lease_ms=1_000)
    assert (await create(one, policy=policy)).created
    assert not (await create(one, policy=policy)).created
    with pytest.raises(AlreadyExists):
        await create(one)
    one.kill()
    two = await machines.served_by("one")
    assert not (await create(two, policy=policy)).created
    with pytest.raises(AlreadyExists):
        await create(two, policy=dataclasses.replace(policy, lease_ms=None))


async def test_a_policy_of_key_order_outlives_crashes_and_an_update_replaces_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    blocking = SubscriptionPolicy(
        key_shared=KeySharedPolicy(selector=HashSelector.STICKY, nack_order=NackOrder.BLOCK_KEY, nack_block_max_ms=5)
    )
    skipping = SubscriptionPolicy(key_shared=KeySharedPolicy(order=KeyOrder.LAST_SENT_POSITION))
    await create(one, policy=blocking)
    one.kill()
    two = await machines.served_by("one")
    assert not (await create(two, policy=blocking)).created
    for other in (skipping, SubscriptionPolicy(key_shared=KeySharedPolicy()), SubscriptionPolicy()):
        with pytest.raises(AlreadyExists):
            await create(two, policy=other)
    await update(two, skipping)
    two.kill()
    three = await machines.served_by("one")
    assert not (await create(three, policy=skipping)).created
    with pytest.raises(AlreadyExists):
        await create(three, policy=blocking)


async def test_a_policy_of_key_order_that_contradicts_itself_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    for wrong, says in (
        (KeySharedPolicy(points_per_consumer=0), "key_shared.points_per_consumer is 0; it must be 1 to 1000"),
        (KeySharedPolicy(nack_block_max_ms=43_200_001), "key_shared.nack_block_max_ms is 43200001; .* 1 to 43200000"),
        (
            KeySharedPolicy(allow_out_of_order_delivery=True, nack_order=NackOrder.BLOCK_KEY),
            "key_shared.allow_out_of_order_delivery is true and key_shared.nack_order is BLOCK_KEY",
        ),
    ):
        with pytest.raises(InvalidArgument, match=says):
            await update(one, SubscriptionPolicy(key_shared=wrong))
    assert not (await create(one)).created


async def test_that_it_exists_with_another_policy_is_said_only_by_the_owner(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one)
    await asyncio.sleep(0.1)
    one.freeze()
    creating = create(one, policy=SubscriptionPolicy(lease_ms=1))
    await machines.served_by("two")
    one.thaw()
    with pytest.raises(TarryError) as caught:
        await creating
    assert not isinstance(caught.value, AlreadyExists)


async def test_an_update_counts_from_its_answer_on_and_after_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, policy=SubscriptionPolicy(lease_ms=1_000))
    await create(one, "other", policy=SubscriptionPolicy(lease_ms=7))
    await one.add("t", 1, range(10), delay_ms=0)
    await update(one, SubscriptionPolicy(lease_ms=2_000))
    assert (await get(one, 1)).lease_ms == 2_000
    one.kill()
    two = await machines.served_by("one")
    assert (await get(two, 1)).lease_ms == 2_000
    assert (await get(two, 1, subscription="other")).lease_ms == 7
    await update(two, SubscriptionPolicy())
    assert (await get(two, 1)).lease_ms == 30_000
    with pytest.raises(NotFound):
        await update(two, SubscriptionPolicy(), "nobody")


async def test_no_more_is_in_flight_than_the_policy_says_over_streams_and_leases(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, policy=SubscriptionPolicy(in_flight_rows_max=5))
    stream = one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    await stream
    await one.add("t", 1, range(20), delay_ms=0)
    leased = rows_of(await get(one, 3, lease_ms=5_000))
    assert len(leased) == 3
    stream.result().grant(100)
    first = await stream.result().next_messages()
    assert len(first.rows) == 2
    assert not rows_of(await get(one, 3))
    following = one.call(stream.result().next_messages())
    await asyncio.sleep(2)
    assert not following.done()
    await asyncio.sleep(4)
    assert len((await following).rows) == 3, "a lease that is over makes room"
    following = one.call(stream.result().next_messages())
    await asyncio.sleep(1)
    assert await ignored_by(stream.result().acknowledge, first.held()) == 0
    assert len((await following).rows) == 2, "an acknowledgement makes room"
    following = one.call(stream.result().next_messages())
    await update(one, SubscriptionPolicy(in_flight_rows_max=9))
    assert len((await following).rows) == 4, "a larger limit makes room"
    assert (await stats(one)).subscriptions[0].in_flight == 9
    following.cancel()


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (SubscriptionPolicy(in_flight_rows_max=0), "in_flight_rows_max is 0"),
        (SubscriptionPolicy(in_flight_rows_max=1 << 32), "in_flight_rows_max"),
        (SubscriptionPolicy(lease_ms=0), "lease_ms is 0"),
        (SubscriptionPolicy(lease_ms=topic_settings.LEASE_MAX_MS + 1), "lease_ms"),
    ],
)
async def test_a_bad_policy_of_a_subscription_is_refused_by_name(
    machines: EngineFixture, policy: SubscriptionPolicy, named: str
) -> None:
    one = await machines.served_by()
    with pytest.raises(InvalidArgument, match=named):
        await create(one, policy=policy)
    assert not machines.keys(TOPICS), "nothing was born"
    await create(one)
    with pytest.raises(InvalidArgument, match=named):
        await update(one, policy)
    assert (await stats(one)).subscriptions[0].policy == SubscriptionPolicy()


async def test_subscriptions_that_change_at_the_same_time_lose_no_change(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "a")
    await create(one, "b")
    await asyncio.gather(
        update(one, SubscriptionPolicy(lease_ms=5), "a"),
        one.call(one.engine.requests.delete_subscription("t", "b")),
        create(one, "c"),
        set_policy(one, TopicPolicy(bucket_rows_max=7)),
        one.add("t", 1, range(20)),
    )
    one.kill()
    two = await machines.served_by("one")
    found = {each.subscription: each.policy.lease_ms for each in (await stats(two)).subscriptions}
    assert found == {"a": 5, "c": None}
    assert (await policies(two)).stored.bucket_rows_max == 7


# ---- seals on request


async def test_a_seal_on_request_is_answered_when_the_bucket_is_committed(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    assert (await one.add("t", 1, range(30), delay_ms=60_000)).accepted == 30
    held = one.pause("put_if_absent", TOPICS)
    sealing = seal(one)
    await held.reached()
    await asyncio.sleep(1)
    assert not sealing.done()
    held.release()
    sealed = await sealing
    assert sealed.rows == 30
    assert machines.keys(sealed.bucket)
    assert await seal(one) == call_values.Sealed(rows=0, bucket="")
    one.kill()
    two = await machines.served_by("one")
    page = await two.call(two.engine.requests.list_buckets("t", 10, ""))
    assert [bucket.bucket for bucket in page.buckets] == [sealed.bucket]
    with pytest.raises(NotFound):
        await seal(two, "nothing")


async def test_seals_at_the_same_time_each_answer_for_their_own_rows(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(30), delay_ms=60_000)
    held = one.pause("put", "/buckets/")
    first = seal(one)
    await held.reached()
    await one.add("t", 2, range(5), delay_ms=60_000)
    second, third = seal(one), seal(one)
    await asyncio.sleep(1)
    held.release()
    assert ((await first).rows, (await second).rows, (await third).rows) == (30, 5, 0)


async def test_a_seal_of_what_has_left_makes_no_bucket(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(30), delay_ms=60_000)
    await one.call(one.engine.requests.clear("t", None))
    assert await seal(one) == call_values.Sealed(rows=0, bucket="")


async def test_a_seal_that_the_store_holds_up_is_unknown_and_goes_on(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.shard.topic_changes.SEAL_ANSWER_S", 5.0)
    one = await machines.served_by()
    await one.add("t", 1, range(30), delay_ms=200_000)
    one.script.plan("put", Fault.FAIL_BEFORE, key_part="/buckets/", times=30)
    with pytest.raises(OutcomeUnknown):
        await seal(one)
    assert one.engine.health.serving
    assert (await one.add("t", 2, [1])).accepted == 1
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)


async def test_a_seal_whose_shard_is_lost_ends_with_an_error(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(30), delay_ms=60_000)
    one.freeze()
    sealing = seal(one)
    two = await machines.served_by("two")
    one.thaw()
    with pytest.raises(TarryError):
        await sealing
    assert (await seal(two)).rows == 30
