"""Topics that are deleted and born again: nothing of the old one reaches the new one."""

from __future__ import annotations

import asyncio

import pytest

from daemon import call_values
from daemon.errors import InvalidArgument, NotFound, OutcomeUnknown, TarryError, Unavailable
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import EngineFixture, no_positions
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import (
    acknowledge,
    clear,
    create,
    delete_topic,
    get,
    held,
    rows_of,
    stats,
    trim,
    up_to,
)

TOPICS = "/topics/"
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")


async def test_a_deleted_topic_is_gone_with_its_rows_subscriptions_and_policy(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", "s")
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=100_000)))
    await one.add("t", 1, range(30), delay_ms=0)
    await one.add("t", 1, range(30, 50), delay_ms=50_000)
    await receiver.received(30)
    deleted = await delete_topic(one)
    assert (deleted.rows, deleted.incarnation) == (50, 1)
    await one.until(lambda: receiver.ended is not None)
    assert isinstance(receiver.ended, NotFound)
    for task in (stats(one), delete_topic(one), clear(one), get(one)):
        with pytest.raises(NotFound):
            await task
    one.kill()
    two = await machines.served_by("one", *SMALL)
    with pytest.raises(NotFound):
        await stats(two)
    assert not (await two.call(two.engine.requests.list_topics(10, ""))).topics
    assert (await two.add("t", 1, range(5), delay_ms=1_000)).accepted == 5
    found = await stats(two)
    assert (found.incarnation, found.pending, found.buckets, found.subscriptions) == (2, 5, 0, ())
    policies = await two.call(two.engine.requests.topic_policy("t"))
    assert policies.stored == TopicPolicy()
    again = await two.receiver("t", "s")
    await again.received(5)
    await asyncio.sleep(60)
    assert len(again.rows) == 5
    assert list(two.topic("t").core.subscriptions) == [2], "an id is never used again"


async def test_a_topic_is_born_again_by_an_add_or_a_subscription_or_a_policy(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, [1])
    for number in range(2, 5):
        await delete_topic(one)
        if number == 2:
            await one.add("t", 1, [1])
        elif number == 3:
            await create(one)
        else:
            await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy()))
        assert (await stats(one)).incarnation == number


@pytest.mark.parametrize("checkpoint_slots", [1, 3, 1000])
async def test_journal_and_checkpoint_of_an_old_incarnation_do_nothing_to_the_next(
    machines: EngineFixture, checkpoint_slots: int
) -> None:
    settings = (f"journal.checkpoint_slots={checkpoint_slots}", "bucket.min_index_count_per_bucket=20")
    one = await machines.served_by("one", *settings, "bucket.rows_max=20")
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(15), delay_ms=0)
    await receiver.received(15)
    await receiver.acknowledge(receiver.rows[:5])
    await trim(one, up_to(9, 1))
    await one.add("t", 2, range(40), delay_ms=50_000)
    await delete_topic(one)
    await create(one, "s")
    await one.add("t", 1, range(10), delay_ms=1_000)
    await one.add("other", 1, range(10))
    one.kill()
    two = await machines.served_by("one", *settings, "bucket.rows_max=20")
    again = await two.receiver("t", "s")
    await again.received(10)
    await asyncio.sleep(90)
    assert again.positions == {(1, entry) for entry in range(10)}
    assert len(again.rows) == 10


async def test_a_deletion_that_was_committed_stays_though_its_owner_died_before_it_knew(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10))
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=TOPICS)
    held = one.pause("head", TOPICS)
    deleting = delete_topic(one)
    await held.reached()
    one.kill()
    await asyncio.wait([deleting])
    two = await machines.served_by("one")
    with pytest.raises(NotFound):
        await stats(two)


async def test_a_deletion_that_was_not_committed_is_undone_by_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(10), delay_ms=5_000)
    held = one.pause("put_if_absent", TOPICS, then=Fault.FAIL_BEFORE)
    deleting = delete_topic(one)
    await held.reached()
    await asyncio.sleep(6)
    assert not receiver.rows, "what is about to leave is not handed out"
    assert receiver.ended is None, "nobody is told before it is certain"
    one.kill()
    await asyncio.wait([deleting])
    two = await machines.served_by("one")
    again = await two.receiver("t", "s")
    await again.received(10)


async def test_a_deletion_that_lost_its_answer_is_found_to_be_committed(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=TOPICS)
    assert (await delete_topic(one)).rows == 10


# ---- races


async def test_requests_that_waited_for_a_deletion_may_bear_the_topic_again(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(10), delay_ms=0)
    rows = await receiver.received(10)
    held = one.pause("put_if_absent", TOPICS)
    deleting = delete_topic(one)
    await held.reached()
    waiting = [
        one.add("t", 2, [1]),
        acknowledge(one, rows),
        receiver.acknowledge(rows),
        create(one, "new"),
        clear(one),
        get(one),
        delete_topic(one),
        one.call(one.engine.requests.open_dispatch("t", "s", no_positions())),
        one.call(one.engine.requests.seal("t")),
    ]
    await asyncio.sleep(1)
    assert not any(task.done() for task in waiting)
    held.release()
    assert (await deleting).rows == 10
    for task in waiting:
        with pytest.raises(Unavailable, match="was deleted"):
            await task
    assert (await one.add("t", 2, [1])).accepted == 1
    assert (await stats(one)).incarnation == 2


