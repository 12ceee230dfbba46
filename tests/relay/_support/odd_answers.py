"""A broker and a daemon that answer anything at a chosen call, and what a relay between them has to do all the same.

Contents: `Odd`, an answer; `Script`, which says when it is given; `World`, what outlives a session, with its broker and
its daemon; `real` and `noise`, the lists of answers; `mutation`, which draws one; `faults_of`, the oracle.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import json
import random
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import confluent_kafka
import grpc.aio
import msgspec
import nats.errors
import numpy as np
import redis.exceptions

import tarry
from tarry_relay import daemon_answers, port, publishing, relay_settings, sessions
from tarry_relay.health import Health
from tarry_relay.port import Cause, Finding, Grade, Meaning, Meant, Produced
from tarry_relay.relay_metrics import RelayMetrics
from tests.relay._support.listed import TOO_LARGE, Daemon, Listed, settings

LIMIT_S = 8.0
"""A run that has not settled by then hangs (seconds)."""
IDLE_S = 1.0
"""How long a settled run waits for a call that does not come (seconds)."""
SLOW_S = 0.08
ODD = "odd answer"
"""What stands in the text of each odd exception, so that a reason shows where it comes from."""

PASSAGE = (
    *("read", "add", "add_late", "nack", "passed", "cancel", "reschedule", "produce", "bury", "commit", "hold"),
    *("receive", "fetch", "ack", "reject"),
)
"""Calls that concern messages on their way."""
AROUND = (
    *("open", "close", "findings", "source_findings", "must_answer", "generation", "first_entries", "kept_ms"),
    *("create_subscription", "subscribe", "stats", "retention", "policy", "trim", "topics", "topics_page"),
)
"""All other calls."""
OF_MESSAGES = frozenset(("add", "add_late", "nack", "passed", "cancel", "reschedule", "produce", "bury", "fetch"))
"""Calls whose surprises end a message, and not the session."""
ENDING = frozenset(("commit", "ack", "reject"))
"""Calls that end a message: those that fail end the session."""
_OF_DAEMON = frozenset(
    (
        *("add", "add_late", "nack", "cancel", "reschedule", "bury", "receive", "ack", "reject"),
        *("create_subscription", "subscribe", "stats", "retention", "policy", "trim", "topics", "topics_page"),
    )
)
_REPEATED = frozenset(
    (*OF_MESSAGES, "read", "commit", "hold", "must_answer", "stats", "ack", "reject", "source_findings", "topics")
)
"""Calls that are repeated within the session if they fail for now."""


# Answers.


@dataclasses.dataclass(frozen=True)
class Odd:
    """An answer in place of the true one."""

    name: str
    means: str
    """What it means to the relay: a meaning of the port, AGAIN, SURPRISE or SESSION."""
    lands: int = 1
    """How often the call is done before."""
    error: Callable[[], BaseException] | None = None
    change: Callable[[Any], Any] | None = None
    """Makes the answer of the true one; None if the call was not done."""
    produced: Produced | None = None
    """What is answered for each message that is published, or for the first."""
    first_only: bool = False
    again: bool = False
    """Whether what was read or handed out is so once more."""
    takes_s: float = 0.0

    @property
    def ends_session(self) -> bool:
        return self.means == SESSION

    def leaves_open(self, step: str, *, in_order: bool) -> int:
        """Return how many copies more of a message it may make."""
        if self.again:
            return 1
        if step in ("produce", "add", "add_late"):
            return self.lands * (self.means != TAKEN) + (in_order and self.ends_session)
        # A lane with an order is committed up to a message that is on its way, none after its commit has failed, and
        # none while a finding is wrong.
        kept_from_commit = in_order or step in ("commit", "source_findings")
        return int(self.ends_session and (kept_from_commit or (not self.lands and step in ENDING)))


AGAIN = "repeated"
SURPRISE = "surprise"
SESSION = "ends the session"
TAKEN = Meaning.TAKEN.value
REFUSED = Meaning.REFUSED.value


@dataclasses.dataclass
class Script:
    """Says which calls get an odd answer: those of a step from the `first` on, or all that concern an entry."""

    step: str = ""
    odds: Sequence[Odd] = ()
    first: int = 0
    entry: int | None = None
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    given: list[Odd] = dataclasses.field(default_factory=list)

    @property
    def is_spent(self) -> bool:
        return len(self.given) >= (1 if self.entry is not None else len(self.odds))

    def next(self, step: str, entries: Collection[int] = ()) -> Odd | None:
        """Return the odd answer that this call gets, if it gets one."""
        number = self.calls[step]
        self.calls[step] += 1
        if step != self.step or not self.odds:
            return None
        if self.entry is not None:
            odd = self.odds[0] if self.entry in entries else None
        else:
            odd = self.odds[number - self.first] if 0 <= number - self.first < len(self.odds) else None
        if odd is not None:
            self.given.append(odd)
        return odd

    async def ask(self, step: str, do: Callable[[], Awaitable[Any]], entries: Collection[int] = ()) -> Any:
        """Do a call and answer truly, or oddly."""
        odd = self.next(step, entries)
        if odd is None:
            return await do()
        return await self.answer(odd, do)

    @staticmethod
    async def answer(odd: Odd, do: Callable[[], Awaitable[Any]]) -> Any:
        """Do a call as often as an odd answer says, and answer so."""
        answer = None
        for _ in range(odd.lands):
            answer = await do()
        await asyncio.sleep(odd.takes_s)
        if odd.error is not None:
            raise odd.error()
        return answer if odd.change is None else odd.change(answer)


# The world.

FAR_MS = 2_000_000_000_000
DUE = {1: "due", 2: "due", 3: "other", 4: "other", 15: "slow"}
"""Good messages, by entry: their targets."""
BAD = {5: "'soon'", 6: "blank", 12: "refuses its time", 13: "'soon'", 14: "'soon'", 16: TOO_LARGE.text}
"""Bad ones: what stands in their reasons."""
ASKING = (9, 10, 11, 17)
"""Withdrawals."""
_SOURCE: Sequence[tuple[int, str, Mapping[str, str]]] = (
    (1, "a", {"delay": "5s"}),
    (2, "a", {}),
    (3, "b", {"target": "other"}),
    (4, "b", {"target": "other", "delay": "5s"}),
    (5, "a", {"delay": "soon"}),
    (6, "b", {"target": "no where"}),
    (7, "a", {"deliver-at": str(FAR_MS)}),
    (8, "b", {"deliver-at": str(FAR_MS)}),
    (9, "a", {"cancel-of": "7", "correlation-id": "x"}),
    (10, "b", {"reschedule-of": "8", "deliver-at": "1500000000000"}),
    (11, "a", {"cancel-of": "0"}),
    (12, "b", {"delay": "5s"}),
    (13, "a", {"delay": "soon"}),
    (14, "b", {"delay": "soon"}),
    (15, "a", {"target": "slow"}),
    (16, "b", {"target": "refusing", "delay": "5s"}),
    (17, "a", {"cancel-of": "7", "correlation-id": "y"}),
)
_REFUSED_BY_TARRY = {12}
_REFUSED_WHOLE = {13, 14, 17}
_REFUSED_BARE = {14}


@dataclasses.dataclass
class _Row:
    """What Tarry has of a position."""

    deliver_at_ms: int
    count: int = 0
    state: str = "waits"


class World:
    """What outlives the sessions of a relay: two logs, what was published, and what Tarry has."""

    def __init__(self, script: Script, *, name: str, in_order: bool) -> None:
        """Begin with nothing read. `name`: the id of the relay."""
        self.script = script
        self.in_order = in_order
        self.metrics = RelayMetrics(Health())
        self.logs = {
            "orders": [_read("orders", entry, lane, headers) for entry, lane, headers in _SOURCE],
            "failed": [_read("failed", 2, "a", {tarry.DELIVERY_ID_HEADER: "none"})],
        }
        self.committed: dict[str, set[int]] = {"orders": set(), "failed": set()}
        self.published: list[port.Outgoing] = []
        self.rows: dict[tuple[str, int], _Row] = {}
        """By topic and entry."""
        self.ever_added: set[int] = set()
        self.nacked: set[str] = set()
        self.rejected: dict[int, str] = {}
        self.buried: dict[int, str] = {}
        self.faults: list[str] = []
        self.daemon = OddDaemon(self)
        source: dict[str, Any] = {"results": "results", "retention_every_s": 0.05, "await_commit_s": 0.15}
        self.has_cut = script.step == "trim"
        if self.has_cut:
            source["retention"] = "dead_letter"
        said = settings(**source)
        self.settings = msgspec.structs.replace(
            said,
            relay=relay_settings.Relay(topic="orders", id=name, rows=5, drain_s=5.0),
            targets=(relay_settings.Target(pattern="due|other|slow|refusing"),),
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[sessions.Ends]:
        """Open a session: it reads what is not committed."""
        await self.script.ask("open", _nothing)
        client: Any = self.daemon
        yield sessions.Ends(OddBroker(self), client)
        await self.script.ask("close", _nothing)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do."""
        if any(len(self.committed[name]) < len(log) for name, log in self.logs.items()):
            return False
        return not any(row.state != "done" and row.deliver_at_ms < FAR_MS for row in self.rows.values())

    def publish(self, each: port.Outgoing) -> None:
        """Take in a message at its target. A consumer fails once with one of them."""
        self.published.append(each)
        if each.target == "due" and _is_of(each, "orders", 1) and len(self.logs["failed"]) == 1:
            name = each.own_headers[tarry.DELIVERY_ID_HEADER]
            self.logs["failed"].append(_read("failed", 3, "a", {tarry.DELIVERY_ID_HEADER: name}))

    def commit(self, name: str, read: Sequence[port.Read]) -> None:
        """Take in a commit, which stands for all before it in a lane that has an order."""
        entries = {each.entry_id for each in read}
        if self.in_order:
            lane = _lane(read[0])
            entries = {
                each.entry_id for each in self.logs[name] if _lane(each) == lane and each.entry_id <= max(entries)
            }
        for entry in sorted(entries - self.committed[name]):
            if not self.is_durable(name, entry):
                self.faults.append(f"{name} {entry} was committed before it was durable elsewhere")
        self.committed[name] |= entries

    def is_durable(self, name: str, entry: int) -> bool:
        """Say if something of a message is elsewhere than in its log."""
        if self.metrics.unreported._value.get() or any(_is_of(each, name, entry) for each in self.published):
            return True
        if name == "failed":
            return entry in self.nacked_entries
        return entry in self.ever_added or entry in self.buried

    @property
    def nacked_entries(self) -> set[int]:
        return {
            each.entry_id
            for each in self.logs["failed"]
            if each.message is not None and each.message.headers[tarry.DELIVERY_ID_HEADER] in self.nacked
        }


