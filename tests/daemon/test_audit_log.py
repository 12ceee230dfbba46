"""The file of the audit log: who may read it, what is done when it is moved or full, and how many lines there are."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from daemon import audit_log, errors
from daemon.settings import AccessSettings


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_a_json_object_in_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    told.tell("call", "", changed=True, topic='a\n"b')
    told.close()
    (line,) = lines(path)
    assert (line["message"], line["topic"], line["identity"]) == ("call", 'a\n"b', "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path, former = tmp_path / "audit.log", tmp_path / "audit.log.1"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    told.tell("one", "", changed=True)
    path.rename(former)
    told.tell("two", "", changed=True)
    told.close()
    assert [[line["message"] for line in lines(each)] for each in (former, path)] == [["one"], ["two"]]


def test_a_link_that_somebody_has_planted_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(errors.InvalidArgument, match=r"access.audit_file .*audit.log cannot be opened"):
        audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    assert not (tmp_path / "victim").exists()


def test_a_line_that_cannot_be_written_is_an_error_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told = audit_log.AuditLog(AccessSettings(audit_file="/dev/full"))
    told.tell("call", "", changed=True, topic="t")
    with pytest.raises(OSError, match="No space"):
        told.close()
    assert "access.audit_file cannot be written" in caplog.text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which lines are limited (seconds), as its only item."""
    now_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("identity", "most"), [("", audit_log.UNKNOWN_LINES_MAX), ("one", audit_log.IDENTITY_LINES_MAX)]
)
def test_too_many_refusals_are_counted_in_the_next_line(
    tmp_path: Path, clock: list[float], identity: str, most: int
) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    for _ in range(most + 5):
        told.tell("refused", identity, changed=False, text="x" * 5000)
    clock[0] += 1
    told.tell("refused", identity, changed=False, text="y")
    told.close()
    written = lines(path)
    assert len(written) == most + 1
    assert (written[-1]["text"], written[-1]["left_out"]) == ("y", 5)
    assert len(written[0]["text"]) == audit_log.TEXT_MAX


def test_callers_without_an_identity_hide_nothing_of_identities_and_identities_nothing_of_each_other(
    tmp_path: Path, clock: list[float]
) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    for second in range(10):
        clock[0] = second
        for _ in range(100):
            told.tell("refused", "", changed=False)
            told.tell("refused", "loud", changed=False)
            told.tell("refused", "loud", changed=False)
        for number in range(8):
            told.tell("refused", "quiet", changed=False, topic=f"{second}.{number}")
    told.close()
    assert sum(line["identity"] == "quiet" for line in lines(path)) == 80
    assert sum(line["message"] == "refused" and line["identity"] == "" for line in lines(path)) == 100


def test_what_may_have_changed_something_is_never_left_out(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    del clock
    for number in range(1_000):
        told.tell("call", "one", changed=number % 2 == 0, number=number)
    told.close()
    written = lines(path)
    assert [line["number"] for line in written if line.get("number", 1) % 2 == 0] == list(range(0, 1_000, 2))
    assert sum(line.get("left_out", 0) for line in written) == 500 - audit_log.IDENTITY_LINES_MAX


def test_the_end_tells_what_was_left_out(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    del clock
    for _ in range(audit_log.UNKNOWN_LINES_MAX + 3):
        told.tell("refused", "", changed=False)
    told.close()
    assert (lines(path)[-1]["message"], lines(path)[-1]["left_out"]) == ("left out", 3)


def test_marks_that_move_a_terminal_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    told.tell("call", "", changed=True, topic="a\x1b[2J\x9b5n\x7f\u202eb\u2066")
    told.close()
    (line,) = path.read_text().splitlines()
    assert line.isprintable()
    assert json.loads(line)["topic"] == "a\x1b[2J\x9b5n\x7f\u202eb\u2066"


def test_there_is_none_without_identities_unless_a_file_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit_log.AuditLog(AccessSettings()).tell("nobody", "", changed=True)
    audit_log.AuditLog(AccessSettings(identities_file="i")).tell("somebody", "", changed=True, topic="t")
    assert [(record.getMessage(), vars(record)["topic"]) for record in caplog.records] == [("somebody", "t")]
