"""Topics whose policy says that subscriptions share no index: every row is one in the own index of each."""

from __future__ import annotations

import asyncio

import pytest

from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon.topic.test_own_indexes import FAR_MS, everything, positions, seal, with_subscriptions
from tests.daemon.topic.test_policies import set_policy


def present_in(daemon: Daemon) -> dict[int, int]:
    """How many rows each index has."""
    indexes = daemon.topic("t").core.indexes
    return {number: sum(bucket.present_rows for bucket in index.buckets) for number, index in indexes.items()}


async def without_sharing(daemon: Daemon, *subscriptions: str) -> Daemon:
    await with_subscriptions(daemon, *subscriptions)
    effective = await set_policy(daemon, TopicPolicy(shared_index=False))
    assert effective.shared_index is False
    return daemon


async def test_a_request_is_one_slot_with_a_row_for_each_subscription(machines: EngineFixture) -> None:
    one = await without_sharing(await machines.served_by("one"), "a", "b", "c")
    slots = len(machines.keys(JOURNAL))
    outcome = await one.add("t", 1, range(10), FAR_MS)
    assert (outcome.accepted, outcome.duplicates) == (10, 0)
    assert len(machines.keys(JOURNAL)) == slots + 1
    assert present_in(one) == {0: 0, 1: 10, 2: 10, 3: 10}
    again = await one.add("t", 1, range(5, 15), FAR_MS)
    assert (again.accepted, again.duplicates) == (5, 5)


@pytest.mark.parametrize("sealed", [False, True], ids=["in memory", "sealed"])
async def test_what_one_subscription_acknowledges_stays_for_the_other_also_after_a_crash(
    machines: EngineFixture, sealed: bool
) -> None:
    one = await without_sharing(await machines.served_by("one"), "a", "b")
    await one.add("t", 1, range(10), 1_000)
    if sealed:
        await seal(one)
    receiver = await one.receiver("t", "a")
    rows = await receiver.received(10)
    assert await receiver.acknowledge(rows[:6]) == 0
    assert present_in(one) == {0: 0, 1: 4, 2: 10}
    one.kill()
    two = await machines.served_by("two")
    assert present_in(two) == {0: 0, 1: 4, 2: 10}
    assert (await everything(two, "b")).positions == positions(1, range(10))
    assert (await everything(two, "a")).positions == {row[:2] for row in rows[6:]}
    # The policy is in the manifest.
    await two.add("t", 2, range(3), FAR_MS)
    assert present_in(two) == {0: 0, 1: 7, 2: 13}


async def test_a_change_of_the_policy_counts_for_rows_that_are_added_from_then_on(machines: EngineFixture) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a", "b")
    await one.add("t", 1, range(4), 1_000)
    await set_policy(one, TopicPolicy(shared_index=False))
    await one.add("t", 2, range(3), 1_000)
    await set_policy(one, TopicPolicy(shared_index=True))
    await one.add("t", 3, range(2), 1_000)
    assert present_in(one) == {0: 6, 1: 3, 2: 3}
    expected = positions(1, range(4)) | positions(2, range(3)) | positions(3, range(2))
    for name in ("a", "b"):
        assert (await everything(one, name)).positions == expected


async def test_while_there_is_no_subscription_rows_wait_in_the_shared_index(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(2), 1_000)
    await set_policy(one, TopicPolicy(shared_index=False))
    await one.add("t", 2, range(2), 1_000)
    assert present_in(one) == {0: 4}
    await asyncio.sleep(2)
    await with_subscriptions(one, "a")
    assert (await everything(one, "a")).positions == positions(1, range(2)) | positions(2, range(2))
