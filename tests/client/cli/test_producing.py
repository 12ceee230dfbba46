"""What `add`, `contains`, `trim` and `clear` send and print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from tarry.cli import output
from tarry.v1 import delayed_delivery_pb2, inspect_pb2
from tests.client._support.fake_daemon import FakeDaemon, Requests, accept_all, answer, refuse, refused, status
from tests.client.cli.conftest import Run


def adds_of(daemon: FakeDaemon) -> list[Any]:
    return [request.add for requests in daemon.requests("StreamAddMessages") for request in requests.taken]


def test_entries_are_added_from_options(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    result = run("add", "t", "--ledger", "3", "--entries", "5-9", "--in", "1m30s", "--batch-rows", "3", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary.pop("seconds") >= 0
    assert summary == {
        "topic": "t", "rows": 5, "accepted": 5, "duplicates": 0, "late_on_arrival": 0, "returned": 0, "raised": 0,
        "refused": 0, "refused_rows": [],
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


def test_rows_can_be_for_one_subscription_alone(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    assert run("add", "t", "--ledger", "3", "--entries", "7", "--in", "1s", "--subscription", "s").exit_code == 0
    assert [add.subscription for add in adds_of(daemon)] == ["s"]


def test_a_file_s_rows_are_added(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    daemon.script("StreamAddMessages", accept_all)
    path = tmp_path / "rows.csv"
    path.write_text(f"ledger,entry,deliver_at_ms,key\n1,2,{DUE_MS},foo\n\n4,5,0,\n", encoding="utf-8-sig")
    result = run("add", "t", "--file", str(path), "--already-due", "return", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["accepted"] == 2
    (add,) = adds_of(daemon)
    assert (list(add.ledger_id), list(add.entry_id), list(add.deliver_at_ms)) == ([1, 4], [2, 5], [DUE_MS, 0])
    assert list(add.key_hash) == [4138058784, 0]
    assert add.already_due == delayed_delivery_pb2.ALREADY_DUE_RETURN


def test_standard_input_in_any_order_of_columns_is_added(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    stdin = f"deliver_at_ms,ledger,entry\n{DUE_MS},1,2\n{DUE_MS + 1},4,5\n"
    result = run("add", "t", "--file", "-", "--batch-rows", "1", stdin=stdin)
    assert result.exit_code == 0, result.output
    assert [(add.ledger_id[0], add.entry_id[0], add.deliver_at_ms[0]) for add in adds_of(daemon)] == [
        (1, 2, DUE_MS),
        (4, 5, DUE_MS + 1),
    ]


def returning(daemon: FakeDaemon, *refused_of_each: tuple[list[int], list[int]]) -> None:
    """A daemon that refuses these rows of each request, for these reasons."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request, (index, reason) in zip(requests, refused_of_each, strict=False):
            added = delayed_delivery_pb2.AddMessagesResponse(
                accepted=len(request.add.entry_id) - len(index),
                refused_index=index,
                refused_reason=reason,  # type: ignore[arg-type]
            )
            yield delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, added=added)

    daemon.script("StreamAddMessages", step)


DUE_MS = 1_900_000_000_000
ROWS = f"ledger,entry,deliver_at_ms\n1,2,{DUE_MS}\n\n1,3,1896091200\n1,4,0\n2,5,18446744073709551615\n"
PLAIN = ROWS.replace("1896091200", "0")


def test_rows_that_are_refused_are_printed_by_line_with_the_reason(daemon: FakeDaemon, run: Run) -> None:
    returning(daemon, ([], []), ([1], [1]))
    result = run("add", "t", "--file", "-", "--batch-rows", "2", "--on-invalid", "return", stdin=ROWS)
    assert result.exit_code == output.EXIT_NOT_ALL
    assert "accepted\t2" in result.stdout
    assert "refused\t2" in result.stdout
    assert result.stderr.splitlines() == [
        "tarry: refused: line 4, ledger 1 entry 3: its time is in seconds; give Unix time in ms",
        "tarry: refused: line 6, ledger 2 entry 5: it is further ahead than the largest delay",
    ]
    assert [add.on_invalid for add in adds_of(daemon)] == [delayed_delivery_pb2.ON_INVALID_RETURN] * 2


