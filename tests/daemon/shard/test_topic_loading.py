"""Which topic is loaded when, and in how many requests."""

from __future__ import annotations

import asyncio

import pytest

from daemon.shard import topic_loading
from daemon.shard.topic_loading import TopicLoading
from daemon.topic import topic_manifests
from storage_backends import bucket_reading, commit, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.manifest import SubscriptionPolicy, TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests.daemon._support.calling import delete_topic

FAR_MS = 3_600_000
# Read as a whole, and not.
BUCKET_SIZES = [bucket_reading.READ_WHOLE_BYTES, 0]


async def sealed(machines: EngineFixture, delays_ms: dict[str, int]) -> None:
    """Topics whose rows are in a bucket, and that neither checkpoint nor journal name; and their daemon is stopped."""
    one = await machines.served_by("one")
    for topic, delay_ms in delays_ms.items():
        await one.add(topic, 1, range(3), delay_ms=delay_ms)
        await one.call(one.engine.requests.seal(topic))
    await one.stop()


def calls_of(daemon: Daemon, topic: str) -> list[tuple[str, str]]:
    """Its calls to the store for that topic so far: the operation, and what for."""
    prefix = names.topic_prefix(0, names.topic_id(topic))
    return [
        (call.operation, call.key.removeprefix(prefix).split("/")[0])
        for call in daemon.store.calls
        if call.key.startswith(prefix)
    ]


def commit_of_the_former_owner(
    machines: EngineFixture, topic: str, operation: topic_manifests.Operation | None = None
) -> int:
    """It had one under way, which lands now; the number of its manifest."""
    log = topic_manifest.topic_log(
        machines.store,
        0,
        names.topic_id(topic),
        monotonic=machines.elapsed_s,
        sleep=lambda seconds: None,
        jitter=lambda: 0.5,
        new_id=lambda: "of-the-former-owner",
    )
    operation = operation or topic_manifest.SetPolicy(
        policy=TopicPolicy(max_num_buckets=7), epoch=machines.topic_tip(topic).owner_epoch
    )
    return commit.commit(log, operation, writer="former", created_ms=5, deadline_s=5.0).number


@pytest.mark.parametrize("whole_bytes", BUCKET_SIZES)
async def test_a_topic_that_was_listed_is_read_in_one_request_for_each_thing_that_it_consists_of(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    monkeypatch.setattr(bucket_reading, "READ_WHOLE_BYTES", whole_bytes)
    await sealed(machines, {"t": FAR_MS})
    two = await machines.served_by("two")
    expected = [("get_with_metadata", "manifest"), ("put_if_absent", "manifest")]
    expected += [("get_range", "buckets")] * (1 if whole_bytes else 2)
    assert sorted(calls_of(two, "t")) == sorted(expected)


async def test_what_a_manifest_names_is_read_while_the_topic_is_claimed(machines: EngineFixture) -> None:
    await sealed(machines, {"t": FAR_MS})
    two = machines.daemon("two")
    held = two.pause("put_if_absent", names.topic_manifest_prefix(0, names.topic_id("t")))
    await two.start()
    await held.reached()
    await two.until(lambda: ("get_range", "buckets") in calls_of(two, "t"))
    assert not two.engine.loaded
    held.release()
    await two.serving()


async def test_topics_of_which_rows_are_due_soon_are_loaded_before_the_others_and_those_by_their_first_row(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_loading, "TOPICS_AT_ONCE", 1)
    delays_ms = {f"far-{hour}": hour * FAR_MS for hour in (5, 3, 4)} | {"soon-1": 20_000, "soon-2": 30_000}
    await sealed(machines, delays_ms)
    two = await machines.served_by("two")
    order = list(two.shards[0].topics)
    assert set(order[:2]) == {"soon-1", "soon-2"}
    assert order[2:] == ["far-3", "far-4", "far-5"]


async def test_a_topic_without_rows_is_loaded_last_and_one_that_is_asked_for_at_once(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_loading, "TOPICS_AT_ONCE", 1)
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("empty", "s"))
    await one.stop()
    await sealed(machines, {f"far-{hour}": hour * FAR_MS for hour in (1, 2, 3)})
    two = machines.daemon("two")
    last = two.pause("get_range", names.buckets_prefix(0, names.topic_id("far-1")))
    await two.start()
    await last.reached()
    asked = two.add("far-3", 1, range(3), delay_ms=FAR_MS)
    last.release()
    assert (await asked).duplicates == 3
    await two.serving()
    assert list(two.shards[0].topics) == ["far-1", "far-3", "far-2", "empty"]


async def test_a_topic_whose_listed_manifest_was_collected_meanwhile_is_listed_by_itself(
    machines: EngineFixture,
) -> None:
    await sealed(machines, {"t": FAR_MS})
    prefix = names.topic_manifest_prefix(0, names.topic_id("t"))
    listed = machines.keys(prefix)[-1]
    two = machines.daemon("two")
    held = two.pause("get_with_metadata", prefix)
    await two.start()
    await held.reached()
    commit_of_the_former_owner(machines, "t")
    machines.store.delete(listed)
    held.release()
    await two.serving()
    assert (await two.add("t", 1, range(3))).duplicates == 3
    assert ("list", "manifest") in calls_of(two, "t")


