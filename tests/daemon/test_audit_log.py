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
    told.tell("call", topic='a\n"b', identity="")
    told.close()
    (line,) = lines(path)
    assert (line["message"], line["topic"], line["identity"]) == ("call", 'a\n"b', "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path, former = tmp_path / "audit.log", tmp_path / "audit.log.1"
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    told.tell("one")
    path.rename(former)
    told.tell("two")
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
    told.tell("call", topic="t")
    with pytest.raises(OSError, match="No space"):
        told.close()
    assert "access.audit_file cannot be written" in caplog.text


def test_too_many_refusals_are_counted_in_the_next_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.log"
    now_s = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    told = audit_log.AuditLog(AccessSettings(audit_file=str(path)))
    for _ in range(audit_log.REFUSALS_PER_SECOND_MAX + 5):
        told.tell_refusal(text="x" * 5000)
    now_s += 1
    told.tell_refusal(text="y")
    told.close()
    written = lines(path)
    assert len(written) == audit_log.REFUSALS_PER_SECOND_MAX + 1
    assert (written[-1]["text"], written[-1]["left_out"]) == ("y", 5)
    assert len(written[0]["text"]) == audit_log.TEXT_MAX


def test_there_is_none_without_identities_unless_a_file_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit_log.AuditLog(AccessSettings()).tell("nobody")
    audit_log.AuditLog(AccessSettings(identities_file="i")).tell("somebody", topic="t")
    assert [(record.getMessage(), vars(record)["topic"]) for record in caplog.records] == [("somebody", "t")]
