"""A daemon creates no topic beyond its limit, and serves every topic that exists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from daemon.errors import QuotaExceeded
from storage_backends.formats.manifest import TopicDelayLevels, TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import create, delete_topic, stats

BIRTHS: dict[str, Callable[[Daemon, str], asyncio.Task[object]]] = {
    "add": lambda one, topic: one.call(_added(one, topic)),
    "subscription": lambda one, topic: one.call(one.engine.requests.create_subscription(topic, "s")),
    "policy": lambda one, topic: one.call(one.engine.requests.set_topic_policy(topic, TopicPolicy(tick_ms=5))),
    "levels": lambda one, topic: one.call(
        one.engine.requests.set_delay_levels(topic, TopicDelayLevels(table="1s", clamp=True))
    ),
}


async def _added(one: Daemon, topic: str) -> object:
    return await one.add(topic, 1, range(3), delay_ms=60_000)


@pytest.mark.parametrize("born_by", BIRTHS)
async def test_a_topic_beyond_the_limit_is_not_created_whatever_would_create_it(
    machines: EngineFixture, born_by: str
) -> None:
    one = await machines.served_by("one", "limits.topics_max=2")
    await create(one, "s", topic="t")
    await BIRTHS[born_by](one, "u")
    before = machines.keys("/topics/")
    with pytest.raises(
        QuotaExceeded, match=r"has 2 topics, and limits\.topics_max is 2.*Delete topics.*or set"
    ) as refused:
        await BIRTHS[born_by](one, "v")
    assert refused.value.retry_after_ms is None, "only an operator makes room"
    assert machines.keys("/topics/") == before
    for topic in ("t", "u"):
        for birth in BIRTHS.values():
            await birth(one, topic)
    await delete_topic(one, "u")
    await BIRTHS[born_by](one, "v")


async def test_topics_that_are_created_at_the_same_time_count_once_each(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.topics_max=3")
    creating = [create(one, "s", topic=f"topic {number % 5}") for number in range(10)]
    outcomes = await asyncio.gather(*creating, return_exceptions=True)
    refused = {number % 5 for number, outcome in enumerate(outcomes) if isinstance(outcome, QuotaExceeded)}
    assert len(refused) == 2
    assert sum(len(shard.topics) for shard in one.shards.values()) == 3


async def test_a_root_with_more_topics_than_the_limit_is_served(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    for topic in ("t", "u", "v"):
        await _added(one, topic)
    one.kill()
    two = await machines.served_by("one", "limits.topics_max=1")
    with pytest.raises(QuotaExceeded):
        await _added(two, "w")
    for topic in ("t", "u", "v"):
        await create(two, "s", topic=topic)
        assert (await stats(two, topic)).pending == 3
