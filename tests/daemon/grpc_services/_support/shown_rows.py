"""What an engine shows of the rows of its topics, asked over the wire."""

from __future__ import annotations

import itertools

import grpc.aio
import pytest

from storage_backends.memory_store import MemoryStore
from tarry.v1 import admin_pb2, delayed_delivery_pb2, inspect_pb2
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge

FAR_MS = 2_000_000_000_000


async def scheduled(edge: Edge, subscription: str = "") -> dict[tuple[int, int], tuple[int, int]]:
    """(ledger, entry) -> (deliver_at_ms, key_hash) of the pending rows in an index of topic t: the shared one, or the
    subscription's own.
    """
    request = inspect_pb2.ListScheduledRequest(topic="t", subscription=subscription)
    page: inspect_pb2.ListScheduledResponse = await edge.caller.unary("Inspect/ListScheduled", request)
    assert not page.next_page_token
    names = page.subscriptions or [""]
    rows = itertools.zip_longest(
        page.ledger_id, page.entry_id, page.deliver_at_ms, page.key_hash, page.subscription_index, fillvalue=0
    )
    return {
        (ledger_id, entry_id): (deliver_at_ms, key_hash)
        for ledger_id, entry_id, deliver_at_ms, key_hash, index in rows
        if names[index] == subscription
    }


async def lose_bucket(edge: Edge, store: MemoryStore) -> inspect_pb2.RebuildNeeded:
    """Seal two rows of ledgers 3 and 5 into a bucket of topic t and damage it. Return what needs a rebuild then."""
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[3, 5], entry_id=[1, 2], deliver_at_ms=[FAR_MS])
    await edge.caller.unary("DelayedDelivery/AddMessages", add)
    sealed = await edge.caller.unary("Admin/SealBucket", admin_pb2.SealBucketRequest(topic="t"))
    store.put(sealed.bucket, b"damaged")
    with pytest.raises(grpc.aio.AioRpcError) as damaged:
        await edge.caller.unary("Inspect/ListScheduled", inspect_pb2.ListScheduledRequest(topic="t"))
    assert damaged.value.code() is grpc.StatusCode.DATA_LOSS
    await until(lambda: bool(edge.topics["t"].core.rebuild_needed()))
    (needed,) = edge.topics["t"].core.rebuild_needed()
    return inspect_pb2.RebuildNeeded(
        first_ledger_id=3,
        last_ledger_id=5,
        rows=2,
        bucket=sealed.bucket,
        damage=needed.damage,
        positions_known=needed.positions_known,
    )
