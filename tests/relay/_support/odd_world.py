"""The two ends of a relay, which answer anything at a chosen call, and what outlives its sessions.

Contents: `Odd`, an answer; `Script`, which says when it is given; `World` with its logs, targets and Tarry; its ends,
`OddBroker` and `OddDaemon`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

import tarry
from tarry_relay import port, publishing, relay_settings, sessions
from tarry_relay.health import Health
from tarry_relay.port import Finding, Grade, Meaning, Meant, Produced
from tarry_relay.relay_metrics import RelayMetrics
from tests.relay._support.listed import TOO_LARGE, Daemon, Listed, settings

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


# Answers


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
        if each.target == "due" and is_of(each, "orders", 1) and len(self.logs["failed"]) == 1:
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
        if self.metrics.unreported._value.get() or any(is_of(each, name, entry) for each in self.published):
            return True
        if name == "failed":
            return entry in self.nacked_entries
        return entry in self.ever_added or entry in self.buried

    @property
    def nacked_entries(self) -> set[int]:
        return {
            each.entry_id
            for each in self.logs["failed"]
            if each.message is not None and _without_log(each.message.headers[tarry.DELIVERY_ID_HEADER]) in self.nacked
        }


def _read(name: str, entry: int, lane: str, headers: Mapping[str, str]) -> port.Read:
    return port.Read(1, entry, port.Message(headers, (name, entry), sent_at_ms=1_000), lane)


def _without_log(text: str) -> str:
    """Return a delivery id without the log at its end."""
    return re.sub(r"-[0-9a-f]{8}$", "", text)


def _lane(read: port.Read) -> str:
    return str(read.lane).partition("/")[0]


def is_of(each: port.Outgoing, name: str, entry: int) -> bool:
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
                bare = any(is_of(each, "orders", entry) for entry in _REFUSED_BARE)
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
        self.hold_every_s = broker.hold_every_s
        self._given = set(world.committed[name])
        self._versions: Counter[str] = Counter()

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
                    _without_log(each.own_headers.get(tarry.DELIVERY_ID_HEADER, "")) == str(name)
                    for each in self._world.published
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
