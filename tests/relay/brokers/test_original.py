"""What is published is the original, byte for byte, but for what the README says is not kept."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import tarry
from examples.processes import DaemonProcess, local_store
from tests.relay._support.raw_messages import Arrived, Fields, Position, Raw
from tests.relay.brokers._support import raw_brokers
from tests.relay.brokers._support.raw_brokers import UNREADABLE, RawBroker
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DEAD, DUE, SOURCE, AnyBroker, configuration

SPAN_MS = 3_000
READ_BY_RELAY = (b"deliver-at", b"delay", b"delay-level", b"target", b"cancel-of", b"reschedule-of")
OWN = (b"tarry-delivery-id", b"tarry-redelivery-count", b"nats-msg-id")
_AT_ONCE = 1_000
_SHOWN = 10
NAMES = (
    b"tag",
    b"Tag",
    b"TAG",
    b"x-trace",
    b"status",
    b"content-type",
    b"traceparent",
    "tüg".encode(),
    b"a b",
    b"n" * 300,
)
VALUES = (b"", b" ", b"  x  ", b"a\tb", b"\xff\xfe\x80", b"\xed\xa0\x80", "é€😀".encode(), b"v" * 3_000, b":", b"a: b")
NOT_KEPT = (b"tarry-delivery-id", b"tarry-x", b"Tarry-Reason", b"TARRY-POSITION", b"Nats-Expected-Subject", b"nats-x")


def names(broker: str, draw: random.Random) -> bytes:
    """Draw the name of a header, of a kind that the broker takes."""
    match draw.randrange(12):
        case 0:
            return draw.choice(NOT_KEPT)
        case 1:
            return b"a\0b"
        case 2 if broker != "kafka" or draw.random() < 0.05:
            return b"\xff\xfe" + draw.randbytes(3).hex().encode()
        case 3 if broker != "nats":
            return draw.choice((b"", b"a\r\nb"))
        case 4 if broker == "redis":
            return draw.randbytes(draw.randrange(20))
        case _:
            return draw.choice(NAMES)


def values(broker: str, draw: random.Random) -> bytes | None:
    match draw.randrange(6):
        case 0 if broker == "kafka":
            return None
        case 0 | 1 if broker != "nats":
            return draw.randbytes(draw.randrange(200))
        case 1:
            return bytes(each for each in draw.randbytes(draw.randrange(200)) if each != ord("\n"))
        case 2:
            return b"a\0b"
        case _:
            return draw.choice(VALUES)


def original(broker: str, number: int, now_ms: int) -> Raw:
    """Return a message with headers by chance; most are due within some seconds, some have no time."""
    draw = random.Random(f"{broker} {number}")
    fields: list[tuple[bytes, bytes | None]] = [
        (names(broker, draw), values(broker, draw)) for _ in range(draw.choice((0, 1, 2, 5, 20)))
    ]
    # Repeated ones, beside each other or not.
    fields += draw.sample(fields, min(len(fields), draw.choice((0, 0, 1, 3))))
    if draw.random() < 0.8:
        at = draw.randrange(len(fields) + 1)
        fields.insert(at, (b"deliver-at", b"%d" % (now_ms + draw.randrange(SPAN_MS))))
    body = draw.randbytes(draw.choice((0, 1, 100, 2_000)))
    if broker == "redis":
        return Raw(number, (*fields, (b"body", body)))
    if broker == "nats":
        return Raw(number, (), body, _block(fields, draw))
    key = draw.choice((None, b"", draw.randbytes(10)))
    return Raw(number, tuple(fields), None if draw.random() < 0.1 else body, key=key)


def _block(fields: Iterable[tuple[bytes, bytes | None]], draw: random.Random) -> bytes:
    """Write headers as clients do, and as none does: without a blank behind the colon, or with several."""
    lines = [name + draw.choice((b": ", b":", b":  ")) + (value or b"") + b"\r\n" for name, value in fields]
    return b"NATS/1.0\r\n" + b"".join(lines) + b"\r\n" if lines else b""


def kept(broker: str, fields: Fields) -> Fields:
    """Return the headers that must arrive: see "What is not kept" in the README."""
    if broker == "redis":
        return tuple(each for each in fields if not each[0].startswith(b"tarry-"))
    if broker == "kafka":
        fields = tuple((name.partition(b"\0")[0], value) for name, value in fields)
    return tuple(each for each in fields if not each[0].lower().startswith(b"tarry-"))


def lines_kept(block: bytes) -> list[bytes]:
    """Return the lines of a block of NATS that must arrive, byte for byte."""
    return [
        line
        for line in block.removesuffix(b"\r\n").split(b"\r\n")[1:-1]
        if not line.lower().startswith((b"tarry-", b"nats-"))
    ]


def faults(broker: str, raw: Raw, each: Arrived) -> list[str]:
    """Say what of an arrival is not the original's."""
    found = []
    own = Counter(name.lower() for name, _ in each.fields if name.lower() in OWN)
    if own != Counter(OWN if broker == "nats" else OWN[:2]):
        found.append(f"has of the relay's headers {own}")
    if broker == "nats":
        if (lines := lines_kept(each.block)) != (asked := lines_kept(raw.block or b"")):
            found.append(f"has the lines {lines}, not {asked}")
        if not each.block.endswith(b"\r\n\r\n") or not each.block.startswith(b"NATS/1.0\r\n"):
            found.append(f"has the block {each.block!r}")
    elif (fields := kept(broker, each.fields)) != (asked_for := kept(broker, raw.fields)):
        found.append(f"has the headers {fields}, not {asked_for}")
    if broker != "redis" and (each.body, each.key) != (raw.body, raw.key):
        found.append(f"has key and body {each.key!r}, {each.body!r}, not {raw.key!r}, {raw.body!r}")
    return found


