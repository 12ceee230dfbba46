"""Sharing a subscription by key: what single requests and hand-outs do to what waits, is held, planned and blocked."""

from __future__ import annotations

import dataclasses

import numpy as np

from storage_backends.formats.manifest import HashSelector, KeySharedPolicy, NackOrder
from tests.daemon.core.journaled_topic import Position
from tests.daemon.core.key_shared.order_oracle import Delivery, Receiver
from tests.daemon.core.key_shared.order_topic import OrderedTopic

SKIP = KeySharedPolicy(selector=HashSelector.AUTO_SPLIT)
BLOCK_KEY = KeySharedPolicy(selector=HashSelector.AUTO_SPLIT, nack_order=NackOrder.BLOCK_KEY)


class SharedTopic(OrderedTopic):
    """One stream with consumers, `numbers`; the slots of each."""

    def __init__(
        self,
        consumers: int = 2,
        *,
        policy: KeySharedPolicy = SKIP,
        permits: int = 0,
        ready_rows_max: int = 1 << 30,
        in_flight_rows_max: int | None = None,
    ) -> None:
        super().__init__(policy, ready_rows_max=ready_rows_max)
        if in_flight_rows_max is not None:
            limited = dataclasses.replace(self.state.stored.policy, in_flight_rows_max=in_flight_rows_max)
            self.state.stored = dataclasses.replace(self.state.stored, policy=limited)
        self._entries = iter(range(1_000_000))
        self.stream = self.open_stream()
        self.numbers = self.join_on(self.stream, consumers, permits=permits)
        self.hand_out_now()

    def join_on(self, stream: int, consumers: int, *, permits: int = 0) -> list[int]:
        receivers = [Receiver(self.next_number(), stream, f"of {stream}") for _ in range(consumers)]
        self.join(receivers)
        numbers = [each.number for each in receivers]
        for number in numbers if permits else ():
            self.shared.grant(number, permits)
        return numbers

    def keys_of(self, number: int, count: int = 1) -> list[int]:
        """Hashes of a consumer, none of which is 0."""
        owned = np.flatnonzero(self.shared.selector.owners == self.shared.consumers.ordinal_of(number))
        keys: list[int] = owned[owned > 0][:count].tolist()
        return keys

    def due(self, keys: list[int]) -> list[Position]:
        """A row for each key, in this order, due now."""
        positions = [(1, next(self._entries)) for _ in keys]
        self.now_ms += 10
        self.add_keyed([(at, self.now_ms, key) for at, key in zip(positions, keys, strict=True)])
        self.commit()
        self.pass_all()
        return positions

    def hand_out_now(self, limit: int = 100) -> list[Delivery]:
        return [each for portion in self.hand_out_all(limit) for each in portion]

    def positions(self, limit: int = 100) -> list[Position]:
        """What is handed out now, in order."""
        return [each.at for each in self.hand_out_now(limit)]

    def ack(self, delivered: list[Delivery]) -> None:
        assert not self.acknowledge(self.state, [(each.at, each.deliver_at_ms) for each in delivered])


# ---- plans


def test_a_planned_position_for_which_there_was_no_room_in_flight_goes_when_there_is() -> None:
    topic = SharedTopic(in_flight_rows_max=3)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(one, 100)
    # Something waits for permits, and was looked at.
    topic.due(topic.keys_of(two))
    assert topic.positions() == topic.positions() == []
    planned = [(2, entry) for entry in range(5)]
    assert topic.plan(topic.stream, [(at, key) for at in planned]) == [one, one, one, 0, 0]
    topic.acknowledge(topic.state, [(at, 0) for at in planned[:2]])
    assert topic.positions() == planned[3:]
