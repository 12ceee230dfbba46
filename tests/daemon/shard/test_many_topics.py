"""What many topics do not do all at once, and what an orderly end does not do for each of them."""

from __future__ import annotations

import asyncio
import collections

import pytest

from daemon.topic import bucket_lifecycle
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture

TOPICS = [f"topic-{number}" for number in range(40)]
AGE_S = 200
OLD = f"bucket.age_max_s={AGE_S}"
FAR_MS = 3_600_000


async def with_rows(daemon: Daemon, *, ledger_id: int = 1) -> None:
    await asyncio.gather(*(daemon.add(topic, ledger_id, range(3), delay_ms=FAR_MS) for topic in TOPICS))


async def ages_when_sealed(machines: EngineFixture, began_ms: int) -> list[float]:
    """Of each topic, how long after `began_ms` its newest bucket was committed, seconds, when all are."""
    await asyncio.sleep(AGE_S + 10)
    created_ms = [machines.topic_tip(topic).head.created_ms for topic in TOPICS]
    assert all(machines.topic_tip(topic).live for topic in TOPICS)
    return sorted((each - began_ms) / 1000 for each in created_ms)


def most_at_once(ages_s: list[float]) -> int:
    return max(collections.Counter(int(age_s) for age_s in ages_s).values())


async def test_topics_that_began_together_are_sealed_one_after_the_other(machines: EngineFixture) -> None:
    one = await machines.served_by("one", OLD)
    began_ms = machines.now_ms()
    await with_rows(one)
    ages_s = await ages_when_sealed(machines, began_ms)
    assert ages_s[0] >= AGE_S * (1 - bucket_lifecycle.AGE_SPREAD)
    assert ages_s[-1] <= AGE_S + 5
    assert most_at_once(ages_s) <= 10


async def test_topics_that_were_loaded_together_are_as_if_they_had_begun_at_different_times(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", OLD)
    await with_rows(one)
    one.kill()
    began_ms = machines.now_ms()
    await machines.served_by("one", OLD)
    ages_s = await ages_when_sealed(machines, began_ms)
    assert ages_s[0] < AGE_S / 4
    assert ages_s[-1] <= AGE_S + 5
    assert most_at_once(ages_s) <= 10


@pytest.mark.parametrize("spread", [bucket_lifecycle.AGE_SPREAD, 0.0])
async def test_the_spread_is_what_keeps_them_apart(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    monkeypatch.setattr(bucket_lifecycle, "AGE_SPREAD", spread)
    one = await machines.served_by("one", OLD)
    began_ms = machines.now_ms()
    await with_rows(one)
    together = most_at_once(await ages_when_sealed(machines, began_ms))
    assert (together > 20) == (not spread)


async def test_an_orderly_end_asks_the_store_for_nothing_of_single_topics(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await with_rows(one)
    before = len(one.store.calls)
    await one.stop()
    assert [call for call in one.store.calls[before:] if call.key.startswith(names.topics_prefix(0))] == []
    two = await machines.served_by("two")
    answers = await asyncio.gather(*(two.add(topic, 1, range(3)) for topic in TOPICS))
    assert [answer.duplicates for answer in answers] == [3] * len(TOPICS)


async def test_at_an_orderly_end_seals_that_are_under_way_end_and_no_other_begins(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "store.seal_threads=1")
    await with_rows(one)
    held = one.pause("put", "/buckets/")
    asked = [one.call(one.engine.requests.seal(topic)) for topic in TOPICS]
    await held.reached()
    ending = one.call(one.engine.stop())
    await asyncio.sleep(0.1)
    assert not ending.done()
    held.release()
    assert await ending == []
    assert len(machines.keys("/buckets/")) == 1
    await asyncio.gather(*asked, return_exceptions=True)
    two = await machines.served_by("two")
    answers = await asyncio.gather(*(two.add(topic, 1, range(3)) for topic in TOPICS))
    assert [answer.duplicates for answer in answers] == [3] * len(TOPICS)
