"""What the relays of the examples do with an id that Tarry has not given. All else is in `tests/wire`, with brokers."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

import tarry
from examples import nats_relay, redis_relay

GOOD = "0-17-1795773600000-0"
# No id, and one that the daemon refuses: it has never handed out so high a count.
TEXTS = ("none", "0-17-1795773600000-4294967295", "", GOOD)


class Subscription:
    """Takes what a daemon takes."""

    def __init__(self) -> None:
        self.handed_back: list[int] = []

    def nack(self, positions: Any, *, forwarded: bool) -> asyncio.Future[None]:
        assert forwarded
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if positions.redelivery_count[0] == 2**32 - 1:
            done.set_exception(tarry.InvalidArgument("redelivery_count[0]: 4294967295"))
        else:
            self.handed_back += positions.entry_id.tolist()
            done.set_result(None)
        return done


class Message:
    """Of NATS."""

    metadata = types.SimpleNamespace(sequence=types.SimpleNamespace(stream=5))

    def __init__(self, text: str) -> None:
        self.headers = {"tarry-delivery-id": text} if text else None
        self.is_committed = False

    async def ack(self) -> None:
        self.is_committed = True


async def test_beside_nats_it_is_committed_and_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [Message(text) for text in TEXTS]

    async def pushed(js: object, name: str) -> AsyncIterator[Message]:
        for each in messages:
            yield each

    monkeypatch.setattr(nats_relay, "pushed", pushed)
    subscription: Any = Subscription()
    async with asyncio.TaskGroup() as tasks:
        await nats_relay.take_back(None, subscription, tasks)
    assert subscription.handed_back == [17]
    assert all(each.is_committed for each in messages)


async def test_beside_redis_it_is_committed_and_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = []
    values = [*(text.encode() for text in TEXTS if text), b"\xff"]
    entries = [(b"1-0", {}), *((b"1-0", {b"tarry-delivery-id": value}) for value in values)]

    async def portions(broker: object, stream: str) -> AsyncIterator[Any]:
        yield entries
        committed.append(len(entries))

    monkeypatch.setattr(redis_relay, "portions", portions)
    subscription: Any = Subscription()
    await redis_relay.take_back(None, subscription)
    assert subscription.handed_back == [17]
    assert committed == [5]
