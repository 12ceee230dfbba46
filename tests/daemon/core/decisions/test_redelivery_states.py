"""Positions are negatively acknowledged, time out, die and come back beside whatever else happens to a topic, in
whatever order: the rules of the semantics hold.
"""

from __future__ import annotations

import pytest

from tests.daemon.core._support.redelivery_machine import RedeliveryMachine
from tests.daemon.core.decisions.test_topic_states import RUNS, run


@pytest.mark.timeout(0)
@pytest.mark.parametrize("budget_rows", [1, 6, 1_000_000])
def test_nothing_is_early_lost_in_two_hands_or_miscounted_whatever_happens(budget_rows: int) -> None:
    class Machine(RedeliveryMachine):
        budgets_rows = (budget_rows,)

    run(Machine, runs=RUNS // 2)
