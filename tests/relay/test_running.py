"""A relay at work between a broker and a daemon that are made of lists: what it does with failures, lost lanes,
refusals, and its end. That real ones do what these do is in `tests/relay/brokers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from typing import Any

import msgspec
import pytest

import tarry
from tarry_relay import pacing, port, publishing, relay_settings, running
from tarry_relay.health import Health
from tarry_relay.port import Finding, Grade, Produced
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.running import BadMessage
from tests.relay._support.listed import (
    FAR_MS,
    FULL,
    LEFT_OPEN,
    MISSING,
    OTHERS,
    TOO_LARGE,
    Daemon,
    Listed,
    named,
    read,
    relayed,
    settings,
)


async def test_what_is_read_is_added_and_then_committed() -> None:
    broker, daemon = Listed([port.Portion([read(1, delay="5s"), read(2)])], unreachable=2), Daemon()
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 2)
    assert daemon.added == [(1, 1, 6_000)]
    assert [each.entry_id for each in broker.committed] == [1, 2]
    assert [each.once_id for each in broker.published] == ["orders@1:relay:1-2-1-0"]
    assert metrics.failures.labels("broker")._value.get() == 2


async def test_a_daemon_that_answers_a_relay_which_begins_again_is_healthy_before_there_is_work() -> None:
    metrics, broker = RelayMetrics(Health()), Listed(unreachable=1)
    metrics.failed("daemon", "away")
    await relayed(broker, Daemon(), lambda: not broker.unreachable, metrics=metrics)
    assert "daemon" not in str(metrics.health.body())


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


async def test_what_is_handed_out_twice_before_it_is_acknowledged_is_acknowledged_twice() -> None:
    # A message that was nacked, and added again after its acknowledgement: two rows with one name.
    together, apart = (tarry.DeliveryId(1, entry, None, 5_000, 1) for entry in (4, 5))
    broker, daemon = Listed(failing={"due"}), Daemon(due=[together, together, apart])
    given = [apart]

    def is_done() -> bool:
        if given and not daemon.due:
            daemon.due.append(given.pop())
        elif not given and not daemon.due:
            broker.failing.clear()
        return len(daemon.acknowledged) == 4

    await relayed(broker, daemon, is_done)
    assert len(broker.published) == 2
    assert sorted(daemon.acknowledged) == [4, 4, 5, 5]


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
    assert [each.own_headers["tarry-delivery-id"] for each in broker.published] == [named(name) for name in names]
    assert [each.once_id for each in broker.published] == [f"orders@1:relay:{name}" for name in names]


async def test_a_daemon_that_cannot_be_reached_for_a_while_does_not_end_the_session() -> None:
    class Away(Daemon):
        missed = 0

        async def receive(self, timeout_s: float, **given: object) -> Any:
            if self.missed < 3:
                self.missed += 1
                await asyncio.sleep(0)
                raise tarry.DeadlineExceeded("reached no daemon", last=tarry.Unavailable("away"))
            return await super().receive(timeout_s, **given)

    daemon = Away(due=[tarry.DeliveryId(1, 4, None, 5_000, 0)])
    await relayed(Listed(), daemon, lambda: daemon.acknowledged == [4])
    assert daemon.missed == 3


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
    assert metrics.health.body()[1]["failing"] == {}


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
        return len(set(daemon.acknowledged)) == 40

    await relayed(broker, daemon, has_come_again, said=few)
    assert len(broker.published) == 40


async def test_a_nack_that_the_daemon_takes_for_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_NOT_DUE_S", 0)
    now_ms = time.time_ns() // 1_000_000
    names = [tarry.DeliveryId(1, 8, None, now_ms, 0), tarry.DeliveryId(1, 9, None, 1_000, 0)]
    failed = [read(entry, **{"tarry-delivery-id": named(name)}) for entry, name in enumerate(names)]
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
    with pytest.raises(BadMessage, match="message 1-2: header delay is 'soon'"):
        await relayed(broker, Daemon(), lambda: False, on_bad="stop")
    assert [each.entry_id for each in broker.committed if each.entry_id == 2] == []


def told(broker: Listed) -> dict[Any, tuple[str, ...]]:
    """Of each result, by the payload of its withdrawal, what stands in the headers of the relay."""
    names = (publishing.RESULT_HEADER, publishing.MAY_HAVE_LANDED_HEADER, publishing.DELIVER_AT_HEADER)
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
    assert told(broker) == {8: ("CANCELLED",), 9: ("NOT_FOUND", "true")}
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
        ("dead", "deliver_at_ms is too far")
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
    with pytest.raises(port.NotThere, match="was created again"):
        await relayed(broker, Daemon(), lambda: False, retention_every_s=0.05)


async def test_a_relay_ends_though_cancellations_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_CANCEL_AGAIN_S", 0.05)
    broker = Listed(loses_cancellations=2)
    asyncio.get_running_loop().call_later(0.1, setattr, broker, "name", "2")
    with pytest.raises(port.NotThere, match="was created again"):
        await relayed(broker, Daemon(), lambda: False, retention_every_s=0.05)
    assert broker.loses_cancellations == 0


async def test_what_is_due_is_never_published_from_a_source_that_was_made_anew() -> None:
    broker, daemon = Listed(), Daemon()

    def is_made_anew() -> None:
        broker.name = "2"
        daemon.due.append(tarry.DeliveryId(1, 4, None, 5_000, 0))

    asyncio.get_running_loop().call_later(0.1, is_made_anew)
    with pytest.raises(port.NotThere, match="was created again"):
        await relayed(broker, daemon, lambda: False)
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


def due(*entries: int) -> list[tarry.DeliveryId]:
    return [tarry.DeliveryId(1, entry, None, 5_000, 0) for entry in entries]


def entries(published: list[port.Outgoing]) -> list[int]:
    """The entries of what was published to the target, in order."""
    return [each.message.body[1] for each in published if each.target == "due" and each.message is not None]


class Odd(Exception):
    """Something that no adapter foresaw."""


def raising(*odd: int) -> Any:
    def answers(each: port.Outgoing) -> Produced | None:
        if each.message is not None and each.target != "dead" and each.message.body[1] in odd:
            raise Odd("no buffer")
        return None

    return answers


async def test_publishing_that_raises_for_one_message_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "REST_S", 0.01)
    monkeypatch.setattr(publishing, "_MESSAGE_REST_S", 0.01)
    broker, daemon = Listed(answers=raising(7)), Daemon(due=due(*range(20)))
    metrics = await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 19 and bool(daemon.rejected))
    assert daemon.rejected == {7: "may have landed: due: Odd: no buffer"}
    assert sorted(entries(broker.published)) == [each for each in range(20) if each != 7]
    assert metrics.surprises.labels("message")._value.get() >= 1 + publishing.RAISED_MAX


@pytest.mark.parametrize("ends", [port.Unreachable("away"), port.SessionOver("closed")])
async def test_what_was_taken_one_by_one_is_not_published_again_when_the_broker_goes_away(ends: Exception) -> None:
    class Leaving(Listed):
        calls = 0

        async def produce(self, messages: Any) -> Any:
            self.calls += 1
            if self.calls in (1, 3):
                raise Odd("no buffer") if self.calls == 1 else ends
            return await super().produce(messages)

    broker, daemon = Leaving(), Daemon(due=due(1, 2))
    with pytest.raises(port.SessionOver) if isinstance(ends, port.SessionOver) else contextlib.nullcontext():
        await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 2)
    assert entries(broker.published)[:1] == daemon.acknowledged[:1] == [1]
    assert entries(broker.published).count(1) == 1


@pytest.mark.parametrize("rows", [0, 2, "text"])
async def test_answers_that_are_not_one_for_each_message_end_that_message(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "REST_S", 0.01)

    class Odder(Listed):
        async def produce(self, messages: Any) -> Any:
            there = any(each.message.body[1] == 7 for each in messages)
            answers = await super().produce(messages)
            return answers if not there else [rows] if rows == "text" else answers[:1] * rows

    broker, daemon = Odder(), Daemon(due=due(6, 7, 8))
    await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 2 and bool(daemon.rejected))
    assert daemon.rejected[7].startswith("may have landed: due: TypeError: ")


async def test_a_look_that_raises_for_one_withdrawal_makes_one_dead_letter_of_it_and_keeps_no_other() -> None:
    class Odder(Listed):
        looks = 0

        @property
        def source(self) -> Any:
            reader, passed = super().source, super().source.passed

            async def odd(positions: Any) -> Any:
                self.looks += positions == [(1, 2)]
                if (1, 2) in positions:
                    raise Odd("no such offset")
                return await passed(positions)

            reader.passed = odd  # type: ignore[method-assign]
            return reader

    asked = [read(7 + n, **{"cancel-of": str(n)}) for n in (1, 2)]
    broker, daemon = Odder([port.Portion(asked)], committed=[read(1), read(2)]), Daemon(pending={1: 5, 2: 5})
    await relayed(broker, daemon, lambda: len(broker.committed) == 4, results="results")
    assert told(broker) == {8: ("CANCELLED",)}
    assert [each.own_headers["tarry-reason"] for each in broker.published if each.target == "dead"] == [
        "Odd: no such offset"
    ]
    assert broker.looks == publishing.RAISED_MAX


@pytest.mark.parametrize("passed", [[], [True, True], ["no"], None])
async def test_a_look_that_answers_otherwise_than_for_each_ends_no_session(passed: Any) -> None:
    class Odder(Listed):
        @property
        def source(self) -> Any:
            async def odd(positions: Any) -> Any:
                return passed

            reader = super().source
            reader.passed = odd  # type: ignore[method-assign]
            return reader

    broker = Odder([port.Portion([read(8, **{"cancel-of": "1"})])], committed=[read(1)])
    await relayed(broker, Daemon(pending={1: 5}), lambda: len(broker.committed) == 2, results="results")
    assert [each.target for each in broker.published] == ["dead"]


async def test_work_that_raises_for_one_message_keeps_no_other_and_refuses_it_at_the_third_time() -> None:
    class Odder(Listed):
        async def fetch(self, positions: Any, generation: str) -> Any:
            if (1, 7) in positions:
                raise Odd("cannot be unpacked")
            return await super().fetch(positions, generation)

    broker, daemon = Odder(), Daemon(due=due(*range(20)))
    await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 19 and bool(daemon.rejected))
    assert daemon.rejected == {7: "Odd: cannot be unpacked"}


async def test_an_add_that_raises_for_one_message_keeps_no_other() -> None:
    class Odder(Daemon):
        async def add(self, topic: str, ledger: list[int], entry: list[int], **given: Any) -> Any:
            if 2 in entry:
                raise tarry.InvalidArgument("entry 2 is none")
            return await super().add(topic, ledger, entry, **given)

    broker, daemon = Listed([port.Portion([read(entry, delay="5s") for entry in range(1, 5)])]), Odder()
    await relayed(broker, daemon, lambda: len(broker.committed) == 4)
    assert [entry for _, entry, _ in daemon.added] == [1, 3, 4]
    assert [each.own_headers["tarry-reason"] for each in broker.published] == ["entry 2 is none"]


@pytest.mark.parametrize("lost", [Odd("no such field"), tarry.Unavailable("the answer was lost")])
async def test_a_dead_letter_says_that_its_message_may_be_in_tarry_all_the_same(lost: Exception) -> None:
    class Odder(Daemon):
        calls = 0

        async def add(self, topic: str, ledger: list[int], entry: list[int], **given: Any) -> Any:
            self.calls += 1
            if self.calls > 1 and isinstance(lost, tarry.TarryError):
                raise tarry.InvalidArgument("entry 1 is none")
            await super().add(topic, ledger, entry, **given)
            raise lost

    broker, daemon = Listed([port.Portion([read(1, delay="5s")])]), Odder()
    await relayed(broker, daemon, lambda: len(broker.committed) == 1)
    (reason,) = [each.own_headers["tarry-reason"] for each in broker.published]
    assert reason in ("may have landed: Odd: no such field", "may have landed: entry 1 is none")


async def test_a_commit_or_an_acknowledgement_that_raises_ends_the_session() -> None:
    class Refusing(Daemon):
        async def ack(self, columns: Any) -> None:
            raise tarry.NotFound("subscription relay")

    with pytest.raises(tarry.NotFound):
        await relayed(Listed(), Refusing(due=due(1)), lambda: False)


async def test_a_session_that_a_commit_ends_commits_the_other_lanes() -> None:
    class Odder(Listed):
        @property
        def source(self) -> Any:
            reader: Any = super().source
            commit = reader.commit

            async def odd(items: Any) -> None:
                if items[0].lane == "a":
                    raise Odd("no such lane")
                await asyncio.sleep(0.01)
                await commit(items)

            reader.commit = odd
            return reader

    broker = Odder([port.Portion([read(row, lane) for row, lane in enumerate("abcd")])], in_order=False)
    with pytest.raises(Odd):
        await relayed(broker, Daemon(), lambda: False)
    assert [each.lane for each in broker.committed] == ["b", "c", "d"]


@pytest.mark.parametrize("call", ["fetch", "produce", "ack"])
async def test_a_cancellation_by_nobody_ends_a_message_or_the_session_like_any_exception(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "REST_S", 0.01)
    broker, daemon = Listed(), Daemon(due=due(1))

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError("a library's own")

    monkeypatch.setattr(daemon if call == "ack" else broker, call, cancelled)
    if call == "ack":
        with pytest.raises(port.NobodyCancelled):
            await relayed(broker, daemon, lambda: False)
    else:
        await relayed(broker, daemon, lambda: bool(daemon.rejected))
        assert "a library's own" in daemon.rejected[1]


async def test_a_session_that_ends_commits_and_acknowledges_what_is_done() -> None:
    answers = asyncio.Event()

    class Slow(Daemon):
        async def ack(self, columns: Any) -> None:
            await answers.wait()
            await super().ack(columns)

    broker, daemon = Listed(), Slow(due=due(1))

    def made_anew() -> None:
        broker.name = "2"
        asyncio.get_running_loop().call_later(0.2, answers.set)

    asyncio.get_running_loop().call_later(0.1, made_anew)
    with pytest.raises(port.NotThere):
        await relayed(broker, daemon, lambda: False, retention_every_s=0.05)
    assert daemon.acknowledged == [1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests that take no time."""
    monkeypatch.setattr(pacing, "REST_S", 0.01)
    monkeypatch.setattr(pacing, "REST_MAX_S", 0.02)
    monkeypatch.setattr(publishing, "_MESSAGE_REST_S", 0.001)
    monkeypatch.setattr(publishing, "_MESSAGE_REST_MAX_S", 0.01)
    monkeypatch.setattr(publishing, "_WATCH_S", 0.02)
    monkeypatch.setattr(publishing, "TRIALS_S", 0.05)


