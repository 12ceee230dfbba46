"""The line of each key of a TOML file, in every form in which a key may be written."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from unittest import mock

import pytest

from tarry_relay import toml_lines

TEXT = '''
# A comment with [a.table] and a.key = 1
plain = 1
dotted.one = 2
dotted.two = """
[table]
key = 1
"""
inline = { one = 1, two = { three = 3 }, four = [
  4,
] }
array = [  # [
  { one = 1 },

  # ]
  { two = 2 },
  [
    5,
  ],
]

[table]
key = 'key = 2'
"quoted key" = 3

[[tables]]
one = 1
[tables.below]
key = 1

[[tables]]
two = 2
last = 3'''


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (["plain"], "plain = 1"),
        (["dotted"], "dotted.one = 2"),
        (["dotted", "two"], 'dotted.two = """'),
        (["inline", "one"], "inline = { one = 1, two = { three = 3 }, four = ["),
        (["inline", "two", "three"], "inline = { one = 1, two = { three = 3 }, four = ["),
        (["inline", "four"], "inline = { one = 1, two = { three = 3 }, four = ["),
        (["inline", "four", 0], "  4,"),
        (["array"], "array = [  # ["),
        (["array", 0, "one"], "  { one = 1 },"),
        (["array", 1], "  { two = 2 },"),
        (["array", 2], "  ["),
        (["table"], "[table]"),
        (["table", "key"], "key = 'key = 2'"),
        (["table", "quoted key"], '"quoted key" = 3'),
        (["tables"], "[[tables]]"),
        (["tables", 0, "one"], "one = 1"),
        (["tables", 0, "below", "key"], "key = 1"),
        (["tables", 1, "two"], "two = 2"),
        (["tables", 1, "last"], "last = 3"),
    ],
)
def test_a_key_stands_on_the_line_where_it_is_written(keys: Sequence[str | int], shown: str) -> None:
    line = toml_lines.line_of(TEXT, keys)
    assert line is not None
    assert TEXT.split("\n")[line - 1] == shown


def test_an_item_of_an_array_of_tables_stands_where_its_table_begins() -> None:
    first, second = (toml_lines.line_of(TEXT, ["tables", index]) for index in range(2))
    assert first is not None
    assert second == first + 5


def test_a_text_in_several_lines_is_not_taken_for_keys() -> None:
    text = 'text = """\n[table]\nkey = 1\n"""\n[table]\nkey = 2\n'
    assert toml_lines.line_of(text, ["table", "key"]) == 6


@pytest.mark.parametrize("keys", [["gone"], ["plain", "gone"], ["tables", 2], ["table", 0], ["table", "gone"]])
def test_a_key_that_is_not_there_has_no_line(keys: Sequence[str | int]) -> None:
    assert toml_lines.line_of(TEXT, keys) is None


def test_a_long_file_is_read_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"key{number} = {number}\n" for number in range(4_000))
    read = mock.Mock(wraps=tomllib.loads)
    monkeypatch.setattr(tomllib, "loads", read)
    assert toml_lines.line_of(text, ["key3210"]) == 3_211
    assert read.call_count < 20
