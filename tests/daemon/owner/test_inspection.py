"""What is shown of topics, and who owns them."""

from __future__ import annotations

import asyncio

import pytest

from daemon import call_values
from daemon.errors import InvalidArgument, NotFound, Unavailable
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import create, get, rows_of, stats, trim, up_to
from tests.daemon._support.dead_letter_calls import nack

SMALL = ("bucket.min_index_count_per_bucket=10", "bucket.rows_max=10")


def buckets(
    daemon: Daemon, page_size: int = 0, after: str = "", topic: str = "t"
) -> asyncio.Task[call_values.BucketPage]:
    return daemon.call(daemon.engine.requests.list_buckets(topic, page_size, after))


def subscriptions(daemon: Daemon, page_size: int = 0, after: str = "") -> asyncio.Task[call_values.SubscriptionPage]:
    return daemon.call(daemon.engine.requests.list_subscriptions("t", page_size, after))


def topics(daemon: Daemon, page_size: int = 0, after: str = "") -> asyncio.Task[call_values.TopicPage]:
    return daemon.call(daemon.engine.requests.list_topics(page_size, after))


def lookup(daemon: Daemon, topic: str = "t") -> asyncio.Task[call_values.TopicLocation]:
    return daemon.call(daemon.engine.requests.lookup(topic))


