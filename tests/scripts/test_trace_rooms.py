"""No story passes more files, or more calls from a lower room up to a higher one, than it did."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests._support.processes import run_child

CHECKOUT = Path(__file__).parents[2]
# (files, turns) at most. Who needs more says why, and who needs less lowers them.
MOST = {
    "takeover": (100, 14),
    "add, hand-out, acknowledgement": (112, 11),
    "negative acknowledgement, redelivery": (98, 11),
    "seal": (77, 10),
}


@pytest.mark.long
def test_an_add_a_nack_a_seal_and_a_takeover_pass_no_more_files_and_turns_than_they_did() -> None:
    traced = run_child([sys.executable, "scripts/trace_rooms.py"], cwd=CHECKOUT)
    assert traced.returncode == 0, traced.stderr
    found = {
        name: (int(files), int(turns))
        for name, files, turns in re.findall(r"^(.*): (\d+) files, (\d+) turns$", traced.stdout, re.MULTILINE)
    }
    assert found.keys() == MOST.keys()
    for name, (files, turns) in MOST.items():
        assert found[name][0] <= files, name
        assert found[name][1] <= turns, name
