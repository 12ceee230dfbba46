"""What `watch` asks for and prints: it looks, and takes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.cli import output, watching
from tarry.v1 import inspect_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer
from tests.client.cli.conftest import Run

READY, IN_FLIGHT, NACKED = (
    inspect_pb2.BACKLOG_STATE_READY, inspect_pb2.BACKLOG_STATE_IN_FLIGHT, inspect_pb2.BACKLOG_STATE_NACKED
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.0)
    daemon.script("ListScheduled", answer(inspect_pb2.ListScheduledResponse()))


def page(*entries: int, **fields: Any) -> inspect_pb2.ListBacklogResponse:
    """Entries of ledger 7, ready unless a state is given; entry n was due at 1,000 + n ms."""
    columns: dict[str, Any] = {
        "ledger_id": [7] * len(entries),
        "entry_id": entries,
        "deliver_at_ms": [1_000 + entry for entry in entries],
        "key_hash": [0] * len(entries),
        "state": [READY] * len(entries),
        "redelivery_count": [0] * len(entries),
        "as_of_ms": 5_000,
    }
    return inspect_pb2.ListBacklogResponse(**columns | fields)


def test_watch_prints_each_position_once_and_takes_none(daemon: FakeDaemon, run: Run) -> None:
    looks = page(1, next_page_token="a"), page(2), page(1, 2, 3, state=[IN_FLIGHT, READY, READY])
    daemon.script("ListBacklog", *map(answer, looks))
    result = run("watch", "t", "s", "--count", "3", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["entry_id"] for line in lines] == [1, 2, 3]
    assert lines[0] == {
        "ledger_id": 7, "entry_id": 1, "deliver_at_ms": 1_001, "seen_at_ms": 5_000, "key_hash": None,
        "state": "ready", "redelivery_count": 0, "batch_index": None,
    }  # fmt: skip
    assert {method for method, _ in daemon.calls} == {"ListBacklog", "ListScheduled"}
    assert [request.page_token for request in daemon.requests("ListBacklog")] == ["", "a", ""]


def test_what_comes_back_is_printed_again_and_not_while_it_waits(daemon: FakeDaemon, run: Run) -> None:
    waiting = page(1, state=[NACKED], redelivery_count=[1], redeliver_at_ms=[9_000])
    again = page(1, state=[IN_FLIGHT], redelivery_count=[1])
    daemon.script("ListBacklog", *map(answer, (page(1), waiting, again)))
    first, second = run("watch", "t", "s", "--count", "2").stdout.splitlines()
    assert "  ledger 7  entry 1  due " in first
    assert first.endswith("  ready")
    assert second.endswith("  redelivered 1  in flight")
    assert daemon.count("ListBacklog") == 3


def waiting(*entries: int) -> inspect_pb2.ListScheduledResponse:
    return inspect_pb2.ListScheduledResponse(
        ledger_id=[7] * len(entries), entry_id=entries, deliver_at_ms=[1_000 + entry for entry in entries],
        key_hash=[9] * len(entries), subscription_index=[0] * len(entries), subscriptions=[""], as_of_ms=900,
    )  # fmt: skip


def test_what_a_dispatcher_takes_between_two_looks_is_seen_as_well(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListScheduled", *map(answer, (waiting(1, 2), waiting(2), waiting())))
    daemon.script("ListBacklog", *map(answer, (page(), page(), page(2))))
    first, second = (json.loads(line) for line in run("watch", "t", "s", "--count", "2", "--json").stdout.splitlines())
    assert (first["entry_id"], first["state"], first["seen_at_ms"], first["key_hash"]) == (1, "gone", 5_000, 9)
    assert (second["entry_id"], second["state"]) == (2, "ready"), "it waited until the look before"
    asked = daemon.requests("ListScheduled")
    assert {request.subscription for request in asked} == {"s"}
    assert asked[1].until_ms > 5_000, "by the daemon's clock, and beyond the next look"


def test_only_so_many_as_asked_are_printed(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListBacklog", answer(page(1, 2, 3)))
    assert len(run("watch", "t", "s", "--count", "2").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    "option", [("--ack",), ("--no-ack",), ("--create",), ("--permits", "5"), ("--consumer", "gate-1")]
)
def test_who_means_what_watch_was_is_told_where_it_is(daemon: FakeDaemon, run: Run, option: tuple[str, ...]) -> None:
    result = run("watch", "t", "s", *option)
    assert result.exit_code == output.EXIT_INPUT
    assert f"{option[0]}: `tarry watch` only shows positions and has no such option; `tarry receive`" in result.stderr
    assert daemon.calls == []
