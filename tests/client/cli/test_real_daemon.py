"""The command as a user runs it: processes of its own, pipes, and a daemon that is another process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import processes
from tests._support.processes import Daemons
from tests.client.cli._support.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    daemons = Daemons(tmp_path)
    try:
        daemon = daemons.make("tarryd", {"daemon.shards": 4, **processes.local_store(tmp_path / "root")})
        daemon.start_serving()
        yield Shell(daemon.address)
    finally:
        daemons.end()


# More than a dozen processes, each of which loads its libraries: longer than the time of a test when cores are busy.
def test_a_topic_lives_from_its_first_row_to_its_deletion(shell: Shell) -> None:
    added = shell.result("add flights --ledger 1 --entries 1-8 --in 1h --json")
    assert json.loads(added.stdout)["accepted"] == 8
    assert "flights has no subscription" in added.stderr
    assert shell.parsed("stats flights")["due"] == 0
    assert shell.parsed("contains flights --ledger 1 --entries 0-9") == {
        "topic": "flights", "pending": [[1, 1, 8]], "due": []
    }  # fmt: skip
    assert shell.parsed("seal flights")["rows"] == 8
    assert shell.parsed("buckets flights")["pending"] == 8

    shell.out("subscription create flights departures --lease 1m")
    late = shell.result("add flights --ledger 2 --entries 0-4 --in 1ms")
    assert late.stderr == "", "somebody listens now"
    taken = shell.out("get flights departures --max 5 --wait 10s --json")
    entries = [json.loads(line)["entry_id"] for line in taken.splitlines()]
    assert set(entries) <= set(range(5))
    acknowledged = shell.parsed("ack flights departures --file -", stdin=taken)
    assert (acknowledged["given"], acknowledged["ignored"]) == (len(entries), 0)

    unanswered = shell.result("trim flights --ledger 1 --entry 3")
    assert unanswered.returncode == 2
    assert "--yes" in unanswered.stderr
    assert shell.parsed("trim flights --ledger 1 --entry 3 --yes")["trimmed"] == 3
    assert shell.parsed("policy flights --set delay_max_ms=1h")["effective"]["delay_max_ms"] == 3_600_000
    refused = shell.result("add flights --ledger 3 --entries 0 --in 2h")
    assert refused.returncode == 2
    assert "7200000" in refused.stderr

    scheduled = shell.out("scheduled flights --until +2h --json")
    assert [json.loads(line)["entry_id"] for line in scheduled.splitlines()] == [4, 5, 6, 7, 8]
    assert shell.parsed("reschedule flights --file - --in 30m", stdin=scheduled)["rescheduled"] == 5
    assert sum(shell.parsed("histogram flights --until +45m --width 15m")["rows"]) == 5
    withdrawn = shell.result("cancel flights --ledger 1 --entries 3-4 --json")
    assert withdrawn.returncode == 4
    answered = json.loads(withdrawn.stdout)
    assert (answered["cancelled"], answered["not_found"]) == (1, [[1, 3, 3]])

    assert shell.parsed("delete flights --yes")["rows"] == 4 + 5 - len(entries)
    missing = shell.result("stats flights")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert shell.out("topics --json") == ""


def test_what_cannot_be_dealt_with_comes_back_is_given_up_and_delivered_again(shell: Shell) -> None:
    """What the tour shows."""
    assert shell.parsed("levels arrivals --set 1s\t5s\t1m")["delay_ms"] == [1_000, 5_000, 60_000]
    shell.out("subscription create arrivals belts --redelivery list\t100ms --max-redeliver-count 1")
    shell.out("add arrivals --ledger 3 --entries 0 --level 1")
    shell.out("add arrivals --ledger 3 --entries 2-9 --level 3")
    assert shell.parsed("levels arrivals")["pending"][2] == 8

    nacked = shell.parsed("nack arrivals belts --file -", stdin=shell.out("get arrivals belts --wait 10s --json"))
    assert (nacked["given"], nacked["ignored"], nacked["dead_lettered"]) == (1, 0, 0)
    assert shell.parsed("nack arrivals belts --ledger 9 --entries 4 --batch-index 2 --delay 1h")["given"] == 1
    again = shell.out("get arrivals belts --wait 10s --json")
    assert json.loads(again)["redelivery_count"] == 1
    (waiting, in_flight) = (json.loads(line) for line in shell.out("backlog arrivals belts --json").splitlines())
    assert (waiting["state"], waiting["batch_index"], waiting["deliver_at_ms"]) == ("nacked", 2, 0)
    assert (in_flight["state"], in_flight["redelivery_count"]) == ("in_flight", 1)

    assert shell.parsed("nack arrivals belts --file -", stdin=again)["dead_lettered"] == 1
    assert shell.parsed("nack arrivals belts --ledger 9 --entries 7 --reject --reason unreadable")["dead_lettered"] == 1
    listed = [json.loads(line) for line in shell.out("dead-letters list arrivals belts --json").splitlines()]
    assert [(each["reason"], each["text"]) for each in listed] == [("too_often", ""), ("rejected", "unreadable")]
    replayed = shell.parsed("dead-letters replay arrivals belts --reason too-often")
    assert (replayed["replayed"], replayed["skipped"]) == (1, 0)
    assert json.loads(shell.out("receive arrivals belts --count 1 --json"))["redelivery_count"] == 0
    unanswered = shell.result("dead-letters purge arrivals belts")
    assert unanswered.returncode == 2
    assert "Forget 1 dead letter of arrivals for subscription belts?" in unanswered.stderr
    assert shell.parsed("dead-letters purge arrivals belts --yes")["purged"] == 1
    assert shell.parsed("subscription delete arrivals belts --yes")["dead_letters"] == 0


def test_the_messages_of_a_key_are_in_order_also_across_one_that_is_handed_back(shell: Shell) -> None:
    """What the tour shows."""
    shell.out("subscription create boarding gates --nack-order block-key --nack-precision-bits 0")
    shell.out("add boarding --ledger 7 --entries 0-2 --in 1ms --key N14228")
    shell.out("add boarding --ledger 7 --entries 3-4 --in 1ms --key N24211")
    with shell.lines("receive boarding gates --consumer gate-1 --consumer gate-2 --no-ack --json") as received:
        first = [next(received) for _ in range(5)]
        by_entry = {each["entry_id"]: each for each in first}
        assert [each["entry_id"] for each in first if each["entry_id"] < 3] == [0, 1, 2]
        assert len({each["consumer"] for each in first if each["entry_id"] < 3}) == 1
        at_ms = by_entry[0]["deliver_at_ms"]
        nack = f"nack boarding gates --ledger 7 --entries 0 --at {at_ms} --delay"
        assert shell.parsed(f"{nack} 1h")["ignored"] == 0
        shown = shell.parsed("consumers boarding gates")
        assert (shown["key_shared"]["nack_blocked_hashes"], shown["key_shared"]["waiting"]) == (1, 2)
        assert [(each["name"], each["consumer_id"]) for each in shown["consumers"]] == [("gate-1", 1), ("gate-2", 2)]
        assert shell.parsed(f"{nack} 1ms")["ignored"] == 0
        again = [next(received) for _ in range(3)]
        assert [(each["entry_id"], each["redelivery_count"]) for each in again] == [(0, 1), (1, 0), (2, 0)]
