"""What is true of redeliveries by what has landed: when positions come back, how often they did, and dead letters.

Owns: the rules for what lands: a position comes back once for each time that somebody asked, or a time-out did; what is
waiting is not counted again; ids of dead letters ascend and each leaves once, by who asked.
Does not own: the rows (`oracle`), and answers and hand-outs (`redelivery_promises`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.settings import LimitsSettings
from storage_backends.formats.manifest import SubscriptionPolicy
from storage_backends.formats.slot_format import (
    DeadLetterReason,
    DeadLetterRecord,
    NackRecord,
    PurgeRecord,
    ReplayRecord,
    SlotHeader,
)
from tests.simulation.positions import Position, entry_of, in_index, is_part, named

if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle, Row, TopicTruth

RedeliveryRecord: TypeAlias = NackRecord | DeadLetterRecord | ReplayRecord | PurgeRecord

# Two sums of times may differ by as much.
ROUNDING_S = 0.002

# So many policies of a subscription may have been in force when something that lands was decided.
LATEST_POLICIES = 3

# What a request names: of which subscription, ledger and entry, batch index.
Asked = tuple[str, Position, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Nacked:
    """That a subscription negatively acknowledged a row, the last time. `times`: how often since the row is there."""

    redeliver_at_ms: int
    count: int
    times: int
    slot: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """`position`: in its index."""

    dead_letter_id: int
    position: Position
    deliver_at_ms: int
    redelivery_count: int
    dead_at_ms: int
    reason: int
    text: str
    slot: int
    schedule_id: bytes = b""

    def is_asked_for(self, asked: DeadLetterFilter) -> bool:
        return (
            (asked.ids is None or self.dead_letter_id in asked.ids.tolist())
            and (asked.ledgers is None or asked.ledgers[0] <= self.position[0] <= asked.ledgers[1])
            and (asked.reason is None or asked.reason == self.reason)
            and (asked.from_ms is None or self.dead_at_ms >= asked.from_ms)
            and (asked.until_ms is None or self.dead_at_ms < asked.until_ms)
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A replay or a purge that was asked for, and may be under way still."""

    subscription: str
    filter: DeadLetterFilter
    replays: bool


