"""What `consumers` shows."""

from __future__ import annotations

import json
import sys

import grpc
import pytest

from tarry.cli import commands, consumers, output
from tarry.v1 import inspect_pb2, policy_pb2
from tests._support.patience import within_some_time
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run

Position = inspect_pb2.Position
POLICY = policy_pb2.KeySharedPolicy(
    selector=policy_pb2.HASH_SELECTOR_CONSISTENT_HASHING,
    points_per_consumer=100,
    order=policy_pb2.KEY_ORDER_DRAINING_HASHES,
    nack_order=policy_pb2.NACK_ORDER_SKIP,
)
PIP_282 = inspect_pb2.KeySharedStats(
    policy=policy_pb2.KeySharedPolicy(
        selector=policy_pb2.HASH_SELECTOR_STICKY,
        order=policy_pb2.KEY_ORDER_LAST_SENT_POSITION,
        nack_order=policy_pb2.NACK_ORDER_BLOCK_KEY,
        nack_block_max_ms=600_000,
    ),
    consumers=2,
    waiting=3,
    nack_blocked_hashes=1,
    last_sent_position=Position(ledger_id=3, entry_id=2),
    individually_sent_positions=[
        inspect_pb2.PositionRange(
            after=Position(ledger_id=3, entry_id=4), up_to=Position(ledger_id=3, entry_id=5)
        ),
        inspect_pb2.PositionRange(
            after=Position(ledger_id=3, entry_id=7), up_to=Position(ledger_id=3, entry_id=10)
        ),
    ],
    consumers_after_mark_delete_position=[
        inspect_pb2.ConsumerAfterMarkDelete(
            name="b", instance_id=9, last_sent_position_when_joining=Position(ledger_id=3, entry_id=2)
        )
    ],
)  # fmt: skip


def consumer(name: str, instance_id: int, *ranges: tuple[int, int]) -> inspect_pb2.ConsumerStats:
    return inspect_pb2.ConsumerStats(
        name=name, instance_id=instance_id, consumer_id=2, stream=3, permits=1000, unacked=5,
        slots=sum(last - first + 1 for first, last in ranges),
        hash_ranges=[policy_pb2.HashRange(first=first, last=last) for first, last in ranges],
    )  # fmt: skip


def draining() -> inspect_pb2.ConsumerStats:
    found = consumer("a", 7, (0, 9), (20, 29))
    found.address = "10.0.0.7:4711"
    found.draining_hashes_count, found.draining_hashes_unacked = 3, 1200
    found.draining_hashes.add(hash=5, unacked=1, blocked_attempts=0)
    found.draining_hashes.add(hash=4711, unacked=1100, blocked_attempts=12)
    return found


def test_consumers_of_all_pages_are_listed_below_what_keys_wait_for(daemon: FakeDaemon, run: Run) -> None:
    stats = inspect_pb2.KeySharedStats(
        policy=POLICY, consumers=2, waiting=30, draining_hashes=2, draining_hashes_cleared=5, draining_hashes_unacked=12
    )
    first = inspect_pb2.ListConsumersResponse(consumers=[draining()], key_shared=stats, next_page_token="a")
    last = inspect_pb2.ListConsumersResponse(consumers=[consumer("b", 9, (10, 19))], key_shared=stats, as_of_ms=8)
    daemon.script("ListConsumers", answer(first), answer(last))
    result = run("consumers", "t", "s")
    assert result.stdout.splitlines() == [
        "policy\tconsistent-hashing 100 points, draining-hashes, skip",
        "consumers\t2",
        "waiting\t30",
        "draining hashes\t2",
        "unacked of draining hashes\t12",
        "draining hashes cleared\t5",
        "nack-blocked hashes\t0",
        "slots without consumer\t0",
        f"as of\t{output.time_text(8)}",
        "",
        "\t".join(consumers._COLUMNS),
        (
            "a\t7\t10.0.0.7:4711\t2\t3\t1000\t5\t20\t0-9, 20-29\t-\t3\t1200\t"
            "4711 (1,100 unacked, 12 kept back), 5 (1 unacked, 0 kept back), ..."
        ),
        "b\t9\t-\t2\t3\t1000\t5\t10\t10-19\t-\t0\t0\t-",
    ]
    assert result.stderr == ""
    assert [request.page_token for request in daemon.requests("ListConsumers")] == ["", "a"]
    assert daemon.requests("ListConsumers")[0] == inspect_pb2.ListConsumersRequest(topic="t", subscription="s")


def test_last_sent_positions_are_shown_as_ranges(daemon: FakeDaemon, run: Run) -> None:
    joined = consumer("b", 9, (0, 65_535))
    joined.last_sent_position_when_joining.CopyFrom(Position(ledger_id=3, entry_id=2))
    listed = inspect_pb2.ListConsumersResponse(consumers=[joined], key_shared=PIP_282)
    daemon.script("ListConsumers", answer(listed))
    lines = run("consumers", "t", "s").stdout.splitlines()
    assert {
        "policy\tsticky, last-sent-position, block-key 10m",
        "nack-blocked hashes\t1",
        "last sent position\t3:2",
        "individually sent\t(3:4, 3:5], (3:7, 3:10]",
        "consumers after the mark-delete position\tb (9) at 3:2",
    } <= set(lines)
    assert dict(zip(lines[-2].split("\t"), lines[-1].split("\t"), strict=True))["joined behind"] == "3:2"