def _read(name: str, entry: int, lane: str, headers: Mapping[str, str]) -> port.Read:
    return port.Read(1, entry, port.Message(headers, (name, entry)), lane, sent_at_ms=1_000)


def _lane(read: port.Read) -> str:
    return str(read.lane).partition("/")[0]


def _is_of(each: port.Outgoing, name: str, entry: int) -> bool:
    """Say if something that was published is, or tells of, a message of a log."""
    position = f"{name}-1-{entry}"
    return each.own_headers.get(publishing.POSITION_HEADER) == position or (
        each.message is not None and each.message.body == (name, entry)
    )


async def _nothing() -> None:
    pass


class OddBroker(Listed):
    """A session with the broker of a world."""

    def __init__(self, world: World) -> None:
        super().__init__(in_order=world.in_order, tells_limits=world.has_cut, hold_every_s=0.01)
        if world.in_order:
            self.hold_every_s = None if world.script.step != "hold" else 0.01
        self._world = world
        self._script = world.script
        self._readers = {name: _OddReader(world, name, self) for name in world.logs}
        if world.has_cut:
            self.first = {3: 10}

    @property
    def source(self) -> port.Reader:
        return self._readers["orders"]

    @property
    def retries(self) -> port.Reader:
        return self._readers["failed"]

    async def generation(self) -> str:
        answer: str = await self._script.ask("generation", super().generation)
        return answer

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        async def do() -> Sequence[port.Message | None]:
            port.must_be_same("orders", generation, self.name)
            log = {each.position: each.message for each in self._world.logs["orders"]}
            return [log[position] for position in positions]

        entries = [entry for _, entry in positions]
        answer: Sequence[port.Message | None] = await self._script.ask("fetch", do, entries)
        return answer

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        async def do() -> Mapping[int, int]:
            return self.first

        answer: Mapping[int, int] = await self._script.ask("first_entries", do)
        return answer

    async def kept_ms(self) -> int | None:
        async def do() -> int:
            return 10**12

        answer: int | None = await self._script.ask("kept_ms", do)
        return answer

    async def must_answer(self) -> None:
        await self._script.ask("must_answer", _nothing)

    async def source_findings(self) -> Sequence[Finding]:
        answer: Sequence[Finding] = await self._script.ask("source_findings", super().source_findings)
        return answer

    async def findings(self) -> AsyncIterator[Finding]:
        async def do() -> Sequence[Finding]:
            return [Finding("source", Grade.OK, "lists are there"), Finding("target", Grade.OK, "due: is there")]

        for each in await self._script.ask("findings", do):
            yield each

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[Produced]:
        async def do() -> Sequence[Produced]:
            return await self._truly(messages)

        # What is refused for good in all its forms is another message each time.
        originals = [each for each in messages if each.target not in ("dead", "results")]
        entries = [each.message.body[1] for each in originals if each.message is not None]
        odd = self._script.next("produce", entries)
        if odd is None:
            return await do()
        if odd.produced is None:
            answer: Sequence[Produced] = await self._script.answer(odd, do)
            return answer
        rows = 1 if odd.first_only else len(messages)
        oddly, others = messages[:rows], messages[rows:]
        for each in oddly[: rows * odd.lands]:
            self._world.publish(each)
        return [*(odd.produced for _ in oddly), *(await self._truly(others))]

    async def _truly(self, messages: Sequence[port.Outgoing]) -> Sequence[Produced]:
        await asyncio.sleep(0)
        answers = [self._true(each) for each in messages]
        for each, answer in zip(messages, answers, strict=True):
            if answer.is_taken:
                self._world.publish(each)
        return answers

    def _true(self, each: port.Outgoing) -> Produced:
        if each.target == "slow" and 15 not in self._world.ever_added:
            return Produced(Meant(Meaning.NOT_NOW), "AWAY", "slow: away")
        if each.target == "refusing":
            return TOO_LARGE
        if each.target in ("dead", "results"):
            if each.message is None:
                bare = any(_is_of(each, "orders", entry) for entry in _REFUSED_BARE)
                return TOO_LARGE if bare else Produced()
            if each.message.body[0] == "orders" and each.message.body[1] in _REFUSED_WHOLE:
                return TOO_LARGE
        return Produced()


