"""State machines of Hypothesis, whose runs the parts share: each part draws its own.

Owns: how many runs a process makes, and by which seeds. Does not own: the machines, and what a planted bug takes.
"""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests._support import parts


def run(machine: type[RuleBasedStateMachine], *, runs: int, steps: int, **named: Any) -> None:
    """Raises what the first run that breaks a rule raises. `runs`: of all parts. `named`: more settings."""
    settings = hypothesis.settings(max_examples=-(-runs // parts.PARTS), stateful_step_count=steps, **named)
    for part in parts.chosen():
        of_part = type(machine.__name__, (machine,), {})
        # Where each run of the tests draws anew, so does each part.
        if settings.derandomize:
            of_part = hypothesis.seed(part)(of_part)
        run_state_machine_as_test(of_part, settings=settings)
