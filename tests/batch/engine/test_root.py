"""A root as jobs find it: nothing is created, topics are found by name or by listing."""

from __future__ import annotations

import pytest

from batch.engine.root import Root, RootAbsent, TopicPlace
from storage_backends.formats import manifest, names
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged
from tests._support.fault_store import Call, Fault, FaultStore
from tests.batch.engine._support.roots import SHARDS, StoredTopic, make_root


def topics(store: MemoryStore, *topic_names: str) -> dict[str, TopicPlace]:
    return {name: TopicPlace(made.shard, made.topic_id) for name in topic_names for made in [StoredTopic(store, name)]}


def test_an_absent_root_is_refused_and_not_created() -> None:
    store = MemoryStore()
    with pytest.raises(RootAbsent, match="the store has no root: the object FORMAT is missing"):
        Root.open(store)
    assert list(store.list("")) == []


def test_a_root_of_another_version_is_refused() -> None:
    store = MemoryStore()
    other = manifest.RootFormat(
        format_version=99, shards=2, created_ms=0, root_id="r", log_form=manifest.LogForm.OBJECTS
    )
    store.put(names.FORMAT_KEY, manifest.encode_root_format(other))
    with pytest.raises(Damaged, match="format version 99"):
        Root.open(store)


def test_topics_are_those_that_the_shards_list() -> None:
    store = MemoryStore()
    make_root(store)
    places = topics(store, "t", "u", "v")
    store.put("shards/00/topics/strange/manifest/1", b"")
    root = Root.open(store)
    assert root.shards == SHARDS
    assert root.topics() == sorted(places.values())
    assert [place for shard in range(SHARDS) for place in root.listed(shard)] == sorted(places.values())


def test_named_topics_are_found_without_listing() -> None:
    store = MemoryStore()
    make_root(store)
    places = topics(store, "t", "u")
    calls: list[str] = []

    def watch(call: Call) -> Fault:
        calls.append(call.operation)
        return Fault.NONE

    root = Root.open(FaultStore(store, watch))
    assert root.topics(["u", "u", "t"]) == sorted(places.values())
    assert "list" not in calls


def test_the_tip_of_a_topic_is_its_newest_manifest() -> None:
    store = MemoryStore()
    make_root(store)
    topic = StoredTopic(store, "t")
    root = Root.open(store)
    place = root.place_of("t")
    topic.take_over()
    tip = root.tip(place)
    assert tip is not None
    assert (tip.number, tip.manifest.topic, tip.manifest.owner_epoch) == (2, "t", 2)
    assert root.tip(root.place_of("nobody's")) is None
    assert root.shard_tip(place.shard) is None