class _OddReader:
    """A reader of a log of a world, of one session."""

    def __init__(self, world: World, name: str, broker: OddBroker) -> None:
        self.commits_in_order = world.in_order
        self._world = world
        self._name = name
        self._broker = broker
        self._given = set(world.committed[name])
        self._versions: Counter[str] = Counter()

    @property
    def hold_every_s(self) -> float | None:
        return self._broker.hold_every_s

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        async def do() -> port.Portion:
            return port.Portion(self._next(min(rows_max, 4)))

        await asyncio.sleep(0)
        script = self._world.script
        odd = script.next("read") if self._next(1) or script.step != "read" else None
        portion: port.Portion = await (do() if odd is None else script.answer(odd, do))
        if isinstance(portion, port.Portion):
            for lane in portion.lost_lanes:
                self._lose(_lane_name(lane))
            if odd is None or not odd.again:
                self._given |= {each.entry_id for each in portion.read if isinstance(each, port.Read)}
            if not portion.read:
                await asyncio.sleep(0.005)
        return portion

    def _next(self, rows: int) -> list[port.Read]:
        log = self._world.logs[self._name]
        left = [each for each in log if each.entry_id not in self._given]
        return [
            dataclasses.replace(each, lane=f"{each.lane}/{self._versions[str(each.lane)]}")
            if self.commits_in_order
            else each
            for each in left[:rows]
        ]

    def _lose(self, lane: str) -> None:
        """Give to another relay what is not committed of a lane, and take it back."""
        self._versions[lane] += 1
        of_lane = {each.entry_id for each in self._world.logs[self._name] if each.lane == lane}
        self._given -= of_lane - self._world.committed[self._name]

    async def commit(self, read: Sequence[port.Read]) -> None:
        async def do() -> None:
            self._world.commit(self._name, read)

        await self._world.script.ask("commit", do)

    async def hold(self, read: Sequence[port.Read]) -> None:
        await self._world.script.ask("hold", _nothing)

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        async def do() -> Sequence[bool]:
            return [entry in self._world.committed["orders"] for _, entry in positions]

        if not positions:
            return []
        answer: Sequence[bool] = await self._world.script.ask("passed", do, [entry for _, entry in positions])
        return answer


def _lane_name(lane: object) -> str:
    return str(lane).partition("/")[0]


class Fields:
    """An answer of Tarry."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Batch(list[tarry.DeliveryId]):
    """What Tarry hands out together."""

    def take(self, rows: list[int]) -> Batch:
        return Batch(self[row] for row in rows)

    def delivery_id(self, row: int) -> str:
        return str(self[row])


class OddDaemon(Daemon):
    """The daemon of a world, and its client."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._script = world.script
        self.open_streams: Counter[str] = Counter()
        self._topics: set[str] = set()

    async def create_subscription(self, *named: object) -> None:
        async def do() -> None:
            self._topics.add(str(named[0]))

        await self._script.ask("create_subscription", do)
        raise tarry.AlreadyExists("it is there with another policy")

    def subscribe(self, *named: object, **given: object) -> Any:
        return OddStream(self._world, str(named[0]))

    async def add(self, topic: str, ledger: list[int], entry: list[int], **given: Any) -> Any:
        async def do() -> Any:
            refused = {}
            for row, (each, time_ms) in enumerate(zip(entry, given["deliver_at_ms"], strict=True)):
                if each in _REFUSED_BY_TARRY:
                    refused[row] = tarry.RefusedReason.DELAY_TOO_LONG
                    continue
                self._world.ever_added.add(each)
                there = self._world.rows.get((topic, each))
                if there is None or there.state == "done":
                    self._world.rows[topic, each] = _Row(time_ms)
            return Fields(refused=refused, accepted=len(entry) - len(refused), duplicates=0)

        return await self._script.ask("add" if given.get("subscription") is None else "add_late", do, entry)

    async def cancel(self, topic: str, ledger: list[int], entry: list[int]) -> Any:
        async def do() -> Any:
            there = self._waiting(topic, entry)
            for each in there:
                self._world.rows[topic, each].state = "done"
            return self._withdrawn(entry, there)

        return await self._script.ask("cancel", do, entry)

    async def reschedule(self, topic: str, ledger: list[int], entry: list[int], *, deliver_at_ms: list[int]) -> Any:
        async def do() -> Any:
            there = self._waiting(topic, entry)
            for each, time_ms in zip(entry, deliver_at_ms, strict=True):
                if each in there:
                    self._world.rows[topic, each].deliver_at_ms = time_ms
            return self._withdrawn(entry, there)

        return await self._script.ask("reschedule", do, entry)

    def _waiting(self, topic: str, entries: Iterable[int]) -> dict[int, int]:
        rows = self._world.rows
        found = {each: rows.get((topic, each)) for each in entries}
        return {each: row.deliver_at_ms for each, row in found.items() if row is not None and row.state == "waits"}

    async def topics(self) -> AsyncIterator[Any]:
        async def do() -> list[Any]:
            return [Fields(topic=topic) for topic in sorted(self._topics)]

        for each in await self._script.ask("topics", do):
            yield each

    async def topics_page(self, **given: object) -> Any:
        async def do() -> Any:
            return Fields(as_of_ms=port.now_ms())

        return await self._script.ask("topics_page", do)

    async def stats(self, topic: str, **given: object) -> Any:
        async def do() -> Any:
            due = sum(
                of == topic and row.state != "done" and row.deliver_at_ms < FAR_MS for (of, _), row in self._rows()
            )
            ours = Fields(subscription="relay", backlog=due, dispatchers=self.open_streams[topic])
            return Fields(pending=0, subscriptions=[ours])

        return await self._script.ask("stats", do)

    def _rows(self) -> Iterable[tuple[tuple[str, int], _Row]]:
        return self._world.rows.items()

    async def policy(self, topic: str) -> Any:
        async def do() -> Any:
            self._must_have(topic)
            return Fields(effective=Fields(delay_max_ms=10**9))

        return await self._script.ask("policy", do)

    async def retention(self, topic: str) -> Any:
        async def do() -> Any:
            self._must_have(topic)
            lowest = {1: min((entry for of, entry in self._world.rows if of == topic), default=1)}
            return (lowest | {3: 7} if self._world.has_cut else lowest).items()

        return await self._script.ask("retention", do)

    def _must_have(self, topic: str) -> None:
        if topic not in self._topics:
            raise tarry.NotFound(topic)

    async def trim(self, *named: Any, **given: Any) -> Any:
        async def do() -> Any:
            return Fields(dead_lettered=1)

        return await self._script.ask("trim", do)


