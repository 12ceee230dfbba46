"""Whatever happens to a KEY_SHARED subscription, in whatever order: keys keep their order, and nothing waits for
nothing.

The same at length: `python -m tests.daemon.core.key_shared._support.order_run`.
"""

from __future__ import annotations

import collections

import pytest

from storage_backends.formats.manifest import NackOrder
from tests._support import parts
from tests.daemon.core.key_shared._support.order_driver import OrderDriver, Profile
from tests.daemon.core.key_shared._support.order_run import PROFILES

# What every run comes to do sooner or later.
HAPPENS = {
    "acknowledged",
    "acknowledged in no hand",
    "acknowledged too late",
    "crashes",
    "dead",
    "held",
    "joins",
    "leaves",
    "mark-deleted",
    "nacked",
    "not held",
    "planned",
    "planned and sent at once",
    "rounds",
    "rows added",
    "streams closed",
    "timed out",
    "trimmed",
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_keys_keep_their_order_and_wait_for_a_reason_whatever_happens(profile: Profile) -> None:
    for part in parts.chosen():
        OrderDriver(profile, seed=part).run(500)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_they_do_through_100_000_operations(profile: Profile, seed: int) -> None:
    OrderDriver(profile, seed).run(100_000)


@pytest.mark.timeout(0)
def test_a_run_comes_to_do_everything() -> None:
    counted: collections.Counter[str] = collections.Counter()
    for nack_order in NackOrder:
        driver = OrderDriver(Profile(nack_order=nack_order), seed=3)
        driver.run(3_000)
        counted.update(driver.pair.counted)
    assert {what for what, times in counted.items() if times} >= HAPPENS | {"taken back"}
