"""What `topics`, `stats`, `subscriptions`, `buckets` and `lookup` show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.v1 import cluster_pb2, inspect_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer
from tests.client.cli.conftest import Run


def test_topics_are_lines_in_a_pipe_and_objects_in_json(daemon: FakeDaemon, run: Run) -> None:
    topic = inspect_pb2.TopicSummary(topic="a", shard=1, pending=2000, due=7, buckets=3, subscriptions=4)
    daemon.script("ListTopics", answer(inspect_pb2.ListTopicsResponse(topics=[topic])))
    assert run("topics").stdout.splitlines() == [
        "topic\tshard\tpending\tdue\tbuckets\tsubscriptions\tnext due",
        "a\t1\t2000\t7\t3\t4\t-",
    ]
    assert json.loads(run("topics", "--json").stdout) == {
        "topic": "a", "shard": 1, "pending": 2000, "buckets": 3, "subscriptions": 4, "next_due_ms": None, "due": 7
    }  # fmt: skip


def test_topics_that_are_not_listed_are_counted(daemon: FakeDaemon, run: Run) -> None:
    first = inspect_pb2.ListTopicsResponse(
        topics=[inspect_pb2.TopicSummary(topic="a")], next_page_token="a", topics_loading=9
    )
    last = inspect_pb2.ListTopicsResponse(
        topics=[inspect_pb2.TopicSummary(topic="b")], topics_loading=2000, topics_damaged=1
    )
    for arguments in ((), ("--json",)):
        daemon.script("ListTopics", answer(first), answer(last))
        result = run("topics", *arguments)
        assert "2,000 topics are not loaded yet and not listed" in result.stderr
        assert "1 topics are damaged" in result.stderr
        assert [request.page_token for request in daemon.requests("ListTopics")][-2:] == ["", "a"]
        assert len(result.stdout.splitlines()) == 2 + (arguments == ())


def test_that_there_is_no_topic_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListTopics", answer(inspect_pb2.ListTopicsResponse()))
    assert "there are no topics; `tarry add` creates one" in run("topics").stderr
    assert run("topics", "--json").stdout == ""


def test_stats_show_the_topic_and_its_subscriptions(daemon: FakeDaemon, run: Run) -> None:
    message = inspect_pb2.GetTopicStatsResponse(topic="t", pending=5, due=8, next_due_ms=1, last_due_ms=2**63, merges=6)
    message.subscriptions.add(subscription="sub", own_pending=4, backlog=3)
    message.lowest_position.ledger_id, message.lowest_position.entry_id, message.ledgers = 7, 0, 12
    daemon.script("GetTopicStats", answer(message))
    shown = run("stats", "t").stdout
    assert {"ledgers\t12", "lowest position\t7:0"} <= set(shown.splitlines())
    assert "pending\t5\ndue\t8\n" in shown
    assert {f"last due, at most\t{2**63} ms", "merges in flight\t6"} <= set(shown.splitlines())
    assert "sub\t4\t3\t0" in shown
    parsed = json.loads(run("stats", "t", "--json").stdout)
    assert (parsed["pending"], parsed["subscriptions"][0]["backlog"]) == (5, 3)
    assert (parsed["lowest_position"], parsed["ledgers"]) == ([7, 0], 12)


def test_what_a_topic_needs_of_its_log_is_shown_by_ledger(daemon: FakeDaemon, run: Run) -> None:
    first = inspect_pb2.GetRetentionResponse(ledger_id=[7], lowest_entry_id=[4], next_page_token="a")
    last = inspect_pb2.GetRetentionResponse(ledger_id=[2**64 - 1], lowest_entry_id=[0])
    last.uncertain.add(first_ledger_id=3, last_ledger_id=5)
    daemon.script("GetRetention", answer(first), answer(last), answer(first), answer(last))
    result = run("retention", "t", "--ledger", "7")
    assert [line.split("\t") for line in result.stdout.splitlines()[-2:]] == [["7", "4"], [str(2**64 - 1), "0"]]
    assert "ledgers 3 to 5: rows were lost with a damaged bucket, all of their entries are needed" in result.stderr
    parsed = json.loads(run("retention", "t", "--json").stdout)
    assert (parsed["lowest_position"], parsed["ledgers"]) == ([3, 0], [[7, 4], [2**64 - 1, 0]])
    assert parsed["uncertain"] == [[3, 5]]
    asked = daemon.requests("GetRetention")
    assert [list(each.ledger_id) for each in asked] == [[7], [7], [], []]
    assert [each.page_token for each in asked] == ["", "a"] * 2


def test_that_a_topic_needs_nothing_of_its_log_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetRetention", answer(inspect_pb2.GetRetentionResponse()))
    assert "t has no rows" in run("retention", "t").stderr
    assert json.loads(run("retention", "t", "--json").stdout)["lowest_position"] is None


def test_stats_say_what_to_add_again(daemon: FakeDaemon, run: Run) -> None:
    message = inspect_pb2.GetTopicStatsResponse(topic="t")
    message.rebuild_needed.add(first_ledger_id=3, last_ledger_id=5, rows=1, bucket="b", damage="bad checksum")
    daemon.script("GetTopicStats", answer(message))
    result = run("stats", "t")
    assert "1 row of ledgers 3 to 5 were lost with a damaged bucket (bad checksum)" in result.stderr
    assert "t has no subscription" in result.stderr
    assert json.loads(run("stats", "t", "--json").stdout)["rebuild_needed"][0]["rows"] == 1


def test_subscriptions_are_listed_with_their_policies(daemon: FakeDaemon, run: Run) -> None:
    first, last = inspect_pb2.ListSubscriptionsResponse(next_page_token="a"), inspect_pb2.ListSubscriptionsResponse()
    first.subscriptions.add(
        subscription="a",
        own_pending=7,
        backlog=3,
        in_flight=2,
        leased=1,
        nacked=1,
        dead_letters=5,
        waiting=6,
        consumers=8,
    )
    one = last.subscriptions.add(subscription="b")
    one.policy.lease_ms = 90_000
    one.policy.properties["team"] = "gates"
    one.policy.redelivery.ladder.SetInParent()
    one.policy.max_redeliver_count, one.policy.ack_timeout_ms, one.policy.nack_precision_bits = 3, 60_000, 0
    daemon.script("ListSubscriptions", answer(first), answer(last))
    assert run("subscriptions", "t").stdout.splitlines()[1:] == [
        "a\t7\t3\t2\t1\t1\t5\t6\t0\t8\t0\t-\t-\t-\t-\t-\t-\t-\t-",
        "b\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t-\t1m30s\tladder\t3\t1m\t0\t-\tteam=gates",
    ]
    daemon.script("ListSubscriptions", answer(first), answer(last))
    parsed = [json.loads(line) for line in run("subscriptions", "t", "--json").stdout.splitlines()]
    assert [each["policy"]["lease_ms"] for each in parsed] == [None, 90_000]


def bucket(**fields: Any) -> inspect_pb2.BucketSummary:
    return inspect_pb2.BucketSummary(
        bucket="shards/00/topics/x/buckets/0001-ULID", rows=2000, pending=1500, due=300, size_bytes=400,
        first_ledger_id=1, last_ledger_id=9, segments=4, segments_loaded=1, **fields
    )  # fmt: skip


def test_buckets_are_listed_and_what_is_in_none_is_counted(daemon: FakeDaemon, run: Run) -> None:
    damaged = bucket(quarantined=True, damage="bad checksum", level=2, subscription="sub")
    listed = inspect_pb2.ListBucketsResponse(buckets=[bucket(), damaged], mutable_rows=7)
    daemon.script("ListBuckets", answer(listed))
    result = run("buckets", "t")
    names, first, second = (line.split("\t") for line in result.stdout.splitlines())
    assert first[:6] == ["ULID", "2000", "1500", "300", "400", "1-9"]
    shown = dict(zip(names, second, strict=True))
    assert (shown["loaded"], shown["level"], shown["index"], shown["state"]) == ("1/4", "2", "sub", "quarantined")
    assert dict(zip(names, first, strict=True))["index"] == "shared"
    assert result.stderr.splitlines() == [
        "tarry: quarantined: bad checksum; `tarry stats t` shows what to add again",
        "tarry: 7 rows of t in no sealed bucket yet",
    ]
    parsed = json.loads(run("buckets", "t", "--json").stdout.splitlines()[0])
    assert (parsed["bucket"], parsed["rows"]) == ("shards/00/topics/x/buckets/0001-ULID", 2000)


def test_that_there_is_no_bucket_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListBuckets", answer(inspect_pb2.ListBucketsResponse()))
    assert "t has no sealed bucket; `tarry seal` creates one" in run("buckets", "t").stderr


@pytest.mark.parametrize(("owner", "shown"), [("first", "first"), ("", "-")])
def test_lookup_names_the_owner(daemon: FakeDaemon, run: Run, owner: str, shown: str) -> None:
    found = cluster_pb2.LookupTopicResponse(shard=5, owner=owner, epoch=3, served_here=bool(owner))
    daemon.script("LookupTopic", answer(found))
    lines = run("lookup", "t").stdout.splitlines()
    assert lines[:2] == ["shard\t5", f"owner\t{shown}"]
    parsed = json.loads(run("lookup", "t", "--json").stdout)
    assert (parsed["topic"], parsed["owner"], parsed["served_here"]) == ("t", owner, bool(owner))