class OddStream:
    """A subscription of a world's daemon. What is handed out and not ended when it is closed is so again."""

    def __init__(self, world: World, topic: str) -> None:
        self._world = world
        self._script = world.script
        self._topic = topic

    async def __aenter__(self) -> OddStream:
        await self._script.ask("subscribe", _nothing)
        self._world.daemon.open_streams[self._topic] += 1
        return self

    async def __aexit__(self, *of_error: object) -> None:
        self._world.daemon.open_streams[self._topic] -= 1
        for (topic, _), row in self._world.rows.items():
            if topic == self._topic and row.state == "out":
                row.state = "waits"

    async def receive(self, timeout_s: float, **given: object) -> Any:
        rows = {entry: row for (topic, entry), row in self._world.rows.items() if topic == self._topic}
        due = {entry: row for entry, row in rows.items() if row.state == "waits" and row.deliver_at_ms < FAR_MS}
        await asyncio.sleep(0 if due else 0.005)
        if not due:
            return None
        odd = self._script.next("receive")

        async def do() -> Any:
            if odd is None or not odd.again:
                for row in due.values():
                    row.state = "out"
            return Batch(tarry.DeliveryId(1, each, None, row.deliver_at_ms, row.count) for each, row in due.items())

        return await (do() if odd is None else self._script.answer(odd, do))

    def release(self, batch: object) -> None:
        pass

    async def ack(self, columns: Any) -> None:
        async def do() -> None:
            for name in _names(columns):
                if not any(
                    each.own_headers.get(tarry.DELIVERY_ID_HEADER) == str(name) for each in self._world.published
                ):
                    self._world.faults.append(f"{name} was acknowledged before it was published")
                self._end(name)

        await self._script.ask("ack", do)

    async def reject(self, columns: Any, reason: str, *, forwarded: bool = False) -> Any:
        async def do() -> Any:
            names = _names(columns)
            for name in names:
                (self._world.buried if forwarded else self._world.rejected)[name.entry_id] = reason
                if not forwarded:
                    self._end(name)
            return Fields(dead_lettered=len(names))

        names = [name.entry_id for name in _names(columns)]
        return await self._script.ask("bury" if forwarded else "reject", do, names)

    async def nack(self, columns: Any, *, forwarded: bool) -> Any:
        async def do() -> Any:
            for name in _names(columns):
                self._world.nacked.add(str(name))
                row = self._world.rows.get((self._topic, name.entry_id))
                if row is not None and row.count == name.redelivery_count:
                    row.count, row.state = row.count + 1, "waits"
            return Fields(ignored={})

        return await self._script.ask("nack", do, [name.entry_id for name in _names(columns)])

    def _end(self, name: tarry.DeliveryId) -> None:
        row = self._world.rows.get((self._topic, name.entry_id))
        if row is not None and row.count == name.redelivery_count:
            row.state = "done"


def _names(columns: Any) -> list[tarry.DeliveryId]:
    if isinstance(columns, Batch):
        return list(columns)
    if isinstance(columns, tuple):
        return [
            tarry.DeliveryId(ledger, entry, None, time_ms, count)
            for ledger, entry, time_ms, _, count in zip(*columns, strict=True)
        ]
    return [tarry.DeliveryId.of(columns, row) for row in range(len(columns.entry_id))]


# Real answers.

LIBRARIES: Mapping[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError(ODD),
    "TypeError": lambda: TypeError(ODD),
    "OverflowError": lambda: OverflowError(ODD),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, ODD),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, ODD),
    "KeyError": lambda: KeyError(ODD),
    "IndexError": lambda: IndexError(ODD),
    "AttributeError": lambda: AttributeError(ODD),
    "AssertionError": lambda: AssertionError(ODD),
    "BufferError": lambda: BufferError(ODD),
    "RecursionError": lambda: RecursionError(ODD),
    "MemoryError": lambda: MemoryError(ODD),
    "StopAsyncIteration": lambda: StopAsyncIteration(ODD),
    "asyncio.TimeoutError": lambda: TimeoutError(ODD),
    "asyncio.InvalidStateError": lambda: asyncio.InvalidStateError(ODD),
    "asyncio.IncompleteReadError": lambda: EOFError(ODD),
    "asyncio.CancelledError": lambda: asyncio.CancelledError(ODD),
    "concurrent.futures.CancelledError": lambda: concurrent.futures.CancelledError(ODD),
    "OSError": lambda: OSError(errno.EMFILE, ODD),
    "ConnectionResetError": lambda: ConnectionResetError(errno.ECONNRESET, ODD),
    "ssl.SSLError": lambda: ssl.SSLError(ODD),
    "RuntimeError: Event loop is closed": lambda: RuntimeError(f"Event loop is closed ({ODD})"),
    "struct.error": lambda: struct.error(ODD),
    "json.JSONDecodeError": lambda: json.JSONDecodeError(ODD, "", 0),
    "ExceptionGroup": lambda: ExceptionGroup(ODD, [ValueError(ODD)]),
    "confluent_kafka.KafkaException": lambda: confluent_kafka.KafkaException(ODD),
    "nats.errors.TimeoutError": lambda: nats.errors.TimeoutError(ODD),
    "nats.errors.ConnectionClosedError": lambda: nats.errors.Error(ODD),
    "redis.ResponseError": lambda: redis.exceptions.ResponseError(ODD),
    "redis.ConnectionError": lambda: redis.exceptions.ConnectionError(ODD),
    "grpc.aio.UsageError": lambda: grpc.aio.UsageError(ODD),
}
"""What client libraries raise although no adapter foresees it."""
_NATS_TIMEOUT = str(nats.errors.TimeoutError())
_OF_TARRY: Sequence[type[tarry.TarryError]] = (
    *daemon_answers.TABLE,
    *(tarry.NotFound, tarry.Unsupported, tarry.Closed, tarry.AlreadyExists),
)


