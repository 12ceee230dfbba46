"""Policies of key order over the wire: set, read, given again, replaced."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from daemon.grpc_services import value_messages
from storage_backends.formats import manifest
from tarry.v1 import dispatch_pb2 as pb
from tarry.v1 import inspect_pb2, policy_pb2
from tests.daemon.grpc_services.conftest import Edge

KeySharedPolicy = policy_pb2.KeySharedPolicy
CONSISTENT_HASHING = policy_pb2.HASH_SELECTOR_CONSISTENT_HASHING
AUTO_SPLIT = policy_pb2.HASH_SELECTOR_AUTO_SPLIT
STICKY = policy_pb2.HASH_SELECTOR_STICKY
DRAINING_HASHES = policy_pb2.KEY_ORDER_DRAINING_HASHES
LAST_SENT_POSITION = policy_pb2.KEY_ORDER_LAST_SENT_POSITION
SKIP = policy_pb2.NACK_ORDER_SKIP
BLOCK_KEY = policy_pb2.NACK_ORDER_BLOCK_KEY
DEFAULT = KeySharedPolicy(selector=CONSISTENT_HASHING, points_per_consumer=100, order=DRAINING_HASHES, nack_order=SKIP)


async def create(edge: Edge, key_shared: KeySharedPolicy | None) -> pb.CreateSubscriptionResponse:
    policy = policy_pb2.SubscriptionPolicy(key_shared=key_shared)
    request = pb.CreateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    answer: pb.CreateSubscriptionResponse = await edge.caller.unary("Dispatch/CreateSubscription", request)
    return answer


async def update(edge: Edge, key_shared: KeySharedPolicy | None) -> policy_pb2.SubscriptionPolicy:
    policy = policy_pb2.SubscriptionPolicy(key_shared=key_shared)
    request = pb.UpdateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    answer: policy_pb2.SubscriptionPolicy = (await edge.caller.unary("Dispatch/UpdateSubscription", request)).policy
    return answer


async def stored(edge: Edge) -> policy_pb2.SubscriptionPolicy:
    answer: Any = await edge.caller.unary("Inspect/ListSubscriptions", inspect_pb2.ListSubscriptionsRequest(topic="t"))
    (found,) = answer.subscriptions
    policy: policy_pb2.SubscriptionPolicy = found.policy
    return policy


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (KeySharedPolicy(), DEFAULT),
        (DEFAULT, DEFAULT),
        (
            KeySharedPolicy(points_per_consumer=1000, order=LAST_SENT_POSITION, allow_out_of_order_delivery=True),
            KeySharedPolicy(
                selector=CONSISTENT_HASHING,
                points_per_consumer=1000,
                order=LAST_SENT_POSITION,
                allow_out_of_order_delivery=True,
                nack_order=SKIP,
            ),
        ),
        (
            KeySharedPolicy(selector=AUTO_SPLIT, nack_order=BLOCK_KEY),
            KeySharedPolicy(
                selector=AUTO_SPLIT, order=DRAINING_HASHES, nack_order=BLOCK_KEY, nack_block_max_ms=600_000
            ),
        ),
        (
            KeySharedPolicy(selector=STICKY, nack_order=BLOCK_KEY, nack_block_max_ms=1),
            KeySharedPolicy(selector=STICKY, order=DRAINING_HASHES, nack_order=BLOCK_KEY, nack_block_max_ms=1),
        ),
    ],
    ids=["nothing", "the defaults", "last sent position", "automatic ranges", "sticky ranges"],
)
async def test_a_policy_is_shown_with_its_defaults_and_what_is_shown_can_be_given(
    edge: Edge, given: KeySharedPolicy, shown: KeySharedPolicy
) -> None:
    assert (await create(edge, given)).created
    assert (await stored(edge)).key_shared == shown
    assert not (await create(edge, shown)).created
    assert (await update(edge, given)).key_shared == shown
    assert (await stored(edge)).key_shared == shown


async def test_another_policy_of_key_order_is_another_policy(edge: Edge) -> None:
    await create(edge, DEFAULT)
    for other in (KeySharedPolicy(points_per_consumer=99), KeySharedPolicy(nack_order=BLOCK_KEY), None):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(edge, other)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_an_update_without_key_order_takes_it_away(edge: Edge) -> None:
    await create(edge, None)
    assert not (await stored(edge)).HasField("key_shared")
    assert (await update(edge, KeySharedPolicy(selector=STICKY))).key_shared.selector == STICKY
    assert not (await update(edge, None)).HasField("key_shared")
    assert not (await stored(edge)).HasField("key_shared")


@pytest.mark.parametrize("selector", manifest.HashSelector)
@pytest.mark.parametrize("order", manifest.KeyOrder)
@pytest.mark.parametrize("nack_order", manifest.NackOrder)
def test_the_wire_and_the_manifest_mean_the_same_by_a_number(
    selector: manifest.HashSelector, order: manifest.KeyOrder, nack_order: manifest.NackOrder
) -> None:
    policy = manifest.KeySharedPolicy(selector=selector, order=order, nack_order=nack_order)
    message = value_messages.key_shared_message(policy)
    assert policy_pb2.HashSelector.Name(message.selector) == f"HASH_SELECTOR_{selector.name}"
    assert policy_pb2.KeyOrder.Name(message.order) == f"KEY_ORDER_{order.name}"
    assert policy_pb2.NackOrder.Name(message.nack_order) == f"NACK_ORDER_{nack_order.name}"
    given = policy_pb2.SubscriptionPolicy(key_shared=message)
    assert value_messages.subscription_policy(given)[0].key_shared == policy
