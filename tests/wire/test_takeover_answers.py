"""Every answer is true through takeovers: whoever is asked, killed, ended or paused meanwhile.

More of them: `python -m tests.wire._support.takeovers --rounds 100`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests._support.processes import Daemons
from tests.wire._support.takeovers import FAULTS, Takeovers

ROUNDS = 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "fault"),
    [pytest.param(form, fault, id=f"{form}-{fault.__name__}") for form, faults in FAULTS.items() for fault in faults],
)
def test_every_answer_is_true_through_takeovers(
    form: str, fault: Callable[[Takeovers], None], daemons: Daemons, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        story = Takeovers(daemons, tmp_path, form, stack, seed=42)
        for _ in range(ROUNDS):
            assert story.round(fault) == []
    told = {name.rpartition(": ")[2] for name in story.answers.counts}
    assert {"ok", "refused", "unknown"} <= told, "hardly anything happened: the test shows nothing"
