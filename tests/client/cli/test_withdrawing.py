"""What `cancel` and `reschedule` send and print, and where their positions come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

import tarry
from tarry.cli import output
from tarry.v1 import delayed_delivery_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run

SCHEDULED = (
    '{"ledger_id": 1, "entry_id": 2, "deliver_at_ms": 1900000000010, "key_hash": 5, "subscription": null}\n'
    "\n"
    '{"ledger_id": 3, "entry_id": 4, "deliver_at_ms": 1900000000011, "key_hash": null, "subscription": "s"}\n'
)


def cancelled(count: int, **left: list[int]) -> delayed_delivery_pb2.CancelMessagesResponse:
    return delayed_delivery_pb2.CancelMessagesResponse(cancelled=count, **left)


def rescheduled(count: int, **left: Any) -> delayed_delivery_pb2.RescheduleMessagesResponse:
    return delayed_delivery_pb2.RescheduleMessagesResponse(rescheduled=count, **left)


def test_when_all_are_cancelled_the_status_is_0(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CancelMessages", answer(cancelled(2000)))
    result = run("cancel", "t", "--ledger", "7", "--entries", "0-1999", "--subscription", "s")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "cancelled 2,000 rows of t\n", "")
    (asked,) = daemon.requests("CancelMessages")
    assert (asked.topic, asked.subscription, set(asked.ledger_id)) == ("t", "s", {7})
    assert list(asked.entry_id) == list(range(2000))


def test_what_is_not_cancelled_is_listed_by_reason_and_has_a_status_of_its_own(daemon: FakeDaemon, run: Run) -> None:
    left = cancelled(3, not_found_index=[0, 1, 2, 6], already_due_index=[4], in_flight_index=[8, 9])
    daemon.script("CancelMessages", answer(left))
    result = run("cancel", "t", "--ledger", "7", "--entries", "10-19")
    assert result.exit_code == output.EXIT_NOT_ALL == 4
    assert result.stdout.splitlines() == [
        "cancelled 3 rows of t; unchanged: 4 not found, 1 already due, 2 in flight",
        "ledger\tfirst entry\tlast entry\trows\twhy",
        "7\t10\t12\t3\tnot found",
        "7\t14\t14\t1\talready due",
        "7\t16\t16\t1\tnot found",
        "7\t18\t19\t2\tin flight",
    ]
    parsed = run("cancel", "t", "--ledger", "7", "--entries", "10-19", "--json")
    assert parsed.exit_code == output.EXIT_NOT_ALL
    assert json.loads(parsed.stdout) == {
        "topic": "t", "subscription": None, "cancelled": 3, "not_found": [[7, 10, 12], [7, 16, 16]],
        "already_due": [[7, 14, 14]], "in_flight": [[7, 18, 19]], "answers_lost": False,
    }  # fmt: skip


def test_what_a_lost_answer_may_have_done_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CancelMessages", refuse(grpc.StatusCode.UNAVAILABLE), answer(cancelled(0, not_found_index=[0])))
    result = run("cancel", "t", "--ledger", "7", "--entries", "1")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert "some that are not found may have been cancelled by it" in result.stderr


def test_what_is_scheduled_can_be_cancelled_as_it_was_printed(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CancelMessages", answer(cancelled(2)))
    result = run("cancel", "t", "--file", "-", stdin=SCHEDULED)
    assert result.stdout == "cancelled 2 rows of t\n"
    (asked,) = daemon.requests("CancelMessages")
    assert (list(asked.ledger_id), list(asked.entry_id)) == ([1, 3], [2, 4])


@pytest.mark.parametrize("command", [["cancel", "t"], ["reschedule", "t", "--in", "1s"]])
def test_when_nothing_is_scheduled_there_is_nothing_to_do(daemon: FakeDaemon, run: Run, command: list[str]) -> None:
    result = run(*command, "--file", "-", stdin="")
    assert result.exit_code == 0
    assert "led 0 rows of t" in result.stdout
    assert daemon.calls == []


@pytest.mark.parametrize("text", ["ledger,entry\n1,2\n3,4\n", "key,entry,ledger,deliver_at_ms\na,2,1,9\n,4,3,9\n"])
def test_csv_needs_no_more_than_positions(daemon: FakeDaemon, run: Run, tmp_path: Path, text: str) -> None:
    daemon.script("CancelMessages", answer(cancelled(2)))
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8-sig")
    assert run("cancel", "t", "--file", str(path)).exit_code == 0
    (asked,) = daemon.requests("CancelMessages")
    assert (list(asked.ledger_id), list(asked.entry_id)) == ([1, 3], [2, 4])


def test_many_positions_are_requests_of_the_daemon_s_size(daemon: FakeDaemon, run: Run) -> None:
    first, second = cancelled(100_000), cancelled(4, already_due_index=[1])
    daemon.script("CancelMessages", answer(first), answer(second))
    result = run("cancel", "t", "--ledger", "7", "--entries", "0-100004")
    assert result.stdout.splitlines()[0] == "cancelled 100,004 rows of t; unchanged: 1 already due"
    assert result.stdout.splitlines()[2] == "7\t100001\t100001\t1\talready due"
    assert [len(request.entry_id) for request in daemon.requests("CancelMessages")] == [100_000, 5]


def test_a_failure_says_what_was_done_before_it(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CancelMessages", answer(cancelled(99_999, in_flight_index=[0])), refuse(grpc.StatusCode.DATA_LOSS))
    result = run("cancel", "t", "--ledger", "7", "--entries", "0-100004")
    assert result.exit_code == output.EXIT_REFUSED
    assert "before the failure 100,000 rows were answered, 99,999 of them done" in result.stderr


def test_one_time_and_key_are_for_all(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("RescheduleMessages", answer(rescheduled(3)))
    result = run("reschedule", "t", "--ledger", "7", "--entries", "1-3", "--in", "1h30m", "--key", "foo")
    assert (result.exit_code, result.stdout) == (0, "rescheduled 3 rows of t\n")
    run("reschedule", "t", "--ledger", "7", "--entries", "1-3", "--at", "2030-01-31T12:00:00Z", "--subscription", "s")
    by_delay, by_time = daemon.requests("RescheduleMessages")
    assert (list(by_delay.delay_ms), list(by_delay.deliver_at_ms)) == ([5_400_000], [])
    assert list(by_delay.key_hash) == tarry.key_hash("foo").tolist()
    assert (list(by_time.delay_ms), list(by_time.deliver_at_ms)) == ([], [1896091200000])
    assert (list(by_time.key_hash), by_time.subscription) == ([], "s")


def test_a_file_has_a_time_for_each_unless_one_is_given_for_all(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("RescheduleMessages", answer(rescheduled(2)))
    assert run("reschedule", "t", "--file", "-", stdin=SCHEDULED).exit_code == 0
    assert run("reschedule", "t", "--file", "-", "--in", "5ms", stdin=SCHEDULED).exit_code == 0
    own, same = daemon.requests("RescheduleMessages")
    assert (list(own.deliver_at_ms), list(own.delay_ms)) == ([1_900_000_000_010, 1_900_000_000_011], [])
    assert (list(same.deliver_at_ms), list(same.delay_ms)) == ([], [5])
    # The keys of the rows as they were.
    assert list(own.key_hash) == list(same.key_hash) == [5, 0]


def test_what_is_not_rescheduled_is_listed_and_what_was_raised_is_said(daemon: FakeDaemon, run: Run) -> None:
    left = rescheduled(1, in_flight_index=[1], raised_index=[0], raised_deliver_at_ms=[9])
    daemon.script("RescheduleMessages", answer(left))
    result = run("reschedule", "t", "--ledger", "7", "--entries", "1-2", "--at", "now")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert "rescheduled 1 row of t; unchanged: 1 in flight" in result.stdout
    assert "1 row got a later time than asked" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["cancel", "t"], "", "give --ledger and --entries, or --file"),
        (["cancel", "t", "--ledger", "1"], "", "give --ledger and --entries, or --file"),
        (["cancel", "t", "--file", "-", "--ledger", "1"], "", "--file has the positions"),
        (
            ["cancel", "t", "--file", "-"],
            "\n",
            "the first line lacks ledger, entry; it must be ledger,entry[,deliver_at",
        ),
        (["cancel", "t", "--file", "-"], "ledger,entry\n1,x\n", "line 2: entry is 'x'"),
        (["cancel", "t", "--file", "-"], '{"ledger_id": 1}\n', "line 1: entry_id is None"),
        (["cancel", "t", "--file", "-"], '{"ledger_id": 1, "entry_id": 2}\n{\n', "line 2: not JSON"),
        (["reschedule", "t", "--ledger", "1", "--entries", "2"], "", "give --in or --at"),
        (
            ["reschedule", "t", "--ledger", "1", "--entries", "2", "--in", "1s", "--at", "now"],
            "",
            "one of --in and --at",
        ),
        (["reschedule", "t", "--file", "-", "--key", "k"], "", "--file has the positions"),
        (["reschedule", "t", "--file", "-"], "ledger,entry\n1,2\n", "- has no deliver_at_ms: add it, or give --in"),
        (["reschedule", "t", "--file", "-"], SCHEDULED + '{"ledger_id": 1, "entry_id": 9}', "line 4: deliver_at_ms is"),
        (["reschedule", "t", "--file", "-"], SCHEDULED.replace("5,", "4294967296,", 1), "a key_hash is above"),
    ],
)
def test_wrong_input_is_told_and_nothing_is_sent(
    daemon: FakeDaemon, run: Run, arguments: list[str], stdin: str, says: str
) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == output.EXIT_INPUT, result.output
    assert says in result.stderr
    assert daemon.calls == []
