"""The long probe refuses a server that checks first and writes later, and passes a correct one that often fails.

Owns: what must be said of each server. Does not own: the servers and their faults (`_support.probe_runs`).
"""

from __future__ import annotations

import pytest

from tests.storage_backends._support import probe_runs
from tests.storage_backends._support.probe_runs import ACCUSED, PASSED, SERVERS, Server

RUNS = 3
RUNS_OF_THE_LONG_TEST = 200


def check(server: Server, runs: int) -> None:
    counts = probe_runs.run(server, runs)
    assert counts.said == {PASSED if server.atomic else ACCUSED: runs}, counts.errors


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_a_server_is_refused_only_if_it_checks_first_and_writes_later(server: Server) -> None:
    check(server, RUNS)


@pytest.mark.long
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_the_probe_errs_on_none_of_two_hundred_runs(server: Server) -> None:
    check(server, RUNS_OF_THE_LONG_TEST)
