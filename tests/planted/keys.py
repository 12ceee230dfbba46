"""Rows that go to consumers by key: each rule broken of their order while some that are due are not read yet, and of
what waits to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from daemon.core.decisions import feeding
from daemon.core.decisions.key_shared_backlogs import KeySharedBacklogs
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows, Mask
from daemon.core.key_shared.draining_hashes import HashHolds
from daemon.topic.key_shared_streams import KeySharedStream
from tests.planted.bug import Bug
from tests.simulation.run import Directed

# Rows are read when they are due, ten at a time, from buckets that answer late.
UNREAD = Directed(
    settings=(
        "delivery.lookahead_ms=0",
        "bucket.max_indexes_per_bucket_snapshot_segment=10",
        "bucket.age_max_s=2.0",
        "delivery.ready_rows_max=200000",
    ),
    slow_kind="/buckets/",
    chaos_s=40.0,
)


def what_is_not_read_holds_up_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "has_unread", lambda self, subscription_id, now_ms: False)
    patch.setattr(Indexes, "first_unpassed", lambda self, subscription_id: None)


def rows_are_fed_beside_what_is_not_read(patch: pytest.MonkeyPatch) -> None:
    def hold_up(self: KeySharedBacklogs, states: Iterable[SubscriptionState], now_ms: int) -> None:
        del self, states, now_ms

    patch.setattr(KeySharedBacklogs, "hold_up", hold_up)


def a_backlog_is_read_beyond_what_is_not_passed(patch: pytest.MonkeyPatch) -> None:
    catch_up = feeding.catch_up

    def without_bound(indexes: Any, cache: Any, state: Any, limit: int, bound: Any = None) -> Any:
        del bound
        return catch_up(indexes, cache, state, limit)

    patch.setattr(feeding, "catch_up", without_bound)


# Rows are taken back and shared out again while their dispatcher has not read that, and acknowledges them.
HANDED_BACK = Directed(nacks=0.5, chaos_s=40.0)


def what_waits_to_be_sent_is_sent_though_it_has_left(patch: pytest.MonkeyPatch) -> None:
    def all_held(self: KeySharedStream, rows: KeyedRows, *_: Any) -> Mask:
        return np.ones(len(rows), np.bool_)

    patch.setattr(KeySharedStream, "_still_held", all_held)


def others_receive_a_key_before_its_consumer_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HashHolds, "taken_back", HashHolds.returned)


BUGS = (
    Bug("key order", what_is_not_read_holds_up_nothing, UNREAD, seed=10),
    Bug("key order", rows_are_fed_beside_what_is_not_read, UNREAD, seed=10),
    Bug("key order", a_backlog_is_read_beyond_what_is_not_passed, UNREAD, seed=10),
    Bug("hand-outs", what_waits_to_be_sent_is_sent_though_it_has_left, HANDED_BACK, seed=4),
    Bug("key order", others_receive_a_key_before_its_consumer_is_told, seed=186),
)
