"""A collection over the wire: a stream of messages, the last of which says what was done."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from daemon import config
from daemon.owner.engine import Engine
from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from tarry.v1 import admin_pb2 as pb
from tarry.v1 import delayed_delivery_pb2
from tests._support import real_engine
from tests.daemon.grpc_services.conftest import Edge

FAR_MS = 2_000_000_000_000


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def engine(settings: config.Config, store: MemoryStore) -> AsyncIterator[Engine]:
    settings = config.load(environment={}, overrides=["daemon.shards=2", "collection.grace_s=0"])
    async with real_engine.serving(settings, store=store) as engine:
        yield engine


async def collected(edge: Edge, **fields: bool) -> list[pb.CollectGarbageResponse]:
    return await edge.caller.answers("Admin/CollectGarbage", pb.CollectGarbageRequest(**fields))


async def delete_a_sealed_topic(edge: Edge) -> None:
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1, 2], deliver_at_ms=[FAR_MS])
    await edge.caller.unary("DelayedDelivery/AddMessages", add)
    await edge.caller.unary("Admin/SealBucket", pb.SealBucketRequest(topic="t"))
    await edge.caller.unary("Admin/DeleteTopic", pb.DeleteTopicRequest(topic="t"))


async def test_a_collection_tells_how_far_it_is_and_what_it_did(edge: Edge, store: MemoryStore) -> None:
    await delete_a_sealed_topic(edge)
    messages = await collected(edge)
    assert [each.done for each in messages] == [False] * (len(messages) - 1) + [True]
    steps = [(each.shards_done, each.topics_done) for each in messages]
    assert steps == sorted(steps)
    last = messages[-1]
    assert (last.shards_done, last.shards, last.topics_done, last.topics) == (2, 2, 1, 1)
    assert last.summary.tombstones.objects == 1
    assert last.summary.tombstones.size_bytes > 0
    assert not list(store.list(names.buckets_prefix(names.shard_of("t", 2), names.topic_id("t"))))


async def test_a_dry_run_says_what_would_be_done_and_changes_nothing(edge: Edge, store: MemoryStore) -> None:
    await delete_a_sealed_topic(edge)
    before = {each.key for each in store.list("shards/")}
    first = (await collected(edge, dry_run=True))[-1]
    again = (await collected(edge, dry_run=True))[-1]
    assert first.summary.tombstones.objects == again.summary.tombstones.objects == 1
    assert {each.key for each in store.list("shards/")} == before


async def test_a_daemon_that_stops_ends_no_collection_with_success(edge: Edge) -> None:
    await edge.engine.stop()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await collected(edge)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