@pytest.mark.usefixtures("quick")
async def test_a_message_that_is_never_taken_while_others_are_is_refused_for_good_and_its_target_does_not_rest() -> (
    None
):
    broker, daemon = Listed(), Daemon(due=due(0))
    broker.answers = lambda each: LEFT_OPEN if each.message is not None and each.message.body[1] == 0 else None
    number = iter(range(1, 1_000_000))

    def is_refused() -> bool:
        if not daemon.due:
            daemon.due += due(next(number))
        return bool(daemon.rejected)

    await relayed(broker, daemon, is_refused)
    assert daemon.rejected == {0: "may have landed: no answer"}
    assert len(daemon.acknowledged) > publishing.TRIALS_MAX


@pytest.mark.usefixtures("quick")
async def test_a_message_that_meets_a_limit_is_tried_until_there_is_room() -> None:
    broker, daemon = Listed(), Daemon(due=due(0))
    tried = 0

    def answers(each: port.Outgoing) -> Produced | None:
        nonlocal tried
        if each.message is None or each.message.body[1] != 0:
            return None
        tried += 1
        return FULL if tried <= 2 * publishing.TRIALS_MAX else None

    broker.answers = answers
    number = iter(range(1, 1_000_000))

    def is_there() -> bool:
        if not daemon.due:
            daemon.due += due(next(number))
        return 0 in daemon.acknowledged

    await relayed(broker, daemon, is_there)
    assert daemon.rejected == {}