def test_a_number_that_is_no_time_is_left_out_where_the_daemon_would_deliver_at_once(
    daemon: FakeDaemon, run: Run
) -> None:
    returning(daemon, ([1], [1]))
    stdin = f"ledger,entry,deliver_at_ms,key\n1,1,20270131,a\n1,2,{DUE_MS},b\n1,3,{2**63},c\n1,4,1896091200,d\n"
    result = run("add", "t", "--file", "-", "--on-invalid", "return", "--json", stdin=stdin)
    assert result.exit_code == output.EXIT_NOT_ALL
    parsed = json.loads(result.stdout)
    assert (parsed["rows"], parsed["accepted"], parsed["refused"]) == (4, 1, 3)
    assert [(row["line"], row["entry_id"], row["reason"]) for row in parsed["refused_rows"]] == [
        (2, 1, "NO_TIME_IN_MS"), (4, 3, "DELAY_TOO_LONG"), (5, 4, "TIME_IN_SECONDS")
    ]  # fmt: skip
    (add,) = adds_of(daemon)
    assert (list(add.entry_id), list(add.deliver_at_ms)) == ([2, 3], [DUE_MS, 2**63])
    assert len(set(add.key_hash)) == 2


def test_a_file_of_nothing_but_bad_times_is_answered_without_a_request(daemon: FakeDaemon, run: Run) -> None:
    stdin = "ledger,entry,deliver_at_ms\n1,1,20270131\n"
    result = run("add", "t", "--file", "-", "--on-invalid", "return", stdin=stdin)
    assert result.exit_code == output.EXIT_NOT_ALL
    assert "refused: line 2, ledger 1 entry 1: its time is no Unix time in ms" in result.stderr
    assert daemon.count("StreamAddMessages") == 0


@pytest.mark.parametrize(
    ("at_ms", "says"),
    [
        ("1896091200", "1896091200, which can only be meant in seconds; it must be in ms: 1896091200000"),
        ("20270131", "20270131, which is a date, no time in ms; 2027-01-31T00:00:00Z is 1801353600000"),
        ("5", "5, which is no time in ms; 0 means at once"),
    ],
)
def test_a_number_that_is_no_time_is_refused_by_option_and_by_line(
    daemon: FakeDaemon, run: Run, tmp_path: Path, at_ms: str, says: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"ledger,entry,deliver_at_ms\n1,1,0\n\n1,2,{at_ms}\n")
    for command in ("add", "reschedule"):
        of_option = run(command, "t", "--ledger", "1", "--entries", "1", "--at", at_ms)
        assert of_option.exit_code == output.EXIT_INPUT
        assert f"Invalid value for '--at': '{at_ms}' {says.partition('which ')[2]}" in of_option.stderr
        of_line = run(command, "t", "--file", str(path))
        assert of_line.exit_code == output.EXIT_INPUT
        assert f"{path}, line 4: deliver_at_ms is {says}" in of_line.stderr
    assert daemon.count("StreamAddMessages") == daemon.count("RescheduleMessages") == 0
    # The time of a file that is not used is no one's business.
    daemon.script("CancelMessages", answer(delayed_delivery_pb2.CancelMessagesResponse(cancelled=2)))
    assert run("cancel", "t", "--file", str(path)).exit_code == 0


