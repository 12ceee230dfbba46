"""What the demo says on its way; the run itself is too long for a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import tarry
from examples import flights, flights_log, processes


class Killed:
    """A daemon of which only the kills are counted."""

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


def test_an_interrupt_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flights, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["flights", "--directory", str(tmp_path)])
    assert flights.main() == flights.EXIT_INTERRUPTED == 130
    assert capsys.readouterr() == ("", "interrupted; tarryd is ended\n")


def test_it_says_when_it_kills(tmp_path: Path) -> None:
    numbers = np.arange(3, dtype=np.uint64)
    log = flights_log.FlightsLog(numbers, numbers, numbers.astype(np.uint32), numbers.astype(np.int64))
    said: list[str] = []
    daemon = Killed()
    demo = flights.Demo(
        flights.Options("local", 15, 1, tmp_path),
        log,
        cast(processes.DaemonProcess, daemon),
        cast(tarry.Client, None),
        said.append,
    )
    assert demo._kill("16 requests in flight") > 0
    assert daemon.kills == 1
    assert said == ["kill -9 tarryd, with 16 requests in flight; it is started again"]
