"""What a daemon promises by an answer, held against the truth at the moment of the answer.

Owns: the rules for answers to adds, acknowledgements, cancellations and reschedules, and for what is handed out.
Does not own: the truth (`oracle`), the calls (`workload`).

A request is looked at twice, when it is sent and when it is answered: what was true in between at no time must not be
claimed, and what was true all the time must be. When it is sent that is what the daemon that is asked has applied: a
slot may have landed and its writer not know it yet.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from daemon.call_values import SubscriptionCreated
from daemon.core.decisions.add_decisions import AddOutcome
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleOutcome
from daemon.settings import RedeliverySettings
from tests._support.engine_fixture import Daemon
from tests.simulation import positions as place
from tests.simulation.forwarding import Output
from tests.simulation.history import History
from tests.simulation.oracle import Oracle, Row, TopicTruth
from tests.simulation.positions import Position
from tests.simulation.redelivery_promises import RedeliveryPromises

# A daemon that does not know that it was superseded hands out for so long at most (R8), virtual seconds.
STALE_HAND_OUT_S = 15.0
# Nothing is answered on the strength of a confirmation of the epoch that is older (R8), virtual seconds.
STALE_ANSWER_S = 30.0
# Two sums of times may differ by as much.
ROUNDING_S = 0.001

Claim = tuple[Position, int]


@dataclasses.dataclass(slots=True, eq=False)
class OpenStream:
    """A dispatcher of one subscription, by a stream or a lease.

    `held`: what it was handed out and has not asked to acknowledge, or to have back later; `counts`: with which
    redelivery count it was handed out each position last. `handed_out`: of each position the generation of its row.
    """

    daemon: Daemon
    topic: str
    shard: int
    subscription_id: int
    epoch: int
    handed_out: dict[Position, tuple[int, int]] = dataclasses.field(default_factory=dict)
    held: dict[Position, int] = dataclasses.field(default_factory=dict)
    counts: dict[Position, int] = dataclasses.field(default_factory=dict)
    reads_late: bool = False
    """Whether it may not know yet what was shared out and taken back."""
    ends_s: float = math.inf
    """When what it holds may be handed to others: at its end, or that of its lease."""

    @property
    def closed(self) -> bool:
        return self.daemon.elapsed_s() > self.ends_s - ROUNDING_S

    def counts_of(self, claims: Iterable[Claim]) -> list[int]:
        """By which redelivery counts it names them; a message of an entry that came as a whole by that of the entry."""
        return [self._count_of(position) for position, _ in claims]

    def _count_of(self, position: Position) -> int:
        entry = place.entry_of(position)
        known = (position, entry, place.in_index(entry, self.subscription_id))
        return next((self.counts[each] for each in known if each in self.counts), 0)

    def close(self) -> None:
        self.ends_s = min(self.ends_s, self.daemon.elapsed_s())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A request under way. `slot`: the last one that the daemon had applied when it was sent. `positions`: ledgers and
    entries. `indexes`: those that it is about, as it was sent; None for all. `counts`: of an acknowledgement, which
    hand-outs it names.
    """

    daemon: Daemon
    topic: TopicTruth
    positions: tuple[Position, ...]
    slot: int
    indexes: tuple[int, ...] | None = None
    counts: tuple[int, ...] = ()

    def keys(self, position: Position) -> set[Position]:
        """The position in each index that the request is about."""
        if self.indexes is None:
            return self.topic.keys.get(position, set())
        return {place.in_index(position, index) for index in self.indexes}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Withdrawal:
    """A cancellation or reschedule under way. `rows`: of its positions when it was sent; the daemon's clock then."""

    sent: Sent
    rows: Mapping[Position, Row]
    sent_ms: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Creation:
    """A subscription that is being created. `clock_steps`: of the daemon when it was asked. `passed`: rows (position,
    slot) that were handed out under `epoch` before.
    """

    sent: Sent
    clock_steps: int
    epoch: int
    passed: frozenset[tuple[Position, int]]


