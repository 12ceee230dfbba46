"""What tests of the commands use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch.cli import options


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where everything durable is."""
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command sets logging up for its process, and this one goes on."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in options.ROOMS]
    handlers, level, levels = root.handlers[:], root.level, [each.level for each in ours]
    yield
    root.handlers[:], root.level = handlers, level
    for each, before in zip(ours, levels, strict=True):
        each.setLevel(before)
