"""Owners learn of others' merges by hints, at the cost of one request a minute, and without hints within 20 minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from daemon.owner.merge_watch import LOOK_S
from daemon.topic import bucket_lifecycle
from storage_backends import merge_hints
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket
from storage_backends.merge_hints import MergeHint
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Call, Fault
from tests._support.merging_process import MergingProcess

# The buckets of the owner are merged by others alone.
ALONE = "bucket.max_num_buckets=-1"
HOUR_MS = 3_600_000
HINT = MergeHint(0, names.topic_id("t"))


async def with_buckets(daemon: Daemon, topic: str = "t", buckets: int = 2) -> None:
    for ledger_id in range(buckets):
        await daemon.add(topic, ledger_id, range(5), HOUR_MS)
        await daemon.call(daemon.engine.requests.seal(topic))


def knows(daemon: Daemon, merged: LiveBucket, topic: str = "t") -> bool:
    return merged.object.name in daemon.topic(topic).core.indexes.sealed


def hints_left(machines: EngineFixture) -> list[str]:
    return list(machines.keys(names.MERGE_HINTS_PREFIX))


def watched(daemon: Daemon) -> list[Call]:
    """The calls of the daemon from now on that are about hints or about topics' manifests."""
    calls: list[Call] = []

    def decide(call: Call) -> Fault:
        if call.key.startswith("hints/") or ("/topics/" in call.key and "/manifest/" in call.key):
            calls.append(call)
        return Fault.NONE

    daemon.decide = decide
    return calls


def count(calls: Sequence[Call], part: str) -> int:
    return sum(part in call.key for call in calls)


async def test_an_idle_daemon_asks_for_one_key_a_minute_and_for_a_topic_once_in_twenty(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    topics = [f"topic-{number}" for number in range(8)]
    for number, topic in enumerate(topics):
        await with_buckets(one, topic, 1 + number % 2)
    calls = watched(one)
    await asyncio.sleep(bucket_lifecycle.LOOK_S + 2)
    assert count(calls, names.MERGE_HINTS_CHANGED_KEY) == pytest.approx(bucket_lifecycle.LOOK_S / LOOK_S, abs=1)
    assert count(calls, names.MERGE_HINTS_PREFIX) == 0, "nothing has changed"
    looked = {topic: count(calls, names.topic_id(topic)) for topic in topics}
    assert looked == {topic: number % 2 for number, topic in enumerate(topics)}, "where there is something to merge"


async def test_topics_are_looked_at_one_after_the_other_though_loaded_together(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    for number in range(12):
        await with_buckets(one, f"topic-{number}")
    one.kill()
    two = await machines.served_by("one", ALONE)
    looked: list[float] = []

    def decide(call: Call) -> Fault:
        if "/topics/" in call.key and "/manifest/" in call.key:
            looked.append(machines.loop.time())
        return Fault.NONE

    two.decide = decide
    await asyncio.sleep(bucket_lifecycle.LOOK_S + 2)
    assert len(looked) == 12
    assert len({int(at_s) // 60 for at_s in looked}) >= 5


async def learned_by_hint(daemon: Daemon, machines: EngineFixture) -> None:
    merged = MergingProcess(machines.store).merge_all()
    await daemon.until(lambda: knows(daemon, merged), timeout_s=LOOK_S + 5)


async def test_a_hint_is_followed_within_a_minute_and_cleared(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    for _ in range(2):
        await learned_by_hint(one, machines)
        assert not hints_left(machines)
        await with_buckets(one)


async def test_a_merge_of_which_no_hint_came_is_learned_within_twenty_minutes(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    merged = MergingProcess(machines.store, hints=False).merge_all()
    await asyncio.sleep(bucket_lifecycle.LOOK_S + 2)
    assert knows(one, merged)


async def test_a_hint_proves_nothing(machines: EngineFixture, caplog: pytest.LogCaptureFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    elsewhere = [MergeHint(0, names.topic_id("never there")), MergeHint(9, names.topic_id("of another shard"))]
    merge_hints.leave(machines.store, [HINT, *elsewhere], value="1")
    foreign = f"{names.MERGE_HINTS_PREFIX}what-is-this"
    machines.store.put(foreign, b"")
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(LOOK_S + 5)
    assert sorted(hints_left(machines)) == sorted([elsewhere[1].key, foreign]), "what is no topic of ours stays"
    assert foreign in caplog.text
    assert one.engine.health.serving
    calls = watched(one)
    await asyncio.sleep(3 * LOOK_S)
    assert {call.key for call in calls if call.key.startswith("hints/")} == {names.MERGE_HINTS_CHANGED_KEY}


async def test_a_merge_is_learned_whose_hint_was_left_again_before_it_was_cleared(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    merge_hints.leave(machines.store, [HINT], value="1")
    clearing = one.pause("delete", HINT.key)
    await clearing.reached()
    merged = MergingProcess(machines.store, hints=False).merge_all()
    # Its new value comes later.
    machines.store.put(HINT.key, b"")
    clearing.release()
    await one.until(lambda: not hints_left(machines), timeout_s=5)
    await one.until(lambda: knows(one, merged), timeout_s=5)


@pytest.mark.parametrize("operation", ["get_with_metadata", "list", "delete"])
async def test_what_the_store_does_not_do_is_done_a_minute_later(machines: EngineFixture, operation: str) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    failed = 0

    def decide(call: Call) -> Fault:
        nonlocal failed
        if call.operation == operation and call.key.startswith("hints/") and not failed:
            failed += 1
            return Fault.FAIL_BEFORE
        return Fault.NONE

    one.decide = decide
    merged = MergingProcess(machines.store).merge_all()
    await one.until(lambda: not hints_left(machines), timeout_s=2 * LOOK_S + 5)
    await one.until(lambda: knows(one, merged), timeout_s=2)
    assert failed == 1


async def test_a_manifest_that_cannot_be_read_after_a_hint_is_read_later(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    merged = MergingProcess(machines.store).merge_all()
    one.decide = lambda call: Fault.FAIL_BEFORE if "/topics/" in call.key else Fault.NONE
    await one.until(lambda: not hints_left(machines), timeout_s=LOOK_S + 5)
    await asyncio.sleep(1)
    assert not knows(one, merged)
    one.decide = lambda call: Fault.NONE
    await one.until(lambda: knows(one, merged), timeout_s=bucket_lifecycle.LOOK_AGAIN_S + 5)


async def test_the_hint_of_a_topic_that_is_being_loaded_stays_until_it_is(machines: EngineFixture) -> None:
    one = await machines.served_by("one", ALONE)
    await with_buckets(one)
    one.kill()
    machines.store.put(HINT.key, b"")
    machines.store.put(names.MERGE_HINTS_CHANGED_KEY, b"1")
    bucket = next(iter(machines.keys(names.buckets_prefix(0, HINT.topic_id))))
    two = machines.daemon("one", ALONE)
    loading = two.pause("get_range", bucket)
    await two.start()
    await loading.reached()
    merged = MergingProcess(machines.store, hints=False).merge_all()
    await asyncio.sleep(LOOK_S + 5)
    assert hints_left(machines) == [HINT.key]
    loading.release()
    await two.until(lambda: not hints_left(machines), timeout_s=LOOK_S + 5)
    await two.until(lambda: knows(two, merged), timeout_s=2)
