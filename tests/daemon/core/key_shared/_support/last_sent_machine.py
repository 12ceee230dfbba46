"""The last sent position and plain lists side by side: positions are offered, sent, acknowledged, mark-deleted and
forgotten, consumers join and leave, in whatever order.

Owns: the rules, and a limit so small that a few positions are pruned.
Does not own: the worked examples (`test_last_sent_position`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from daemon.core.key_shared import last_sent_position
from daemon.core.key_shared.hash_slots import U16
from daemon.core.key_shared.last_sent_position import LastSentPosition, Position
from storage_backends.formats.row_columns import U64

# Of several pages, ledgers in another order than they come, and gaps of entries.
POSITIONS: list[Position] = [
    (ledger, entry) for ledger in (9, 3, 1 << 50) for entry in (0, 1, 2, 3, 70_000, (1 << 32) + 1, (1 << 64) - 1)
]
# One beyond what the bounds of few consumers have room for.
CONSUMERS = (1, 2, 3, 40, 65_535)

some_positions = st.lists(st.sampled_from(POSITIONS), max_size=8)
# What a dispatcher plans: a piece of the log.
pieces = st.tuples(st.integers(0, len(POSITIONS) - 1), st.integers(1, 9)).map(
    lambda piece: POSITIONS[piece[0] : sum(piece)]
)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Inside, a few positions are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_sent_position, "PRUNED_MIN", 2)
        yield


def columns(positions: Sequence[Position]) -> tuple[U64, U64]:
    ledgers, entries = zip(*positions, strict=True) if positions else ((), ())
    return np.array(ledgers, np.uint64), np.array(entries, np.uint64)


def u16(*values: int) -> U16:
    return np.array(values, np.uint16)


@dataclasses.dataclass(eq=False)
class Offered:
    position: Position
    is_sent: bool = False
    is_acknowledged: bool = False


@dataclasses.dataclass
class Recent:
    """`behind`: it is recent as long as that is not mark-deleted. `bound`: the highest position it may receive."""

    joined: Position
    behind: Offered
    bound: Position


class Lists:
    """What the module's documentation says, in lists."""

    def __init__(self) -> None:
        self.there: list[Offered] = []
        self.mark_deleted: Position | None = None
        # Sent contiguously since everything that was so was mark-deleted.
        self.passed: list[Offered] = []
        self.recent: dict[int, Recent] = {}
        self.joined: dict[int, Position] = {}
        self.released: list[int] = []

    def find(self, position: Position) -> Offered | None:
        return next((each for each in self.there if each.position == position), None)

    def offer(self, positions: Sequence[Position]) -> None:
        for position in positions:
            found = self.find(position)
            if found is None:
                self.there.append(Offered(position))
            else:
                found.is_acknowledged = False

    def send(self, positions: Sequence[Position]) -> None:
        for each in self.there:
            each.is_sent |= each.position in positions
        self.tidy()

    def acknowledge(self, positions: Sequence[Position]) -> None:
        for each in self.there:
            if each.position in positions:
                each.is_sent = each.is_acknowledged = True
        self.tidy()

    def mark_delete(self, position: Position) -> list[Position]:
        ledger, entry = position
        below = [each for each in self.there if each.position[0] == ledger and each.position[1] <= entry]
        fresh: list[Position] = []
        if below:
            last = max(below, key=lambda each: each.position[1])
            fresh = [
                each.position
                for each in self.there[: self.there.index(last) + 1]
                if not each.is_acknowledged and not (each.position[0] == ledger and each.position[1] > entry)
            ]
            self.acknowledge(fresh)
        if self.mark_deleted is None:
            self.mark_deleted = position
        return fresh

    def forget(self, positions: Sequence[Position]) -> None:
        self.there = [each for each in self.there if each.is_sent or each.position not in positions]
        self.tidy()

    def contiguous(self) -> list[Offered]:
        end = next((place for place, each in enumerate(self.there) if not each.is_sent), len(self.there))
        return self.there[:end]

    def tidy(self) -> None:
        self.passed += [each for each in self.contiguous() if each not in self.passed]
        while self.there and self.there[0].is_acknowledged:
            self.mark_deleted = self.there.pop(0).position
        if not self.contiguous():
            self.passed.clear()
        for consumer, recent in list(self.recent.items()):
            if recent.behind not in self.there:
                del self.recent[consumer]
                self.released.append(consumer)

    @property
    def last_sent(self) -> Position | None:
        contiguous = self.contiguous()
        return contiguous[-1].position if contiguous else self.mark_deleted

    def individually_sent(self) -> list[tuple[Position, Position]]:
        ranges = []
        for place, each in enumerate(self.there):
            if place and each.is_sent and not self.there[place - 1].is_sent:
                end = next((p for p in range(place, len(self.there)) if not self.there[p].is_sent), len(self.there))
                ranges.append((self.there[place - 1].position, self.there[end - 1].position))
        return ranges

    def join(self, consumer: int) -> None:
        if self.last_sent is not None:
            self.joined[consumer] = self.last_sent
        if contiguous := self.contiguous():
            highest = max(each.position for each in self.passed)
            self.recent[consumer] = Recent(contiguous[-1].position, contiguous[-1], highest)

    def leave(self, consumer: int) -> None:
        self.joined.pop(consumer, None)
        self.recent.pop(consumer, None)
        self.released = [each for each in self.released if each != consumer]

    def may_receive(self, position: Position, consumer: int) -> bool:
        if consumer not in self.recent:
            return True
        found = self.find(position)
        return position <= self.recent[consumer].bound and (found is None or found.is_sent)


class LastSentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.last_sent = LastSentPosition()
        self.lists = Lists()
        self.here: set[int] = set()

    @initialize(position=st.none() | st.sampled_from(POSITIONS))
    def begin(self, position: Position | None) -> None:
        if position is not None:
            self.mark_delete(position)

    @rule(positions=pieces | some_positions)
    def offer(self, positions: list[Position]) -> None:
        self.last_sent.offer(*columns(positions))
        self.lists.offer(positions)

    @rule(positions=some_positions)
    def send(self, positions: list[Position]) -> None:
        self.last_sent.sent(*columns(positions))
        self.lists.send(positions)

    @rule(rows=st.integers(1, 6))
    def send_the_next(self, rows: int) -> None:
        self.send([each.position for each in self.lists.there if not each.is_sent][:rows])

    @rule(positions=some_positions)
    def acknowledge(self, positions: list[Position]) -> None:
        self.last_sent.acknowledged(*columns(positions))
        self.lists.acknowledge(positions)

    @rule(rows=st.integers(1, 6))
    def acknowledge_the_next(self, rows: int) -> None:
        self.acknowledge([each.position for each in self.lists.there[:rows]])

    @rule(position=st.sampled_from(POSITIONS))
    def mark_delete(self, position: Position) -> None:
        ledgers, entries = self.last_sent.mark_delete(*position)
        expected = self.lists.mark_delete(position)
        assert list(zip(ledgers.tolist(), entries.tolist(), strict=True)) == expected

    @rule(positions=some_positions)
    def forget(self, positions: list[Position]) -> None:
        self.last_sent.forget(*columns(positions))
        self.lists.forget(positions)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def join_or_leave(self, consumer: int) -> None:
        if consumer in self.here:
            self.last_sent.left(consumer)
            self.lists.leave(consumer)
        else:
            self.last_sent.joined(consumer)
            self.lists.join(consumer)
        self.here ^= {consumer}

    @rule()
    def take_released(self) -> None:
        assert self.last_sent.take_released() == self.lists.released
        self.lists.released = []

    @invariant()
    def each_may_receive_what_the_lists_say(self) -> None:
        asked = [(position, consumer) for consumer in CONSUMERS for position in POSITIONS]
        may = self.last_sent.may_receive(*columns([each for each, _ in asked]), u16(*[each for _, each in asked]))
        assert may.tolist() == [self.lists.may_receive(*each) for each in asked]

    @invariant()
    def a_recent_consumer_may_receive_what_it_waits_for(self) -> None:
        """Or it would be recent for ever."""
        for consumer, recent in self.lists.recent.items():
            waited_for = [each.position for each in self.lists.there[: self.lists.there.index(recent.behind) + 1]]
            assert self.last_sent.may_receive(*columns(waited_for), u16(*[consumer] * len(waited_for))).all()

    @invariant()
    def it_is_as_the_lists_say(self) -> None:
        assert self.last_sent.mark_deleted == self.lists.mark_deleted
        assert self.last_sent.last_sent == self.lists.last_sent
        assert self.last_sent.individually_sent() == self.lists.individually_sent()
        assert self.last_sent.individually_sent(limit=1) == self.lists.individually_sent()[-1:]
        assert self.last_sent.has_recent == bool(self.lists.recent)
        expected = [(consumer, each.joined) for consumer, each in self.lists.recent.items()]
        assert self.last_sent.after_mark_delete() == expected
        assert [self.last_sent.joined_position(each) for each in CONSUMERS] == list(
            map(self.lists.joined.get, CONSUMERS)
        )

    @invariant()
    def what_was_sent_is_known(self) -> None:
        sent = {each.position for each in self.lists.there if each.is_sent}
        assert self.last_sent.were_sent(*columns(POSITIONS)).tolist() == [each in sent for each in POSITIONS]