@pytest.mark.usefixtures("quick")
async def test_what_waits_for_a_target_of_a_pattern_that_the_broker_does_not_have_is_refused_for_good() -> None:
    said = msgspec.structs.replace(
        settings(),
        relay=relay_settings.Relay(topic="orders", missing_target_s=0.2, permits=20, rows=10),
        targets=(relay_settings.Target(name="due"), relay_settings.Target(pattern="other")),
    )
    broker, daemon = Listed(), Daemon(due=of(due=20, others=100), permits=20)
    broker.answers = lambda each: MISSING if each.target == "other" else None
    metrics = await relayed(broker, daemon, lambda: len(daemon.rejected) == 100, said=said)
    assert set(daemon.rejected.values()) == {"other: the broker has no such target"}
    assert sorted(daemon.acknowledged) == list(range(20))
    assert metrics.health.body()[1]["failing"] == {}


@pytest.mark.usefixtures("quick")
async def test_what_waits_for_a_target_of_the_file_that_the_broker_does_not_have_waits() -> None:
    said = msgspec.structs.replace(
        settings(),
        relay=relay_settings.Relay(topic="orders", missing_target_s=0.01),
        targets=(relay_settings.Target(name="due"),),
    )
    broker, daemon = Listed(), Daemon(due=due(1))
    broker.answers = lambda each: MISSING
    asyncio.get_running_loop().call_later(0.5, setattr, broker, "answers", lambda each: None)
    await relayed(broker, daemon, lambda: bool(daemon.acknowledged), said=said)
    assert daemon.rejected == {}


