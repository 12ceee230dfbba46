"""Uploads that are refused, or never end, do not take the daemon's memory, and a client beside them is not late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire._support import upload_attacks

MEGABYTE = 1_000_000
# Requests as long as the daemon takes, and longer ones
SIZES = [4 * MEGABYTE, 15 * MEGABYTE]


@pytest.mark.long
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("name", ["adds", "foreign"])
def test_refused_adds_cost_at_most_300_mb(tmp_path: Path, name: str, size_bytes: int) -> None:
    found = upload_attacks.attack(name, tmp_path, size_bytes)
    print(found)  # noqa: T201
    assert found.cost_bytes <= 300 * MEGABYTE
    assert "OK" not in found.answers


@pytest.mark.long
@pytest.mark.parametrize("size_bytes", SIZES)
def test_uploads_without_a_token_are_not_received(tmp_path: Path, size_bytes: int) -> None:
    found = upload_attacks.attack("stalled", tmp_path, size_bytes)
    print(found)  # noqa: T201
    assert found.answers == {"ended": upload_attacks.UPLOADS, "held": 0}
    assert found.cost_bytes <= 30 * MEGABYTE


@pytest.mark.long
def test_uploads_of_an_identity_that_never_end_are_bounded(tmp_path: Path) -> None:
    found = upload_attacks.attack("stalled-token", tmp_path, 4 * MEGABYTE)
    print(found)  # noqa: T201
    assert found.cost_bytes <= 200 * MEGABYTE
    assert found.answers["ended"] >= 10, "calls that waited for a turn ended slow ones"
