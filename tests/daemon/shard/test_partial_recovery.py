"""A shard is served before its topics are loaded: what a call on such a topic is told, which topic comes first, what
checkpoints carry over of those that are not loaded.

`story_of_a_carried_topic` is told with the code as it is and with planted bugs, each of which it must find.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from daemon.errors import Corruption, NotFound, Unavailable
from daemon.shard import recovery, topic_loading
from daemon.topic import bucket_lifecycle
from storage_backends import checkpoints
from storage_backends.formats import checkpoint_format, log_slot_format, names
from storage_backends.formats.checkpoint_format import Checkpoint
from tests._support.engine_fixture import Daemon, EngineFixture, Held, no_positions
from tests._support.fault_store import Fault
from tests.planted import registry

OFTEN = ("journal.checkpoint_slots=9",)
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")
FAR_MS = 500_000


def manifests_of(topic: str) -> str:
    return names.topic_manifest_prefix(0, names.topic_id(topic))


def hold(daemon: Daemon, topic: str, *, then: Fault = Fault.NONE) -> Held:
    """The topic is not loaded until that is released."""
    return daemon.pause("list", manifests_of(topic), then=then)


async def fenced(daemon: Daemon) -> Daemon:
    """It serves, whatever is loaded."""
    await daemon.start()
    return await daemon.until(lambda: daemon.engine.health.serving)


async def with_topics(machines: EngineFixture, *topics: str) -> None:
    """A daemon added 3 rows to each of them, and was killed."""
    one = await machines.served_by("one")
    for topic in topics:
        await one.add(topic, 1, range(3), delay_ms=FAR_MS)
    one.kill()


def flip(machines: EngineFixture, key: str) -> None:
    body, metadata = machines.store.get_with_metadata(key)
    damaged = bytearray(body)
    damaged[len(body) // 2] ^= 0x10
    machines.store.put(key, bytes(damaged), metadata=metadata)


# ---- serving meanwhile


async def test_a_shard_is_served_while_a_topic_is_being_loaded_and_a_call_waits_for_it(machines: EngineFixture) -> None:
    await with_topics(machines, "slow", "quick")
    two = machines.daemon("one")
    held = hold(two, "slow")
    await fenced(two)
    await held.reached()
    assert (await two.add("quick", 1, range(5))).duplicates == 3
    waiting = two.add("slow", 1, range(5))
    await asyncio.sleep(1)
    assert not waiting.done()
    assert not two.engine.loaded
    assert two.engine.topics_loading == 1
    held.release()
    assert (await waiting).duplicates == 3
    assert two.engine.loaded


async def test_a_call_on_a_topic_that_takes_long_is_told_when_to_come_again(machines: EngineFixture) -> None:
    await with_topics(machines, "slow")
    two = machines.daemon("one")
    held = hold(two, "slow")
    await fenced(two)
    asked_s = machines.loop.time()
    for call in (
        two.add("slow", 1, range(3)),
        two.call(two.engine.requests.open_dispatch("slow", "s", no_positions())),
        two.call(two.engine.requests.topic_stats("slow")),
    ):
        with pytest.raises(Unavailable, match="slow is being loaded") as refused:
            await call
        assert refused.value.retry_after_ms
    assert machines.loop.time() - asked_s < topic_loading.LOADING_WAIT_S + 1
    held.release()
    assert (await two.add("slow", 1, range(3))).duplicates == 3


async def test_a_topic_that_is_asked_for_is_loaded_before_those_that_wait(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_loading, "TOPICS_AT_ONCE", 1)
    topics = [f"topic-{number}" for number in range(6)]
    await with_topics(machines, *topics)
    two = machines.daemon("one")
    machines.faults_may_miss = True
    holds = [hold(two, topic) for topic in topics]
    await fenced(two)
    await two.until(lambda: any(held.pause.reached.is_set() for held in holds))
    under_way = next(topic for topic, held in zip(topics, holds, strict=True) if held.pause.reached.is_set())
    asked = [topic for topic in topics if topic != under_way][-1]
    answer = two.add(asked, 1, range(3))
    await asyncio.sleep(0.1)
    for held in holds:
        held.release()
    await answer
    assert list(two.shards[0].topics)[:2] == [under_way, asked]


async def test_topics_that_checkpoint_and_sections_name_come_before_those_that_are_listed(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_loading, "TOPICS_AT_ONCE", 1)
    one = await machines.served_by("one")
    for number in range(5):
        await one.add(f"old-{number}", 1, range(3), delay_ms=FAR_MS)
    await one.stop()
    two = await machines.served_by("one")
    for number in range(2):
        await two.add(f"recent-{number}", 1, range(3), delay_ms=FAR_MS)
    two.kill()
    three = await machines.served_by("one")
    assert set(list(three.shards[0].topics)[:2]) == {"recent-0", "recent-1"}
    assert len(three.shards[0].topics) == 7


async def test_a_topic_that_was_not_listed_yet_is_found_by_its_name_and_one_that_is_not_there_is_not(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("there", 1, range(3), delay_ms=FAR_MS)
    # So that neither the checkpoint nor a section names it.
    await one.call(one.engine.requests.seal("there"))
    await one.stop()
    two = machines.daemon("one")
    listing = two.pause("list", names.topics_prefix(0))
    # The listing of the shard's topics, not that of one of them.
    await fenced(two)
    await listing.reached()
    assert (await two.add("there", 1, range(3))).duplicates == 3
    with pytest.raises(NotFound):
        await two.call(two.engine.requests.topic_stats("nowhere"))
    assert (await two.add("born", 1, range(4), delay_ms=FAR_MS)).accepted == 4
    assert not two.engine.loaded
    listing.release()
    await two.serving()
    assert (await two.add("born", 1, range(4))).duplicates == 4
    assert set(two.shards[0].topics) == {"there", "born"}


async def test_a_topic_that_is_born_while_its_first_manifest_is_being_found_is_one_topic(
    machines: EngineFixture,
) -> None:
    await with_topics(machines, "other")
    two = machines.daemon("one")
    listing = two.pause("list", names.topics_prefix(0) + names.topic_id("other"))
    await fenced(two)
    listing.release()
    answers = [two.add("born", ledger, range(4), delay_ms=FAR_MS) for ledger in range(3)]
    reads = [two.call(two.engine.requests.topic_stats("born")) for _ in range(3)]
    await asyncio.gather(*answers, *reads, return_exceptions=True)
    assert [answer.result().accepted for answer in answers] == [4, 4, 4]
    await two.serving()
    assert two.topic("born").core.index.pending_rows == 12


async def test_a_topic_that_the_store_does_not_give_is_tried_again_and_the_others_do_not_wait(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_loading, "TOPICS_AT_ONCE", 1)
    await with_topics(machines, "bad", "good")
    two = machines.daemon("one")
    two.script.plan("get_with_metadata", Fault.FAIL_BEFORE, key_part=manifests_of("bad"), times=10)
    await fenced(two)
    assert (await two.add("good", 1, range(3))).duplicates == 3
    with pytest.raises(Unavailable):
        await two.add("bad", 1, range(3))
    await two.serving()
    assert (await two.add("bad", 1, range(3))).duplicates == 3
    assert not two.script.unmet()


async def test_an_orderly_end_while_a_topic_is_not_loaded_loses_nothing(machines: EngineFixture) -> None:
    await with_topics(machines, "slow", "quick")
    two = machines.daemon("one")
    held = hold(two, "slow")
    await fenced(two)
    await held.reached()
    await two.add("quick", 2, range(3), delay_ms=FAR_MS)
    waiting = two.add("slow", 2, range(3))
    await asyncio.sleep(0)
    await two.stop()
    with pytest.raises(Unavailable):
        await waiting
    three = await machines.served_by("two")
    assert three.topic("slow").core.index.pending_rows == 3
    assert three.topic("quick").core.index.pending_rows == 6


async def test_how_far_loading_is_is_told(machines: EngineFixture, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await with_topics(machines, "slow", "quick")
    two = machines.daemon("one")
    held = hold(two, "slow")
    await fenced(two)
    await asyncio.sleep(2)

    def sample(name: str, **labels: str) -> float | None:
        return two.metrics.registry.get_sample_value(name, labels)

    assert (sample("tarry_topics", state="loading"), sample("tarry_topics", state="loaded")) == (1, 1)
    assert sample("tarry_recovery_seconds_count") == 0
    held.release()
    await two.serving()
    await asyncio.sleep(2)
    assert (sample("tarry_topics", state="loading"), sample("tarry_topics", state="loaded")) == (0, 2)
    assert sample("tarry_recovery_seconds_count") == 1
    assert sample("tarry_recovery_rows_replayed_total") == 6
    assert any("the topics are loaded topics=2" in each.getMessage() for each in caplog.records)


# ---- what is carried over


def newest_checkpoint(machines: EngineFixture) -> Checkpoint:
    reference = machines.shard_tip().checkpoint
    assert reference is not None
    return checkpoint_format.decode_checkpoint(machines.store.get(reference.object.name))


def shard_slots(machines: EngineFixture) -> list[int]:
    """Those of whose sections a successor may read."""
    headers = (log_slot_format.decode_log_slot(machines.store.get(key)).header for key in machines.slots_of(0))
    ranges = machines.shard_tip().ranges
    return [
        header.heads[0].last_slot
        for header in headers
        if any(each.covers(header.log_id, header.number, header.heads[0]) for each in ranges)
    ]


async def write_slots(daemon: Daemon, count: int) -> None:
    """So many slots of another topic, and the checkpoints that are due by then."""
    for _ in range(count):
        await daemon.add("other", int(daemon.elapsed_s() * 10), range(2), delay_ms=FAR_MS)
        await asyncio.sleep(0.2)


async def story_of_a_carried_topic(
    machines: EngineFixture, *, lives: int, sealed: bool, checkpoint_damaged: bool = False
) -> None:
    """A topic has rows in a checkpoint and in slots above it, some of them acknowledged, some sealed since. So many
    owners write checkpoints without loading it. The next one finds each row once, and what was acknowledged not at all.
    """
    settings = (*OFTEN, *(SMALL if sealed else ()))
    one = await machines.served_by("one", *settings)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(8))
    await receiver.received(8)
    assert await receiver.acknowledge(receiver.rows[:3]) == 0
    await write_slots(one, 7)
    assert machines.keys("/checkpoint/"), "the topic has a part"
    await one.add("t", 2, range(8), delay_ms=FAR_MS)
    assert await receiver.acknowledge(receiver.rows[3:5]) == 0
    if sealed:
        await one.add("t", 3, range(20), delay_ms=FAR_MS)
        await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
        await one.add("t", 4, range(4), delay_ms=FAR_MS)
    one.kill()
    expected = {(1, entry) for entry in range(8)} - {row[:2] for row in receiver.rows[:5]}
    expected |= {(2, entry) for entry in range(8)}
    if sealed:
        expected |= {(3, entry) for entry in range(20)} | {(4, entry) for entry in range(4)}

    part_slot = 0
    for _ in range(lives):
        between = machines.daemon("one", *settings)
        held = hold(between, "t")
        await fenced(between)
        await held.reached()
        await write_slots(between, 20)
        (carried,) = (part for part in newest_checkpoint(machines).topics if part.topic_id == names.topic_id("t"))
        assert carried.slot is not None
        part_slot = carried.slot
        assert part_slot < machines.shard_tip().checkpoint_slot
        between.kill()
    assert min(shard_slots(machines)) > part_slot, "nobody needs its sections: what is carried is all there is"
    if checkpoint_damaged:
        reference = machines.shard_tip().checkpoint
        assert reference is not None
        flip(machines, reference.object.name)

    last = await machines.served_by("one", *settings)
    index = last.topic("t").core.index
    due = last.topic("t").core.subscriptions[1].backlog
    assert index.pending_rows + due == len(expected)
    assert sum(bucket.present_rows for bucket in index.buckets) == len(expected)
    again = await last.receiver("t")
    await again.received(len(expected))
    await asyncio.sleep(30)
    assert again.positions == expected
    assert len(again.rows) == len(expected)
    assert await again.acknowledge(again.rows) == 0


STORIES = [(1, False), (3, False), (1, True), (2, True)]


@pytest.mark.parametrize(("lives", "sealed"), STORIES)
async def test_checkpoints_carry_over_what_is_known_of_a_topic_that_is_not_loaded(
    machines: EngineFixture, lives: int, sealed: bool
) -> None:
    await story_of_a_carried_topic(machines, lives=lives, sealed=sealed)


async def test_what_is_carried_is_in_the_checkpoint_before_a_damaged_one_too(machines: EngineFixture) -> None:
    await story_of_a_carried_topic(machines, lives=2, sealed=True, checkpoint_damaged=True)


def without_the_part(topic_id: str, tail: checkpoints.TopicTail) -> checkpoint_format.TopicPart:
    return CARRIED(topic_id, dataclasses.replace(tail, part=None))


def without_the_records(topic_id: str, tail: checkpoints.TopicTail) -> checkpoint_format.TopicPart:
    return CARRIED(topic_id, dataclasses.replace(tail, slots=()))


def without_the_last_record(topic_id: str, tail: checkpoints.TopicTail) -> checkpoint_format.TopicPart:
    return CARRIED(topic_id, dataclasses.replace(tail, slots=tail.slots[:-1]))


def as_of_the_checkpoint(topic_id: str, tail: checkpoints.TopicTail) -> checkpoint_format.TopicPart:
    """The part as if it were as of the checkpoint that carries it: what it carries is not replayed."""
    return dataclasses.replace(CARRIED(topic_id, tail), slot=None, carried=())


CARRIED = recovery.carried_part
REPLAY = recovery.replay
COUNTING = checkpoints.counting_part


def replayed_twice(*arguments: object, **named: object) -> int:
    REPLAY(*arguments, **named)  # type: ignore[arg-type]
    return REPLAY(*arguments, **named)  # type: ignore[arg-type]


def replayed_from_the_beginning(topic: object, tip: object, tail: checkpoints.TopicTail, *, elapsed_ms: int) -> int:
    """What the manifest has applied is applied again."""
    tip = dataclasses.replace(tip, applied=0)  # type: ignore[type-var]
    return REPLAY(topic, tip, dataclasses.replace(tail, part=None), elapsed_ms=elapsed_ms)  # type: ignore[arg-type]


def part_counts_although_it_is_older(tip: object, tail: checkpoints.TopicTail) -> object:
    return tail.part


# What is planted, and the story that finds it: (name, replacement, lives, sealed).
PLANTED: list[tuple[str, Callable[..., object], int, bool]] = [
    ("carried_part", without_the_part, 1, False),
    ("carried_part", without_the_records, 1, False),
    ("carried_part", without_the_records, 2, True),
    ("carried_part", without_the_last_record, 3, False),
    ("carried_part", as_of_the_checkpoint, 1, False),
    ("replay", replayed_twice, 1, False),
    ("replay", replayed_from_the_beginning, 1, True),
    ("counting_part", part_counts_although_it_is_older, 1, True),
]


@pytest.mark.parametrize(
    ("name", "planted", "lives", "sealed"), PLANTED, ids=[f"{row[1].__name__}-{row[2]}-{row[3]}" for row in PLANTED]
)
async def test_the_story_finds_a_planted_bug(
    machines: EngineFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    planted: Callable[..., object],
    lives: int,
    sealed: bool,
) -> None:
    monkeypatch.setattr(checkpoints if name == "counting_part" else recovery, name, planted)
    with pytest.raises((AssertionError, TimeoutError, ValueError, KeyError)):
        await story_of_a_carried_topic(machines, lives=lives, sealed=sealed)


async def test_a_topic_that_only_slots_name_is_carried_without_a_state(machines: EngineFixture) -> None:
    await with_topics(machines, "t")
    two = machines.daemon("one", *OFTEN)
    hold(two, "t")
    await fenced(two)
    await write_slots(two, 20)
    (part,) = (part for part in newest_checkpoint(machines).topics if part.topic_id == names.topic_id("t"))
    assert (part.slot, len(part.mutable_rows), len(part.carried)) == (0, 0, 1)
    two.kill()
    three = await machines.served_by("one")
    assert three.topic("t").core.index.pending_rows == 3


# ---- a topic that is damaged


async def test_a_damaged_topic_is_refused_by_name_and_place_and_does_not_keep_the_log_from_shrinking(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    await with_topics(machines, "bad", "other")
    key = machines.keys(manifests_of("bad"))[-1]
    flip(machines, key)
    for _ in range(2):
        two = await machines.served_by("one", *OFTEN)
        with pytest.raises(Corruption, match=f"topic bad: .*{key}"):
            await two.add("bad", 1, range(3))
        assert two.engine.topics_damaged == 1
        await write_slots(two, 20)
        two.kill()
    assert any(key in each.getMessage() for each in caplog.records if each.levelname == "ERROR")
    assert min(shard_slots(machines)) > 5
    flip(machines, key)
    three = await machines.served_by("one", *OFTEN)
    assert three.engine.topics_damaged == 0
    assert three.topic("bad").core.index.pending_rows == 3


async def test_a_damaged_topic_that_was_mended_is_served_without_a_restart_and_claimed_once(
    machines: EngineFixture,
) -> None:
    await with_topics(machines, "bad", "good")
    key = machines.keys(manifests_of("bad"))[-1]
    flip(machines, key)
    two = await machines.served_by("one")
    with pytest.raises(Corruption):
        await two.add("bad", 1, range(3))
    await asyncio.sleep(10 * topic_loading.DAMAGED_LOOK_S)
    assert machines.keys(manifests_of("bad"))[-1] == key, "what cannot be read is not written to"
    flip(machines, key)
    await asyncio.sleep(topic_loading.DAMAGED_LOOK_S + 1)
    assert (await two.add("bad", 1, range(5), delay_ms=FAR_MS)).duplicates == 3
    assert len([each for each in machines.keys(manifests_of("bad")) if each > key]) == 1
    assert two.damage_found("topic") == 1


async def test_a_topic_whose_manifests_are_gone_is_damaged_where_a_section_names_it(machines: EngineFixture) -> None:
    await with_topics(machines, "bad", "good")
    for key in machines.keys(manifests_of("bad")):
        machines.store.delete(key)
    two = await machines.served_by("one")
    with pytest.raises(Corruption, match="its manifests are missing"):
        await two.add("bad", 1, range(3))
    assert (await two.add("good", 1, range(3))).duplicates == 3


@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_damaged_progress_refuses_its_topic_alone(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(bucket_lifecycle, "INLINE_PROGRESS_BYTES", 8)
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("bad")
    await one.add("bad", 1, range(20))
    await receiver.received(20)
    await receiver.acknowledge(receiver.rows[::2])
    await one.add("bad", 2, range(20))
    await one.until(lambda: len(one.topic("bad").core.index.sealed) == 2)
    await one.add("good", 1, range(3), delay_ms=FAR_MS)
    one.kill()
    key = machines.keys("/progress/")[-1]
    if damage == "flipped":
        flip(machines, key)
    else:
        machines.store.delete(key)
    two = await machines.served_by("one")
    with pytest.raises(Corruption, match=key):
        await two.add("bad", 1, range(3))
    assert (await two.add("good", 1, range(3))).duplicates == 3


registry.register("lives of a topic that is not loaded", (planted for _, planted, *_ in PLANTED))