def _failures(step: str) -> list[Odd]:
    """Return what a call may raise, done before and not."""
    raised: dict[str, tuple[str, Callable[[], BaseException]]] = {}
    surprise = SURPRISE if step in OF_MESSAGES else SESSION
    if step in _OF_DAEMON:
        for kind in _OF_TARRY:
            raised[kind.__name__] = (_means(step, kind), lambda kind=kind: kind(ODD))  # type: ignore[misc]
    else:
        passes = AGAIN if step in _REPEATED else SESSION
        raised["Unreachable"] = (passes, lambda: port.Unreachable(ODD))
        raised["SessionOver"] = (SESSION, lambda: port.SessionOver(ODD))
        raised["NotThere"] = (SESSION, lambda: port.NotThere(ODD))
    raised |= {name: (surprise, error) for name, error in LIBRARIES.items()}
    found = [Odd(name, means, 0, error) for name, (means, error) in raised.items()]
    if step not in ("read", "open", "close", "passed", "fetch", "hold"):
        may_land = [name for name in raised if not _says_nothing_was_done(name)]
        found += [Odd(f"{name}, and done", raised[name][0], 1, raised[name][1]) for name in may_land]
    return found


def _means(step: str, kind: type[tarry.TarryError]) -> str:
    meant = daemon_answers.TABLE.get(kind)
    if step == "create_subscription" and kind is tarry.AlreadyExists:
        return TAKEN
    if step in ("policy", "retention") and kind is tarry.NotFound:
        return TAKEN
    if step == "topics" and kind is tarry.NotFound:
        return AGAIN
    if meant is None or step not in _REPEATED:
        return SESSION
    if meant.meaning is Meaning.REFUSED:
        return REFUSED if step in OF_MESSAGES else SESSION
    if kind is tarry.Internal:
        return SURPRISE if step in OF_MESSAGES else SESSION
    return AGAIN


def _says_nothing_was_done(name: str) -> bool:
    kind = getattr(tarry, name, None)
    meant = daemon_answers.TABLE.get(kind) if kind is not None else None
    return meant is not None and meant.meaning in (Meaning.REFUSED, Meaning.NOT_NOW)


def real(step: str) -> list[Odd]:
    """Return the answers that a call may really get."""
    return [*_failures(step), *(_OF_STEP[step]() if step in _OF_STEP else []), *_slow(step)]


def _slow(step: str) -> list[Odd]:
    return [Odd("slow", TAKEN, 1, takes_s=SLOW_S)]


def _changed(name: str, means: str, change: Callable[[Any], Any], lands: int = 1, **more: Any) -> Odd:
    return Odd(name, means, lands, change=change, **more)


def _of_produce() -> list[Odd]:
    found = []
    for meaning in Meaning:
        for cause in Cause:
            for lands in {Meaning.TAKEN: (1,), Meaning.UNKNOWN: (0, 1)}.get(meaning, (0,)):
                for first_only in (False, True):
                    name = f"{meaning.name} {cause.name}{', the first' * first_only}{', and done' * lands}"
                    text = "" if meaning is Meaning.TAKEN else ODD
                    answer = Produced(Meant(meaning, cause), "ODD", text)
                    found.append(Odd(name, meaning.value, lands, produced=answer, first_only=first_only))
    return found


def _of_read() -> list[Odd]:
    def lost(portion: port.Portion) -> port.Portion:
        return port.Portion([], [each.lane for each in portion.read[:1]])

    def gone(portion: port.Portion) -> port.Portion:
        return port.Portion([dataclasses.replace(each, message=None) for each in portion.read])

    return [
        _changed("nothing", TAKEN, lambda portion: port.Portion()),
        _changed("fewer", TAKEN, lambda portion: port.Portion(portion.read[:-1])),
        _changed("the same once more later", TAKEN, lambda portion: portion, again=True),
        _changed("lane lost", TAKEN, lost, again=True),
        _changed("lost when it was read", REFUSED, gone),
    ]


def _of_receive() -> list[Odd]:
    return [
        _changed("nothing", TAKEN, lambda batch: None, 0),
        _changed("the same once more later", TAKEN, lambda batch: batch, again=True),
    ]


def _of_passed() -> list[Odd]:
    return [_changed("none", TAKEN, lambda told: [False] * len(told))]


def _of_fetch() -> list[Odd]:
    return [_changed("gone", REFUSED, lambda found: [None] * len(found))]


def _of_add() -> list[Odd]:
    return [
        _changed(
            f"refused {why.name}",
            REFUSED,
            lambda _, why=why: Fields(refused=dict.fromkeys(range(5), why), accepted=0, duplicates=0),
            0,
        )
        for why in tarry.RefusedReason
    ]


def _of_nack() -> list[Odd]:
    return [
        _changed(f"ignored {why.name}", TAKEN, lambda _, why=why: Fields(ignored={0: why}))
        for why in tarry.IgnoredReason
    ]


def _of_withdrawal() -> list[Odd]:
    def told(name: str) -> Odd:
        def change(_: object) -> Any:
            none, first = np.empty(0, np.int64), np.zeros(1, np.int64)
            names = ("not_found_index", "already_due_index", "in_flight_index", "raised_index", "raised_deliver_at_ms")
            return Fields(**dict.fromkeys(names, none) | {name: first, "may_have_landed": True})

        return _changed(name, TAKEN, change)

    return [told("not_found_index"), told("already_due_index"), told("in_flight_index")]


