"""What `receive`, `get`, `ack` and `subscription` send and print."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tarry.cli import dispatching, output
from tarry.v1 import dispatch_pb2, inspect_pb2, policy_pb2
from tests.client._support.fake_daemon import FakeDaemon, Requests, answer, done, messages, opened, refuse, taken_back
from tests.client.cli.conftest import Run


def due(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Sends entries 0 to 4 and confirms every acknowledgement."""
    for request in requests:
        match request.WhichOneof("request"):
            case "open":
                yield opened()
                yield messages(range(5))
            case "acknowledge":
                yield done(request)


def test_receive_prints_and_acknowledges_as_many_as_asked(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("Subscribe", due)
    before_ms = time.time_ns() // 1_000_000
    result = run("receive", "t", "s", "--count", "3", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["entry_id"] for line in lines] == [0, 1, 2]
    assert lines[1] == {
        "ledger_id": 7, "entry_id": 1, "deliver_at_ms": 1001, "received_at_ms": lines[1]["received_at_ms"],
        "lateness_ms": lines[1]["received_at_ms"] - 1001, "key_hash": None, "epoch": 1,
        "redelivery_count": 0, "batch_index": None,
    }  # fmt: skip
    assert lines[1]["received_at_ms"] >= before_ms
    (requests,) = daemon.requests("Subscribe")
    acknowledged = [request.acknowledge for request in requests.taken if request.HasField("acknowledge")]
    assert [list(each.entry_id) for each in acknowledged] == [[0, 1, 2]]


def test_receive_without_acknowledging_gives_back(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse()))
    daemon.script("Subscribe", due)
    result = run("receive", "t", "s", "--count", "5", "--no-ack", "--create")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert "ledger 7  entry 4  due " in lines[4]
    (requests,) = daemon.requests("Subscribe")
    assert not any(request.HasField("acknowledge") for request in requests.taken)
    assert daemon.count("CreateSubscription") == 1


