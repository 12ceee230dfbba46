"""What is under way when a topic fails, and failures that are found elsewhere than in its wakes: nothing that was
answered is lost, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from daemon.call_values import HandedOut
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.errors import Corruption, InvariantViolated, OutcomeUnknown
from daemon.runtime.failure_scope import TopicFailed
from daemon.shard import shard
from daemon.shard.topic_loading import TopicLoading
from daemon.topic import bucket_lifecycle
from daemon.topic.bucket_lifecycle import BucketLifecycle
from daemon.topic.topic_manifests import TopicManifests
from storage_backends.formats import checkpoint_format, log_slot_format, manifest, names, slot_format
from storage_backends.formats.manifest import TopicManifest
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Call, Fault
from tests.daemon._support.calling import delete_topic, trim, up_to
from tests.daemon.shard.test_failure_scopes import SEVERAL, Traffic, metric, topic_of

HOUR_MS = 3_600_000
SHARD = 1
FAILING, OTHER = topic_of(SHARD), topic_of(SHARD, 1)
MANIFESTS = names.topic_manifest_prefix(SHARD, names.topic_id(FAILING))
WITH_COLLECTION = ("daemon.shards=4", "collection.interval_s=2", "collection.orphan_interval_s=2")


def fail(daemon: Daemon) -> None:
    daemon.context.run(daemon.topic(FAILING).failed, InvariantViolated("a row is waiting twice"))


async def served_again(daemon: Daemon) -> None:
    await daemon.until(lambda: not daemon.shards[SHARD].reloading and FAILING in daemon.shards[SHARD].topics)


def failures(daemon: Daemon) -> tuple[float, float]:
    """How many topics have failed, and how many shards were lost by a failure."""
    return metric(daemon, "tarry_topics_failed_total"), metric(daemon, "tarry_shards_lost_total", cause="failed")


# ---- what is under way


async def test_a_trim_that_waits_for_its_slot_when_its_topic_fails_takes_nobody_with_it(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for topic in (FAILING, OTHER):
        await one.add(topic, 1, range(10), HOUR_MS)
    held = one.pause("put_if_absent", "logs/")
    trimming = trim(one, up_to(4, 1), topic=FAILING)
    await held.reached()
    waits = trim(one, up_to(4, 1), topic=OTHER)
    await asyncio.sleep(0.1)
    fail(one)
    held.release()
    with pytest.raises(OutcomeUnknown, match="has failed and is loaded again"):
        await trimming
    assert await waits == 5
    await served_again(one)
    assert one.topic(FAILING).core.indexes.present_rows == 5, "it was on its way, and landed"
    assert failures(one) == (1, 0)


async def test_a_deletion_that_is_under_way_when_its_topic_fails_does_not_bring_it_to_life_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    await one.add(FAILING, 1, range(10), HOUR_MS)
    held = one.pause("put_if_absent", MANIFESTS)
    deleting = delete_topic(one, FAILING)
    await held.reached()
    buckets = one.shards[SHARD].topics[FAILING].buckets
    fail(one)
    with pytest.raises(OutcomeUnknown, match="has failed and is loaded again"):
        await deleting
    buckets.seal(one.shards[SHARD].applied_slot)
    await asyncio.sleep(1)
    held.release()
    await one.until(lambda: not one.shards[SHARD].reloading)
    await asyncio.sleep(5)
    assert FAILING not in one.shards[SHARD].topics
    assert not machines.keys(names.buckets_prefix(SHARD, names.topic_id(FAILING)))
    await one.add(FAILING, 1, range(3), HOUR_MS)
    assert one.topic(FAILING).core.indexes.present_rows == 3


async def added_beside_an_uncertain_deletion(machines: EngineFixture) -> int:
    """A topic fails while nobody can tell whether its deletion has landed. How many rows of those that are added when
    it is served again are there after a restart.
    """
    one = await machines.served_by("one", *SEVERAL)
    await one.add(FAILING, 1, range(10), HOUR_MS)
    away = False

    def decide(call: Call) -> Fault:
        nonlocal away
        if call.key.startswith(MANIFESTS) and away:
            return Fault.FAIL_BEFORE
        if call.key.startswith(MANIFESTS) and call.operation == "put_if_absent":
            away = True
            return Fault.DELIVER_LATE
        return Fault.NONE

    one.decide = decide
    deleting = delete_topic(one, FAILING)
    await one.until(lambda: away)
    fail(one)
    await asyncio.sleep(60)
    one.decide = lambda call: Fault.NONE
    with pytest.raises(OutcomeUnknown, match="has failed and is loaded again"):
        await deleting
    await asyncio.sleep(10)
    assert (await one.add(FAILING, 2, range(3), HOUR_MS)).accepted == 3
    one.store.deliver_late()
    await asyncio.sleep(60)
    one.kill()
    two = await machines.served_by("one", *SEVERAL)
    return two.topic(FAILING).core.indexes.present_rows if FAILING in two.shards[SHARD].topics else 0


async def test_a_commit_that_is_not_certain_when_its_topic_fails_is_before_the_topic_is_read_again(
    machines: EngineFixture,
) -> None:
    assert await added_beside_an_uncertain_deletion(machines) == 3


async def test_a_topic_that_is_read_again_before_its_commits_are_certain_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(commits: TopicManifests) -> None:
        commits.close()

    monkeypatch.setattr(TopicManifests, "settled", at_once)
    assert await added_beside_an_uncertain_deletion(machines) == 0


async def test_a_birth_that_fails_when_its_caller_has_gone_is_told_and_is_no_unheard_error(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    gone = asyncio.Event()

    async def damaged(*_: object, **__: object) -> None:
        await gone.wait()
        raise Corruption("manifest 1 is damaged")

    monkeypatch.setattr(shard, "commit_until_certain", damaged)
    adding = one.add(FAILING, 1, range(5), HOUR_MS)
    await one.until(lambda: FAILING in one.shards[SHARD]._births)
    adding.cancel()
    await asyncio.sleep(1)
    with caplog.at_level(logging.INFO):
        gone.set()
        await one.until(lambda: not one.shards[SHARD]._births)
        gc.collect()
    assert f"topic {FAILING} could not be born" in caplog.text
    assert "never retrieved" not in caplog.text


# ---- what is found elsewhere than in a wake


def cutting(patch: pytest.MonkeyPatch) -> None:
    cut = BucketLifecycle.cut

    def broken(buckets: BucketLifecycle) -> bucket_lifecycle.TopicCut:
        if buckets._topic.name == FAILING:
            raise InvariantViolated("what cannot be cut")
        return cut(buckets)

    patch.setattr(BucketLifecycle, "cut", broken)


def telling(patch: pytest.MonkeyPatch) -> None:
    part_of = bucket_lifecycle.checkpoint_part

    def broken(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
        if cut.topic == FAILING:
            raise KeyError("what is not there")
        return part_of(cut)

    patch.setattr(bucket_lifecycle, "checkpoint_part", broken)


@pytest.mark.parametrize("breaks", [cutting, telling])
async def test_a_topic_that_cannot_be_told_to_a_checkpoint_fails_and_the_checkpoint_is_written_without_it(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=3")
    traffic = await Traffic.on(one, [OTHER, topic_of(SHARD, 2), topic_of(3)])
    with monkeypatch.context() as patch:
        breaks(patch)
        await one.add(FAILING, 1, range(10), HOUR_MS)
        for _ in range(8):
            await traffic.check()
            await asyncio.sleep(1)
        failed, lost = failures(one)
        assert failed >= 1
        assert not lost
        replayed_from = machines.shard_tip(SHARD).checkpoint_slot
        await traffic.check()
        await one.until(lambda: machines.shard_tip(SHARD).checkpoint_slot > replayed_from)
    await served_again(one)
    assert one.topic(FAILING).core.indexes.present_rows == 10
    one.kill()
    two = await machines.served_by("one", *SEVERAL)
    assert two.topic(FAILING).core.indexes.present_rows == 10


async def test_an_orderly_end_leaves_nothing_to_read_though_a_topic_of_it_cannot_be_told_at_first(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    await one.add(FAILING, 1, range(10), HOUR_MS)
    cut, broken = BucketLifecycle.cut, 0

    def broken_once(life: BucketLifecycle) -> bucket_lifecycle.TopicCut:
        nonlocal broken
        broken += 1
        if broken == 1:
            raise InvariantViolated("what cannot be cut")
        return cut(life)

    monkeypatch.setattr(BucketLifecycle, "cut", broken_once)
    monkeypatch.setattr(BucketLifecycle, "seal", lambda life, slot: None)
    await one.stop()
    assert broken
    assert machines.sections_to_read(SHARD) == 0
    two = await machines.served_by("two", *SEVERAL)
    assert two.topic(FAILING).core.indexes.present_rows == 10


@pytest.mark.parametrize("in_pass", [False, True])
async def test_rows_that_were_being_handed_out_when_something_went_wrong_come_again(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, in_pass: bool
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    receivers = [await one.receiver(FAILING)] if in_pass else [await one.receiver(FAILING) for _ in range(2)]
    sent: list[HandedOut] = []
    if in_pass:
        receivers[0].stream.send = sent.append
    beside = await one.receiver(OTHER)
    hand_out, broken = SubscriptionState.hand_out, 0

    def broken_once(state: SubscriptionState, *arguments: Any, **named: Any) -> Any:
        nonlocal broken
        taken = hand_out(state, *arguments, **named)
        if len(taken):
            broken += 1
            if broken == 1:
                raise KeyError("what is not there")
        return taken

    monkeypatch.setattr(SubscriptionState, "hand_out", broken_once)
    await one.add(FAILING, 1, range(10), 50)
    await one.until(lambda: all(isinstance(each.ended, TopicFailed) for each in receivers))
    again = await one.receiver(FAILING)
    await again.received(10)
    assert beside.ended is None
    assert failures(one) == (1, 0)


async def test_a_request_that_finds_a_broken_invariant_has_its_topic_loaded_again(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    own, beside = await one.receiver(FAILING), await one.receiver(OTHER)
    await one.add(FAILING, 1, range(10), HOUR_MS)

    def broken(*_: object, **__: object) -> None:
        raise InvariantViolated("a row is waiting twice")

    with monkeypatch.context() as patch:
        patch.setattr(TopicState, "stage_add", broken)
        with pytest.raises(TopicFailed):
            await one.add(FAILING, 2, range(10), HOUR_MS)
    assert isinstance(own.ended, TopicFailed)
    assert beside.ended is None
    await served_again(one)
    await one.add(FAILING, 2, range(10), HOUR_MS)
    assert one.topic(FAILING).core.indexes.present_rows == 20


def with_manifest(machines: EngineFixture, change: Callable[[TopicManifest], TopicManifest]) -> None:
    """The newest manifest, as a writer with a bug would have written it."""
    newest = machines.keys(MANIFESTS)[-1]
    found = manifest.decode_topic_manifest(machines.store.get(newest))
    machines.store.put(newest, manifest.encode_topic_manifest(change(found)))


async def test_a_topic_whose_garbage_makes_no_sense_is_damaged_and_the_others_are_collected(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one", *WITH_COLLECTION)
    await one.add(FAILING, 1, range(5), HOUR_MS)
    await one.call(one.engine.requests.seal(FAILING))
    one.kill()

    def with_odd_garbage(found: TopicManifest) -> TopicManifest:
        odd = dataclasses.replace(found.live[0].object, name="shards//../x y")
        garbage = manifest.Tombstone(object=odd, removed_in=1, delete_after_ms=1, attempts=0)
        return dataclasses.replace(found, tombstones=(garbage,))

    with_manifest(machines, with_odd_garbage)
    two = await machines.served_by("one", *WITH_COLLECTION, "collection.grace_s=0")
    traffic = await Traffic.on(two, [OTHER, topic_of(2), topic_of(3)])
    for topic in (OTHER, topic_of(2)):
        await two.add(topic, 1, range(5), HOUR_MS)
        await two.call(two.engine.requests.seal(topic))
        await trim(two, up_to(10, 1), topic=topic)
    await traffic.check()
    for topic, number in ((OTHER, SHARD), (topic_of(2), 2)):
        await two.until(
            lambda topic=topic, number=number: not machines.keys(names.buckets_prefix(number, names.topic_id(topic)))  # type: ignore[misc]
        )
    assert f"topic {names.topic_id(FAILING)} cannot be served" in caplog.text
    assert "object 'shards//../x y' has base" in caplog.text
    assert not two.engine.failed.done()
    await traffic.check()


async def test_a_manifest_of_another_topic_s_name_is_damage_of_its_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for topic in (FAILING, OTHER):
        await one.add(topic, 1, range(5), HOUR_MS)
    await one.stop()
    with_manifest(machines, lambda found: dataclasses.replace(found, topic="topic+"))
    two = await machines.served_by("one", *SEVERAL)
    written = len(machines.keys("/manifest/"))
    for _ in range(3):
        with pytest.raises(Corruption, match=rf"topic {FAILING}: .*it is of topic 'topic\+'"):
            await two.add(FAILING, 2, range(3))
        assert (await two.add(OTHER, 2, range(3), HOUR_MS)).duplicates in (0, 3)
        await asyncio.sleep(20)
    assert len(machines.keys("/manifest/")) == written
    assert len(two.shards) == 4


async def test_a_section_that_names_what_is_no_topic_refuses_its_shard_by_name(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    await one.add(FAILING, 1, range(5), HOUR_MS)
    one.kill()
    key = machines.slots_of(SHARD)[-1]
    body, metadata = machines.store.get_with_metadata(key)
    slot = log_slot_format.decode_log_slot(body)
    stored = slot_format.read_slot(slot.section(SHARD))
    odd = [dataclasses.replace(each.decoded(), topic_id="../../../x") for each in stored.records]
    section = slot_format.encode_slot(stored.header, odd)
    machines.store.put(key, log_slot_format.encode_log_slot(slot.header, {SHARD: section}), metadata=metadata)
    two = await machines.served_by("one", *SEVERAL)
    traffic = await Traffic.on(two, [topic_of(each) for each in (0, 2, 3)])
    written = len(machines.keys("/manifest/"))
    for _ in range(3):
        with pytest.raises(Corruption, match=rf"shard {SHARD}, .*{key}: .*names '../../../x', which is not a topic id"):
            await two.add(FAILING, 2, range(5))
        await traffic.check()
        await asyncio.sleep(40)
    assert len(machines.keys("/manifest/")) == written


# ---- what waits until topics are loaded


async def checkpointed_after(machines: EngineFixture, daemon: Daemon, slots: int) -> bool:
    """Whether so many more slots make a checkpoint."""
    before = machines.shard_tip(SHARD).checkpoint_slot
    for number in range(slots):
        await daemon.add(OTHER, 100 + number, range(1), HOUR_MS)
    await asyncio.sleep(5)
    return machines.shard_tip(SHARD).checkpoint_slot > before


async def test_the_tail_of_a_shard_that_is_taken_again_counts_for_its_next_checkpoint(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=12")
    for number in range(10):
        await one.add(FAILING, number, range(1), HOUR_MS)
    lost = one.shards[SHARD]
    one.context.run(lost.lose, RuntimeError("a bug"))
    await one.until(lambda: one.shards.get(SHARD) not in (None, lost))
    await served_again(one)
    assert await checkpointed_after(machines, one, 3)


async def test_a_shard_that_is_lost_while_it_is_loaded_keeps_no_tail_of_others_from_counting(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=12")
    for number in range(10):
        await one.add(FAILING, number, range(1), HOUR_MS)
    await one.add(topic_of(0), 1, range(1), HOUR_MS)
    one.kill()
    two = machines.daemon("one", *SEVERAL, "journal.checkpoint_slots=12")
    held = two.pause("get_with_metadata", names.topic_manifest_prefix(0, names.topic_id(topic_of(0))))
    await two.start()
    await held.reached()
    two.context.run(two.shards[0].lose, RuntimeError("a bug"))
    await served_again(two)
    assert await checkpointed_after(machines, two, 3)
    held.release()


async def test_an_owner_that_was_superseded_while_it_reads_a_failed_topic_again_calls_nothing_damaged(
    machines: EngineFixture,
) -> None:
    settings = (*SEVERAL, "journal.checkpoint_slots=2")
    one = await machines.served_by("one", *settings)
    for number in range(8):
        await one.add(FAILING, number, range(1), HOUR_MS)
        await asyncio.sleep(60)
    known = machines.shard_tip(SHARD)
    held = one.pause("get_with_metadata", names.checkpoint_prefix(SHARD))
    fail(one)
    await held.reached()
    one.suspend()
    two = await machines.served_by("two", *settings)
    for number in range(8):
        await two.add(FAILING, 10 + number, range(1), HOUR_MS)
        await asyncio.sleep(60)
    for cut in (known.checkpoint, known.previous_checkpoint):
        assert cut is not None
        assert cut not in (machines.shard_tip(SHARD).checkpoint, machines.shard_tip(SHARD).previous_checkpoint)
        machines.store.delete(cut.object.name)
    one.resume()
    held.release()
    await one.until(lambda: SHARD not in one.shards)
    assert one.damage_found("checkpoint") == 0
    assert metric(one, "tarry_shards_lost_total", cause="damaged") == 0


async def test_a_topic_that_fails_whenever_it_is_loaded_keeps_its_shard_from_nothing(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=12")
    for number in range(10):
        await one.add(FAILING, number, range(1), HOUR_MS)
    one.kill()
    read = TopicLoading._read

    def broken(loading: TopicLoading, topic_id: str, tip: Any, number: int, *, may_wait: bool) -> Any:
        if topic_id == names.topic_id(FAILING):
            raise KeyError("what is not there")
        return read(loading, topic_id, tip, number, may_wait=may_wait)

    monkeypatch.setattr(TopicLoading, "_read", broken)
    two = await machines.served_by("one", *SEVERAL, "journal.checkpoint_slots=12")
    await two.until(lambda: two.engine.loaded, timeout_s=60)
    assert await checkpointed_after(machines, two, 3)
    monkeypatch.undo()
    await served_again(two)
    assert two.topic(FAILING).core.indexes.present_rows == 10
