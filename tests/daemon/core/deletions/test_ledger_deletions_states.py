"""Whatever is decided on deletions, in whatever order, comes to what a plain list says; also after restarts."""

from __future__ import annotations

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.daemon.core.deletions._support.machine import DeletionsMachine, small


def test_deletions_are_what_a_plain_list_says_they_are() -> None:
    settings = hypothesis.settings(
        max_examples=60, stateful_step_count=40, report_multiple_bugs=False, phases=(hypothesis.Phase.generate,)
    )
    with small():
        run_state_machine_as_test(DeletionsMachine, settings=settings)
