"""What the pages for newcomers show runs as it stands, against a real daemon, and prints what stands below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tarry
from examples import processes
from tests._support import snippets
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
