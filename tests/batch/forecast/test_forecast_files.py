"""The forms of a forecast: Parquet, PNG, terminal, JSON; and files that are whole or not there."""

from __future__ import annotations

import datetime
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import msgspec
import numpy as np
import pandas
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from batch.forecast import parquet as forecast_parquet
from batch.forecast import picture as forecast_picture
from batch.forecast import text as forecast_text
from batch.forecast.files import OutputFile, Unwritable
from batch.forecast.result import Forecast, TopicForecast, Unread
from tests.batch.forecast._support.forecasts import EXAMPLE, HOURS, MINUTES, forecast, owed, topic


def at(hour: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(HOURS.begin_ms(hour) / 1000, datetime.UTC)


# ---- Parquet


def test_a_parquet_file_has_a_row_for_each_topic_owner_and_step(tmp_path: Path) -> None:
    forecast_parquet.write(EXAMPLE, tmp_path / "due.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "due.parquet")
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("mail", "eu", at(2), 4, 3, 7),
        ("mail", "eu", at(3), 0, 1, 1),
        ("orders", None, at(0), 10, 0, 20),
        ("orders", None, at(2), 30, 0, 60),
        ("orders", None, at(47), 5, 0, 10),
    ]
    assert table.column_names == ["topic", "subscription", "due_from", "rows", "redeliveries", "deliveries"]
    assert str(table.schema.field("due_from").type) == "timestamp[ms, tz=UTC]"


def test_a_parquet_file_says_what_no_step_has(tmp_path: Path) -> None:
    forecast_parquet.write(EXAMPLE, tmp_path / "due.parquet")
    metadata = pyarrow.parquet.read_schema(tmp_path / "due.parquet").metadata
    assert json.loads(metadata[b"tarry.forecast"]) == {
        "as_of": "2025-11-21T23:20:34.567Z",
        "step": "hour",
        "until": "2025-11-23T23:00:00.000Z",
        "overdue_rows": 3,
        "beyond_rows": 9,
        "unread_rows": 0,
    }


def test_a_parquet_file_is_read_by_pandas(tmp_path: Path) -> None:
    forecast_parquet.write(EXAMPLE, tmp_path / "due.parquet")
    frame = pandas.read_parquet(tmp_path / "due.parquet")
    by_hour = frame.groupby("due_from")["rows"].sum()
    assert by_hour[pandas.Timestamp(at(2))] == 34
    assert frame.groupby("topic", observed=True)["deliveries"].sum().to_dict() == {"mail": 8, "orders": 90}


def documented(language: str, place: int) -> str:
    """An example of the documentation."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "FORECAST.md").read_text(encoding="utf-8")
    examples: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return examples[place]


def test_the_example_for_pandas_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    forecast_parquet.write(EXAMPLE, Path("due.parquet"))
    exec(documented("python", 0), {})
    shown = capsys.readouterr().out
    assert re.search(r"2025-11-22 01:00:00\+00:00 +67\n", shown)
    assert "2025-11-21T23:20:34.567Z 3" in shown


def test_the_example_for_spark_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spark: SparkSession
) -> None:
    forecast_parquet.write(EXAMPLE, tmp_path / "due.parquet")
    exec(documented("python", 1).replace("due.parquet", str(tmp_path / "due.parquet")), {"spark": spark})
    shown = [line.strip("|").replace(" ", "").split("|") for line in capsys.readouterr().out.splitlines()]
    assert shown[3:5] == [["orders", "45", "90"], ["mail", "4", "8"]]


def test_many_topics_are_many_groups_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_parquet, "GROUP_ROWS", 100)
    topics = [topic(f"{number:03}", owed(dict.fromkeys(range(48), number))) for number in range(1, 21)]
    forecast_parquet.write(forecast(topics), tmp_path / "due.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "due.parquet")
    assert file.num_row_groups == 7
    frame = file.read().to_pandas()
    assert len(frame) == 20 * 48
    assert (frame["rows"].astype(int) == frame["topic"].astype(int)).all()


def test_a_forecast_of_nothing_is_a_file_without_rows(tmp_path: Path) -> None:
    forecast_parquet.write(forecast([]), tmp_path / "due.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "due.parquet").num_rows == 0


# ---- PNG


def pixels(path: Path) -> np.ndarray:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    return np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int)


def columns_of(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    """In how many columns of the picture a colour is, left of the legend."""
    return int((picture[:, :900] == colour).all(axis=2).any(axis=0).sum())


def test_a_picture_has_a_colour_for_each_topic(tmp_path: Path) -> None:
    forecast_picture.write(EXAMPLE, tmp_path / "due.png")
    picture = pixels(tmp_path / "due.png")
    assert picture.shape == (600, 1200, 3)
    # Three bars of orders, two of mail; each has a 48th of the width.
    orders, mail = columns_of(picture, (0x00, 0x72, 0xB2)), columns_of(picture, (0xE6, 0x9F, 0x00))
    assert 36 <= orders <= 66
    assert 24 <= mail <= 44


def test_topics_without_a_colour_of_their_own_are_drawn_together(tmp_path: Path) -> None:
    topics = [topic(f"t{number}", owed({number: 10 + number})) for number in range(30)]
    forecast_picture.write(forecast(topics), tmp_path / "due.png")
    assert columns_of(pixels(tmp_path / "due.png"), (0xB0, 0xB0, 0xB0)) > 200


def test_any_name_of_a_topic_can_be_drawn(tmp_path: Path) -> None:
    names = ["_private", "$a_b$ c", "日本\x1b[31m\n", "x" * 1000, "\U0001f600"]
    topics = [topic(name, owed({1: 2})) for name in names]
    forecast_picture.write(forecast(topics, MINUTES), tmp_path / "due.png")
    assert pixels(tmp_path / "due.png").shape == (600, 1200, 3)


def test_a_picture_of_nothing_says_so(tmp_path: Path) -> None:
    forecast_picture.write(forecast([topic("t", owed({}))]), tmp_path / "due.png")
    middle = pixels(tmp_path / "due.png")[250:350, 400:800]
    assert (middle < 128).any()


# ---- terminal and JSON


def text_of(found: Forecast, top: int = 10, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    forecast_text.print_forecast(found, top, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_totals_a_chart_and_the_busiest() -> None:
    lines = [" ".join(line.split()) for line in text_of(EXAMPLE).splitlines()]
    assert lines[:5] == [
        "forecast 3 topics, 2025-11-21 23:20 to 2025-11-23 23:00 UTC, by the hour",
        "due 49 rows, and 4 redeliveries: 98 deliveries",
        "peak 37 in the hour of 2025-11-22 01:00 UTC",
        "overdue 3 rows are due already and not acknowledged",
        "beyond 9 come due later",
    ]
    chart = lines.index("Rows due per 2 hours, from (UTC)")
    assert lines[chart + 1].startswith("2025-11-21 22:00 10 ██")
    assert lines[chart + 2].startswith("2025-11-22 00:00 37 ██")
    assert lines[chart + 3].startswith("02:00 1 ")
    assert lines[chart + 4] == "04:00 0"
    assert len(lines[chart + 2]) > len(lines[chart + 1]) > len(lines[chart + 3])
    assert "orders 45 0 84.9% 90 30 2025-11-22 01:00 3 9" in lines
    assert "mail 4 4 15.1% 8 7 2025-11-22 01:00 0 0" in lines
    assert "2025-11-22 01:00 37 orders 30, mail 7" in lines


def test_the_terminal_shows_no_more_than_it_is_asked_for() -> None:
    assert "mail" not in text_of(EXAMPLE, top=1).split("Busiest topics")[1].split("Busiest hours")[0]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (120, "topic rows redeliveries share deliveries peak hour from (UTC) overdue beyond"),
        (100, "topic rows redeliveries deliveries peak hour from (UTC) overdue"),
        (80, "topic rows peak hour from (UTC) overdue"),
        (70, "topic rows peak hour overdue"),
    ],
)
def test_a_narrow_terminal_shows_the_names_of_topics_and_fewer_numbers(width: int, columns: str) -> None:
    topics = [topic("orders.reminders.of.eu", owed({1: 2_000_000}, receivers=2)), *EXAMPLE.topics]
    lines = [" ".join(line.split()) for line in text_of(forecast(topics), width=width).splitlines()]
    assert columns in lines
    assert any(line.startswith("orders.reminders.of.eu 2,000,000 ") for line in lines)


def test_what_is_alike_for_all_is_not_shown() -> None:
    lines = [" ".join(line.split()) for line in text_of(forecast([topic("t", owed({1: 2}))])).splitlines()]
    assert "topic rows share peak hour from (UTC) overdue beyond" in lines


def test_nothing_to_come_is_said() -> None:
    assert "none: nothing comes due" in text_of(forecast([]))


def test_what_was_not_counted_is_said() -> None:
    assert "17 rows that cannot be read" in text_of(forecast([topic("t", owed({1: 1}), unread=17)]))


def test_the_name_of_a_topic_does_nothing_to_the_terminal() -> None:
    text = text_of(forecast([topic("[bold]a\x1b[31m\r\n", owed({1: 1}))]))
    assert "[bold]a\\x1b[31m\\r\\n" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in text_of(EXAMPLE, width=width).splitlines())


def test_json_has_the_same_numbers() -> None:
    unread = Unread("mail", "shards/01/b", 17, "damaged", True)
    document = json.loads(msgspec.json.encode(forecast_text.document(Forecast(HOURS, EXAMPLE.topics, (unread,)), 1)))
    assert document["as_of"] == "2025-11-21T23:20:34.567Z"
    assert (document["from"], document["until"]) == ("2025-11-21T23:00:00.000Z", "2025-11-23T23:00:00.000Z")
    assert (document["rows"], document["redeliveries"], document["deliveries"]) == (49, 4, 98)
    assert (document["overdue_rows"], document["beyond_rows"]) == (3, 9)
    assert document["peak"] == {"from": "2025-11-22T01:00:00.000Z", "load": 37}
    assert sum(document["chart"]["load"]) == 53
    assert document["unread"][0]["bucket"] == "shards/01/b"
    (busiest,) = document["busiest_topics"]
    assert (busiest["topic"], busiest["rows"], busiest["overdue_rows"], busiest["beyond_rows"]) == ("orders", 45, 3, 9)
    assert document["busiest_steps"] == [
        {
            "from": "2025-11-22T01:00:00.000Z",
            "load": 37,
            "topics": [{"topic": "orders", "load": 30}, {"topic": "mail", "load": 7}],
        }
    ]


def test_json_of_nothing_has_no_peak() -> None:
    assert forecast_text.document(forecast([]), 5)["peak"] is None
    assert forecast_text.document(forecast([TopicForecast(topic="t", shard=0, overdue_rows=2)]), 5)["busiest_topics"]


# ---- files


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_an_existing_file_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "due.png"
    path.write_text("old")
    with OutputFile(path) as file:
        file.temporary.write_text("new")
        assert path.read_text() == "old"
        file.complete()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_stays_when_the_work_fails(tmp_path: Path) -> None:
    path = tmp_path / "due.png"
    path.write_text("old")

    def fail() -> None:
        with OutputFile(path) as file:
            file.temporary.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match=r"absent/due.png: No such file or directory"):
        OutputFile(tmp_path / "absent" / "due.png").__enter__()
    with pytest.raises(Unwritable, match=r"cannot write .*: it is a directory"):
        OutputFile(tmp_path).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(Unwritable, match=r"cannot write .*: Not a directory"):
        OutputFile(tmp_path / "file" / "due.png").__enter__()
