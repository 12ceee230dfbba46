"""The examples of PIP-282 with their own numbers, and what else of Key_Shared Apache Pulsar has tests for.

Each story is held against the oracle of key order as it goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.key_shared import hash_selectors
from daemon.core.key_shared import key_shared_stats as key_shared_stats
from daemon.core.key_shared.hash_slots import HASH_SLOTS, HashRange
from storage_backends.formats.manifest import HashSelector, KeyOrder, KeySharedPolicy, NackOrder
from storage_backends.formats.row_columns import Rows
from tests.daemon.core._support import nacking
from tests.daemon.core.key_shared._support.order_items import Item, Position, Receiver
from tests.daemon.core.key_shared._support.order_pair import Hand, OrderPair
from tests.daemon.core.key_shared._support.order_topic import Held

DRAINING, LAST_SENT = KeyOrder.DRAINING_HASHES, KeyOrder.LAST_SENT_POSITION
both_orders = pytest.mark.parametrize("order", [DRAINING, LAST_SENT], ids=lambda order: order.name)
MANY = 1_000


def shared(order: KeyOrder, selector: HashSelector = HashSelector.AUTO_SPLIT, **policy: object) -> OrderPair:
    return OrderPair(KeySharedPolicy(selector=selector, order=order, **policy))  # type: ignore[arg-type]


def slots_of_owners(before: Sequence[str], after: Sequence[str], *owners: tuple[str, str]) -> list[int]:
    """With AUTO_SPLIT and consumers that join in these orders: a slot of each pair of names (owner before, after)."""
    owned = []
    for names in (before, after):
        selector = hash_selectors.selector_of(HashSelector.AUTO_SPLIT, 1)
        for number, name in enumerate(names, 1):
            selector.join([hash_selectors.Joiner(number, name)])
        owned.append(np.array(["", *names])[selector.owners])
    return [int(np.flatnonzero((owned[0] == first) & (owned[1] == then))[5]) for first, then in owners]


def one_slot_each(pair: OrderPair, stream: int, slots: Sequence[int], permits: Sequence[int]) -> list[int]:
    return [
        pair.join(stream, f"consumer of {slot}", (HashRange(slot, slot),), granted)
        for slot, granted in zip(slots, permits, strict=True)
    ]


def entries(ledger: int, first: int, last: int) -> list[Position]:
    return [(ledger, entry) for entry in range(first, last + 1)]


def held(pair: OrderPair, consumer: int) -> list[Position]:
    return [item.at for item in pair.oracle.in_flight if item.consumer == consumer]


def acknowledge(pair: OrderPair, *positions: Position) -> None:
    items = [pair.oracle.rows.get(at) or pair.oracle.ordinary[at] for at in positions]
    pair.acknowledge(items)


def ranges(pair: OrderPair) -> tuple[Position | None, list[tuple[Position, Position]]]:
    stats = key_shared_stats.subscription_stats(pair.topic.shared)
    return stats.last_sent_position, list(stats.individually_sent_positions)


def recent(pair: OrderPair) -> dict[int, Position]:
    stats = key_shared_stats.subscription_stats(pair.topic.shared)
    return {each.number: each.last_sent_position_when_joining for each in stats.consumers_after_mark_delete_position}


# ---- PIP-282


def test_the_last_sent_position_and_the_individually_sent_ones_are_those_of_the_pip() -> None:
    pair = shared(LAST_SENT, HashSelector.STICKY)
    stream, _ = pair.open()
    _, four, six, seven = one_slot_each(pair, stream, (1, 4, 6, 7), (MANY, 0, 0, 0))
    slots = {4: 4, 6: 6, 7: 7}
    assert pair.plan(stream, [((3, 0), 1)]) != [0]
    assert ranges(pair) == ((3, 0), [])
    pair.plan(stream, [((3, entry), slots.get(entry, 1)) for entry in range(1, 11)])
    assert ranges(pair) == ((3, 3), [((3, 4), (3, 5)), ((3, 7), (3, 10))])
    pair.grant(seven, 1)
    assert pair.round() == [(seven, (3, 7))]
    assert ranges(pair) == ((3, 3), [((3, 4), (3, 5)), ((3, 6), (3, 10))])
    pair.grant(six, 1)
    assert pair.round() == [(six, (3, 6))]
    assert ranges(pair) == ((3, 3), [((3, 4), (3, 10))])
    pair.grant(four, 1)
    assert pair.round() == [(four, (3, 4))]
    assert ranges(pair) == ((3, 10), [])


@both_orders
def test_issue_1_a_consumer_that_joins_before_everything_read_was_dispatched_does_not_overtake(order: KeyOrder) -> None:
    a, b = slots_of_owners(["c1", "c2"], ["c1", "c2", "c3"], ("c1", "c3"), ("c2", "c2"))
    pair = shared(order)
    stream, _ = pair.open()
    c1, c2 = pair.join(stream, "c1", permits=1), pair.join(stream, "c2", permits=MANY)
    keys = dict(zip(entries(1, 6, 11), [a, a, a, b, b, b], strict=True))
    assert pair.plan(stream, [*keys.items()]) == [c1, 0, 0, c2, c2, c2]
    if order is LAST_SENT:
        assert ranges(pair) == ((1, 6), [((1, 8), (1, 11))])
    c3 = pair.join(stream, "c3", permits=MANY)
    assert recent(pair) == ({c3: (1, 6)} if order is LAST_SENT else {})
    assert not pair.round(), "1:7 and 1:8 are behind 1:6, which c1 has"
    pair.leave(c1)
    received = pair.round()
    acknowledge(pair, (1, 6))
    received += pair.round()
    assert received == [(c3, at) for at in entries(1, 6, 8)]
    assert not recent(pair)


@both_orders
def test_issue_2_what_was_put_back_without_a_consumer_having_had_it_does_not_overtake(order: KeyOrder) -> None:
    (a,) = slots_of_owners(["c1", "c2"], ["c1", "c2", "c3"], ("c1", "c3"))
    pair = shared(order)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=1)
    pair.join(stream, "c2", permits=MANY)
    assert pair.plan(stream, [((2, 1), a)]) == [c1]
    assert pair.plan(stream, [((2, 2), a)]) == [0]
    c3 = pair.join(stream, "c3", permits=MANY)
    assert recent(pair) == ({c3: (2, 1)} if order is LAST_SENT else {})
    assert not pair.round()
    pair.leave(c1)
    received = pair.round()
    if order is LAST_SENT:
        assert received == [(c3, (2, 1))], "2:2 is behind the position at which c3 joined"
    acknowledge(pair, (2, 1))
    assert not recent(pair)
    assert received + pair.round() == [(c3, (2, 1)), (c3, (2, 2))]


def test_consumers_with_one_name_are_told_apart_by_instance_and_address_and_listed_by_position() -> None:
    a, b = slots_of_owners(["c1", "c"], ["c1", "c", "c"], ("c1", "c1"), ("c1", "c1"))
    pair = shared(LAST_SENT)
    stream, _ = pair.open()
    pair.join(stream, "c1", permits=MANY)
    pair.plan(stream, [((1, 1), a)])
    first = pair.join(stream, "c")
    pair.plan(stream, [((1, 2), b)])
    second = pair.join(stream, "c")
    shown = key_shared_stats.subscription_stats(pair.topic.shared).consumers_after_mark_delete_position
    assert [(each.name, each.number, each.last_sent_position_when_joining) for each in shown] == [
        ("c", first, (1, 1)),
        ("c", second, (1, 2)),
    ]
    acknowledge(pair, (1, 1))
    assert recent(pair) == {second: (1, 2)}


def test_what_is_not_offered_leaves_no_gap_across_entries_and_ledgers() -> None:
    """Markers and delayed positions stand between those that are planned."""
    pair = shared(LAST_SENT)
    stream, _ = pair.open()
    pair.join(stream, "c1", permits=MANY)
    pair.plan(stream, [((4, 2), 1), ((4, 9), 2), ((7, 0), 3), ((5, 5), 4)])
    assert ranges(pair) == ((5, 5), [])


def test_delayed_positions_do_not_move_the_last_sent_position() -> None:
    pair = shared(LAST_SENT)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=MANY)
    pair.add([((1, 9), pair.topic.now_ms, 5)])
    assert pair.round() == [(c1, (1, 9))]
    assert ranges(pair) == (None, [])
    pair.plan(stream, [((1, 10), 6)])
    assert ranges(pair) == ((1, 10), [])


def test_a_consumer_that_joined_receives_delayed_positions_up_to_where_it_joined_and_later_ones_afterwards() -> None:
    (a,) = slots_of_owners(["c1"], ["c1", "c2"], ("c1", "c2"))
    pair = shared(LAST_SENT)
    stream, _ = pair.open()
    pair.join(stream, "c1", permits=MANY)
    pair.plan(stream, [((1, 5), a)])
    c2 = pair.join(stream, "c2", permits=MANY)
    pair.add([((1, 3), pair.topic.now_ms, a)])
    assert pair.round() == [(c2, (1, 3))]
    pair.add([((1, 7), pair.topic.now_ms, a)])
    assert not pair.round()
    acknowledge(pair, (1, 5))
    assert pair.round() == [(c2, (1, 7))]


@pytest.mark.parametrize("way", ["plan acknowledged", "row acknowledged", "row trimmed"])
def test_when_the_first_waiting_position_of_a_key_leaves_the_next_one_goes(way: str) -> None:
    a, b = slots_of_owners(["c1"], ["c1", "c2"], ("c1", "c2"), ("c1", "c1"))
    pair = shared(LAST_SENT)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=1)
    assert pair.plan(stream, [((1, 1), b)]) == [c1]
    c2 = pair.join(stream, "c2", permits=MANY)
    if way == "plan acknowledged":
        pair.plan(stream, [((2, 1), a)])
    else:
        pair.add([((2, 1), pair.topic.now_ms, a)])
    assert not pair.round(), "c2 joined behind 1:1, which is not acknowledged"
    pair.add([((1, 0), pair.topic.now_ms, a)])
    assert not pair.round(), "2:1 waits in front of 1:0"
    if way == "plan acknowledged":
        pair.acknowledge_waiting(pair.oracle.ordinary[2, 1])
    elif way == "row acknowledged":
        pair.acknowledge_waiting(pair.oracle.rows[2, 1])
    else:
        pair.trim(2, 1)
    assert pair.round() == [(c2, (1, 0))]


def test_a_planned_position_that_waits_and_is_declared_to_be_held_was_sent() -> None:
    pair = shared(LAST_SENT)
    stream, (c1,) = pair.open(["c1"])
    pair.grant(c1, 1)
    # As it comes where a stream that had planned it closed.
    assert pair.plan(stream, [((1, 5), 7)]) == [c1]
    assert pair.plan(stream, [((1, 1), 7)]) == [0]
    _, (c2,) = pair.open(hands=[Hand(Receiver(0, 0, "c2"), (Held((1, 1), 0, 7, 0),))])
    assert held(pair, c2) == [(1, 1)]
    assert ranges(pair) == ((1, 1), [])
    pair.leave(c1, c2)
    c3 = pair.join(stream, "c3", permits=MANY)
    assert pair.round() == [(c3, (1, 1)), (c3, (1, 5))]


@pytest.mark.parametrize("order", [DRAINING, LAST_SENT])
def test_out_of_order_delivery_when_it_is_allowed(order: KeyOrder) -> None:
    (a,) = slots_of_owners(["c1"], ["c1", "c2"], ("c1", "c2"))
    pair = shared(order, allow_out_of_order_delivery=True)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=1)
    assert pair.plan(stream, [((1, 6), a), ((1, 7), a)]) == [c1, 0]
    c2 = pair.join(stream, "c2", permits=1)
    assert pair.round() == [(c2, (1, 7))]


# ---- the dispatcher of sticky keys


def test_each_consumer_of_a_range_is_sent_what_is_in_its_range() -> None:
    pair = shared(DRAINING, HashSelector.STICKY)
    stream, _ = pair.open()
    low = pair.join(stream, "low", (HashRange(0, 9),), MANY)
    high = pair.join(stream, "high", (HashRange(10, 19), HashRange(30, 39)), MANY)
    keys = [0, 9, 10, 19, 20, 30, 1 << 16 | 5]
    positions = [*zip(entries(1, 0, 6), keys, strict=True)]
    assert pair.plan(stream, positions) == [low, low, high, high, 0, high, low]
    assert not pair.round(), "nobody has slot 20"
    last = pair.join(stream, "last", (HashRange(20, 29),), MANY)
    assert pair.round() == [(last, (1, 4))]


@both_orders
def test_what_comes_again_for_a_slow_consumer_waits_for_its_permits_and_others_go_on(order: KeyOrder) -> None:
    pair = shared(order, HashSelector.STICKY)
    stream, _ = pair.open()
    slow, quick = one_slot_each(pair, stream, (1, 2), (3, MANY))
    pair.plan(stream, [((1, 0), 1), ((1, 1), 2), ((1, 2), 1), ((1, 3), 1), ((1, 4), 1), ((1, 5), 2)])
    assert (held(pair, slow), held(pair, quick)) == ([(1, 0), (1, 2), (1, 3)], [(1, 1), (1, 5)])
    nacked: list[Item] = [pair.oracle.ordinary[1, 0]]
    pair.nack(nacked, nacking.terms(pair.topic.now_ms))
    assert not pair.round(), "1:0 comes again, and its consumer has no permits"
    pair.plan(stream, [((1, 6), 1), ((1, 7), 2)])
    assert held(pair, quick)[-1] == (1, 7)
    pair.grant(slow, 1)
    assert pair.round() == [(slow, (1, 0))]
    pair.grant(slow, MANY)
    assert pair.round() == [(slow, (1, 4)), (slow, (1, 6))]


@both_orders
def test_permits_that_come_back_keep_the_order_of_keys_over_what_comes_again_and_what_is_new(
    order: KeyOrder,
) -> None:
    pair = shared(order, HashSelector.STICKY)
    stream, _ = pair.open()
    c1, c2 = one_slot_each(pair, stream, (1, 2), (2, 2))
    pair.plan(stream, [((1, entry), 1 + entry % 2) for entry in range(8)])
    assert (held(pair, c1), held(pair, c2)) == ([(1, 0), (1, 2)], [(1, 1), (1, 3)])
    assert not pair.round()
    pair.plan(stream, [((1, 8), 1), ((1, 9), 2)])
    pair.grant(c1, MANY)
    assert pair.round() == [(c1, (1, 4)), (c1, (1, 6)), (c1, (1, 8))]
    pair.plan(stream, [((1, 10), 1), ((1, 11), 2)])
    pair.grant(c2, MANY)
    assert [at for number, at in pair.round() if number == c2] == [(1, 5), (1, 7), (1, 9), (1, 11)]
    assert held(pair, c1)[-1] == (1, 10)


# ---- Key_Shared subscriptions


@both_orders
@pytest.mark.parametrize("selector", [HashSelector.AUTO_SPLIT, HashSelector.CONSISTENT_HASHING])
def test_what_a_consumer_that_crashed_had_comes_to_others_in_the_order_of_positions(
    order: KeyOrder, selector: HashSelector
) -> None:
    pair = shared(order, selector)
    stream, _ = pair.open()
    crashed = pair.join(stream, "crashed", permits=MANY)
    pair.plan(stream, [((1, entry), entry % 3) for entry in range(12)])
    others, _ = pair.open(["two", "three"])
    for number in pair.oracle.receivers:
        pair.grant(number, MANY)
    pair.round()
    pair.leave(crashed)
    received: dict[int, list[Position]] = {}
    for number, at in pair.round():
        received.setdefault(number, []).append(at)
    assert sorted(itertools.chain(*received.values())) == entries(1, 0, 11)
    for key in range(3):
        of_key = [at for positions in received.values() for at in positions if at[1] % 3 == key]
        assert of_key == sorted(of_key)
    assert others in pair.topic.streams


@both_orders
def test_positions_without_a_key_are_one_key(order: KeyOrder) -> None:
    pair = shared(order)
    stream, _ = pair.open()
    first = pair.join(stream, "first", permits=2)
    pair.join(stream, "second", permits=MANY)
    positions = Rows(np.zeros(4, np.uint64), np.ones(4, np.uint64), np.arange(4, dtype=np.uint64), None)
    answers = pair.topic.core.key_sharing.plan(
        pair.topic.state, stream, positions, may_hand_out=True, elapsed_ms=0
    ).tolist()
    assert answers in ([first, first, 0, 0], [answers[0]] * 4)
    for at, answer in zip(entries(1, 0, 3), answers, strict=True):
        pair.oracle.plan(stream, at, 0, answer)
    for number in pair.oracle.receivers:
        pair.grant(number, MANY)
    pair.round()
    assert {item.consumer for item in pair.oracle.in_flight} == {pair.oracle.owner(0)}


@both_orders
def test_keys_stay_in_order_while_consumers_are_added(order: KeyOrder) -> None:
    pair = shared(order, HashSelector.CONSISTENT_HASHING)
    stream, _ = pair.open()
    pair.join(stream, "0", permits=MANY)
    received: list[Position] = []
    for step in range(1, 6):
        pair.plan(stream, [((step, entry), entry * 3_001) for entry in range(40)])
        received += held_now(pair, received)
        pair.join(stream, str(step), permits=MANY)
        pair.round()
        received += held_now(pair, received)
        acknowledge(pair, *[item.at for item in [*pair.oracle.in_flight][:30]])
        pair.round()
        received += held_now(pair, received)
    while pair.oracle.in_flight:
        acknowledge(pair, *[item.at for item in pair.oracle.in_flight])
        pair.round()
        received += held_now(pair, received)
    assert len(received) == 200
    for entry in range(40):
        assert [at for at in received if at[1] == entry] == [(step, entry) for step in range(1, 6)]


def held_now(pair: OrderPair, known: Sequence[Position]) -> list[Position]:
    return [item.at for item in pair.oracle.in_flight if item.at not in known]


@both_orders
def test_when_the_first_consumer_leaves_the_others_receive_everything(order: KeyOrder) -> None:
    a, b = slots_of_owners(["c1", "c2"], ["c1", "c2", "c3"], ("c1", "c1"), ("c1", "c3"))
    pair = shared(order)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=MANY)
    pair.plan(stream, [((1, entry), (a, b)[entry % 2]) for entry in range(6)])
    pair.join(stream, "c2", permits=MANY)
    pair.join(stream, "c3", permits=MANY)
    pair.plan(stream, [((1, entry), (a, b)[entry % 2]) for entry in range(6, 10)])
    acknowledge(pair, (1, 0), (1, 1))
    pair.leave(c1)
    received = [at for _, at in pair.round()]
    while pair.oracle.in_flight:
        acknowledge(pair, *[item.at for item in pair.oracle.in_flight])
        received += [at for _, at in pair.round()]
    assert sorted(received) == entries(1, 2, 9)
    for odd in (0, 1):
        assert [at for at in received if at[1] % 2 == odd] == [at for at in entries(1, 2, 9) if at[1] % 2 == odd]


@both_orders
def test_a_key_whose_position_is_delayed_keeps_being_dispatched(order: KeyOrder) -> None:
    pair = shared(order)
    stream, _ = pair.open()
    c1 = pair.join(stream, "c1", permits=MANY)
    pair.plan(stream, [((1, 0), 7)])
    pair.add([((1, 1), pair.topic.now_ms + 5_000, 7)])
    assert pair.plan(stream, [((1, 1), 7), ((1, 2), 7)]) == [0, c1], "1:1 is delayed; it holds up nothing"
    later = pair.join(stream, "later", permits=MANY)
    for entry in range(3, 30):
        pair.plan(stream, [((1, entry), entry * 2_003)])
    acknowledge(pair, *held(pair, c1))
    pair.round()
    assert held(pair, later), "who joined waits for nothing that is delayed"
    assert not pair.oracle.waiting()
    pair.wait(5_000)
    (sent,) = pair.round()
    assert sent[1] == (1, 1)


@both_orders
@pytest.mark.parametrize("nack_order", NackOrder)
def test_keys_are_in_order_and_at_one_consumer_through_a_storm_of_reconnects(
    order: KeyOrder, nack_order: NackOrder
) -> None:
    """The oracle looks at each hand-out."""
    pair = shared(order, HashSelector.CONSISTENT_HASHING, nack_order=nack_order)
    streams = [pair.open([f"{number}", f"{number} too"])[0] for number in range(3)]
    planned = 0
    for storm in range(40):
        for number in [*pair.oracle.receivers]:
            pair.grant(number, 7)
        plans = [((1, planned + each), (planned + each) * 7_919 % 31) for each in range(12)]
        planned += len(plans)
        pair.plan(streams[storm % 3], plans)
        pair.round()
        if order is DRAINING:
            acknowledge(pair, *[item.at for item in [*pair.oracle.in_flight][: 5 + storm % 7]])
        again = [*pair.oracle.receivers][storm % len(pair.oracle.receivers)]
        receiver = pair.oracle.receivers[again]
        pair.leave(again)
        pair.join(receiver.stream, receiver.name, permits=5)
        pair.round()
    for _ in range(200):
        for number in [*pair.oracle.receivers]:
            pair.grant(number, MANY)
        pair.round()
        if not pair.oracle.in_flight:
            break
        acknowledge(pair, *[item.at for item in pair.oracle.in_flight])
    assert pair.oracle.left_rows == planned
    assert sum(pair.oracle.selector.slots_of_consumer(number) for number in pair.oracle.receivers) == HASH_SLOTS, (
        "every slot has a consumer"
    )


def test_the_first_of_two_streams_that_ends_leaves_its_keys_to_the_other_in_order() -> None:
    pair = shared(DRAINING)
    one, _ = pair.open(["one"])
    two, (second,) = pair.open(["two"])
    for number in pair.oracle.receivers:
        pair.grant(number, MANY)
    pair.add([((1, entry), pair.topic.now_ms, entry % 5 * 16_001) for entry in range(20)])
    pair.round()
    pair.close(one)
    assert two in pair.topic.streams
    pair.round()
    assert sorted(held(pair, second)) == entries(1, 0, 19)
