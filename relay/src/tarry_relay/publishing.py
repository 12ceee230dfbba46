"""Publishes to targets: what goes where, how fast, and what follows if a target does not take a message.

A failing message is distinguished from a failing target. If the target takes others after it, the message rests,
otherwise the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import tarry
import tarry.aio
from tarry_relay import port
from tarry_relay.delivery_steps import Answer, Item, Passage, Step, Trials
from tarry_relay.pacing import Pacing
from tarry_relay.port import Cause, Meaning, Meant, Produced
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings
from tarry_relay.sorting import Sorting, Withdrawal, sent_ms

log = logging.getLogger(__name__)

REASON_HEADER = "tarry-reason"
POSITION_HEADER = "tarry-position"
RESULT_HEADER = "tarry-result"
DELIVER_AT_HEADER = "tarry-deliver-at"
MAY_HAVE_LANDED_HEADER = "tarry-may-have-landed"
REASON_BYTES_MAX = 512
"""Longest reason of a dead letter in UTF-8 (bytes), so that a dead letter always fits"""
OVERDUE_S = 30.0
"""Time that a message without a time waits for its target before it waits in Tarry (seconds)"""
TRIALS_MAX = 10
TRIALS_S = 300.0
"""Failures after which, over at least `TRIALS_S`, a message is refused for good while its target takes others"""
RAISED_MAX = 3
"""Exceptions for a message alone after which it is refused for good"""
LANES_HELD_S = 60.0
_MESSAGE_REST_S = 1.0
_MESSAGE_REST_MAX_S = 60.0
_WATCH_S = 1.0
_BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_WAIT_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadLog:
    """A log that is read on."""

    name: str
    reader: port.Reader
    is_source: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RelayLane:
    """A lane of one of the logs: each log has lanes of any name."""

    of: ReadLog
    lane: Hashable


@dataclasses.dataclass(slots=True)
class Content:
    """The data for the work on a message. `read` or `delivery_id` identifies its origin."""

    read: port.Read | None = None
    deliver_at_ms: int = 0
    """Unix time when a message that was read is due (ms)"""
    delivery_id: tarry.DeliveryId | None = None
    """Delivery by Tarry, or one that a consumer returned"""
    handed_out: tuple[tarry.Batch, int] | None = None
    """Batch and row that hold its permit; None if it holds none"""
    message: port.Message | None = None
    withdrawal: Withdrawal | None = None
    """The cancel or reschedule that the message requests"""
    alone_until_s: float = 0.0
    """Time by `time.monotonic` until which no one can have requested the withdrawal before"""
    told: dict[str, str] | None = None
    """Result of the withdrawal, as headers"""


MessageItem: TypeAlias = "Item[Content, RelayLane]"
Subscription: TypeAlias = tarry.aio.Subscription


class WorkQueue:
    """The passage of one relay, with a wait for its changes."""

    def __init__(self, passage: Passage[Content, RelayLane]) -> None:
        self.passage = passage
        self._changed = asyncio.Condition()

    async def enter(self, items: Sequence[MessageItem]) -> None:
        """Enter messages, and wake waiters."""
        self.passage.enter(items)
        await self.tell()

    async def tell(self) -> None:
        """Wake waiters."""
        async with self._changed:
            self._changed.notify_all()

    async def next(self, take: Callable[[], list[MessageItem]]) -> list[MessageItem]:
        """Return what `take` returns, as soon as that is not empty."""
        async with self._changed:
            while not (items := take()):
                await self._wait()
        return items

    async def news(self) -> None:
        """Wait for a change, or for a moment."""
        async with self._changed:
            await self._wait()

    async def _wait(self) -> None:
        # Also wakes by the clock: a target's rest may end, or its limit may allow more.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05 if self.passage.has_to_produce else _WAIT_S):
                await self._changed.wait()


async def rest_after(failures: int) -> int:
    """Wait before the next try of a call, longer after more failures in a row; return the failures with this one."""
    await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
    return failures + 1


class Publishing:
    """The publisher of what waits for its target in the passage of one relay."""

    def __init__(
        self,
        settings: Settings,
        sorting: Sorting,
        queue: WorkQueue,
        *,
        output: port.Output,
        topic: str,
        metrics: RelayMetrics,
    ) -> None:
        """Publish to an output; the Tarry topic is part of the published names."""
        self._settings = settings
        self._sorting = sorting
        self._queue = queue
        self._passage = queue.passage
        self._output = output
        self._topic = topic
        self._log = tarry.DeliveryId.log_of(topic, settings.relay.subscription)
        self._metrics = metrics
        self._pacing = Pacing(self._limit_of)
        self._tried: set[str] = set()
        """Failed targets with one message in flight now"""
        self._missing: dict[str, float] = {}
        """Target of a pattern that the broker does not have -> since when, by `time.monotonic`"""
        self._named = frozenset(settings.named_targets())

    def loops(self, subscription: Subscription) -> list[Coroutine[Any, Any, None]]:
        """Return the loops to run.

        One is for targets that take messages, one for failing ones, so that a hanging target blocks no other, and one
        watches what waits.
        """
        return [self._publish(subscription, failing=False), self._publish(subscription, failing=True), self._watch()]

    def park(self, subscription: Subscription) -> None:
        """Keep half of the permits, and of the memory for fetched messages, free of those that no target takes now."""
        relay, now_s = self._settings.relay, time.monotonic()
        waiting, parked = self._passage.count(Step.FETCHED), self._passage.count(Step.PARKED)
        rows, bytes_over = waiting - relay.permits // 2, self._passage.fetched_bytes - relay.memory_bytes // 4
        if (rows <= 0 and bytes_over <= 0) or parked >= relay.parked_max:
            return

        def takes_nothing(target: str) -> bool:
            return target in self._tried or self._pacing.takes_nothing(target, now_s)

        self._let_go(
            subscription, self._passage.park(rows, takes_nothing, bytes_over, rows_max=relay.parked_max - parked)
        )

    def refuse(self, item: MessageItem, reason: str) -> None:
        """Turn a message that cannot be delivered, or that no target takes, into a dead letter."""
        if item.step in (Step.HANDED_OUT, Step.FETCHED, Step.PARKED):
            self._metrics.lost.inc()
            fields = {"reason": cut(reason), "delivery_id": item.content.delivery_id}
            log.error("a message cannot be delivered", extra=fields)
        elif item.step in (Step.SHORT_RESULT, Step.BURIED):
            self.report(item, reason)
        elif item.step is Step.DIRECT:
            self._metrics.bad.inc()
            log.warning("a message is refused", extra={"reason": cut(reason), **_fields(item)})
        elif item.step in (Step.BAD, Step.BARE):
            # The reason of the dead letter stays.
            log.warning(
                "a dead letter is refused", extra={"error": cut(reason), "target": item.target, **_fields(item)}
            )
            reason = item.reason
        self._passage.answer(item, Answer.REFUSED, reason)

    def report(self, item: MessageItem, reason: str) -> None:
        """Log a dead letter or a result that nothing takes."""
        self._metrics.unreported.inc()
        headers = {} if item.content.message is None else item.content.message.headers
        fields = {
            "reason": cut(item.reason or reason),
            "error": cut(reason),
            "delivery_id": cut(headers.get(tarry.DELIVERY_ID_HEADER, "")),
            "result": item.content.told or {},
            **_fields(item),
        }
        log.error(
            "nothing takes this dead letter or result; it is committed, and this line is what is left", extra=fields
        )

    # Publishing

    async def _publish(self, subscription: Subscription, *, failing: bool) -> None:
        failures = 0
        while True:
            items = await self._queue.next(lambda: self._take(failing=failing))
            answers: list[Produced] = []
            failed: port.Unreachable | None = None
            try:
                with self._trying(items, subscription) if failing else contextlib.nullcontext():
                    await self._produce(items, answers)
            except port.Unreachable as error:
                failed = error
            finally:
                # Some answers may have arrived before.
                self._judge(subscription, items[: len(answers)], answers)
            if failed is None:
                failures = 0
                self.park(subscription)
            else:
                for item in items[len(answers) :]:
                    self._passage.answer(item, Answer.AGAIN)
                self._metrics.failed("broker", str(failed))
                failures = await rest_after(failures)
            await self._queue.tell()

    async def _produce(self, items: Sequence[MessageItem], answers: list[Produced]) -> None:
        """Append the result of each to `answers`. If publishing all raises, publish them one by one."""
        try:
            outgoing = [self._outgoing(item) for item in items]
            answers += port.one_for_each(await port.asked(self._output.produce(outgoing)), len(items), Produced)
            return
        except (port.Unreachable, port.SessionOver, port.NotThere):
            raise
        except Exception as error:
            self._metrics.surprises.labels("message").inc()
            log.exception("publishing has raised", extra={"messages": len(items)})
            if len(items) == 1:
                items[0].raised += 1
                text = f"{items[0].target}: {type(error).__name__}: {error}"
                answers.append(Produced(Meant(Meaning.UNKNOWN), type(error).__name__, text))
                return
        for item in items:
            await self._produce([item], answers)

    def _take(self, *, failing: bool) -> list[MessageItem]:
        now_s = time.monotonic()
        self._passage.wake(now_s)

        def allowed(target: str, wanted: int) -> int:
            return self._pacing.take(target, wanted, now_s) if self._pacing.is_failing(target) is failing else 0

        relay = self._settings.relay
        return self._passage.take_to_produce(relay.rows, allowed, relay.memory_bytes // 16)

    @contextlib.contextmanager
    def _trying(self, items: Sequence[MessageItem], subscription: Subscription) -> Iterator[None]:
        """Park everything else that waits for these targets, however long they do not answer."""
        self._tried = {item.target for item in items}
        self.park(subscription)
        try:
            yield
        finally:
            self._tried = set()

    # Results

    def _judge(self, subscription: Subscription, items: Sequence[MessageItem], answers: Sequence[Produced]) -> None:
        # Taken messages first, because they show that a target takes messages.
        both = list(zip(items, answers, strict=True))
        takers = {item.target for item, answer in both if answer.is_taken}
        for item, answer in both:
            if answer.is_taken:
                self._taken(item)
        for item, answer in both:
            if answer.is_taken:
                continue
            meaning = answer.meant.meaning
            self._metrics.not_taken(meaning.value, answer.code)
            if meaning is Meaning.REFUSED:
                if self._pacing.is_failing(item.target):
                    # The target answers, so other messages to it continue.
                    self._pacing.end_rest(item.target)
                    self._passage.wake_target(item.target)
                    self._metrics.health.answered("target", item.target)
                self.refuse(item, self._reason(item, answer.text))
            else:
                self._not_taken(subscription, item, answer, item.target in takers)

    def _taken(self, item: MessageItem) -> None:
        self._pacing.has_taken(item.target, time.monotonic())
        self._passage.wake_target(item.target)
        self._missing.pop(item.target, None)
        self._metrics.health.answered("target", item.target)
        self._metrics.produced.labels(item.step.name.lower()).inc()
        if item.step is Step.FETCHED and item.content.delivery_id is not None:
            self._metrics.late(time.time() - item.content.delivery_id.deliver_at_ms / 1_000)
        self._passage.answer(item, Answer.DONE)

    def _not_taken(self, subscription: Subscription, item: MessageItem, answer: Produced, others_taken: bool) -> None:
        now_s = time.monotonic()
        cause, target = answer.meant.cause, item.target
        taken = self._pacing.taken(target)
        trials = item.trials = item.trials or Trials(now_s, taken)
        trials.may_have_landed |= answer.meant.meaning is Meaning.UNKNOWN
        others_taken |= taken > trials.taken_before
        trials.taken_before = taken
        self._metrics.failed("target", answer.text, target)
        if item.raised >= RAISED_MAX:
            self.refuse(item, self._reason(item, answer.text))
        elif cause is Cause.MISSING:
            if target not in self._named:
                self._missing.setdefault(target, now_s)
            self._passage.answer(item, Answer.AGAIN)
            self._passage.rest_target(target, self._pacing.rest(target, now_s, is_missing=target in self._missing))
        elif others_taken:
            trials.count += cause is not Cause.LIMIT
            if trials.count >= TRIALS_MAX and now_s - trials.first_s >= TRIALS_S:
                self.refuse(item, self._reason(item, answer.text))
            else:
                self._rest_message(subscription, item, now_s, trials)
        else:
            self._passage.answer(item, Answer.AGAIN)
            self._passage.rest_target(target, self._pacing.rest(target, now_s))

    def _rest_message(self, subscription: Subscription, item: MessageItem, now_s: float, trials: Trials) -> None:
        """Let one message rest. A delivered one waits by name alone, so that it holds no permit."""
        trials.rests += 1
        rest_s = min(_MESSAGE_REST_S * 2 ** (trials.rests - 1), _MESSAGE_REST_MAX_S)
        may_park = self._passage.count(Step.PARKED) < self._settings.relay.parked_max
        parked = item.step is Step.FETCHED and may_park
        self._passage.rest_message(item, now_s + rest_s, parked=parked)
        if parked:
            self._let_go(subscription, [item])

    @staticmethod
    def _reason(item: MessageItem, text: str) -> str:
        """Return a reason that says if the message may have been published all the same."""
        if item.trials is not None and item.trials.may_have_landed:
            return f"may have landed: {text}"
        return text

    @staticmethod
    def _let_go(subscription: Subscription, parked: Sequence[MessageItem]) -> None:
        """Return the permits of parked messages, and drop the payloads."""
        holding: dict[int, tuple[tarry.Batch, list[int]]] = {}
        for item in parked:
            content = item.content
            if content.handed_out is not None:
                batch, row = content.handed_out
                holding.setdefault(id(batch), (batch, []))[1].append(row)
            content.handed_out = content.message = None
        for batch, held in holding.values():
            subscription.release(batch.take(sorted(held)))

    # Waiting too long

    async def _watch(self) -> None:
        """Move what waits too long: messages without a time to Tarry, those no target takes to the dead letters."""
        refused = 0
        while True:
            await asyncio.sleep(_WATCH_S / 10 if refused else _WATCH_S)
            now_s = time.monotonic()
            overdue = self._passage.take_overdue(now_s - OVERDUE_S)
            self._metrics.overdue.inc(overdue)
            refused = self._refuse_missing(now_s)
            held = self._passage.lanes_held(now_s - LANES_HELD_S)
            self._metrics.health.hold_lanes([f"{each.of.name} {each.lane}" for each in held])
            if overdue or refused:
                await self._queue.tell()

    def _refuse_missing(self, now_s: float) -> int:
        """Refuse what waits for targets that the broker does not have, after a time or when too much waits.

        Returns how many messages were refused: some at a time, so that others proceed meanwhile.
        """
        relay = self._settings.relay
        waiting = {target: self._passage.waiting_for(target) for target in self._missing}
        too_many = sum(waiting.values()) - max(relay.parked_max, relay.permits) // 2
        refused = 0
        for target, since_s in list(self._missing.items()):
            if refused >= relay.rows or (too_many < 0 and now_s - since_s < relay.missing_target_s):
                break
            for item in self._passage.take_waiting(target, relay.rows - refused):
                self.refuse(item, f"{target}: the broker has no such target")
                too_many -= 1
                refused += 1
            if not self._passage.waiting_for(target):
                # A later message finds out again.
                del self._missing[target]
                self._metrics.health.answered("target", target)
        return refused

    # Outgoing messages

    def _outgoing(self, item: MessageItem) -> port.Outgoing:
        content, message = item.content, item.content.message
        own: dict[str, str] = {}
        kind, name = item.step.value, ""
        if item.step in (Step.FETCHED, Step.DIRECT):
            delivery = content.delivery_id or _first_delivery(content)
            # Followed by its log, which outputs do not compare
            name = str(delivery)
            own[tarry.DELIVERY_ID_HEADER] = f"{name}-{self._log}"
            own[tarry.REDELIVERY_COUNT_HEADER] = str(delivery.redelivery_count)
            kind = self._settings.relay.subscription
        elif content.read is not None and item.lane is not None:
            name = f"{item.lane.of.name}-{content.read.ledger_id}-{content.read.entry_id}"
        if item.step in (Step.BAD, Step.BARE):
            kind = Step.BAD.value
            own |= {REASON_HEADER: cut(item.reason), POSITION_HEADER: name}
        elif item.step in (Step.RESULT, Step.BARE_RESULT, Step.SHORT_RESULT):
            kind = Step.RESULT.value
            own |= {**self._correlation(item), **(content.told or {}), POSITION_HEADER: name}
        if item.step in (Step.BARE, Step.BARE_RESULT, Step.SHORT_RESULT):
            message = None
        return port.Outgoing(item.target, message, own, f"{self._topic}:{kind}:{name}")

    def _correlation(self, item: MessageItem) -> dict[str, str]:
        """Return the correlation id for a bare result; a full one has it among its headers."""
        message, name = item.content.message, self._sorting.correlation_header
        if item.step is not Step.BARE_RESULT or message is None or name not in message.headers:
            return {}
        return {self._settings.source.headers.correlation: message.headers[name]}

    def _limit_of(self, target: str) -> float | None:
        setting = self._sorting.setting_of(target)
        return None if setting is None else setting.rate_limit


def cut(reason: str) -> str:
    """Return a reason in one line that fits into a header, cut between letters."""
    line = " ".join(reason.split())
    clean = "".join(letter if letter.isprintable() else "\ufffd" for letter in line[: 2 * REASON_BYTES_MAX])
    encoded = clean.encode(errors="replace")
    if len(encoded) <= REASON_BYTES_MAX and len(line) <= 2 * REASON_BYTES_MAX:
        return encoded.decode()
    return encoded[: REASON_BYTES_MAX - 3].decode(errors="ignore") + "..."


def _first_delivery(content: Content) -> tarry.DeliveryId:
    """Return the name that a message without a time has at outputs, even if Tarry delivers it later."""
    read = content.read
    if read is None:
        raise ValueError("what was read has a position")
    return tarry.DeliveryId(read.ledger_id, read.entry_id, None, sent_ms(read.message), 0)


def _fields(item: MessageItem) -> dict[str, object]:
    """Return the position of a message, for the log."""
    read, lane = item.content.read, item.lane
    if read is None or lane is None:
        return {}
    return {"log": lane.of.name, "ledger_id": read.ledger_id, "entry_id": read.entry_id, "lane": lane.lane}
