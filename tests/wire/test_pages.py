"""What the pages for newcomers show runs as it stands, against a real daemon, and prints what stands below it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tarry
from examples import processes
from tests._support import shell_sessions, snippets
from tests._support.processes import Daemons
from tests.brokers import redis_server

REPOSITORY = Path(__file__).resolve().parents[2]
SHOWN_ADDRESS = "127.0.0.1:7461"


@pytest.fixture
def daemon(daemons: Daemons, tmp_path: Path) -> processes.DaemonProcess:
    made = daemons.make("tarryd", processes.local_store(tmp_path / "root"))
    made.start_serving()
    return made


def as_run(code: str, daemon: processes.DaemonProcess) -> str:
    """With this daemon, and with patience on a busy machine."""
    return re.sub(r"timeout_s=\d+", "timeout_s=300", code.replace(SHOWN_ADDRESS, daemon.address))


def test_the_blocks_of_the_page_on_an_own_relay_are_a_program_that_prints_what_stands_below_them(
    daemon: processes.DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    program: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(snippets.of(REPOSITORY / "docs" / "how-to" / "own-relay.md"), 1):
        exec(compile(as_run(block.code, daemon), f"block {number}", "exec"), program)
        assert capsys.readouterr().out == (block.output or "")
    assert number >= 6
    with tarry.Client(daemon.address) as client:
        assert list(client.topics()) == []


def test_the_example_of_the_first_page_runs(
    daemon: processes.DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = snippets.of(REPOSITORY / "README.md")
    with tarry.Client(daemon.address) as client:
        client.create_subscription("flights", "departures")
    exec(compile(as_run(block.code, daemon), "README.md", "exec"), {"__name__": "page"})
    assert block.output is not None
    accepted, *batches = capsys.readouterr().out.splitlines()
    assert accepted == block.output.splitlines()[0]
    assert sum(int(line.split()[0]) for line in batches) == 1_000


def run_session(
    page: str,
    directory: Path,
    instead: Mapping[str, str],
    *more_path: Path,
    programs: Sequence[Path] = (Path(sys.executable).parent,),
) -> None:
    """Runs every command of a page in one shell. `instead`: what stands in the test for what stands in the page.
    `programs`: where ours are looked for.
    """
    address = f"127.0.0.1:{processes.free_port()}"
    environment = {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"], *map(str, more_path)]),
        "TMPDIR": str(directory),
        "TARRY_ADDRESS": address,
        "TARRY_GRPC__LISTEN": address,
        "TARRY_METRICS__LISTEN": "127.0.0.1:0",
    }
    commands = shell_sessions.of(REPOSITORY / page)
    assert len(commands) >= 6
    with shell_sessions.Shell(directory, environment) as shell:
        for command in commands:
            text = command.text
            for printed, own in instead.items():
                text = text.replace(printed, own)
            if text.startswith("DUE="):
                # What the reader copies from his own terminal.
                due = re.findall(r"entry 0 +due (.+?) +late", shell.printed)[-1]
                text = f"DUE='{due}'"
            shell.run(command._replace(text=text))


def test_the_session_of_the_first_page_prints_what_stands_there(tmp_path: Path) -> None:
    run_session("README.md", tmp_path, {"12s": "3s"})


@pytest.mark.long
def test_the_tour_prints_what_stands_there(tmp_path: Path) -> None:
    run_session("docs/TOUR.md", tmp_path, {})


def test_the_session_of_the_page_on_deletion_prints_what_stands_there(tmp_path: Path) -> None:
    run_session("docs/DELETION.md", tmp_path, {"7463": str(processes.free_port())})


def test_the_session_with_redis_prints_what_stands_there(tmp_path: Path) -> None:
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    port = processes.free_port()
    instead = {
        "redis-server": f"redis-server --port {port} --bind 127.0.0.1",
        "redis-cli": f"redis-cli -p {port}",
        "redis_relay": f"redis_relay --redis redis://127.0.0.1:{port} --address $TARRY_ADDRESS",
    }
    run_session("docs/how-to/own-relay.md", tmp_path, instead, program.parent)


def test_a_line_that_a_session_does_not_print_is_told(tmp_path: Path) -> None:
    with shell_sessions.Shell(tmp_path, {}) as shell:
        shell.run(shell_sessions.Command("echo 12 rows of 300 █▊; sleep 0 &", ("7 rows of 5 ████",)))
        shell.run(shell_sessions.Command("(exit 4)  # exit status 4", ()))
        with pytest.raises(AssertionError, match=r"^\$ false\n"):
            shell.run(shell_sessions.Command("false", ()))
    with (
        shell_sessions.Shell(tmp_path, {}, patience_s=1) as shell,
        pytest.raises(AssertionError, match="and not\na line"),
    ):
        shell.run(shell_sessions.Command("true", ("a line",)))