async def test_a_commit_behind_the_listing_is_found_by_the_claim(machines: EngineFixture) -> None:
    await sealed(machines, {"t": FAR_MS})
    two = machines.daemon("two")
    held = two.pause("put_if_absent", names.topic_manifest_prefix(0, names.topic_id("t")))
    await two.start()
    await held.reached()
    before = commit_of_the_former_owner(machines, "t")
    held.release()
    await two.serving()
    assert machines.topic_tip("t").head.number == before + 1
    assert two.topic("t").settings.max_num_buckets == 7


async def test_an_owner_that_was_superseded_behind_its_claim_calls_nothing_damaged(machines: EngineFixture) -> None:
    await sealed(machines, {"t": FAR_MS})
    two = machines.daemon("two")
    claims = names.topic_manifest_prefix(0, names.topic_id("t"))
    two.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=claims)
    held = two.pause("head", claims)
    await two.start()
    await held.reached()
    two.suspend()
    three = await machines.served_by("three")
    await three.add("t", 2, range(3), delay_ms=FAR_MS)
    await three.call(three.engine.requests.seal("t"))
    two.resume()
    held.release()
    await two.until(lambda: "waiting for daemon three" in two.engine.health.reason)
    assert two.damage_found("topic") == 0
    assert (await three.add("t", 2, range(3))).duplicates == 3


async def test_what_a_successor_has_replaced_and_deleted_is_not_damaged(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    requests, policy = one.engine.requests, SubscriptionPolicy()
    await one.call(requests.create_subscription("t", "s", policy, (("gate", "A1"),)))
    await one.stop()
    two = machines.daemon("two")
    claim = two.pause("put_if_absent", names.topic_manifest_prefix(0, names.topic_id("t")))
    await two.start()
    await claim.reached()
    # Since the claim finds another object named, that one is read behind it.
    tip = machines.topic_tip("t")
    assert tip.properties_object is not None
    key = names.properties_key(0, tip.topic_id, tip.head.number, "OTHER")
    body = machines.store.get(tip.properties_object.name)
    machines.store.put(key, body)
    replacing = topic_manifest.SetSubscriptions(
        subscriptions=tip.subscriptions,
        last_subscription_id=tip.last_subscription_id,
        epoch=tip.owner_epoch,
        delete_after_ms=0,
        properties_object=topic_manifest.reference_to(key, tip.head.number, body),
    )
    commit_of_the_former_owner(machines, "t", replacing)
    read = two.pause("get_with_metadata", key)
    claim.release()
    await read.reached()
    two.suspend()
    three = await machines.served_by("three")
    await three.call(three.engine.requests.update_subscription("t", "s", policy, (("gate", "B2"),)))
    machines.store.delete(key)
    two.resume()
    read.release()
    await two.until(lambda: "waiting for daemon three" in two.engine.health.reason)
    assert two.damage_found("topic") == 0


async def test_a_topic_that_was_born_during_the_listing_is_found_when_it_is_loaded_again(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(3), delay_ms=FAR_MS)
    await delete_topic(one)
    one.kill()
    two = machines.daemon("two")
    gate, reached, listed = two.gate(), asyncio.Event(), TopicLoading._listed_numbers

    def listed_long_ago(loading: TopicLoading) -> tuple[dict[str, int], float]:
        """It shows the manifest of the deletion, and takes long."""
        found = listed(loading)
        reached.set()
        two.stop_here(gate)
        return found

    monkeypatch.setattr(TopicLoading, "_listed_numbers", listed_long_ago)
    await two.start()
    await two.until(reached.is_set)
    assert (await two.add("t", 1, range(5), delay_ms=FAR_MS)).accepted == 5
    gate.set()
    await two.serving()
    two.context.run(two.topic("t").failed, RuntimeError("a bug"))
    assert (await two.add("t", 1, range(5))).duplicates == 5


async def test_a_topic_that_is_created_while_another_request_looks_for_it_is_not_damaged(
    machines: EngineFixture,
) -> None:
    await (await machines.served_by("one")).stop()
    one = machines.daemon("one")
    listing = one.pause("list", names.topics_prefix(0))
    birth = one.pause("put_if_absent", names.topic_manifest_prefix(0, names.topic_id("t")))
    await one.start()
    await listing.reached()
    first = one.add("t", 1, range(1), delay_ms=FAR_MS)
    await birth.reached()
    reading = one.pause("list", names.topic_manifest_prefix(0, names.topic_id("t")))
    second = one.add("t", 2, range(1), delay_ms=FAR_MS)
    await reading.reached()
    looking = one.pause("list", names.topic_prefix(0, names.topic_id("t")))
    reading.release()
    await looking.reached()
    birth.release()
    await first
    looking.release()
    await second
    listing.release()
    await one.until(lambda: one.engine.loaded)
    assert one.topic("t").core.index.pending_rows == 2
    assert one.damage_found("topic") == 0