def _of_findings() -> list[Odd]:
    return [
        _changed(
            f"{name} {grade.value}",
            TAKEN,
            lambda _, name=name, grade=grade: [Finding(name, grade, ODD)],
        )
        for name in ("source", "retry", "target", "retention")
        for grade in Grade
    ]


_OF_STEP: Mapping[str, Callable[[], list[Odd]]] = {
    "read": _of_read,
    "passed": _of_passed,
    "fetch": _of_fetch,
    "produce": _of_produce,
    "receive": _of_receive,
    "add": _of_add,
    "add_late": _of_add,
    "nack": _of_nack,
    "cancel": _of_withdrawal,
    "reschedule": _of_withdrawal,
    "findings": _of_findings,
    "source_findings": _of_findings,
    "kept_ms": lambda: [
        _changed("no age", TAKEN, lambda _: None),
        _changed("short", TAKEN, lambda _: 1),
    ],
    "first_entries": lambda: [
        _changed("nothing", TAKEN, lambda _: {}),
        _changed("later", TAKEN, lambda _: {1: 10**6}),
    ],
    "generation": lambda: [_changed("another", SESSION, lambda _: "2")],
}


# Noise.

_IGNORED = frozenset(("commit", "hold", "must_answer", "create_subscription", "ack", "reject", "bury", "open", "close"))
"""Calls of which any answer is one: they have failed if they raise."""
_ROWS = frozenset(("fetch", "produce", "passed"))
"""Calls that answer with a row for each message."""


def noise(step: str) -> list[Odd]:
    """Return answers that no broker, daemon or library should give."""
    things: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "an empty text": str,
        "a text": lambda: ODD,
        "-1": lambda: -1,
        "a number": lambda: 2**70,
        "no number": lambda: float("nan"),
        "an object": object,
        "a dict": lambda: {ODD: ODD},
        "an exception": lambda: ValueError(ODD),
        "an empty list": list,
    }
    if step in _IGNORED:
        return [_changed(name, TAKEN, lambda _, make=make: make()) for name, make in things.items()]
    means = SURPRISE if step in OF_MESSAGES else SESSION
    found = [
        _changed(f"{name}{', and done' * lands}", means, lambda _, make=make: make(), lands)
        for name, make in things.items()
        for lands in (0, 1)
        # Rows that are handed out and not there: nothing shows that they are missing.
        if not (step == "receive" and lands and name in ("None", "an empty text", "an empty list"))
    ]
    if step in _ROWS:
        found += [
            _changed("too few rows", means, lambda rows: rows[:-1]),
            _changed("too many rows", means, lambda rows: [*rows, *rows]),
            _changed("rows of None", REFUSED if step == "fetch" else means, lambda rows: [None] * len(rows)),
            _changed("rows of texts", means, lambda rows: [ODD] * len(rows)),
            _changed("rows of exceptions", means, lambda rows: [ValueError(ODD)] * len(rows)),
            _changed("no list, but its parts one by one", means, iter),
        ]
    if step in OF_MESSAGES:
        found += [Odd(f"{name}, done twice", SURPRISE, 2, error) for name, error in list(LIBRARIES.items())[:4]]
        found += [
            Odd(f"{name}, done late", SURPRISE, 1, error, takes_s=SLOW_S) for name, error in list(LIBRARIES.items())[:4]
        ]
    return [*found, *(_NOISE[step]() if step in _NOISE else [])]


def _noise_of_read() -> list[Odd]:
    def with_first(**fields: Any) -> Callable[[port.Portion], port.Portion]:
        def change(portion: port.Portion) -> port.Portion:
            return port.Portion([dataclasses.replace(portion.read[0], **fields)])

        return change

    return [
        _changed("rows twice", TAKEN, lambda portion: port.Portion([*portion.read, *portion.read])),
        _changed("rows of texts", SESSION, lambda portion: port.Portion([ODD] * 2)),  # type: ignore[list-item]
        _changed("no list", SESSION, lambda portion: port.Portion(None)),  # type: ignore[arg-type]
        _changed("lane is a list", SESSION, with_first(lane=[])),
        _changed("lost lanes are a number", SESSION, lambda portion: port.Portion(portion.read, 7)),  # type: ignore[arg-type]
        _changed("headers are None", REFUSED, with_first(message=port.Message(None, ("orders", 1)))),  # type: ignore[arg-type]
        _changed("message is a text", REFUSED, with_first(message=ODD)),
        _changed("sent at None", REFUSED, with_first(sent_at_ms=None)),
        _changed("sent at 2**70", REFUSED, with_first(sent_at_ms=2**70)),
        _changed("sent at a text", REFUSED, with_first(sent_at_ms=ODD)),
        _changed("repeated is None", REFUSED, with_first(message=port.Message({}, ("orders", 1), None))),  # type: ignore[arg-type]
    ]


def _noise_of_receive() -> list[Odd]:
    return [
        _changed("rows twice", TAKEN, lambda batch: Batch([*batch, *batch])),
        _changed("names that are none", SESSION, lambda batch: Batch([ODD])),  # type: ignore[list-item]
    ]


def _noise_of_add() -> list[Odd]:
    def told(name: str, means: str, **fields: Any) -> Odd:
        return _changed(name, means, lambda answer: Fields(**vars(answer) | fields))

    def with_row(answer: Any) -> Any:
        return Fields(**vars(answer) | {"refused": {**answer.refused, 99: ODD}})

    return [
        told("less than none accepted", SURPRISE, accepted=-1),
        told("refused is a list", SURPRISE, refused=[0]),
        told("refused with a text", REFUSED, refused={0: ODD}),
        _changed("refused is a row that it does not have", TAKEN, with_row),
        _changed("without fields", SURPRISE, lambda _: Fields()),
    ]


def _noise_of_nack() -> list[Odd]:
    return [
        _changed("ignored is a row that it does not have", SURPRISE, lambda _: _not_due(99)),
        _changed("ignored is a text", SURPRISE, lambda _: Fields(ignored=ODD)),
        _changed("without fields", SURPRISE, lambda _: Fields()),
    ]


def _not_due(row: int) -> Fields:
    return Fields(ignored={row: tarry.IgnoredReason.NOT_DUE})


