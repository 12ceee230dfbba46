"""Anything that may happen to a KEY_SHARED subscription, in an order that a seed decides.

Owns: which request or event comes next, and with what.
Does not own: saying it to the topic and to the oracle (`order_pair`), and the rules (`order_oracle`).

Consumers are well-behaved: of one hash they acknowledge in the order in which they received. Under SKIP they also do
not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from daemon.core.key_shared.hash_slots import HASH_SLOTS, HashRange
from storage_backends.formats.manifest import HashSelector, KeyOrder, KeySharedPolicy, NackOrder
from tests.daemon.core._support import nacking
from tests.daemon.core.key_shared._support.order_items import Item, Position, Where
from tests.daemon.core.key_shared._support.order_pair import NO_LIMIT_ROWS, Hand, OrderPair

NAMES = ("one", "two", "three", "four", "five")
CONSUMERS_MAX = 7
STREAMS_MAX = 3
# Of positions that have not left, more than these no request makes.
OUTSTANDING_MAX = 120
STICKY_BLOCKS = 16
BLOCK_SLOTS = HASH_SLOTS // STICKY_BLOCKS
NACK_BLOCK_MAX_MS = 4_000


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """`ready_rows_max`: how many READY rows are kept; `in_flight_rows_max`: as in the policy. `plain`: consumers only
    join, and nothing is delayed or comes back.
    """

    selector: HashSelector = HashSelector.CONSISTENT_HASHING
    order: KeyOrder = KeyOrder.DRAINING_HASHES
    nack_order: NackOrder = NackOrder.SKIP
    out_of_order: bool = False
    ready_rows_max: int = NO_LIMIT_ROWS
    in_flight_rows_max: int | None = None
    plain: bool = False

    def __str__(self) -> str:
        parts = [self.selector.name, self.order.name, self.nack_order.name]
        parts += ["OUT_OF_ORDER"] if self.out_of_order else []
        parts += [f"READY_{self.ready_rows_max}"] if self.ready_rows_max < NO_LIMIT_ROWS else []
        parts += [f"IN_FLIGHT_{self.in_flight_rows_max}"] if self.in_flight_rows_max else []
        return "-".join((*parts, "PLAIN") if self.plain else parts)

    @property
    def policy(self) -> KeySharedPolicy:
        return KeySharedPolicy(
            selector=self.selector,
            points_per_consumer=20,
            order=self.order,
            allow_out_of_order_delivery=self.out_of_order,
            nack_order=self.nack_order,
            nack_block_max_ms=NACK_BLOCK_MAX_MS,
        )


class OrderDriver:
    """One run. `operations`: how many were done."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.random = random.Random(f"{profile} {seed}")
        self.profile = profile
        self.operations = 0
        self.pair = OrderPair(
            profile.policy,
            ready_rows_max=profile.ready_rows_max,
            in_flight_rows_max=profile.in_flight_rows_max,
            lets_go=profile.ready_rows_max < NO_LIMIT_ROWS,
        )
        self.oracle, self.topic = self.pair.oracle, self.pair.topic
        self.keys = self._some_keys()
        self._positions = ((ledger, entry) for ledger in itertools.count(10) for entry in range(300))
        self._key_of: dict[Position, int] = {}
        # Ordinary positions that must be planned again.
        self._again: set[Position] = set()
        self._starved: set[int] = set()
        self._away: list[list[Hand]] = []
        self._gone: collections.deque[tuple[Position, int]] = collections.deque(maxlen=20)
        self._events = [*self._all_events()]

    def _some_keys(self) -> list[int]:
        """Key hashes; some of one slot, one for positions without a key."""
        slots = [0, *(self.random.randrange(HASH_SLOTS) for _ in range(25))]
        keys = [0, *((self.random.randrange(1, 1 << 16) << 16) | slot for slot in slots)]
        return keys + [key ^ (1 << 31) for key in keys[5:9]]

    def _all_events(self) -> list[tuple[int, Callable[[], None]]]:
        common: list[tuple[int, Callable[[], None]]] = [
            (14, self.hand_out),
            (10, self.hand_out_some),
            (12, self.plan),
            (16, self.acknowledge),
            (12, self.grant),
            (3, self.join),
            (3, self.fill_or_empty_an_outbox),
            (1, self.starve),
            (2, self.see_counts),
            (1, self.seal),
        ]
        if self.profile.plain:
            return common
        if self.profile.nack_order is NackOrder.BLOCK_KEY:
            common.append((8, self.tell))
        return [
            *common,
            (10, self.add),
            (8, self.pass_time),
            (8, self.nack),
            (2, self.time_out),
            (3, self.leave),
            (2, self.open),
            (1, self.close),
            (2, self.plan_again),
            (2, self.plan_what_has_a_row),
            (3, self.acknowledge_anything),
            (1, self.trim),
            (1, self.mark_delete),
            (1, self.checkpoint),
            (1, self.crash_now_and_then),
            (2, self.commit),
        ]

    # ---- runs

    def run(self, operations: int) -> None:
        weights = [*itertools.accumulate(weight for weight, _ in self._events)]
        self._reopen([])
        for _ in range(operations):
            # One by one: a longer run begins as a shorter one.
            ((_, event),) = self.random.choices(self._events, cum_weights=weights)
            self.operations += 1
            event()
            self.pair.check_counts()
        self.end()

    def end(self) -> None:
        """Everybody gets permits and acknowledges: nothing is left."""
        for stream in [*self.oracle.full]:
            self.pair.set_full(stream, False)
        self._starved.clear()
        if not self.topic.streams:
            self._reopen([])
        self._own_all_slots()
        for _ in range(1_000):
            self._plan_again_all()
            self.pair.wait(1_000)
            self.pair.tell(self.oracle.receivers)
            for number in self.oracle.receivers:
                self.pair.grant(number, 1_000)
            self.pair.round()
            while self.oracle.in_flight:
                self.pair.acknowledge([self._first_of_a_slot(item) for item in [next(iter(self.oracle.in_flight))]])
            if not self.oracle.rows and not self.oracle.ordinary:
                break
        lost = [*self.oracle.rows.values(), *self.oracle.ordinary.values()]
        assert not lost, f"{len(lost)} positions are lost: {lost[:3]}"
        assert not self.topic.state.backlog
        assert not len(self.topic.state.in_flight)
        assert self.oracle.left_rows == len(self._key_of), "positions left twice, or never"

    def _own_all_slots(self) -> None:
        if self.profile.selector is HashSelector.STICKY and (free := self._free_blocks()):
            self.pair.join(min(self.topic.streams), "rest", tuple(map(_block, free)))
        elif not self.oracle.receivers:
            self.pair.join(min(self.topic.streams), "rest")

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # ---- positions come

    def _new(self) -> tuple[Position, int]:
        at = next(self._positions)
        # A few keys have most positions.
        key = self.keys[min(int(self.random.expovariate(0.25)), len(self.keys) - 1)]
        self._key_of[at] = key
        return at, key

    def _has_room(self) -> bool:
        return len(self.oracle.rows) + len(self.oracle.ordinary) < OUTSTANDING_MAX

    def add(self) -> None:
        if not self._has_room():
            return
        late = not self.pair.lets_go
        kind = self.random.choice(("constant", "random", "late" if late else "random", "soon"))
        rows = []
        for _ in range(self.random.randint(1, 5)):
            at, key = self._new()
            delay_ms = {"constant": 200, "random": self.random.randint(1, 3_000), "late": 0, "soon": 1}[kind]
            rows.append((at, self.topic.now_ms + delay_ms, key))
        self.pair.add(rows)

    def plan(self) -> None:
        if not self.topic.streams:
            return
        if self._again:
            self._plan_some_again()
        elif self._has_room():
            positions = [self._new() for _ in range(self.random.randint(1, 6))]
            self.pair.plan(self._some_stream(), positions)

    def plan_again(self) -> None:
        """Positions that are outstanding, too."""
        live = sorted(self.oracle.ordinary)
        if self.topic.streams and live and not self._again:
            first = self.random.randrange(len(live))
            self.pair.plan(self._some_stream(), [(at, self._key_of[at]) for at in live[first : first + 3]])

    def plan_what_has_a_row(self) -> None:
        live = sorted(self.oracle.rows)
        if self.topic.streams and live and not self._again:
            at = self.random.choice(live)
            self.pair.plan(self._some_stream(), [(at, self._key_of[at])])

    def _plan_some_again(self) -> None:
        self._again &= self.oracle.ordinary.keys()
        chosen = sorted(self._again)[: self.random.randint(1, 20)]
        if chosen:
            self.pair.plan(self._some_stream(), [(at, self._key_of[at]) for at in chosen])
            self._again.difference_update(chosen)

    def _plan_again_all(self) -> None:
        while self._again & self.oracle.ordinary.keys():
            self._plan_some_again()

    # ---- time and hand-outs

    def pass_time(self) -> None:
        self.pair.wait(self.random.choice((1, 1, 5, 50, 200, 700)))

    def hand_out(self) -> None:
        if self.topic.streams:
            self.pair.round(self.random.choice((3, 20, 1_000)))

    def hand_out_some(self) -> None:
        if self.topic.streams:
            if self._chance(0.5):
                self.pair.pass_due()
            self.pair.some(self.random.randint(1, 6))

    # ---- consumers and streams

    def _some_stream(self) -> int:
        return self.random.choice(sorted(self.topic.streams))

    def _some_consumer(self) -> int:
        return self.random.choice(sorted(self.oracle.receivers))

    def _free_blocks(self) -> list[int]:
        owners = self.oracle.selector.owners
        return [block for block in range(STICKY_BLOCKS) if not owners[block * BLOCK_SLOTS]]

    def join(self) -> None:
        if not self.topic.streams or len(self.oracle.receivers) >= CONSUMERS_MAX:
            return
        ranges: tuple[HashRange, ...] = ()
        if self.profile.selector is HashSelector.STICKY:
            free = self._free_blocks()
            chosen = self.random.sample(free, min(len(free), self.random.randint(1, 6)))
            ranges = tuple(map(_block, sorted(chosen)))
            if not ranges:
                return
        self.pair.join(self._some_stream(), self.random.choice(NAMES), ranges, self.random.choice((0, 3, 10)))

    def leave(self) -> None:
        if len(self.oracle.receivers) > 1 or (self.oracle.receivers and self._chance(0.2)):
            self.pair.leave(self._some_consumer())
            self._after_a_departure()

    def _after_a_departure(self) -> None:
        self._starved &= self.oracle.receivers.keys()
        self._again |= self.oracle.unplanned.keys()

    def grant(self) -> None:
        willing = sorted(self.oracle.receivers.keys() - self._starved)
        if willing:
            number = self.random.choice(willing)
            if self.oracle.permits[number] < 30:
                self.pair.grant(number, self.random.randint(1, 12))

    def starve(self) -> None:
        """A consumer gets no permits for long."""
        self._starved = {self._some_consumer()} if self.oracle.receivers and self._chance(0.7) else set()

    def fill_or_empty_an_outbox(self) -> None:
        if self.oracle.full:
            self.pair.set_full(self.random.choice(sorted(self.oracle.full)), False)
        elif self.topic.streams and self._chance(0.5):
            self.pair.set_full(self._some_stream(), True)

    def open(self) -> None:
        if len(self.topic.streams) >= STREAMS_MAX:
            return
        if self._away and self._chance(0.7):
            self._reopen(self._away.pop(self.random.randrange(len(self._away))))
        else:
            self._reopen([])

    def close(self) -> None:
        if len(self.topic.streams) > 1 or (self.topic.streams and self._chance(0.3)):
            stream = self._some_stream()
            hands = self.pair.hands_of(stream)
            self.pair.close(stream)
            self._away = [*self._away, hands][-3:]
            self._after_a_departure()

    def _reopen(self, hands: Sequence[Hand]) -> None:
        """A stream with the consumers of an earlier one, as far as there is room for them."""
        room = CONSUMERS_MAX - len(self.oracle.receivers)
        if self.profile.selector is HashSelector.STICKY:
            owners = self.oracle.selector.owners
            hands = [
                hand
                for hand in hands
                if not any(owners[each.first : each.last + 1].any() for each in hand.receiver.hash_ranges)
            ]
        _, numbers = self.pair.open(hands=hands[: max(0, room)])
        for number in numbers:
            self.pair.grant(number, self.random.randint(1, 10))
        if not self.oracle.receivers or self._chance(0.5):
            self.join()
        self._after_a_departure()

    # ---- acknowledgements

    def _first_of_a_slot(self, item: Item) -> Item:
        """What its consumer received first of its slot."""
        holding = self.oracle.slots[item.slot].holding
        return next(
            each for each, holder in holding.items() if holder == item.consumer and each.where is Where.IN_FLIGHT
        )

    def _some_held(self, most: int) -> list[Item]:
        held = [*self.oracle.in_flight]
        return self.random.sample(held, min(len(held), self.random.randint(1, most)))

    def acknowledge(self) -> None:
        items = self._some_held(6)
        if self.profile.nack_order is NackOrder.BLOCK_KEY or self._chance(0.7):
            items = [self._first_of_a_slot(item) for item in items]
        items = [*dict.fromkeys(items)]
        if items:
            self._gone.extend(item.claim for item in items)
            self.pair.acknowledge(items, now=self._chance(0.8))

    def acknowledge_anything(self) -> None:
        """What has left, waits, or is NACKED."""
        if not self.topic.streams:
            return
        self.pair.commit()
        waits = [*self.oracle.items(Where.WAITS, Where.NACKED)]
        if waits and self._chance(0.3):
            item = self.random.choice(waits)
            if item.taken_back or self.profile.nack_order is NackOrder.SKIP or item.where is Where.NACKED:
                self.pair.acknowledge_waiting(item)
        elif self._gone:
            claim = self.random.choice(self._gone)
            items = self.oracle.rows if claim[1] else self.oracle.ordinary
            if claim[0] not in items:
                self.pair.acknowledge_gone(claim)

    # ---- negative acknowledgements

    def nack(self) -> None:
        items = self._some_held(3)
        if not items:
            return
        terms = nacking.terms(
            self.topic.now_ms,
            delay_ms=self.random.choice((0, 100, 1_000)),
            max_count=self.random.choice((None, None, 1, 3)),
            bits=self.random.choice((0, 0, 3, 8)),
        )
        reject = self._chance(0.1)
        delay_ms = None
        if not reject and self._chance(0.5):
            delay_ms = [self.random.choice((0, 1, 50, 300, 2_000, 7_000)) for _ in items]
        self.pair.nack(items, terms, delay_ms=delay_ms, reject=reject, now=self._chance(0.7))

    def tell(self) -> None:
        """The dispatcher of a consumer has read what was taken back."""
        if self.oracle.receivers:
            self.pair.tell([self._some_consumer()])

    def time_out(self) -> None:
        before_ms = self.topic.elapsed_ms - self.random.choice((100, 500, 2_000))
        if before_ms > 0:
            terms = nacking.terms(self.topic.now_ms, delay_ms=self.random.choice((0, 200)), max_count=4)
            self.pair.time_out(before_ms, terms, self.random.choice((1, 100)))

    # ---- what leaves otherwise, what is stored, and crashes

    def trim(self) -> None:
        at = min(self.oracle.rows, default=None)
        if at is not None and self._chance(0.3):
            self.pair.trim(at[0], at[1] + self.random.randint(0, 5))
            self._again &= self.oracle.ordinary.keys()

    def mark_delete(self) -> None:
        if not self.topic.streams:
            return
        offered = self.oracle.sent.offered()
        # Where log and list agree about what is up to it.
        cuts = [
            place
            for place in range(min(6, len(offered)))
            if max(offered[: place + 1]) == offered[place] == min(offered[place:])
        ]
        if cuts and self._chance(0.2):
            self.pair.mark_delete(offered[self.random.choice(cuts)])
            self._again &= self.oracle.ordinary.keys()

    def commit(self) -> None:
        self.pair.commit()

    def seal(self) -> None:
        """A seal begins, or those that began are finished; a crash may come between."""
        self.pair.commit()
        if not self.topic.seals and self._chance(0.7):
            self.topic.begin_seal()
        near_ms = self.topic.now_ms + self.random.choice((0, 5_000))
        while self.topic.seals and self._chance(0.8):
            self.topic.finish_seal(self.topic.write_seal(), near_ms=near_ms)
        self.topic.drop_empty()

    def checkpoint(self) -> None:
        self.pair.commit()
        self.topic.take_checkpoint()

    def crash_now_and_then(self) -> None:
        if self._chance(0.3):
            self.crash()

    def crash(self) -> None:
        for hands in self.pair.crash():
            if self._chance(0.6):
                self._away.append(hands)
        self._starved.clear()
        self.random.shuffle(self._away)
        self._away = self._away[-3:]
        if self.profile.nack_order is NackOrder.SKIP and self._chance(0.2):
            # The daemon serves before everything that is due was passed.
            self._away.clear()
        else:
            self.pair.pass_due()
        while self._away and self._chance(0.7):
            self._reopen(self._away.pop())
        if not self.topic.streams and self._chance(0.7):
            self._reopen([])
        self._again = set(self.oracle.ordinary)

    def see_counts(self) -> None:
        if self.topic.streams:
            self.pair.check_stats()


def _block(block: int) -> HashRange:
    return HashRange(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS - 1)
