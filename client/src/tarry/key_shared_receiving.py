"""One KEY_SHARED subscription's side of its stream, without I/O, threads or waiting.

Keeps the consumers, the permits of each, who holds what, positions taken back, and plans. `tarry.receiving` has what
all subscriptions share.
Consumers: their numbers are assigned here and never reused. `Open` names those that have joined, with their permits.
Requests to join are repeated after it; requests to leave are done with the stream. Rows for a removed consumer are
dropped.
Plans: they are sent one after the other, so that none overtakes one that was refused for now and is sent again. A
stream that ends takes them with it. Unanswered ones fail, and others are not accepted until the caller has received
`PlanAgain` and plans with `anew`; by then it has taken everything decided before. Positions that consumers hold stay
with them, and are declared with their hash when a stream is opened again.
Order: everything for a consumer is in one queue, however it came to be; the answer to a plan only names the consumers.
Positions taken back leave what is held and the batches that no caller has taken yet; requests that name them are
repeated without them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tarry import attempts, batch, columns, errors, key_shared, receiving, results, stream_requests, streams, wire
from tarry.stream_requests import Answer, Settled
from tarry.v1 import dispatch_pb2

# Rows of one request
_PLANNED_ROWS_MAX = 10_000
_KIND = dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED


@dataclasses.dataclass(slots=True)
class _Joined:
    """A consumer that was not removed."""

    consumer: key_shared.Consumer
    is_known: bool
    """True if the daemon is known to have it"""


@dataclasses.dataclass(slots=True, eq=False)
class _Membership(stream_requests.Request[Answer]):
    """A request of a consumer to join or leave."""

    consumer_id: int = 0
    joins: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Plan(stream_requests.Request[Answer]):
    """A request to plan messages."""

    held_by: NDArray[np.uint32] | None = None
    """Holder of each position since the request was sent, 0 for none; None if none of them was planned before"""


class KeySharedReceiving(receiving.Receiving[Answer, key_shared.Event]):
    """A KEY_SHARED subscription: several receivers, with the positions of a key at one of them at a time."""

    def __init__(
        self,
        topic: str,
        subscription: str,
        consumers: Sequence[key_shared.Consumer],
        *,
        rows_max: int,
        bytes_max: Callable[[], int],
        policy: attempts.RetryPolicy,
        ack_linger: stream_requests.AckLinger | None = None,
    ) -> None:
        """Begin with these consumers. Raises InvalidArgument."""
        linger = ack_linger or stream_requests.AckLinger(0)
        super().__init__(
            topic, subscription, {}, rows_max=rows_max, bytes_max=bytes_max, policy=policy, ack_linger=linger
        )
        self._consumers: dict[int, _Joined] = {}
        self._last_consumer_id = 0
        self._held_declared: list[tuple[int, batch.Batch]] = []
        self._plans: deque[_Plan[Answer]] = deque()
        self._plan_in_flight: int | None = None
        self._has_planned = False
        self._must_plan_anew = False
        self._was_told = False
        # Ledger -> highest planned entry; entries above it were not planned before
        self._planned_up_to: dict[int, int] = {}
        for consumer in consumers:
            self._admit(consumer, is_known=True)

    @property
    def consumers(self) -> tuple[key_shared.Consumer, ...]:
        """The consumers that were not removed, in the order in which they were added."""
        return tuple(each.consumer for each in self._consumers.values())

    # Calls of the user

    def take(self, max_rows: int = receiving.ROWS_MAX) -> key_shared.Event | None:
        event = super().take(max_rows)
        if isinstance(event, key_shared.PlanAgain):
            self._was_told = True
        return event

    def add_consumer(self, consumer: key_shared.Consumer, promise: Callable[[], Answer]) -> Answer:
        """Let a consumer join. Raises InvalidArgument, or what ended the subscription."""
        self._check_open()
        number = self._admit(consumer, is_known=False)
        self._windows[number].granted = consumer.permits
        message = consumer.message(number, consumer.permits)
        request_id = self._next_request_id()
        joining = _Membership(request_id, wire.encode_add_consumer, message, promise(), _nothing, consumer_id=number)
        joining.joins = True
        return self._send(joining).answer

    def remove_consumer(self, consumer: key_shared.Consumer, promise: Callable[[], Answer]) -> Answer:
        """Let a consumer leave; it no longer holds anything. Raises InvalidArgument, or what ended it."""
        self._check_open()
        number = next((number for number, each in self._consumers.items() if each.consumer is consumer), None)
        if number is None:
            raise errors.InvalidArgument(f"{consumer!r} is no consumer of this subscription")
        self._dismiss(number)
        request_id = self._next_request_id()
        encode = wire.encode_remove_consumer
        return self._send(_Membership(request_id, encode, number, promise(), _nothing, consumer_id=number)).answer

    def plan(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        key_hash: columns.Column | None,
        promise: Callable[[], Answer],
        *,
        anew: bool,
    ) -> list[Answer]:
        """Ask which consumers receive messages. Raises InvalidArgument, PlanLost, or what ended the subscription."""
        asked = columns.plan_columns(ledger_id, entry_id, key_hash)
        self._check_open()
        if self._must_plan_anew and not (anew and self._was_told):
            raise _plan_lost()
        self._must_plan_anew = False
        plans = [
            _Plan(self._next_request_id(), wire.encode_plan, part, promise(), _nothing)
            for part in asked.requests(min(self._rows_max, _PLANNED_ROWS_MAX))
        ]
        self._plans.extend(plans)
        self._send_plan()
        return [each.answer for each in plans]

    def mark_delete(self, ledger_id: int, entry_id: int, promise: Callable[[], Answer]) -> Answer:
        """Report the position up to which everything planned is acknowledged.

        Raises InvalidArgument, or what ended the subscription.
        """
        columns.check_unsigned("ledger_id", ledger_id, bits=64)
        columns.check_unsigned("entry_id", entry_id, bits=64)
        self._check_open()
        request_id = self._next_request_id()
        place = (int(ledger_id), int(entry_id))
        return self._send(
            stream_requests.Request(request_id, wire.encode_mark_delete, place, promise(), _nothing)
        ).answer

    def nack(
        self,
        given: batch.HandedOut,
        promise: Callable[[], Answer],
        *,
        batch_index: columns.Column | None,
        key_hash: columns.Column | None,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        reject: bool = False,
        reason: str = "",
        forwarded: bool = False,
    ) -> list[Answer]:
        if key_hash is None and isinstance(given, key_shared.ConsumerBatch) and not given.deliver_at_ms.all():
            # A daemon that no longer knows the plan must know the key all the same.
            key_hash = batch.key_hash_of(given)
        return super().nack(
            given,
            promise,
            batch_index=batch_index,
            key_hash=key_hash,
            delay_ms=delay_ms,
            delay_level=delay_level,
            reject=reject,
            reason=reason,
            forwarded=forwarded,
        )

    # Events of the stream

    def received(self, response: receiving.Response) -> tuple[bool, list[Settled[Answer]]]:
        if isinstance(response, dispatch_pb2.SubscribeResponse):
            match response.WhichOneof("response"):
                case "planned":
                    settled = self._take_in_plan(response.planned)
                    return bool(settled), settled
                case "taken_back":
                    return self._take_back(response.taken_back), []
        return super().received(response)

    def interrupted(self, error: errors.TarryError) -> list[Settled[Answer]]:
        settled = super().interrupted(error)
        self._plan_in_flight = None
        self._was_told = False
        # It is sent again when there is a stream to plan on, behind what that takes back.
        self._inbox.keep(lambda event: None if isinstance(event, key_shared.PlanAgain) else event)
        if self._has_planned:
            self._has_planned, self._must_plan_anew = False, True
            settled += [streams.Settled(plan.request_id, plan.answer, None, _plan_lost()) for plan in self._plans]
        return settled

    def failed(self, error: errors.TarryError) -> list[Settled[Answer]]:
        settled = super().failed(error)
        return settled + [streams.Settled(plan.request_id, plan.answer, None, error) for plan in self._plans]

    def remove(self, request_id: int) -> None:
        plan = next((each for each in self._plans if each.request_id == request_id), None)
        if plan is None:
            super().remove(request_id)
            return
        self._plans.remove(plan)
        if self._plan_in_flight == request_id:
            self._plan_in_flight = None
        self._send_plan()

    def _open(self) -> list[bytes]:
        held, leaving = self._declared()
        self._held_declared = held
        declared = held + leaving
        joined = []
        for number, each in self._consumers.items():
            if each.is_known:
                window = self._windows[number]
                window.granted = 0
                window.granted = 0 if self._is_bounded else max(0, window.free)
                joined.append(each.consumer.message(number, window.granted))
        by_key = wire.OpenConsumers(
            joined,
            np.repeat(np.array([number for number, _ in declared], np.uint32), [len(part) for _, part in declared]),
            _planned_hashes([part for _, part in declared]),
        )
        positions = batch.concatenate([part.positions for _, part in declared])
        return wire.encode_open(
            self._topic, self._subscription, _KIND, positions, by_key, bytes_max=self._open_bytes_max
        )

    def _start(self, opened: dispatch_pb2.Opened) -> list[Settled[Answer]]:
        settled = super()._start(opened)
        self._take_back_declared(wire.decode_indexes(opened.not_held))
        if self._must_plan_anew:
            self._inbox.append(key_shared.PlanAgain(self.epoch))
        self._send_plan()
        return settled

    def _repeat(self, request: stream_requests.Request[Answer]) -> Settled[Answer] | None:
        if isinstance(request, _Membership):
            each = self._consumers.get(request.consumer_id)
            if not request.joins or each is None or each.is_known:
                return request.settled_unsent()
        return super()._repeat(request)

    def _settled(self, done: dispatch_pb2.Done) -> Settled[Answer] | None:
        if done.request_id == self._plan_in_flight:
            return self._plan_refused(done)
        request = self._unconfirmed.get(done.request_id)
        settled = super()._settled(done)
        if settled is not None and isinstance(request, _Membership) and request.joins:
            if settled.error is not None:
                self._dismiss(request.consumer_id)
            elif request.consumer_id in self._consumers:
                self._consumers[request.consumer_id].is_known = True
        return settled

    # Consumers

    def _admit(self, consumer: key_shared.Consumer, *, is_known: bool) -> int:
        """Add a consumer and return its number. Raises InvalidArgument."""
        receiving.check_permits(consumer.permits)
        if any(each.consumer is consumer for each in self._consumers.values()):
            raise errors.InvalidArgument(f"{consumer!r} is there already; make another Consumer with that name")
        number = self._last_consumer_id + 1
        consumer.message(number, consumer.permits)
        self._last_consumer_id = number
        self._consumers[number] = _Joined(consumer, is_known)
        self._windows[number] = receiving.Window(consumer.permits)
        return number

    def _dismiss(self, number: int) -> None:
        self._consumers.pop(number, None)
        self._windows.pop(number, None)
        self._inbox.keep(
            lambda event: event if isinstance(event, key_shared.PlanAgain) or event.consumer_id != number else None
        )

    def _receiver_of(self, given: batch.Batch) -> int | None:
        if isinstance(given, key_shared.ConsumerBatch) and given.consumer_id in self._windows:
            return given.consumer_id
        return None

    # Incoming rows

    def _take_in(self, messages: wire.MessagesColumns) -> bool:
        if messages.consumer_id is None:
            raise errors.Internal("the daemon sent rows of a KEY_SHARED subscription without their consumers")
        is_of_owner = self._is_of_owner(messages.epoch)
        for number, rows in _by_consumer(messages.consumer_id):
            if number not in self._consumers:
                continue
            self._spend(number, len(rows))
            if is_of_owner:
                self._inbox.append(self._receive(number, messages.take(rows)))
            else:
                self._grant([(number, self._windows[number])])
        return is_of_owner

    def _spend(self, number: int, rows: int) -> None:
        window = self._windows[number]
        window.granted = max(0, window.granted - rows)

    def _receive(self, number: int, messages: wire.MessagesColumns) -> key_shared.ConsumerBatch:
        """Hold the positions from now on."""
        each = self._consumers[number]
        each.is_known = True
        self._last_batch += 1
        received = key_shared.ConsumerBatch(
            **batch.columns_of(messages), number=self._last_batch, consumer=each.consumer, consumer_id=number
        )
        self._windows[number].held.add(received)
        self._note_holder(received.positions, number)
        return received

    # Positions taken back

    def _take_back(self, message: dispatch_pb2.TakenBack) -> bool:
        if not self._is_of_owner(message.epoch):
            return False
        taken = columns.Positions(
            wire.decode_u64(message.ledger_id),
            wire.decode_u64(message.entry_id),
            wire.decode_u64(message.deliver_at_ms),
            wire.decode_u32(message.batch_index) if message.batch_index else None,
        )
        for request in self._unconfirmed.values():
            request.leave_out(taken)
        for number, rows in _by_consumer(wire.decode_u32(message.consumer_id)):
            if number in self._consumers:
                self._tell_taken_back(number, taken.take(rows))
        return True

    def _take_back_declared(self, not_held: NDArray[np.int64]) -> None:
        """Send consumers TakenBack for positions declared as held, given by index."""
        first = 0
        for number, part in self._held_declared:
            rows = not_held[(not_held >= first) & (not_held < first + len(part))] - first
            first += len(part)
            if len(rows) and number in self._consumers:
                self._tell_taken_back(number, part.take(rows).positions)
        self._held_declared = []

    def _tell_taken_back(self, number: int, taken: columns.Positions) -> None:
        window = self._windows[number]
        window.held.give_back(taken)
        self._note_holder(taken, 0)
        told = ~np.zeros(taken.rows, np.bool_)

        def left_of(event: key_shared.Event) -> key_shared.Event | None:
            nonlocal told
            if not isinstance(event, key_shared.ConsumerBatch) or event.consumer_id != number:
                return event
            told &= ~batch.members(taken, event.positions)
            left = event.take(~batch.members(event.positions, taken))
            return left if len(left) else None

        self._inbox.keep(left_of)
        if told.any():
            consumer = self._consumers[number].consumer
            self._inbox.append(key_shared.TakenBack(consumer, number, taken.take(told), self.epoch))
        self._grant([(number, window)])

    # Plans

    def _send_plan(self) -> None:
        """Send the next plan if none is in flight."""
        if self._sending is not None and self._plans and self._plan_in_flight is None:
            plan = self._plans[0]
            plan.held_by = self._held_of(plan.rows)
            self.send_lingering()
            self._plan_in_flight = plan.request_id
            self._has_planned = True
            self._sending.put(plan.message())

    def _take_in_plan(self, planned: dispatch_pb2.Planned) -> list[Settled[Answer]]:
        if not self._is_of_owner(planned.epoch) or planned.request_id != self._plan_in_flight:
            return []
        plan = self._plans[0]
        asked: columns.PlanColumns = plan.rows
        consumer_id = wire.decode_u32(planned.consumer_id)
        if len(consumer_id) != len(asked):
            raise errors.Internal(f"the daemon planned {len(consumer_id)} of {len(asked)} positions")
        messages = wire.MessagesColumns(planned.epoch, *_planned_positions(asked)[:3], asked.whole()[2])
        if plan.attempt > 1:
            # The time of the retry is unknown; positions acknowledged since may be delivered once more.
            plan.held_by = self._held_of(asked)
        for number, rows in _by_consumer(consumer_id):
            if number == key_shared.HELD:
                continue
            if number not in self._consumers:
                # The consumer was removed, which the daemon did not know yet: the position waits for another one.
                consumer_id[rows] = key_shared.HELD
                continue
            if plan.held_by is not None:
                # A position that is planned again used no permit and stays where it is.
                rows = rows[plan.held_by[rows] != number]
            if len(rows):
                self._spend(number, len(rows))
                self._inbox.append(self._receive(number, messages.take(rows)))
        return [streams.Settled(plan.request_id, plan.answer, consumer_id, None)]

    def _held_of(self, asked: columns.PlanColumns) -> NDArray[np.uint32] | None:
        """Return the current holder of each position, and record them as planned."""
        if not self._were_planned(asked):
            return None
        positions = _planned_positions(asked)
        held_by = np.zeros(len(asked), np.uint32)
        for number, window in self._windows.items():
            held_by[batch.members(positions, window.held.positions())] = number
        return held_by

    def _were_planned(self, asked: columns.PlanColumns) -> bool:
        """Return True if some of them may have been planned before."""
        ledger_id, entry_id, _ = asked.whole()
        before = False
        for ledger in np.unique(ledger_id).tolist():
            entries = entry_id[ledger_id == ledger]
            before |= int(entries.min()) <= self._planned_up_to.get(ledger, -1)
            self._planned_up_to[ledger] = max(int(entries.max()), self._planned_up_to.get(ledger, -1))
        return before

    def _note_holder(self, positions: columns.Positions, number: int) -> None:
        """Record a change of holders for the plan in flight."""
        plan = self._plans[0] if self._plan_in_flight is not None else None
        if plan is not None and plan.held_by is not None:
            plan.held_by[batch.members(_planned_positions(plan.rows), positions)] = number

    def _plan_refused(self, done: dispatch_pb2.Done) -> Settled[Answer] | None:
        if not self._is_of_owner(done.epoch):
            return None
        plan = self._plans[0]
        error = errors.from_status(done.error)
        if isinstance(error, errors.NotOwner):
            raise error
        if errors.is_retryable(error) and self._sending is not None:
            self._sending.put_after(self._policy.delay_s(error, plan.attempt), plan.message)
            plan.attempt += 1
            self.last_error = error
            return None
        return streams.Settled(plan.request_id, plan.answer, None, error)


def _planned_positions(asked: columns.PlanColumns) -> columns.Positions:
    ledger_id, entry_id, _ = asked.whole()
    return columns.Positions(ledger_id, entry_id, np.zeros(len(asked), np.uint64))


def _nothing(done: dispatch_pb2.Done, ignored: results.Ignored) -> None:
    return None


def _plan_lost() -> errors.PlanLost:
    return errors.PlanLost(
        "the stream that it was planned on has ended: when PlanAgain has come, plan again from the mark-delete "
        "position, the first time with anew=True"
    )


def _by_consumer(consumer_id: NDArray[np.uint32]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each consumer with its rows, in order."""
    order = np.argsort(consumer_id, kind="stable")
    numbers, begins = np.unique(consumer_id[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, begins)[1:], strict=True)


def _planned_hashes(parts: Iterable[batch.Batch]) -> NDArray[np.uint32] | None:
    """Return the key hashes of positions without a time, 0 for others; None if all have a time or no key."""
    hashes = [np.zeros(0, np.uint32)]
    for part in parts:
        hashes.append(np.zeros(len(part), np.uint32))
        if part.key_hash is not None:
            np.copyto(hashes[-1], part.key_hash, where=part.deliver_at_ms == 0)
    column = np.concatenate(hashes)
    return column if column.any() else None