async def test_a_dead_letter_that_is_refused_bare_too_is_one_of_tarry() -> None:
    broker, daemon = Listed([port.Portion([read(1, delay="soon")])]), Daemon()
    broker.answers = lambda each: TOO_LARGE
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 1)
    assert list(daemon.buried) == [1]
    assert daemon.buried[1].startswith("header delay is 'soon'")
    assert metrics.buried._value.get() == 1


@pytest.mark.parametrize("of_retries", [False, True])
async def test_a_dead_letter_that_nothing_takes_leaves_a_line_and_is_committed(
    of_retries: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [port.Portion([read(4, delay="soon", **{"tarry-delivery-id": "none"})])]
    broker = Listed(returned=bad) if of_retries else Listed(bad)
    broker.answers = lambda each: TOO_LARGE
    daemon = Daemon(refuses_forwarded=True)
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 1)
    assert daemon.buried == {}
    assert metrics.unreported._value.get() == 1
    (line,) = [each for each in caplog.records if "nothing takes" in each.message]
    assert vars(line)["entry_id"] == 4
    assert vars(line)["delivery_id"] == "none"


async def test_a_result_comes_bare_and_then_without_its_correlation_and_then_in_the_log() -> None:
    asked = [read(9, **{"cancel-of": "1", "correlation-id": "x" * 60_000})]
    tried: list[port.Outgoing] = []
    broker = Listed([port.Portion(asked)], committed=[read(1)])

    def answers(each: port.Outgoing) -> Produced | None:
        tried.append(each)
        return TOO_LARGE

    broker.answers = answers
    metrics = await relayed(broker, Daemon(pending={1: 5}), lambda: len(broker.committed) == 2, results="results")
    assert [(each.message is None, "correlation-id" in each.own_headers) for each in tried] == [
        (False, False),
        (True, True),
        (True, False),
    ]
    assert len({each.once_id for each in tried}) == 1
    assert metrics.unreported._value.get() == 1


