"""Collecting beside one sequence of manifests, with a store that fails and others who work at the same time."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest

from daemon.core import garbage_rules
from daemon.core.garbage_rules import ObjectCount, Summary
from daemon.owner import collection_pass
from daemon.owner.collection_pass import Collector
from storage_backends import commit, topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.formats.manifest import TopicPolicy
from storage_backends.object_store import StoreError, StoreUnavailable
from storage_backends.topic_manifest import SetPolicy
from tests._support.fault_store import Call, Fault, FaultStore, Script
from tests.daemon.owner._support.topic_with_garbage import BODY, LIMITS, TopicWithGarbage
from tests.storage_backends._support.topic_manifests import EPOCH

ONE = ObjectCount(1, len(BODY))


@pytest.fixture
def topic() -> TopicWithGarbage:
    return TopicWithGarbage()


# Tombstones


def test_an_object_that_left_its_manifest_stays_for_its_grace_and_then_goes_with_its_tombstone(
    topic: TopicWithGarbage,
) -> None:
    kept, dropped = topic.seal("KEPT", "DROPPED")
    topic.drop(dropped)
    topic.pass_time(hours=0.99)
    number = topic.tip.number
    assert topic.collect() == Summary()
    assert topic.tip.number == number, "nothing to do is nothing to commit"
    topic.pass_time(hours=0.02)
    assert topic.collect() == Summary(tombstones=ONE)
    assert topic.objects() == [kept]
    assert topic.tip.manifest.tombstones == ()
    number = topic.tip.number
    assert topic.collect() == Summary()
    assert topic.tip.number == number


def test_many_tombstones_go_in_steps(topic: TopicWithGarbage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection_pass, "BATCH", 2)
    dropped = topic.seal(*"ABCDE")
    topic.drop(*dropped)
    topic.pass_time(hours=2)
    steps = [topic.collector().collect_tombstones(None) for _ in range(3)]
    assert [(step.summary.tombstones.objects, step.more) for step in steps] == [(2, True), (2, True), (1, False)]
    assert topic.objects() == []


def test_a_dry_run_counts_and_changes_nothing(topic: TopicWithGarbage) -> None:
    (dropped,) = topic.seal("DROPPED")
    topic.begin("LEFT")
    topic.drop(dropped)
    topic.pass_time(hours=30)
    topic.seal()
    before = {each.key: topic.store.get(each.key) for each in topic.store.list("")}
    limits = dataclasses.replace(LIMITS, manifests_kept=1)
    found = topic.collect(limits=limits, dry_run=True)
    assert found.tombstones == ONE
    assert found.manifests.objects == topic.tip.number - 2, "neither the tip nor the one that was it a day ago"
    assert {each.key: topic.store.get(each.key) for each in topic.store.list("")} == before


def test_a_deletion_that_fails_is_counted_and_tried_again_later(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    first, second = topic.seal("A", "B")
    topic.drop(first, second)
    topic.pass_time(hours=2)
    script.plan("delete", Fault.REFUSE, key_part=first)
    assert topic.collect(store) == Summary(tombstones=ONE, failed=ONE)
    (left,) = topic.tip.manifest.tombstones
    assert (left.object.name, left.attempts) == (first, 1)
    assert topic.collect(store) == Summary(tombstones=ONE), "its second time had come long ago"
    assert topic.objects() == []


def test_what_has_failed_lately_is_left_alone_for_a_while(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    topic.drop(*topic.seal("A"))
    topic.pass_time(hours=1)
    script.plan("delete", Fault.FAIL_BEFORE)
    assert topic.collect(store).failed == ONE
    topic.pass_time(hours=9 / 60)
    assert topic.collect(store) == Summary()
    topic.pass_time(hours=1 / 60)
    assert topic.collect(store) == Summary(tombstones=ONE)


def test_a_deletion_whose_answer_is_lost_is_repeated_and_that_nothing_is_left_is_success(
    topic: TopicWithGarbage,
) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    topic.drop(*topic.seal("A"))
    topic.pass_time(hours=2)
    script.plan("delete", Fault.FAIL_AFTER)
    assert topic.collect(store).failed == ONE
    assert topic.objects() == []
    assert topic.collect(store).tombstones == ONE
    assert topic.tip.manifest.tombstones == ()


def test_an_object_that_cannot_be_deleted_is_given_up_with_a_record(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    (name,) = topic.seal("A")
    topic.drop(name)
    script.plan("delete", Fault.REFUSE, times=LIMITS.attempts_max)
    for _ in range(LIMITS.attempts_max - 1):
        topic.pass_time(hours=10)
        assert topic.collect(store) == Summary(failed=ONE)
    topic.pass_time(hours=10)
    assert topic.collect(store) == Summary(given_up=ONE)
    assert topic.tip.manifest.tombstones == ()
    (key,) = topic.dead()
    record = manifest.decode_dead_object(topic.store.get(key))
    assert (record.object, record.attempts, record.size_bytes) == (name, LIMITS.attempts_max, len(BODY))
    assert record.error
    assert record.given_up_ms == topic.now_ms
    # Nothing names it now; that does not make it an orphan that is tried for ever.
    topic.seal()
    topic.pass_time(hours=50)
    assert topic.collect(store) == Summary()
    assert topic.objects() == [name]


def test_no_tombstone_is_dropped_before_the_record_is_durable(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    topic.drop(*topic.seal("A"))
    script.plan("delete", Fault.REFUSE, times=9)
    for _ in range(LIMITS.attempts_max - 1):
        topic.pass_time(hours=10)
        topic.collect(store)
    topic.pass_time(hours=10)
    script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=names.dead_objects_prefix())
    assert topic.collect(store) == Summary(failed=ONE)
    assert len(topic.tip.manifest.tombstones) == 1
    for fault in (Fault.ANSWER_EXISTS, Fault.FAIL_AFTER):
        assert topic.dead() == []
        topic.pass_time(hours=10)
        script.plan("put_if_absent", fault, key_part=names.dead_objects_prefix())
        assert topic.collect(store) == Summary(failed=ONE)
        assert len(topic.tip.manifest.tombstones) == 1
    topic.pass_time(hours=100)
    # The record is there by now.
    assert topic.collect(store) == Summary(given_up=ONE)
    assert len(topic.dead()) == 1


def given_up(topic: TopicWithGarbage, unique: str) -> str:
    script = Script()
    (name,) = topic.seal(unique)
    topic.drop(name)
    script.plan("delete", Fault.REFUSE, times=LIMITS.attempts_max)
    for _ in range(LIMITS.attempts_max):
        topic.pass_time(hours=10)
        topic.collect(FaultStore(topic.store, script))
    assert topic.dead() == [names.dead_object_key(name)]
    return name


def test_what_was_given_up_is_deleted_on_request_and_then_its_record(topic: TopicWithGarbage) -> None:
    name = given_up(topic, "A")
    script = Script()
    store = FaultStore(topic.store, script)
    assert collection_pass.retry_given_up(store, name, lambda _: False, dry_run=True) == Summary(tombstones=ONE)
    for part in (names.dead_object_key(name), name):
        script.plan("delete", Fault.FAIL_BEFORE, key_part=part)
        assert collection_pass.retry_given_up(store, name, lambda _: False) == Summary(failed=ONE)
        assert topic.dead(), "it is known as long as it is there"
    assert collection_pass.retry_given_up(store, name, lambda _: False) == Summary(tombstones=ONE)
    assert (topic.dead(), topic.objects()) == ([], [])
    assert collection_pass.retry_given_up(store, name, lambda _: False) == Summary(), "another collector was quicker"


def test_a_record_that_is_damaged_or_names_something_else_deletes_nothing(topic: TopicWithGarbage) -> None:
    name = given_up(topic, "A")
    (live,) = topic.seal("LIVE")
    key = names.dead_object_key(name)
    record = manifest.decode_dead_object(topic.store.get(key))
    topic.store.put(key, manifest.encode_dead_object(dataclasses.replace(record, object=live)))
    assert collection_pass.retry_given_up(topic.store, name, lambda _: False).failed == ONE
    topic.store.put(key, b"nothing")
    assert collection_pass.retry_given_up(topic.store, name, lambda _: False).failed == ObjectCount(1, 0)
    assert topic.objects() == sorted([live, name])


def test_what_a_manifest_names_is_not_deleted_though_there_is_a_record(topic: TopicWithGarbage) -> None:
    name = given_up(topic, "A")
    assert collection_pass.retry_given_up(topic.store, name, lambda each: each == name).failed == ONE
    assert topic.objects() == [name]


def test_two_collectors_that_delete_the_same_are_both_content(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    topic.drop(*topic.seal("A", "B"))
    topic.pass_time(hours=2)
    held = script.pause("put_if_absent")
    found: list[Summary] = []
    first = threading.Thread(target=lambda: found.append(topic.collect(store)))
    first.start()
    assert held.reached.wait(300)
    assert topic.collect().tombstones.objects == 2
    held.released.set()
    first.join(300)
    assert found[0].tombstones.objects == 2
    assert topic.tip.manifest.tombstones == ()


def test_a_collector_that_was_overtaken_drops_what_the_other_left(topic: TopicWithGarbage) -> None:
    script = Script()
    store = FaultStore(topic.store, script)
    first, second = topic.seal("A", "B")
    topic.drop(first, second)
    topic.pass_time(hours=2)
    held = script.pause("put_if_absent")
    thread = threading.Thread(target=lambda: topic.collect(store))
    thread.start()
    assert held.reached.wait(300)
    others = Script()
    others.plan("delete", Fault.REFUSE, key_part=second)
    topic.collect(FaultStore(topic.store, others))
    assert [each.object.name for each in topic.tip.manifest.tombstones] == [second]
    held.released.set()
    thread.join(300)
    assert topic.tip.manifest.tombstones == ()


def test_the_owner_goes_on_while_its_garbage_is_collected(topic: TopicWithGarbage) -> None:
    dropped = topic.seal("A")
    topic.drop(*dropped)
    warm = topic.tip
    topic.pass_time(hours=2)
    topic.collect()
    after = topic.commit(SetPolicy(policy=TopicPolicy(delay_max_ms=7), epoch=EPOCH), warm=warm)
    assert after.tombstones == ()


# A collector that dies at any call


def collector_dies_at(topic: TopicWithGarbage, call: int) -> bool:
    """Whether there was such a call. Nothing reaches the store from then on; another collector comes later."""
    calls = itertools.count()
    store = FaultStore(topic.store, lambda _: Fault.FAIL_BEFORE if next(calls) >= call else Fault.NONE)
    try:
        topic.collect(store, dataclasses.replace(LIMITS, manifests_kept=1))
    except (StoreError, commit.CommitOutcomeUnknown):
        return True
    return next(calls) > call


def with_everything() -> TopicWithGarbage:
    """Tombstones past and within their grace, orphans, objects on their way, old manifests."""
    topic = TopicWithGarbage()
    topic.seal("KEPT")
    topic.drop(*topic.seal("A", "B"))
    topic.begin("LEFT")
    topic.commit(SetPolicy(policy=TopicPolicy(delay_max_ms=1), epoch=EPOCH))
    topic.pass_time(hours=40)
    topic.drop(*topic.seal("YOUNG"))
    topic.begin("COMING")
    return topic


def check_dead_collectors() -> int:
    """How many calls a collection has."""
    for call in itertools.count():
        topic = with_everything()
        on_the_way = [key for key in topic.objects() if key.endswith(("-LEFT", "-COMING"))]
        died = collector_dies_at(topic, call)
        names_now = topic_manifest.names_in(topic.tip.manifest)
        assert {each.object.name for each in topic.tip.manifest.live} <= set(topic.objects())
        left_alone = [key for key in topic.objects() if key not in names_now and key not in on_the_way]
        assert not left_alone, f"nobody knows of {left_alone} after a death at call {call}"
        topic.collect(limits=dataclasses.replace(LIMITS, manifests_kept=1))
        assert sorted(key.rsplit("-")[-1] for key in topic.objects()) == ["COMING", "KEPT", "YOUNG"]
        if not died:
            return call
    raise AssertionError


def test_a_collector_may_die_at_any_call_and_the_next_one_finishes() -> None:
    assert check_dead_collectors() > 10


def test_a_collector_that_drops_a_tombstone_before_it_deletes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_first(
        self: Collector[manifest.TopicManifest], warm: object, *, dry_run: bool = False
    ) -> collection_pass.Step[manifest.TopicManifest]:
        tip = self._log.read_tip()
        assert tip is not None
        due = garbage_rules.due(tip.manifest.tombstones, self._tools.now_ms())
        outcome = collection_pass.Outcome(deleted=frozenset(each.object.name for each in due))
        tip = self._drop(outcome, tip)
        self._delete(outcome.deleted)
        return collection_pass.Step(tip, deleted=outcome.deleted)

    monkeypatch.setattr(Collector, "collect_tombstones", drop_first)
    with pytest.raises(AssertionError, match="nobody knows of"):
        check_dead_collectors()


# The store is away


def test_an_outage_gives_nothing_up(topic: TopicWithGarbage) -> None:
    """The attempts that fail cannot be counted either."""
    dropped = topic.seal("A")
    topic.drop(*dropped)
    topic.pass_time(hours=2)
    down = FaultStore(topic.store, _writes_fail)
    for _ in range(2 * LIMITS.attempts_max):
        with pytest.raises((StoreUnavailable, commit.CommitOutcomeUnknown)):
            topic.collect(down)
        topic.pass_time(hours=10)
    assert topic.dead() == []
    assert topic.collect().tombstones == ONE


def _writes_fail(call: Call) -> Fault:
    return Fault.FAIL_BEFORE if call.operation in ("put", "put_if_absent", "delete") else Fault.NONE