def test_everything_is_one_object_in_json(daemon: FakeDaemon, run: Run) -> None:
    listed = inspect_pb2.ListConsumersResponse(consumers=[draining()], key_shared=PIP_282, as_of_ms=8)
    daemon.script("ListConsumers", answer(listed))
    parsed = json.loads(run("consumers", "t", "s", "--json").stdout)
    assert (parsed["topic"], parsed["subscription"], parsed["as_of_ms"]) == ("t", "s", 8)
    key_shared = parsed["key_shared"]
    assert (key_shared["policy"]["order"], key_shared["policy"]["points_per_consumer"]) == ("last_sent_position", None)
    assert key_shared["last_sent_position"] == {"ledger_id": 3, "entry_id": 2}
    assert key_shared["individually_sent_positions"][0] == {
        "after": {"ledger_id": 3, "entry_id": 4}, "up_to": {"ledger_id": 3, "entry_id": 5}
    }  # fmt: skip
    assert key_shared["consumers_after_mark_delete_position"][0]["instance_id"] == 9
    (one,) = parsed["consumers"]
    assert one["draining_hashes"][1] == {"hash": 4711, "unacked": 1100, "blocked_attempts": 12}
    assert (one["hash_ranges"][0], one["last_sent_position_when_joining"]) == ({"first": 0, "last": 9}, None)


def test_a_consumer_without_slots_is_said_and_what_cures_it(daemon: FakeDaemon, run: Run) -> None:
    listed = [consumer("a", 1, (0, 65_535)), *(consumer(f"b{number}", number) for number in range(2, 14))]
    stats = inspect_pb2.KeySharedStats(policy=POLICY, consumers=13)
    daemon.script("ListConsumers", answer(inspect_pb2.ListConsumersResponse(consumers=listed, key_shared=stats)))
    notes = run("consumers", "t", "s").stderr.splitlines()
    assert notes[0].startswith(
        "tarry: b2 (instance 2) has no hash slot and receives nothing: `tarry subscription update"
    )
    assert len(notes) == 11
    assert notes[-1].startswith("tarry: 2 more consumers have no hash slot")


def test_slots_that_nobody_has_are_said(daemon: FakeDaemon, run: Run) -> None:
    stats = inspect_pb2.KeySharedStats(
        policy=policy_pb2.KeySharedPolicy(selector=policy_pb2.HASH_SELECTOR_STICKY), slots_without_consumer=65_526
    )
    listed = inspect_pb2.ListConsumersResponse(consumers=[consumer("a", 1, (0, 9))], key_shared=stats)
    daemon.script("ListConsumers", answer(listed))
    assert "65,526 hash slots of 65,536 without a consumer: positions" in run("consumers", "t", "s").stderr


def test_that_there_is_no_consumer_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListConsumers", answer(inspect_pb2.ListConsumersResponse(as_of_ms=8)))
    assert "t for subscription s has no consumer" in run("consumers", "t", "s").stderr
    parsed = json.loads(run("consumers", "t", "s", "--json").stdout)
    assert (parsed["key_shared"], parsed["consumers"]) == (None, [])


def test_a_terminal_leaves_out_what_says_nothing(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranges = [(first, first + 9) for first in range(0, 100, 20)]
    stats = inspect_pb2.KeySharedStats(policy=POLICY, consumers=1)
    listed = inspect_pb2.ListConsumersResponse(consumers=[consumer("[red]c", 1, *ranges)], key_shared=stats)
    daemon.script("ListConsumers", answer(listed))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "100")
    commands.tarry(["consumers", "t", "s", "--address", daemon.address], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Keys of t for subscription s" in shown
    assert "0-9, 20-29, 40-49 and 2 more" in shown
    assert "[red]c" in shown
    assert "joined behind" not in shown


def test_a_subscription_that_is_not_there_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListConsumers", refuse(grpc.StatusCode.NOT_FOUND, "topic t has no subscription 's'"))
    result = run("consumers", "t", "s")
    assert result.exit_code == output.EXIT_REFUSED
    assert "has no subscription" in result.stderr


def test_a_conflict_is_said_with_what_to_do(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetScheduledMessages", refuse(grpc.StatusCode.ABORTED, "s is open as KEY_SHARED"))

    def story(seconds: float) -> None:
        result = run("get", "t", "s", "--timeout", str(seconds))
        assert result.exit_code == output.EXIT_REFUSED
        assert result.stderr == "tarry: s is open as KEY_SHARED. Nothing was done; try again when that is over.\n"

    within_some_time(story)
