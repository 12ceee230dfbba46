"""Tables, notes, times and durations."""

from __future__ import annotations

import datetime
import enum
import json
import sys
import time

import click
import pytest

from tarry import errors
from tarry.cli import output, rows


def test_times_are_local_with_their_offset() -> None:
    text = output.time_text(1_896_091_200_123)
    assert datetime.datetime.fromisoformat(text).timestamp() == pytest.approx(1_896_091_200.123)
    assert output.time_text(None) == "-"
    assert output.time_text(2**63) == f"{2**63} ms"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.MonkeyPatch:
    # The class: `capsys` makes another stdout for the test than for its fixtures.
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Topics", ("topic", "pending"), [("[red]a", 1234567)], empty="none")
    output.facts("Facts", {"pending": 1234567})
    shown = capsys.readouterr()
    assert "[red]a" in shown.out
    assert shown.out.count("1,234,567") == 2
    assert "\t" not in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(("columns", "is_table"), [("80", True), ("50", False)])
def test_a_narrow_terminal_gets_a_block_a_row(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, is_table: bool
) -> None:
    terminal.setenv("COLUMNS", columns)
    due = output.At(1_896_091_200_123)
    output.table("Things", ("name", "rows", "due"), [("x" * 30, 1234567, due)], empty="none")
    shown = capsys.readouterr().out
    assert ("─" in shown) == is_table
    for value in ("name", "x" * 30, "1,234,567", due.short):
        assert value in shown
    assert str(due) not in shown


@pytest.mark.usefixtures("terminal")
def test_a_table_without_rows_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Topics", ("topic", "pending"), [], empty="there are none")
    assert capsys.readouterr() == ("", "tarry: there are none\n")


def test_a_time_in_a_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Times", ("at",), [(output.At(1_896_091_200_123),), (output.At(None),)], empty="none")
    assert capsys.readouterr().out.splitlines() == ["at", output.time_text(1_896_091_200_123), "-"]


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("UTC", "2030-01-31 12:00:00Z"),
        ("Asia/Kolkata", "2030-01-31 17:30:00+05:30"),
        ("America/New_York", "2030-01-31 07:00:00-05"),
    ],
)
def test_a_time_in_a_terminal_has_its_zone(monkeypatch: pytest.MonkeyPatch, zone: str, shown: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert output.At(1_896_091_200_123).short == shown
        assert rows.Moment().convert(shown, None, None) == 1_896_091_200_000, "it can be given to an option"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_is_no_time_of_a_calendar_is_shown_as_it_is() -> None:
    assert (output.At(None).short, output.At(2**63).short) == ("-", f"{2**63} ms")


def test_a_list_in_a_table_is_whole_in_a_pipe_and_short_in_a_terminal() -> None:
    ranges = tuple(f"{first}-{first + 9}" for first in range(0, 50, 10))
    assert (str(output.Several(())), output.Several(()).short) == ("-", "-")
    assert output.Several(ranges[:3]).short == str(output.Several(ranges[:3])) == "0-9, 10-19, 20-29"
    assert str(output.Several(ranges)) == "0-9, 10-19, 20-29, 30-39, 40-49"
    assert output.Several(ranges).short == "0-9, 10-19, 20-29 and 2 more"
    assert str(output.Several(ranges[:2], is_all=False)) == "0-9, 10-19, ..."
    assert output.Several(ranges, is_all=False).short == "0-9, 10-19, 20-29 and many more"


class Form(enum.IntEnum):
    ROUND_ONE = 1


def test_what_is_not_printable_in_a_name_is_escaped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Names", ["name"], [["a\x1b[31mb\tc\nd \u00e9"]], empty="none")
    output.facts("Name", {"name": "a\nb"})
    assert capsys.readouterr().out.splitlines() == [
        "name",
        r"a\x1b[31mb\tc\nd é",
        "name\ta\\nb",
    ]


@pytest.mark.usefixtures("terminal")
def test_what_is_not_printable_in_a_name_is_escaped_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Names", ["name", "list"], [["a\x1b[2Jb", output.Several(("c\rd",))]], empty="none")
    assert r"a\x1b[2Jb" in (shown := capsys.readouterr().out)
    assert r"c\rd" in shown
    assert "\x1b[2J" not in shown


def test_what_is_not_printable_is_escaped_in_lines_notes_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x9b5n\u202eb"
    output.line(f"{hostile} is deleted")
    output.note(hostile)
    with pytest.raises(click.exceptions.Exit), output.failures("host:1"):
        raise errors.NotFound(f"topic {hostile} is not there")
    shown = capsys.readouterr()
    assert shown.out == "a\\x1b[2J\\x9b5n\\u202eb is deleted\n"
    assert (shown.err.count(r"a\x1b[2J\x9b5n\u202eb"), len(shown.err.splitlines())) == (2, 2)
    assert shown.err.replace("\n", "").isprintable()


@pytest.mark.usefixtures("terminal")
def test_what_is_not_printable_is_escaped_in_titles(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Rows of \x9b5n\u202e", ["name"], [["a"]], empty="none")
    output.facts("Facts of \x9b5n\u202e", {"name": "a"})
    shown = capsys.readouterr().out
    assert r"\x9b5n" in shown
    assert not {"\x9b", "\u202e"} & set(shown)


def test_json_has_names_for_the_members_of_an_enum(capsys: pytest.CaptureFixture[str]) -> None:
    output.as_json({"form": Form.ROUND_ONE, "forms": [(1, Form.ROUND_ONE)], "none": None})
    assert json.loads(capsys.readouterr().out) == {"form": "round_one", "forms": [[1, "round_one"]], "none": None}


@pytest.mark.parametrize("text", ["0ms", "1ms", "1500ms", "1s", "30s", "1m30s", "1h", "12h", "7d", "1d1s"])
def test_a_duration_is_shown_as_it_is_written(text: str) -> None:
    assert output.duration_text(rows.Duration().convert(text, None, None)) == text


def test_in_a_terminal_columns_that_say_nothing_are_left_out() -> None:
    names = ("ledger", "batch index", "redelivered", "back at", "due")
    one, other = ("7", "-", 0, output.At(None), output.At(5)), ("7", "0", 0, output.At(None), output.At(6))
    optional = {"batch index", "redelivered", "back at"}
    assert output.for_terminal(names, [one], optional=optional, left_out={"due"}) == (["ledger"], [["7"]])
    # A batch index of 0 is a name, not a count of nothing.
    shown, rows = output.for_terminal(names, [one, other], optional=optional)
    assert (shown, [row[1] for row in rows]) == (["ledger", "batch index", "due"], ["-", "0"])