def _noise_of_withdrawal() -> list[Odd]:
    def without(name: str) -> Callable[[Any], Any]:
        return lambda answer: Fields(**{field: value for field, value in vars(answer).items() if field != name})

    def raised(answer: Any) -> Any:
        return Fields(**vars(answer) | {"raised_index": np.arange(3), "raised_deliver_at_ms": np.arange(2)})

    return [
        _changed("without fields", SURPRISE, lambda _: Fields()),
        _changed("without one field", SURPRISE, without("in_flight_index")),
        _changed("raised rows that do not fit", SURPRISE, raised),
    ]


_NOISE: Mapping[str, Callable[[], list[Odd]]] = {
    "read": _noise_of_read,
    "receive": _noise_of_receive,
    "add": _noise_of_add,
    "add_late": _noise_of_add,
    "nack": _noise_of_nack,
    "cancel": _noise_of_withdrawal,
    "reschedule": _noise_of_withdrawal,
}


# Mutations, and the oracle.

_NUMBERS = itertools.count()

_ONCE = frozenset(
    (
        *("add_late", "nack", "cancel", "reschedule", "bury", "reject", "open", "close", "findings"),
        *("create_subscription", "subscribe", "topics_page"),
    )
)
"""Calls of which a session may have one alone: their first one is odd."""
_POISONED: Mapping[str, Sequence[int]] = {
    "add": (1, 4, 7, 8),
    "add_late": (15,),
    "nack": (1,),
    "passed": (0, 7, 8),
    "cancel": (7,),
    "reschedule": (8,),
    "produce": (1, 2, 3, 4, 15),
    "bury": (14,),
    "fetch": (1, 4, 15, 16),
}
"""Messages whose calls may be odd each time: what a withdrawal names, where it is one."""


@dataclasses.dataclass
class Mutation:
    """A run with odd answers."""

    step: str
    seed: int
    script: Script
    in_order: bool
    world: World
    run_faults: list[str] = dataclasses.field(default_factory=list)
    ended_at_start: bool = False

    @property
    def given(self) -> list[Odd]:
        return self.script.given

    @property
    def left_open(self) -> int:
        """How many copies more than one the answers may have made."""
        left_open = sum(odd.leaves_open(self.step, in_order=self.in_order) for odd in self.given)
        ends = [odd for odd in self.given if odd.ends_session]
        if self.step in ENDING and len(ends) > 1:
            # What a session that ends still sends fails, too.
            left_open = max(left_open, len(ends))
        mixed = len({odd.name for odd in self.given}) > 1
        return left_open + sum(bool(odd.takes_s) and mixed for odd in self.given)

    def copies_max(self, target: str = "") -> int:
        """Return how often a message may be published to a target at most."""
        # What is overdue stands in the log and waits in Tarry: a session that ends may give it back twice.
        return 1 + self.left_open * (2 if target == "slow" else 1)

    @property
    def copies(self) -> Counter[tuple[str, str]]:
        """How often each message was published, by target and name."""
        return Counter((each.target, each.once_id.partition(":")[2]) for each in self.world.published)

    @property
    def sessions(self) -> int:
        return int(self.world.metrics.sessions._value.get())

    @property
    def may_refuse(self) -> bool:
        """Whether an answer may have made a dead letter of a good message."""
        surprises = sum(odd.means == SURPRISE for odd in self.given)
        return surprises >= publishing.RAISED_MAX or any(odd.means == REFUSED for odd in self.given)

    def row(self) -> dict[str, object]:
        """Return what was done, and what came of it."""
        dead = len(self.world.rejected) + len(self.world.buried)
        return {
            "step": self.step,
            "seed": self.seed,
            "answers": [odd.name for odd in self.given],
            "of": self.script.entry if self.script.entry is not None else f"call {self.script.first}",
            "means": sorted({odd.means for odd in self.given}),
            "may_have_landed": any(odd.lands for odd in self.given),
            "copies_max": self.copies_max(),
            "copies": max(self.copies.values(), default=0),
            "sessions": self.sessions,
            "dead_letters": dead + sum(each.target == "dead" for each in self.world.published),
        }


def mutation(step: str, seed: int, *, is_real: bool | None = None) -> Mutation:
    """Draw a run with odd answers to calls of a step; real ones first, if it is not said."""
    draw = random.Random(f"{step} {seed}")
    reals = real(step)
    if is_real is None:
        is_real = seed < len(reals)
    in_order = draw.random() < 0.5
    first = 0 if step in _ONCE else draw.randrange(2 if step == "passed" else 3)
    if is_real:
        odd = reals[seed % len(reals)]
        odds = [odd] * (1 if step == "close" else draw.choice((1, 1, 2, 3, 4)))
    elif step == "close" or draw.random() < 0.5:
        odds = [draw.choice(noise(step))] * (1 if step == "close" else draw.choice((1, 2, 3, 4)))
    else:
        odds = [draw.choice([*reals, *noise(step)]) for _ in range(draw.choice((2, 3, 5)))]
    script = Script(step, odds, first)
    may_be_poison = step in _POISONED and {odd.means for odd in odds} <= {SURPRISE, REFUSED}
    if may_be_poison and draw.random() < 0.5:
        script = Script(step, odds[:1], entry=draw.choice(_POISONED[step]))
    return of_script(step, seed, script, in_order=in_order)


def of_script(step: str, seed: int, script: Script, *, in_order: bool) -> Mutation:
    """Return a run of a script."""
    return Mutation(step, seed, script, in_order, World(script, name=f"relay-{next(_NUMBERS)}", in_order=in_order))


async def run(mutation: Mutation) -> None:
    """Run a relay until it has settled and is healthy, and then until it has drained."""
    world, loop = mutation.world, asyncio.get_running_loop()
    ending, began_s = asyncio.Event(), loop.time()
    at_work = asyncio.create_task(sessions.Sessions(world.settings, world.metrics).run(ending))
    settled_s: float | None = None

    def is_done() -> bool:
        nonlocal settled_s
        settled_s = (settled_s or loop.time()) if world.is_settled else None
        if settled_s is None or not world.metrics.health.body()[0]:
            return False
        is_spent = mutation.script.is_spent or mutation.step == "close"
        return is_spent or loop.time() - settled_s > IDLE_S

    while not at_work.done() and not is_done():
        if loop.time() - began_s > LIMIT_S:
            mutation.run_faults.append(f"hangs: {_left(world)}")
            break
        await asyncio.wait([at_work], timeout=0.01)
    by_itself = at_work.done()
    ending.set()
    await asyncio.wait([at_work], timeout=LIMIT_S)
    if not at_work.done():
        mutation.run_faults.append("does not end")
        while not at_work.done():
            at_work.cancel()
            await asyncio.wait([at_work], timeout=1)
    error = asyncio.CancelledError() if at_work.cancelled() else at_work.exception()
    if isinstance(error, sessions.WrongEnds) and not mutation.sessions:
        mutation.ended_at_start = True
    elif by_itself or error is not None:
        mutation.run_faults.append(f"ends by itself: {error!r}")


