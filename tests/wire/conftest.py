"""What every wire test uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.processes import Daemons


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Makes daemons that end with the test."""
    made = Daemons(tmp_path)
    try:
        yield made
    finally:
        made.end()
