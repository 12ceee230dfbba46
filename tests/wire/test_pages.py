"""What the pages for newcomers show runs as it stands, against a real daemon, and prints what stands below it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tarry
from examples import processes
from tests._support import shell_sessions, snippets
from tests._support.processes import Daemons

REPOSITORY = Path(__file__).resolve().parents[2]
SHOWN_ADDRESS = "127.0.0.1:7461"


@pytest.fixture
def daemon(daemons: Daemons, tmp_path: Path) -> processes.DaemonProcess:
    made = daemons.make("tarryd", processes.local_store(tmp_path / "root"))
    made.start_serving()
    return made


def test_the_blocks_of_the_page_on_relays_are_a_program_that_prints_what_stands_below_them(
    daemon: processes.DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    program: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(snippets.of(REPOSITORY / "docs" / "RELAYS.md"), 1):
        exec(compile(block.code.replace(SHOWN_ADDRESS, daemon.address), f"block {number}", "exec"), program)
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
    exec(compile(block.code.replace(SHOWN_ADDRESS, daemon.address), "README.md", "exec"), {"__name__": "page"})
    assert block.output is not None
    accepted, *batches = capsys.readouterr().out.splitlines()
    assert accepted == block.output.splitlines()[0]
    assert sum(int(line.split()[0]) for line in batches) == 1_000


@pytest.mark.parametrize(
    ("page", "shorter"),
    [
        ("README.md", {"12s": "3s"}),
        pytest.param("docs/TOUR.md", {}, marks=pytest.mark.long),
    ],
)
def test_the_shell_sessions_of_a_page_print_what_stands_there(
    page: str, shorter: Mapping[str, str], tmp_path: Path
) -> None:
    """`shorter`: of what is waited for in the session."""
    address, owner_port = f"127.0.0.1:{processes.free_port()}", str(processes.free_port())
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TMPDIR": str(tmp_path),
        "TARRY_ADDRESS": address,
        "TARRY_GRPC__LISTEN": address,
        "TARRY_METRICS__LISTEN": "127.0.0.1:0",
    }
    commands = shell_sessions.of(REPOSITORY / page)
    assert len(commands) >= 6
    with shell_sessions.Shell(tmp_path, environment) as shell:
        for command in commands:
            text = command.text.replace("7463", owner_port)
            for long, short in shorter.items():
                text = text.replace(long, short)
            if text.startswith("DUE="):
                # What the reader copies from his own terminal.
                due = re.findall(r"entry 0 +due (.+?) +late", shell.printed)[-1]
                text = f"DUE='{due}'"
            shell.run(command._replace(text=text))


def test_a_line_that_a_session_does_not_print_is_told(tmp_path: Path) -> None:
    with shell_sessions.Shell(tmp_path, {}) as shell:
        shell.run(shell_sessions.Command("echo 12 rows of 300 █▊; sleep 0 &", ("7 rows of 5 ████",)))
        shell.run(shell_sessions.Command("(exit 4)  # exit status 4", ()))
        with pytest.raises(AssertionError, match="and not"):
            shell.run(shell_sessions.Command("false", ("a line",)))