async def test_what_is_under_way_is_not_entered_again_and_is_committed_by_its_newest_receipt() -> None:
    daemon = Daemon(holds_adds=asyncio.Event())
    first = dataclasses.replace(read(1, delay="5s"), receipt="first")
    broker = Listed([port.Portion([first]), port.Portion([dataclasses.replace(first, receipt="second")])])
    assert daemon.holds_adds is not None
    asyncio.get_running_loop().call_later(0.2, daemon.holds_adds.set)
    metrics = await relayed(broker, daemon, lambda: bool(broker.committed))
    assert [each.receipt for each in broker.committed] == ["second"]
    assert len(daemon.added) == metrics.read._value.get() == 1


async def test_what_one_call_gives_twice_is_entered_once() -> None:
    name = tarry.DeliveryId(1, 4, None, 5_000, 0)
    twice = [dataclasses.replace(read(1), receipt=receipt) for receipt in ("first", "second")]
    broker, daemon = Listed([port.Portion(twice)]), Daemon(due=[name, name])
    await relayed(broker, daemon, lambda: bool(broker.committed and daemon.acknowledged))
    assert sorted(each.once_id for each in broker.published) == ["orders@1:relay:1-1-1-0", f"orders@1:relay:{name}"]
    assert [each.receipt for each in broker.committed] == ["second"]


