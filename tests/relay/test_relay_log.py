"""What stands on the standard error of `tarry-relay`: its own lines alone."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from tarry_relay import relay_command
from tarry_relay.relay_command import JsonLines
from tests._support.patience import within_some_time
from tests._support.processes import run_child
from tests.client._support.authority import Authority, replaced
from tests.client._support.fake_daemon import FakeDaemon

# As the command does it: the relay's package first, which loads the client, which loads gRPC
PROGRAM = """
import sys
import tarry_relay.relay_command
import tarry

address, ca_file, timeout_s = sys.argv[1:]
with tarry.Client(address, tls=tarry.Tls(ca_file=ca_file), timeout_s=float(timeout_s)) as client:
    try:
        client.lookup("t")
    except tarry.DeadlineExceeded as error:
        print(error)
"""


def test_grpc_prints_no_lines_of_its_own_among_those_of_the_log(tmp_path: Path) -> None:
    daemon = FakeDaemon(credentials=Authority().of_daemon())
    other = replaced(tmp_path / "other.pem", Authority().certificate)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}

    def story(seconds: float) -> None:
        ended = run_child([sys.executable, "-c", PROGRAM, daemon.address, str(other), str(seconds)], env=environment)
        assert "CERTIFICATE_VERIFY_FAILED" in ended.stdout
        assert ended.stderr == ""

    try:
        within_some_time(story)
    finally:
        daemon.stop()


def test_marks_that_move_a_terminal_are_escaped() -> None:
    hostile = "a\x1b[2J\x9b5n\u202eb"
    line = JsonLines().format(logging.makeLogRecord({"msg": hostile, "target": hostile, "odd": {1}}))
    assert line.isprintable()
    assert (json.loads(line)["message"], json.loads(line)["target"]) == (hostile, hostile)


def test_a_failure_is_one_line_whatever_a_name_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        relay_command._end("target a\x9b5n\u202eb is gone", 1)
    assert capsys.readouterr().err == "tarry-relay: target a\\x9b5n\\u202eb is gone\n"
