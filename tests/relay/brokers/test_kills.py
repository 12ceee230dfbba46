"""Relay, daemon and broker are killed in turn under messages that are delayed and consumers that fail; what arrived is
judged by what stands in the consumer's own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import tarry
import tarry.aio
from examples.processes import DaemonProcess, local_store
from tests._support.patience import wait_until
from tests._support.tcp_proxy import TcpProxy
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    FAILED,
    GONE,
    SOURCE,
    AnyBroker,
    Published,
    configuration,
)

LIMIT_S = 1_500.0


@dataclasses.dataclass
class Consumer:
    """Reads the target by its own place there, so that it sees each entry once, and fails the first time with what says
    so: then it publishes the delivery id to the retry log.
    """

    broker: AnyBroker
    record: list[Published] = dataclasses.field(default_factory=list)

    async def look(self) -> None:
        """Takes in what is new. What fails is not in the record before it is in the retry log."""
        new = await self.broker.read(DUE, len(self.record))
        failed = [each for each in new if "fails" in each.body and each.headers["tarry-redelivery-count"] == "0"]
        if failed:
            names = [each.headers[tarry.DELIVERY_ID_HEADER] for each in failed]
            await self.broker.publish(FAILED, [({tarry.DELIVERY_ID_HEADER: name}, "") for name in names])
        self.record += new

    async def until(self, reached: Callable[[], bool]) -> None:
        """Looks until it is so, through whatever failures of the broker."""
        async with asyncio.timeout(LIMIT_S):
            while not reached():
                with contextlib.suppress(*GONE):
                    await self.look()
                await asyncio.sleep(0.01)

    def bodies(self) -> set[str]:
        return {each.body for each in self.record}

    def deliveries(self) -> int:
        """How many messages are done: those that fail the first time when they come again."""
        return len({each.body for each in self.record if not_failing(each)})


def not_failing(each: Published) -> bool:
    return "fails" not in each.body or each.headers["tarry-redelivery-count"] != "0"


@contextlib.contextmanager
def processes(
    broker: AnyBroker, directory: Path, more: str = "", own: Mapping[str, str] | None = None, relay: str = ""
) -> Iterator[tuple[DaemonProcess, RelayProcess, RelayProcess]]:
    """A daemon, a relay that runs and one that does not yet. `more`: settings of the source. `own`: what stands in
    their settings instead. `relay`: settings of the relay itself.
    """
    with proxied(broker, directory, more, own, relay) as (_, daemon, one, two):
        yield daemon, one, two


@contextlib.contextmanager
def proxied(
    broker: AnyBroker, directory: Path, more: str = "", own: Mapping[str, str] | None = None, relay: str = ""
) -> Iterator[tuple[TcpProxy, DaemonProcess, RelayProcess, RelayProcess]]:
    """The processes, and what the relays reach the daemon through."""
    with DaemonProcess("daemon", directory, local_store(directory / "root")) as daemon:
        daemon.start_serving()
        with TcpProxy(int(daemon.address.rpartition(":")[2])) as proxy:
            settings = configuration(broker, f"127.0.0.1:{proxy.port}", more)
            for shown, instead in (own or {}).items():
                assert shown in settings
                settings = settings.replace(shown, instead)
            with (
                RelayProcess("relay-1", directory, settings, relay) as one,
                RelayProcess("relay-2", directory, settings, relay) as two,
            ):
                one.start()
                yield proxy, daemon, one, two


async def story(broker: AnyBroker, directory: Path, *, rows: int, span_ms: int) -> dict[str, object]:
    """How late it was, how much arrived again, and the CPU seconds of each process since its last start."""
    # So slowly that some of what is due together was received, and has failed, before the last of it is published.
    limited = {f'{{ name = "{DUE}" }}': f'{{ name = "{DUE}", rate_limit = 500 }}'} if broker.kind == "kafka" else {}
    # Kafka drops what is older than a week, and Tarry allows longer delays.
    more = 'delay_max = "1d"' if broker.kind == "kafka" else ""
    with proxied(broker, directory, more, limited) as (proxy, daemon, one, two):
        consumer = Consumer(broker)
        now_ms = time.time_ns() // 1_000_000
        due_ms = {f"{row}{' fails' if row % 50 == 7 else ''}": now_ms + row * span_ms // rows for row in range(rows)}
        asked = [({"deliver-at": str(due)}, body) for body, due in due_ms.items()]
        for first in range(0, rows, 1_000):
            await broker.publish(SOURCE, asked[first : first + 1_000])
        assert all(each["good"] for each in one.told("check"))

        def arrived(part: float) -> Callable[[], bool]:
            return lambda: len(consumer.bodies()) >= rows * part

        outages = Outages()
        await consumer.until(arrived(0.1))
        with outages.lasting():
            one.kill()
            two.start()
        await consumer.until(arrived(0.3))
        with outages.lasting():
            daemon.kill()
            daemon.start_serving()
        await consumer.until(arrived(0.5))
        with outages.lasting():
            broker.server.kill()
            broker.server.start()
            broker.server.wait_until_loaded()
        await consumer.until(arrived(0.7))
        with outages.lasting():
            one.start()
            two.kill()
            daemon.kill()
            daemon.start_serving()
        await consumer.until(lambda: consumer.deliveries() == rows)
        await a_nack_comes_before_its_ack(broker, consumer, daemon, one, proxy, due_ms)
        await nothing_is_left(one)
        cpu_s = {each.name: each.usage().cpu_s for each in (daemon, one, broker.server)}
        assert one.terminate() == 0
        await consumer.look()
        outages.add_rebalances(one, two)
        again = judge(consumer.record, due_ms, may_repeat=outages if broker.kind == "kafka" else Outages())
        assert await broker.read(DEAD) == []
    firsts = [
        each for each in consumer.record if each.headers["tarry-redelivery-count"] == "0" and "wave" not in each.body
    ]
    late_ms = sorted(each.at_ms - due_ms[each.body] for each in firsts)
    p50_p99 = late_ms[len(late_ms) // 2], late_ms[len(late_ms) * 99 // 100]
    return {"arrived again": again, "messages": len(due_ms), "ms late, p50 and p99": p50_p99, "CPU seconds": cpu_s}


async def a_nack_comes_before_its_ack(
    broker: AnyBroker,
    consumer: Consumer,
    daemon: DaemonProcess,
    relay: RelayProcess,
    proxy: TcpProxy,
    due_ms: dict[str, int],
) -> None:
    """Messages that fail at once. When the daemon has them, what the relay says is held back; then they are made due,
    and one that the relay passed on comes back to it: the acknowledgement is under way then.
    """

    def returned_early() -> float:
        return relay.metric("tarry_relay_returned_early_total")

    def is_idle() -> bool:
        return relay.metric("tarry_relay_messages") == 0

    def all_done() -> bool:
        # What is held back for long is read again meanwhile, and what is left of that would be asked for first.
        return consumer.deliveries() == len(due_ms) and is_idle()

    ends_s = time.monotonic() + LIMIT_S
    topic = relay.told("status")["topic"]
    # Not by the proxy.
    async with tarry.aio.Client(daemon.address) as client:
        await consumer.until(all_done)
        before = returned_early()
        for wave in itertools.count():
            far_ms = time.time_ns() // 1_000_000 + 3_600_000
            bodies = [f"wave {wave} {row} fails" for row in range(20)]
            await broker.publish(SOURCE, [({"deliver-at": str(far_ms)}, body) for body in bodies])
            pages: list[tarry.ScheduledPage] = []
            while sum(map(len, pages)) < len(bodies):
                pages = [page async for page in client.scheduled(topic)]
                await asyncio.sleep(0.01)
            await consumer.until(is_idle)
            proxy.hold_back()
            now_ms = time.time_ns() // 1_000_000
            due_ms |= dict.fromkeys(bodies, now_ms)
            for page in pages:
                await client.reschedule(topic, page.ledger_id, page.entry_id, deliver_at_ms=now_ms)
            # By the clock: what waits in the client of Redis may lose its cancellation in Python 3.11. A relay that has
            # no stream when it is held back gets nothing before that is over.
            let_pass_s = time.monotonic() + 20 * 2**wave
            await consumer.until(lambda until_s=let_pass_s: returned_early() > before or time.monotonic() > until_s)  # type: ignore[misc]
            proxy.let_pass()
            await consumer.until(all_done)
            if returned_early() > before:
                return
            if time.monotonic() > ends_s:
                raise AssertionError("no message came back before it was acknowledged")


async def nothing_is_left(relay: RelayProcess) -> None:
    def is_idle() -> bool:
        told = relay.told("status")
        return not any(told[name] for name in ("pending", "due", "handed back", "in flight"))

    await asyncio.to_thread(wait_until, is_idle, "something is left in Tarry", timeout_s=LIMIT_S)
    told = relay.told("status")
    assert told["dead letters"] == told["cut ledgers"] == 0


@dataclasses.dataclass
class Outages:
    """When something was away, or partitions moved. Unix time in ms."""

    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        began_ms = time.time_ns() // 1_000_000
        yield
        self.spans.append((began_ms, time.time_ns() // 1_000_000))

    def add_rebalances(self, *relays: RelayProcess) -> None:
        """Also those that nobody asked for: to Kafka a relay that a busy machine holds up is gone."""
        for line in "".join(relay.log_text() for relay in relays).splitlines():
            if '"reads partitions"' in line:
                at_ms = int(datetime.datetime.fromisoformat(json.loads(line)["time"]).timestamp() * 1_000)
                self.spans.append((at_ms, at_ms))

    def lie_between(self, first_ms: int, again_ms: int, after_ms: int) -> bool:
        """Whether one does, or ended at most `after_ms` before."""
        return any(first_ms <= ended_ms + after_ms and again_ms >= began_ms for began_ms, ended_ms in self.spans)


def ends_after_ms(record: list[Published], due_ms: Mapping[str, int]) -> int:
    """In how long what was under way in an outage ends: longer where the machine is busy, and everything late."""
    first_ms: dict[str, int] = {}
    for each in record:
        first_ms.setdefault(each.body, each.at_ms)
    return 10_000 + max(at_ms - due_ms[body] for body, at_ms in first_ms.items())


def judge(record: list[Published], due_ms: dict[str, int], may_repeat: Outages) -> int:
    """How many arrived again by a name that was there.

    Each arrived, none early, and each name once, but around an outage by an output that knows no ids; what failed came
    again under the next count, and nothing else did.
    """
    assert {each.body for each in record} == set(due_ms)
    assert [each for each in record if each.at_ms < due_ms[each.body]] == []
    arrivals: dict[str, list[Published]] = {}
    for each in record:
        arrivals.setdefault(each.headers[tarry.DELIVERY_ID_HEADER], []).append(each)
    repeats = [(name, found[0].at_ms, again.at_ms) for name, found in arrivals.items() for again in found[1:]]
    after_ms = ends_after_ms(record, due_ms)
    assert [repeat for repeat in repeats if not may_repeat.lie_between(*repeat[1:], after_ms)] == []
    counts: dict[str, set[int]] = {}
    for each in record:
        counts.setdefault(each.body, set()).add(int(each.headers["tarry-redelivery-count"]))
    wrong = {body: found for body, found in counts.items() if found != ({0, 1} if "fails" in body else {0})}
    assert wrong == {}
    return len(repeats)


async def test_everything_arrives_once_through_kills_of_relay_daemon_and_broker(
    broker: AnyBroker, tmp_path: Path
) -> None:
    await story(broker, tmp_path, rows=600, span_ms=3_000)


@pytest.mark.long
async def test_ten_thousand_messages_arrive_once_through_kills(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("told", await story(broker, tmp_path, rows=10_000, span_ms=30_000))


async def test_what_cannot_be_delayed_or_delivered_is_a_dead_letter_and_stops_nothing(
    broker: AnyBroker, tmp_path: Path
) -> None:
    with processes(broker, tmp_path) as (_, relay, _):
        consumer = Consumer(broker)
        far_ms = time.time_ns() // 1_000_000 + 86_400_000
        wrong = [
            {"deliver-at": "1900000000"},
            {"deliver-at": "tomorrow"},
            {"deliver-at": "2031-01-01T00:00:00"},
            {"delay": "10"},
            {"delay-level": "19"},
            {"delay": "1s", "delay-level": "1"},
            {"delay": "99999d"},
            {"delay": "1s", "target": "elsewhere"},
        ]
        await broker.publish(SOURCE, [(headers, f"wrong {row}") for row, headers in enumerate(wrong)])
        names = {"none": "not a name", f"0-5-1000-{2**32 - 1}": "no count"}
        await broker.publish(FAILED, [({"tarry-delivery-id": name}, body) for name, body in names.items()])
        await broker.publish(
            SOURCE, [({}, "direct"), ({"delay": "10ms"}, "right"), ({"deliver-at": str(far_ms)}, "far")]
        )
        await consumer.until(lambda: consumer.bodies() == {"direct", "right"})
        dead = Consumer(broker)
        async with asyncio.timeout(LIMIT_S):
            while len(dead.record) < len(wrong) + len(names):
                dead.record = await broker.read(DEAD)
        reasons = {each.body: each.headers["tarry-reason"] for each in dead.record}
        assert "can only be meant in seconds" in reasons["wrong 0"]
        assert "has no time zone" in reasons["wrong 2"]
        assert "must be from 1 to 18" in reasons["wrong 4"]
        assert "DELAY_TOO_LONG" in reasons["wrong 6"]
        assert "none of the targets" in reasons["wrong 7"]
        assert "delivery id 'none'" in reasons["not a name"]
        assert "4294967295" in reasons["no count"]
        assert relay.told("status")["pending"] == 1
        health = relay.health()
        assert health == {"status": "ok", "failing": {}}
        assert relay.terminate() == 0


async def test_a_payload_that_is_gone_is_a_dead_letter_of_tarry(broker: AnyBroker, tmp_path: Path) -> None:
    with processes(broker, tmp_path) as (_, relay, _):
        consumer = Consumer(broker)
        await broker.publish(SOURCE, [({}, "direct")])
        await consumer.until(lambda: consumer.bodies() == {"direct"})
        await broker.publish(SOURCE, [({"delay": "5s"}, str(row)) for row in range(10)])

        def all_added() -> bool:
            return relay.metric("tarry_relay_committed_total") == 11

        def all_lost() -> bool:
            return bool(relay.told("status")["dead letters"] == 6)

        await asyncio.to_thread(wait_until, all_added, "not all is committed", timeout_s=LIMIT_S)
        await broker.cut(SOURCE, keep=4)
        await consumer.until(lambda: len(consumer.record) == 5)
        await asyncio.to_thread(wait_until, all_lost, "not all is a dead letter", timeout_s=LIMIT_S)
        assert relay.metric("tarry_relay_lost_total") == 6
        assert sorted(consumer.bodies()) == ["6", "7", "8", "9", "direct"]


@pytest.mark.parametrize(
    ("retention", "is_running"),
    [("warn", True), *(pytest.param(each, False, marks=pytest.mark.long) for each in ("warn", "dead_letter"))],
)
async def test_what_waits_for_a_source_that_was_made_anew_is_a_dead_letter_with_the_reason(
    broker: AnyBroker, tmp_path: Path, retention: str, is_running: bool
) -> None:
    more = f'retention = "{retention}"\nretention_every_s = 0.2'
    with processes(broker, tmp_path, more) as (daemon, relay, _):
        await broker.publish(SOURCE, [({"delay": "1h"}, str(row)) for row in range(10)])

        def all_added() -> bool:
            return relay.metric("tarry_relay_committed_total") == 10

        await asyncio.to_thread(wait_until, all_added, "not all is committed", timeout_s=LIMIT_S)
        former = relay.told("status")["topic"]
        if not is_running:
            relay.kill()
        await broker.delete(SOURCE)
        await broker.bring_back(SOURCE)
        await broker.publish(SOURCE, [({}, f"new {row}") for row in range(20)])
        if not is_running:
            relay.start()
        async with tarry.aio.Client(daemon.address) as client, asyncio.timeout(LIMIT_S):
            if retention == "warn":
                async for page in client.scheduled(former):
                    await client.reschedule(former, page.ledger_id, page.entry_id, delay_ms=0)
            dead: list[tarry.DeadLetterPage] = []
            while sum(map(len, dead)) < 10:
                dead = [page async for page in client.dead_letters(former, "relay")]
                await asyncio.sleep(0.1)
            reasons = {page.texts[each] for page in dead for each in page.text_index.tolist()}
        generation = former.removeprefix("orders@")
        by_reject = f"payload gone: source orders was created again, and this was in generation {generation}"
        assert reasons == {by_reject if retention == "warn" else ""}
        assert relay.told("status")["former generations"] == former
        consumer = Consumer(broker)
        await consumer.until(lambda: len(consumer.bodies()) == 20)
        assert consumer.bodies() == {f"new {row}" for row in range(20)}
        assert relay.terminate() == 0


async def test_a_relay_that_sleeps_while_its_source_is_made_anew_takes_nothing_of_it(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """The other one has noticed meanwhile, and reads what is new."""
    with processes(broker, tmp_path, "retention_every_s = 0.2") as (daemon, one, two):
        two.start()
        await asyncio.to_thread(two.wait_for_log, '"message":"relays"')
        await broker.publish(SOURCE, [({"delay": "1h"}, f"former {row}") for row in range(10)])

        def all_added() -> bool:
            return sum(each.metric("tarry_relay_committed_total") for each in (one, two)) >= 10

        await asyncio.to_thread(wait_until, all_added, "not all is committed", timeout_s=LIMIT_S)
        former = one.told("status")["topic"]
        two.stop()
        await broker.delete(SOURCE)
        await broker.bring_back(SOURCE)
        await broker.publish(SOURCE, [({"delay": "10ms"}, f"new {row}") for row in range(20)])
        consumer = Consumer(broker)
        await consumer.until(lambda: len(consumer.bodies()) == 20)
        two.resume()
        await broker.publish(SOURCE, [({"delay": "10ms"}, f"later {row}") for row in range(20)])
        await consumer.until(lambda: len(consumer.bodies()) == 40)
        assert consumer.bodies() == {f"{when} {row}" for when in ("new", "later") for row in range(20)}
        # Kafka drops nothing by its id, and on a busy machine its partitions move.
        assert broker.kind == "kafka" or len(consumer.record) == 40
        async with tarry.aio.Client(daemon.address) as client:
            assert (await client.stats(former)).pending == 10
        assert (one.terminate(), two.terminate()) == (0, 0)
