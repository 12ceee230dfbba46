"""Dispatchers that open one stream, never another, and note what comes on it.

They speak plain gRPC: a client that opens streams again would hide that one was broken.

Owns: the thread and the notes. Does not own: the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from typing import Self

import grpc

from tarry.v1 import dispatch_pb2
from tests._support.stubs import Stub
from tests.wire._support.traffic import CHANNEL_OPTIONS

PERMITS = 10_000
PATIENCE_S = 600.0

Position = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Came:
    """Rows that came together, and when (monotonic)."""

    at_s: float
    positions: tuple[Position, ...]


def shared(topic: str, subscription: str) -> dispatch_pb2.Open:
    return dispatch_pb2.Open(topic=topic, subscription=subscription, type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED)


def by_key(topic: str, subscription: str, consumer: str) -> dispatch_pb2.Open:
    """With one consumer of that name."""
    return dispatch_pb2.Open(
        topic=topic,
        subscription=subscription,
        type=dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED,
        consumers=[dispatch_pb2.Consumer(consumer_id=1, name=consumer, permits=PERMITS)],
    )


class Listener:
    """It acknowledges nothing. A context manager: inside its stream is open, until `ended` is set."""

    def __init__(self, address: str, opening: dispatch_pb2.Open) -> None:
        self.came: list[Came] = []
        self.ended = threading.Event()
        self._opened = threading.Event()
        self._asked: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None] = queue.SimpleQueue()
        self._asked.put(dispatch_pb2.SubscribeRequest(open=opening))
        if opening.type == dispatch_pb2.SUBSCRIPTION_TYPE_SHARED:
            self._asked.put(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=PERMITS)))
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call = Stub(dispatch_pb2, self._channel).Subscribe(iter(self._asked.get, None))
        self._thread = threading.Thread(target=self._run, name=f"listens to {opening.topic}")

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._opened.wait(PATIENCE_S):
            self.__exit__()
            raise AssertionError("the stream does not open")
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.put(None)
        self._call.cancel()
        self._channel.close()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                self._opened.set()
                if response.HasField("messages"):
                    rows = response.messages
                    self.came.append(Came(time.monotonic(), tuple(zip(rows.ledger_id, rows.entry_id, strict=True))))
        self.ended.set()

    @property
    def positions(self) -> set[Position]:
        return {position for each in self.came for position in each.positions}

    def wait_for(self, positions: set[Position]) -> None:
        """Until all of these have come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while left := positions - self.positions:
            assert time.monotonic() < deadline_s, f"{len(left)} rows did not come, for instance {min(left)}"
            threading.Event().wait(0.02)
