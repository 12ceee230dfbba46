"""A relay at work between a broker and a daemon that are made of lists: what it does with failures, lost lanes,
refusals, and its end. That real ones do what these do is in `tests/relay/brokers`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

import tarry
from tarry_relay import cancelling, pacing, port, relay_settings, running
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.running import BadMessage, Relay
from tarry_relay.sorting import Sorting

LIMIT_S = 300
FAR_MS = 10**13
OTHERS = 1_000
"""From this entry on, what is fetched goes to the other target."""


@dataclasses.dataclass
class Listed:
    """A broker whose logs are lists of portions. `failing`: targets that are away; `refusing`: that take nothing."""

    portions: list[port.Portion] = dataclasses.field(default_factory=list)
    returned: list[port.Portion] = dataclasses.field(default_factory=list)
    committed: list[port.Read] = dataclasses.field(default_factory=list)
    published: list[port.Outgoing] = dataclasses.field(default_factory=list)
    failing: set[str] = dataclasses.field(default_factory=set)
    refusing: set[str] = dataclasses.field(default_factory=set)
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
            port.Message({"target": "other" if entry >= OTHERS else "due"}, (ledger, entry))
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

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[port.Produced]:
        await asyncio.sleep(0)
        to = {each.target for each in messages}
        if self.hanging is not None and to & self.failing & self.have_failed:
            await self.hanging.wait()
        self.have_failed |= to & self.failing
        self.published += [each for each in messages if each.target not in self.failing | self.refusing]
        return [
            port.Produced(
                failed="away" if each.target in self.failing else "",
                refused="too large" if each.target in self.refusing and each.has_body else "",
            )
            for each in messages
        ]

    async def findings(self) -> AsyncIterator[port.Finding]:
        yield port.Finding("lists", True, "are there")


@dataclasses.dataclass
class _Reader:
    broker: Listed
    portions: list[port.Portion]

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
        self.added += [each for row, each in enumerate(rows) if row not in refused]
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

    async def reject(self, columns: Any, reason: str) -> None:
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

    async def stats(self, topic: str) -> Any:
        ours = _Answer(subscription="relay", backlog=2, dispatchers=self.other_topics[topic])
        return _Answer(pending=3, subscriptions=[_Answer(subscription="another"), ours])

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
    return port.Read(1, entry, port.Message(headers, entry), lane, sent_at_ms=1_000)


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
    metrics = metrics or RelayMetrics()
    client: Any = daemon
    relay = Relay(
        said,
        Sorting(said.source, said.targets, broker),
        broker=broker,
        client=client,
        generation="1",
        metrics=metrics,
    )
    ending = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        at_work = asyncio.create_task(relay.run(ending))
        while not until() and not at_work.done():
            await asyncio.wait([at_work], timeout=0.005)
        ending.set()
        await at_work
    return metrics


async def test_what_is_read_is_added_and_then_committed() -> None:
    broker, daemon = Listed([port.Portion([read(1, delay="5s"), read(2)])], unreachable=2), Daemon()
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 2)
    assert daemon.added == [(1, 1, 6_000)]
    assert [each.entry_id for each in broker.committed] == [1, 2]
    assert [each.once_id for each in broker.published] == ["orders@1:direct:orders-1-2"]
    assert metrics.failures.labels("broker")._value.get() == 2


async def test_a_daemon_that_answers_a_relay_which_begins_again_is_healthy_before_there_is_work() -> None:
    metrics, broker = RelayMetrics(), Listed(unreachable=1)
    metrics.failed("daemon", "away")
    await relayed(broker, Daemon(), lambda: not broker.unreachable, metrics=metrics)
    assert "daemon" not in metrics.failing()


async def test_what_came_back_early_is_counted_once_however_often_it_is_handed_back() -> None:
    class Refusing(Daemon):
        async def ack(self, columns: Any) -> None:
            await asyncio.Event().wait()

        async def nack(self, columns: Any, *, forwarded: bool) -> Any:
            if len(columns[1]) > 1:
                raise tarry.InvalidArgument("one of them is none")
            return await super().nack(columns, forwarded=forwarded)

    broker, daemon = Listed(), Refusing(due=[tarry.DeliveryId(1, entry, None, 5_000, 0) for entry in (1, 2)])
    said = msgspec.structs.replace(settings(), relay=relay_settings.Relay(topic="orders", drain_s=0.01))

    def is_back() -> bool:
        if len(broker.published) == 2 and not broker.returned and not broker.committed:
            names = [each.own_headers[tarry.DELIVERY_ID_HEADER] for each in broker.published]
            broker.returned.append(
                port.Portion([read(row, **{tarry.DELIVERY_ID_HEADER: name}) for row, name in enumerate(names)])
            )
            broker.published.clear()
        return len(broker.committed) == 2

    metrics = await relayed(broker, daemon, is_back, said=said)
    assert sorted(daemon.nacks) == [1, 2]
    assert metrics.returned_early._value.get() == 2


async def test_what_is_handed_out_again_while_it_is_acknowledged_is_acknowledged_again() -> None:
    answers = asyncio.Event()

    class Slow(Daemon):
        async def ack(self, columns: Any) -> None:
            await super().ack(columns)
            await answers.wait()

    name = tarry.DeliveryId(1, 4, None, 5_000, 1)
    broker, daemon, given = Listed(), Slow(due=[name]), [name]

    def is_answered() -> bool:
        if daemon.acknowledged and given:
            daemon.due.append(given.pop())
        elif daemon.acknowledged and not daemon.due and not daemon.holding:
            answers.set()
        return answers.is_set()

    await relayed(broker, daemon, is_answered)
    assert len(broker.published) == 1
    assert daemon.acknowledged == [4, 4]


async def test_a_lane_that_was_lost_is_not_committed_and_its_next_one_is() -> None:
    daemon = Daemon(holds_adds=asyncio.Event())
    again = port.Portion([read(1, "p0/2", delay="5s")], lost_lanes=["p0/1"])
    broker = Listed([port.Portion([read(1, "p0/1", delay="5s"), read(7, "p1/1")]), again])
    assert daemon.holds_adds is not None
    asyncio.get_running_loop().call_later(0.1, daemon.holds_adds.set)
    await relayed(broker, daemon, lambda: len(broker.committed) == 2)
    assert {each.lane for each in broker.committed} == {"p0/2", "p1/1"}


async def test_what_is_due_is_published_and_then_acknowledged() -> None:
    names = [tarry.DeliveryId(1, entry, None, 5_000, 0) for entry in range(3)]
    broker, daemon = Listed(), Daemon(due=names)
    await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 3)
    assert [each.own_headers["tarry-delivery-id"] for each in broker.published] == [str(name) for name in names]
    assert [each.once_id for each in broker.published] == [f"orders@1:relay:{name}" for name in names]


async def test_what_its_target_refuses_for_good_is_a_dead_letter() -> None:
    broker = Listed(refusing={"due"})
    daemon = Daemon(due=[tarry.DeliveryId(1, 4, None, 5_000, 0)])
    await relayed(broker, daemon, lambda: bool(daemon.rejected))
    assert daemon.rejected == {4: "too large"}
    assert daemon.acknowledged == []


async def test_a_dead_letter_that_is_too_large_comes_without_its_payload() -> None:
    broker = Listed([port.Portion([read(1, delay="soon")])], refusing={"dead"})
    await relayed(broker, Daemon(), lambda: len(broker.committed) == 1)
    assert len(broker.committed) == 1


async def test_a_target_that_is_away_keeps_no_other() -> None:
    broker = Listed([port.Portion([read(1), read(2, target="other")])], failing={"due"})
    asyncio.get_running_loop().call_later(0.2, broker.failing.clear)
    metrics = await relayed(broker, Daemon(), lambda: len(broker.committed) == 2)
    assert [each.target for each in broker.published] == ["other", "due"]
    assert metrics.failing() == {}


def of(*, due: int, others: int) -> list[tarry.DeliveryId]:
    """Names of hand-outs: so many for the one target, and then so many for the other."""
    return [tarry.DeliveryId(1, entry, None, 5_000, 0) for entry in (*range(due), *range(OTHERS, OTHERS + others))]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_target_that_is_away_does_not_use_up_the_permits_of_others(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What hangs does so for longer than its target rests.
    monkeypatch.setattr(pacing, "REST_MAX_S", 0.01)
    monkeypatch.setattr(pacing, "REST_S", 0.000_001 if hangs else pacing.REST_S)
    few = msgspec.structs.replace(settings(), relay=relay_settings.Relay(topic="orders", permits=20, rows=10))
    broker = Listed(failing={"due"}, hanging=asyncio.Event() if hangs else None)
    daemon = Daemon(due=of(due=200, others=30), permits=20)
    others = {OTHERS + row for row in range(30)}

    def others_are_done() -> bool:
        if others <= set(daemon.acknowledged):
            broker.failing.clear()
            if broker.hanging is not None:
                broker.hanging.set()
        return len(daemon.acknowledged) == 230

    await relayed(broker, daemon, others_are_done, said=few)
    assert set(daemon.acknowledged[:30]) == others
    assert sorted(daemon.acknowledged) == [*range(200), *sorted(others)]
    assert len(broker.published) == 230


async def test_no_more_is_parked_than_may_be() -> None:
    few = msgspec.structs.replace(settings(), relay=relay_settings.Relay(topic="orders", permits=20, parked_max=50))
    broker, daemon = Listed(failing={"due"}), Daemon(due=of(due=200, others=0), permits=20)
    full = asyncio.Event()

    def is_full() -> bool:
        if len(daemon.due) == 200 - 20 - 50 and len(daemon.holding) == 20:
            broker.failing.clear()
            full.set()
        return full.is_set() and len(daemon.acknowledged) == 200

    await relayed(broker, daemon, is_full, said=few)


async def test_what_is_parked_and_comes_again_with_another_stream_is_published_once() -> None:
    few = msgspec.structs.replace(settings(), relay=relay_settings.Relay(topic="orders", permits=20))
    broker, daemon = Listed(failing={"due"}), Daemon(due=of(due=40, others=0), permits=20)
    again: list[tarry.DeliveryId] = []

    def has_come_again() -> bool:
        if not again and not daemon.due and len(daemon.holding) < 20:
            again.extend(set(of(due=40, others=0)) - daemon.holding)
            daemon.due += again
        elif again and not daemon.due and not daemon.holding & set(again):
            broker.failing.clear()
        return len(daemon.acknowledged) == 40

    await relayed(broker, daemon, has_come_again, said=few)
    assert len(broker.published) == 40


async def test_a_nack_that_the_daemon_takes_for_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_NOT_DUE_S", 0)
    now_ms = time.time_ns() // 1_000_000
    names = [tarry.DeliveryId(1, 8, None, now_ms, 0), tarry.DeliveryId(1, 9, None, 1_000, 0)]
    failed = [read(entry, **{"tarry-delivery-id": str(name)}) for entry, name in enumerate(names)]
    broker, daemon = Listed(returned=[port.Portion(failed)]), Daemon(not_due=2)
    await relayed(broker, daemon, lambda: len(broker.committed) == 2)
    assert daemon.nacks == [8, 9, 8]


@pytest.mark.parametrize(("on_bad", "target"), [("dead_letter", "dead"), ("now", "due")])
async def test_what_tarry_refuses_goes_where_bad_messages_go(on_bad: str, target: str) -> None:
    broker, daemon = Listed([port.Portion([read(1, delay="5s"), read(2, delay="5s")])]), Daemon(refuses={2})
    await relayed(broker, daemon, lambda: len(broker.committed) == 2, on_bad=on_bad)
    assert [(each.target, each.message and each.message.body) for each in broker.published] == [(target, 2)]
    assert [entry for _, entry, _ in daemon.added] == [1]


async def test_a_bad_message_stops_a_relay_that_is_to_stop() -> None:
    broker = Listed([port.Portion([read(1), read(2, delay="soon")])])
    with pytest.raises(BaseExceptionGroup) as failures:
        await relayed(broker, Daemon(), lambda: False, on_bad="stop")
    assert failures.group_contains(BadMessage, match="message 1-2: delay is 'soon'")
    assert [each.entry_id for each in broker.committed if each.entry_id == 2] == []


def told(broker: Listed) -> dict[Any, tuple[str, ...]]:
    """Of each result, by the payload of its withdrawal, what stands in the headers of the relay."""
    names = (running.RESULT_HEADER, running.MAY_HAVE_LANDED_HEADER, running.DELIVER_AT_HEADER, "correlation-id")
    return {
        each.message.body: tuple(each.own_headers[name] for name in names if name in each.own_headers)
        for each in broker.published
        if each.target == "results" and each.message is not None
    }


async def test_a_withdrawal_waits_until_what_it_names_is_committed_and_is_committed_when_its_result_is_told() -> None:
    withdrawals = [read(8, "b", **{"cancel-of": "1", "correlation-id": "x"}), read(9, "b", **{"cancel-of": "2"})]
    added = port.Portion([read(1, "a", delay="5s"), read(2, "a", delay="5s")])
    broker, daemon = Listed([port.Portion(withdrawals), added]), Daemon(holds_adds=asyncio.Event(), pending={1: 5})

    def waits_for_its_commit() -> None:
        assert daemon.asked == []
        assert daemon.holds_adds is not None
        daemon.holds_adds.set()

    asyncio.get_running_loop().call_later(0.2, waits_for_its_commit)
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 4, results="results")
    assert told(broker) == {8: ("CANCELLED", "x"), 9: ("NOT_FOUND", "true")}
    assert [each.lane for each in broker.committed] == ["a", "a", "b", "b"]
    assert metrics.withdrawals.labels("CANCELLED")._value.get() == 1


async def test_withdrawals_of_one_position_keep_their_order_through_lost_answers() -> None:
    later = {"reschedule-of": "1", "deliver-at": "2000000000001"}
    asked = [read(3, **later), read(4, **{"cancel-of": "1"}), read(5, **later), read(6, **{"cancel-of": "2"})]
    sure = [dataclasses.replace(each, alone_until_s=math.inf) for each in asked]
    broker = Listed([port.Portion(sure)], committed=[read(1), read(2)])
    daemon = Daemon(pending={1: 5, 2: 5}, lost_answers=2)
    await relayed(broker, daemon, lambda: len(broker.committed) == 6, results="results")
    assert told(broker) == {
        3: ("RESCHEDULED", "2000000000001"),
        4: ("CANCELLED",),
        5: ("NOT_FOUND",),
        # The cancel whose answers were lost.
        6: ("NOT_FOUND", "true"),
    }
    assert daemon.asked == [(2,), (2,), (2,), (1,), (1,), (1,)]


async def test_what_nobody_commits_is_not_withdrawn() -> None:
    broker, daemon = Listed([port.Portion([read(9, **{"cancel-of": "1"})])]), Daemon(pending={1: 5})
    await relayed(broker, daemon, lambda: len(broker.committed) == 1, results="results", await_commit_s=0.01)
    assert (told(broker), daemon.asked, daemon.pending) == ({9: ("NOT_COMMITTED", "true")}, [], {1: 5})


async def test_a_withdrawal_that_was_read_before_says_that_its_first_try_may_have_landed() -> None:
    asked = [read(8, **{"cancel-of": "1"}), dataclasses.replace(read(9, **{"cancel-of": "2"}), alone_until_s=math.inf)]
    broker = Listed([port.Portion(asked)], committed=[read(1), read(2)])
    await relayed(broker, Daemon(), lambda: len(broker.committed) == 4, results="results")
    assert told(broker) == {8: ("NOT_FOUND", "true"), 9: ("NOT_FOUND",)}


async def test_a_time_that_tarry_refuses_keeps_no_other_withdrawal() -> None:
    times = {1: FAR_MS, 2: 2 * 10**12}
    asked = [read(7 + n, **{"reschedule-of": str(n), "deliver-at": str(ms)}) for n, ms in times.items()]
    broker = Listed([port.Portion(asked)], committed=[read(1), read(2)])
    daemon = Daemon(pending={1: 5, 2: 5})
    await relayed(broker, daemon, lambda: len(broker.committed) == 4, results="results")
    assert told(broker) == {9: ("RESCHEDULED", "2000000000000")}
    assert [(each.target, each.own_headers["tarry-reason"]) for each in broker.published if each.target == "dead"] == [
        ("dead", f"Tarry refuses its time {FAR_MS}: deliver_at_ms is too far")
    ]
    assert daemon.pending == {1: 5, 2: 2 * 10**12}


async def test_a_result_that_is_too_large_comes_without_its_payload() -> None:
    broker = Listed([port.Portion([read(9, **{"cancel-of": "1"})])], committed=[read(1)], refusing={"results"})
    metrics = await relayed(broker, Daemon(pending={1: 5}), lambda: len(broker.committed) == 2, results="results")
    assert metrics.produced.labels("bare_result")._value.get() == 1


async def test_without_a_target_of_results_nobody_is_told() -> None:
    broker, daemon = (
        Listed([port.Portion([read(9, **{"cancel-of": "1"})])], committed=[read(1)]),
        Daemon(pending={1: 5}),
    )
    await relayed(broker, daemon, lambda: len(broker.committed) == 2)
    assert (daemon.pending, broker.published) == ({}, [])


async def test_a_source_that_was_made_anew_ends_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Listed()
    asyncio.get_running_loop().call_later(0.1, setattr, broker, "name", "2")
    with pytest.raises(BaseExceptionGroup) as failures:
        await relayed(broker, Daemon(), lambda: False, retention_every_s=0.05)
    assert failures.group_contains(port.NotThere, match="was made anew")


async def test_a_relay_ends_though_cancellations_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "_AGAIN_S", 0.05)
    broker = Listed(loses_cancellations=2)
    asyncio.get_running_loop().call_later(0.1, setattr, broker, "name", "2")
    with pytest.raises(BaseExceptionGroup) as failures:
        await relayed(broker, Daemon(), lambda: False, retention_every_s=0.05)
    assert failures.group_contains(port.NotThere, match="was made anew")
    assert broker.loses_cancellations == 0


async def test_what_is_due_is_never_published_from_a_source_that_was_made_anew() -> None:
    broker, daemon = Listed(), Daemon()

    def is_made_anew() -> None:
        broker.name = "2"
        daemon.due.append(tarry.DeliveryId(1, 4, None, 5_000, 0))

    asyncio.get_running_loop().call_later(0.1, is_made_anew)
    with pytest.raises(BaseExceptionGroup) as failures:
        await relayed(broker, daemon, lambda: False)
    assert failures.group_contains(port.NotThere, match="was made anew")
    assert (broker.published, daemon.acknowledged) == ([], [])


async def test_what_waits_for_a_former_source_is_a_dead_letter_unless_somebody_receives_it() -> None:
    broker = Listed(first={3: 1})
    daemon = Daemon(lowest={3: 7}, other_topics={"orders@0": 0, "orders@2": 1, "orders": 0, "other@0": 0})
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, looked.set)
    metrics = await relayed(broker, daemon, looked.is_set, retention="dead_letter")
    assert daemon.trims == [("orders@0", [3], [2**64 - 1], "relay", True)]
    assert metrics.lost._value.get() == 1


@pytest.mark.parametrize(
    ("retention", "trims"), [("warn", []), ("dead_letter", [("orders@1", [3], [9], "relay", True)])]
)
async def test_what_the_source_has_dropped_is_told_or_a_dead_letter(retention: str, trims: list[Any]) -> None:
    broker, daemon = Listed(first={3: 10, 4: 10}), Daemon(lowest={3: 7, 4: 10, 5: 1})
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, looked.set)
    metrics = await relayed(broker, daemon, looked.is_set, retention=retention)
    assert metrics.cut_ledgers == 1
    assert daemon.trims == trims