async def test_buckets_are_listed_by_their_ledgers_page_by_page(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in (30, 4, 100, 4, 2):
        first = 10 if ledger_id == 4 else 0
        await one.add("t", ledger_id, range(first, first + 10), delay_ms=60_000)
        first += 10
        await one.add("t", ledger_id, range(first, first + 10), delay_ms=60_000)
        await one.until(lambda: not one.topic("t").core.index.sealing)
    await one.add("t", 7, range(3), delay_ms=60_000)
    found: list[call_values.BucketSummary] = []
    after, pages = "", 0
    while True:
        page = await buckets(one, 3, after)
        found += page.buckets
        pages += 1
        assert page.mutable_rows == 3
        assert page.as_of_ms == machines.now_ms()
        if page.next_after is None:
            break
        after = page.next_after
    whole = await buckets(one)
    assert tuple(found) == whole.buckets
    assert whole.next_after is None
    assert pages == -(-len(found) // 3)
    ledgers = [(bucket.first_ledger_id, bucket.last_ledger_id) for bucket in found]
    assert ledgers == sorted(ledgers)
    assert sum(bucket.pending for bucket in found) == sum(bucket.rows for bucket in found)


async def test_a_bucket_shows_what_is_stored_pending_due_and_in_memory(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await create(one)
    await one.add("t", 5, range(6), delay_ms=1_000)
    await one.add("t", 6, range(4), delay_ms=90_000)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    await trim(one, up_to(1, 5))
    await asyncio.sleep(2)
    (bucket,) = (await buckets(one)).buckets
    assert (bucket.rows, bucket.pending, bucket.due) == (10, 4, 4)
    assert (bucket.first_ledger_id, bucket.last_ledger_id) == (5, 6)
    assert bucket.max_deliver_at_ms - bucket.min_deliver_at_ms == 89_000
    assert bucket.size_bytes == len(machines.store.get(bucket.bucket))
    assert bucket.segments >= bucket.segments_loaded
    assert (bucket.level, bucket.compatible_form, bucket.quarantined, bucket.damage) == (0, False, False, "")


async def test_subscriptions_are_listed_by_name_page_by_page(machines: EngineFixture) -> None:
    one = await machines.served_by()
    names_of = ["zeta", "alpha", "mü", "beta", "s"]
    for name in names_of:
        await create(one, name, properties=(("name", name),))
    await one.add("t", 1, range(10), delay_ms=1)
    await asyncio.sleep(1)
    rows_of(await get(one, 3))
    found: list[call_values.SubscriptionStats] = []
    after = ""
    while True:
        page = await subscriptions(one, 2, after)
        found += page.subscriptions
        if page.next_after is None:
            break
        after = page.next_after
    assert [each.subscription for each in found] == sorted(names_of)
    by_name = {each.subscription: each for each in found}
    assert (by_name["s"].backlog, by_name["s"].in_flight, by_name["s"].leased) == (10, 3, 3)
    assert (by_name["beta"].backlog, by_name["beta"].in_flight) == (10, 0)
    assert by_name["mü"].properties == (("name", "mü"),)


async def test_topics_of_all_shards_are_listed_by_name_page_by_page(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "daemon.shards=4")
    made = sorted(f"topic-{number}" for number in range(25))
    for topic in made:
        await one.add(topic, 1, [1])
    found: list[str] = []
    after = ""
    while True:
        page = await topics(one, 7, after)
        found += [topic.topic for topic in page.topics]
        assert (page.topics_loading, page.topics_damaged) == (0, 0)
        if page.next_after is None:
            break
        after = page.next_after
    assert found == made
    whole = await topics(one)
    assert [topic.topic for topic in whole.topics] == made
    assert all(topic.shard == names.shard_of(topic.topic, 4) for topic in whole.topics)


async def test_bad_pages_are_refused(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    for size in (-1, 1001):
        for asked in (buckets(one, size), subscriptions(one, size), topics(one, size)):
            with pytest.raises(InvalidArgument, match="page_size"):
                await asked
    with pytest.raises(NotFound):
        await buckets(one, topic="nothing")
    with pytest.raises(InvalidArgument, match="topic"):
        await buckets(one, topic="")


async def test_the_oldest_due_row_is_known_with_and_without_a_dispatcher(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    start_ms = machines.now_ms()
    await one.add("t", 1, range(3), delay_ms=1_000)
    await one.add("t", 2, range(3), delay_ms=5_000)
    assert (await stats(one)).oldest_due_ms == 0
    await asyncio.sleep(10)
    assert (await stats(one)).oldest_due_ms == start_ms + 1_000, "nobody has ever listened"
    receiver = await one.receiver("t", permits=3)
    await receiver.received(3)
    await asyncio.sleep(1)
    assert (await stats(one)).oldest_due_ms == start_ms + 5_000
    await receiver.acknowledge(receiver.rows[1:])
    receiver.stream.close()
    assert (await stats(one)).oldest_due_ms == start_ms + 1_000, "what came back counts"
    again = await one.receiver("t")
    await again.received(4)
    assert (await stats(one)).oldest_due_ms == 0, "everything is in hand"
    await again.acknowledge(again.rows)
    again.stream.close()
    assert (await stats(one)).oldest_due_ms == 0, "there is nothing"
    await one.add("t", 3, [1], delay_ms=0)
    await asyncio.sleep(1)
    assert (await stats(one)).oldest_due_ms > start_ms + 5_000


async def test_a_scrape_gives_requests_their_turn_between_topics(machines: EngineFixture) -> None:
    one = await machines.served_by()
    for number in range(60):
        await one.add(f"topic-{number}", 1, [1])
    turns = 0
    asked = one.call(one.engine.requests._topic_numbers())
    while not asked.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(asked.result()) == 60
    assert turns >= 3


# ---- who owns what


async def test_any_daemon_says_who_owns_a_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    standby = await machines.daemon("two").start()
    await standby.until(lambda: "waiting" in standby.engine.health.reason)
    found = await lookup(one, "never heard of")
    assert found == call_values.TopicLocation(shard=0, owner_address="one:1", owner="one", epoch=1, served_here=True)
    found = await lookup(standby, "never heard of")
    assert found == call_values.TopicLocation(shard=0, owner_address="one:1", owner="one", epoch=1, served_here=False)
    one.freeze()
    await standby.serving()
    assert await lookup(standby) == call_values.TopicLocation(
        shard=0, owner_address="two:1", owner="two", epoch=2, served_here=True
    )
    one.thaw()
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    assert (await lookup(one)).owner == "two"


async def test_the_owner_is_not_known_before_anything_was_read(machines: EngineFixture) -> None:
    one = machines.daemon("one")
    one.store.go_down()
    starting = asyncio.ensure_future(one.start())
    await asyncio.sleep(1)
    with pytest.raises(Unavailable):
        await lookup(one)
    with pytest.raises(InvalidArgument):
        await lookup(one, "")
    one.store.come_back()
    await starting
    await one.serving()
    assert (await lookup(one)).served_here


async def test_the_oldest_due_row_is_as_old_as_its_redelivery(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    start_ms = machines.now_ms()
    await one.add("t", 1, range(4), delay_ms=1_000)
    await asyncio.sleep(5)
    rows = rows_of(await get(one, 3))
    # A lease keeps READY for those who may come: after half a minute nobody listens.
    await asyncio.sleep(31)
    await nack(one, [*rows[:2], (9, 9, 0)], delay_ms=60_000)
    redelivered_ms = up_to_256(machines.now_ms() + 60_000)
    assert (await stats(one)).oldest_due_ms == start_ms + 1_000
    await nack(one, [*rows[2:], (1, 3, start_ms + 1_000)], delay_ms=90_000)
    assert (await stats(one)).oldest_due_ms == 0, "all wait for their redelivery"
    await asyncio.sleep(70)
    assert (await stats(one)).oldest_due_ms == redelivered_ms, "nobody listens"
    receiver = await one.receiver("t")
    await receiver.received(5)
    receiver.stream.permits = 0
    await nack(one, [row for row in receiver.rows if row[2]], delay_ms=10_000)
    await nack(one, [(9, 9, 0)], delay_ms=5_000)
    redelivered_ms = up_to_256(machines.now_ms() + 5_000)
    assert (await stats(one)).oldest_due_ms == 0
    await asyncio.sleep(20)
    assert (await stats(one)).oldest_due_ms == redelivered_ms, "somebody listens, and takes nothing"
    receiver.stream.close()
    assert (await stats(one)).oldest_due_ms == redelivered_ms


def up_to_256(time_ms: int) -> int:
    """As redelivery times are rounded by default."""
    return -(-time_ms // 256) * 256
