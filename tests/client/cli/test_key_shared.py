"""Policies of key order on the command line: as options, as text, as JSON."""

from __future__ import annotations

import json

import pytest

import tarry
from tarry.cli import output, policy_text
from tarry.v1 import dispatch_pb2, inspect_pb2, policy_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer
from tests.client.cli.conftest import Run

BLOCKING = policy_pb2.KeySharedPolicy(
    selector=policy_pb2.HASH_SELECTOR_CONSISTENT_HASHING,
    points_per_consumer=50,
    order=policy_pb2.KEY_ORDER_LAST_SENT_POSITION,
    nack_order=policy_pb2.NACK_ORDER_BLOCK_KEY,
    nack_block_max_ms=90_000,
)
OPTIONS = (
    *("--selector", "consistent-hashing", "--points", "50", "--key-order", "last-sent-position"),
    *("--nack-order", "block-key", "--nack-block-max", "1m30s"),
)
SHOWN = "consistent-hashing 50 points, last-sent-position, block-key 1m30s"


def test_a_subscription_is_created_with_a_policy_of_key_order(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=3)))
    assert run("subscription", "create", "t", "s", *OPTIONS).exit_code == 0
    assert run("subscription", "create", "t", "s", "--selector", "sticky", "--allow-out-of-order").exit_code == 0
    assert run("subscription", "create", "t", "s", "--lease", "1m").exit_code == 0
    first, second, without = (request.policy for request in daemon.requests("CreateSubscription"))
    assert first == policy_pb2.SubscriptionPolicy(key_shared=BLOCKING)
    assert second.key_shared == policy_pb2.KeySharedPolicy(
        selector=policy_pb2.HASH_SELECTOR_STICKY, allow_out_of_order_delivery=True
    )
    assert not without.HasField("key_shared")


def test_a_subscription_s_policy_of_key_order_is_replaced_and_shown(daemon: FakeDaemon, run: Run) -> None:
    stored = policy_pb2.SubscriptionPolicy(key_shared=BLOCKING)
    daemon.script("UpdateSubscription", answer(dispatch_pb2.UpdateSubscriptionResponse(policy=stored)))
    assert f"key shared\t{SHOWN}" in run("subscription", "update", "t", "s", *OPTIONS).stdout.splitlines()
    parsed = json.loads(run("subscription", "update", "t", "s", *OPTIONS, "--json").stdout)
    assert parsed["key_shared"] == {
        "selector": "consistent_hashing",
        "points_per_consumer": 50,
        "order": "last_sent_position",
        "allow_out_of_order_delivery": False,
        "nack_order": "block_key",
        "nack_block_max_ms": 90_000,
    }
    assert daemon.requests("UpdateSubscription")[0].policy == stored


def test_subscriptions_are_listed_with_their_policies_of_key_order(daemon: FakeDaemon, run: Run) -> None:
    listed = inspect_pb2.ListSubscriptionsResponse()
    listed.subscriptions.add(subscription="s", policy=policy_pb2.SubscriptionPolicy(key_shared=BLOCKING))
    daemon.script("ListSubscriptions", answer(listed))
    names, values = (line.split("\t") for line in run("subscriptions", "t").stdout.splitlines())
    assert dict(zip(names, values, strict=True))["key shared"] == SHOWN
    parsed = json.loads(run("subscriptions", "t", "--json").stdout)
    assert parsed["policy"]["key_shared"]["nack_order"] == "block_key"


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (tarry.KeySharedPolicy(), "defaults"),
        (tarry.KeySharedPolicy(points_per_consumer=7), "7 points"),
        (tarry.KeySharedPolicy(nack_block_max_ms=1500), "1500ms"),
        (
            tarry.KeySharedPolicy(
                selector=tarry.HashSelector.AUTO_SPLIT,
                order=tarry.KeyOrder.DRAINING_HASHES,
                nack_order=tarry.NackOrder.SKIP,
                allow_out_of_order_delivery=True,
            ),
            "auto-split, draining-hashes, skip, out of order",
        ),
    ],
)
def test_a_policy_of_key_order_says_what_is_set(policy: tarry.KeySharedPolicy, shown: str) -> None:
    assert policy_text.key_shared_text(policy) == shown


@pytest.mark.parametrize(
    "arguments",
    [("--selector", "unspecified"), ("--points", "1001"), ("--nack-order", "block"), ("--nack-block-max", "soon")],
)
def test_what_cannot_be_chosen_is_wrong_usage(daemon: FakeDaemon, run: Run, arguments: tuple[str, ...]) -> None:
    result = run("subscription", "create", "t", "s", *arguments)
    assert result.exit_code == output.EXIT_INPUT
    assert daemon.calls == []
