"""A broker and a daemon that are made of lists, for a relay at work between them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tarry
from tarry_relay import port, relay_settings
from tarry_relay.health import Health
from tarry_relay.port import Cause, Meaning, Meant, Produced
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.running import Relay

LIMIT_S = 300
FAR_MS = 10**13
OTHERS = 1_000
"""From this entry on, what is fetched goes to the other target."""
AWAY = Produced(Meant(Meaning.NOT_NOW), "AWAY", "away")
TOO_LARGE = Produced(Meant(Meaning.REFUSED), "TOO_LARGE", "too large")
MISSING = Produced(Meant(Meaning.NOT_NOW, Cause.MISSING), "MISSING", "no such target")
FULL = Produced(Meant(Meaning.NOT_NOW, Cause.LIMIT), "FULL", "no space")
LEFT_OPEN = Produced(Meant(Meaning.UNKNOWN), "TIMEOUT", "no answer")


@dataclasses.dataclass
class Listed:
    """A broker whose logs are lists of portions.

    `failing`: targets that are away. `refusing`: targets that refuse what is not bare.
    """

    portions: list[port.Portion] = dataclasses.field(default_factory=list)
    returned: list[port.Portion] = dataclasses.field(default_factory=list)
    committed: list[port.Read] = dataclasses.field(default_factory=list)
    published: list[port.Outgoing] = dataclasses.field(default_factory=list)
    failing: set[str] = dataclasses.field(default_factory=set)
    refusing: set[str] = dataclasses.field(default_factory=set)
    answers: Callable[[port.Outgoing], Produced | None] = lambda each: None
    """What comes of a message; None if that follows from `failing` and `refusing`. May raise."""
    wrong: list[port.Finding] = dataclasses.field(default_factory=list)
    """What is found of the source."""
    tells_limits: bool = True
    in_order: bool = True
    hold_every_s: float | None = None
    held: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    hanging: asyncio.Event | None = None
    """Until when a target that has failed does not answer any more."""
    have_failed: set[str] = dataclasses.field(default_factory=set)
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)
    name: str = "1"
    unreachable: int = 0
    """How many reads fail before one does not."""
    loses_cancellations: int = 0
    """How many, as `asyncio.wait_for` of Python 3.11 does when what it waits for is there at the same moment."""

    @property
    def source(self) -> port.Reader:
        return _Reader(self, self.portions)

    @property
    def retries(self) -> port.Reader:
        return _Reader(self, self.returned)

    @property
    def log(self) -> Listed:
        return self

    @property
    def output(self) -> Listed:
        return self

    async def generation(self) -> str:
        return self.name

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        port.must_be_same("orders", generation, self.name)
        return [
            port.Message({"target": "other" if entry >= OTHERS else "due", "deliver-at": "0"}, (ledger, entry))
            for ledger, entry in positions
        ]

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        return self.first

    async def kept_ms(self) -> int | None:
        return None

    def position_of(self, text: str) -> tuple[int, int]:
        return 1, int(text)

    def comes_back(self, target: str) -> bool:
        return target in self.own_targets()

    def own_targets(self) -> Sequence[str]:
        return ["orders", "failed"]

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[Produced]:
        await asyncio.sleep(0)
        to = {each.target for each in messages}
        if self.hanging is not None and to & self.failing & self.have_failed:
            await self.hanging.wait()
        self.have_failed |= to & self.failing
        came = [self.answers(each) or self._answer(each) for each in messages]
        self.published += [each for each, of_it in zip(messages, came, strict=True) if of_it.is_taken]
        return came

    def _answer(self, each: port.Outgoing) -> Produced:
        if each.target in self.failing:
            return AWAY
        return TOO_LARGE if each.target in self.refusing and each.message is not None else Produced()

    def header_key(self, name: str) -> str:
        return name.lower()

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        return "" if ledger_id == 1 else f"ledger {ledger_id} is none of this source"

    def target_fault(self, target: str) -> str:
        return "it has a blank" if " " in target else ""

    def message_fault(self, message: port.Message) -> str:
        return ""

    async def must_answer(self) -> None:
        pass

    async def source_findings(self) -> Sequence[port.Finding]:
        return self.wrong

    async def findings(self) -> AsyncIterator[port.Finding]:
        yield port.Finding("source", port.Grade.OK, "lists are there")


@dataclasses.dataclass
class _Reader:
    broker: Listed
    portions: list[port.Portion]

    @property
    def commits_in_order(self) -> bool:
        return self.broker.in_order

    @property
    def hold_every_s(self) -> float | None:
        return self.broker.hold_every_s

    async def hold(self, read: Sequence[port.Read]) -> None:
        self.broker.held.append(tuple(each.entry_id for each in read))

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        try:
            return await self._next_portion()
        except asyncio.CancelledError:
            if not self.broker.loses_cancellations:
                raise
            self.broker.loses_cancellations -= 1
            return port.Portion()

    async def _next_portion(self) -> port.Portion:
        await asyncio.sleep(0)
        if self.broker.unreachable:
            self.broker.unreachable -= 1
            raise port.Unreachable("away")
        if self.portions:
            return self.portions.pop(0)
        await asyncio.sleep(0.01)
        return port.Portion()

    async def commit(self, read: Sequence[port.Read]) -> None:
        self.broker.committed += read

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        there = {(each.ledger_id, each.entry_id) for each in self.broker.committed}
        return [position in there for position in positions]


@dataclasses.dataclass
class Daemon:
    """What a relay asks of the client library and of a subscription."""

    refuses: set[int] = dataclasses.field(default_factory=set)
    added: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    holds_adds: asyncio.Event | None = None
    due: list[tarry.DeliveryId] = dataclasses.field(default_factory=list)
    permits: int = 10_000
    holding: set[tarry.DeliveryId] = dataclasses.field(default_factory=set)
    """What was handed out and holds a permit."""
    acknowledged: list[int] = dataclasses.field(default_factory=list)
    rejected: dict[int, str] = dataclasses.field(default_factory=dict)
    nacks: list[int] = dataclasses.field(default_factory=list)
    not_due: int = 0
    """How many negative acknowledgements come before their time."""
    lowest: Mapping[int, int] = dataclasses.field(default_factory=dict)
    trims: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    other_topics: dict[str, int] = dataclasses.field(default_factory=dict)
    """With how many streams are open there."""
    pending: dict[int, int] = dataclasses.field(default_factory=dict)
    """By entry: when what may be withdrawn is due."""
    asked: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """Entries of each cancel and reschedule."""
    lost_answers: int = 0
    """How many of these are done and not answered."""

    async def create_subscription(self, *named: object) -> None:
        raise tarry.AlreadyExists("it is there with another policy")

    silent: bool = False
    """Whether it does not answer when it is asked if it is there."""
    refuses_forwarded: bool = False
    added_late: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(entry, time) of what was added for the subscription alone."""
    buried: dict[int, str] = dataclasses.field(default_factory=dict)

    def subscribe(self, *named: object, **given: object) -> Daemon:
        return self

    async def __aenter__(self) -> Daemon:
        return self

    async def __aexit__(self, *of_error: object) -> None:
        pass

    async def add(self, topic: str, ledger: list[int], entry: list[int], **given: Any) -> Any:
        if self.holds_adds is not None:
            await self.holds_adds.wait()
        rows = list(zip(ledger, entry, given["deliver_at_ms"], strict=True))
        refused: Any = {
            row: tarry.RefusedReason.DELAY_TOO_LONG for row, each in enumerate(rows) if each[1] in self.refuses
        }
        if given.get("subscription") is None:
            self.added += [each for row, each in enumerate(rows) if row not in refused]
        else:
            self.added_late += [(each[1], each[2]) for each in rows]
        return _Answer(refused=refused, accepted=len(rows) - len(refused), duplicates=0)

    async def cancel(self, topic: str, ledger: list[int], entry: list[int]) -> Any:
        return self._withdrawn(entry, {each: self.pending.pop(each) for each in entry if each in self.pending})

    async def reschedule(self, topic: str, ledger: list[int], entry: list[int], *, deliver_at_ms: list[int]) -> Any:
        if max(deliver_at_ms) >= FAR_MS:
            raise tarry.OutOfRange("deliver_at_ms is too far")
        times = dict(zip(entry, deliver_at_ms, strict=True))
        self.pending |= (there := {each: times[each] for each in entry if each in self.pending})
        return self._withdrawn(entry, there)

    def _withdrawn(self, entry: list[int], there: Mapping[int, int]) -> Any:
        self.asked.append(tuple(entry))
        if self.lost_answers:
            self.lost_answers -= 1
            raise tarry.Unavailable("the answer was lost")
        none = np.empty(0, np.int64)
        return _Answer(
            not_found_index=np.array([row for row, each in enumerate(entry) if each not in there], np.int64),
            already_due_index=none,
            in_flight_index=none,
            raised_index=none,
            raised_deliver_at_ms=none,
            may_have_landed=False,
        )

    async def receive(self, timeout_s: float, **given: object) -> Any:
        await asyncio.sleep(0.01)
        rows = self.permits - len(self.holding)
        taken, self.due = self.due[:rows], self.due[rows:]
        self.holding |= set(taken)
        return _Batch(taken) if taken else None

    def release(self, batch: _Batch) -> None:
        self.holding -= set(batch)

    async def ack(self, columns: Any) -> None:
        self.acknowledged += columns[1]
        self.holding = {name for name in self.holding if name.entry_id not in columns[1]}

    async def reject(self, columns: Any, reason: str, *, forwarded: bool = False) -> None:
        if forwarded and self.refuses_forwarded:
            raise tarry.InvalidArgument("no such position")
        if forwarded:
            self.buried |= dict.fromkeys(columns.entry_id.tolist(), reason)
        else:
            self.rejected |= dict.fromkeys(columns[1], reason)

    async def nack(self, columns: Any, *, forwarded: bool) -> Any:
        assert forwarded
        self.nacks += columns[1]
        early = min(self.not_due, len(columns[1]))
        self.not_due -= early
        return _Answer(ignored=dict.fromkeys(range(early), tarry.IgnoredReason.NOT_DUE))

    async def topics(self) -> AsyncIterator[Any]:
        for name in self.other_topics:
            yield _Answer(topic=name)

    async def stats(self, topic: str, **given: object) -> Any:
        if self.silent:
            raise tarry.Unavailable("away")
        ours = _Answer(subscription="relay", backlog=2, dispatchers=self.other_topics.get(topic, 0))
        return _Answer(pending=3, subscriptions=[_Answer(subscription="another"), ours])

    async def policy(self, topic: str) -> Any:
        raise tarry.NotFound(topic)

    async def retention(self, topic: str) -> Any:
        return self.lowest.items()

    async def trim(self, *named: Any, **given: Any) -> Any:
        self.trims.append((*named, given["subscription"], given["dead_letter"]))
        return _Answer(dead_lettered=1)


