"""What key order means, position by position: the rules that hand-outs, answers and counts are held against.

Owns: where every position is, what waits behind what, who may receive it, what a negative acknowledgement blocks, and
why a position may wait. Nothing of it comes from the product's tables but the selectors, which have their own tests.
Does not own: what happens next (`order_driver`), how that is said to the product (`order_topic`), and the order of sent
positions (`order_sent`).

What waits is `back` when it was delivered before: it goes first, by position. What never was goes as it came: planned
ones in the order of plans, rows as they became due. Where a row and a planned position came between the same two whole
rounds of hand-outs no order is asked of them; what waited for a whole round goes before what came later.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence

from daemon.core.key_shared import hash_selectors
from storage_backends.formats.manifest import KeyOrder, KeySharedPolicy, NackOrder
from tests.daemon.core.key_shared._support.order_items import Delivery, Item, Position, Receiver, Slot, Where
from tests.daemon.core.key_shared._support.order_sent import SentPositions


class OrderOracle:
    """`rows`, `ordinary`: what has not left. `lets_go`: whether what waits may be let go and read again."""

    def __init__(self, policy: KeySharedPolicy, *, in_flight_rows_max: int, lets_go: bool = False) -> None:
        self.policy = policy
        self.in_flight_rows_max = in_flight_rows_max
        self.lets_go = lets_go
        self.blocks = policy.nack_order is NackOrder.BLOCK_KEY
        self.drains = policy.order is KeyOrder.DRAINING_HASHES and not policy.allow_out_of_order_delivery
        self.joins_behind = policy.order is KeyOrder.LAST_SENT_POSITION and not policy.allow_out_of_order_delivery
        self.rows: dict[Position, Item] = {}
        self.ordinary: dict[Position, Item] = {}
        self.permits: collections.Counter[int] = collections.Counter()
        self.full: set[int] = set()
        self.elapsed_ms = self.rounds = self.deliveries = self.left_rows = 0
        self._passes = self._plans = 0
        self._forget()

    def _forget(self) -> None:
        """Nothing is in memory."""
        self.selector = hash_selectors.selector_of(self.policy.selector, self.policy.points_per_consumer)
        self.sent = SentPositions()
        self.receivers: dict[int, Receiver] = {}
        self.slots: dict[int, Slot] = collections.defaultdict(Slot)
        self.in_flight: dict[Item, None] = {}
        self.unplanned: dict[Position, Item] = {}
        # (consumer, slot) of each position that was taken back of which the consumer is not told.
        self.untold: list[tuple[int, int]] = []

    def items(self, *where: Where) -> Iterator[Item]:
        for items in (self.rows, self.ordinary):
            yield from (item for item in items.values() if item.where in where)

    # ---- consumers

    def join(self, receivers: Sequence[Receiver]) -> None:
        self.selector.join([hash_selectors.Joiner(each.number, each.name, each.hash_ranges) for each in receivers])
        for each in receivers:
            self.receivers[each.number] = each
            if self.joins_behind:
                self.sent.joined(each.number)

    def leave(self, numbers: Collection[int]) -> None:
        """What they hold waits again."""
        self.selector.leave(numbers)
        for item in [item for item in self.in_flight if item.consumer in numbers]:
            self._release(item)
            self._wait(item, back=True)
        self.told(numbers)
        for number in numbers:
            del self.receivers[number]
            del self.permits[number]
            self.sent.left(number)

    def close(self, stream: int) -> None:
        """The consumers of the stream leave, and what it planned is planned no longer but where others hold it."""
        self.leave([each.number for each in self.receivers.values() if each.stream == stream])
        self.full.discard(stream)
        for item in self.ordinary.values():
            if stream in item.planners:
                item.planners.remove(stream)
                if not item.planners and item.where is Where.WAITS and not item.has_row:
                    self._unplan(item)

    def closed_last(self) -> None:
        """Nobody listens: nothing is in hand."""
        self._lose_memory()

    def _unplan(self, item: Item) -> None:
        del self.slots[item.slot].waits[item]
        item.where, item.taken_back, item.sent = Where.UNPLANNED, False, 0
        self.unplanned[item.at] = item
        self.sent.forget(item.at)

    def _lose_memory(self) -> None:
        was_nacked = [item for slot in self.slots.values() for item in slot.nacked if item.where is Where.NACKED]
        self._forget()
        self.full.clear()
        self.permits.clear()
        for item in [*self.items(Where.WAITS, Where.IN_FLIGHT, Where.STAGED, Where.UNPLANNED)]:
            item.consumer, item.planners, item.taken_back, item.sent = 0, set(), False, 0
            if item.has_row:
                self._wait(item, back=item.count > 0)
            else:
                item.where = Where.UNPLANNED
                self.unplanned[item.at] = item
        for item in was_nacked:
            item.sent = 0
            slot = self.slots[item.slot]
            slot.nacked[item] = slot.outstanding[item] = None

    def listened(self) -> None:
        """Somebody listens, for the first time since nobody did: what is due is derived in due order."""
        self._passes += 1
        for item in self.items(Where.WAITS):
            item.order = (self._passes, item.deliver_at_ms, *item.at)
            item.arrived = self.rounds
            item.back = item.is_unread = item.count > 0
        for slot in self.slots.values():
            slot.outstanding, slot.since_ms = dict(slot.nacked), self.elapsed_ms

    def crashed(self) -> None:
        """So it is after a crash; and the head passes again what is due."""
        self._lose_memory()
        for item in [*self.items(Where.WAITS)]:
            del self.slots[item.slot].waits[item]
            item.where = Where.PENDING

    def owner(self, slot: int) -> int:
        return int(self.selector.owners[slot])

    # ---- what comes

    def added(self, at: Position, deliver_at_ms: int, key_hash: int) -> None:
        assert at not in self.rows
        self.rows[at] = Item(at, deliver_at_ms, key_hash, Where.PENDING, has_row=True)

    def passed(self, now_ms: int, *, redelivered: bool, are_read: bool) -> None:
        """All rows that are due are in the backlog. `redelivered`: and all nacked ones whose time has come. `are_read`:
        others are being read from their buckets.
        """
        self._passes += 1
        for item in [*self.items(Where.PENDING)]:
            if item.deliver_at_ms <= now_ms:
                item.order = (self._passes, item.deliver_at_ms, *item.at)
                self._wait(item, back=item.count > 0)
                item.is_unread = item.back or are_read
        if redelivered:
            for item in [*self.items(Where.NACKED)]:
                if item.until_ms <= now_ms:
                    self._redelivered(item)

    def _redelivered(self, item: Item) -> None:
        del self.slots[item.slot].nacked[item]
        self._wait(item, back=True)

    def _wait(self, item: Item, *, back: bool) -> None:
        item.where, item.back, item.arrived, item.consumer = Where.WAITS, back, self.rounds, 0
        item.is_unread = False
        self.slots[item.slot].waits[item] = None

    def plan(self, stream: int, at: Position, key_hash: int, answer: int) -> None:
        """A stream planned a position. `answer`: the consumer that receives it now, 0: HELD."""
        item = self.ordinary.get(at)
        if at in self.rows or (item is not None and item.has_row):
            assert not answer, f"{at} comes by itself, and is planned for {answer}"
            return
        if item is None:
            item = self.ordinary[at] = Item(at, 0, key_hash, Where.UNPLANNED, has_row=False)
            self.unplanned[at] = item
        was_sent = self.sent.was_sent(at)
        item.planners.add(stream)
        self.sent.offer(at)
        if item.where is Where.IN_FLIGHT:
            here = item.consumer if self.receivers[item.consumer].stream == stream else 0
            assert answer == here, f"{item} is planned again for {answer}"
            self.sent.send(at)
            return
        if item.where is Where.UNPLANNED:
            self._plans += 1
            del self.unplanned[at]
            item.order = (self._plans,)
            # Who joined since waits for what was sent before.
            self._wait(item, back=self.joins_behind and was_sent)
        else:
            assert not answer, f"{item} waits, and is planned again for {answer}"
        if answer:
            assert self.receivers[answer].stream == stream, f"{item} is planned for a consumer of another stream"
            self.deliver(Delivery(answer, at, 0, item.key_hash, item.count), now_ms=0)

    def hold(self, at: Position, deliver_at_ms: int, key_hash: int, consumer: int) -> bool:
        """A consumer declares to hold a position; whether it is IN_FLIGHT at it now."""
        item = (self.rows if deliver_at_ms else self.ordinary).get(at)
        if item is None and not deliver_at_ms:
            # Nobody knows that it was acknowledged.
            item = self.ordinary[at] = self.unplanned[at] = Item(at, 0, key_hash, Where.UNPLANNED, has_row=False)
            self.left_rows -= 1
        if item is None or item.where not in (Where.WAITS, Where.UNPLANNED):
            return False
        slot = self.slots[item.slot]
        if self.drains and any(other != consumer for other in +slot.held):
            return False
        if self.blocks and not slot.is_bounded_out and (slot.nacked or item.taken_back):
            return False
        slot.waits.pop(item, None)
        slot.is_disordered |= any(other.sent and other.at < at for other in slot.waits)
        self.unplanned.pop(at, None)
        item.planners.add(self.receivers[consumer].stream)
        item.where, item.consumer, item.taken_back = Where.IN_FLIGHT, consumer, False
        if not deliver_at_ms:
            self.sent.send(at)
        self._hold(item)
        return True

    # ---- hand-outs

    def deliver(self, sent: Delivery, *, now_ms: int) -> Item:
        """A consumer receives a position, which is IN_FLIGHT at it. Raises AssertionError where a rule says no."""
        item = (self.rows if sent.deliver_at_ms else self.ordinary).get(sent.at)
        assert item is not None, f"{sent} was never added or planned, or has left"
        assert item.deliver_at_ms == sent.deliver_at_ms, f"{item} is handed out with another time: {sent}"
        assert item.key_hash == sent.key_hash, f"{item} is handed out with another key: {sent}"
        assert item.deliver_at_ms <= now_ms, f"{item} is early at {now_ms}"
        if item.where is Where.NACKED and item.until_ms <= now_ms:
            self._redelivered(item)
        assert item.where is Where.WAITS, f"{item} is handed out to {sent.consumer}"
        assert item.count == sent.count, f"{item} was redelivered {item.count} times, not {sent.count}"
        slot = self.slots[item.slot]
        self._may_receive(item, slot, sent.consumer)
        for other in slot.waits:
            assert not self.precedes(other, item), f"{item} passes {other}"
        del slot.waits[item]
        self.deliveries += 1
        item.where, item.consumer, item.taken_back = Where.IN_FLIGHT, sent.consumer, False
        item.sent = item.sent or self.deliveries
        self._hold(item)
        self.permits[sent.consumer] -= 1
        if not item.deliver_at_ms:
            self.sent.send(item.at)
        return item

    def _hold(self, item: Item) -> None:
        slot = self.slots[item.slot]
        slot.held[item.consumer] += 1
        slot.holding[item] = item.consumer
        self.in_flight[item] = None

    def _may_receive(self, item: Item, slot: Slot, number: int) -> None:
        assert number in self.receivers, f"{item} goes to {number}, which is not there"
        assert len(self.in_flight) < self.in_flight_rows_max, f"{item} is one more than may be in flight"
        assert self.owner(item.slot) == number, f"{item} goes to {number}, and {self.owner(item.slot)} has its slot"
        assert self.permits[number] > 0, f"{item} goes to {number}, which has no permits"
        assert self.receivers[number].stream not in self.full, f"{item} goes to {number}, whose stream is full"
        if self.drains:
            others = {other for other in +slot.held if other != number}
            assert not others, f"{item} goes to {number}, and {others} hold {slot.holding}"
        if self.joins_behind:
            may = self.sent.may_receive(item.at, number)
            assert may, f"{item} goes to {number}, which joined at {self.sent.recent[number]}"
        if self.blocks:
            assert not slot.blocks, f"{item} goes to {number} behind {slot.nacked}"

    def precedes(self, one: Item, other: Item) -> bool:
        """Whether one that waits must be handed out before another one of its slot."""
        if one.is_unread or (other.is_unread and not one.back):
            return False
        if one.back or other.back:
            return one.back and (not other.back or one.at < other.at)
        alike = bool(one.deliver_at_ms) == bool(other.deliver_at_ms)
        if self.lets_go and one.deliver_at_ms and other.deliver_at_ms:
            return one.order < other.order and one.order[1:] < other.order[1:]
        if one.arrived < other.arrived:
            return alike or not self.lets_go
        return one.arrived == other.arrived and alike and one.order < other.order

    def ended_round(self) -> None:
        """Nothing more can be handed out now: each slot that waits has a reason."""
        for number, slot in self.slots.items():
            if slot.waits:
                firsts = [one for one in slot.waits if not any(self.precedes(other, one) for other in slot.waits)]
                assert any(self._reason(number, slot, one) for one in firsts), (
                    f"slot {number} of {self.owner(number)} with {self.permits[self.owner(number)]} permits waits for "
                    f"nothing: {firsts}; held {slot.holding}, nacked {slot.nacked}"
                )
        self.rounds += 1
        if not self.lets_go and any(self._takes(number) for number in self.receivers):
            # All that was READY was looked at.
            for slot in self.slots.values():
                for item in slot.waits:
                    item.is_unread &= not item.back

    def _takes(self, number: int) -> bool:
        if len(self.in_flight) >= self.in_flight_rows_max:
            return False
        return self.permits[number] > 0 and self.receivers[number].stream not in self.full

    def _reason(self, number: int, slot: Slot, item: Item) -> str:
        """Why a position waits; empty: for nothing."""
        owner = self.owner(number)
        if not owner:
            return "no consumer has its slot"
        if len(self.in_flight) >= self.in_flight_rows_max:
            return "as much is in flight as may be"
        if self.permits[owner] <= 0:
            return "no permits"
        if self.receivers[owner].stream in self.full:
            return "its stream is full"
        if self.drains and any(other != owner for other in +slot.held):
            return "its hash drains"
        # Of a row that was let go it is not known where it stands.
        if owner in self.sent.recent and (self.lets_go or not self.sent.must_receive(item.at, owner)):
            return "its consumer joined recently"
        if self.blocks and slot.blocks:
            return "a negative acknowledgement"
        return ""

    # ---- what becomes of it

    def _release(self, item: Item) -> None:
        slot = self.slots[item.slot]
        holder = slot.holding.pop(item, None)
        if holder is not None:
            slot.held[holder] -= 1
        self.in_flight.pop(item, None)

    def staged(self, item: Item) -> None:
        """A decision takes it out of everybody's hands, and is not durable yet."""
        slot = self.slots[item.slot]
        slot.waits.pop(item, None)
        self.in_flight.pop(item, None)
        item.where = Where.STAGED

    def nacking(self, item: Item) -> None:
        """It is about to be NACKED."""
        self.staged(item)
        slot = self.slots[item.slot]
        if not slot.outstanding:
            slot.since_ms = self.elapsed_ms
        slot.nacked[item] = slot.outstanding[item] = None
        self.sent.send(item.at)

    def nacked(self, item: Item, until_ms: int, count: int) -> None:
        """It is NACKED; from now on it has a row."""
        item.where, item.until_ms, item.count, item.has_row = Where.NACKED, until_ms, count, True
        item.taken_back = False
        self._release(item)

    def take_back(self, nacked: Collection[Item]) -> list[Item]:
        """What consumers give back, since they hold it behind one of its slot that is about to be NACKED."""
        given: list[Item] = []
        if self.blocks:
            for first in nacked:
                slot = self.slots[first.slot]
                given += [] if slot.is_bounded_out else [item for item in slot.holding if item.at > first.at]
        given = [item for item in dict.fromkeys(given) if item.where is Where.IN_FLIGHT]
        for item in given:
            if self.drains:
                # The consumer works on it until it is told.
                self.slots[item.slot].held[item.consumer] += 1
                self.untold.append((item.consumer, item.slot))
            self._release(item)
            self._wait(item, back=True)
            item.taken_back = True
        return given

    def told(self, consumers: Collection[int]) -> None:
        """Consumers know of everything that was taken back from them."""
        for consumer, slot in self.untold:
            if consumer in consumers:
                self.slots[slot].held[consumer] -= 1
        self.untold = [each for each in self.untold if each[0] not in consumers]

    def leaves(self, item: Item) -> None:
        """It is acknowledged, dead or trimmed."""
        self._release(item)
        slot = self.slots[item.slot]
        for each in (slot.waits, slot.nacked, slot.outstanding):
            each.pop(item, None)
        if not slot.outstanding:
            slot.is_bounded_out = False
        if not (slot.waits or slot.holding or slot.nacked):
            slot.is_disordered = False
        if item.deliver_at_ms:
            del self.rows[item.at]
        else:
            del self.ordinary[item.at]
            self.unplanned.pop(item.at, None)
            self.sent.acknowledge(item.at)
        item.where = Where.LEFT
        self.left_rows += 1

    def acknowledged_in_order(self, item: Item, together: Collection[Item]) -> None:
        """Under BLOCK_KEY no position is acknowledged before one of its slot that is before it and was delivered first.
        `together`: what the request names before it.
        """
        slot = self.slots[item.slot]
        if not self.blocks or not self.drains or slot.is_bounded_out or slot.is_disordered or not item.sent:
            return
        for other in [*slot.waits, *slot.holding, *slot.nacked]:
            if other.sent and other.sent < item.sent and other.at < item.at and other.where is not Where.STAGED:
                assert other in together, f"{item} is acknowledged before {other}"

    def every_second(self, elapsed_ms: int) -> None:
        """Slots that have waited too long for negative acknowledgements wait no more."""
        for slot in self.slots.values():
            if slot.outstanding and elapsed_ms - slot.since_ms >= self.policy.nack_block_max_ms:
                slot.is_bounded_out = True

    # ---- counts

    def draining(self) -> dict[int, int]:
        """Slots of which one consumer holds positions and another one has the slot, with how many positions."""
        found = {}
        for number, slot in self.slots.items():
            rows = sum(held for consumer, held in slot.held.items() if consumer != self.owner(number))
            if rows and self.owner(number):
                found[number] = rows
        return found

    def waiting(self) -> int:
        return sum(len(slot.waits) for slot in self.slots.values())
