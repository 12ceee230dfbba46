"""Properties of subscriptions: an object of their topic, which is written once and named by its manifests."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import AlreadyExists, Corruption, InvalidArgument, QuotaExceeded, TarryError
from daemon.topic import topic_settings
from storage_backends.formats import manifest
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests.daemon._support.calling import create, delete_topic, stats
from tests.daemon.owner.test_collection import ON_REQUEST, collect, pass_hours
from tests.daemon.shard.test_crash_points import At

PROPERTIES = "/properties/"
MONEY: NamedValues = (("note", ""), ("team", "money"))
GATES: NamedValues = (("team", "gates"),)
LARGE: NamedValues = tuple((f"{number:0128d}", "x" * 1_024) for number in range(56))
# As many as a subscription may have, each as long as it may be: more than all subscriptions of a topic may have
TOO_LARGE: NamedValues = tuple((f"{number:0128d}", "x" * 1_024) for number in range(64))


def update(daemon: Daemon, properties: NamedValues, *, lease_ms: int | None = None) -> asyncio.Task[None]:
    changed = SubscriptionPolicy(lease_ms=lease_ms)
    return daemon.call(daemon.engine.requests.update_subscription("t", "s", changed, properties))


def delete(daemon: Daemon, subscription: str) -> asyncio.Task[int]:
    return daemon.call(daemon.engine.requests.delete_subscription("t", subscription))


async def shown(daemon: Daemon) -> dict[str, NamedValues]:
    """By subscription, of those that have any."""
    return {each.subscription: each.properties for each in (await stats(daemon)).subscriptions if each.properties}


def stored(machines: EngineFixture) -> dict[int, NamedValues]:
    """What the object holds that the newest manifest names."""
    named = machines.topic_tip().properties_object
    assert named is not None
    body = machines.store.get(named.name)
    manifest.check_bytes(named, body, "properties")
    return {each.subscription_id: each.properties for each in manifest.decode_properties(body).subscriptions}


async def test_properties_are_in_one_object_of_the_topic_and_outlive_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "s", properties=MONEY)
    await create(one, "none")
    await create(one, "t", properties=GATES)
    assert stored(machines) == {1: MONEY, 3: GATES}
    assert await shown(one) == {"s": MONEY, "t": GATES}
    one.kill()
    two = await machines.served_by("one")
    assert await shown(two) == {"s": MONEY, "t": GATES}
    assert not (await create(two, "s", properties=MONEY)).created
    for others in (GATES, ()):
        with pytest.raises(AlreadyExists):
            await create(two, "s", properties=others)


async def test_nothing_is_written_or_read_for_a_topic_without_properties(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "s", policy=SubscriptionPolicy(lease_ms=5))
    await update(one, (), lease_ms=6)
    await delete(one, "s")
    one.kill()
    two = await machines.served_by("one")
    await create(two, "s")
    for each in (one, two):
        assert not [call for call in each.store.calls if PROPERTIES in call.key]
    assert machines.topic_tip().properties_object is None


async def test_an_object_is_written_once_whatever_else_changes(machines: EngineFixture) -> None:
    """A manifest does not grow with them, and a change of anything else leaves their object where it is."""
    one = await machines.served_by("one")
    await create(one, "s", properties=LARGE)
    named = machines.topic_tip().properties_object
    assert named is not None
    assert named.size_bytes > len(LARGE) * (128 + 1_024)
    await create(one, "other")
    await update(one, LARGE, lease_ms=5)
    await one.add("t", 1, range(20), delay_ms=60_000)
    await one.call(one.engine.requests.seal("t"))
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=100_000)))
    await delete(one, "other")
    tip = machines.topic_tip()
    assert (tip.properties_object, tip.tombstones) == (named, ())
    assert machines.keys(PROPERTIES) == [named.name]
    assert len(manifest.encode_topic_manifest(tip)) < 2_000
    one.kill()
    two = await machines.served_by("one")
    assert await shown(two) == {"s": LARGE}
    assert [call.operation for call in two.store.calls if call.key == named.name] == ["get_with_metadata"]


async def test_a_change_of_properties_leaves_the_object_before_to_collection(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await create(one, "s", properties=MONEY)
    await create(one, "other", properties=GATES)
    before = machines.keys(PROPERTIES)
    await update(one, GATES)
    assert stored(machines) == {1: GATES, 2: GATES}
    await delete(one, "other")
    assert stored(machines) == {1: GATES}
    await update(one, ())
    tip = machines.topic_tip()
    assert tip.properties_object is None
    assert sorted(each.object.name for each in tip.tombstones) == machines.keys(PROPERTIES)
    assert set(before) < set(machines.keys(PROPERTIES))
    assert await shown(one) == {}
    pass_hours(machines, 2)
    await collect(one)
    assert machines.keys(PROPERTIES) == []
    assert machines.topic_tip().tombstones == ()


async def test_a_deleted_topic_takes_its_properties_with_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await create(one, "s", properties=MONEY)
    await delete_topic(one)
    assert machines.topic_tip().properties_object is None
    await create(one, "s")
    assert await shown(one) == {}
    pass_hours(machines, 2)
    await collect(one)
    assert machines.keys(PROPERTIES) == []


@pytest.mark.parametrize("point", ["properties.before_put", "properties.after_put"])
async def test_a_crash_between_object_and_manifest_changes_nothing_and_leaves_no_object_behind(
    machines: EngineFixture, point: str
) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await create(one, "s", properties=MONEY)
    place = At(one, point, 1)
    changing = update(one, GATES)
    await one.until(lambda: place.reached)
    one.kill()
    await asyncio.wait([changing])
    two = await machines.served_by("one", *ON_REQUEST)
    assert await shown(two) == {"s": MONEY}
    assert len(machines.keys(PROPERTIES)) == (2 if point == "properties.after_put" else 1)
    for _ in range(3):
        pass_hours(machines, 25)
        await create(two, f"at {machines.step_ms}")
        await collect(two)
    named = machines.topic_tip().properties_object
    assert named is not None
    assert machines.keys(PROPERTIES) == [named.name]
    assert await shown(two) == {"s": MONEY}


async def test_who_was_taken_over_from_between_object_and_manifest_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "s", properties=MONEY)
    held = one.pause("put", PROPERTIES)
    changing = update(one, GATES)
    await held.reached()
    one.freeze()
    two = await machines.served_by("two")
    one.thaw()
    held.release()
    with pytest.raises(TarryError):
        await changing
    await one.until(lambda: not one.engine.health.serving)
    assert len(machines.keys(PROPERTIES)) == 2, "it was written all the same"
    assert await shown(two) == {"s": MONEY}
    assert stored(machines) == {1: MONEY}


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
async def test_a_store_that_fails_is_asked_again(machines: EngineFixture, fault: Fault) -> None:
    one = await machines.served_by("one")
    one.script.plan("put", fault, key_part=PROPERTIES)
    await create(one, "s", properties=MONEY)
    assert stored(machines) == {1: MONEY}


@pytest.mark.parametrize("harm", ["damaged", "another's", "missing"])
async def test_damage_of_an_object_is_damage_of_its_topic_by_name(machines: EngineFixture, harm: str) -> None:
    one = await machines.served_by("one")
    await create(one, "s", properties=MONEY)
    await create(one, "s", topic="other", properties=GATES)
    one.kill()
    key, others = sorted(machines.keys(PROPERTIES), key=lambda key: machines.topic_tip().topic_id not in key)
    body = machines.store.get(key)
    if harm == "missing":
        machines.store.delete(key)
    else:
        machines.store.put(key, machines.store.get(others) if harm == "another's" else body[:-1] + b"?")
    two = await machines.served_by("one")
    with pytest.raises(Corruption, match=f"properties .*{key}"):
        await stats(two)
    found = (await stats(two, "other")).subscriptions
    assert [each.properties for each in found] == [GATES]
    machines.store.put(key, body)
    await asyncio.sleep(60)
    assert await shown(two) == {"s": MONEY}, "it is served when it can be read"


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        (tuple((f"{n:03d}", "") for n in range(65)), "has 65 entries"),
        ((("", "1"),), "a name has 0 bytes"),
        ((("ä" * 65, "1"),), "a name has 130 bytes"),
        ((("a", "ä" * 513),), "the value of 'a' has 1026 bytes"),
    ],
)
async def test_bad_properties_are_refused_by_name(machines: EngineFixture, properties: NamedValues, named: str) -> None:
    one = await machines.served_by()
    with pytest.raises(InvalidArgument, match=named):
        await create(one, properties=properties)
    assert not machines.keys("/topics/"), "nothing was born"
    await create(one)
    with pytest.raises(InvalidArgument, match=named):
        await update(one, properties)
    assert await shown(one) == {}


async def test_properties_of_a_topic_have_a_limit_and_beyond_it_nothing_changes(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    for attempt in range(2):
        with pytest.raises(QuotaExceeded, match=r"take 7\d{4} bytes; they may take 65536 together.*Shorten or remove"):
            await create(one, "s", properties=TOO_LARGE)
        assert not machines.keys("/topics/"), f"nothing was born at attempt {attempt}"
    await create(one, "s", properties=LARGE)
    await create(one, "other")
    before = machines.topic_tip()
    with pytest.raises(QuotaExceeded, match="may take 65536 together"):
        await create(one, "third", properties=(("more", "x" * 1_000), *MONEY))
    with pytest.raises(QuotaExceeded, match="may take 65536 together"):
        await update(one, TOO_LARGE)
    assert machines.topic_tip() == before
    assert machines.keys(PROPERTIES) == [before.properties_object.name]  # type: ignore[union-attr]
    await create(one, "third")
    await update(one, MONEY)
    await create(one, "fourth", properties=GATES)
    assert await shown(one) == {"s": MONEY, "fourth": GATES}


async def test_stored_properties_beyond_the_limit_are_served_and_may_shrink(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(topic_settings, "TOPIC_PROPERTIES_MAX_BYTES", 1 << 20)
        one = await machines.served_by("one")
        await create(one, "s", properties=TOO_LARGE)
        await create(one, "other", properties=TOO_LARGE)
    one.kill()
    two = await machines.served_by("one")
    assert await shown(two) == {"s": TOO_LARGE, "other": TOO_LARGE}
    await update(two, TOO_LARGE, lease_ms=5)
    with pytest.raises(QuotaExceeded):
        await create(two, "third", properties=GATES)
    await update(two, (*TOO_LARGE[:-1], (TOO_LARGE[-1][0], "y" * 1_024)))
    await update(two, LARGE)
    await delete(two, "other")
    assert await shown(two) == {"s": LARGE}


async def test_properties_are_not_changed_more_often_than_collection_keeps_up_with(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each manifest names every former object: without a limit, small changes write ever larger manifests."""
    monkeypatch.setattr(topic_settings, "REPLACED_PROPERTIES_MAX", 3)
    one = await machines.served_by("one", *ON_REQUEST)
    await create(one, "s", properties=MONEY)
    await create(one, "other")
    for properties in (GATES, MONEY):
        await update(one, properties)
    before = machines.topic_tip()
    await create(one, "third", properties=GATES)
    with pytest.raises(QuotaExceeded, match=r"changed 3 times within collection\.grace_s.*less often") as refused:
        await update(one, GATES)
    assert refused.value.retry_after_ms is not None
    assert 3_500_000 < refused.value.retry_after_ms <= 3_600_000
    with pytest.raises(QuotaExceeded):
        await create(one, "fourth", properties=GATES)
    assert len(machines.topic_tip().tombstones) == len(before.tombstones) + 1
    await update(one, MONEY, lease_ms=5)
    await delete(one, "third")
    await update(one, ())
    pass_hours(machines, 2)
    await collect(one)
    await update(one, GATES)
    assert await shown(one) == {"s": GATES}
