"""Starts the processes of a carrier: its broker, and the relay or the worker next to it.

It also says which of them may be killed. `relays` alone uses this module, which stands apart so that the measurement is
free of the brokers' details.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from benchmarks import carrying, kafka_carriers, nats_carriers, redis_carriers
from benchmarks.handing_back import HandingBack
from examples import nats_relay, processes, redis_relay
from tests.brokers import kafka_server, nats_server, redis_server

_Server = redis_server.RedisServer | nats_server.NatsServer | kafka_server.KafkaServer
BROKER, RELAY, WORKER = "broker", "relay", "worker"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The running processes of a carrier, by role."""

    carrier: carrying.Carrier
    victims: Mapping[str, carrying.Victim]


# The configuration of `tarry-relay`, with which producers and consumers are those of the examples' relays
_RELAY_FILE = """
daemon = {{ address = "{address}" }}
broker = {{ kind = "{kind}", url = "{url}", {more} }}
targets = [{{ name = "{due}" }}]
retry = {{ name = "{failed}", delays_ms = [{retry_ms}] }}

[relay]
topic = "{source}"
listen = "127.0.0.1:{port}"

[source]
name = "{source}"
target = "{due}"
on_bad = "stop"
headers = {{ deliver_at = "deliver-at-ms" }}
"""


@contextlib.asynccontextmanager
async def relayed_by_redis(directory: Path, address: str, handing_back: HandingBack) -> AsyncIterator[Setting]:
    """Start Redis and the examples' relay. `address` is that of a serving daemon."""
    with _redis(directory) as (server, broker):
        program = carrying.Program(directory, "examples.redis_relay", "--redis", server.url, "--address", address)
        with _started(program) as relay:
            yield Setting(redis_carriers.RedisRelayed(server.url, handing_back), {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def relayed_by_nats(directory: Path, address: str, handing_back: HandingBack) -> AsyncIterator[Setting]:
    """Start NATS and the examples' relay. `address` is that of a serving daemon."""
    with _nats(directory) as (server, broker):
        carrier = nats_carriers.NatsRelayed(server.url, handing_back)
        await carrier.create_streams()
        program = carrying.Program(directory, "examples.nats_relay", "--nats", server.url, "--address", address)
        with _started(program) as relay:
            yield Setting(carrier, {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def tarry_relay_of_redis(directory: Path, address: str) -> AsyncIterator[Setting]:
    """Start Redis and `tarry-relay`. `address` is that of a serving daemon."""
    with _redis(directory) as (server, broker):
        names = {"source": redis_relay.SOURCE, "due": redis_relay.DUE, "failed": redis_relay.FAILED}
        told = {"kind": "redis", "url": server.url, "more": "claim_s = 2", **names}
        with _started(_tarry_relay(directory, address, told)) as relay:
            yield Setting(redis_carriers.RedisRelayed(server.url, None), {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def tarry_relay_of_nats(directory: Path, address: str) -> AsyncIterator[Setting]:
    """Start NATS and `tarry-relay`. `address` is that of a serving daemon."""
    with _nats(directory) as (server, broker):
        carrier = nats_carriers.NatsRelayed(server.url, None)
        await carrier.create_streams()
        names = {"source": nats_relay.SOURCE, "due": nats_relay.DUE, "failed": nats_relay.FAILED}
        told = {"kind": "nats", "url": server.url, "more": "ack_wait_s = 2", **names}
        with _started(_tarry_relay(directory, address, told)) as relay:
            yield Setting(carrier, {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def tarry_relay_of_kafka(directory: Path, address: str) -> AsyncIterator[Setting]:
    """Start Kafka and `tarry-relay`. `address` is that of a serving daemon."""
    if (jars := kafka_server.find()) is None:
        raise processes.ProcessFailed(kafka_server.MISSING)
    with kafka_server.KafkaServer(jars, directory) as server:
        broker = _serving(server)
        carrier = kafka_carriers.KafkaRelayed(server)
        carrier.create_topics()
        names = {"source": kafka_carriers.SOURCE, "due": kafka_carriers.DUE, "failed": kafka_carriers.FAILED}
        # The relay does not search the output for a message that exists: it waits as long as the producer.
        told = {"kind": "kafka", "url": server.url, "more": "confirm_s = 120", **names}
        with _started(_tarry_relay(directory, address, told)) as relay:
            yield Setting(carrier, {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def sorted_by_redis(directory: Path) -> AsyncIterator[Setting]:
    """Start Redis with a sorted set and its worker."""
    with _redis(directory) as (server, broker):
        program = carrying.Program(directory, "benchmarks.sorted_set_worker", server.url)
        with _started(program) as worker:
            yield Setting(redis_carriers.RedisSortedSet(server.url), {BROKER: broker, WORKER: worker})


@contextlib.asynccontextmanager
async def scheduled_by_nats(directory: Path) -> AsyncIterator[Setting]:
    """Start the NATS server alone."""
    with _nats(directory) as (server, broker):
        carrier = nats_carriers.NatsScheduled(server.url)
        await carrier.create_streams()
        yield Setting(carrier, {BROKER: broker})


@contextlib.contextmanager
def _redis(directory: Path) -> Iterator[tuple[redis_server.RedisServer, carrying.Victim]]:
    if (program := redis_server.find()) is None:
        raise processes.ProcessFailed(redis_server.MISSING)
    with redis_server.RedisServer(program, directory) as server:
        yield server, _serving(server)


@contextlib.contextmanager
def _nats(directory: Path) -> Iterator[tuple[nats_server.NatsServer, carrying.Victim]]:
    if (program := nats_server.find()) is None:
        raise processes.ProcessFailed(nats_server.MISSING)
    with nats_server.NatsServer(program, directory) as server:
        yield server, _serving(server)


def _serving(server: _Server) -> carrying.Victim:
    def start() -> None:
        server.start()
        server.wait_until_loaded()

    start()
    return carrying.Victim(server, start)


@contextlib.contextmanager
def _started(program: carrying.Program) -> Iterator[carrying.Victim]:
    with program:
        program.start()
        yield carrying.Victim(program, program.start)


def _tarry_relay(directory: Path, address: str, told: Mapping[str, str]) -> carrying.Program:
    file = directory / "relay.toml"
    port = processes.free_port()
    file.write_text(_RELAY_FILE.format(address=address, port=port, retry_ms=carrying.RETRY_MS, **told))
    return carrying.Program(directory, "tarry_relay.relay_command", "run", str(file))