def shared_by_key(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Sends entries 0 to 3 to two consumers, and takes entry 1 back."""
    for request in requests:
        match request.WhichOneof("request"):
            case "open":
                yield opened()
                yield messages(range(4), consumer_id=[1, 2, 1, 2], key_hash=[65_537, 0, 65_537, 0])
            case "acknowledge":
                yield done(request)
                if 0 in request.acknowledge.entry_id:
                    yield taken_back([1], [2])
                    yield messages([4], consumer_id=[1])


def test_receive_says_which_consumer_has_what(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("Subscribe", shared_by_key)
    result = run("receive", "t", "s", "--consumer", "a", "--consumer", "b=0-99,7", "--permits", "50", "--count", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "  a  hash 1  ledger 7  entry 0  due " in lines[0]
    assert ["  b  hash 0  ledger 7" in line for line in lines] == [False, False, True, True, False]
    assert "tarry: taken back from b: 1 row" in result.stderr
    (requests,) = daemon.requests("Subscribe")
    opening = requests.taken[0].open
    assert opening.type == dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED
    assert [(each.name, each.permits) for each in opening.consumers] == [("a", 5), ("b", 5)]
    ranges = [[(each.first, each.last) for each in consumer.hash_ranges] for consumer in opening.consumers]
    assert ranges == [[], [(0, 99), (7, 7)]]


def test_receive_in_json_names_the_consumer(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("Subscribe", shared_by_key)
    result = run("receive", "t", "s", "--consumer", "a", "--consumer", "b", "--count", "3", "--json", "--no-ack")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["consumer"], line["consumer_id"], line["entry_id"]) for line in lines] == [
        ("a", 1, 0), ("a", 1, 2), ("b", 2, 1)
    ]  # fmt: skip
    assert lines[0]["key_hash"] == 65_537
    (requests,) = daemon.requests("Subscribe")
    assert not any(request.HasField("acknowledge") for request in requests.taken)


LOST = inspect_pb2.RebuildNeeded(
    first_ledger_id=3, last_ledger_id=5, rows=2000, bucket="shards/00/b", damage="offset 40: bad checksum"
)


def test_receive_says_what_was_lost_with_a_bucket(daemon: FakeDaemon, run: Run) -> None:
    def damaged(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        first = opened()
        first.opened.rebuild_needed.append(LOST)
        requests.take()
        yield first
        yield messages(range(1))
        for request in requests:
            if request.HasField("acknowledge"):
                yield done(request)

    daemon.script("Subscribe", damaged)
    result = run("receive", "t", "s", "--count", "1", "--json")
    assert len(result.stdout.splitlines()) == 1
    assert "2,000 rows of ledgers 3 to 5 were lost with a damaged bucket (offset 40: bad checksum)" in result.stderr


def leased(entries: range, *, lost: bool = False) -> dispatch_pb2.GetScheduledMessagesResponse:
    """Positions of ledger 7 for 90 s."""
    return dispatch_pb2.GetScheduledMessagesResponse(
        messages=messages(entries).messages, lease_ms=90_000, rebuild_needed=[LOST] if lost else []
    )


def test_get_prints_what_it_leased(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetScheduledMessages", answer(leased(range(2))))
    result = run("get", "t", "s", "--max", "5", "--lease", "1m30s", "--wait", "500ms")
    assert result.exit_code == 0, result.output
    assert "ledger 7  entry 1  due " in result.stdout.splitlines()[1]
    assert result.stderr == "tarry: leased 2 rows for 1m30s\n"
    (asked,) = daemon.requests("GetScheduledMessages")
    assert (asked.topic, asked.subscription, asked.max_rows, asked.lease_ms) == ("t", "s", 5, 90_000)
    assert 0 < asked.wait_ms <= 500


def test_get_in_json_is_a_line_a_position_and_nothing_else(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetScheduledMessages", answer(leased(range(2), lost=True)))
    result = run("get", "t", "s", "--json")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["entry_id"], second["entry_id"], first["lease_ms"]) == (0, 1, 90_000)
    assert "add these ledgers again" in result.stderr


def test_get_acknowledges_when_asked_to(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetScheduledMessages", answer(leased(range(2))))
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse()))
    assert run("get", "t", "s", "--ack").stderr == "tarry: acknowledged 2 rows\n"
    (acknowledged,) = daemon.requests("Acknowledge")
    assert list(acknowledged.deliver_at_ms) == [1000, 1001]


def test_get_says_that_nothing_is_due(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetScheduledMessages", answer(leased(range(0))))
    result = run("get", "t", "s", "--ack")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "tarry: nothing is due\n")
    assert daemon.count("Acknowledge") == 0


def test_a_lease_of_no_time_is_refused(daemon: FakeDaemon, run: Run) -> None:
    result = run("get", "t", "s", "--lease", "0s")
    assert result.exit_code == output.EXIT_INPUT
    assert "a lease lasts at least 1ms" in result.stderr
    assert daemon.calls == []


def test_what_get_prints_can_be_acknowledged(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.script("GetScheduledMessages", answer(leased(range(5))))
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse(ignored=1)))
    monkeypatch.setattr(dispatching, "POSITIONS_IN_REQUEST", 3)
    taken = run("get", "t", "s", "--json").stdout
    path = tmp_path / "taken.json"
    path.write_text(taken)
    for source, stdin in ((str(path), None), ("-", taken)):
        result = run("ack", "t", "s", "--file", source, "--json", stdin=stdin)
        assert json.loads(result.stdout) == {
            "topic": "t",
            "subscription": "s",
            "given": 5,
            "ignored": 2,
            "ignored_rows": [],
        }
    assert [list(each.entry_id) for each in daemon.requests("Acknowledge")] == [[0, 1, 2], [3, 4]] * 2


def test_entries_are_acknowledged_from_options(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse(ignored=1)))
    result = run("ack", "t", "s", "--ledger", "7", "--entries", "1-3", "--at", "1000")
    assert result.stdout == "acknowledged 2 rows, ignored 1\n"
    (asked,) = daemon.requests("Acknowledge")
    assert (list(asked.ledger_id), list(asked.entry_id)) == ([7, 7, 7], [1, 2, 3])
    assert list(asked.deliver_at_ms) == [1000, 1000, 1000]


def test_nothing_to_acknowledge_is_fine(daemon: FakeDaemon, run: Run) -> None:
    assert run("ack", "t", "s", "--file", "-", stdin="").stdout == "acknowledged 0 rows, ignored 0\n"
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ((), "", "give --ledger, --entries and --at, or --file"),
        (("--ledger", "1", "--entries", "1"), "", "give --ledger, --entries and --at, or --file"),
        (("--file", "-", "--ledger", "1"), "", "--file has the positions"),
        (("--file", "-"), "late\n", "-, line 1: not JSON"),
        (("--file", "-"), b"\xff\n", "the file is not UTF-8"),
    ],
)
def test_a_wrong_acknowledgement_is_told_and_not_sent(
    daemon: FakeDaemon, run: Run, arguments: tuple[str, ...], stdin: str | bytes, says: str
) -> None:
    result = run("ack", "t", "s", *arguments, stdin=stdin)
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


def test_subscriptions_are_created_and_deleted(daemon: FakeDaemon, run: Run) -> None:
    created = dispatch_pb2.CreateSubscriptionResponse(subscription_id=3, since_ms=9, created=True)
    daemon.script("CreateSubscription", answer(created))
    daemon.script("DeleteSubscription", answer(dispatch_pb2.DeleteSubscriptionResponse()))
    assert run("subscription", "create", "t", "s").stdout == "s is created, id 3\n"
    assert json.loads(run("subscription", "create", "t", "s", "--json").stdout) == {
        "topic": "t", "subscription": "s", "subscription_id": 3, "since_ms": 9, "created": True
    }  # fmt: skip
    assert run("subscription", "delete", "t", "s", "--yes").stdout == "s is deleted\n"
    assert daemon.count("DeleteSubscription") == 1


POLICY = ("--in-flight", "500", "--lease", "1m", "--property", "team=gates", "--property", "note=a=b")


def test_a_subscription_is_created_with_a_policy(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=3)))
    assert run("subscription", "create", "t", "s", *POLICY).stdout == "s exists already, id 3\n"
    (asked,) = daemon.requests("CreateSubscription")
    assert (asked.policy.in_flight_rows_max, asked.policy.lease_ms) == (500, 60_000)
    assert dict(asked.policy.properties) == {"team": "gates", "note": "a=b"}


def test_a_subscription_that_is_there_with_another_policy_is_said_how_to_change(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", refuse(grpc.StatusCode.ALREADY_EXISTS, "s exists with another policy"))
    result = run("subscription", "create", "t", "s")
    assert result.exit_code == output.EXIT_REFUSED
    assert "`tarry subscription update` changes it" in result.stderr


def test_a_subscription_s_policy_is_replaced(daemon: FakeDaemon, run: Run) -> None:
    stored = policy_pb2.SubscriptionPolicy(
        in_flight_rows_max=500, properties={"team": "gates"}, max_redeliver_count=0,
        redelivery=policy_pb2.RedeliveryPolicy(constant=policy_pb2.ConstantDelay(delay_ms=10_000)),
    )  # fmt: skip
    daemon.script("UpdateSubscription", answer(dispatch_pb2.UpdateSubscriptionResponse(policy=stored)))
    assert run("subscription", "update", "t", "s", *POLICY).stdout.splitlines() == [
        "in flight max\t500", "lease\t-", "redelivery\tconstant 10s", "max redeliver count\t0", "ack timeout\t-",
        "nack precision bits\t-", "key shared\t-", "properties\tteam=gates",
    ]  # fmt: skip
    shown = json.loads(run("subscription", "update", "t", "s", "--defaults", "--json").stdout)
    assert shown == {
        "topic": "t", "subscription": "s", "in_flight_rows_max": 500, "lease_ms": None, "properties": {"team": "gates"},
        "redelivery": {"delay_ms": 10_000, "kind": "constant"}, "max_redeliver_count": 0, "ack_timeout_ms": None,
        "nack_precision_bits": None, "key_shared": None,
    }  # fmt: skip
    given, defaults = daemon.requests("UpdateSubscription")
    assert given.policy.lease_ms == 60_000
    assert defaults.HasField("policy")
    assert defaults.policy == policy_pb2.SubscriptionPolicy()


def test_a_subscription_is_created_with_what_becomes_of_nacks(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=3)))
    assert run(
        "subscription", "create", "t", "s", "--redelivery", "exponential 1s x3 max 10m jitter 0.2",
        "--max-redeliver-count", "0", "--ack-timeout", "1m", "--nack-precision-bits", "0",
    ).exit_code == 0  # fmt: skip
    (asked,) = daemon.requests("CreateSubscription")
    assert asked.policy == policy_pb2.SubscriptionPolicy(
        redelivery=policy_pb2.RedeliveryPolicy(
            exponential=policy_pb2.ExponentialDelay(initial_ms=1_000, multiplier=3, max_ms=600_000, jitter=0.2)
        ),
        max_redeliver_count=0, ack_timeout_ms=60_000, nack_precision_bits=0,
    )  # fmt: skip


def test_a_subscription_s_dead_letters_go_with_it_and_are_told(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("DeleteSubscription", answer(dispatch_pb2.DeleteSubscriptionResponse(dead_letters=2)))
    assert run("subscription", "delete", "t", "s", "--yes").stdout == "s is deleted with 2 dead letters\n"
    parsed = json.loads(run("subscription", "delete", "t", "s", "--yes", "--json").stdout)
    assert parsed == {"topic": "t", "subscription": "s", "deleted": True, "dead_letters": 2}


@pytest.mark.parametrize("arguments", [(), ("--defaults", "--lease", "1m"), ("--property", "team")])
def test_a_policy_is_not_lost_by_a_slip(daemon: FakeDaemon, run: Run, arguments: tuple[str, ...]) -> None:
    assert run("subscription", "update", "t", "s", *arguments).exit_code == output.EXIT_INPUT
    assert daemon.calls == []