@pytest.mark.usefixtures("quick")
async def test_a_message_without_a_time_waits_in_tarry_when_its_target_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "OVERDUE_S", 0.1)
    sent_ms = 1_900_000_000_000
    late = [
        dataclasses.replace(read(entry), message=port.Message({}, entry, sent_at_ms=each))
        for entry, each in ((1, sent_ms), (2, -1))
    ]
    broker = Listed([port.Portion([*late, read(3, target="other")])], failing={"due"})
    daemon, tried = Daemon(), list[str]()

    def answers(each: port.Outgoing) -> Produced | None:
        tried.append(each.once_id)
        return None

    broker.answers = answers
    metrics = await relayed(broker, daemon, lambda: len(broker.committed) == 3)
    assert sorted(daemon.added_late) == [(1, sent_ms), (2, 1)]
    assert metrics.overdue._value.get() == 2
    # An output that took it at the first try drops it when it comes from Tarry.
    assert {f"orders@1:relay:1-1-{sent_ms}-0", "orders@1:relay:1-2-1-0"} <= set(tried)


async def test_what_is_read_is_held_only_while_the_daemon_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_WATCH_S", 0.02)
    monkeypatch.setattr(running, "SILENT_S", 0.1)
    daemon = Daemon(holds_adds=asyncio.Event())
    portions = [port.Portion([read(1, delay="5s"), read(2, delay="5s")])]
    broker = Listed(portions, in_order=False, hold_every_s=0.01)
    held = 0

    def is_let_go() -> bool:
        nonlocal held
        if len(broker.held) > 3 and not daemon.silent:
            daemon.silent = True
        elif daemon.silent and held != len(broker.held):
            held = len(broker.held)
            asyncio.get_running_loop().call_later(1, still, held)
        return daemon.holds_adds is not None and daemon.holds_adds.is_set()

    def still(seen: int) -> None:
        if seen == len(broker.held) and daemon.holds_adds is not None:
            daemon.holds_adds.set()

    await relayed(broker, daemon, is_let_go)
    assert set(broker.held) >= {(1, 2)}


