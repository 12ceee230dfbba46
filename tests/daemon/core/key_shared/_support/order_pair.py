"""A topic and the oracle of key order side by side: every request is said to both, and what comes of it is compared.

Owns: requests, events and the counts that must agree after them.
Does not own: which of them happen, and when (`order_driver`, the tests).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.nack_decisions import RedeliveryTerms
from daemon.core.key_shared import key_shared_stats as key_shared_stats
from storage_backends.formats.manifest import KeySharedPolicy, SubscriptionPolicy
from tests.daemon.core._support import nacking
from tests.daemon.core._support.oracle import Claim
from tests.daemon.core.key_shared._support.order_items import Item, Position, Receiver, Where
from tests.daemon.core.key_shared._support.order_oracle import OrderOracle
from tests.daemon.core.key_shared._support.order_topic import Held, OrderedTopic

PORTION_ROWS = 1_000
NO_LIMIT_ROWS = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Hand:
    """What a consumer remembers to hold when its stream ends."""

    receiver: Receiver
    held: tuple[Held, ...]


class OrderPair:
    """`counted`: what happened, by what."""

    def __init__(
        self,
        policy: KeySharedPolicy,
        *,
        ready_rows_max: int = NO_LIMIT_ROWS,
        in_flight_rows_max: int | None = None,
        lets_go: bool = False,
    ) -> None:
        whole = SubscriptionPolicy(key_shared=policy, in_flight_rows_max=in_flight_rows_max)
        self.topic = OrderedTopic(whole, ready_rows_max=ready_rows_max)
        self.oracle = OrderOracle(policy, in_flight_rows_max=in_flight_rows_max or NO_LIMIT_ROWS, lets_go=lets_go)
        self.lets_go = lets_go
        self.counted: collections.Counter[str] = collections.Counter()
        # What is not durable: an acknowledgement or a death, or a negative acknowledgement.
        self._leaving: list[Item] = []
        self._nacking: list[tuple[Item, int, int]] = []
        # Since a crash.
        self._is_passed = True

    # ---- streams and consumers

    def open(
        self, names: Sequence[str] = (), ranges: Sequence[tuple[object, ...]] = (), hands: Sequence[Hand] = ()
    ) -> tuple[int, list[int]]:
        """A stream with consumers, some of which hold positions: (its number, those of the consumers)."""
        first = not self.topic.streams
        stream = self.topic.open_stream()
        if first:
            self.oracle.listened()
        joining = [self._receiver(stream, name) for name in names]
        joining += [
            dataclasses.replace(hand.receiver, number=self.topic.next_number(), stream=stream) for hand in hands
        ]
        if joining:
            self._join(joining)
        self.hold(
            stream,
            [
                dataclasses.replace(held, consumer=receiver.number)
                for receiver, hand in zip(joining[len(names) :], hands, strict=True)
                for held in hand.held
            ],
        )
        return stream, [receiver.number for receiver in joining]

    def _receiver(self, stream: int, name: str, hash_ranges: tuple[object, ...] = ()) -> Receiver:
        return Receiver(self.topic.next_number(), stream, name, hash_ranges)  # type: ignore[arg-type]

    def join(self, stream: int, name: str, hash_ranges: tuple[object, ...] = (), permits: int = 0) -> int:
        receiver = self._receiver(stream, name, hash_ranges)
        self._join([receiver])
        if permits:
            self.grant(receiver.number, permits)
        return receiver.number

    def _join(self, receivers: Sequence[Receiver]) -> None:
        self.topic.join(receivers)
        self.oracle.join(receivers)
        self.counted["joins"] += len(receivers)

    def hold(self, stream: int, held: Sequence[Held]) -> None:
        expected = [self.oracle.hold(each.at, each.deliver_at_ms, each.key_hash, each.consumer) for each in held]
        if held:
            accepted = self.topic.hold(stream, held)
            other = [each for each, *both in zip(held, accepted, expected, strict=True) if both[0] != both[1]]
            assert not other, f"these are wrongly held, or not: {other}"
        self.counted["held"] += sum(expected)
        self.counted["not held"] += len(held) - sum(expected)

    def hands_of(self, stream: int) -> list[Hand]:
        """What the consumers of a stream hold, in the order in which they received it."""
        return [
            Hand(
                receiver,
                tuple(
                    Held(item.at, item.deliver_at_ms, item.key_hash, receiver.number)
                    for item in self.oracle.in_flight
                    if item.consumer == receiver.number
                ),
            )
            for receiver in self.oracle.receivers.values()
            if receiver.stream == stream
        ]

    def leave(self, *numbers: int) -> None:
        self.topic.leave(numbers)
        self.oracle.leave(numbers)
        self.counted["leaves"] += len(numbers)

    def close(self, stream: int) -> None:
        self.topic.close_stream(stream)
        self.oracle.close(stream)
        if not self.topic.streams:
            self.commit()
            self.oracle.closed_last()
        self.counted["streams closed"] += 1

    def grant(self, number: int, permits: int) -> None:
        self.topic.shared.grant(number, permits)
        self.oracle.permits[number] += permits

    def set_full(self, stream: int, is_full: bool) -> None:
        self.topic.shared.set_full(stream, is_full)
        (self.oracle.full.add if is_full else self.oracle.full.discard)(stream)

    # ---- positions come

    def add(self, rows: Sequence[tuple[Position, int, int]]) -> None:
        """Rows (position, deliver_at_ms, key_hash)."""
        self.topic.add_keyed(rows)
        self.commit()
        for at, due, key in rows:
            self.oracle.added(at, due, key)
        self.counted["rows added"] += len(rows)

    def plan(self, stream: int, positions: Sequence[tuple[Position, int]]) -> list[int]:
        answers = self.topic.plan(stream, positions)
        assert len(answers) == len(positions)
        for (at, key), answer in zip(positions, answers, strict=True):
            self.oracle.plan(stream, at, key, answer)
        self.counted["planned"] += len(positions)
        self.counted["planned and sent at once"] += sum(map(bool, answers))
        return answers

    # ---- time and hand-outs

    def wait(self, time_ms: int) -> None:
        self.topic.now_ms += time_ms
        self.topic.elapsed_ms += time_ms
        self.oracle.elapsed_ms = self.topic.elapsed_ms
        if self.topic.streams:
            self.topic.shared.every_second(elapsed_ms=self.topic.elapsed_ms)
            self.oracle.every_second(self.topic.elapsed_ms)

    def pass_due(self) -> None:
        topic = self.topic
        are_read = topic.state.reader is not None
        while wanted := topic.core.indexes.wanted_segments(topic.now_ms):
            topic.load(wanted)
        topic.pass_all()
        self._is_passed = True
        next_ms = topic.state.nacks.next_due_ms()
        redelivered = next_ms is None or next_ms > topic.now_ms
        self.oracle.passed(topic.now_ms, redelivered=redelivered, are_read=are_read)

    def some(self, limit: int) -> int:
        """One portion of hand-outs; how many."""
        self.topic.read_on(limit)
        sent = self.topic.hand_out_some(limit)
        for each in sent:
            self.oracle.deliver(each, now_ms=self.topic.now_ms)
        return len(sent)

    def round(self, limit: int = PORTION_ROWS) -> list[tuple[int, Position]]:
        """Everything that can be handed out is; (consumer, position) of each."""
        found = []
        while True:
            self.pass_due()
            for sent in self.topic.hand_out_all(limit):
                for each in sent:
                    self.oracle.deliver(each, now_ms=self.topic.now_ms)
                    found.append((each.consumer, each.at))
            next_ms = self.topic.core.next_redelivery_ms()
            if next_ms is None or next_ms > self.topic.now_ms:
                break
        self.oracle.ended_round()
        if not self.lets_go:
            waiting = len(self.topic.shared.waiting)
            unread = self.topic.state.ready_rows
            assert waiting + unread == self.oracle.waiting(), f"{waiting} + {unread}, not {self.oracle.waiting()} wait"
        self.counted["rounds"] += 1
        return found

    # ---- acknowledgements

    def acknowledge(self, items: Iterable[Item], *, now: bool = True) -> None:
        """Of positions that are IN_FLIGHT."""
        items = [*items]
        for place, item in enumerate(items):
            self.oracle.acknowledged_in_order(item, items[:place])
        ignored = self.topic.stage_acknowledge(self.topic.state, [item.claim for item in items])
        assert not ignored, f"of {items} {ignored} are ignored"
        for item in items:
            self._left(item)
        self.counted["acknowledged"] += len(items)
        if now:
            self.commit()

    def _left(self, item: Item) -> None:
        if item.has_row:
            self.oracle.staged(item)
            self._leaving.append(item)
        else:
            self.oracle.leaves(item)

    def acknowledge_gone(self, claim: tuple[Position, int]) -> None:
        """Of one that has left."""
        assert self.topic.stage_acknowledge(self.topic.state, [claim]) == 1
        self.counted["acknowledged too late"] += 1

    def acknowledge_waiting(self, item: Item) -> None:
        """Of one that is in no hand."""
        self.commit()
        ignored = self.topic.stage_acknowledge(self.topic.state, [item.claim])
        slot = self.oracle.slots[item.slot]
        behind = self.oracle.blocks and not slot.is_bounded_out and (item.taken_back or slot.blocks)
        if item.where is Where.WAITS and behind:
            assert ignored, f"{item} is acknowledged while it waits behind {slot.nacked}"
        elif not item.has_row:
            assert ignored or item.where is Where.WAITS
        if not ignored:
            self._left(item)
        self.counted["acknowledged in no hand"] += 1
        self.commit()

    # ---- negative acknowledgements

    def nack(
        self,
        items: Sequence[Item],
        terms: RedeliveryTerms,
        *,
        delay_ms: Sequence[int] | None = None,
        reject: bool = False,
        now: bool = True,
    ) -> None:
        claims = [Claim(*item.claim) for item in items]
        decided = nacking.stage_nack(self.topic, self.topic.state, claims, terms, delay_ms=delay_ms, reject=reject)
        assert not decided.ignored, f"of {items} {decided.ignored} are ignored"
        assert {place[1:] for place in decided.nacks.keys() | decided.dead.keys()} == {item.at for item in items}
        self._decided(items, decided)
        self.counted["nacked"] += len(items)
        if now:
            self.commit()

    def time_out(self, before_ms: int, terms: RedeliveryTerms, limit: int) -> None:
        """What is IN_FLIGHT for long is negatively acknowledged."""
        decided = nacking.stage_overdue(self.topic, self.topic.state, before_ms, terms, limit)
        places = decided.nacks.keys() | decided.dead.keys()
        items = [self._item_at(place) for place in sorted(places)]
        assert all(item.where is Where.IN_FLIGHT for item in items), f"of {items} some time out that nobody holds"
        self._decided(items, decided)
        self.counted["timed out"] += len(items)
        self.commit()

    def _item_at(self, place: tuple[int, int, int]) -> Item:
        index_id, *at = place
        return (self.oracle.ordinary if index_id else self.oracle.rows)[at[0], at[1]]

    def _decided(self, items: Sequence[Item], decided: nacking.Decided) -> None:
        nacks = {place[1:]: nack for place, nack in decided.nacks.items()}
        nacked = []
        for item in items:
            nack = nacks.get(item.at)
            if nack is None:
                self.oracle.staged(item)
                self._leaving.append(item)
                self.counted["dead"] += 1
                continue
            assert nack.count == item.count + 1, f"{item} counts as redelivered {nack.count} times"
            nacked.append(item)
            self.oracle.nacking(item)
            self._nacking.append((item, nack.redeliver_at_ms, nack.count))
        given = self.oracle.take_back(nacked)
        expected = {(item.at, item.deliver_at_ms) for item in given}
        taken = {(each.at, each.deliver_at_ms) for each in self.topic.taken_back()}
        assert taken == expected, f"behind {nacked} {taken} are taken back, not {expected}"
        self.counted["taken back"] += len(given)

    def tell(self, consumers: Collection[int]) -> None:
        """Consumers are told of everything that was taken back from them."""
        numbers = [consumer for consumer, _ in self.oracle.untold if consumer in consumers]
        if numbers:
            self.topic.shared.told(np.array(numbers, np.uint32))
            self.oracle.told(consumers)
            self.counted["told"] += len(numbers)

    def commit(self) -> None:
        """What is staged is durable."""
        self.topic.commit()
        for item in self._leaving:
            if item.where is not Where.LEFT:
                self.oracle.leaves(item)
        for item, until_ms, count in self._nacking:
            self.oracle.nacked(item, until_ms, count)
        self._leaving, self._nacking = [], []

    # ---- what leaves otherwise

    def trim(self, ledger_id: int, entry_id: int) -> None:
        self.commit()
        ranges = LedgerRanges(np.array([ledger_id], np.uint64), np.array([entry_id], np.uint64))
        rows = self.topic.trim_at_once(ranges)
        items = [item for item in self.oracle.rows.values() if item.at[0] == ledger_id and item.at[1] <= entry_id]
        items += [
            item
            for item in self.oracle.ordinary.values()
            if item.has_row and item.at[0] == ledger_id and item.at[1] <= entry_id
        ]
        assert rows == len(items), f"{rows} rows are trimmed, not {items}"
        for item in items:
            self.oracle.leaves(item)
        self.counted["trimmed"] += len(items)

    def mark_delete(self, at: Position) -> None:
        """Everything planned up to a position is acknowledged."""
        self.commit()
        self.topic.shared.plans.mark_delete(*at)
        for each in self.oracle.sent.acknowledged_up_to(at):
            item = self.oracle.ordinary.get(each)
            if item is not None and not item.has_row:
                self.oracle.leaves(item)
                self.counted["mark-deleted"] += 1
            self.oracle.sent.acknowledge(each)

    # ---- crashes

    def crash(self) -> list[list[Hand]]:
        """The daemon ends and another one takes over: what the consumers of each stream held."""
        hands = [self.hands_of(stream) for stream in sorted(self.topic.streams)]
        self._leaving, self._nacking = [], []
        self.topic.crash_and_recover()
        self.topic.streams.clear()
        self.oracle.crashed()
        self._is_passed = False
        self.counted["crashes"] += 1
        return hands

    # ---- counts

    def check_counts(self) -> None:
        """What is cheap to know of both sides agrees."""
        state, oracle = self.topic.state, self.oracle
        assert len(state.in_flight) == len(oracle.in_flight)
        held = collections.Counter(item.consumer for item in oracle.in_flight)
        for number in oracle.receivers:
            assert state.held_rows(number) == held[number], f"{number} holds {state.held_rows(number)} rows"
        if not self._is_passed:
            return
        due = (Where.WAITS, Where.IN_FLIGHT, Where.NACKED, Where.STAGED)
        known = sum(1 for item in oracle.items(*due) if item.has_row)
        assert state.backlog == known, f"a backlog of {state.backlog}, not {known}"

    def check_stats(self) -> None:
        """So does everything that is shown."""
        oracle, shared = self.oracle, self.topic.shared
        self.commit()
        stats = key_shared_stats.subscription_stats(shared)
        draining = oracle.draining() if oracle.drains else {}
        assert stats.consumers == len(oracle.receivers) == len(shared.consumers)
        assert (stats.draining_hashes, stats.draining_hashes_unacked) == (len(draining), sum(draining.values()))
        blocked = sum(slot.blocks for slot in oracle.slots.values()) if oracle.blocks else 0
        assert stats.nack_blocked_hashes == blocked, f"{stats.nack_blocked_hashes} hashes are blocked, not {blocked}"
        assert stats.slots_without_consumer == int(np.count_nonzero(oracle.selector.owners == 0))
        recent = oracle.sent.recent if oracle.joins_behind else {}
        shown = stats.consumers_after_mark_delete_position
        assert {each.number: each.last_sent_position_when_joining for each in shown} == recent
        held: dict[int, Collection[Item]] = {number: [] for number in oracle.receivers}
        for item in oracle.in_flight:
            held[item.consumer] = [*held[item.consumer], item]
        for each in key_shared_stats.consumer_stats(shared, 0, 1_000):
            number = each.number
            assert (each.permits, each.unacked) == (oracle.permits[number], len(held[number]))
            assert each.slots == oracle.selector.slots_of_consumer(number)
            slots = [item.slot for item in held[number]] + [slot for other, slot in oracle.untold if other == number]
            rows = collections.Counter(slot for slot in slots if slot in draining)
            shown_draining = {hashed.hash: hashed.unacked for hashed in each.draining_hashes}
            assert shown_draining == rows, f"{number} drains {shown_draining}"
