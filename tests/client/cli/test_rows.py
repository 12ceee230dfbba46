"""Rows, positions, times and ranges as people write them."""

from __future__ import annotations

import time

import click
import pytest

from tarry.cli import rows


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [("500ms", 500), ("5s", 5_000), ("1.5h", 5_400_000), ("1h30m", 5_400_000), ("7d", 604_800_000)],
)
def test_durations(text: str, expected_ms: int) -> None:
    assert rows.Duration().convert(text, None, None) == expected_ms


@pytest.mark.parametrize("text", ["", "5", "5x", "s", "1h 30m", "-5s", "\u0665s", "9" * 400 + "d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a duration; write for example 500ms|is too long"):
        rows.Duration().convert(text, None, None)


def test_times_may_be_told_from_now() -> None:
    before_ms = time.time_ns() // 1_000_000
    now_ms = rows.Moment().convert("now", None, None)
    later_ms = rows.Moment().convert("+1h30m", None, None)
    after_ms = time.time_ns() // 1_000_000
    assert before_ms <= now_ms <= after_ms
    assert before_ms <= later_ms - 5_400_000 <= after_ms


@pytest.mark.parametrize("text", ["soon", "+", "+1x", "-1h", "1h", "0001-01-01", "9" * 5_000])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a time; write for example now|is not a duration"):
        rows.Moment().convert(text, None, None)


@pytest.mark.parametrize("text", ["20270131", "1790000000", "5", str(2**64)])
def test_a_number_that_is_no_time_is_refused_where_it_is_no_name(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"'{text}' (is|can)"):
        rows.Moment().convert(text, None, None)
    if int(text) < 2**64:
        assert rows.Moment(any_number=True).convert(text, None, None) == int(text), (
            "of a delivery, any time may be named"
        )


def test_the_last_entry_there_is_can_be_added() -> None:
    entries = rows.EntryRange().convert(f"{2**64 - 2}-{2**64 - 1}", None, None)
    (batch,) = rows.from_options(1, entries, deliver_at_ms=None, delay_ms=1, key=None, batch_rows=10)
    assert batch.entry_id.tolist() == [2**64 - 2, 2**64 - 1]


def test_positions_of_a_file_come_in_batches() -> None:
    lines = [f'{{"ledger_id": 1, "entry_id": {entry}, "deliver_at_ms": {2**64 - 1}, "late": 1}}' for entry in range(5)]
    batches = list(rows.positions_from_json([*lines[:2], "", *lines[2:]], name="f", batch_rows=2))
    assert [batch.entry_id.tolist() for batch, _ in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0][0].deliver_at_ms.tolist() == [2**64 - 1] * 2
    assert batches[0][0].batch_index is None
    assert [written.place(0, "entry_id") for _, written in batches] == [
        f"f, line {line}: entry_id" for line in (1, 4, 6)
    ]


def test_positions_of_a_file_may_be_messages_of_batches() -> None:
    lines = ['{"ledger_id": 1, "entry_id": 2, "deliver_at_ms": 3, "batch_index": 4}', '{"ledger_id": 1, "entry_id": 2}']
    ((positions, _),) = rows.positions_from_json(lines, name="f", batch_rows=2, timed=False)
    assert positions.deliver_at_ms.tolist() == [3, 0]
    assert positions.batch_indexes().tolist() == [4, 2**32 - 1]
    with pytest.raises(click.UsageError, match="f, line 2: deliver_at_ms is None"):
        list(rows.positions_from_json(lines, name="f", batch_rows=2))
    with pytest.raises(click.UsageError, match="f, line 1: batch_index is 65536; it is at most 65535"):
        list(rows.positions_from_json([lines[0].replace("4}", "65536}")], name="f", batch_rows=2))


def test_times_in_the_past_may_be_told_from_now_where_they_make_sense() -> None:
    before_ms = time.time_ns() // 1_000_000
    ago_ms = rows.Moment(past=True).convert("-1h30m", None, None)
    assert before_ms <= ago_ms + 5_400_000 <= time.time_ns() // 1_000_000
    assert rows.Moment(past=True).convert("-365000d", None, None) == 0


def test_positions_of_a_huge_range_are_made_as_they_are_needed() -> None:
    entries = rows.EntryRange().convert(f"0-{2**64 - 1}", None, None)
    first, _ = next(rows.positions_from_options(7, entries, 9, batch_index=None, redelivery_count=None, batch_rows=2))
    assert [column.tolist() for column in first[:3]] == [[7, 7], [0, 1], [9, 9]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "f, line 2: not JSON"),
        ("1" * 5_000, "f, line 2: not JSON"),
        ("[1, 2, 3]", "f, line 2: not an object such as `tarry get --json` prints"),
        ('{"ledger_id": 1, "entry_id": 2}', "f, line 2: deliver_at_ms is None; it must be an integer from 0"),
        ('{"ledger_id": true, "entry_id": 2, "deliver_at_ms": 3}', "f, line 2: ledger_id is True"),
        (f'{{"ledger_id": 1, "entry_id": {2**64}, "deliver_at_ms": 3}}', "f, line 2: entry_id is 18446744073709551616"),
    ],
)
def test_a_bad_position_is_told_with_its_line(line: str, says: str) -> None:
    good = '{"ledger_id": 1, "entry_id": 2, "deliver_at_ms": 3}'
    with pytest.raises(click.UsageError) as refused:
        list(rows.positions_from_json([good, line], name="f", batch_rows=10))
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["a"], "--set a: write NAME=VALUE"),
        (["=1"], "--set =1: write NAME=VALUE"),
        (["a=1", "a=2"], "--set a=2: a is given twice"),
    ],
)
def test_names_and_values_are_checked(texts: list[str], says: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        rows.names_and_values(texts, option="--set")
    assert refused.value.message == says


def test_a_value_may_hold_what_separates_it_from_its_name() -> None:
    assert rows.names_and_values(["a=1=2", "b="], option="--property") == {"a": "1=2", "b": ""}


@pytest.mark.parametrize(
    ("text", "name", "slots"),
    [
        ("gate-1", "gate-1", []),
        ("gate-1=0-16383,49152-65535", "gate-1", [(0, 16_383), (49_152, 65_535)]),
        ("gate=1=7", "gate=1", [(7, 7)]),
        ("gate=", "gate=", []),
        ("gate=a", "gate=a", []),
    ],
)
def test_consumers_may_be_told_with_their_slots(text: str, name: str, slots: list[tuple[int, int]]) -> None:
    consumer = rows.ConsumerName().convert(text, None, None)
    assert (consumer.name, [(each.first, each.last) for each in consumer.hash_ranges]) == (name, slots)


def test_slots_from_higher_to_lower_are_refused() -> None:
    with pytest.raises(click.BadParameter, match="must go from lower to higher slots"):
        rows.ConsumerName().convert("gate-1=9-5", None, None)
