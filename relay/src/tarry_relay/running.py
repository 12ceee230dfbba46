"""Runs a relay for one session: each kind of work of the table has a loop of its own, until the relay ends.

A failure ends a message or the session. A temporary failure is repeated. A batch that raises anything else is done
again one by one, and a message that raises alone three times is refused for good. An acknowledgement, a rejection or a
commit that raises ends the session, because nothing can be refused there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tarry
import tarry.aio
from tarry_relay import daemon_answers, port
from tarry_relay.delivery_steps import ENDING, TABLE, Answer, Item, Passage, Step, Work
from tarry_relay.former_generations import FormerGenerations
from tarry_relay.health import SILENT_S
from tarry_relay.memory_shares import Portions
from tarry_relay.port import Finding, Meaning
from tarry_relay.publishing import (
    DELIVER_AT_HEADER,
    MAY_HAVE_LANDED_HEADER,
    RAISED_MAX,
    RESULT_HEADER,
    Content,
    MessageItem,
    Publishing,
    ReadLog,
    RelayLane,
    Subscription,
    WorkQueue,
    cut,
    rest_after,
)
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings
from tarry_relay.retention_guard import RetentionGuard
from tarry_relay.sorting import Bad, Sorting, Withdrawal, sent_ms

log = logging.getLogger(__name__)

Asking = TypeVar("Asking")

_WAIT_S = 1.0
_WATCH_S = 3.0
"""Interval at which each end is asked something that it must answer (seconds)"""
_LAST_S = 2.0
"""Time for which an ending session still commits, acknowledges and rejects finished messages (seconds)"""
_CLOCK_BEHIND_MS = 60_000
"""Largest lag of the daemon's clock (ms); a message not due for longer has got another time since, and another name"""
_ROUNDED_MS = 1
"""Difference by which two versions may round the time of a message (ms): NATS reports it in ns"""
_NOT_DUE_S = 0.2
_LOOK_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Waits before the next check of what is committed (seconds); longer the more checks found nothing new"""
_CHANGES_TARRY = (Work.ADD, Work.ADD_LATE, Work.NACK, Work.WITHDRAW)
_ENDS_SESSION = (port.SessionOver, port.NotThere)


class BadMessage(Exception):
    """A message that cannot be used while `source.on_bad` makes the relay stop."""


class Relay:
    """One relay between one broker and one Tarry topic, for one session."""

    def __init__(
        self,
        settings: Settings,
        *,
        broker: port.Broker,
        client: tarry.aio.Client,
        generation: str,
        metrics: RelayMetrics,
        findings: Sequence[Finding] = (),
    ) -> None:
        """Relay from a source of this generation, which is part of the Tarry topic's name.

        Among the `findings` of the source, a wrong one keeps it from being read.
        """
        self._settings = settings
        self._sorting = Sorting(settings.source, settings.targets, broker)
        self._broker = broker
        self._client = client
        self._generation = generation
        self._topic = topic = settings.relay.topic_of(generation)
        self._log = tarry.DeliveryId.log_of(topic, settings.relay.subscription)
        self._metrics = metrics
        self._health = metrics.health
        self._passage: Passage[Content, RelayLane] = Passage(
            settings.source.dead_letters, settings.source.results, drop=_drop
        )
        self._queue = WorkQueue(self._passage)
        self._publishing = Publishing(
            settings, self._sorting, self._queue, output=broker.output, topic=topic, metrics=metrics
        )
        self._guard = RetentionGuard(settings, broker, client, generation, metrics)
        self._guard.judge(findings)
        self._former = FormerGenerations(settings, client, topic, metrics)
        self._logs = [ReadLog(settings.source.name, broker.source, is_source=True)]
        if settings.retry is not None and broker.retries is not None:
            self._logs.append(ReadLog(settings.retry.name, broker.retries, is_source=False))
        self._portions = Portions(settings.relay.memory_bytes // 2, settings.relay.rows)
        self._unacknowledged: set[tarry.DeliveryId | None] = set()
        """Deliveries that are not acknowledged; a consumer may already have failed to process one"""
        self._again: Counter[tarry.DeliveryId | None] = Counter()
        """How often each of them was delivered beyond the first time, and must be acknowledged or rejected again"""
        self._ending = asyncio.Event()
        metrics.watch(self._passage)

    async def run(self, ending: asyncio.Event) -> None:
        """Run until `ending` is set, and then until nothing is in flight, for at most `relay.drain_s`.

        Raises what ends the session, after sending what is finished.
        """
        relay = self._settings.relay
        await self._make_subscription()
        async with self._client.subscribe(self._topic, relay.subscription, permits=relay.permits) as subscription:
            log.info("relays", extra={"topic": self._topic, "subscription": relay.subscription, "id": relay.id})
            tasks = _Tasks()
            tasks.start(tasks.intake, [*map(self._read, self._logs), self._receive(subscription)])
            tasks.start(tasks.work, self._work_loops(subscription))
            tasks.start(tasks.last, self._last_loops(subscription))
            try:
                await tasks.until(ending.wait())
                self._ending.set()
                log.info("drains", extra={"read": self._passage.read, "handed_out": self._passage.handed_out})
                await tasks.until(self._drained(tasks.intake))
            except Exception:
                await port.end([*tasks.intake, *tasks.work])
                # The loop that has raised continues with the other messages.
                tasks.restart(tasks.last, self._last_loops(subscription))
                await tasks.until_last(self._done())
                raise
            finally:
                await port.end(tasks.all())
            log.info("has ended", extra={"read": self._passage.read, "handed_out": self._passage.handed_out})

    async def _make_subscription(self) -> None:
        retry = self._settings.retry
        policy = None
        if retry is not None:
            delays = tarry.DelayList(retry.delays_ms)
            policy = tarry.SubscriptionPolicy(redelivery=delays, max_redeliver_count=retry.count_max)
        # It exists with another policy, which an operator has set.
        with contextlib.suppress(tarry.AlreadyExists):
            await self._client.create_subscription(self._topic, self._settings.relay.subscription, policy)
        self._health.answered("daemon")

    # Intake

    async def _read(self, of: ReadLog) -> None:
        relay = self._settings.relay
        portions = Portions(relay.memory_bytes // 2, relay.rows)
        failures = 0
        while not self._ending.is_set():
            if of.is_source and not self._guard.may_read.is_set():
                await self._queue.news()
                continue
            every_s = of.reader.hold_every_s
            if every_s is not None and self._passage.read and not self._may_hold(every_s):
                # The broker would give it to this relay again, and not to another one.
                await self._queue.news()
                continue
            rows = min(relay.read_ahead - self._passage.read, portions.rows(self._passage.read_bytes))
            if rows <= 0:
                await self._queue.news()
                continue
            try:
                portion = await of.reader.read(rows, _WAIT_S)
            except port.Unreachable as error:
                failures = await self._rest("broker", error, failures)
                continue
            failures = 0
            for lane in portion.lost_lanes:
                self._passage.lose(RelayLane(of, lane))
            if portion.read:
                self._health.answered("broker")
            if portion.read or portion.lost_lanes:
                items = self._new(of, portion.read)
                portions.came(len(portion.read), sum(item.size_bytes for item in items))
                await self._queue.enter(items)

    def _new(self, of: ReadLog, reads: Sequence[port.Read]) -> list[MessageItem]:
        """Return messages that are not in flight here yet. Those in flight get the newer receipt."""
        items: list[MessageItem] = []
        new: dict[tuple[RelayLane, tuple[int, int]], MessageItem] = {}
        for read in reads:
            lane = RelayLane(of, read.lane)
            if (known := self._passage.find(lane, read.position) or new.get((lane, read.position))) is not None:
                former = known.content.read
                known.content.read = dataclasses.replace(read, message=None if former is None else former.message)
                continue
            try:
                item = self._item_of_source(read, lane) if of.is_source else self._item_of_retries(read, lane)
                item.size_bytes = _size(read.message)
            except BadMessage:
                raise
            except Exception as error:
                self._metrics.surprises.labels("message").inc()
                log.exception("a message cannot be read", extra=_fields(read))
                item = self._bad_item(read, lane, f"{type(error).__name__}: {error}")
            item.position, item.in_order, item.entered_s = read.position, of.reader.commits_in_order, time.monotonic()
            items.append(item)
            new[lane, read.position] = item
        self._metrics.read.inc(len(items))
        return items

    def _item_of_source(self, read: port.Read, lane: RelayLane) -> MessageItem:
        asked = self._sorting.sort(read)
        if asked.reason:
            self._bad(asked.reason, read)
        content = Content(read, asked.deliver_at_ms, message=read.message, withdrawal=asked.withdrawal)
        content.alone_until_s = read.alone_until_s
        return Item(asked.step, content, asked.target, asked.reason, lane)

    def _item_of_retries(self, read: port.Read, lane: RelayLane) -> MessageItem:
        message, name = read.message, self._broker.header_key(tarry.DELIVERY_ID_HEADER)
        if message is None:
            return self._bad_item(read, lane, "the retry log had lost it when it was read")
        if name in message.repeated:
            return self._bad_item(read, lane, f"header {name} occurs twice")
        text = message.headers.get(name, "")
        try:
            delivery = tarry.DeliveryId.parse(text)
        except tarry.InvalidArgument as error:
            return self._bad_item(read, lane, error.message)
        if fault := self._id_fault(delivery):
            return self._bad_item(read, lane, f"delivery id {text!r}: {fault}")
        self._metrics.returned_early.inc(delivery in self._unacknowledged)
        step = Step.RETURNED if delivery.log or delivery in self._unacknowledged else Step.CLAIMED
        return Item(step, Content(read, delivery_id=delivery, message=message), lane=lane)

    def _id_fault(self, delivery: tarry.DeliveryId) -> str:
        """Return the reason why a delivery id is none of this relay's; empty if it can be."""
        if delivery.log and delivery.log != self._log:
            return (
                f"it is of another source or relay, or of a former source: its log is {delivery.log}, not {self._log}"
            )
        if delivery.batch_index is not None:
            return "it has a batch index, which no delivery of a relay has"
        return self._broker.position_fault(delivery.ledger_id, delivery.entry_id)

    def _bad_item(self, read: port.Read, lane: RelayLane, reason: str) -> MessageItem:
        self._bad(reason, read)
        return Item(Step.BAD, Content(read, message=read.message), self._settings.source.dead_letters, reason, lane)

    def _bad(self, reason: str, read: port.Read) -> None:
        self._metrics.bad.inc()
        log.warning("a message cannot be used", extra={"reason": cut(reason), **_fields(read)})
        if self._settings.source.on_bad == "stop":
            raise BadMessage(f"message {read.ledger_id}-{read.entry_id}: {cut(reason)}; source.on_bad is 'stop'")

    async def _receive(self, subscription: Subscription) -> None:
        relay = self._settings.relay
        while not self._ending.is_set():
            try:
                batch = await subscription.receive(_WAIT_S, max_rows=relay.rows, linger_ms=relay.linger_ms)
            except tarry.DeadlineExceeded as error:
                if error.last is None:
                    # The stream itself has ended with it.
                    raise
                # The watch reports a daemon that cannot be reached.
                continue
            if batch is not None:
                self._health.answered("daemon")
                await self._queue.enter(self._handed_out(subscription, batch))

    def _handed_out(self, subscription: Subscription, batch: tarry.Batch) -> list[MessageItem]:
        """Return the rows of a batch that are not in flight here already.

        Such a row was parked, and its stream has ended since; or its former delivery was nacked when Tarry had this
        one's acknowledgement, whose answer is not here yet; or the message has two rows with one name, since it was
        nacked and read again after its acknowledgement.
        """
        names = [tarry.DeliveryId.parse(batch.delivery_id(row)) for row in range(len(batch))]
        last = {name: row for row, name in enumerate(names)}
        new = sorted(row for name, row in last.items() if name not in self._unacknowledged)
        if len(new) < len(names):
            repeated = sorted({*range(len(names))} - {*new})
            subscription.release(batch.take(repeated))
            self._again.update(names[row] for row in repeated)
        self._unacknowledged.update(names)
        return [Item(Step.HANDED_OUT, Content(delivery_id=names[row], handed_out=(batch, row))) for row in new]

    # Work

    def _work_loops(self, subscription: Subscription) -> Iterable[Coroutine[Any, Any, None]]:
        yield self._work(Work.ADD, "daemon", self._add)
        yield self._work(Work.ADD_LATE, "daemon", self._add)
        yield self._work(Work.COMPARE, "broker", self._compare)
        yield self._work(Work.NACK, "daemon", lambda items: self._nack(subscription, items))
        yield self._work(Work.BURY, "daemon", lambda items: self._bury(subscription, items))
        yield self._await()
        yield self._withdraw()
        yield self._work(Work.FETCH, "broker", lambda items: self._fetch_due(subscription, items), self._fetch_rows)
        yield from self._publishing.loops(subscription)
        yield self._guard.run()
        yield self._former.run()
        yield self._watch("broker", self._broker.must_answer)
        yield self._watch("daemon", self._daemon_must_answer)

    def _last_loops(self, subscription: Subscription) -> Iterable[Coroutine[Any, Any, None]]:
        """Yield the loops that an ending session still runs for a moment."""
        yield self._work(Work.ACKNOWLEDGE, "daemon", lambda items: self._acknowledge(subscription, items))
        yield self._work(Work.REJECT, "daemon", lambda items: self._reject(subscription, items))
        for each in self._logs:
            yield self._commit(each)
            if each.reader.hold_every_s is not None:
                yield self._hold(each, each.reader.hold_every_s)

    async def _work(
        self,
        work: Work,
        end: str,
        do: Callable[[Sequence[MessageItem]], Awaitable[None]],
        rows: Callable[[], int] | None = None,
    ) -> None:
        """Do one kind of work. `do` answers each item, or raises. `rows` returns how many items to take at once."""
        failures = 0
        while True:
            items = await self._queue.next(
                lambda: self._passage.take(work, self._settings.relay.rows if rows is None else rows())
            )
            failures = await self._attempt(work, end, do, items, failures)
            await self._queue.tell()

    async def _attempt(
        self,
        work: Work,
        end: str,
        do: Callable[[Sequence[MessageItem]], Awaitable[None]],
        items: Sequence[MessageItem],
        failures: int,
    ) -> int:
        """Do work once; return the failures in a row. A message that raises is found one by one, and then refused."""
        try:
            await port.asked(do(items))
        except _ENDS_SESSION:
            raise
        except Exception as error:
            # Some items may have been answered before.
            left = [item for item in items if TABLE[item.step].work is work and not item.is_forgotten]
            found = daemon_answers.meant(error)
            if work in _CHANGES_TARRY and (found is None or found.meaning is Meaning.UNKNOWN):
                for item in left:
                    item.may_be_done = True
            if daemon_answers.passes(error):
                for item in left:
                    self._passage.answer(item, Answer.AGAIN)
                return await self._rest(end, error, failures, work)
            if work in (Work.ACKNOWLEDGE, Work.REJECT) or (found is None and isinstance(error, tarry.TarryError)):
                raise
            if len(left) > 1:
                for item in left:
                    failures = await self._attempt(work, end, do, [item], failures)
                return failures
            return await self._one_raised(
                left, error, is_refused=found is not None and found.meaning is Meaning.REFUSED
            )
        self._health.answered(end)
        self._health.settle(f"{end}: {work.name.lower()}")
        return 0

    async def _one_raised(self, items: Sequence[MessageItem], error: Exception, *, is_refused: bool) -> int:
        """Refuse a message whose work was refused, or has raised for it alone often enough."""
        for item in items:
            if not self._has_raised(item, error, is_refused=is_refused):
                self._passage.answer(item, Answer.AGAIN)
        return await rest_after(0 if is_refused else 1)

    def _has_raised(self, item: MessageItem, error: Exception, *, is_refused: bool) -> bool:
        """Count an exception of a message's work; return whether it is refused now."""
        item.raised += 1
        if not is_refused:
            self._metrics.surprises.labels("message").inc()
            log.error("work on a message has raised", exc_info=error, extra={"step": item.step.value})
        if not is_refused and item.raised < RAISED_MAX:
            return False
        reason = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
        self._refuse(item, f"may have landed: {reason}" if item.may_be_done else reason)
        return True

    def _refuse(self, item: MessageItem, reason: str) -> None:
        """Refuse a message for good at its present step."""
        if item.step in (Step.HANDED_OUT, Step.PARKED, Step.FETCHED, Step.BURIED):
            self._publishing.refuse(item, reason)
            return
        if item.content.read is not None:
            self._bad(reason, item.content.read)
        self._passage.answer(item, Answer.REFUSED, reason, instead=Step.BAD)

    async def _add(self, items: Sequence[MessageItem]) -> None:
        """Add messages; those without a time for this subscription alone, due when they were sent."""
        reads = [(item, item.content.read) for item in items if item.content.read is not None]
        late = items[0].step is Step.OVERDUE
        times = [sent_ms(read.message) if late else item.content.deliver_at_ms for item, read in reads]
        added = await self._client.add(
            self._topic,
            [read.ledger_id for _, read in reads],
            [read.entry_id for _, read in reads],
            deliver_at_ms=times,
            on_invalid=tarry.OnInvalid.RETURN,
            subscription=self._settings.relay.subscription if late else None,
        )
        refused = dict(added.refused.items())
        self._metrics.added.inc(added.accepted)
        self._metrics.duplicates.inc(added.duplicates)
        now = Step.DIRECT if self._settings.source.on_bad == "now" and not late else None
        for row, (item, read) in enumerate(reads):
            if row in refused:
                why = refused[row]
                reason = f"Tarry refuses its time {times[row]}: {getattr(why, 'name', why)}"
                self._bad(reason, read)
                self._passage.answer(item, Answer.REFUSED, reason, instead=now)
            else:
                self._passage.answer(item, Answer.DONE)

    async def _compare(self, items: Sequence[MessageItem]) -> None:
        """Compare ids that do not name their log with the messages at their positions, by time.

        An id of a source that was created again, of another source or of a message that was rescheduled has another
        time.
        """
        for item, message in await self._fetch(items):
            fault = self._time_fault(item, message)
            if fault and item.content.read is not None:
                fault = f"delivery id '{item.content.delivery_id}': {fault}"
                self._bad(fault, item.content.read)
            self._passage.answer(item, Answer.REFUSED if fault else Answer.DONE, fault)

    def _time_fault(self, item: MessageItem, message: port.Message | None) -> str:
        if message is None:
            return f"the source {self._settings.source.name} has no message at its position"
        try:
            due_ms = self._sorting.due_at_ms(message)
        except Bad:
            # With on_bad = "now" it was delivered all the same.
            due_ms = None
        # A message that is due at once has the time 1 in Tarry.
        time_ms = max(1, sent_ms(message) if due_ms is None else due_ms)
        is_same = abs(time_ms - _due_ms(item)) <= _ROUNDED_MS
        return "" if is_same else f"the time of the message at its position is another, {time_ms}"

    async def _nack(self, subscription: Subscription, items: Sequence[MessageItem]) -> None:
        """Negatively acknowledge messages.

        An ignored one needs nothing: it is delivered anyway, or was redelivered already. A message that is due by this
        clock but not yet by the daemon's is nacked again: otherwise it would be delivered under the name that the
        output has, and dropped there.
        """
        nacked = await subscription.nack(_columns(items), forwarded=True)
        not_due = [items[row] for row, why in nacked.ignored.items() if why is tarry.IgnoredReason.NOT_DUE]
        youngest_ms = time.time_ns() // 1_000_000 - _CLOCK_BEHIND_MS
        again = {id(item) for item in not_due if _due_ms(item) > youngest_ms}
        self._metrics.returned.inc(len(items) - len(again))
        for item in items:
            self._passage.answer(item, Answer.AGAIN if id(item) in again else Answer.DONE)
        if again:
            await asyncio.sleep(_NOT_DUE_S)

    async def _bury(self, subscription: Subscription, items: Sequence[MessageItem]) -> None:
        """Turn messages whose dead letters the broker refuses into dead letters of Tarry.

        A message of the retry log is logged instead, because its position belongs to another message of the source.
        """
        for item in items:
            read, lane = item.content.read, item.lane
            if read is None or lane is None or not lane.of.is_source:
                self._publishing.report(item, item.reason)
            else:
                name = tarry.DeliveryId(read.ledger_id, read.entry_id, None, sent_ms(read.message), 0)
                await subscription.reject(name.positions, cut(item.reason), forwarded=True)
                self._metrics.buried.inc()
                log.error(
                    "a dead letter is refused, and is one of Tarry now",
                    extra={"reason": cut(item.reason), **_fields(read)},
                )
            self._passage.answer(item, Answer.DONE)

    async def _fetch_due(self, subscription: Subscription, items: Sequence[MessageItem]) -> None:
        for item, message in await self._fetch(items):
            self._fetched(item, message)
        self._publishing.park(subscription)

    async def _fetch(self, items: Sequence[MessageItem]) -> list[tuple[MessageItem, port.Message | None]]:
        """Fetch the messages at the positions of items.

        Missing ones are fetched again: at once, if those that arrived fill a portion.
        """
        ordered = sorted(items, key=_position)
        found = await self._broker.log.fetch([_position(item) for item in ordered], self._generation)
        came: list[tuple[MessageItem, port.Message | None]] = []
        for item, message in zip(ordered, found, strict=True):
            if message is port.NOT_YET:
                self._passage.answer(item, Answer.AGAIN)
            else:
                came.append((item, message))
        size_bytes = sum(map(_size, found))
        self._portions.came(len(came), size_bytes)
        if len(came) < len(items) and size_bytes < self._portions.portion_bytes:
            await self._rest("broker", port.Unreachable("a fetch was cut short"), 0)
        return came

    def _fetch_rows(self) -> int:
        """Return how many messages may be fetched now."""
        return self._portions.rows(self._passage.fetched_bytes)

    def _fetched(self, item: MessageItem, message: port.Message | None) -> None:
        if message is None:
            self._refuse(item, f"the source {self._settings.source.name} no longer has it")
            return
        try:
            item.target = self._sorting.target_of(message)
        except Bad as error:
            # The settings, or the rules, have changed since it was read.
            self._refuse(item, str(error))
            return
        item.content.message = message
        self._passage.resize(item, message.size_bytes)
        self._passage.answer(item, Answer.DONE)

    async def _acknowledge(self, subscription: Subscription, items: Sequence[MessageItem]) -> None:
        with self._handing_back(items):
            await subscription.ack(_columns(items))

    async def _reject(self, subscription: Subscription, items: Sequence[MessageItem]) -> None:
        by_reason: dict[str, list[MessageItem]] = {}
        for item in items:
            by_reason.setdefault(cut(item.reason), []).append(item)
        with self._handing_back(items):
            await asyncio.gather(*(subscription.reject(_columns(each), reason) for reason, each in by_reason.items()))

    @contextlib.contextmanager
    def _handing_back(self, items: Sequence[MessageItem]) -> Iterator[None]:
        """Acknowledge or reject within the block.

        A message is acknowledged as often as it was delivered: Tarry may have two rows with its name, and a delivery
        that comes before the answer may not be what the answer is about.
        """
        yield
        for item in items:
            name = item.content.delivery_id
            is_again = name in self._again
            if is_again:
                self._again[name] -= 1
                if not self._again[name]:
                    del self._again[name]
            else:
                self._unacknowledged.discard(name)
            self._passage.answer(item, Answer.AGAIN if is_again else Answer.DONE)

    async def _commit(self, of: ReadLog) -> None:
        failures = 0

        def take() -> list[MessageItem]:
            if of.is_source and not self._guard.may_read.is_set():
                return []
            return self._passage.take_to_commit(lambda lane: lane.of is of)

        while True:
            items = await self._queue.next(take)
            try:
                await of.reader.commit([item.content.read for item in items if item.content.read is not None])
            except port.Unreachable as error:
                self._passage.committed(items, Answer.AGAIN)
                failures = await self._rest("broker", error, failures)
            else:
                failures = 0
                self._metrics.committed.inc(len(items))
                self._passage.committed(items, Answer.DONE)
            await self._queue.tell()

    # Holding and watching

    async def _hold(self, of: ReadLog, every_s: float) -> None:
        """Hold uncommitted messages while the daemon answers; otherwise another relay gets them."""
        while True:
            await asyncio.sleep(every_s)
            if not self._may_hold(every_s):
                continue
            items = self._passage.held(lambda lane: lane.of is of)
            rows = self._settings.relay.rows
            for first in range(0, len(items), rows):
                held = [item.content.read for item in items[first : first + rows] if not item.is_forgotten]
                try:
                    await of.reader.hold([read for read in held if read is not None])
                except port.Unreachable as error:
                    self._metrics.failed("broker", str(error))
                    break

    def _may_hold(self, every_s: float) -> bool:
        """Return whether the daemon has answered lately; if not, messages are left to another relay."""
        return self._health.silent_s("daemon") < min(SILENT_S, max(every_s, 2 * _WATCH_S))

    async def _watch(self, end: str, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask an end again and again something that it must answer: a poll that times out proves nothing."""
        while True:
            if end == "daemon":
                self._settle_idle()
            try:
                await ask()
            except Exception as error:
                if not daemon_answers.passes(error):
                    raise
                self._metrics.failed(end, str(error))
                self._tell_credentials(end, "watch", error)
            else:
                self._health.answered(end)
                self._health.settle(f"{end}: watch")
            await asyncio.sleep(_WATCH_S)

    def _settle_idle(self) -> None:
        """Remove the reasons of work that no message waits for, because nothing else would show its success."""
        for work in Work:
            if not self._passage.count(*(step for step, row in TABLE.items() if row.work is work)):
                self._health.settle(f"daemon: {work.name.lower()}")

    async def _daemon_must_answer(self) -> None:
        await self._client.stats(self._topic, timeout_s=_WATCH_S)

    # Withdrawals

    async def _await(self) -> None:
        """Check again and again which withdrawals name committed messages. Those of one position pass in order."""
        waiting: list[tuple[MessageItem, Withdrawal, float]] = []
        failures = looks = 0
        while True:
            if more := await self._more_to_await(is_idle=not waiting):
                ends_s = time.monotonic() + self._settings.source.await_commit_s
                waiting += [(item, each, ends_s) for item in more if (each := item.content.withdrawal) is not None]
                looks = 0
            try:
                passed = await self._passed(waiting)
            except port.Unreachable as error:
                failures = await self._rest("broker", error, failures)
                continue
            failures = 0
            now_s = time.monotonic()
            left = []
            for has_passed, (item, each, ends_s) in zip(passed, waiting, strict=True):
                if item.step is not Step.WITHDRAWAL:
                    continue  # It was refused.
                if has_passed:
                    self._passage.answer(item, Answer.DONE)
                elif ends_s < now_s:
                    others = item.content.alone_until_s < now_s
                    self._resolve(item, Outcome(Result.NOT_COMMITTED, may_have_landed=others), Answer.REFUSED)
                elif not item.is_forgotten:
                    left.append((item, each, ends_s))
            looks = 0 if len(left) < len(waiting) else looks + 1
            waiting = left
            await self._queue.tell()
            if waiting:
                await asyncio.sleep(_LOOK_S[min(looks, len(_LOOK_S) - 1)])

    async def _passed(self, waiting: Sequence[tuple[MessageItem, Withdrawal, float]]) -> Sequence[bool]:
        """Return for each whether the message it names is committed. One that raises alone three times is refused."""
        try:
            passed = await port.asked(self._broker.source.passed([each.position for _, each, _ in waiting]))
            return port.one_for_each(passed, len(waiting), bool)
        except (port.Unreachable, *_ENDS_SESSION):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this message's
            if len(waiting) > 1:
                return [has_passed for each in waiting for has_passed in await self._passed([each])]
            # It stays among the checked ones, in its order.
            for item, _, _ in waiting:
                self._has_raised(item, error, is_refused=False)
            await rest_after(1)
            return [False] * len(waiting)

    async def _more_to_await(self, *, is_idle: bool) -> list[MessageItem]:
        def take() -> list[MessageItem]:
            return self._passage.take(Work.AWAIT, self._settings.relay.rows)

        return await self._queue.next(take) if is_idle else take()

    async def _withdraw(self) -> None:
        """Request withdrawals in order, and again until there is an answer: the next may be about the same position."""
        failures = 0
        while True:
            items = await self._queue.next(lambda: self._passage.take(Work.WITHDRAW, self._settings.relay.rows))
            # A retried one is here twice; the second time it is at another step.
            asked = [(item, each) for item in items if (each := item.content.withdrawal) is not None]
            for alike in rounds(asked):
                while there := [item for item, _ in alike if item.step is Step.AWAITED and not item.is_forgotten]:
                    failures = await self._attempt(Work.WITHDRAW, "daemon", self._withdraw_alike, there, failures)
            await self._queue.tell()

    async def _withdraw_alike(self, items: Sequence[MessageItem]) -> None:
        alone_until_s = [item.content.alone_until_s for item in items]
        for item in items:
            item.content.alone_until_s = 0.0
        asked = [each for item in items if (each := item.content.withdrawal) is not None]
        try:
            found = await outcomes(self._client, self._topic, asked, alone_until_s)
        except (tarry.InvalidArgument, tarry.OutOfRange):
            # Nothing was done.
            for item, until_s in zip(items, alone_until_s, strict=True):
                item.content.alone_until_s = until_s
            raise
        for item, outcome in zip(items, found, strict=True):
            self._resolve(item, outcome, Answer.DONE)

    def _resolve(self, item: MessageItem, outcome: Outcome, answer: Answer) -> None:
        """Process the result of a withdrawal, which is sent to its requester before it is committed."""
        self._metrics.withdrawals.labels(outcome.result.value).inc()
        item.content.told = outcome.headers
        self._passage.answer(item, answer)

    # Failing and ending

    async def _rest(self, end: str, error: Exception, failures: int, work: Work | None = None) -> int:
        """Record a failure and wait before the next try; return the failures in a row."""
        self._metrics.failed(end, str(error))
        if work is not None:
            self._tell_credentials(end, work.name.lower(), error)
        return await rest_after(failures)

    def _tell_credentials(self, end: str, what: str, error: Exception) -> None:
        if isinstance(error, (tarry.PermissionDenied, tarry.Unauthenticated)):
            self._health.explain(f"{end}: {what}", str(error))

    async def _drained(self, intake: Sequence[asyncio.Task[None]]) -> None:
        """Wait until nothing is in flight. Messages that are left are redelivered to another relay."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.relay.drain_s):
                await asyncio.wait(intake)
                while self._passage.read or self._passage.handed_out:
                    await self._queue.news()

    async def _done(self) -> None:
        """Wait until finished messages are committed, acknowledged or rejected."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._passage.count(*ENDING):
                    await self._queue.news()


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("a loop has failed", extra={"error": f"{type(error).__name__}: {error}"})


class _Tasks:
    """The loops of a session, in three groups: intake, work, and the end of messages."""

    def __init__(self) -> None:
        self.intake: list[asyncio.Task[None]] = []
        self.work: list[asyncio.Task[None]] = []
        self.last: list[asyncio.Task[None]] = []

    def start(self, group: list[asyncio.Task[None]], loops: Iterable[Coroutine[Any, Any, None]]) -> None:
        group += [self._begun(each) for each in loops]

    def restart(self, group: list[asyncio.Task[None]], loops: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Restart the loops of a group that have ended; `loops` are all of the group, in order."""
        for index, each in enumerate(loops):
            if group[index].done():
                group[index] = self._begun(each)
            else:
                each.close()

    @staticmethod
    def _begun(loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop)
        # If several loops fail together, only the first error is raised.
        task.add_done_callback(_tell_failure)
        return task

    def all(self) -> list[asyncio.Task[None]]:
        return [*self.intake, *self.work, *self.last]

    async def until(self, reached: Coroutine[Any, Any, object]) -> None:
        """Wait until it is reached. Raises what ends a loop before."""
        await self._until(reached, self.all())

    async def until_last(self, reached: Coroutine[Any, Any, object]) -> None:
        """Wait until it is reached, or until one of the last loops also ends."""
        with contextlib.suppress(Exception):
            await self._until(reached, [each for each in self.last if not each.done()])

    @staticmethod
    async def _until(reached: Coroutine[Any, Any, object], loops: Sequence[asyncio.Task[None]]) -> None:
        goal = asyncio.ensure_future(reached)
        running: set[asyncio.Future[Any]] = {goal, *loops}
        try:
            while not goal.done():
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for each in ended:
                    if each.cancelled() and each is not goal:
                        raise port.NobodyCancelled("a loop of the relay ended with CancelledError")
                    each.result()
        finally:
            goal.cancel()


# Withdrawals: requests to Tarry, and the meaning of its answers


class Result(enum.Enum):
    """The result of a withdrawal; all but the first two have changed nothing."""

    CANCELLED = "CANCELLED"
    """It will never be delivered."""
    RESCHEDULED = "RESCHEDULED"
    """It has the new time."""
    ALREADY_DUE = "ALREADY_DUE"
    """It was already due."""
    IN_FLIGHT = "IN_FLIGHT"
    """It is in flight to its target."""
    NOT_FOUND = "NOT_FOUND"
    """It does not wait: it had no time, was delivered, cancelled before, or is a dead letter."""
    NOT_COMMITTED = "NOT_COMMITTED"
    """No relay has committed it in time, so it may still be delivered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of Tarry about one withdrawal."""

    result: Result
    deliver_at_ms: int | None = None
    """Time stored by RESCHEDULED, Unix time (ms)"""
    may_have_landed: bool = False
    """True if another try of this withdrawal may have done it without this one's knowledge"""

    @property
    def headers(self) -> dict[str, str]:
        """The headers sent to the requester."""
        told = {RESULT_HEADER: self.result.value}
        if self.deliver_at_ms is not None:
            told[DELIVER_AT_HEADER] = str(self.deliver_at_ms)
        if self.may_have_landed:
            told[MAY_HAVE_LANDED_HEADER] = "true"
        return told


def rounds(asked: Iterable[tuple[Asking, Withdrawal]]) -> list[list[tuple[Asking, Withdrawal]]]:
    """Group withdrawals that can be requested at once.

    Each round is of one kind and has no position twice; withdrawals of one position stay in order.
    """
    found: list[list[tuple[Asking, Withdrawal]]] = []
    times: dict[tuple[int, int], int] = {}
    for each in asked:
        _, withdrawal = each
        number = times.get(withdrawal.position, 0)
        is_of_reschedules = number % 2 == 1
        if is_of_reschedules != (withdrawal.deliver_at_ms is not None):
            number += 1
        times[withdrawal.position] = number + 1
        found += [[] for _ in range(number + 1 - len(found))]
        found[number].append(each)
    return [each for each in found if each]


async def outcomes(
    client: tarry.aio.Client, topic: str, asked: Sequence[Withdrawal], alone_until_s: Sequence[float]
) -> list[Outcome]:
    """Return the results of one round. If the client raises, nothing was done, or the result is unknown.

    `alone_until_s` is the time, by `time.monotonic`, until which no one else can have requested each.
    """
    ledgers = [each.ledger_id for each in asked]
    entries = [each.entry_id for each in asked]
    times = [each.deliver_at_ms for each in asked if each.deliver_at_ms is not None]
    answer: tarry.Cancelled | tarry.Rescheduled
    stored_ms: dict[int, int] = dict(enumerate(times))
    if times:
        answer = await client.reschedule(topic, ledgers, entries, deliver_at_ms=times)
        done = Result.RESCHEDULED
        stored_ms |= zip(answer.raised_index.tolist(), answer.raised_deliver_at_ms.tolist(), strict=True)
    else:
        answer = await client.cancel(topic, ledgers, entries)
        done = Result.CANCELLED
    left = {
        **dict.fromkeys(answer.not_found_index.tolist(), Result.NOT_FOUND),
        **dict.fromkeys(answer.already_due_index.tolist(), Result.ALREADY_DUE),
        **dict.fromkeys(answer.in_flight_index.tolist(), Result.IN_FLIGHT),
    }
    found = []
    now_s = time.monotonic()
    for row, until_s in enumerate(alone_until_s):
        result = left.get(row, done)
        # A reschedule that was done may have made it due since; a cancel that was done leaves nothing to find.
        hides_a_landing = result is Result.NOT_FOUND or (bool(times) and result is not done)
        landed = hides_a_landing and (until_s < now_s or answer.may_have_landed)
        found.append(Outcome(result, stored_ms.get(row) if result is Result.RESCHEDULED else None, landed))
    return found


def _drop(content: Content) -> None:
    """Drop a payload that is no longer needed."""
    content.message = None
    if content.read is not None:
        content.read = dataclasses.replace(content.read, message=None)


def _size(message: port.Message | None) -> int:
    return 0 if message is None else message.size_bytes


def _position(item: MessageItem) -> tuple[int, int]:
    name = item.content.delivery_id
    return (0, 0) if name is None else (name.ledger_id, name.entry_id)


def _due_ms(item: MessageItem) -> int:
    name = item.content.delivery_id
    return 0 if name is None else name.deliver_at_ms


def _fields(read: port.Read) -> dict[str, object]:
    """Return the position of a message, for the log."""
    return {"ledger_id": read.ledger_id, "entry_id": read.entry_id, "lane": read.lane}


def _columns(items: Iterable[MessageItem]) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return deliveries, by name, as columns for the client library."""
    names = [item.content.delivery_id for item in items if item.content.delivery_id is not None]
    return (
        [name.ledger_id for name in names],
        [name.entry_id for name in names],
        [name.deliver_at_ms for name in names],
        [tarry.NO_BATCH_INDEX if name.batch_index is None else name.batch_index for name in names],
        [name.redelivery_count for name in names],
    )