async def test_an_acknowledgement_that_looks_for_its_rows_on_the_store_waits_for_a_deletion(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(25), delay_ms=0)
    rows = await receiver.received(25)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    receiver.stream.close()
    index = one.topic("t").core.index
    for bucket in index.sealed:
        index.cache.discard_bucket(bucket)
    reading, committing = one.pause("get_range", "/buckets/"), one.pause("put_if_absent", TOPICS)
    acknowledging = acknowledge(one, rows)
    await reading.reached()
    deleting = delete_topic(one)
    await committing.reached()
    reading.release()
    await asyncio.sleep(1)
    assert not acknowledging.done()
    committing.release()
    assert (await deleting).rows == 25
    with pytest.raises(Unavailable, match="was deleted"):
        await acknowledging


async def test_adds_that_were_staged_before_a_deletion_go_with_the_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    held = one.pause("put_if_absent", JOURNAL)
    adding = one.add("t", 1, range(10))
    await held.reached()
    deleting = delete_topic(one)
    await asyncio.sleep(1)
    assert not deleting.done()
    held.release()
    assert (await adding).accepted == 10
    assert (await deleting).rows == 11


async def test_a_seal_that_is_under_way_is_over_before_its_topic_is_deleted(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    held = one.pause("put", "/buckets/")
    await one.add("t", 1, range(25))
    await held.reached()
    await one.add("t", 2, range(5))
    sealing = one.call(one.engine.requests.seal("t"))
    deleting = delete_topic(one)
    await asyncio.sleep(1)
    assert not deleting.done()
    held.release()
    assert (await deleting).rows == 30
    with pytest.raises(OutcomeUnknown):
        await sealing
    assert one.engine.health.serving
    assert (await one.add("t", 1, range(25))).accepted == 25
    one.kill()
    two = await machines.served_by("one", *SMALL)
    receiver = await two.receiver("t")
    await receiver.received(25)


async def test_a_checkpoint_that_is_written_during_a_deletion_brings_nothing_back(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "journal.checkpoint_slots=3")
    await one.add("t", 1, range(10))
    held = one.pause("put", "/checkpoint/")
    for entry in range(4):
        await one.add("other", 1, [entry])
    await held.reached()
    await delete_topic(one)
    await one.add("t", 1, range(3), delay_ms=1_000)
    held.release()
    for entry in range(4, 12):
        await one.add("other", 1, [entry])
    one.kill()
    two = await machines.served_by("one")
    receiver = await two.receiver("t")
    await receiver.received(3)
    await asyncio.sleep(30)
    assert len(receiver.rows) == 3


async def test_leases_and_pullers_of_a_deleted_topic_end(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, range(10), delay_ms=1)
    await asyncio.sleep(1)
    rows = rows_of(await get(one, 4))
    await get(one, 6)
    waiting = get(one, wait_ms=60_000)
    await asyncio.sleep(1)
    await delete_topic(one)
    with pytest.raises(NotFound):
        await waiting
    with pytest.raises(NotFound):
        await acknowledge(one, rows)
    await create(one)
    await asyncio.sleep(60)
    assert not rows_of(await get(one))
    await one.add("t", 1, range(4), delay_ms=0)
    assert await acknowledge(one, rows) == 4, "a new row has another time"


async def test_two_deletions_at_the_same_time_delete_once(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, [1])
    answers = await asyncio.gather(delete_topic(one), delete_topic(one), return_exceptions=True)
    assert sum(isinstance(answer, call_values.TopicDeleted) for answer in answers) == 1
    assert sum(isinstance(answer, Unavailable) for answer in answers) == 1


async def test_an_owner_that_lost_the_shard_deletes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10), delay_ms=1_000)
    one.freeze()
    deleting = delete_topic(one)
    two = await machines.served_by("two")
    one.thaw()
    with pytest.raises(TarryError):
        await deleting
    receiver = await two.receiver("t")
    await receiver.received(10)


async def test_a_deletion_that_the_store_holds_up_is_unknown_and_goes_on(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=1_000)
    one.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=TOPICS, times=20)
    deleting = delete_topic(one)
    adding = one.add("t", 1, [77])
    with pytest.raises(OutcomeUnknown):
        await deleting
    with pytest.raises(Unavailable):
        await adding
    await one.until(lambda: "t" not in one.shards[0].topics)
    assert (await one.add("t", 1, range(3))).accepted == 3


async def test_what_belonged_to_a_deleted_topic_is_not_in_memory_any_more(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(45), delay_ms=1_000)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    cache = one.topic("t").core.index.cache
    assert cache.rows
    await delete_topic(one)
    assert not cache.rows
    await asyncio.sleep(5)
    assert not cache.rows


async def test_a_name_that_cannot_be_is_refused(machines: EngineFixture) -> None:
    one = await machines.served_by()
    with pytest.raises(InvalidArgument):
        await delete_topic(one, "")
    with pytest.raises(NotFound):
        await delete_topic(one, "nothing")
    assert not machines.keys(TOPICS)


async def test_positions_that_a_dispatcher_held_before_a_deletion_are_not_held_after_it(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(3), delay_ms=0)
    rows = await receiver.received(3)
    await delete_topic(one)
    await create(one)
    await asyncio.sleep(1)
    await one.add("t", 1, range(3), delay_ms=0)
    stream = await one.call(one.engine.requests.open_dispatch("t", "s", held(rows)))
    assert stream.held == 0
