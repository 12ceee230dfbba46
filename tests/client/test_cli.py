"""The `tarry` command: what it sends, prints, and exits with."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.cli
from tarry.cli import commands, output, rows
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.client import fake_daemon
from tests.client.fake_daemon import (
    FakeDaemon,
    Requests,
    accept_all,
    answer,
    done,
    messages,
    opened,
    refuse,
    refused,
    status,
)

Run = Callable[..., click.testing.Result]


@pytest.fixture
def run(daemon: FakeDaemon) -> Run:
    def invoke(*arguments: str, stdin: str | bytes | None = None) -> click.testing.Result:
        return click.testing.CliRunner(env={"TARRY_ADDRESS": daemon.address}).invoke(
            commands.tarry, list(arguments), input=stdin
        )

    return invoke


def adds_of(daemon: FakeDaemon) -> list[Any]:
    return [request.add for requests in daemon.requests("StreamAddMessages") for request in requests.taken]


def test_entries_are_added_from_options(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    result = run("add", "t", "--ledger", "3", "--entries", "5-9", "--in", "1m30s", "--batch-rows", "3", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary.pop("seconds") >= 0
    assert summary == {
        "topic": "t", "rows": 5, "accepted": 5, "duplicates": 0, "late_on_arrival": 0, "returned": 0, "raised": 0
    }  # fmt: skip
    first, second = adds_of(daemon)
    assert (first.topic, list(first.ledger_id), list(first.delay_ms)) == ("t", [3], [90_000])
    assert (list(first.entry_id), list(second.entry_id)) == ([5, 6, 7], [8, 9])
    assert not first.key_hash


def test_a_time_and_a_key_apply_to_every_entry(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    result = run("add", "t", "--ledger", "3", "--entries", "7", "--at", "2030-01-31T12:00:00Z", "--key", "foo")
    assert result.exit_code == 0, result.output
    assert "accepted\t1" in result.stdout
    (add,) = adds_of(daemon)
    assert list(add.deliver_at_ms) == [1896091200000]
    assert list(add.key_hash) == [4138058784]


def test_a_file_s_rows_are_added(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    daemon.script("StreamAddMessages", accept_all)
    path = tmp_path / "rows.csv"
    path.write_text("ledger,entry,deliver_at_ms,key\n1,2,3,foo\n\n4,5,6,\n", encoding="utf-8-sig")
    result = run("add", "t", "--file", str(path), "--already-due", "return", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["accepted"] == 2
    (add,) = adds_of(daemon)
    assert (list(add.ledger_id), list(add.entry_id), list(add.deliver_at_ms)) == ([1, 4], [2, 5], [3, 6])
    assert list(add.key_hash) == [4138058784, 0]
    assert add.already_due == delayed_delivery_pb2.ALREADY_DUE_RETURN


def test_standard_input_in_any_order_of_columns_is_added(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    result = run("add", "t", "--file", "-", "--batch-rows", "1", stdin="deliver_at_ms,ledger,entry\n3,1,2\n6,4,5\n")
    assert result.exit_code == 0, result.output
    assert [(add.ledger_id[0], add.entry_id[0], add.deliver_at_ms[0]) for add in adds_of(daemon)] == [
        (1, 2, 3),
        (4, 5, 6),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ledger,entry\n1,2\n", "the first line lacks deliver_at_ms"),
        ("", "the first line lacks ledger, entry, deliver_at_ms"),
        ("ledger,entry,deliver_at_ms,colour\n", "unknown column 'colour'"),
        ("ledger,entry,deliver_at_ms\n1,2,3\n1,x,3\n", "line 3: entry is 'x'; it must be an integer from 0 to"),
        ("ledger,entry,deliver_at_ms\n1,2\n", "line 2: deliver_at_ms is ''"),
        ("ledger,entry,deliver_at_ms\n1,2,-3\n", "line 2: deliver_at_ms is '-3'"),
        ("ledger,entry,deliver_at_ms\n18446744073709551616,2,3\n", "line 2: ledger is '18446744073709551616'"),
        (b"ledger,entry,deliver_at_ms\n\xff,2,3\n", "the file is not UTF-8"),
        ('ledger,entry,deliver_at_ms\n"' + "1" * 200_000 + '",2,3\n', "the file is not CSV"),
    ],
)
def test_a_bad_file_is_told_with_its_line(daemon: FakeDaemon, run: Run, text: str | bytes, says: str) -> None:
    daemon.script("StreamAddMessages", accept_all)
    result = run("add", "t", "--file", "-", stdin=text)
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ledger", "1"], "give --ledger and --entries, or --file"),
        (["--ledger", "1", "--entries", "1"], "give exactly one of --in and --at"),
        (["--ledger", "1", "--entries", "1", "--in", "1s", "--at", "5"], "give exactly one of --in and --at"),
        (["--file", "-", "--ledger", "1"], "--file has the rows"),
        (["--ledger", "1", "--entries", "9-5", "--in", "1s"], "'9-5' must go from a lower to a higher entry"),
        (["--ledger", "1", "--entries", "a", "--in", "1s"], "'a' is not a range of entries"),
        (["--ledger", "-1", "--entries", "1", "--in", "1s"], "-1 is not in the range"),
        (["--ledger", "1", "--entries", "1", "--in", "5x"], "'5x' is not a duration; write for example 500ms"),
        (["--ledger", "1", "--entries", "1", "--at", "soon"], "'soon' is not a time"),
        (["--ledger", "1", "--entries", "1", "--at", "1960-01-01T00:00:00Z"], "is before 1970"),
    ],
)
def test_wrong_options_are_told_and_nothing_is_sent(
    daemon: FakeDaemon, run: Run, arguments: list[str], says: str
) -> None:
    result = run("add", "t", *arguments)
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [("500ms", 500), ("5s", 5_000), ("1.5h", 5_400_000), ("1h30m", 5_400_000), ("7d", 604_800_000)],
)
def test_durations(text: str, expected_ms: int) -> None:
    assert rows.Duration().convert(text, None, None) == expected_ms


def test_the_last_entry_there_is_can_be_added() -> None:
    entries = rows.EntryRange().convert(f"{2**64 - 2}-{2**64 - 1}", None, None)
    (batch,) = rows.from_options(1, entries, deliver_at_ms=None, delay_ms=1, key=None, batch_rows=10)
    assert batch.entry_id.tolist() == [2**64 - 2, 2**64 - 1]


def test_a_refusal_stops_adding_and_is_one_line(daemon: FakeDaemon, run: Run) -> None:
    def refuse_all(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield refused(request, status(code_pb2.OUT_OF_RANGE, "delay_ms is 9; the limit is 8"))

    daemon.script("StreamAddMessages", refuse_all)
    result = run("add", "t", "--ledger", "1", "--entries", "0-999999", "--in", "9ms", "--batch-rows", "10")
    assert result.exit_code == output.EXIT_INPUT
    assert result.stderr == "tarry: delay_ms is 9; the limit is 8.\n"
    assert len(adds_of(daemon)) < 100_000


def due(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Sends entries 0 to 4 and confirms every acknowledgement."""
    for request in requests:
        match request.WhichOneof("request"):
            case "open":
                yield opened()
                yield messages(range(5))
            case "acknowledge":
                yield done(request)


