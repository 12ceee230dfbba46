"""The promise of keys can be broken: where the policy says that nothing waits, a run tells it."""

from __future__ import annotations

import pytest

from storage_backends.formats.manifest import KeySharedPolicy, SubscriptionPolicy
from tests.simulation import key_sharing
from tests.simulation.run import run

# The first one meets it soon; any other may, when what happens in it has changed.
SEEDS = (14, *range(8, 30))


def test_a_hash_at_two_consumers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    in_any_order = SubscriptionPolicy(key_shared=KeySharedPolicy(allow_out_of_order_delivery=True))
    monkeypatch.setattr(key_sharing, "POLICIES", (in_any_order,))
    broken = (breach for seed in SEEDS for breach in run(seed).breaches)
    assert "while another one holds" in next(broken, "")
