"""What `scheduled`, `histogram` and `backlog` ask for, print and draw."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
import rich.text

from tarry import inspection
from tarry.cli import output, pending
from tarry.v1 import inspect_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer
from tests.client.cli.conftest import Run

HOUR_MS = 3_600_000
NOON_MS = 1_896_091_200_000


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def rows(*entries: int, **fields: Any) -> dict[str, Any]:
    """Columns of entries of ledger 7; entry n is due n ms after noon."""
    columns = {"ledger_id": [7] * len(entries), "entry_id": entries, "key_hash": [0] * len(entries)}
    return columns | {"deliver_at_ms": [NOON_MS + entry for entry in entries], **fields}


def test_scheduled_rows_are_lines_of_all_pages(daemon: FakeDaemon, run: Run) -> None:
    first = inspect_pb2.ListScheduledResponse(
        **rows(1, 2, key_hash=[0, 9], subscription_index=[0, 1], subscriptions=["", "s"], next_page_token="a")
    )
    daemon.script("ListScheduled", answer(first), answer(inspect_pb2.ListScheduledResponse(**rows(3))))
    window = ("--from", str(NOON_MS), "--until", "2030-02-01", "--ledgers", "1-9", "--subscription", "s")
    result = run("scheduled", "t", *window)
    assert result.stdout.splitlines() == [
        "due\tledger\tentry\tkey hash\tonly for",
        "2030-01-31 12:00:00.001+00:00\t7\t1\t-\t-",
        "2030-01-31 12:00:00.002+00:00\t7\t2\t9\ts",
        "2030-01-31 12:00:00.003+00:00\t7\t3\t-\t-",
    ]
    asked = daemon.requests("ListScheduled")
    assert [request.page_token for request in asked] == ["", "a"]
    assert (asked[0].from_ms, asked[0].until_ms) == (NOON_MS, NOON_MS + 12 * HOUR_MS)
    assert asked[0].ledgers == inspect_pb2.LedgerRange(first_ledger_id=1, last_ledger_id=9)
    assert (asked[0].subscription, asked[0].page_size) == ("s", 10_000)


def test_scheduled_rows_are_json_lines_that_other_commands_take(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListScheduled", answer(inspect_pb2.ListScheduledResponse(**rows(1, 2, key_hash=[0, 9]))))
    parsed = [json.loads(line) for line in run("scheduled", "t", "--json").stdout.splitlines()]
    assert parsed[1] == {
        "ledger_id": 7, "entry_id": 2, "deliver_at_ms": NOON_MS + 2, "key_hash": 9, "subscription": None
    }  # fmt: skip
    assert (len(parsed), parsed[0]["key_hash"]) == (2, None)


def test_a_limit_is_the_page_and_says_that_there_are_more(daemon: FakeDaemon, run: Run) -> None:
    page = inspect_pb2.ListScheduledResponse(**rows(1, 2, next_page_token="a"))
    last = inspect_pb2.ListScheduledResponse(**rows(3, next_page_token="b"))
    daemon.script("ListScheduled", answer(page), answer(last))
    result = run("scheduled", "t", "--limit", "3", "--json")
    assert len(result.stdout.splitlines()) == 3
    assert "there are more rows" in result.stderr
    assert [request.page_size for request in daemon.requests("ListScheduled")] == [3, 1]


def test_a_terminal_gets_a_screen_of_rows(daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert pending.limit_of(None, as_json=False) == pending.ROWS_IN_TERMINAL
    assert pending.limit_of(None, as_json=True) is None
    assert pending.limit_of(7, as_json=False) == 7


def test_that_nothing_is_pending_is_said(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("ListScheduled", answer(inspect_pb2.ListScheduledResponse()))
    assert run("scheduled", "t").stderr == "tarry: nothing of t is pending\n"
    assert run("scheduled", "t", "--until", "+1h").stderr == "tarry: nothing of t is pending in this range\n"
    assert run("scheduled", "t", "--json").stdout == ""


def test_a_backlog_shows_what_is_handed_out(daemon: FakeDaemon, run: Run) -> None:
    states = [inspect_pb2.BACKLOG_STATE_READY, inspect_pb2.BACKLOG_STATE_NACKED]
    others: dict[str, Any] = {
        "redelivery_count": [0, 3], "batch_index": [2**32 - 1, 5], "redeliver_at_ms": [0, NOON_MS]
    }  # fmt: skip
    daemon.script("ListBacklog", answer(inspect_pb2.ListBacklogResponse(**rows(1, 2, state=states), **others)))
    lines = run("backlog", "t", "s", "--ledgers", "7").stdout.splitlines()
    assert [line.split("\t")[1:] for line in lines] == [
        ["ledger", "entry", "key hash", "state", "back at", "redelivered", "batch index"],
        ["7", "1", "-", "ready", "-", "0", "-"],
        ["7", "2", "-", "nacked", output.time_text(NOON_MS), "3", "5"],
    ]
    parsed = [json.loads(line) for line in run("backlog", "t", "s", "--json").stdout.splitlines()]
    assert [each["state"] for each in parsed] == ["ready", "nacked"]
    assert [each["redeliver_at_ms"] for each in parsed] == [None, NOON_MS]
    assert [(each["redelivery_count"], each["batch_index"]) for each in parsed] == [(0, None), (3, 5)]
    assert daemon.requests("ListBacklog")[0] == inspect_pb2.ListBacklogRequest(
        topic="t",
        subscription="s",
        ledgers=inspect_pb2.LedgerRange(first_ledger_id=7, last_ledger_id=7),
        page_size=10_000,
    )
    daemon.script("ListBacklog", answer(inspect_pb2.ListBacklogResponse()))
    assert "s is owed nothing of t that is due" in run("backlog", "t", "s").stderr


# The histogram.


def message(counts: list[int], *, width_ms: int = HOUR_MS, until_ms: int | None = None) -> Any:
    return inspect_pb2.GetHistogramResponse(
        from_ms=NOON_MS,
        until_ms=until_ms or NOON_MS + len(counts) * width_ms,
        width_ms=width_ms,
        rows=counts,
        rows_before=3,
        rows_after=4,
        segments_counted=5,
        segments_read=6,
        as_of_ms=NOON_MS,
    )


def test_a_histogram_is_lines_in_a_pipe_and_its_totals_are_beside_it(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetHistogram", answer(message([2000, 0], until_ms=NOON_MS + HOUR_MS + 1)))
    result = run("histogram", "t", "--from", str(NOON_MS), "--width", "1h", "--subscription", "s")
    assert result.stdout.splitlines() == [
        "from\tuntil\trows",
        "2030-01-31 12:00:00.000+00:00\t2030-01-31 13:00:00.000+00:00\t2000",
        "2030-01-31 13:00:00.000+00:00\t2030-01-31 13:00:00.001+00:00\t0",
    ]
    assert result.stderr.splitlines() == [
        "tarry: 2,000 rows in these bars, 3 pending before them, 4 after them; as of 2030-01-31 12:00:00.000+00:00",
        "tarry: segments: 5 counted by their metadata, 6 read",
    ]
    (asked,) = daemon.requests("GetHistogram")
    assert asked == inspect_pb2.GetHistogramRequest(topic="t", from_ms=NOON_MS, width_ms=HOUR_MS, subscription="s")


def test_a_histogram_in_json_is_the_answer(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetHistogram", answer(message([2000, 0])))
    parsed = json.loads(run("histogram", "t", "--from", str(NOON_MS), "--width", "1h", "--json").stdout)
    assert (parsed["rows"], parsed["from_ms"], parsed["rows_after"], parsed["segments_read"]) == (
        [2000, 0], NOON_MS, 4, 6
    )  # fmt: skip


def test_without_from_and_width_bars_are_round_and_reach_the_last_row(daemon: FakeDaemon, run: Run) -> None:
    last_due_ms = time.time_ns() // 1_000_000 + 20 * HOUR_MS
    daemon.script("GetTopicStats", answer(inspect_pb2.GetTopicStatsResponse(topic="t", last_due_ms=last_due_ms)))
    daemon.script("GetHistogram", answer(message([1])))
    assert run("histogram", "t").exit_code == 0
    (asked,) = daemon.requests("GetHistogram")
    assert (asked.width_ms, asked.until_ms, asked.from_ms % HOUR_MS) == (HOUR_MS, 0, 0)
    assert 0 <= last_due_ms - 20 * HOUR_MS - asked.from_ms < 2 * HOUR_MS


def test_a_bar_without_width_is_refused(daemon: FakeDaemon, run: Run) -> None:
    result = run("histogram", "t", "--width", "0s")
    assert result.exit_code == output.EXIT_INPUT
    assert "a bar is at least 1ms wide" in result.stderr
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("span_ms", "width_ms"),
    [
        (1, 1),
        (30, 1),
        (31, 2),
        (60_000, 2_000),
        (HOUR_MS, 120_000),
        (24 * HOUR_MS, HOUR_MS),
        (365 * 24 * HOUR_MS, 14 * 24 * HOUR_MS),
    ],
)
def test_widths_are_round(span_ms: int, width_ms: int) -> None:
    assert pending.round_width_ms(span_ms) == width_ms


@pytest.mark.parametrize("span_ms", [1, 999, 10**6, 10**10, 10**13, 2**63])
def test_no_span_makes_more_bars_than_wanted(span_ms: int) -> None:
    assert span_ms <= pending.round_width_ms(span_ms) * pending.BARS_WANTED


def test_bars_begin_at_local_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    begin_ms = pending.first_begin_ms(NOON_MS, 24 * HOUR_MS)
    assert output.time_text(begin_ms) == "2030-01-31 00:00:00.000+05:30"
    assert pending.first_begin_ms(NOON_MS, HOUR_MS) == NOON_MS - HOUR_MS // 2


def drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, answered: Any
) -> list[str]:
    """The lines below the title, without their colours."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    pending.draw(inspection.Histogram.from_message(answered), "Rows")
    title, *lines = rich.text.Text.from_ansi(capsys.readouterr().out).plain.splitlines()
    assert title.strip() == "Rows"
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_longest_bar_has_the_whole_width_and_the_others_their_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    most, half, least, none = drawn(monkeypatch, capsys, columns, message([2_000_000, 1_000_000, 1, 0]))
    assert len(most) == columns
    assert abs(half.count("█") - most.count("█") / 2) <= 1
    assert least.endswith("▏"), "a single row is seen"
    assert none.endswith(" 0")
    assert most.startswith("2030-01-31 12:00 - 13:00  2,000,000  ")
    assert half.startswith("           13:00 - 14:00  1,000,000  "), "the day is said once"