class Promises:
    """Holds every answer of a run against the oracle."""

    def __init__(
        self,
        oracle: Oracle,
        history: History,
        live: Callable[[], Iterable[Daemon]],
        redelivery: RedeliverySettings,
        output: Output,
    ) -> None:
        self._live = live
        self._oracle = oracle
        # A former owner that hands it out makes the answer untrue, whoever hears it.
        oracle.leaving = self.check_former_owners
        self._history = history
        self.output = output
        self._done: set[tuple[str, Position, int, int]] = set()
        # Rows (topic, position, time) of which it was answered that they left before they were due.
        self._left: set[tuple[str, Position, int]] = set()
        # Rows (topic, position, slot in which they left) that a former owner handed out after they had left.
        self._left_and_handed_out: dict[tuple[str, Position, int], str] = {}
        # Positions (topic, position, time) with a row for everybody and one for a subscription alone, both of that
        # time: nobody can tell them apart.
        self._twins: set[tuple[str, Position, int]] = set()
        # When one of two such rows was handed out last, by topic, position, time and subscription.
        self._twins_came_s: dict[tuple[str, Position, int, int], float] = {}
        self._streams: list[OpenStream] = []
        self._withdrawing: collections.Counter[tuple[str, Position]] = collections.Counter()
        self.redeliveries = RedeliveryPromises(self, oracle, history, redelivery)
        self._holders: dict[tuple[str, int, int, Position], OpenStream] = {}
        self.received: dict[tuple[str, int], set[tuple[Position, int]]] = {}
        """By topic and subscription: every row (position, slot) that was handed out."""

    # ---- adds

    def sending_add(
        self,
        daemon: Daemon,
        topic: str,
        positions: Sequence[Position],
        times: Sequence[int | None],
        subscription: str | None = None,
    ) -> Sent:
        truth = self._oracle.topic(topic)
        for position, time in zip(positions, times, strict=True):
            truth.asked.setdefault(position, set()).add(time)
        return Sent(daemon, truth, tuple(positions), applied_slot(daemon, topic), self._added_to(truth, subscription))

    @staticmethod
    def _added_to(truth: TopicTruth, subscription: str | None) -> tuple[int, ...]:
        if subscription is not None:
            return tuple(number for number, each in truth.subscriptions.items() if each.name == subscription)
        return (0,) if truth.shared_index or not truth.subscriptions else tuple(truth.subscriptions)

    def add_answered(self, sent: Sent, outcome: AddOutcome, subscription: str | None = None) -> None:
        topic = sent.topic
        positions = set(sent.positions)
        keys = {position: sent.keys(position) for position in positions}
        of_any = {position: topic.keys.get(position, set()) for position in positions}
        self.check_confirmed(sent, max(topic.added.get(key, 0) for found in keys.values() for key in (*found, (0, 0))))
        repeated = len(sent.positions) - len(positions)
        if outcome.accepted + outcome.duplicates + len(outcome.returned_index) != len(sent.positions):
            self._breach(sent, f"{len(sent.positions)} positions were added and answered with {outcome}")
        returned = {sent.positions[index] for index in outcome.returned_index.tolist()}
        stored = positions - returned
        landed = sum(any(topic.added.get(key, 0) > sent.slot for key in of_any[position]) for position in stored)
        if outcome.accepted > landed:
            self._breach(sent, f"{outcome.accepted} positions were accepted, {landed} have landed")
        if sent.indexes != self._added_to(topic, subscription):
            # Between sending and answer the subscriptions were others.
            return
        there_all_the_time = sum(
            all(self._there_since(topic, key, sent.slot) for key in keys[position]) for position in stored
        )
        if outcome.duplicates - repeated < there_all_the_time:
            self._breach(sent, f"{outcome.duplicates} duplicates, {there_all_the_time} rows were there")
        for position in sorted(stored):
            nowhere = [key for key in sorted(keys[position]) if self._is_nowhere(sent, key)]
            # A policy counts from its answer on: it may have landed before that, and adds go by the one before.
            elsewhere = topic.sharing_changed and not all(self._is_nowhere(sent, key) for key in of_any[position])
            if nowhere and not elsewhere:
                self._breach(sent, f"{nowhere} was answered OK and is nowhere")

    @staticmethod
    def _is_nowhere(sent: Sent, key: Position) -> bool:
        topic = sent.topic
        # A position without a row that is rejected is there, for adds, until its dead letter has landed.
        died = topic.redeliveries.died.get((place.owner_of(key), key), 0)
        gone = max(topic.removed.get(key, 0), died)
        return key not in topic.rows and key not in topic.missing and gone <= sent.slot

    @staticmethod
    def _there_since(topic: TopicTruth, position: Position, slot: int) -> bool:
        row = topic.rows.get(position)
        return row is not None and row.since <= slot

    def check_confirmed(self, sent: Sent, slot: int = 0) -> None:
        """`slot`: the last one that the answer depends on. It may have been given, and not sent, before a pause."""
        daemon = sent.daemon
        given_before = max(daemon.applied_when_suspended.values(), default=0) >= slot
        if given_before and daemon.elapsed_s() - daemon.resumed_s < ROUNDING_S:
            return
        unconfirmed_s = daemon.elapsed_s() - daemon.confirmed_s
        if unconfirmed_s > STALE_ANSWER_S:
            self._breach(sent, f"{daemon.name} answers {unconfirmed_s:.1f} s after its last confirmation")

    def _breach(self, sent: Sent, text: str) -> None:
        self._history.breach(f"topic {sent.topic.name}: {text}")

    # ---- hand-outs

    def opened(self, stream: OpenStream, declared: Iterable[Position]) -> None:
        """What a new dispatcher declares that it holds is taken from whom it was handed to since."""
        self._streams = [other for other in self._streams if not other.closed]
        for position in declared:
            self._holders.pop((stream.topic, stream.subscription_id, stream.epoch, position), None)
            for other in self._streams:
                if (other.topic, other.subscription_id) == (stream.topic, stream.subscription_id):
                    other.handed_out.pop(position, None)
        self._streams.append(stream)

    def handed_out(
        self, stream: OpenStream, rows: Iterable[tuple[Position, int, int]], ids: Iterable[bytes]
    ) -> list[Position]:
        """Rows (ledger and entry, or a batch part; deliver_at_ms; redelivery count) reach a dispatcher, each with its
        schedule id: which they are, of those that a position has.
        """
        daemon = stream.daemon
        unconfirmed_s = daemon.elapsed_s() - daemon.confirmed_s
        if unconfirmed_s > STALE_HAND_OUT_S:
            self._history.breach(
                f"topic {stream.topic}: {daemon.name} hands out {unconfirmed_s:.1f} s after its last confirmation"
            )
        keys = []
        for (position, deliver_at_ms, count), schedule_id in zip(rows, ids, strict=True):
            keys.append(self._key_of(stream, position, deliver_at_ms))
            self._handed_out(stream, keys[-1], deliver_at_ms, count, schedule_id)
        return keys

    def _key_of(self, stream: OpenStream, position: Position, deliver_at_ms: int) -> Position:
        """Which row it is: that for everybody, or that for the subscription alone."""
        if place.is_part(position):
            return position
        topic = self._oracle.topic(stream.topic)
        keys = (position, place.in_index(position, stream.subscription_id))
        found = []
        for key in keys:
            row = topic.rows.get(key) or topic.missing.get(key)
            if row is not None and row.deliver_at_ms == deliver_at_ms:
                found.append(key)
        owed = [key for key in found if self._is_owed(topic, key, stream.subscription_id)]
        if len(owed) == 1 and not self.is_stale(stream):
            # The other one was acknowledged, before it was handed back.
            return owed[0]
        if len(found) == len(keys):
            self._twins.add((stream.topic, position, deliver_at_ms))
            found.sort(key=lambda key: key in stream.held)
        # It is that of its rows which left last that a former owner may still know.
        known = sorted((key for key in keys if key in topic.removed_at_s), key=topic.removed_at_s.__getitem__)
        return (*found, *reversed(known), position)[0]

    @staticmethod
    def _is_owed(topic: TopicTruth, position: Position, subscription_id: int) -> bool:
        return position in topic.rows and subscription_id in topic.owes(topic.rows[position])

    def _handed_out(
        self, stream: OpenStream, position: Position, deliver_at_ms: int, count: int, schedule_id: bytes
    ) -> None:
        what = f"topic {stream.topic}: {position} of {deliver_at_ms} for subscription {stream.subscription_id}"
        if deliver_at_ms > stream.daemon.latest_ms():
            self._history.breach(f"{what} is handed out at {stream.daemon.latest_ms()}, early")
        topic = self._oracle.topic(stream.topic)
        self.output.passed_on(topic, stream.subscription_id, position, deliver_at_ms, count)
        row = topic.rows.get(position)
        stream.held[position] = deliver_at_ms
        stream.counts[position] = count
        if self.has_twin(stream.topic, (position, deliver_at_ms)):
            # It may be either: each of them came with this hand-out, or with the one before.
            twins = (stream.topic, position[:2], deliver_at_ms, stream.subscription_id)
            now_s = self._oracle.now_s()
            before_s = self._twins_came_s.get(twins, now_s)
            self._twins_came_s[twins] = now_s
            for key in (position[:2], place.in_index(position, stream.subscription_id)):
                if key in topic.rows:
                    topic.rows[key].handed_out_s[stream.subscription_id] = before_s
            return
        missing = topic.missing.get(position)
        if row is None and missing is not None and missing.deliver_at_ms == deliver_at_ms:
            # Who hands it out has not been told yet that its bucket is quarantined.
            return
        if row is None or row.deliver_at_ms != deliver_at_ms:
            self._gone_and_handed_out(stream, topic, position, deliver_at_ms, what)
            return
        if not self.is_stale(stream) and schedule_id != row.schedule_id:
            self._history.breach(f"{what} is handed out with id {schedule_id!r}; its row is {row}")
        if (stream.topic, position, row.slot, stream.subscription_id) in self._done:
            self._history.breach(f"{what} is handed out after its acknowledgement was answered")
        if not self.is_stale(stream) and stream.subscription_id not in topic.owes(row):
            self._history.breach(f"{what} is handed out and is not owed")
        generation = row.generation(stream.subscription_id)
        if stream.handed_out.get(position) == generation:
            self._history.breach(f"{what} is handed out twice on one stream")
        stream.handed_out[position] = generation
        self.received.setdefault((stream.topic, stream.subscription_id), set()).add((position, row.slot))
        self._oracle.handed_out[stream.topic, position, row.slot] = stream.epoch
        self._check_only_holder(stream, position, row, what)
        self.redeliveries.handed_out(stream, position, row, count, what)

    def _gone_and_handed_out(
        self, stream: OpenStream, topic: TopicTruth, position: Position, deliver_at_ms: int, what: str
    ) -> None:
        removed_at_s = topic.removed_at_s.get(position)
        if (stream.topic, position, deliver_at_ms) in self._left:
            self._history.breach(f"{what} is handed out after it was answered that it left")
        left = topic.left.get(position)
        if left is not None and left.deliver_at_ms == deliver_at_ms:
            # So far nobody was told: nobody may be.
            self._left_and_handed_out[stream.topic, position, left.slot] = stream.daemon.name
        if removed_at_s is None:
            self._history.breach(f"{what} is handed out and was never added")
        elif not self.is_stale(stream):
            self._history.breach(f"{what} is handed out and is gone")
        elif stream.daemon.elapsed_s() - removed_at_s > STALE_HAND_OUT_S:
            self._history.breach(f"{what} is handed out under a former epoch, gone for more than {STALE_HAND_OUT_S} s")
        elif (stream.topic, position, topic.added[position], stream.subscription_id) in self._done:
            self._history.breach(f"{what} is handed out after its acknowledgement was answered")

    def has_twin(self, topic: str, claim: Claim) -> bool:
        """Whether there was another row of the position and time."""
        position, deliver_at_ms = claim
        return not place.is_part(position) and (topic, position[:2], deliver_at_ms) in self._twins

    def _check_only_holder(self, stream: OpenStream, position: Position, row: Row, what: str) -> None:
        key = (stream.topic, stream.subscription_id, stream.epoch, position)
        other = self._holders.get(key)
        if (
            other is not None
            and other is not stream
            and not other.closed
            and other.handed_out.get(position) == row.generation(stream.subscription_id)
        ):
            self._history.breach(f"{what} is handed out to two dispatchers")
        self._holders[key] = stream

    def may_be_leaving(self, topic: str, position: Position) -> bool:
        """Whether a request is under way, or was not answered, by which a row would leave."""
        asked = (each for each in self._oracle.removals.values() if each.topic == topic)
        return self._withdrawing[topic, place.entry_of(position)] > 0 or any(each.names(position) for each in asked)

    def is_stale(self, stream: OpenStream) -> bool:
        """Whether there is a later owner."""
        return stream.epoch < self._oracle.epochs[stream.shard]

    # ---- acknowledgements

    def sending_acknowledgement(self, stream: OpenStream, claims: Sequence[Claim]) -> Sent:
        for position, _ in claims:
            stream.held.pop(position, None)
        topic, positions = self._oracle.topic(stream.topic), tuple(position for position, _ in claims)
        slot, counts = applied_slot(stream.daemon, stream.topic), tuple(stream.counts_of(claims))
        return Sent(stream.daemon, topic, positions, slot, counts=counts)

    def acknowledgement_answered(self, stream: OpenStream, sent: Sent, claims: Sequence[Claim], ignored: int) -> None:
        self.check_confirmed(sent)
        topic = sent.topic
        self.check_former_owners(stream.shard, stream.epoch, f"topic {stream.topic}: Done is answered")
        claims = [claim for claim in claims if not self.has_twin(stream.topic, claim)]
        left = [claim for claim in claims if self._unacknowledged(sent, stream.subscription_id, claim)]
        if len(left) > ignored:
            self._breach(
                sent, f"{ignored} of {len(claims)} acknowledgements were ignored, {len(left)} rows are as before"
            )
        # What was damaged cannot be found in the backlog.
        known = [claim for claim in left if claim[0][:2] not in self._oracle.objects.unreadable]
        counts = dict(zip(sent.positions, sent.counts, strict=True))
        mine = [
            claim
            for claim in known
            if stream.handed_out.get(claim[0], (0, 0))[0] == topic.rows[claim[0]].slot
            and counts[claim[0]] == topic.rows[claim[0]].count(stream.subscription_id)
        ]
        if mine and not self.is_stale(stream) and not stream.reads_late:
            self._breach(sent, f"acknowledgements of rows that the stream was handed out were ignored: {mine}")
        if not ignored:
            for position, _ in claims:
                if topic.added[position] <= sent.slot:
                    self._done.add((stream.topic, position, topic.added[position], stream.subscription_id))

    # ---- subscriptions

    def sending_creation(self, daemon: Daemon, topic: str, shard: int) -> Creation:
        served = daemon.shards.get(shard)
        epoch = 0 if served is None else served.epoch
        truth = self._oracle.topic(topic)
        passed = frozenset(
            (position, row.slot)
            for position, row in truth.rows.items()
            if not row.index and self._oracle.handed_out.get((topic, position, row.slot)) == epoch
        )
        return Creation(self.sending(daemon, topic), daemon.clock_steps, epoch, passed)

    def creation_answered(self, asked: Creation, shard: int, created: SubscriptionCreated) -> None:
        """It begins now by the clock, with what has not been passed."""
        sent, daemon = asked.sent, asked.sent.daemon
        self.check_confirmed(sent)
        if not created.created:
            return
        number = created.subscription_id
        if daemon.clock_steps == asked.clock_steps and created.since_ms > daemon.now_ms():
            self._breach(sent, f"subscription {number} begins at {created.since_ms}, created by {daemon.now_ms()}")
        served = daemon.shards.get(shard)
        if served is None or served.epoch != asked.epoch or not created.since_ms:
            return
        for position, slot in sorted(asked.passed):
            row = sent.topic.rows.get(position)
            if row is not None and row.slot == slot and number in sent.topic.owes(row):
                self._breach(
                    sent,
                    f"{position} of {row.deliver_at_ms} was handed out before subscription {number}, which is owed it",
                )

    # ---- contents

    def sending(self, daemon: Daemon, topic: str) -> Sent:
        """A request without positions of its own."""
        return Sent(daemon, self._oracle.topic(topic), (), applied_slot(daemon, topic))

    def contains_answered(
        self, sent: Sent, asked: Iterable[Position], found: Collection[Position], subscription: str | None
    ) -> None:
        """`found`: what of the asked was said to be in the index, or owed to the subscription."""
        self.check_confirmed(sent)
        for position in asked:
            keys = [position, *sorted(sent.topic.keys.get(position, set()) - {position})]
            if position in found and not any(self._was_there(sent, key, subscription) for key in keys):
                self._breach(sent, f"{position} is said to be there for {subscription}, and was not")
            if position not in found and any(
                self._was_there_all_the_time(sent, key, subscription, at_any_time=True) for key in keys
            ):
                self._breach(sent, f"{position} is said not to be there for {subscription}, and was")

    # ---- what leaves before it is due

    def sending_withdrawal(
        self,
        daemon: Daemon,
        topic: str,
        positions: Sequence[Position],
        times: Sequence[int | None] = (),
        subscription: str | None = None,
    ) -> Withdrawal:
        """`times`: new ones, of a reschedule."""
        truth = self._oracle.topic(topic)
        for position, time in zip(positions, times, strict=False):
            truth.asked.setdefault(position, set()).add(time)
        indexes = None if subscription is None else self._added_to(truth, subscription)
        sent = Sent(daemon, truth, tuple(positions), applied_slot(daemon, topic), indexes)
        keys = [key for position in positions for key in sent.keys(position)]
        rows = {key: truth.rows[key] for key in keys if key in truth.rows}
        self._withdrawing.update((topic, position) for position in positions)
        return Withdrawal(sent, rows, daemon.now_ms())

    def withdrawal_answered(
        self, asked: Withdrawal, shard: int, epoch: int, count: int, outcome: CancelOutcome | RescheduleOutcome
    ) -> None:
        """`count`: how many were cancelled or rescheduled."""
        sent = asked.sent
        topic, positions = sent.topic, sent.positions
        self._withdrawing.subtract((topic.name, position) for position in positions)
        self.check_confirmed(sent)
        not_found = [positions[row] for row in outcome.not_found.tolist()]
        due = [positions[row] for row in (*outcome.already_due.tolist(), *outcome.in_flight.tolist())]
        left = sorted(set(positions) - set(not_found) - set(due))
        if count != len(left) or count + len(not_found) + len(due) != len(positions):
            self._breach(sent, f"{positions} were answered with {outcome}")
        for position in not_found:
            if any(self._there_since(topic, key, sent.slot) for key in sent.keys(position)):
                self._breach(sent, f"{position} was answered NOT_FOUND, and was there")
        for position in due:
            self._check_due(sent, position)
        if left:
            self.check_former_owners(shard, epoch, f"topic {topic.name}: {left} are answered to have left")
        for position in left:
            self._check_left(asked, position)

    def _check_due(self, sent: Sent, position: Position) -> None:
        """It was said to be due."""
        topic = sent.topic
        keys = sent.keys(position)
        if sent.indexes == ():
            # The subscription was created after it was sent.
            return
        if any(topic.removed.get(key, 0) > sent.slot or key in topic.missing for key in keys):
            return
        rows = [topic.rows[key] for key in keys if key in topic.rows]
        if not rows:
            self._breach(sent, f"{position} was answered to be due, and is nowhere")
        elif all(
            row.slot <= sent.slot and row.deliver_at_ms > sent.daemon.latest_ms() and not row.nacked for row in rows
        ):
            # What is nacked was due by the clock of its time.
            self._breach(sent, f"{position} was answered to be due, and is so at {rows}")

    def _check_left(self, asked: Withdrawal, position: Position) -> None:
        """It was said to be cancelled or rescheduled."""
        sent = asked.sent
        if sent.indexes == ():
            # The subscription was created since.
            return
        keys = sent.keys(position)
        if not any(self._left_since(sent, key) for key in keys):
            self._breach(sent, f"{position} was answered to have left, and has not")
        for key in sorted(keys):
            self._check_row_left(asked, key)

    @staticmethod
    def _left_since(sent: Sent, key: Position) -> bool:
        left = sent.topic.left.get(key)
        return left is not None and left.slot > sent.slot

    def _check_row_left(self, asked: Withdrawal, key: Position) -> None:
        sent, row = asked.sent, asked.rows.get(key)
        left = sent.topic.left.get(key)
        if left is not None and left.slot > sent.slot:
            self._left.add((sent.topic.name, key, left.deliver_at_ms))
            if by := self._left_and_handed_out.get((sent.topic.name, key, left.slot)):
                self._breach(sent, f"{key} is answered to have left, and {by} handed it out after it had")
        if row is None or row.slot > sent.slot:
            return
        if sent.topic.rows.get(key) is row:
            self._breach(sent, f"{key} was answered to have left, and is still there")
        due_ms = min(asked.sent_ms, sent.daemon.now_ms())
        readable = key[:2] not in self._oracle.objects.unreadable
        if readable and left is not None and left.row == row.slot and row.deliver_at_ms <= due_ms:
            self._breach(sent, f"{key} of {row.deliver_at_ms} was answered to have left, and was due at {due_ms}")

    def _was_there(self, sent: Sent, position: Position, subscription: str | None) -> bool:
        """At some time since the request was sent."""
        row = sent.topic.rows.get(position)
        number = self._number_of(sent, subscription)
        if number is not None and place.owner_of(position) not in (0, number):
            return False
        if sent.topic.removed.get(position, 0) > sent.slot or position in sent.topic.missing:
            return True
        return row is not None and (number is None or row.acknowledged.get(number, sent.slot + 1) > sent.slot)

    def _was_there_all_the_time(
        self, sent: Sent, position: Position, subscription: str | None, *, at_any_time: bool = False
    ) -> bool:
        """`at_any_time`: also when it was rescheduled meanwhile."""
        row = sent.topic.rows.get(position)
        if row is None or (row.since if at_any_time else row.slot) > sent.slot:
            return False
        number = self._number_of(sent, subscription)
        if number is None:
            return subscription is None
        stored = sent.topic.subscriptions[number]
        return stored.created_slot < sent.slot and number in sent.topic.owes(row)

    @staticmethod
    def _number_of(sent: Sent, subscription: str | None) -> int | None:
        return next((number for number, each in sent.topic.subscriptions.items() if each.name == subscription), None)

    def trim_answered(self, sent: Sent, positions: Callable[[Position], bool], subscription: str | None) -> None:
        """What was there when the request was sent is gone."""
        for position in sent.topic.rows:
            if positions(place.entry_of(position)) and self._was_there_all_the_time(sent, position, subscription):
                self._breach(sent, f"{position} was trimmed for {subscription}, and is still there")

    def check_former_owners(self, number: int, epoch: int, what: str) -> None:
        """No former owner may hand out any more. `what`: was said or done."""
        for daemon in self._live():
            for shard in daemon.shards.values():
                if shard.number == number and shard.epoch < epoch and shard.may_hand_out:
                    self._history.breach(
                        f"{what} under epoch {epoch}, and {daemon.name} may still hand out under epoch {shard.epoch}"
                    )

    @staticmethod
    def _unacknowledged(sent: Sent, subscription_id: int, claim: Claim) -> bool:
        """Also a row that came since with that time is another one."""
        position, deliver_at_ms = claim
        topic = sent.topic
        row = topic.rows.get(position)
        if row is None or row.deliver_at_ms != deliver_at_ms or row.slot > sent.slot:
            return False
        return subscription_id in topic.subscriptions and subscription_id not in row.acknowledged


def applied_slot(daemon: Daemon, topic: str) -> int:
    """The last slot that the daemon has applied to the topic's shard; 0 when it does not serve it."""
    return next((shard.applied_slot for shard in daemon.shards.values() if topic in shard.topics), 0)