def test_watch_prints_and_acknowledges_as_many_as_asked(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("Subscribe", due)
    before_ms = time.time_ns() // 1_000_000
    result = run("watch", "t", "s", "--count", "3", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["entry_id"] for line in lines] == [0, 1, 2]
    assert lines[1] == {
        "ledger_id": 7, "entry_id": 1, "deliver_at_ms": 1001, "received_at_ms": lines[1]["received_at_ms"],
        "lateness_ms": lines[1]["received_at_ms"] - 1001, "key_hash": None, "epoch": 1,
    }  # fmt: skip
    assert lines[1]["received_at_ms"] >= before_ms
    (requests,) = daemon.requests("Subscribe")
    acknowledged = [request.acknowledge for request in requests.taken if request.HasField("acknowledge")]
    assert [list(each.entry_id) for each in acknowledged] == [[0, 1, 2]]


def test_watch_without_acknowledging_only_looks(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse()))
    daemon.script("Subscribe", due)
    result = run("watch", "t", "s", "--count", "5", "--no-ack", "--create")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert "ledger 7  entry 4  due " in lines[4]
    (requests,) = daemon.requests("Subscribe")
    assert not any(request.HasField("acknowledge") for request in requests.taken)
    assert daemon.count("CreateSubscription") == 1


def test_topics_are_lines_in_a_pipe_and_objects_in_json(daemon: FakeDaemon, run: Run) -> None:
    topic = inspect_pb2.TopicSummary(topic="a", shard=1, pending=2000, buckets=3, subscriptions=4)
    daemon.script("ListTopics", answer(inspect_pb2.ListTopicsResponse(topics=[topic])))
    assert run("topics").stdout.splitlines() == [
        "topic\tshard\tpending\tbuckets\tsubscriptions\tnext due",
        "a\t1\t2000\t3\t4\t-",
    ]
    assert json.loads(run("topics", "--json").stdout) == {
        "topic": "a", "shard": 1, "pending": 2000, "buckets": 3, "subscriptions": 4, "next_due_ms": None
    }  # fmt: skip


