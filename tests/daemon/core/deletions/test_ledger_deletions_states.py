"""Whatever is decided on deletions, in whatever order, comes to what a plain list says; also after restarts."""

from __future__ import annotations

import hypothesis

from tests._support import state_machines
from tests.daemon.core.deletions._support.machine import DeletionsMachine, small


def test_deletions_are_what_a_plain_list_says_they_are() -> None:
    phases = (hypothesis.Phase.generate,)
    with small():
        state_machines.run(DeletionsMachine, runs=60, steps=40, report_multiple_bugs=False, phases=phases)