def _left(world: World) -> str:
    left = {
        name: [e.entry_id for e in log if e.entry_id not in world.committed[name]] for name, log in world.logs.items()
    }
    rows = {key: row for key, row in world.rows.items() if row.state != "done" and row.deliver_at_ms < FAR_MS}
    return f"not committed {left}, in Tarry {rows}, health {world.metrics.health.body()[1]}"


def faults_of(mutation: Mutation) -> list[str]:
    """Return what is wrong with a run; empty if nothing is."""
    if mutation.run_faults or mutation.ended_at_start:
        return mutation.run_faults
    world = mutation.world
    faults = [*world.faults]
    if not mutation.given:
        faults.append("no odd answer was given")
    ends = sum(odd.ends_session for odd in mutation.given)
    if mutation.sessions > 1 + ends:
        faults.append(f"{mutation.sessions} sessions, and answers ended {ends}")
    for (target, name), count in mutation.copies.items():
        if count > (most := mutation.copies_max(target)):
            faults.append(f"{name} was published to {target} {count} times, and may be {most} times")
    for entry, target in DUE.items():
        faults += _of_good(mutation, entry, any(_is_at(each, target, entry) for each in world.published))
    faults += _of_withdrawn(mutation)
    unreported = world.metrics.unreported._value.get()
    for entry, text in BAD.items():
        reasons = _reasons(world, "orders", entry)
        if not reasons and not unreported and not any(_is_of(each, "orders", entry) for each in world.published):
            faults.append(f"bad message {entry} is no dead letter")
        faults += [
            f"bad message {entry} is a dead letter because of {reason!r}"
            for reason in reasons
            if text not in reason and not _may_be_reason(mutation, reason)
        ]
    for entry in ASKING:
        if not any(_is_of(each, "orders", entry) for each in world.published) and not unreported:
            faults.append(f"withdrawal {entry} was not answered")
    if not _reasons(world, "failed", 2) and not unreported:
        faults.append("the bad message of the retry log is no dead letter")
    if unreported and not mutation.may_refuse:
        faults.append(f"{unreported} dead letters or results are lines of the log")
    return faults


def _of_good(mutation: Mutation, entry: int, arrived: bool) -> list[str]:
    reasons = _reasons(mutation.world, "orders", entry)
    if mutation.step == "generation":
        # Tarry may have it in another topic, too.
        return [] if arrived or any("made anew" in each for each in reasons) else [f"message {entry} was lost"]
    faults = [] if arrived or reasons else [f"message {entry} was lost"]
    faults += [
        f"message {entry} is a dead letter because of {reason!r}"
        for reason in reasons
        if not _may_be_reason(mutation, reason)
    ]
    # The first one may arrive once more, and then not.
    if arrived and reasons and entry != 1 and not any(odd.lands for odd in mutation.given):
        faults.append(f"message {entry} arrived, and is a dead letter because of {reasons}")
    says_so = mutation.step in ("produce", "add", "add_late") and all(odd.error is not None for odd in mutation.given)
    if arrived and says_so and not all(each.startswith("may have landed: ") for each in reasons):
        faults.append(f"message {entry} arrived, and its dead letter does not say that it may have: {reasons}")
    return faults


def _may_be_reason(mutation: Mutation, reason: str) -> bool:
    if mutation.step == "generation":
        return "made anew" in reason
    # An answer that is not an exception is named by what it makes the relay raise.
    says_why = ODD in reason or _NATS_TIMEOUT in reason or any(odd.error is None for odd in mutation.given)
    return bool(reason) and mutation.may_refuse and says_why


def _of_withdrawn(mutation: Mutation) -> list[str]:
    """Return what is wrong with what was withdrawn, and with what a consumer has failed with once."""
    world, faults = mutation.world, []
    if mutation.step == "generation":
        # What was asked for in another topic is not found there.
        return []
    told = {
        entry: [
            each.own_headers[publishing.RESULT_HEADER]
            for each in world.published
            if each.target == "results" and _is_of(each, "orders", entry)
        ]
        for entry in ASKING
    }
    waits = {entry for (_, entry), row in world.rows.items() if row.state != "done"}
    reasons = _reasons(world, "orders", 8)
    if "RESCHEDULED" in told[10] or not (reasons or 8 in waits):
        faults += _of_good(mutation, 8, any(_is_at(each, "due", 8) for each in world.published))
    if any(_is_at(each, "due", 7) for each in world.published):
        faults.append("message 7 was delivered before it was due")
    if len(world.logs["failed"]) > 1:
        again = any(each.own_headers.get(tarry.REDELIVERY_COUNT_HEADER) == "1" for each in world.published)
        reasons = [*_reasons(world, "failed", 3), *_reasons(world, "orders", 1)]
        if not again and not reasons:
            faults.append("what a consumer failed with was not delivered again")
        faults += [
            f"a return is a dead letter because of {each!r}" for each in reasons if not _may_be_reason(mutation, each)
        ]
    return faults


def _is_at(each: port.Outgoing, target: str, entry: int) -> bool:
    return each.target == target and _is_of(each, "orders", entry)


def _reasons(world: World, name: str, entry: int) -> list[str]:
    """Return the reasons of the dead letters of a message."""
    found = [
        each.own_headers[publishing.REASON_HEADER]
        for each in world.published
        if each.target == "dead" and _is_of(each, name, entry)
    ]
    if name == "orders":
        found += [each[entry] for each in (world.rejected, world.buried) if entry in each]
    return found


def table(mutations: Sequence[Mutation]) -> str:
    """Return a line for each step."""
    lines = [
        f"{'step':20} {'runs':>5} {'answers':>8} {'landed':>7} {'copies':>7} {'at most':>8} {'sessions':>9}  means"
    ]
    for step in dict.fromkeys(each.step for each in mutations):
        of_step = [each for each in mutations if each.step == step]
        means = Counter(odd.means for each in of_step for odd in each.given)
        lines.append(
            f"{step:20} {len(of_step):5} {sum(means.values()):8} "
            f"{sum(bool(odd.lands) for each in of_step for odd in each.given):7} "
            f"{max((max(each.copies.values(), default=0) for each in of_step), default=0):7} "
            f"{max(each.copies_max() for each in of_step):8} {sum(each.sessions for each in of_step):9}  "
            + ", ".join(f"{name} {count}" for name, count in sorted(means.items()))
        )
    return "\n".join(lines)
