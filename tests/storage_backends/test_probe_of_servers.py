"""The long probe refuses stores that check first and write later, and passes correct ones of which requests fail.

Owns: what must be said of each store, over many runs. Does not own: the stores and their faults
(`_support.probe_runs`), and the trials one by one (`test_probe`).
"""

from __future__ import annotations

import pytest

from storage_backends.probe import RACES
from tests.storage_backends._support import probe_runs
from tests.storage_backends._support.probe_runs import ACCUSED, PASSED, STORES, Probed

RUNS_IN_PROCESS = 200
RUNS_OVER_HTTP = 20


def check(probed: Probed, runs: int, *, races: int = RACES) -> None:
    counts = probe_runs.run(probed, runs, races=races)
    assert counts.said == {PASSED if probed.is_atomic else ACCUSED: runs}, counts.errors


@pytest.mark.parametrize("probed", STORES, ids=lambda probed: probed.name)
def test_a_store_is_refused_only_if_it_checks_first_and_writes_later(probed: Probed) -> None:
    # A race over HTTP takes a hundredth of a second and more: a correct server gets few.
    check(probed, 1, races=10 if probed.over_http and probed.is_atomic else RACES)


@pytest.mark.long
@pytest.mark.parametrize("probed", STORES, ids=lambda probed: probed.name)
def test_the_probe_does_not_err_in_many_runs(probed: Probed) -> None:
    check(probed, RUNS_OVER_HTTP if probed.over_http else RUNS_IN_PROCESS)