def test_stats_show_the_topic_and_its_subscriptions(daemon: FakeDaemon, run: Run) -> None:
    message = inspect_pb2.GetTopicStatsResponse(topic="t", pending=5, next_due_ms=1)
    message.subscriptions.add(subscription="sub", backlog=3)
    daemon.script("GetTopicStats", answer(message))
    shown = run("stats", "t").stdout
    assert "pending\t5" in shown
    assert "sub\t3\t0" in shown
    parsed = json.loads(run("stats", "t", "--json").stdout)
    assert (parsed["pending"], parsed["subscriptions"][0]["backlog"]) == (5, 3)


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


def test_a_delete_is_asked_for_first(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("DeleteSubscription", answer(dispatch_pb2.DeleteSubscriptionResponse()))
    assert run("subscription", "delete", "t", "s", stdin="n\n").exit_code == 1
    assert daemon.count("DeleteSubscription") == 0
    assert run("subscription", "delete", "t", "s", stdin="y\n").exit_code == 0
    assert daemon.count("DeleteSubscription") == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        (grpc.StatusCode.NOT_FOUND, 1, "`tarry topics` and `tarry stats TOPIC` list what exists"),
        (grpc.StatusCode.INVALID_ARGUMENT, 2, "topic is wrong."),
        (grpc.StatusCode.UNAVAILABLE, 3, "Start it with `tarryd`, or name another with --address"),
        (grpc.StatusCode.UNKNOWN, 3, "repeating the command is safe"),
        (grpc.StatusCode.FAILED_PRECONDITION, 3, "The owner is another daemon"),
        (grpc.StatusCode.INTERNAL, 1, "The daemon's log has more"),
        (grpc.StatusCode.PERMISSION_DENIED, 1, "PERMISSION_DENIED: topic is wrong"),
    ],
)
def test_each_failure_is_one_line_that_says_what_to_do(
    daemon: FakeDaemon, run: Run, code: grpc.StatusCode, exit_code: int, says: str
) -> None:
    daemon.script("GetTopicStats", refuse(code, "topic is wrong"))
    result = run("stats", "t", "--timeout", "0.2")
    assert result.exit_code == exit_code
    assert says in result.stderr
    assert result.stderr.startswith("tarry: ")
    assert result.stderr.count("\n") == 1


def test_a_daemon_that_is_not_there_is_named(run: Run, daemon: FakeDaemon) -> None:
    daemon.stop()
    result = run("topics", "--timeout", "0.2")
    assert result.exit_code == output.EXIT_UNREACHABLE
    assert f"the daemon at {daemon.address} is unavailable" in result.stderr


def test_something_that_never_answers_is_named(daemon: FakeDaemon, run: Run) -> None:
    release = fake_daemon.Gate()
    daemon.script("ListTopics", lambda request, context: release.wait())
    result = run("topics", "--timeout", "0.1")
    release.open()
    assert result.exit_code == output.EXIT_UNREACHABLE
    assert "does not answer" in result.stderr


@pytest.mark.parametrize(
    "command", [["add"], ["watch"], ["topics"], ["stats"], ["subscription", "create"], ["subscription", "delete"]]
)
def test_every_command_has_examples_json_and_address(run: Run, command: list[str]) -> None:
    shown = run(*command, "--help").stdout
    assert f"  tarry {' '.join(command)}" in shown
    for option in ("--json", "--address", "--timeout", "TARRY_ADDRESS"):
        assert option in shown


def test_the_version_is_the_distribution_s(run: Run) -> None:
    assert run("--version").stdout.startswith("tarry, version ")


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.table("Topics", ("topic", "pending"), [("[red]a", 1234567)])
    output.facts("Facts", {"pending": 1234567})
    shown = capsys.readouterr().out
    assert "[red]a" in shown
    assert shown.count("1,234,567") == 2
    assert "\t" not in shown


def test_times_are_local_with_their_offset() -> None:
    text = output.time_text(1_896_091_200_123)
    assert datetime.datetime.fromisoformat(text).timestamp() == pytest.approx(1_896_091_200.123)
    assert output.time_text(None) == "-"
    assert output.time_text(2**63) == f"{2**63} ms"


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        tarry.cli.main()
    assert ended.value.code == 1
    assert "pip install 'tarry[cli]'" in capsys.readouterr().err
