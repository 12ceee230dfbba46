"""Running the command in this process against the scripted daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import click.testing
import pytest

from tarry.cli import commands
from tests.client._support.fake_daemon import FakeDaemon

Run: TypeAlias = Callable[..., click.testing.Result]


@pytest.fixture
def run(daemon: FakeDaemon) -> Run:
    def invoke(*arguments: str, stdin: str | bytes | None = None) -> click.testing.Result:
        return click.testing.CliRunner(env={"TARRY_ADDRESS": daemon.address}).invoke(
            commands.tarry, list(arguments), input=stdin
        )

    return invoke
