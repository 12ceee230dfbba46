"""What tests of jobs beside daemons use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.jobs import Jobs
from tests._support.processes import Daemons


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where everything durable is."""
    return tmp_path / "root"


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Makes daemons that end with the test."""
    made = Daemons(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def jobs(tmp_path: Path, root: Path) -> Iterator[Jobs]:
    """Makes jobs on the root that end with the test."""
    made = Jobs(tmp_path, root)
    try:
        yield made
    finally:
        made.end()
