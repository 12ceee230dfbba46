"""Whatever happens to a topic, in whatever order: the rules of the semantics hold."""

from __future__ import annotations

import os

import hypothesis
import pytest

from tests._support import state_machines
from tests.daemon.core._support.topic_machine import TopicMachine

# Runs of each kind, of which each part has its share; a long search: TARRY_TEST_STATE_RUNS=5000 with
# --hypothesis-profile=search.
RUNS = int(os.environ.get("TARRY_TEST_STATE_RUNS", "80"))
STEPS = 60
# A failure is printed as it was found; shrinking it is for the one who looks into it.
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)


def run(machine: type[TopicMachine], *, runs: int = RUNS) -> None:
    checks = list(hypothesis.HealthCheck)
    state_machines.run(machine, runs=runs, steps=STEPS, phases=PHASES, suppress_health_check=checks)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("budget_rows", [1, 6, 1_000_000])
def test_nothing_is_early_lost_or_handed_out_twice_whatever_happens(budget_rows: int) -> None:
    class Machine(TopicMachine):
        budgets_rows = (budget_rows,)

    run(Machine)
