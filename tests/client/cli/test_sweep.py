"""What `tarry sweep` sends, shows while it works, and prints; what it says to do next."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
import pytest

from tarry.cli import commands, output, pending
from tarry.v1 import ledger_deletion_pb2
from tests.client._support.fake_daemon import FakeDaemon, refuse
from tests.client.cli.conftest import Run
from tests.client.conformance._support.deletion_calls import OFFLOADED, UUID

OBJECT_CLASSES = [
    "listed", "foreign", "in use", "recorded", "young", "orphaned", "of unknown topics", "unidentified", "unanswered",
]  # fmt: skip


def orphan(topic: str = "t", *, unknown_topic: bool = False) -> ledger_deletion_pb2.OrphanedLedger:
    return ledger_deletion_pb2.OrphanedLedger(
        topic=topic, pending_delete=OFFLOADED, size_bytes=2_048, modified_ms=9, unknown_topic=unknown_topic
    )


def step(
    *orphans: ledger_deletion_pb2.OrphanedLedger,
    done: bool = False,
    refused: str = "",
    ledgers_recorded: int = 0,
    ledgers_left: int = 0,
    **counts: int,
) -> ledger_deletion_pb2.SweepOrphansResponse:
    """Each class with as many objects, of 10 bytes each."""
    objects: dict[str, Any] = {
        name: ledger_deletion_pb2.SweptObjects(objects=number, size_bytes=10 * number)
        for name, number in counts.items()
    }
    ledgers: dict[str, Any] = {"ledgers_recorded": ledgers_recorded, "ledgers_left": ledgers_left}
    return ledger_deletion_pb2.SweepOrphansResponse(
        orphans=orphans, counts=ledger_deletion_pb2.SweepCounts(**objects, **ledgers), done=done, refused=refused
    )


def steps(*answers: ledger_deletion_pb2.SweepOrphansResponse) -> Any:
    return lambda request, context: iter(answers)


def tables(shown: str) -> list[list[list[str]]]:
    return [[line.split("\t") for line in block.splitlines()] for block in shown.split("\n\n")]


def test_a_sweep_lists_orphans_and_counts_everything_else(daemon: FakeDaemon, run: Run) -> None:
    daemon.script(
        "SweepOrphans",
        steps(
            step(orphan(), listed=1_000, orphaned=2),
            step(orphan("u", unknown_topic=True), listed=2_000, orphaned=2, of_unknown_topics=2, done=True),
        ),
    )
    result = run("sweep", "archive")
    assert result.exit_code == 0, result.output
    orphans, counts = tables(result.stdout)
    written = output.time_text(9)
    assert orphans == [
        ["topic", "component", "name", "ledger", "type", "uuid", "bytes", "written", "its topic"],
        ["t", "schema storage", "3", "8", "offloaded ledger", str(UUID), "2048", written, "known"],
        ["u", "schema storage", "3", "8", "offloaded ledger", str(UUID), "2048", written, "unknown"],
    ]
    assert [line[0] for line in counts] == ["what", *OBJECT_CLASSES]
    by_name = {line[0]: line[1:] for line in counts}
    assert by_name["listed"] == ["2000", "20000", "every object"]
    assert by_name["orphaned"] == ["2", "20", "would be deleted with --delete"]
    assert by_name["of unknown topics"][2].startswith("kept: their topics' ledgers in use")
    assert "nothing is changed: `tarry sweep archive --delete`" in result.stderr
    assert "--unknown-topics" in result.stderr
    assert daemon.requests("SweepOrphans") == [ledger_deletion_pb2.SweepOrphansRequest(store="archive")]


def test_what_a_sweep_does_is_chosen(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", steps(step(orphan(), orphaned=2, of_unknown_topics=1, ledgers_recorded=2, done=True)))
    result = run("sweep", "archive", "--prefix", "p/", "--grace", "1h", "--delete", "--unknown-topics", "--force")
    assert result.exit_code == 0
    assert daemon.requests("SweepOrphans") == [
        ledger_deletion_pb2.SweepOrphansRequest(
            store="archive", prefix="p/", grace_ms=3_600_000, delete=True, unknown_topics=True, force=True
        )
    ]
    by_name = {line[0]: line[1:] for line in tables(result.stdout)[1]}
    assert by_name["orphaned"][2] == by_name["of unknown topics"][2] == "recorded: deleted once verified"
    assert result.stderr == (
        "tarry: recorded 2 ledgers: `tarry deletions list`, then `ended`, show what becomes of them\n"
    )


def test_where_there_are_no_orphans_that_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", steps(step(listed=5, young=5, done=True)))
    result = run("sweep", "archive", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "tarry: no orphan in archive\n")


def test_only_so_many_orphans_are_shown_and_the_others_counted(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", steps(step(orphan(), orphan()), step(orphan(), orphaned=6, done=True)))
    result = run("sweep", "archive", "--limit", "1")
    assert len(tables(result.stdout)[0]) == 2
    assert "2 more orphans: a higher --limit shows them" in result.stderr


def test_a_terminal_gets_a_screen_of_orphans(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.script("SweepOrphans", steps(step(*[orphan()] * (pending.ROWS_IN_TERMINAL + 3), done=True)))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "140")
    commands.tarry(["sweep", "archive", "--address", daemon.address], standalone_mode=False)
    shown = capsys.readouterr()
    assert shown.out.count(str(UUID)) == pending.ROWS_IN_TERMINAL
    assert "offloaded ledger " not in shown.out
    assert "Orphans in archive" in shown.out
    assert "What is in archive" in shown.out
    assert "3 more orphans" in shown.err


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (
            step(orphaned=9, done=True, refused="too many"),
            "`tarry sweep archive --delete --force`",
        ),
        (step(orphaned=9, done=True, ledgers_recorded=1, ledgers_left=3), "3 orphaned ledgers not recorded"),
        (step(unanswered=1, done=True), "sweep again when they do"),
    ],
)
def test_what_was_left_has_a_status_of_its_own_when_it_was_to_be_deleted(
    daemon: FakeDaemon, run: Run, last: ledger_deletion_pb2.SweepOrphansResponse, says: str
) -> None:
    daemon.script("SweepOrphans", steps(last))
    result = run("sweep", "archive", "--delete")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert says in result.stderr
    result = run("sweep", "archive", "--delete", "--json")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert says in result.stderr
    assert run("sweep", "archive").exit_code == 0


def test_what_was_refused_is_not_said_to_be_deleted(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", steps(step(orphaned=9, done=True, refused="too many")))
    result = run("sweep", "archive", "--delete")
    by_name = {line[0]: line[1:] for line in tables(result.stdout)[1]}
    assert by_name["orphaned"] == ["9", "90", "kept: they are too many"]


def test_each_step_is_a_line_of_json(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", steps(step(listed=1), step(orphan(), listed=2, done=True)))
    first, last = (json.loads(line) for line in run("sweep", "archive", "--json").stdout.splitlines())
    assert (first["done"], first["orphans"], first["counts"]["listed"]) == (False, [], {"objects": 1, "size_bytes": 10})
    assert last["done"]
    assert last["orphans"][0]["pending_delete"]["offload_context"]["uuid"] == str(UUID)


def test_a_store_that_is_not_configured_is_told_with_where_they_are(daemon: FakeDaemon, run: Run) -> None:
    daemon.script(
        "SweepOrphans", refuse(grpc.StatusCode.NOT_FOUND, "object store 'x' is not configured: deletion.object_stores")
    )
    result = run("sweep", "x")
    assert result.exit_code == output.EXIT_REFUSED
    assert result.stderr == (
        "tarry: object store 'x' is not configured: deletion.object_stores; STORE is a name that the daemon's "
        "configuration has there\n"
    )


def test_a_daemon_that_does_not_own_every_shard_names_who_does(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", refuse(grpc.StatusCode.FAILED_PRECONDITION, "no", owner_address="127.0.0.1:1"))
    result = run("sweep", "archive")
    assert result.exit_code == output.EXIT_REFUSED
    assert "ask it with --address 127.0.0.1:1" in result.stderr


def test_a_sweep_that_is_under_way_is_waited_for(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("SweepOrphans", refuse(grpc.StatusCode.ABORTED, "a sweep of 'archive' is under way"))
    result = run("sweep", "archive")
    assert result.exit_code == output.EXIT_REFUSED
    assert "try again when that is over" in result.stderr


@pytest.mark.parametrize("answers", [(), (step(listed=1),)])
def test_a_sweep_that_ends_without_being_done_is_told(
    daemon: FakeDaemon, run: Run, answers: tuple[ledger_deletion_pb2.SweepOrphansResponse, ...]
) -> None:
    daemon.script("SweepOrphans", steps(*answers))
    result = run("sweep", "archive")
    assert result.exit_code == output.EXIT_UNREACHABLE
    assert "run the command again" in result.stderr