async def test_a_source_that_drops_what_waits_is_not_read_until_it_is_mended() -> None:
    broker = Listed(wrong=[Finding("size", Grade.WRONG, "stream orders drops its oldest")])
    daemon, metrics, had_read = Daemon(due=due(1)), RelayMetrics(Health()), list[int]()

    def goes_on() -> bool:
        if daemon.acknowledged == [1] and broker.wrong:
            assert metrics.health.body()[0] is False
            assert "drops its oldest" in str(metrics.health.body()[1]["reasons"])
            had_read.append(len(broker.committed))
            broker.portions.append(port.Portion([read(5, delay="5s")]))
            broker.wrong = []
        return len(broker.committed) == 1

    await relayed(broker, daemon, goes_on, metrics=metrics, retention_every_s=0.05)
    assert had_read == [0]
    assert metrics.health.body()[0] is True


async def test_credentials_that_were_refused_make_no_relay_unhealthy_that_has_no_such_work_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_WATCH_S", 0.02)

    class Refusing(Daemon):
        calls = 0

        async def add(self, *_: object, **__: object) -> Any:
            self.calls += 1
            raise tarry.Unauthenticated("token expired") if self.calls == 1 else tarry.InvalidArgument("no such time")

    broker, daemon, metrics = Listed([port.Portion([read(1, delay="5s")])]), Refusing(), RelayMetrics(Health())
    seen: list[str] = []
    explain = metrics.health.explain

    def explained(what: str, reason: str) -> None:
        explain(what, reason)
        seen.append(what)

    metrics.health.explain = explained  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await relayed(broker, daemon, lambda: len(broker.committed) == 1 and metrics.health.body()[0], metrics=metrics)
    assert seen == ["daemon: add"]


async def test_lanes_that_are_lost_are_no_answer_of_the_broker() -> None:
    """Kafka's client gives them up by itself when the broker is silent."""

    class Silent(Listed):
        async def must_answer(self) -> None:
            raise port.Unreachable("away")

    broker, metrics, answered = Silent([port.Portion(lost_lanes=["lane"])]), RelayMetrics(Health()), list[str]()
    metrics.health.answered = lambda end, which="": answered.append(end)  # type: ignore[method-assign]
    await relayed(broker, Daemon(), lambda: not broker.portions and answered.count("daemon") > 1, metrics=metrics)
    assert "broker" not in answered


async def test_a_finding_that_is_accepted_stops_nothing() -> None:
    broker = Listed(
        [port.Portion([read(5, delay="5s")])], wrong=[Finding("size", Grade.WRONG, "stream orders drops its oldest")]
    )
    said = settings(retention_every_s=0.05, accept=("size",))
    broker_findings, broker.wrong = broker.wrong, []
    asyncio.get_running_loop().call_later(0.05, setattr, broker, "wrong", broker_findings)
    await relayed(broker, Daemon(), lambda: len(broker.committed) == 1, said=said)


