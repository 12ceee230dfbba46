"""What is read, or done, late: of a topic that is deleted meanwhile, and by an owner that was superseded."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from daemon.errors import NotFound, NotOwner, TarryError, Unavailable
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture, Held
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import create, delete_topic, stats

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")
FAR_MS = 500_000
MANIFESTS = names.topic_manifest_prefix(0, names.topic_id("t"))
TOPICS = names.topics_prefix(0)


async def superseded(machines: EngineFixture) -> tuple[Daemon, Daemon, Held]:
    """The former owner, which does not know it yet; the one that serves; the former one's probe, on its way."""
    one = await machines.served_by("one")
    one.pause("put", names.DAEMONS_PREFIX)
    probe = one.pause("head", JOURNAL)
    two = await machines.served_by("two")
    assert one.engine.health.serving
    return one, two, probe


async def test_a_topic_that_its_former_owner_deletes_before_the_claim_lands_loses_nothing_that_is_added(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(5), delay_ms=FAR_MS)
    deletion = one.pause("put_if_absent", MANIFESTS)
    deleting = delete_topic(one)
    await deletion.reached()
    one.freeze()
    two = machines.daemon("two")
    claim = two.pause("put_if_absent", MANIFESTS)
    await two.start()
    await claim.reached()
    deletion.release()
    await two.until(lambda: len(machines.keys(MANIFESTS)) == 2)
    claim.release()
    assert (await two.add("t", 1, range(5), delay_ms=FAR_MS)).accepted == 5
    two.kill()
    three = await machines.served_by("two")
    assert (await stats(three)).pending == 5
    deleting.cancel()


async def test_what_was_read_of_a_topic_before_its_deletion_is_not_served_after_it(machines: EngineFixture) -> None:
    one = machines.daemon("one", *SMALL)
    claiming = one.pause("list", TOPICS)
    await one.start()
    await claiming.reached()
    listing = one.pause("list", TOPICS)
    claiming.release()
    await listing.reached()
    await one.until(lambda: one.engine.health.serving)
    birth = one.pause("put_if_absent", MANIFESTS)
    born = one.add("t", 1, range(20), delay_ms=FAR_MS)
    await birth.reached()
    reading = one.pause("list", MANIFESTS)
    late = one.add("t", 1, [99], delay_ms=FAR_MS)
    await reading.reached()
    birth.release()
    await born
    await one.add("t", 2, [0], delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    opening = one.pause("get_range", TOPICS)
    reading.release()
    await opening.reached()
    await delete_topic(one)
    opening.release()
    await asyncio.gather(late, return_exceptions=True)
    await one.add("t", 3, range(7), delay_ms=FAR_MS)
    pending = (await stats(one)).pending
    one.kill()
    two = await machines.served_by("one")
    assert (await stats(two)).pending == pending


async def test_an_owner_that_was_superseded_does_not_say_that_it_created_a_subscription_of_a_new_topic(
    machines: EngineFixture,
) -> None:
    one, two, probe = await superseded(machines)
    creating = create(one)
    await asyncio.sleep(1)
    with pytest.raises(NotFound):
        await stats(two)
    assert not creating.done(), "the successor has said that there is no such topic"
    probe.release()
    with pytest.raises(TarryError):
        await creating


async def test_a_topic_that_the_successor_has_deleted_is_not_born_again_by_the_former_owner(
    machines: EngineFixture,
) -> None:
    one, two, probe = await superseded(machines)
    await two.add("t", 1, range(5), delay_ms=FAR_MS)
    await delete_topic(two)
    born = one.add("t", 1, range(5), delay_ms=FAR_MS)
    await asyncio.sleep(0.1)
    probe.release()
    with pytest.raises(NotOwner, match="two"):
        await born


@pytest.mark.parametrize("end", ["deleted", "lost"])
async def test_a_topic_that_is_served_no_longer_is_not_kept_in_memory_until_its_rows_are_due(
    machines: EngineFixture, end: str
) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(30), delay_ms=FAR_MS)
    await one.until(lambda: one.topic("t").wake_at_ms is not None)
    index = weakref.ref(one.topic("t").core.index)
    if end == "deleted":
        await delete_topic(one)
    else:
        shard = one.shards[0]
        one.context.run(shard.lose, Unavailable("the test takes it away"))
        await one.until(lambda: one.engine.loaded and one.shards.get(0) not in (None, shard))
        del shard
    await asyncio.sleep(5)
    gc.collect()
    assert index() is None


async def test_a_bucket_of_a_topic_that_was_deleted_meanwhile_may_turn_out_to_be_damaged_or_missing(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(20), delay_ms=FAR_MS)
    await one.add("t", 2, [0], delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    late, (bucket,) = one.topic("t"), one.topic("t").core.index.sealed
    await delete_topic(one)
    late.buckets.quarantine(bucket, "read by who was late")
    assert not await one.call(late.bucket_is_live(bucket))
    assert one.engine.health.serving
