"""A `JournaledTopic` whose one subscription is open as KEY_SHARED: what the engine does for streams, without waiting.

Owns: numbers of streams and consumers, saying requests to the core, and hand-outs as plain deliveries.
Does not own: what is right (`order_oracle`) and what happens next (`order_driver`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.position_keys import KeyedRows
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import Assigned, KeyShared
from storage_backends.formats.manifest import SubscriptionPolicy
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from tests.daemon.core._support.journaled_topic import TURNS_MAX, JournaledTopic, Position, batch_of, claims_of
from tests.daemon.core.key_shared._support.order_items import Delivery, Receiver


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A position that a consumer declares to hold."""

    at: Position
    deliver_at_ms: int
    key_hash: int
    consumer: int


class OrderedTopic(JournaledTopic):
    def __init__(self, policy: SubscriptionPolicy, *, ready_rows_max: int = 1 << 30) -> None:
        # So large that all that is due is in memory: rows come due in order across buckets.
        limits = SegmentLimits(time_step_ms=2_000, rows_max=50, rows_min=0)
        super().__init__(ready_rows_max=ready_rows_max, segment_limits=limits)
        self._numbers = itertools.count(1)
        self.streams: set[int] = set()
        self.create_subscription(policy=policy)

    @property
    def state(self) -> SubscriptionState:
        (state,) = self.core.subscriptions.values()
        return state

    @property
    def shared(self) -> KeyShared:
        shared = self.state.key_shared
        assert shared is not None
        return shared

    def take_checkpoint(self) -> None:
        """What is before it in the journal is needed no more."""
        super().take_checkpoint()
        self.slots.clear()

    # ---- streams and consumers

    def open_stream(self) -> int:
        stream = next(self._numbers)
        frozen = None if self.streams else self.core.key_sharing.begin(self.state, elapsed_ms=self.elapsed_ms)
        self.core.open(self.state, stream)
        if frozen is not None:
            self.core.key_sharing.finish(self.state, frozen.rows()[0])
        self.streams.add(stream)
        return stream

    def close_stream(self, stream: int) -> None:
        self.streams.remove(stream)
        self.state.close(stream)

    def next_number(self) -> int:
        return next(self._numbers)

    def join(self, receivers: Sequence[Receiver]) -> None:
        self.shared.join(
            [Joining(each.number, each.stream, each.name, hash_ranges=each.hash_ranges) for each in receivers]
        )

    def leave(self, numbers: Collection[int]) -> None:
        self.shared.leave(numbers)

    def hold(self, stream: int, held: Sequence[Held]) -> list[bool]:
        """Which of the positions are IN_FLIGHT at the consumers that declare to hold them."""
        accepted: set[tuple[Position, int]] = set()
        found = self.claimed(self.state, claims_of((each.at, each.deliver_at_ms) for each in held)).rows
        by_claim = {(each.at, each.deliver_at_ms): each for each in held}
        claimed = [by_claim[at, due] for at, due in _claims(found)]
        numbers = np.array([each.consumer for each in claimed], np.uint32)
        mask = self.core.key_sharing.hold(self.state, found, numbers, elapsed_ms=self.elapsed_ms)
        accepted.update((each.at, each.deliver_at_ms) for each, here in zip(claimed, mask, strict=True) if here)
        known = {(each.at, each.deliver_at_ms) for each in claimed}
        planned = [each for each in held if not each.deliver_at_ms and (each.at, 0) not in known]
        if planned:
            positions = _ordinary([(each.at, each.key_hash) for each in planned])
            numbers = np.array([each.consumer for each in planned], np.uint32)
            mask = self.core.key_sharing.hold_planned(
                self.state, stream, positions, numbers, elapsed_ms=self.elapsed_ms
            )
            accepted.update((each.at, each.deliver_at_ms) for each, here in zip(planned, mask, strict=True) if here)
        return [(each.at, each.deliver_at_ms) in accepted for each in held]

    # ---- requests

    def add_keyed(self, rows: Sequence[tuple[Position, int, int]]) -> None:
        """Rows (position, deliver_at_ms, key_hash), none of which is there, staged."""
        outcome = self.stage_add(
            batch_of(
                [at for at, _, _ in rows],
                deliver_at_ms=[due for _, due, _ in rows],
                key_hash=[key for _, _, key in rows],
            )
        )
        assert outcome.accepted == len(rows)

    def plan(self, stream: int, positions: Sequence[tuple[Position, int]], *, may_hand_out: bool = True) -> list[int]:
        """Who receives each (position, key_hash) now, 0: HELD."""
        answers: list[int] = self.core.key_sharing.plan(
            self.state, stream, _ordinary(positions), may_hand_out=may_hand_out, elapsed_ms=self.elapsed_ms
        ).tolist()
        return answers

    # ---- hand-outs

    def hand_out_some(self, limit: int) -> list[Delivery]:
        """One portion."""
        return deliveries(self.shared.hand_out(limit, elapsed_ms=self.elapsed_ms))

    def hand_out_all(self, limit: int) -> Iterable[list[Delivery]]:
        """Portions, until nothing more can be handed out. Everything that is due has been passed."""
        idle = 0
        for _ in range(TURNS_MAX):
            self.read_on(limit)
            sent = self.hand_out_some(limit)
            if sent:
                yield sent
            elif self._is_done:
                return
            idle = 0 if sent else idle + 1
            assert idle < 100, "handing out makes no progress, and says that it might"
        raise AssertionError("handing out does not end")

    @property
    def _is_done(self) -> bool:
        if self.shared.may_hand_out or self.shared.reads_on:
            return False
        return self.state.reader is None or self.state.is_full

    def read_on(self, limit: int) -> None:
        """Derives rows again for which there was no room."""
        self.catch_up(self.state, limit)
        for _ in range(TURNS_MAX):
            needed = self.core.key_sharing.find_let_go(self.state, limit) if self.shared.reads_on else []
            if not needed:
                return
            self.load(needed)
        raise AssertionError("reading what was let go makes no progress")

    def taken_back(self) -> list[Delivery]:
        return [] if self.state.key_shared is None else deliveries(self.shared.take_back())


def _ordinary(positions: Sequence[tuple[Position, int]]) -> Rows:
    return Rows(
        np.zeros(len(positions), np.uint64),
        np.array([at[0] for at, _ in positions], np.uint64),
        np.array([at[1] for at, _ in positions], np.uint64),
        np.array([key for _, key in positions], np.uint32),
    )


def deliveries(assigned: Iterable[Assigned]) -> list[Delivery]:
    found = []
    for each in assigned:
        counts, keys = each.rows.counts().tolist(), each.rows.key_hash().tolist()
        columns = (each.consumers.tolist(), _claims(each.rows), keys, counts)
        found += [Delivery(number, at, due, key, count) for number, (at, due), key, count in zip(*columns, strict=True)]
    return found


def _claims(rows: KeyedRows) -> list[tuple[Position, int]]:
    columns = rows.rows
    places = zip(columns.ledger_id.tolist(), columns.entry_id.tolist(), strict=True)
    return list(zip(places, columns.deliver_at_ms.tolist(), strict=True))