@dataclasses.dataclass
class Sent:
    """What was published, and what came of it."""

    broker: str
    raws: dict[Position, Raw] = dataclasses.field(default_factory=dict)
    arrived: dict[Position, Arrived] = dataclasses.field(default_factory=dict)
    dead: list[Arrived] = dataclasses.field(default_factory=list)

    @property
    def unreadable(self) -> set[Position]:
        """Where messages stand whose headers no relay can read."""
        if self.broker != "kafka":
            return set()
        return {
            position
            for position, raw in self.raws.items()
            if any(name.startswith(b"\xff\xfe") for name, _ in raw.fields)
        }

    def take(self, found: Sequence[Arrived]) -> None:
        for each in found:
            (text,) = [value for name, value in each.fields if name == b"tarry-delivery-id"]
            name = tarry.DeliveryId.parse((text or b"").decode())
            assert (name.ledger_id, name.entry_id) not in self.arrived, f"{name} came twice"
            self.arrived[name.ledger_id, name.entry_id] = each

    def check(self) -> None:
        """Compare everything."""
        wrong = [
            f"{position}: {fault}"
            for position, each in self.arrived.items()
            for fault in faults(self.broker, self.raws[position], each)
        ]
        assert not wrong, "\n".join([f"{self.broker}: {len(wrong)} faults", *wrong[:_SHOWN]])
        assert set(self.arrived) == set(self.raws) - self.unreadable
        reasons = Counter(value for each in self.dead for name, value in each.fields if name == b"tarry-reason")
        assert sum(reasons.values()) == len(self.unreadable), reasons


async def come_through(broker: AnyBroker, raw: RawBroker, relay: RelayProcess, rows: int, limit_s: float) -> Sent:
    """Publish messages, wait for what comes of them, and compare."""
    sent = Sent(broker.kind)
    now_ms = time.time_ns() // 1_000_000
    for first in range(0, rows, _AT_ONCE):
        some = [original(broker.kind, number, now_ms) for number in range(first, min(first + _AT_ONCE, rows))]
        positions = await raw.publish(SOURCE, some)
        sent.raws.update(zip(positions, some, strict=True))
    assert len(sent.raws) == rows
    deadline_s = time.monotonic() + limit_s
    while len(sent.arrived) + len(sent.dead) < rows:
        sent.take(await raw.read(DUE))
        sent.dead += await raw.read(DEAD)
        if time.monotonic() > deadline_s:
            missing = [str(sent.raws[each])[:300] for each in set(sent.raws) - set(sent.arrived)]
            raise AssertionError(
                "\n".join([f"{len(missing)} are missing", *missing[:_SHOWN], relay.log_text()[-2_000:]])
            )
        await asyncio.sleep(0.05)
    sent.check()
    return sent


def told(sent: Sent) -> Mapping[str, int]:
    fields = [field for raw in sent.raws.values() for field in raw.fields]
    return {
        "messages": len(sent.raws),
        "headers": len(fields) or sum((raw.block or b"").count(b"\r\n") for raw in sent.raws.values()),
        "not readable, and dead letters": len(sent.unreadable),
    }


async def run(broker: AnyBroker, directory: Path, rows: int, limit_s: float) -> Sent:
    with DaemonProcess("daemon", directory, local_store(directory / "root")) as daemon:
        daemon.start_serving()
        async with raw_brokers.opened(broker) as raw:
            with RelayProcess("relay", directory, configuration(broker, daemon.address)) as relay:
                relay.start()
                sent = await come_through(broker, raw, relay, rows, limit_s)
                assert relay.terminate() == 0
    return sent


async def test_some_messages_with_any_headers_arrive_as_they_were(broker: AnyBroker, tmp_path: Path) -> None:
    await run(broker, tmp_path, 500, 60)


@pytest.mark.long
async def test_ten_thousand_messages_with_any_headers_arrive_as_they_were(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = told(await run(broker, tmp_path, 10_000, 300))
    record_property("told", found)
    print(f"{broker.kind}: {found}")  # noqa: T201


def test_the_generator_makes_every_kind_of_header() -> None:
    for kind in ("kafka", "nats", "redis"):
        raws = [original(kind, number, 0) for number in range(2_000)]
        seen = b"".join((raw.block or b"") + b"".join(name for name, _ in raw.fields) for raw in raws)
        assert all(each in seen for each in (b"\0", b"\xff\xfe", b"tarry-x", b"nats-x", "tüg".encode()))
        repeated = [raw for raw in raws if len({name for name, _ in raw.fields}) < len(raw.fields)]
        assert repeated or kind == "nats"
        assert not {name.lower() for name in NAMES} & set(READ_BY_RELAY)
        assert UNREADABLE not in seen
