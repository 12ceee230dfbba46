"""What the commands of `tarry deletions` ask for, show and change."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
import pytest

from tarry.cli import commands, output
from tarry.v1 import ledger_deletion_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run
from tests.client.conformance._support.deletion_calls import CURSOR, ENDED, OFFLOADED, UUID, WAITING

GIVEN_UP = ledger_deletion_pb2.Deletion(
    deletion_id="2.1",
    topic="u",
    pending_delete=CURSOR,
    recorded_at_ms=10,
    state=ledger_deletion_pb2.Deletion.STATE_GIVEN_UP,
    failures=11,
    ended_at_ms=40,
    text="unknown owner",
)
STATS = ledger_deletion_pb2.GetDeletionStatsResponse(
    in_flight=2_000,
    begun=4,
    oldest_ms=5,
    given_up=3,
    in_use=1,
    held=6,
    as_of_ms=8,
    counts=[
        ledger_deletion_pb2.DeletionCount(
            component=CURSOR.component, ledger_type=CURSOR.ledger_type, in_flight=2_000, oldest_ms=5, given_up=3, held=6
        )
    ],
)


@pytest.fixture
def with_deletions(daemon: FakeDaemon) -> FakeDaemon:
    """One that waits, one that was given up, one that ended, each on a page of its own, and an empty page."""
    empty_first = answer(ledger_deletion_pb2.ListPendingDeletesResponse(next_page_token="a"))
    daemon.script(
        "ListPendingDeletes", empty_first, answer(ledger_deletion_pb2.ListPendingDeletesResponse(deletions=[WAITING]))
    )
    daemon.script("ListDeadDeletes", answer(ledger_deletion_pb2.ListDeadDeletesResponse(deletions=[GIVEN_UP])))
    daemon.script("ListEndedDeletes", answer(ledger_deletion_pb2.ListEndedDeletesResponse(deletions=[ENDED])))
    daemon.script("GetDeletionStats", answer(STATS))
    daemon.script("RetryDeadDeletes", answer(ledger_deletion_pb2.RetryDeadDeletesResponse(retried=3)))
    daemon.script("PurgeDeadDeletes", answer(ledger_deletion_pb2.PurgeDeadDeletesResponse(purged=1)))
    return daemon


def lines(shown: str) -> list[list[str]]:
    return [line.split("\t") for line in shown.splitlines()]


# Seeing them.


def test_pending_deletions_are_listed_with_what_was_said_below_how_many_there_are(
    with_deletions: FakeDaemon, run: Run
) -> None:
    result = run("deletions", "list")
    assert lines(result.stdout) == [
        ["id", "topic", "component", "name", "ledger", "type", "state", "failures", "next attempt", "said"],
        ["1.9", "t", "schema storage", "3", "8", "offloaded ledger", "waiting", "2", output.time_text(20), "slow down"],
    ]
    assert result.stderr == (
        f"tarry: 2,000 in flight, 4 of them begun, the oldest since {output.time_text(5)}; 3 given up; 6 held; "
        "1 ledger in use\n"
    )
    assert [each.page_size for each in with_deletions.requests("ListPendingDeletes")] == [1_000] * 2


def test_dead_and_ended_deletions_are_listed_with_why(with_deletions: FakeDaemon, run: Run) -> None:
    assert lines(run("deletions", "dead").stdout)[1:] == [
        ["2.1", "u", "managed cursor", "departures", "7", "ledger", "11", output.time_text(40), "unknown owner"]
    ]
    assert lines(run("deletions", "ended").stdout)[1:] == [
        ["1.3", "t", "managed cursor", "departures", "7", "ledger", "metadata mismatch", output.time_text(30), "-"]
    ]


def test_a_deletion_is_a_line_of_json(with_deletions: FakeDaemon, run: Run) -> None:
    result = run("deletions", "list", "--json")
    assert json.loads(result.stdout) == {
        "deletion_id": "1.9",
        "topic": "t",
        "pending_delete": {
            "ledger_id": 8,
            "component": "schema_storage",
            "ledger_type": "offloaded_ledger",
            "cursor_name": None,
            "schema_id": "3",
            "offload_context": {
                "uuid": str(UUID), "driver_name": "aws-s3", "driver_metadata": {"bucket": "b", "region": "r"}
            },
        },
        "recorded_at_ms": 10,
        "by_sweeper": True,
        "state": "waiting",
        "outcome": None,
        "failures": 2,
        "next_attempt_at_ms": 20,
        "maybe_deleted": True,
        "ended_at_ms": None,
        "text": "slow down",
    }  # fmt: skip
    assert (result.stderr, with_deletions.count("GetDeletionStats")) == ("", 0)


@pytest.mark.parametrize("command", ["list", "dead", "ended"])
def test_deletions_are_chosen(with_deletions: FakeDaemon, run: Run, command: str) -> None:
    method = {"list": "ListPendingDeletes", "dead": "ListDeadDeletes", "ended": "ListEndedDeletes"}[command]
    chosen = ("--component", "managed-cursor", "--type", "offloaded-ledger", "--ledger", "0", "--limit", "2000")
    assert run("deletions", command, "t", "--id", "3.17", "--id", "3.9", *chosen).exit_code == 0
    request = with_deletions.requests(method)[0]
    assert request.page_size == 1_000
    assert request.filter == ledger_deletion_pb2.DeletionFilter(
        topic="t",
        component=ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_CURSOR,
        ledger_type=ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER,
        ledger_id=0,
        deletion_id=["3.17", "3.9"],
    )


def test_that_more_deletions_follow_is_said(with_deletions: FakeDaemon, run: Run) -> None:
    page = ledger_deletion_pb2.ListDeadDeletesResponse(deletions=[GIVEN_UP], next_page_token="a")
    with_deletions.script("ListDeadDeletes", answer(page))
    result = run("deletions", "dead", "--limit", "1")
    assert "there are more rows" in result.stderr
    assert with_deletions.requests("ListDeadDeletes")[0].page_size == 1


def test_that_there_are_no_deletions_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListPendingDeletes", answer(ledger_deletion_pb2.ListPendingDeletesResponse()))
    daemon.script("ListDeadDeletes", answer(ledger_deletion_pb2.ListDeadDeletesResponse()))
    daemon.script("ListEndedDeletes", answer(ledger_deletion_pb2.ListEndedDeletesResponse()))
    daemon.script("GetDeletionStats", answer(ledger_deletion_pb2.GetDeletionStatsResponse()))
    result = run("deletions", "list")
    assert result.stderr == (
        "tarry: 0 in flight, 0 of them begun; 0 given up; 0 held; 0 ledgers in use\ntarry: no deletion is pending\n"
    )
    assert run("deletions", "dead", "t").stderr == "tarry: no deletion was given up, of these\n"
    assert run("deletions", "ended", "--json").stdout == ""


def test_a_terminal_has_no_column_that_says_nothing(
    with_deletions: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ledger_deletion_pb2.Deletion(
        deletion_id="1.1",
        topic="t",
        pending_delete=ledger_deletion_pb2.PendingDelete(ledger_id=2**60, component=1, ledger_type=1),  # type: ignore[arg-type]
        state=ledger_deletion_pb2.Deletion.STATE_BEGUN,
    )
    with_deletions.script(
        "ListPendingDeletes", answer(ledger_deletion_pb2.ListPendingDeletesResponse(deletions=[plain]))
    )
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "140")
    commands.tarry(["deletions", "list", "t", "--address", with_deletions.address], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Deletions, of t" in shown
    assert "managed ledger" in shown
    assert "next attempt" in shown
    for column in ("topic", "name", "said"):
        assert column not in shown
    # A ledger is a name, and no count.
    assert str(2**60) in shown


def test_everything_that_is_known_of_a_ledger_is_shown(with_deletions: FakeDaemon, run: Run) -> None:
    result = run("deletions", "show", "8")
    assert result.exit_code == 0
    shown = lines(result.stdout)
    begins = [number for number, (name, _) in enumerate(shown) if name == "id"]
    assert [shown[number][1] for number in begins] == ["1.9", "2.1", "1.3"]
    assert dict(shown[: begins[1]]) == {
        "id": "1.9",
        "topic": "t",
        "component": "schema storage",
        "name": "3",
        "ledger": "8",
        "type": "offloaded ledger",
        "objects": f"{UUID}-ledger-8, {UUID}-ledger-8-index",
        "driver": "aws-s3",
        "driver metadata": "bucket=b, region=r",
        "recorded": output.time_text(10),
        "by a sweep": "yes",
        "state": "waiting",
        "outcome": "-",
        "failures": "2",
        "next attempt": output.time_text(20),
        "maybe deleted": "yes: an attempt has no answer",
        "ended": "-",
        "said": "slow down",
    }
    asked = [request.filter for _, request in with_deletions.calls]
    assert asked == [ledger_deletion_pb2.DeletionFilter(ledger_id=8)] * 4


def test_a_deletion_that_moves_on_meanwhile_is_shown_once_as_it_is_now(with_deletions: FakeDaemon, run: Run) -> None:
    over = ledger_deletion_pb2.Deletion()
    over.CopyFrom(WAITING)
    over.state = ledger_deletion_pb2.Deletion.STATE_ENDED
    over.outcome = ledger_deletion_pb2.Deletion.OUTCOME_DELETED
    with_deletions.script("ListDeadDeletes", answer(ledger_deletion_pb2.ListDeadDeletesResponse()))
    with_deletions.script("ListEndedDeletes", answer(ledger_deletion_pb2.ListEndedDeletesResponse(deletions=[over])))
    (shown,) = run("deletions", "show", "1.9", "--json").stdout.splitlines()
    assert (json.loads(shown)["state"], json.loads(shown)["outcome"]) == ("ended", "deleted")
    assert list(with_deletions.requests("ListEndedDeletes")[0].filter.deletion_id) == ["1.9"]


def test_of_what_nothing_is_known_the_next_step_is_said(daemon: FakeDaemon, run: Run) -> None:
    for method in ("ListPendingDeletes", "ListDeadDeletes", "ListEndedDeletes"):
        daemon.script(method, answer(getattr(ledger_deletion_pb2, f"{method}Response")()))
    result = run("deletions", "show", "7")
    assert result.exit_code == output.EXIT_REFUSED
    assert "`tarry deletions list`" in result.stderr
    for wrong in ("3.x", "-1", str(2**64)):
        result = run("deletions", "show", "--", wrong)
        assert result.exit_code == output.EXIT_INPUT
        assert "neither the id of a deletion, such as 3.17, nor a ledger" in result.stderr


def test_deletions_are_counted_by_what_the_ledgers_are_for(with_deletions: FakeDaemon, run: Run) -> None:
    facts, _, table = run("deletions", "stats", "t").stdout.partition("\n\n")
    assert dict(lines(facts))["in flight"] == "2000"
    assert lines(table) == [
        ["component", "type", "in flight", "oldest", "given up", "held"],
        ["managed cursor", "ledger", "2000", output.time_text(5), "3", "6"],
    ]
    parsed = json.loads(run("deletions", "stats", "--json").stdout)
    assert (parsed["in_flight"], parsed["counts"][0]["component"]) == (2_000, "managed_cursor")
    assert [each.topic for each in with_deletions.requests("GetDeletionStats")] == ["t", ""]


# What was given up.


def test_what_was_given_up_is_tried_again(with_deletions: FakeDaemon, run: Run) -> None:
    result = run("deletions", "retry", "t", "--type", "ledger")
    assert result.stdout == "3 deletions that were given up are pending again\n"
    assert json.loads(run("deletions", "retry", "--all", "--json").stdout) == {"retried": 3}
    some, everything = with_deletions.requests("RetryDeadDeletes")
    assert (some.filter.topic, some.filter.ledger_type, some.all) == (
        "t",
        ledger_deletion_pb2.LEDGER_TYPE_LEDGER,
        False,
    )
    assert everything == ledger_deletion_pb2.RetryDeadDeletesRequest(
        filter=ledger_deletion_pb2.DeletionFilter(), all=True
    )


@pytest.mark.parametrize("command", ["retry", "purge"])
def test_all_of_them_is_said_and_nothing_else_beside_it(with_deletions: FakeDaemon, run: Run, command: str) -> None:
    for wrong, says in (((), "--all is all that were given up"), (("t", "--all"), "leave it out")):
        result = run("deletions", command, *wrong)
        assert result.exit_code == output.EXIT_INPUT
        assert says in result.stderr
    assert with_deletions.calls == []


@pytest.mark.parametrize(
    ("chosen", "question"),
    [
        (("--all",), "Forget 3 deletions that were given up? What they name stays where it is. [y/N]: "),
        (("t",), "Forget 3 deletions that were given up of t? What they name stays where it is. [y/N]: "),
        (("t", "--ledger", "7"), "Forget those named, of 3 deletions that were given up of t? [y/N]: "),
        (("--id", "2.1"), "Forget those named, of 3 deletions that were given up? [y/N]: "),
    ],
)
def test_what_was_given_up_is_forgotten_when_that_is_wanted(
    with_deletions: FakeDaemon, run: Run, chosen: tuple[str, ...], question: str
) -> None:
    refused = run("deletions", "purge", *chosen, stdin="n\n")
    assert (refused.exit_code, refused.stderr) == (output.EXIT_REFUSED, f"{question}n\ntarry: nothing was done\n")
    assert with_deletions.count("PurgeDeadDeletes") == 0
    assert run("deletions", "purge", *chosen, stdin="y\n").stdout == "forgot 1 deletion\n"
    assert json.loads(run("deletions", "purge", *chosen, "--yes", "--json").stdout) == {"purged": 1}
    assert [each.all for each in with_deletions.requests("PurgeDeadDeletes")] == [chosen == ("--all",)] * 2


def test_one_deletion_is_spoken_of_as_one(with_deletions: FakeDaemon, run: Run) -> None:
    with_deletions.script("GetDeletionStats", answer(ledger_deletion_pb2.GetDeletionStatsResponse(given_up=1)))
    with_deletions.script("RetryDeadDeletes", answer(ledger_deletion_pb2.RetryDeadDeletesResponse(retried=1)))
    assert "Forget 1 deletion that was given up?" in run("deletions", "purge", "--all", stdin="n\n").stderr
    assert run("deletions", "retry", "--all").stdout == "1 deletion that was given up is pending again\n"


def test_where_nothing_was_given_up_nobody_is_asked(with_deletions: FakeDaemon, run: Run) -> None:
    with_deletions.script("GetDeletionStats", answer(ledger_deletion_pb2.GetDeletionStatsResponse()))
    with_deletions.script("PurgeDeadDeletes", answer(ledger_deletion_pb2.PurgeDeadDeletesResponse()))
    result = run("deletions", "purge", "--all", stdin="")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "forgot 0 deletions\n", "")


# Recording by hand.


def recorded(request: Any, context: grpc.ServicerContext) -> Any:
    return ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=len(request.deletes))


def test_ledgers_are_recorded(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("RecordPendingDeletes", recorded)
    result = run("deletions", "record", "t", "--ledger", "1-3", "--ledger", "9", "--yes")
    assert (result.exit_code, result.stdout) == (0, "recorded 4 deletions of t\n")
    parsed = json.loads(run("deletions", "record", "t", "--ledger", "7", "--cursor", "c", "--yes", "--json").stdout)
    assert parsed == {"topic": "t", "recorded": 1, "already_recorded": 0, "refused": []}
    run("deletions", "record", "t", "--ledger", "7", "--schema", "3", "--yes")
    ledgers, cursor, schema = daemon.requests("RecordPendingDeletes")
    assert [each.ledger_id for each in ledgers.deletes] == [1, 2, 3, 9]
    assert {(each.component, each.ledger_type, each.HasField("offload_context")) for each in ledgers.deletes} == {
        (ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_LEDGER, ledger_deletion_pb2.LEDGER_TYPE_LEDGER, False)
    }
    assert (cursor.deletes[0].component, cursor.deletes[0].cursor_name) == (CURSOR.component, "c")
    assert (schema.deletes[0].component, schema.deletes[0].schema_id) == (OFFLOADED.component, "3")


def test_an_offloaded_ledger_is_recorded(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("RecordPendingDeletes", recorded)
    offloaded = ("--driver", "aws-s3", "--uuid", str(UUID), "--set", "bucket=b", "--set", "region=r")
    assert run("deletions", "record", "t", "--ledger", "8", "--schema", "3", *offloaded, "--yes").exit_code == 0
    (request,) = daemon.requests("RecordPendingDeletes")
    assert list(request.deletes) == [OFFLOADED]


def test_what_was_refused_is_told_by_the_exit_status(daemon: FakeDaemon, run: Run) -> None:
    refused = ledger_deletion_pb2.RefusedDelete(
        index=1, reason=ledger_deletion_pb2.RefusedDelete.REASON_DISABLED, text="switched off"
    )
    daemon.script(
        "RecordPendingDeletes",
        answer(ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=1, already_recorded=[0], refused=[refused])),
    )
    result = run("deletions", "record", "t", "--ledger", "1-2", "--yes")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert lines(result.stdout) == [
        ["recorded 1 deletion of t, 1 of them before"],
        ["ledger", "why", "said"],
        ["2", "disabled", "switched off"],
    ]
    result = run("deletions", "record", "t", "--ledger", "1-2", "--yes", "--json")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert json.loads(result.stdout)["refused"] == [{"ledger_id": 2, "reason": "disabled", "text": "switched off"}]


def test_before_ledgers_are_deleted_someone_is_asked(daemon: FakeDaemon, run: Run) -> None:
    result = run("deletions", "record", "t", "--ledger", "1-1000", stdin="n\n")
    assert result.exit_code == output.EXIT_REFUSED
    assert "Delete 1,000 ledgers of t, once the daemon has verified that they are not in use? [y/N]: " in result.stderr
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((), "Missing option"),
        (("--ledger", "1", "--cursor", "c", "--schema", "3"), "leave out --cursor or --schema"),
        (("--ledger", "1", "--driver", "aws-s3"), "takes --driver and --uuid"),
        (("--ledger", "1", "--set", "bucket=b"), "takes --driver and --uuid"),
        (("--ledger", "1", "--uuid", "7"), "not a valid UUID"),
        (("--ledger", "1", "--driver", "d", "--uuid", str(UUID), "--set", "bucket"), "write NAME=VALUE"),
        (("--ledger", f"0-{2**64 - 1}"), "names 18,446,744,073,709,551,616 ledgers; a command records 100,000 at most"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
    daemon: FakeDaemon, run: Run, wrong: tuple[str, ...], says: str
) -> None:
    result = run("deletions", "record", "t", *wrong, "--yes")
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


def test_a_daemon_that_takes_no_more_says_so(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("RecordPendingDeletes", refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "200000 are pending"))
    result = run("deletions", "record", "t", "--ledger", "1", "--yes")
    assert (result.exit_code, result.stderr) == (output.EXIT_REFUSED, "tarry: 200000 are pending.\n")