@dataclasses.dataclass(slots=True, eq=False)
class Redeliveries:
    """What is true of one topic's redeliveries.

    `asked`: how many requests named a position so far, `under_way`: how many without an answer; `named`: by which
    redelivery counts; `rejected`: those that a request rejected. `dead_letters`: by subscription and id; `left`: the
    slots in which those that are no more left. `died`: by subscription and position, the slot of the last dead letter;
    `ended`: of an entry that left as a whole, and up to which count messages of it left with it for certain.
    `policies`: every one that a subscription has had. `leaving`: see there. `spared`: what was to die by the
    policies and came back (subscription, slot, how many dead letters there might be).
    """

    asked: collections.Counter[Asked] = dataclasses.field(default_factory=collections.Counter)
    under_way: collections.Counter[Asked] = dataclasses.field(default_factory=collections.Counter)
    rejected: set[Asked] = dataclasses.field(default_factory=set)
    named: dict[Asked, set[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    dead_letters: dict[int, dict[int, DeadLetter]] = dataclasses.field(default_factory=dict)
    left: dict[tuple[int, int], tuple[int, DeadLetter]] = dataclasses.field(default_factory=dict)
    last_ids: dict[int, int] = dataclasses.field(default_factory=dict)
    died: dict[tuple[int, Position], int] = dataclasses.field(default_factory=dict)
    ended: dict[tuple[int, Position], tuple[int, float]] = dataclasses.field(default_factory=dict)
    policies: dict[int, list[SubscriptionPolicy]] = dataclasses.field(default_factory=dict)
    leaving: dict[int, Leaving] = dataclasses.field(default_factory=dict)
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    spared: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def letters_about(self, subscription_id: int, slot: int) -> int:
        """How many dead letters there were when what is in the slot was decided, or left in the slots before it."""
        there = self.dead_letters.get(subscription_id, {}).values()
        left = (
            each for (number, _), (gone, each) in self.left.items() if number == subscription_id and gone > slot - 4
        )
        return sum(each.slot <= slot for each in itertools.chain(there, left))

    def timeout_ms(self, subscription_id: int) -> int | None:
        """The shortest ack time-out that has ever been in force."""
        policies = self.policies.get(subscription_id, ())
        return min((each.ack_timeout_ms for each in policies if each.ack_timeout_ms is not None), default=None)

    def entry_ended(self, subscription_id: int, entry: Position, slot: int, count: int, *, died: bool) -> None:
        """With its messages, but those that came back more often. A time-out counts, and may not have been known to
        who acknowledged it.
        """
        known = count if self.timeout_ms(subscription_id) is None else 0
        self.ended[subscription_id, entry] = slot, math.inf if died else known

    def keep(self, subscriptions: dict[int, SubscriptionPolicy]) -> None:
        """These subscriptions are there, with these policies."""
        for number, policy in subscriptions.items():
            known = self.policies.setdefault(number, [])
            if not known or known[-1] != policy:
                known.append(policy)
        self.dead_letters = {number: held for number, held in self.dead_letters.items() if number in subscriptions}


class RedeliveryTruth:
    """Applies the records of redeliveries, each row by itself. `breach`: a rule was broken."""

    def __init__(self, oracle: Oracle, breach: Callable[[str], None], limits: LimitsSettings) -> None:
        self._oracle = oracle
        self._breach = breach
        self._dead_letters_max = limits.dead_letters_per_subscription_max

    def landed(self, topic: TopicTruth, header: SlotHeader, record: RedeliveryRecord) -> None:
        """Of a subscription that is there."""
        if isinstance(record, NackRecord):
            rows = _rows(record, record.redeliver_at_ms, record.redelivery_count)
            for (position, deliver_at_ms, columns), schedule_id in zip(rows, record.rows.listed_ids(), strict=True):
                self._nacked(topic, header, record, position, deliver_at_ms, *columns, schedule_id=schedule_id)
        elif isinstance(record, DeadLetterRecord):
            rows = _rows(record, record.redelivery_count, record.dead_letter_id, record.dead_at_ms)
            for row, schedule_id in zip(rows, record.rows.listed_ids(), strict=True):
                self._died(topic, header, record, *row[:2], *row[2], schedule_id=schedule_id)
        elif isinstance(record, ReplayRecord):
            rows = _rows(record, record.dead_letter_id)
            ids = record.rows.listed_ids()
            for (position, deliver_at_ms, (dead_letter_id,)), schedule_id in zip(rows, ids, strict=True):
                letter = self._leaves(topic, header.slot, record.subscription_id, dead_letter_id, replays=True)
                if letter is not None and named(letter.position) != named(position):
                    self._breach(f"topic {topic.name}: dead letter {letter} is replayed as {position}")
                if letter is not None and schedule_id != letter.schedule_id:
                    self._breach(f"topic {topic.name}: dead letter {letter} is replayed with id {schedule_id!r}")
                self._oracle.new_row(topic, header.slot, position, deliver_at_ms, schedule_id=schedule_id)
        else:
            for dead_letter_id in record.dead_letter_id.tolist():
                self._leaves(topic, header.slot, record.subscription_id, dead_letter_id, replays=False)

    # ---- negative acknowledgements

    def _nacked(
        self,
        topic: TopicTruth,
        header: SlotHeader,
        record: NackRecord,
        position: Position,
        deliver_at_ms: int,
        redeliver_at_ms: int,
        count: int,
        *,
        schedule_id: bytes,
    ) -> None:
        number = record.subscription_id
        what = f"topic {topic.name}: {position} of {deliver_at_ms} for subscription {number}"
        base = _count_of_entry(topic, header.slot, number, position, count)
        if record.added:
            self._oracle.new_row(topic, header.slot, position, deliver_at_ms, schedule_id=schedule_id)
        row = topic.rows.get(position)
        if row is None:
            if position not in topic.missing:
                self._breach(f"{what} is negatively acknowledged and has no row")
            return
        if schedule_id != row.schedule_id:
            self._breach(f"{what} is negatively acknowledged with id {schedule_id!r}, and its row is {row}")
        if row.deliver_at_ms != deliver_at_ms or number not in topic.owes(row):
            self._breach(f"{what} is negatively acknowledged, and its row is {row}")
        if redeliver_at_ms < deliver_at_ms:
            self._breach(f"{what} comes back at {redeliver_at_ms}, before it is due")
        before = row.nacked.get(number)
        self._check_count(topic, row, number, position, count, base, header.epoch, what)
        times = (0 if before is None else before.times) + (count > (base if before is None else before.count))
        asked = topic.redeliveries.asked[topic.asked_as(number, position)]
        if asked < times and topic.redeliveries.timeout_ms(number) is None:
            self._breach(f"{what} is negatively acknowledged {times} times, and was asked for {asked} times")
        if count > (base if before is None else before.count):
            self._check_who(topic, number, position, row, what)
        row.nacked[number] = Nacked(redeliver_at_ms, count, times, header.slot, header.epoch)
        # One may have landed while the slot was under way, and another before its daemon knew it.
        latest = topic.redeliveries.policies.get(number, ())[-LATEST_POLICIES:]
        if latest and all(each.max_redeliver_count is not None and count > each.max_redeliver_count for each in latest):
            topic.redeliveries.spared.append((number, header.slot, self._dead_letters_max))

    def _check_count(
        self,
        topic: TopicTruth,
        row: Row,
        number: int,
        position: Position,
        count: int,
        base: int,
        epoch: int,
        what: str,
    ) -> None:
        """One more than before, or, of what is waiting, as before; or one more than was named. What somebody asked for
        counts above `base`.
        """
        before = row.nacked.get(number)
        named_counts = topic.redeliveries.named[topic.asked_as(number, position)]
        by_request = topic.redeliveries.timeout_ms(number) is None
        if before is not None and count > before.count and count <= base and by_request:
            self._breach(f"{what} counts {count}, and leaves with a hand-out of its entry that was before: {base}")
        if count - 1 in named_counts and count - 1 >= (base if before is None else before.count):
            return
        if before is not None and count == base + 1 > before.count:
            return
        if before is None:
            # A time-out goes on from the part itself.
            if count != base + 1 and (by_request or count != 1):
                self._breach(f"{what} counts {count} the first time, after {base}")
            return
        waits = before.redeliver_at_ms > self._oracle.latest_ms()
        came_back = row.handed_out.get(number) == (epoch, before.slot)
        may_be = {before.count} if waits else {before.count + 1} if came_back else {before.count, before.count + 1}
        if count not in may_be:
            self._breach(f"{what} counts {count}, after {before}; {waits=}, {came_back=}")

    def _check_who(self, topic: TopicTruth, number: int, position: Position, row: Row, what: str) -> None:
        """Whoever has it come back has asked, and is not answered yet; or it is a time-out."""
        if not topic.redeliveries.under_way[topic.asked_as(number, position)]:
            self._check_time_out(topic, number, row, what)

    def _check_time_out(self, topic: TopicTruth, number: int, row: Row, what: str) -> None:
        timeout_ms = topic.redeliveries.timeout_ms(number)
        handed_out_s = row.handed_out_s.get(number)
        if timeout_ms is None or handed_out_s is None:
            self._breach(f"{what} is negatively acknowledged, and nobody asks for it")
        elif self._oracle.now_s() - handed_out_s < timeout_ms / 1000 - ROUNDING_S:
            since_s = self._oracle.now_s() - handed_out_s
            self._breach(f"{what} is timed out after {since_s:.3f} s, and no time-out is below {timeout_ms} ms")

    # ---- dead letters

    def _died(
        self,
        topic: TopicTruth,
        header: SlotHeader,
        record: DeadLetterRecord,
        position: Position,
        deliver_at_ms: int,
        count: int,
        dead_letter_id: int,
        dead_at_ms: int,
        *,
        schedule_id: bytes,
    ) -> None:
        number, known = record.subscription_id, topic.redeliveries
        what = f"topic {topic.name}: dead letter {dead_letter_id} of {position} for subscription {number}"
        if dead_letter_id <= known.last_ids.get(number, 0):
            self._breach(f"{what} follows {known.last_ids[number]}")
        known.last_ids[number] = dead_letter_id
        if record.reason is DeadLetterReason.TRIMMED:
            self._check_trimmed(topic, number, position, what)
        else:
            self._check_death(topic, header, record, position, deliver_at_ms, count, what)
            row = topic.rows.get(position)
            if row is not None and row.schedule_id != schedule_id:
                self._breach(f"{what} has id {schedule_id!r}, and its row is {row}")
        topic.withdrawn[entry_of(position)] += 1
        letter = DeadLetter(
            dead_letter_id,
            position,
            deliver_at_ms,
            count,
            dead_at_ms,
            int(record.reason),
            record.text,
            header.slot,
            schedule_id,
        )
        letters = known.dead_letters.setdefault(number, {})
        letters[dead_letter_id] = letter
        if len(letters) > self._dead_letters_max:
            self._breach(f"{what}: there are {len(letters)}, and may be {self._dead_letters_max}")
        if record.reason is not DeadLetterReason.TRIMMED:
            known.died[number, position] = header.slot
            self._oracle.acknowledged(topic, header.slot, number, position, deliver_at_ms, died=True)

    def _check_trimmed(self, topic: TopicTruth, number: int, position: Position, what: str) -> None:
        """It is only listed: what leaves the backlog says another record of its slot, which comes before."""
        name = topic.subscriptions[number].name
        asked = [each for each in self._oracle.removals.values() if each.topic == topic.name and each.buries]
        if not any(each.subscription == name and each.names(position) for each in asked):
            self._breach(f"{what} is trimmed, and nobody asked for it")
        row = topic.rows.get(position)
        if row is not None and number in topic.owes(row):
            self._breach(f"{what} is trimmed, and is still owed: {row}")

    def _check_death(
        self,
        topic: TopicTruth,
        header: SlotHeader,
        record: DeadLetterRecord,
        position: Position,
        deliver_at_ms: int,
        count: int,
        what: str,
    ) -> None:
        number, known = record.subscription_id, topic.redeliveries
        row = topic.rows.get(position)
        strange = is_part(position) or count - 1 in known.named[topic.asked_as(number, position)]
        if row is not None and number in topic.owes(row):
            base = _count_of_entry(topic, header.slot, number, position, count)
            self._check_count(topic, row, number, position, count, base, header.epoch, what)
            self._check_who(topic, number, position, row, what)
        elif row is not None or (position not in topic.missing and deliver_at_ms and not strange):
            self._breach(f"{what} is not owed: {row}")
        self._check_reason(topic, record, position, count, what)

    def _check_reason(
        self, topic: TopicTruth, record: DeadLetterRecord, position: Position, count: int, what: str
    ) -> None:
        number, known = record.subscription_id, topic.redeliveries
        key = topic.asked_as(number, position)
        if record.reason is DeadLetterReason.REJECTED:
            if key not in known.rejected:
                self._breach(f"{what} was rejected by nobody")
            return
        if record.reason is not DeadLetterReason.TOO_OFTEN:
            self._breach(f"{what} died for {record.reason.name}, of which the simulation knows nothing")
            return
        most = [policy.max_redeliver_count for policy in known.policies.get(number, ())]
        if not any(each is not None and count > each for each in most):
            self._breach(f"{what} counts {count}, and no policy says that this is too often: {most}")

    def _leaves(
        self, topic: TopicTruth, slot: int, number: int, dead_letter_id: int, *, replays: bool
    ) -> DeadLetter | None:
        known = topic.redeliveries
        letter = known.dead_letters.get(number, {}).pop(dead_letter_id, None)
        what = f"topic {topic.name}: dead letter {dead_letter_id} of subscription {number}"
        if letter is None:
            self._breach(f"{what} leaves, and is not there")
            return None
        known.left[number, dead_letter_id] = slot, letter
        name = topic.subscriptions[number].name
        asked = (each for each in known.leaving.values() if (each.subscription, each.replays) == (name, replays))
        if not any(letter.is_asked_for(each.filter) for each in asked):
            self._breach(f"{what} is {'replayed' if replays else 'purged'}, and nobody asked for it")
        return letter


def _count_of_entry(topic: TopicTruth, slot: int, number: int, position: Position, count: int) -> int:
    """From where a part that counts `count` goes on at least: the hand-outs of its entry, by either row. What became of
    that in the same slot may come after.
    """
    if not is_part(position):
        return 0
    entry = entry_of(position)
    ended_in, _ = topic.redeliveries.ended.get((number, entry), (0, 0.0))
    base = count - 1 if ended_in == slot else 0
    for key in (entry, in_index(entry, number)):
        row = topic.rows.get(key)
        nacked = row.nacked.get(number) if row is not None and number in topic.owes(row) else None
        if nacked is not None:
            base = max(base, min(nacked.count, count - 1) if nacked.slot == slot else nacked.count)
    return base


def _rows(
    record: NackRecord | DeadLetterRecord | ReplayRecord, *columns: object
) -> Iterator[tuple[Position, int, Sequence[int]]]:
    """(position in its index, deliver_at_ms, what the columns have) of each row."""
    rows = record.rows
    lists = [column.tolist() for column in columns]  # type: ignore[attr-defined]
    positions = zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist(), strict=True)
    for place, (ledger_id, entry_id, deliver_at_ms) in enumerate(positions):
        position = in_index((ledger_id, entry_id), record.index_id)
        yield position, deliver_at_ms, [column[place] for column in lists]


def is_of_redelivery(record: object) -> bool:
    return isinstance(record, NackRecord | DeadLetterRecord | ReplayRecord | PurgeRecord)
