"""What a carrier consists of, as processes: its broker, and the relay or the worker beside it.

Owns: starting them in their order, and which of them may be killed. Does not own: the daemon, and what is carried.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from benchmarks import carrying, nats_carriers, redis_carriers
from benchmarks.handing_back import HandingBack
from examples import processes
from tests.brokers import nats_server, redis_server

BROKER, RELAY, WORKER = "broker", "relay", "worker"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Processes that run, by what they are."""

    carrier: carrying.Carrier
    victims: Mapping[str, carrying.Victim]


@contextlib.asynccontextmanager
async def relayed_by_redis(directory: Path, address: str, handing_back: HandingBack) -> AsyncIterator[Setting]:
    """`address`: of a daemon that serves."""
    with _redis(directory) as (server, broker):
        program = carrying.Program(directory, "examples.redis_relay", "--redis", server.url, "--address", address)
        with _started(program) as relay:
            yield Setting(redis_carriers.RedisRelayed(server.url, handing_back), {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def relayed_by_nats(directory: Path, address: str, handing_back: HandingBack) -> AsyncIterator[Setting]:
    """`address`: of a daemon that serves."""
    with _nats(directory) as (server, broker):
        carrier = nats_carriers.NatsRelayed(server.url, handing_back)
        await carrier.create_streams()
        program = carrying.Program(directory, "examples.nats_relay", "--nats", server.url, "--address", address)
        with _started(program) as relay:
            yield Setting(carrier, {BROKER: broker, RELAY: relay})


@contextlib.asynccontextmanager
async def sorted_by_redis(directory: Path) -> AsyncIterator[Setting]:
    """A sorted set and its worker."""
    with _redis(directory) as (server, broker):
        program = carrying.Program(directory, "benchmarks.sorted_set_worker", server.url)
        with _started(program) as worker:
            yield Setting(redis_carriers.RedisSortedSet(server.url), {BROKER: broker, WORKER: worker})


@contextlib.asynccontextmanager
async def scheduled_by_nats(directory: Path) -> AsyncIterator[Setting]:
    """The server alone."""
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


def _serving(server: redis_server.RedisServer | nats_server.NatsServer) -> carrying.Victim:
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
