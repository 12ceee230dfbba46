"""Orphans below the floor, and old manifests: what may go, what is refused because of it, and what must be found."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from daemon.core.garbage_rules import NOTHING, ObjectCount, Summary
from storage_backends import commit
from storage_backends.formats import manifest
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicPolicy
from storage_backends.object_store import StoreError
from storage_backends.topic_manifest import SetPolicy
from tests._support.fault_store import Fault, FaultStore, Script
from tests.daemon.owner._support.topic_with_garbage import BODY, LIMITS, TopicWithGarbage
from tests.storage_backends._support.topic_manifests import CREATE_AGAIN, EPOCH

ONE = ObjectCount(1, len(BODY))


@pytest.fixture
def topic() -> TopicWithGarbage:
    return TopicWithGarbage()


# Orphans


def test_what_no_manifest_named_for_a_day_is_an_orphan(topic: TopicWithGarbage) -> None:
    left = topic.begin("LEFT")
    topic.seal("A")
    topic.pass_time(hours=23)
    topic.begin("COMING")
    assert topic.collect().orphans == NOTHING
    topic.pass_time(hours=2)
    assert topic.collect().orphans == ONE
    assert [key.rsplit("-")[-1] for key in topic.objects()] == ["A", "COMING"]
    assert topic.tip.manifest.head.orphan_floor > left.object.base


def test_an_orphan_of_a_topic_that_is_at_rest_goes_too(topic: TopicWithGarbage) -> None:
    """Its base is the tip: only a later manifest can be the floor."""
    topic.begin("LEFT")
    for _ in range(2):
        topic.pass_time(hours=25)
        topic.collect()
    assert topic.objects() == []
    number = topic.tip.number
    topic.pass_time(hours=25)
    assert topic.collect() == Summary()
    assert topic.tip.number == number, "and then it rests"


def test_a_deletion_of_an_orphan_that_fails_is_repeated_by_the_next_listing(topic: TopicWithGarbage) -> None:
    topic.begin("LEFT")
    topic.seal()
    topic.pass_time(hours=25)
    script = Script()
    script.plan("delete", Fault.FAIL_BEFORE)
    store = FaultStore(topic.store, script)
    assert topic.collect(store) == Summary(failed=ONE)
    assert topic.collect(store) == Summary(orphans=ONE)


def test_a_seal_whose_object_was_begun_below_the_floor_is_refused_and_begun_again(topic: TopicWithGarbage) -> None:
    slow = topic.begin("SLOW")
    seal = topic.seal_of(slow)
    topic.commit(SetPolicy(policy=TopicPolicy(delay_max_ms=1), epoch=EPOCH))
    topic.pass_time(hours=25)
    topic.collect()
    with pytest.raises(commit.Refused, match="orphan floor"):
        topic.commit(seal)
    assert topic.objects() == []
    topic.seal("AGAIN")
    topic.pass_time(hours=25)
    topic.collect()
    assert len(topic.objects()) == 1


def test_a_seal_that_comes_before_the_floor_keeps_its_object(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    slow = topic.begin("SLOW")
    topic.commit(SetPolicy(policy=TopicPolicy(delay_max_ms=1), epoch=EPOCH))
    topic.pass_time(hours=25)
    held = script.pause("put_if_absent")
    thread = threading.Thread(target=lambda: topic.collect(store))
    thread.start()
    assert held.reached.wait(300)
    topic.commit(topic.seal_of(slow))
    held.released.set()
    thread.join(300)
    assert topic.objects() == [slow.object.name]
    assert topic.unnamed() == []


def test_a_reader_that_holds_an_old_manifest_finds_the_object_gone_and_the_newest_manifest_without_it(
    topic: TopicWithGarbage,
) -> None:
    (name,) = topic.seal("A")
    old = topic.tip
    topic.drop(name)
    topic.pass_time(hours=2)
    topic.collect()
    assert [each.object.name for each in old.manifest.live] == [name]
    with pytest.raises(StoreError):
        topic.store.get(name)
    assert topic.log().read_tip(old) == dataclasses.replace(topic.tip, read_at=topic.clock.now())
    assert topic.tip.manifest.live == ()


def test_a_floor_that_another_collector_has_moved_further_is_as_good(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    topic.begin("LEFT")
    topic.seal()
    topic.pass_time(hours=25)
    held = script.pause("put_if_absent")
    found: list[Summary] = []
    thread = threading.Thread(target=lambda: found.append(topic.collect(store)))
    thread.start()
    assert held.reached.wait(300)
    topic.seal()
    topic.pass_time(hours=25)
    assert topic.collect().orphans == ONE
    held.released.set()
    thread.join(300)
    assert found[0].failed == NOTHING
    assert topic.objects() == []


# Manifests


def history(topic: TopicWithGarbage, versions: int, hours: float) -> None:
    """So many more versions, each so much later."""
    for number in range(versions):
        topic.pass_time(hours=hours)
        topic.commit(SetPolicy(policy=TopicPolicy(delay_max_ms=number + 1), epoch=EPOCH))


@pytest.mark.parametrize(
    ("kept", "hours", "left"),
    [
        # Versions 1 to 31 an hour apart: the one that was the tip a day ago is number 7.
        (5, 1, range(7, 32)),
        (30, 1, range(2, 32)),
        (5, 10, range(27, 32)),
        (3, 10, range(28, 32)),
        (40, 10, range(1, 32)),
    ],
)
def test_a_manifest_goes_when_enough_later_ones_are_there_and_one_of_them_is_old_enough(
    topic: TopicWithGarbage, kept: int, hours: float, left: range
) -> None:
    history(topic, 30, hours)
    topic.collect(limits=dataclasses.replace(LIMITS, manifests_kept=kept))
    assert topic.manifest_numbers() == list(left)


def test_a_writer_that_was_suspended_makes_no_manifest_look_old(topic: TopicWithGarbage) -> None:
    """R3: whoever read the tip before it lately must find it. Its own time says nothing of when it was put."""
    late_ms = topic.now_ms
    topic.pass_time(hours=23)
    before = topic.tip
    commit.commit(
        topic.log(),
        SetPolicy(policy=TopicPolicy(delay_max_ms=99), epoch=EPOCH),
        writer="suspended",
        created_ms=late_ms,
        deadline_s=10,
    )
    suspended = topic.tip.number
    history(topic, 10, 0.01)
    topic.pass_time(hours=2)
    topic.collect(limits=dataclasses.replace(LIMITS, manifests_kept=3))
    assert suspended in topic.manifest_numbers()
    newest = topic.log().read_tip(before)
    assert newest is not None
    assert newest.number == topic.tip.number


def test_a_manifest_that_is_damaged_or_gone_already_stops_no_collection(topic: TopicWithGarbage) -> None:
    history(topic, 30, 1)
    listed = topic.listed()
    topic.store.put(topic.log().key(16), b"nothing")
    topic.store.delete(topic.log().key(4))
    collector = topic.collector(limits=dataclasses.replace(LIMITS, manifests_kept=2))
    collector.collect_manifests(listed, topic.tip)
    numbers = topic.manifest_numbers()
    assert numbers == list(range(7, 32))


def test_a_manifest_that_cannot_be_deleted_is_counted(topic: TopicWithGarbage) -> None:
    history(topic, 9, 10)
    script = Script()
    script.plan("delete", Fault.REFUSE, key_part=topic.log().key(3))
    summary = topic.collect(FaultStore(topic.store, script), dataclasses.replace(LIMITS, manifests_kept=2))
    assert (summary.manifests.objects, summary.failed.objects) == (5, 1)
    assert topic.manifest_numbers() == [3, 7, 8, 9, 10]


def test_of_a_deleted_topic_the_last_manifest_stays_for_ever_and_nothing_else(topic: TopicWithGarbage) -> None:
    topic.seal("A", "B")
    topic.begin("LEFT")
    topic.delete()
    last = topic.tip.number
    topic.pass_time(hours=25)
    topic.collect()
    assert topic.objects() == []
    for _ in range(3):
        topic.pass_time(hours=25)
        topic.collect()
    (number,) = topic.manifest_numbers()
    assert number >= last
    again = topic.commit(dataclasses.replace(CREATE_AGAIN, applied=ShardSlot(topic.tip.manifest.applied + 1)))
    assert again.incarnation == 2


def test_a_commit_whose_number_was_emptied_meanwhile_is_not_reported_as_history(topic: TopicWithGarbage) -> None:
    """R3, with the collector that is used: an owner is suspended with its PUT on the way."""
    script = Script()
    store = FaultStore(topic.store, script)
    held = script.pause("put_if_absent")
    ended: list[BaseException | commit.Tip[manifest.TopicManifest]] = []

    def act() -> None:
        try:
            ended.append(
                commit.commit(
                    topic.log(store),
                    SetPolicy(policy=TopicPolicy(delay_max_ms=5), epoch=EPOCH),
                    writer="suspended",
                    created_ms=topic.now_ms,
                    deadline_s=10,
                )
            )
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            ended.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    assert held.reached.wait(300)
    history(topic, 9, 10)
    topic.collect(limits=dataclasses.replace(LIMITS, manifests_kept=2))
    assert 2 not in topic.manifest_numbers()
    held.released.set()
    thread.join(300)
    (tip,) = ended
    assert isinstance(tip, commit.Tip)
    assert topic.tip.number == tip.number
    assert tip.number > 10
    assert tip.manifest.policy.delay_max_ms == 5
