"""Adds single rows at a steady rate in a process of its own, and watches the daemon's health.

Each add is sent when its time has come, whether or not those before it are answered, and is sent once. With each goes a
call that needs no store and waits in the same line for admission: a lookup of the topic's owner. `topics` alone uses
this module, which knows nothing of what else the daemon does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Awaitable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2

from benchmarks import load, many_topics, side_process, slow_store
from tarry.v1 import cluster_pb2, delayed_delivery_pb2
from tests._support.stubs import Stub

# No other ledger of these topics has this number.
LEDGER_ID = 1_000_000_000
TIMEOUT_S = 120.0
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
_OPENED, _END = "opened", "end"
_OK = grpc.StatusCode.OK.name
_RECONNECT = (("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call. Times are of `slow_store.clock_s` (seconds); `status` is the name of its gRPC status."""

    topic: str
    sent_s: float
    answered_s: float
    status: str

    @property
    def ok(self) -> bool:
        return self.status == _OK


@dataclasses.dataclass(frozen=True)
class Seen:
    """The calls of one process.

    `adds` and `lookups` are in the order of their sending. `health` says when it was reported as serving or not
    serving.
    """

    adds: Sequence[Call]
    lookups: Sequence[Call]
    health: Sequence[tuple[float, bool]]

    @property
    def first_served_s(self) -> float:
        """The time when the first add was answered, or infinity if none was."""
        return min((add.answered_s for add in self.adds if add.ok), default=math.inf)

    def served_adds(self, from_s: float, until_s: float) -> list[Call]:
        """Return the adds sent within that time to topics that had answered before."""
        served_s: dict[str, float] = {}
        for add in self.adds:
            if add.ok:
                served_s[add.topic] = min(add.answered_s, served_s.get(add.topic, add.answered_s))
        within = (add for add in self.adds if from_s <= add.sent_s < until_s)
        return [add for add in within if served_s.get(add.topic, np.inf) <= add.sent_s]

    def lookups_within(self, from_s: float, until_s: float) -> list[Call]:
        return [lookup for lookup in self.lookups if from_s <= lookup.sent_s < until_s]

    def health_lost(self, from_s: float, until_s: float) -> int:
        """Count how often health became not serving after serving, within that time."""
        pairs = itertools.pairwise(self.health)
        return sum(before and not now and from_s <= at_s < until_s for (_, before), (at_s, now) in pairs)

    def answered(self) -> dict[str, int]:
        """Return the number of durable rows by topic."""
        return _counted(self.adds, ok=True)

    def unknown(self) -> dict[str, int]:
        """Return the number of rows that may be durable or not, by topic."""
        return _counted(self.adds, ok=False)


def quantiles(calls: Sequence[Call]) -> dict[str, float]:
    """Return p50, p99 and maximum of the calls' times (ms), or nothing without calls."""
    taken_ms = [1000 * (call.answered_s - call.sent_s) for call in calls]
    return {name: float(np.percentile(taken_ms, share)) for name, share in QUANTILES.items() if taken_ms}


def _counted(adds: Sequence[Call], *, ok: bool) -> dict[str, int]:
    counts: dict[str, int] = {}
    for add in adds:
        if add.ok is ok:
            counts[add.topic] = counts.get(add.topic, 0) + 1
    return counts


class SingleAdds:
    """The adding process; a context manager, inside which calls go to the topics in turn, until `end`.

    No other process has added entry `first_entry` or a higher one.
    """

    def __init__(self, address: str, topics: Sequence[str], *, per_second: float, first_entry: int = 0) -> None:
        self._process = side_process.SideProcess(_call, address, tuple(topics), per_second, first_entry)

    def __enter__(self) -> Self:
        self._process.__enter__()
        return self

    def end(self) -> Seen:
        """Stop sending; return the calls when all are answered."""
        self._process.send(_END)
        seen: Seen = self._process.result()
        return seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, traceback)


def _call(address: str, topics: Sequence[str], per_second: float, first_entry: int, parent: Connection) -> None:
    asyncio.run(_Caller(address, topics, per_second, first_entry).run(parent))


class _Caller:
    def __init__(self, address: str, topics: Sequence[str], per_second: float, first_entry: int) -> None:
        self._address = address
        self._topics = topics
        self._per_second = per_second
        self._first_entry = first_entry
        self._adds: list[Call] = []
        self._lookups: list[Call] = []
        self._health: list[tuple[float, bool]] = []
        self._end = asyncio.Event()

    async def run(self, parent: Connection) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_RECONNECT) as channel:
            asyncio.get_running_loop().add_reader(parent.fileno(), self._end.set)
            watching = asyncio.create_task(self._watch(channel))
            parent.send(_OPENED)
            await self._call_until_end(channel)
            asyncio.get_running_loop().remove_reader(parent.fileno())
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        parent.send(Seen(_in_order(self._adds), _in_order(self._lookups), self._health))

    async def _call_until_end(self, channel: grpc.aio.Channel) -> None:
        """Make calls until the end; return when all are answered."""
        began_s = slow_store.clock_s()
        async with asyncio.TaskGroup() as calls:
            for number in itertools.count():
                wait_s = began_s + number / self._per_second - slow_store.clock_s()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._end.wait(), max(0.0, wait_s))
                if self._end.is_set():
                    return
                topic = self._topics[number % len(self._topics)]
                calls.create_task(self._add(channel, topic, number))
                calls.create_task(self._look_up(channel, topic))

    async def _add(self, channel: grpc.aio.Channel, topic: str, number: int) -> None:
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=topic,
            ledger_id=[LEDGER_ID],
            entry_id=[self._first_entry + number],
            deliver_at_ms=[load.now_ms() + many_topics.DUE_IN_MS],
        )
        stub = Stub(delayed_delivery_pb2, channel)
        self._adds.append(await _timed(topic, stub.AddMessages(request, timeout=TIMEOUT_S)))

    async def _look_up(self, channel: grpc.aio.Channel, topic: str) -> None:
        request = cluster_pb2.LookupTopicRequest(topic=topic)
        call = Stub(cluster_pb2, channel).LookupTopic(request, timeout=TIMEOUT_S)
        self._lookups.append(await _timed(topic, call))

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Watch health until the daemon ends, which counts as not serving."""
        method = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in method(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                self._health.append((slow_store.clock_s(), serving))
        self._health.append((slow_store.clock_s(), False))


async def _timed(topic: str, call: Awaitable[object]) -> Call:
    sent_s, status = slow_store.clock_s(), _OK
    try:
        await call
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    return Call(topic, sent_s, slow_store.clock_s(), status)


def _in_order(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: call.sent_s)
