"""The two forms of a log line."""

from __future__ import annotations

import io
import json
import logging
import time
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


HOSTILE = "a\x1b[2J\x9b5n\x7f\u202eb\u2066\u2028\U000e0001"


def test_marks_that_move_a_terminal_are_escaped_in_text() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("daemon.x").exception("topic %s", HOSTILE, extra={"topic": HOSTILE})
    lines = stream.getvalue().splitlines()
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)
    assert lines[0].count(r"a\u001b[2J\u009b5n\u007f\u202eb\u2066\u2028\udb40\udc01") == 2


def test_marks_that_move_a_terminal_are_escaped_in_json() -> None:
    stream = io.StringIO()
    logs.configure(form="json", stream=stream)
    logging.getLogger("daemon.x").warning("topic %s", HOSTILE, extra={"topic": f"{HOSTILE} Zürich"})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert "Zürich" in line
    assert json.loads(line)["topic"] == f"{HOSTILE} Zürich"


def test_lines_of_grpc_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    now_s = 600.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    for _ in range(logs.GRPC_LINES_MAX + 7):
        of_grpc.error("something")
        logging.getLogger("daemon.x").error("ours")
    now_s += 60
    of_grpc.error("the last")
    lines = stream.getvalue().splitlines()
    assert sum("something" in line for line in lines) == logs.GRPC_LINES_MAX
    assert sum("ours" in line for line in lines) == logs.GRPC_LINES_MAX + 7
    assert lines[-1].endswith("the last left_out=7")
