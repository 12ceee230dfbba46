"""The two forms of a log line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from daemon import logs


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_text_is_a_sentence_with_fields_quoted_where_needed() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger("daemon.x").warning("store is slow", extra={"operation": "put", "why": 'a "b"', "n": 3, "e": ""})
    line = stream.getvalue()
    assert line.endswith('warning daemon.x: store is slow operation=put why="a \\"b\\"" n=3 e=""\n')
    assert line[:11].count("-") == 2
    assert line.split(" ")[0].endswith("Z")


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    logs.configure(form="json", stream=stream)
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logging.getLogger("daemon.x").exception("a %s failed", "seal", extra={"shard": 3, "odd": {1}})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"], entry["shard"]) == (
        "error",
        "daemon.x",
        "a seal failed",
        3,
    )
    assert entry["odd"] == [1] or entry["odd"] == "{1}"
    assert "broken\nin two" in entry["exception"]


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    logging.getLogger("daemon.x").info("nothing")
    assert stream.getvalue() == ""