def test_a_run_of_many_empty_bars_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn(monkeypatch, capsys, 80, message([1, *[0] * 6, 1, *[0] * 7, 1]))
    assert len(lines) == 8 + 1 + 1
    assert lines[8].strip() == "... 7 empty bars"
    assert lines[9].startswith("2030-02-01 03:00 - 04:00")


@pytest.mark.parametrize(
    ("width_ms", "label"),
    [
        (1, "2030-01-31 12:00:00.000 - 12:00:00.001"),
        (1_000, "2030-01-31 12:00:00 - 12:00:01"),
        (60_000, "2030-01-31 12:00 - 12:01"),
        (24 * HOUR_MS, "2030-01-31 12:00 - 02-01 12:00"),
    ],
)
def test_labels_are_as_fine_as_the_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width_ms: int, label: str
) -> None:
    (line,) = drawn(monkeypatch, capsys, 80, message([5], width_ms=width_ms))
    assert line.startswith(label)


def test_bars_of_whole_days_are_labelled_with_days(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = message([5], width_ms=48 * HOUR_MS)
    answered.from_ms -= 12 * HOUR_MS
    answered.until_ms -= 12 * HOUR_MS
    assert drawn(monkeypatch, capsys, 80, answered)[0].startswith("2030-01-31 - 2030-02-02  5  ")


def test_a_last_bar_that_is_cut_short_makes_no_label_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = message([5, 5], until_ms=NOON_MS + HOUR_MS + 34 * 60_000 + 1)
    assert drawn(monkeypatch, capsys, 80, answered)[1].startswith("           13:00 - 13:34  5  ")
