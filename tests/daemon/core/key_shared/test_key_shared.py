"""Sharing a subscription by key: what single requests and hand-outs do to what waits, is held, planned and blocked."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core.decisions.departures import LedgerRanges
from daemon.core.key_shared import key_share
from daemon.core.key_shared.hash_slots import HASH_SLOTS
from daemon.errors import QuotaExceeded
from storage_backends.formats.manifest import HashSelector, KeyOrder, KeySharedPolicy, NackOrder, SubscriptionPolicy
from tests.daemon.core._support import nacking
from tests.daemon.core._support.journaled_topic import Position, claims_of
from tests.daemon.core._support.oracle import Claim
from tests.daemon.core.key_shared._support.order_items import Delivery, Receiver
from tests.daemon.core.key_shared._support.order_topic import OrderedTopic

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
        stored = SubscriptionPolicy(key_shared=policy, in_flight_rows_max=in_flight_rows_max)
        super().__init__(stored, ready_rows_max=ready_rows_max)
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


def test_while_nothing_may_be_handed_out_a_plan_names_who_holds_a_position_and_the_others_wait() -> None:
    topic = SharedTopic(permits=10)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    planned = [(2, entry) for entry in range(3)]
    assert topic.plan(topic.stream, [(planned[0], key)]) == [one]
    assert topic.plan(topic.stream, [(at, key) for at in planned], may_hand_out=False) == [one, 0, 0]
    topic.acknowledge(topic.state, [(at, 0) for at in planned[:2]])
    assert topic.positions() == planned[2:]


def test_a_nack_of_a_planned_position_that_has_a_row_by_now_ends_its_plan_and_makes_no_second_row() -> None:
    topic = SharedTopic(permits=10)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    at = (2, 7)
    assert topic.plan(topic.stream, [(at, key)]) == [one]
    topic.add([at], topic.now_ms + 1_000, topic.state.subscription_id)
    nacking.nack(topic, topic.state, [(at, 0)])
    assert topic.core.indexes.present_rows == 1
    assert not topic.state.backlog
    assert not len(topic.state.in_flight)
    assert not len(topic.shared.planned)
    topic.now_ms += 1_000
    topic.pass_all()
    assert topic.positions() == [at]


def test_a_time_out_of_a_planned_position_that_has_a_row_by_now_makes_no_second_row() -> None:
    topic = SharedTopic(permits=10)
    one, _ = topic.numbers
    at = (2, 7)
    assert topic.plan(topic.stream, [(at, topic.keys_of(one)[0])]) == [one]
    topic.add([at], topic.now_ms + 1_000, topic.state.subscription_id)
    nacking.stage_overdue(topic, topic.state, topic.elapsed_ms, nacking.terms(topic.now_ms), limit=10)
    topic.commit()
    assert topic.core.indexes.present_rows == 1
    assert not len(topic.state.in_flight)
    assert not len(topic.shared.planned)


def test_one_message_of_a_planned_entry_can_be_nacked_and_leaves_with_the_entry() -> None:
    topic = SharedTopic(permits=10)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    at = (2, 7)
    topic.plan(topic.stream, [(at, key)])
    decided = nacking.nack(topic, topic.state, [Claim(at, 0, 3)])
    assert not decided.ignored
    assert len(decided.nacks) == 1
    topic.pass_all()
    (part,) = topic.hand_out_now()
    assert (part.key_hash, part.consumer, part.count) == (key, one, 1)
    assert not topic.acknowledge(topic.state, [(at, 0)])
    assert not topic.state.backlog
    assert not len(topic.state.in_flight)
    assert not topic.core.indexes.present_rows
    assert topic.shared.draining is not None
    assert not topic.shared.draining.unacked.any()


def test_the_key_of_a_planned_position_that_waits_is_kept_when_it_is_nacked() -> None:
    topic = SharedTopic(permits=10)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    at = (2, 7)
    topic.plan(topic.stream, [(at, key)])
    # Its consumer leaves, and the nack comes late.
    topic.shared.leave([one])
    nacking.nack(topic, topic.state, [(at, 0)])
    topic.pass_all()
    (again,) = topic.hand_out_now()
    assert (again.at, again.consumer, again.key_hash, again.count) == (at, two, key, 1)


def test_planned_positions_that_are_ready_count_among_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_share, "PLANNED_WAITING_MAX", 10)
    topic = SharedTopic()
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    # Nobody has permits: what is READY stays.
    topic.due([key])
    for first in (0, 5):
        assert not any(topic.plan(topic.stream, [((2, first + entry), key) for entry in range(5)]))
    with pytest.raises(QuotaExceeded, match="10 planned positions wait"):
        topic.plan(topic.stream, [((2, 10), key)])
    topic.shared.grant(one, 6)
    assert len(topic.hand_out_now()) == 6
    topic.plan(topic.stream, [((2, 10 + entry), key) for entry in range(5)])


def test_a_position_that_two_streams_planned_is_planned_as_long_as_one_of_them_is_there() -> None:
    topic = SharedTopic()
    other = topic.open_stream()
    (third,) = topic.join_on(other, 1)
    (key,) = topic.keys_of(third)
    at = (2, 7)
    assert topic.plan(topic.stream, [(at, key)]) == topic.plan(other, [(at, key)]) == [0]
    topic.close_stream(topic.stream)
    topic.shared.grant(third, 1)
    assert topic.positions() == [at]


def test_what_a_stream_planned_alone_is_planned_no_longer_when_it_is_gone() -> None:
    topic = SharedTopic()
    other = topic.open_stream()
    (third,) = topic.join_on(other, 1)
    planned = [(2, 7), (2, 8)]
    (key,) = topic.keys_of(third)
    topic.plan(topic.stream, [(at, key) for at in planned])
    topic.shared.grant(third, 1)
    assert topic.positions() == planned[:1]
    topic.close_stream(topic.stream)
    topic.shared.grant(third, 10)
    assert topic.positions() == []
    # What another one holds is acknowledged as before.
    assert not topic.acknowledge(topic.state, [(planned[0], 0)])
    assert not len(topic.shared.planned)


def test_a_position_that_was_taken_back_when_its_stream_closed_can_be_acknowledged_once_it_is_planned_anew() -> None:
    topic = SharedTopic(policy=BLOCK_KEY, permits=10)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    first, second = (2, 7), (2, 8)
    assert topic.plan(topic.stream, [(first, key), (second, key)]) == [one, one]
    topic.open_stream()
    nacking.nack(topic, topic.state, [(first, 0)], 1_000)
    assert [each.at for each in topic.taken_back()] == [second]
    topic.close_stream(topic.stream)
    (stream,) = topic.streams
    topic.join_on(stream, 1, permits=1)
    topic.now_ms += 1_000
    topic.pass_all()
    topic.ack(topic.hand_out_now())
    assert topic.plan(stream, [(second, key)]) == [0]
    assert not topic.acknowledge(topic.state, [(second, 0)])


# ---- what comes back


def test_a_nacked_row_comes_back_however_many_wait_for_it() -> None:
    topic = SharedTopic(policy=BLOCK_KEY, permits=100, ready_rows_max=4)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    delivered = []
    for _ in range(4):
        topic.due([key, key])
        delivered += topic.hand_out_now()
    first, *others = delivered
    nacking.nack(topic, topic.state, [(first.at, first.deliver_at_ms)])
    assert len(topic.taken_back()) == len(others) == 7
    topic.pass_all()
    assert topic.positions() == [each.at for each in delivered]


def test_rows_nacked_together_all_come_back_before_what_waits_for_them() -> None:
    topic = SharedTopic(policy=BLOCK_KEY, permits=100, ready_rows_max=4)
    one, _ = topic.numbers
    (key,) = topic.keys_of(one)
    delivered = []
    for _ in range(4):
        topic.due([key, key])
        delivered += topic.hand_out_now()
    nacking.nack(topic, topic.state, [(each.at, each.deliver_at_ms) for each in delivered])
    handed_out: list[Position] = []
    while len(topic.state.nacks):
        assert not handed_out
        assert topic.core.pass_due(topic.now_ms, 1)
        handed_out = topic.positions()
    assert handed_out == [each.at for each in delivered]


def test_a_nacked_row_comes_back_however_many_wait_for_who_joined_behind_it() -> None:
    policy = KeySharedPolicy(selector=HashSelector.AUTO_SPLIT, order=KeyOrder.LAST_SENT_POSITION)
    topic = SharedTopic(1, policy=policy, permits=100, ready_rows_max=4)
    (one,) = topic.numbers
    (key,) = topic.keys_of(one)
    planned = [((0, entry), key) for entry in range(3)]
    assert topic.plan(topic.stream, planned) == [one] * 3
    rows = []
    for _ in range(3):
        rows += topic.due([key, key])
        topic.hand_out_now()
    topic.join_on(topic.stream, 1, permits=100)
    nacking.nack(topic, topic.state, [((0, 0), 0)])
    topic.shared.leave([one])
    topic.ack(topic.hand_out_now())
    assert topic.shared.waiting.back_rows == len(rows)
    topic.pass_all()
    (again,) = topic.hand_out_now()
    assert again.at == (0, 0)
    topic.ack([again])
    assert topic.positions() == rows


def test_nacked_rows_stay_where_they_are_while_many_wait_for_permits() -> None:
    topic = SharedTopic(ready_rows_max=4)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(one, 8)
    delivered = []
    for _ in range(4):
        topic.due([key, key])
        delivered += topic.hand_out_now()
    nacking.nack(topic, topic.state, [(each.at, each.deliver_at_ms) for each in delivered[:4]])
    # The other four wait.
    topic.shared.leave([one])
    topic.pass_all()
    assert len(topic.shared.waiting) == 4
    assert len(topic.state.nacks) == 4
    topic.shared.grant(two, 8)
    handed_out = topic.positions()
    topic.pass_all()
    assert handed_out + topic.positions() == [each.at for each in (*delivered[4:], *delivered[:4])]


# ---- rows that leave otherwise


@pytest.mark.parametrize("how", ["trim", "quarantine"])
@pytest.mark.parametrize("policy", [SKIP, BLOCK_KEY], ids=["skip", "block key"])
def test_rows_that_leave_by_a_decision_leave_nothing_behind(how: str, policy: KeySharedPolicy) -> None:
    topic = SharedTopic(policy=policy)
    one, two = topic.numbers
    (first, second), (third,) = topic.keys_of(one, 2), topic.keys_of(two)
    topic.shared.grant(one, 4)
    # Of the first hash one is NACKED; of the second they are in flight, one with a staged acknowledgement; of the third
    # they wait.
    topic.due([first, first, second, second, third, third])
    delivered = topic.hand_out_now()
    assert len(delivered) == 4
    nacking.nack(topic, topic.state, [(delivered[0].at, delivered[0].deliver_at_ms)], 60_000)
    if taken := topic.taken_back():
        topic.shared.told(np.array([each.consumer for each in taken], np.uint32))
    topic.plan(topic.stream, [((2, 1), first)])
    topic.seal(near_ms=topic.now_ms + 1)
    topic.stage_acknowledge(topic.state, [(delivered[2].at, delivered[2].deliver_at_ms)])
    if how == "trim":
        topic.trim_at_once(LedgerRanges(np.array([1], np.uint64), np.array([1_000], np.uint64)))
    else:
        (bucket,) = topic.core.indexes.sealed
        topic.quarantine(bucket)
        topic.commit()
    state, shared = topic.state, topic.shared
    assert (state.backlog, len(state.in_flight), len(state.nacks), state.ready_rows) == (0, 0, 0, 0)
    assert not state.acknowledging | state.nacking
    assert shared.draining is not None
    assert not shared.draining.unacked.any()
    assert not shared.draining.holders.any()
    if shared.nacks is not None:
        assert not shared.nacks.blocks.any_blocked
        assert not shared.nacks.taken_back
    # What was planned is no row.
    assert len(shared.waiting) == len(shared.planned) == 1
    topic.shared.grant(one, 1)
    assert topic.positions() == [(2, 1)]


def test_a_consumer_that_leaves_with_staged_acknowledgements_holds_their_hashes_until_they_are_durable() -> None:
    topic = SharedTopic(permits=10)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    first, second = topic.due([key, key])
    delivered = topic.hand_out_now()
    topic.stage_acknowledge(topic.state, [(first, delivered[0].deliver_at_ms)])
    topic.shared.leave([one])
    assert topic.positions() == [], "after a crash the first one would come behind the second"
    topic.commit()
    (again,) = topic.hand_out_now()
    assert (again.at, again.consumer) == (second, two)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_hash_stays_with_who_does_not_know_yet_what_was_taken_back(leaves: bool) -> None:
    topic = SharedTopic(consumers=1, policy=BLOCK_KEY, permits=10)
    (one,) = topic.numbers
    topic.due([7, HASH_SLOTS - 1] * 2)
    delivered = topic.hand_out_now()
    (two,) = topic.join_on(topic.open_stream(), 1, permits=10)
    (hash_slot,) = {7, HASH_SLOTS - 1} & {*topic.keys_of(two, HASH_SLOTS)}
    first, second = [each for each in delivered if each.key_hash == hash_slot]
    nacking.nack(topic, topic.state, [(first.at, first.deliver_at_ms)])
    assert [each.at for each in topic.taken_back()] == [second.at]
    topic.pass_all()
    assert topic.positions() == [], "it works on the second one"
    if leaves:
        topic.shared.leave([one])
    else:
        topic.shared.told(np.array([one], np.uint32))
    came = [(each.at, each.consumer) for each in topic.hand_out_now() if each.key_hash == hash_slot]
    assert came == [(first.at, two), (second.at, two)]


def test_what_a_consumer_held_comes_to_others_by_position_before_what_never_was_delivered() -> None:
    topic = SharedTopic()
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(one, 3)
    late = topic.due([key] * 5)
    assert topic.positions() == late[:3]
    topic.shared.leave([one])
    topic.shared.grant(two, 10)
    assert topic.positions() == late


def test_permits_are_used_once_for_each_row_and_come_back_for_none() -> None:
    topic = SharedTopic(policy=BLOCK_KEY, permits=5)
    one, _ = topic.numbers
    ordinal = topic.shared.consumers.ordinal_of(one)
    (key,) = topic.keys_of(one)
    topic.due([key] * 2)
    delivered = topic.hand_out_now()
    topic.plan(topic.stream, [((2, 1), key)])
    topic.plan(topic.stream, [((2, 1), key)])
    assert topic.shared.consumers.permits_of(ordinal) == 2
    nacking.nack(topic, topic.state, [(delivered[0].at, delivered[0].deliver_at_ms)])
    assert len(topic.taken_back()) == 2
    topic.pass_all()
    assert len(topic.hand_out_now()) == 2
    assert topic.shared.consumers.permits_of(ordinal) == 0
    topic.shared.grant(one, 1)
    assert topic.positions() == [(2, 1)]


def test_what_was_handed_out_while_a_late_acknowledgement_looked_for_it_holds_its_hash_until_that_is_durable() -> None:
    topic = SharedTopic(permits=10)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    first, second = topic.due([key, key])
    late = claims_of([(first, topic.now_ms)])
    found = topic.find_in_backlog(topic.state, late)
    assert topic.positions(1)[0] == first
    records, _ = topic.core.acknowledging.stage_found(topic.state, late, found)
    topic.shared.leave([one])
    assert topic.positions() == []
    topic.commit_together(records)
    assert [(each.at, each.consumer) for each in topic.hand_out_now()] == [(second, two)]


def test_messages_that_leave_with_their_entry_hold_their_hash_until_that_is_durable() -> None:
    topic = SharedTopic(permits=10)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    # One message of an entry that the dispatcher took from its log.
    part = Claim((2, 7), 0, 3)
    batch = nacking.stage_nack(topic, topic.state, [part], nacking.terms(topic.now_ms), key_hash=[key])
    assert len(batch.nacks) == 1
    topic.commit()
    topic.pass_all()
    assert len(topic.hand_out_now()) == 1
    (row,) = topic.due([key])
    topic.stage_acknowledge(topic.state, [((2, 7), 0)])
    topic.shared.leave([one])
    assert topic.positions() == []
    topic.commit()
    assert [(each.at, each.consumer) for each in topic.hand_out_now()] == [(row, two)]
