"""A relay at work: each kind of work of the table, done by a loop of its own, until it is told to end.

Owns: doing the work with a broker and the client library, waiting, repeating, and what a failure means.
Does not own: what may be done next (`tarry_relay.passage`), brokers (`tarry_relay.port`), what is told of it
(`tarry_relay.relay_metrics`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tarry
import tarry.aio
from tarry_relay import cancelling, port, withdrawal_results
from tarry_relay.former_generations import FormerGenerations
from tarry_relay.pacing import Pacing
from tarry_relay.passage import TABLE, Answer, Item, Passage, Step, Work
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings
from tarry_relay.retention_guard import RetentionGuard
from tarry_relay.sorting import Bad, Sorting, Withdrawal
from tarry_relay.withdrawal_results import Outcome, Result

log = logging.getLogger(__name__)

REASON_HEADER = "tarry-reason"
POSITION_HEADER = "tarry-position"
RESULT_HEADER = "tarry-result"
DELIVER_AT_HEADER = "tarry-deliver-at"
MAY_HAVE_LANDED_HEADER = "tarry-may-have-landed"
_WAIT_S = 1.0
_CLOCK_BEHIND_MS = 60_000
"""So far the daemon's clock may be behind. What is not due for longer has got another time since, and another name."""
_NOT_DUE_S = 0.2
_LOOK_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""How long to wait before it is looked again what is committed, the longer the more often nothing was."""
_BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_PASSES = (
    port.Unreachable,
    tarry.Aborted,
    tarry.DeadlineExceeded,
    tarry.OutcomeUnknown,
    tarry.ResourceExhausted,
    tarry.Unavailable,
)
"""Failures that another try may cure."""


@dataclasses.dataclass(slots=True)
class Content:
    """What the work on a message needs. `read` or `delivery_id` says where it comes from."""

    read: port.Read | None = None
    deliver_at_ms: int = 0
    """Of what is read: when it is due."""
    delivery_id: tarry.DeliveryId | None = None
    """Of what was handed out, or handed back by a consumer."""
    handed_out: tuple[tarry.Batch, int] | None = None
    """The batch and the row that hold its permit; None: it holds none."""
    message: port.Message | None = None
    withdrawal: Withdrawal | None = None
    """Of what cancels or reschedules another one."""
    alone_until_s: float = 0.0
    """Until when nobody can have asked for the withdrawal before, by `time.monotonic`."""
    outcome: Outcome | None = None
    """What came of the withdrawal."""


MessageItem: TypeAlias = "Item[Content, _Lane]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ReadLog:
    """A log that is read on."""

    name: str
    reader: port.Reader
    is_source: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    """A lane of one of the logs: each has lanes of any name."""

    of: _ReadLog
    lane: Hashable


class BadMessage(Exception):
    """A message cannot be used, and `source.on_bad` says that the relay stops then."""


class Relay:
    """One relay between one broker and one Tarry topic."""

    def __init__(
        self,
        settings: Settings,
        sorting: Sorting,
        *,
        broker: port.Broker,
        client: tarry.aio.Client,
        generation: str,
        metrics: RelayMetrics,
    ) -> None:
        """`generation`: of the source, which gives the Tarry topic its name."""
        self._settings = settings
        self._sorting = sorting
        self._broker = broker
        self._client = client
        self._generation = generation
        self._topic = topic = settings.relay.topic_of(generation)
        self._metrics = metrics
        self._passage: Passage[Content, _Lane] = Passage(settings.source.dead_letters, settings.source.results)
        self._pacing = Pacing(self._limit_of)
        self._guard = RetentionGuard(settings, broker.log, client, generation, metrics)
        self._former = FormerGenerations(settings, client, topic, metrics)
        self._logs = [_ReadLog(settings.source.name, broker.source, is_source=True)]
        if settings.retry is not None and broker.retries is not None:
            self._logs.append(_ReadLog(settings.retry.name, broker.retries, is_source=False))
        self._unacknowledged: set[tarry.DeliveryId | None] = set()
        """What was handed out here and is not acknowledged; a consumer may have failed with it already."""
        self._again: set[tarry.DeliveryId | None] = set()
        """What of that was handed out again since it was last acknowledged or rejected."""
        self._tried: set[str] = set()
        """Targets that have failed, and to which one message is under way now."""
        self._changed = asyncio.Condition()
        self._ending = asyncio.Event()
        metrics.watch(self._passage)

    async def run(self, ending: asyncio.Event) -> None:
        """Runs until `ending` is set, and then until what is under way has ended, `relay.drain_s` at most.

        Raises what no other try cures.
        """
        relay = self._settings.relay
        await self._make_subscription()
        async with self._client.subscribe(self._topic, relay.subscription, permits=relay.permits) as subscription:
            log.info("relays", extra={"topic": self._topic, "subscription": relay.subscription, "id": relay.id})
            async with asyncio.TaskGroup() as tasks:
                intake = [tasks.create_task(each) for each in self._intake(subscription)]
                work = [tasks.create_task(each) for each in self._all_work(subscription)]
                try:
                    await ending.wait()
                    self._ending.set()
                    log.info("drains", extra={"read": self._passage.read, "handed_out": self._passage.handed_out})
                    await asyncio.wait(intake)
                    await self._drained()
                finally:
                    await cancelling.end([*intake, *work])
            log.info("has ended", extra={"read": self._passage.read, "handed_out": self._passage.handed_out})

    async def _make_subscription(self) -> None:
        retry = self._settings.retry
        policy = None
        if retry is not None:
            delays = tarry.DelayList(retry.delays_ms)
            policy = tarry.SubscriptionPolicy(redelivery=delays, max_redeliver_count=retry.count_max)
        # It is there, with another policy, which somebody has set.
        with contextlib.suppress(tarry.AlreadyExists):
            await self._client.create_subscription(self._topic, self._settings.relay.subscription, policy)
        self._metrics.reachable("daemon")

    # What comes in.

    def _intake(self, subscription: tarry.aio.Subscription) -> Iterable[Coroutine[Any, Any, None]]:
        for each in self._logs:
            yield self._read(each)
        yield self._receive(subscription)

    async def _read(self, of: _ReadLog) -> None:
        relay = self._settings.relay
        failures = 0
        while not self._ending.is_set():
            async with self._changed:
                room = relay.read_ahead - self._passage.read
                if room <= 0:
                    await self._wait_for_news()
                    continue
            try:
                portion = await of.reader.read(min(relay.rows, room), _WAIT_S)
            except port.Unreachable as error:
                failures = await self._rest("broker", error, failures)
                continue
            failures = 0
            self._metrics.reachable("broker")
            for lane in portion.lost_lanes:
                self._passage.lose(_Lane(of, lane))
            if portion.read or portion.lost_lanes:
                self._metrics.read.inc(len(portion.read))
                item_of = self._item_of_source if of.is_source else self._item_of_retries
                await self._enter([item_of(read, _Lane(of, read.lane)) for read in portion.read])

    def _item_of_source(self, read: port.Read, lane: _Lane) -> MessageItem:
        asked = self._sorting.sort(read)
        if asked.reason:
            self._bad(asked.reason, read)
        content = Content(read, asked.deliver_at_ms, message=read.message, withdrawal=asked.withdrawal)
        content.alone_until_s = read.alone_until_s
        return Item(asked.step, content, asked.target, asked.reason, lane)

    def _item_of_retries(self, read: port.Read, lane: _Lane) -> MessageItem:
        headers = {} if read.message is None else read.message.headers
        text = headers.get(tarry.DELIVERY_ID_HEADER, "")
        try:
            name = tarry.DeliveryId.parse(text)
        except tarry.InvalidArgument as error:
            self._bad(error.message, read)
            bad = Content(read, message=read.message)
            return Item(Step.BAD, bad, self._settings.source.dead_letters, error.message, lane)
        self._metrics.returned_early.inc(name in self._unacknowledged)
        return Item(Step.RETURNED, Content(read, delivery_id=name, message=read.message), lane=lane)

    def _bad(self, reason: str, read: port.Read) -> None:
        self._metrics.bad.inc()
        fields = {"reason": reason, "ledger_id": read.ledger_id, "entry_id": read.entry_id, "lane": read.lane}
        log.warning("a message cannot be used", extra=fields)
        if self._settings.source.on_bad == "stop":
            raise BadMessage(f"message {read.ledger_id}-{read.entry_id}: {reason}; source.on_bad is 'stop'")

    async def _receive(self, subscription: tarry.aio.Subscription) -> None:
        relay = self._settings.relay
        while not self._ending.is_set():
            batch = await subscription.receive(_WAIT_S, max_rows=relay.rows, linger_ms=relay.linger_ms)
            if batch is not None:
                await self._enter(self._handed_out(subscription, batch))

    def _handed_out(self, subscription: tarry.aio.Subscription, batch: tarry.Batch) -> list[MessageItem]:
        """What of a batch is not under way here already. What is was parked, and its stream has ended since; or the
        hand-out before was handed back when Tarry had this one's acknowledgement, whose answer is not here yet.
        """
        names = [tarry.DeliveryId.parse(batch.delivery_id(row)) for row in range(len(batch))]
        new = [row for row, name in enumerate(names) if name not in self._unacknowledged]
        if len(new) < len(names):
            subscription.release(batch.take(sorted({*range(len(names))} - {*new})))
            self._again.update(self._unacknowledged.intersection(names))
        self._unacknowledged.update(names)
        return [Item(Step.HANDED_OUT, Content(delivery_id=names[row], handed_out=(batch, row))) for row in new]

    # What is done.

    def _all_work(self, subscription: tarry.aio.Subscription) -> Iterable[Coroutine[Any, Any, None]]:
        yield self._work(Work.ADD, "daemon", self._add)
        yield self._work(Work.NACK, "daemon", lambda items: self._nack(subscription, items))
        yield self._await()
        yield self._withdraw()
        yield self._work(Work.FETCH, "broker", lambda items: self._fetch(subscription, items))
        yield self._work(Work.ACKNOWLEDGE, "daemon", lambda items: self._acknowledge(subscription, items))
        yield self._work(Work.REJECT, "daemon", lambda items: self._reject(subscription, items))
        for failing in (False, True):
            yield self._produce(subscription, failing)
        for each in self._logs:
            yield self._commit(each)
        yield self._guard.run()
        yield self._former.run()

    async def _work(self, work: Work, end: str, do: Callable[[Sequence[MessageItem]], Awaitable[None]]) -> None:
        """Does one kind of work, and again what has failed for now. `do` answers each item, or raises."""
        failures = 0
        while True:
            items = await self._next(lambda: self._passage.take(work, self._settings.relay.rows))
            try:
                await do(items)
            except _PASSES as error:
                # Of some the answer may have come before.
                self._answer_all([item for item in items if TABLE[item.step].work is work], Answer.AGAIN)
                failures = await self._rest(end, error, failures)
            else:
                failures = 0
                self._metrics.reachable(end)
            await self._tell()

    async def _add(self, items: Sequence[MessageItem]) -> None:
        reads = [(item, item.content.read) for item in items if item.content.read is not None]
        added = await self._client.add(
            self._topic,
            [read.ledger_id for _, read in reads],
            [read.entry_id for _, read in reads],
            deliver_at_ms=[item.content.deliver_at_ms for item in items],
            on_invalid=tarry.OnInvalid.RETURN,
        )
        refused = dict(added.refused.items())
        self._metrics.added.inc(added.accepted)
        self._metrics.duplicates.inc(added.duplicates)
        now = Step.DIRECT if self._settings.source.on_bad == "now" else None
        for row, (item, read) in enumerate(reads):
            if row in refused:
                why = refused[row]
                reason = f"Tarry refuses its time {item.content.deliver_at_ms}: {getattr(why, 'name', why)}"
                self._bad(reason, read)
                self._passage.answer(item, Answer.REFUSED, reason, instead=now)
            else:
                self._passage.answer(item, Answer.DONE)

    async def _nack(self, subscription: tarry.aio.Subscription, items: Sequence[MessageItem]) -> None:
        """What the daemon ignores needs nothing: it comes by itself, or has come again already. But for what is due by
        this clock and not yet by the daemon's: it would come by the name that the output has, and be dropped there.
        """
        try:
            nacked = await subscription.nack(_columns(items), forwarded=True)
        except tarry.InvalidArgument as error:
            # One of them is no name that Tarry has given: the others are not to wait for it.
            if len(items) > 1:
                for item in items:
                    await self._nack(subscription, [item])
            elif (read := items[0].content.read) is not None:
                self._bad(error.message, read)
                self._passage.answer(items[0], Answer.REFUSED, error.message)
            return
        not_due = [items[row] for row, why in nacked.ignored.items() if why is tarry.IgnoredReason.NOT_DUE]
        youngest_ms = time.time_ns() // 1_000_000 - _CLOCK_BEHIND_MS
        again = {id(item) for item in not_due if _due_ms(item) > youngest_ms}
        self._metrics.returned.inc(len(items) - len(again))
        for item in items:
            self._passage.answer(item, Answer.AGAIN if id(item) in again else Answer.DONE)
        if again:
            await asyncio.sleep(_NOT_DUE_S)

    async def _await(self) -> None:
        """Looks again and again which withdrawals name what is committed. Of one position they pass in their order."""
        waiting: list[tuple[MessageItem, Withdrawal, float]] = []
        failures = looks = 0
        while True:
            if more := await self._more_to_await(is_idle=not waiting):
                ends_s = time.monotonic() + self._settings.source.await_commit_s
                waiting += [(item, each, ends_s) for item in more if (each := item.content.withdrawal) is not None]
                looks = 0
            try:
                passed = await self._broker.source.passed([each.position for _, each, _ in waiting])
            except port.Unreachable as error:
                failures = await self._rest("broker", error, failures)
                continue
            failures = 0
            now_s = time.monotonic()
            left = []
            for has_passed, (item, each, ends_s) in zip(passed, waiting, strict=True):
                if has_passed:
                    self._passage.answer(item, Answer.DONE)
                elif ends_s < now_s:
                    others = item.content.alone_until_s < now_s
                    self._resolve(item, Outcome(Result.NOT_COMMITTED, may_have_landed=others), Answer.REFUSED)
                elif not item.is_forgotten:
                    left.append((item, each, ends_s))
            looks = 0 if len(left) < len(waiting) else looks + 1
            waiting = left
            await self._tell()
            if waiting:
                await asyncio.sleep(_LOOK_S[min(looks, len(_LOOK_S) - 1)])

    async def _more_to_await(self, *, is_idle: bool) -> list[MessageItem]:
        def take() -> list[MessageItem]:
            return self._passage.take(Work.AWAIT, self._settings.relay.rows)

        return await self._next(take) if is_idle else take()

    async def _withdraw(self) -> None:
        """Asks in their order, and again until there is an answer: what follows may be about the same position."""
        failures = 0
        while True:
            items = await self._next(lambda: self._passage.take(Work.WITHDRAW, self._settings.relay.rows))
            asked = [(item, each) for item in items if (each := item.content.withdrawal) is not None]
            for alike in withdrawal_results.rounds(asked):
                while there := [
                    (item, each) for item, each in alike if item.step is Step.AWAITED and not item.is_forgotten
                ]:
                    try:
                        await self._withdraw_alike(there)
                    except _PASSES as error:
                        failures = await self._rest("daemon", error, failures)
                    else:
                        failures = 0
                        self._metrics.reachable("daemon")
            await self._tell()

    async def _withdraw_alike(self, there: Sequence[tuple[MessageItem, Withdrawal]]) -> None:
        alone_until_s = [item.content.alone_until_s for item, _ in there]
        for item, _ in there:
            item.content.alone_until_s = 0.0
        found = await withdrawal_results.outcomes(self._client, self._topic, [each for _, each in there], alone_until_s)
        for (item, _), outcome in zip(there, found, strict=True):
            if outcome.result is not None:
                self._resolve(item, outcome, Answer.DONE)
                continue
            if item.content.read is not None:
                self._bad(outcome.refused, item.content.read)
            self._passage.answer(item, Answer.REFUSED, outcome.refused)

    def _resolve(self, item: MessageItem, outcome: Outcome, answer: Answer) -> None:
        """The result of a withdrawal is known. It is told, where somebody is to be told, and committed after that."""
        if outcome.result is not None:
            self._metrics.withdrawals.labels(outcome.result.value).inc()
        item.content.outcome = outcome
        self._passage.answer(item, answer)

    async def _fetch(self, subscription: tarry.aio.Subscription, items: Sequence[MessageItem]) -> None:
        ordered = sorted(items, key=_position)
        found = await self._broker.log.fetch([_position(item) for item in ordered], self._generation)
        for item, message in zip(ordered, found, strict=True):
            self._fetched(item, message)
        self._park(subscription)

    def _fetched(self, item: MessageItem, message: port.Message | None) -> None:
        if message is None:
            self._refuse(item, f"the source {self._settings.source.name} has it no more")
            return
        try:
            item.target = self._sorting.target_of(message.headers)
        except Bad as error:
            # The settings are others than when it was read.
            self._refuse(item, str(error))
            return
        item.content.message = message
        self._passage.answer(item, Answer.DONE)

    def _park(self, subscription: tarry.aio.Subscription) -> None:
        """Keeps half of the permits free of what waits for targets that take nothing now."""
        relay, now_s = self._settings.relay, time.monotonic()
        waiting, parked = self._passage.count(Step.FETCHED), self._passage.count(Step.PARKED)
        rows = min(waiting - relay.permits // 2, relay.parked_max - parked)
        if rows <= 0:
            return
        holding: dict[int, tuple[tarry.Batch, list[int]]] = {}
        for item in self._passage.park(
            rows, lambda target: target in self._tried or self._pacing.takes_nothing(target, now_s)
        ):
            content = item.content
            if content.handed_out is not None:
                batch, row = content.handed_out
                holding.setdefault(id(batch), (batch, []))[1].append(row)
            content.handed_out = content.message = None
        for batch, held in holding.values():
            subscription.release(batch.take(sorted(held)))

    async def _produce(self, subscription: tarry.aio.Subscription, failing: bool) -> None:
        """Publishes to the targets that are failing, or to the others: one that hangs keeps no other."""
        failures = 0
        while True:
            items = await self._next(lambda: self._take_to_produce(failing))
            try:
                with self._trying(items, subscription) if failing else contextlib.nullcontext():
                    answers = await self._broker.output.produce([self._outgoing(item) for item in items])
            except _PASSES as error:
                self._answer_all(items, Answer.AGAIN)
                failures = await self._rest("broker", error, failures)
            else:
                failures = 0
                for item, answer in zip(items, answers, strict=True):
                    self._produced(item, answer)
                self._park(subscription)
            await self._tell()

    @contextlib.contextmanager
    def _trying(self, items: Sequence[MessageItem], subscription: tarry.aio.Subscription) -> Iterator[None]:
        """Whatever else waits for these targets is parked, however long they do not answer."""
        self._tried = {item.target for item in items}
        self._park(subscription)
        try:
            yield
        finally:
            self._tried = set()

    def _take_to_produce(self, failing: bool) -> list[MessageItem]:
        now_s = time.monotonic()

        def allowed(target: str, wanted: int) -> int:
            return self._pacing.take(target, wanted, now_s) if self._pacing.is_failing(target) is failing else 0

        return self._passage.take_to_produce(self._settings.relay.rows, allowed)

    def _outgoing(self, item: MessageItem) -> port.Outgoing:
        content = item.content
        own, kind, name = {}, item.step.value, ""
        if item.step is Step.FETCHED and content.delivery_id is not None:
            own[tarry.DELIVERY_ID_HEADER] = name = str(content.delivery_id)
            own[tarry.REDELIVERY_COUNT_HEADER] = str(content.delivery_id.redelivery_count)
            kind = self._settings.relay.subscription
        elif content.read is not None and (lane := item.lane) is not None:
            name = f"{lane.of.name}-{content.read.ledger_id}-{content.read.entry_id}"
        if item.step in (Step.BAD, Step.BARE):
            kind = Step.BAD.value
            own |= {REASON_HEADER: _one_line(item.reason), POSITION_HEADER: name}
        elif item.step in (Step.RESULT, Step.BARE_RESULT):
            kind = Step.RESULT.value
            own |= {**self._told(content), POSITION_HEADER: name}
        has_body = item.step not in (Step.BARE, Step.BARE_RESULT)
        return port.Outgoing(item.target, content.message, own, f"{self._topic}:{kind}:{name}", has_body)

    def _told(self, content: Content) -> dict[str, str]:
        """What came of a withdrawal, as headers."""
        outcome, told = content.outcome, {}
        correlation = self._settings.source.headers.correlation
        if content.message is not None and correlation in content.message.headers:
            told[correlation] = content.message.headers[correlation]
        if outcome is not None and outcome.result is not None:
            told[RESULT_HEADER] = outcome.result.value
            if outcome.deliver_at_ms is not None:
                told[DELIVER_AT_HEADER] = str(outcome.deliver_at_ms)
            if outcome.may_have_landed:
                told[MAY_HAVE_LANDED_HEADER] = "true"
        return told

    def _produced(self, item: MessageItem, answer: port.Produced) -> None:
        if answer.failed:
            self._pacing.rest(item.target, time.monotonic())
            self._metrics.failed("target", answer.failed, item.target)
            self._passage.answer(item, Answer.AGAIN)
            return
        self._pacing.has_taken(item.target, time.monotonic())
        if answer.refused and item.step is Step.FETCHED:
            self._refuse(item, answer.refused)
        elif answer.refused:
            if item.content.read is not None and item.step is Step.DIRECT:
                self._bad(answer.refused, item.content.read)
            reason = "" if item.step is Step.DIRECT else item.reason
            self._passage.answer(item, Answer.REFUSED, reason or answer.refused)
        else:
            self._metrics.reachable("target", item.target)
            self._metrics.produced.labels(item.step.name.lower()).inc()
            if item.step is Step.FETCHED and item.content.delivery_id is not None:
                self._metrics.late(time.time() - item.content.delivery_id.deliver_at_ms / 1_000)
            self._passage.answer(item, Answer.DONE)

    async def _acknowledge(self, subscription: tarry.aio.Subscription, items: Sequence[MessageItem]) -> None:
        with self._handing_back(items):
            await subscription.ack(_columns(items))

    async def _reject(self, subscription: tarry.aio.Subscription, items: Sequence[MessageItem]) -> None:
        by_reason: dict[str, list[MessageItem]] = {}
        for item in items:
            by_reason.setdefault(item.reason, []).append(item)
        with self._handing_back(items):
            await asyncio.gather(*(subscription.reject(_columns(each), reason) for reason, each in by_reason.items()))

    @contextlib.contextmanager
    def _handing_back(self, items: Sequence[MessageItem]) -> Iterator[None]:
        """While they are acknowledged or rejected. What is handed out again meanwhile is so once more: the answer may
        be about the hand-out before.
        """
        names = {item.content.delivery_id for item in items}
        self._again -= names
        yield
        again = self._again & names
        self._unacknowledged -= names - again
        for item in items:
            self._passage.answer(item, Answer.AGAIN if item.content.delivery_id in again else Answer.DONE)

    def _refuse(self, item: MessageItem, reason: str) -> None:
        """Of what was handed out: it becomes a dead letter of Tarry."""
        self._metrics.lost.inc()
        log.error("a message cannot be delivered", extra={"reason": reason, "delivery_id": item.content.delivery_id})
        self._passage.answer(item, Answer.REFUSED, reason)

    async def _commit(self, of: _ReadLog) -> None:
        failures = 0
        while True:
            items = await self._next(lambda: self._passage.take_to_commit(lambda lane: lane.of is of))
            reads = [item.content.read for item in items if item.content.read is not None]
            try:
                await of.reader.commit(reads)
            except port.Unreachable as error:
                self._passage.committed(items, Answer.AGAIN)
                failures = await self._rest("broker", error, failures)
            else:
                failures = 0
                self._metrics.committed.inc(len(items))
                self._passage.committed(items, Answer.DONE)
            await self._tell()

    # Waiting.

    async def _enter(self, items: Sequence[MessageItem]) -> None:
        self._passage.enter(items)
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _next(self, take: Callable[[], list[MessageItem]]) -> list[MessageItem]:
        """What is taken next, as soon as there is something."""
        async with self._changed:
            while not (items := take()):
                await self._wait_for_news()
        return items

    async def _wait_for_news(self) -> None:
        """Also by the clock: a target may have rested, or may get more by its limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05 if self._passage.has_to_produce else _WAIT_S):
                await self._changed.wait()

    async def _drained(self) -> None:
        """Waits until nothing is under way. What is left comes again, to another relay."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.relay.drain_s), self._changed:
                await self._changed.wait_for(lambda: not self._passage.read and not self._passage.handed_out)

    async def _rest(self, end: str, error: Exception, failures: int) -> int:
        """Tells the failure and waits before the next try; the failures in a row."""
        self._metrics.failed(end, str(error))
        if failures == 0:
            log.warning("does not answer", extra={"end": end, "error": str(error)})
        await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
        return failures + 1

    def _answer_all(self, items: Iterable[MessageItem], answer: Answer) -> None:
        for item in items:
            self._passage.answer(item, answer)

    def _limit_of(self, target: str) -> float | None:
        setting = self._sorting.setting_of(target)
        return None if setting is None else setting.rate_limit


def _position(item: MessageItem) -> tuple[int, int]:
    name = item.content.delivery_id
    return (0, 0) if name is None else (name.ledger_id, name.entry_id)


def _due_ms(item: MessageItem) -> int:
    name = item.content.delivery_id
    return 0 if name is None else name.deliver_at_ms


def _columns(items: Iterable[MessageItem]) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """The hand-outs, by name, as the client library takes them."""
    names = [item.content.delivery_id for item in items if item.content.delivery_id is not None]
    return (
        [name.ledger_id for name in names],
        [name.entry_id for name in names],
        [name.deliver_at_ms for name in names],
        [tarry.NO_BATCH_INDEX if name.batch_index is None else name.batch_index for name in names],
        [name.redelivery_count for name in names],
    )


def _one_line(text: str) -> str:
    """As a header can carry it."""
    return " ".join(text.split())