def test_what_the_daemon_refuses_is_named_by_option_and_by_line(daemon: FakeDaemon, run: Run) -> None:
    def too_long(field: str) -> Any:
        text = f"{field}[1] is 9; the largest delay is 8 ms"

        def refuse_all(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
            for request in requests:
                yield refused(request, status(code_pb2.OUT_OF_RANGE, text))

        return refuse_all

    daemon.script("StreamAddMessages", too_long("deliver_at_ms"))
    stdin = f"ledger,entry,deliver_at_ms\n1,1,0\n\n1,2,{DUE_MS}\n"
    result = run("add", "t", "--file", "-", stdin=stdin)
    assert (result.exit_code, result.stderr) == (
        2,
        "tarry: -, line 4: deliver_at_ms is 9; the largest delay is 8 ms.\n",
    )
    result = run("add", "t", "--ledger", "1", "--entries", "1-2", "--at", str(DUE_MS))
    assert (result.exit_code, result.stderr) == (2, "tarry: --at is 9; the largest delay is 8 ms.\n")
    daemon.script("StreamAddMessages", too_long("delay_ms"))
    result = run("add", "t", "--ledger", "1", "--entries", "1-2", "--in", "9ms")
    assert (result.exit_code, result.stderr) == (2, "tarry: --in is 9; the largest delay is 8 ms.\n")


def test_refused_rows_are_in_the_order_of_the_file_whatever_is_answered_first(daemon: FakeDaemon, run: Run) -> None:
    def backwards(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in reversed([requests.take() for _ in range(2)]):
            added = delayed_delivery_pb2.AddMessagesResponse(
                refused_index=[0, 1],
                refused_reason=[delayed_delivery_pb2.REFUSED_REASON_DELAY_TOO_LONG],
            )
            yield delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, added=added)

    returning(daemon)
    daemon.script("StreamAddMessages", backwards)
    result = run("add", "t", "--file", "-", "--batch-rows", "2", "--on-invalid", "return", "--json", stdin=PLAIN)
    assert [row["line"] for row in json.loads(result.stdout)["refused_rows"]] == [2, 4, 5, 6]


def test_refused_rows_are_listed_as_json(daemon: FakeDaemon, run: Run) -> None:
    returning(daemon, ([0, 2], [3]))
    arguments = ("--ledger", "9", "--entries", "5-7", "--level", "99", "--on-invalid", "return")
    result = run("add", "t", *arguments, "--json")
    assert result.exit_code == output.EXIT_NOT_ALL
    parsed = json.loads(result.stdout)
    assert (parsed["accepted"], parsed["refused"]) == (1, 2)
    assert parsed["refused_rows"] == [
        {"ledger_id": 9, "entry_id": 5, "reason": "DELAY_LEVEL"},
        {"ledger_id": 9, "entry_id": 7, "reason": "DELAY_LEVEL"},
    ]
    assert not result.stderr


def test_of_many_refused_rows_a_screen_of_lines_is_printed(daemon: FakeDaemon, run: Run) -> None:
    returning(daemon, ([*range(25)], [1]))
    result = run("add", "t", "--ledger", "9", "--entries", "0-24", "--in", "9999d", "--on-invalid", "return")
    lines = result.stderr.splitlines()
    assert len(lines) == output.NOTES_MAX + 1
    assert lines[-1] == "tarry: ... and 5 more; --json prints them all"


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
        (["--ledger", "1", "--entries", "1"], "give exactly one of --in, --at and --level"),
        (
            ["--ledger", "1", "--entries", "1", "--in", "1s", "--at", "now"],
            "give exactly one of --in, --at and --level",
        ),
        (["--file", "-", "--ledger", "1"], "--file has the rows"),
        (["--ledger", "1", "--entries", "9-5", "--in", "1s"], "'9-5' must go from lower to higher entries"),
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


def test_a_refusal_stops_adding_and_is_one_line(daemon: FakeDaemon, run: Run) -> None:
    def refuse_all(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield refused(request, status(code_pb2.OUT_OF_RANGE, "delay_ms is 9; the limit is 8"))

    daemon.script("StreamAddMessages", refuse_all)
    result = run("add", "t", "--ledger", "1", "--entries", "0-999999", "--in", "9ms", "--batch-rows", "10")
    assert result.exit_code == output.EXIT_INPUT
    assert result.stderr == "tarry: delay_ms is 9; the limit is 8.\n"
    assert len(adds_of(daemon)) < 100_000


def contained() -> delayed_delivery_pb2.ContainsMessagesResponse:
    """Entry 3 and entries 6 to 7 of ledger 1 are pending, entries 4 to 5 due."""
    ranges = delayed_delivery_pb2.EntryRanges
    return delayed_delivery_pb2.ContainsMessagesResponse(
        pending=ranges(ledger_id=[1, 1], first_entry_id=[3, 6], last_entry_id=[3, 7]),
        due=ranges(ledger_id=[1], first_entry_id=[4], last_entry_id=[5]),
    )


def test_what_is_contained_is_listed_by_entry(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ContainsMessages", answer(contained()))
    result = run("contains", "t", "--ledger", "1", "--entries", "0-9", "--subscription", "s")
    assert result.stdout.splitlines() == [
        "ledger\tfirst entry\tlast entry\trows\tstate",
        "1\t3\t3\t1\tpending",
        "1\t4\t5\t2\tdue",
        "1\t6\t7\t2\tpending",
    ]
    (asked,) = daemon.requests("ContainsMessages")
    assert (asked.topic, asked.subscription) == ("t", "s")
    assert (list(asked.ledger_id), list(asked.entry_id), list(asked.last_entry_id)) == ([1], [0], [9])


def test_what_is_contained_is_ranges_in_json(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ContainsMessages", answer(contained()))
    result = run("contains", "t", "--ledger", "1", "--entries", "0-9", "--json")
    assert json.loads(result.stdout) == {"topic": "t", "pending": [[1, 3, 3], [1, 6, 7]], "due": [[1, 4, 5]]}


def test_that_nothing_is_contained_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ContainsMessages", answer(delayed_delivery_pb2.ContainsMessagesResponse()))
    result = run("contains", "t", "--ledger", "1", "--entries", f"0-{2**64 - 1}")
    assert result.exit_code == 0, result.output
    assert "t holds none of these entries" in result.stderr


def test_a_trim_tells_how_many_rows_it_dropped(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("TrimMessages", answer(delayed_delivery_pb2.TrimMessagesResponse(trimmed=2000)))
    arguments = ("trim", "t", "--ledger", "7", "--entry", "19", "--yes")
    assert run(*arguments).stdout == "dropped 2,000 rows of t\n"
    lower = run(*arguments, "--all-lower-ledgers", "--subscription", "s", "--json")
    assert json.loads(lower.stdout) == {"topic": "t", "subscription": "s", "trimmed": 2000, "dead_lettered": 0}
    whole, of_one = daemon.requests("TrimMessages")
    assert (whole.subscription, whole.all_lower_ledgers) == ("", False)
    assert (list(of_one.ledger_id), list(of_one.entry_id)) == ([7], [19])
    assert (of_one.subscription, of_one.all_lower_ledgers) == ("s", True)


def test_a_trim_to_dead_letters_goes_on_while_there_are_more(daemon: FakeDaemon, run: Run) -> None:
    some = delayed_delivery_pb2.TrimMessagesResponse(trimmed=100_000, dead_lettered=100_000, more=True)
    rest = delayed_delivery_pb2.TrimMessagesResponse(trimmed=5, dead_lettered=5)
    daemon.script("TrimMessages", answer(some), answer(rest))
    arguments = ("trim", "t", "--ledger", "7", "--entry", "19", "--yes", "--dead-letter")
    assert run(*arguments, "--subscription", "s").stdout == "100,005 rows of t for subscription s became dead letters\n"
    assert [request.dead_letter for request in daemon.requests("TrimMessages")] == [True, True]
    assert "--dead-letter needs --subscription" in run(*arguments).stderr


def test_a_trim_says_when_an_answer_was_lost(daemon: FakeDaemon, run: Run) -> None:
    lost = refuse(grpc.StatusCode.UNAVAILABLE, "it stops")
    daemon.script("TrimMessages", lost, answer(delayed_delivery_pb2.TrimMessagesResponse(trimmed=3)))
    result = run("trim", "t", "--ledger", "7", "--entry", "19", "--yes")
    assert result.stdout == "dropped 3 rows of t\n"
    assert "an answer was lost: rows that an earlier try dropped are not counted" in result.stderr


def test_a_clear_tells_how_many_rows_it_dropped(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ClearMessages", answer(delayed_delivery_pb2.ClearMessagesResponse(cleared=1)))
    assert run("clear", "t", "--subscription", "s", "--yes").stdout == "dropped 1 row of t for subscription s\n"
    assert json.loads(run("clear", "t", "--yes", "--json").stdout) == {"topic": "t", "subscription": None, "cleared": 1}
    assert [request.subscription for request in daemon.requests("ClearMessages")] == ["s", ""]


def test_adding_to_a_topic_without_a_subscription_says_that_nobody_listens(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    daemon.script("ListSubscriptions", answer(inspect_pb2.ListSubscriptionsResponse()))
    result = run("add", "t", "--ledger", "3", "--entries", "7", "--in", "1s", "--json")
    assert json.loads(result.stdout)["accepted"] == 1
    assert result.stderr == (
        "tarry: t has no subscription: due rows wait for the first one; `tarry subscription create t NAME` creates it\n"
    )


def test_an_add_is_no_failure_when_it_is_not_known_who_listens(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("StreamAddMessages", accept_all)
    daemon.script("ListSubscriptions", refuse(grpc.StatusCode.INTERNAL, "a bug"))
    result = run("add", "t", "--ledger", "3", "--entries", "7", "--in", "1s")
    assert (result.exit_code, result.stderr) == (0, "")


def test_an_add_of_who_shows_a_token_looks_for_nobody(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    """It may be one that may add and no more: the look would be refused, and told by the daemon's audit log."""
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    daemon.script("StreamAddMessages", accept_all)
    result = run("--token-file", str(token), "add", "t", "--ledger", "3", "--entries", "7", "--in", "1s")
    assert (result.exit_code, result.stderr) == (0, "")
    assert daemon.requests("ListSubscriptions") == []