class _Answer:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class _Batch(list[tarry.DeliveryId]):
    def take(self, rows: list[int]) -> _Batch:
        return _Batch(self[row] for row in rows)

    def delivery_id(self, row: int) -> str:
        return str(self[row])


def settings(**source: Any) -> relay_settings.Settings:
    return relay_settings.Settings(
        relay=relay_settings.Relay(topic="orders"),
        source=relay_settings.Source(name="orders", target="due", dead_letters="dead", **source),
        broker=relay_settings.Redis(),
        retry=relay_settings.Retry(name="failed"),
        targets=(relay_settings.Target(pattern="due|other"),),
    )


def read(entry: int, lane: str = "lane", **headers: str) -> port.Read:
    return port.Read(1, entry, port.Message(headers, entry, sent_at_ms=1_000), lane)


def named(delivery: tarry.DeliveryId, topic: str = "orders@1", subscription: str = "relay") -> str:
    """Return the id of a delivery as this relay, or another one, gives it to its consumers."""
    return str(dataclasses.replace(delivery, log=tarry.DeliveryId.log_of(topic, subscription)))


async def relayed(
    broker: Listed,
    daemon: Daemon,
    until: Callable[[], bool],
    *,
    said: relay_settings.Settings | None = None,
    metrics: RelayMetrics | None = None,
    **source: Any,
) -> RelayMetrics:
    """Runs a relay until it is so, and then until it has drained."""
    said = said or settings(**source)
    metrics = metrics or RelayMetrics(Health())
    client: Any = daemon
    relay = Relay(said, broker=broker, client=client, generation="1", metrics=metrics, findings=broker.wrong)
    ending = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        at_work = asyncio.create_task(relay.run(ending))
        while not until() and not at_work.done():
            await asyncio.wait([at_work], timeout=0.005)
        ending.set()
        await at_work
    return metrics