FORMER = tarry.DeliveryId(1, 9, None, 0, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (named(FORMER), ""),
        (str(FORMER), ""),
        # What is due at once, or before 1970, has the time 1 in Tarry.
        ("1-9-1-3", ""),
        # Where the time is a delay, the version before rounded the broker's time up or down.
        ("1-9-2-3", ""),
        (f"{FORMER}-00000000", "it is of another source or relay, or of a former source: its log is 00000000, not"),
        (
            str(dataclasses.replace(FORMER, log=tarry.DeliveryId.log_of("orders@1", "second"))),
            "of another source or relay",
        ),
        (str(dataclasses.replace(FORMER, log=tarry.DeliveryId.log_of("orders@0", "relay"))), "or of a former source"),
        ("1-9-5000-0", "delivery id '1-9-5000-0': the time of the message at its position is another, 1"),
        (named(tarry.DeliveryId(2, 8, None, 0, 0)), "ledger 2 is none of this source"),
        (named(tarry.DeliveryId(1, 9, 0, 0, 0)), "it has a batch index"),
        ("1-9", "is none; it has the form"),
    ],
)
async def test_an_id_is_handed_back_if_it_is_of_this_log_and_is_a_dead_letter_else(text: str, reason: str) -> None:
    broker = Listed(returned=[port.Portion([read(1, **{"tarry-delivery-id": text})])])
    daemon = Daemon()
    await relayed(broker, daemon, lambda: len(broker.committed) == 1)
    assert daemon.nacks == ([] if reason else [9])
    assert [reason in each.own_headers["tarry-reason"] for each in broker.published] == ([True] if reason else [])


async def test_an_id_of_the_former_form_whose_message_is_gone_is_a_dead_letter() -> None:
    class Empty(Listed):
        async def fetch(self, positions: Any, generation: str) -> Any:
            return [None] * len(positions)

    broker = Empty(returned=[port.Portion([read(1, **{"tarry-delivery-id": str(FORMER)})])])
    daemon = Daemon()
    await relayed(broker, daemon, lambda: len(broker.committed) == 1)
    assert (daemon.nacks, len(broker.published)) == ([], 1)


@pytest.mark.parametrize(
    ("reason", "header"),
    [
        ("two\nlines  of\ttext", "two lines of text"),
        ("\0" * 300, "\ufffd" * 169 + "..."),
        ("\u20ac" * 300, "\u20ac" * 169 + "..."),
        ("x" * 512, "x" * 512),
        ("x" * 513, "x" * 509 + "..."),
        ("\ud800", "\ufffd"),
    ],
)
def test_a_reason_fits_into_a_header(reason: str, header: str) -> None:
    assert publishing.cut(reason) == header
    assert len(publishing.cut(reason).encode()) <= publishing.REASON_BYTES_MAX


async def test_a_source_that_tells_no_limits_is_not_read_when_what_waits_has_gone_between_two_looks() -> None:
    broker, daemon = Listed(first={3: 5}, tells_limits=False), Daemon(lowest={3: 7})
    metrics, seen = RelayMetrics(Health()), list[bool]()

    def is_mended() -> bool:
        seen.append(metrics.health.body()[0])
        if seen[-1] and len(seen) > 40 and broker.first == {3: 5}:
            broker.first = {3: 10}
        return False in seen and seen[-1]

    await relayed(broker, daemon, is_mended, metrics=metrics, retention_every_s=0.05)
    assert metrics.cut_ledgers == 1


async def test_what_had_gone_before_and_is_handed_back_late_stops_no_reading() -> None:
    broker, daemon = Listed([port.Portion([read(1, delay="5s")])], first={3: 10}, tells_limits=False), Daemon()
    looks: list[int] = []

    def is_looked_at() -> bool:
        looks.append(1)
        if len(looks) == 20:
            daemon.lowest = {3: 7}
            broker.first = {3: 12}
        return len(looks) > 60 and len(broker.committed) == 1

    metrics = await relayed(broker, daemon, is_looked_at, retention_every_s=0.05)
    assert metrics.health.body()[0] is True


async def test_loops_that_fail_together_are_all_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(why: str) -> None:
        raise ValueError(why)

    tasks = running._Tasks()
    caplog.set_level(logging.INFO)
    tasks.start(tasks.last, [fail("first"), fail("second")])
    with pytest.raises(ValueError, match=r"first|second"):
        await tasks.until(asyncio.Event().wait())
    await port.end(tasks.all())
    told = [each.error for each in caplog.records if each.message == "a loop has failed"]  # type: ignore[attr-defined]
    assert told == ["ValueError: first", "ValueError: second"]
