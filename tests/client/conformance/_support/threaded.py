"""The client of threads in the clothes of the one of an event loop, so that one test runs on both.

Owns: calling in threads what blocks there, and awaiting its futures. Does not own: any behaviour of a client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, TypeVar, cast

import tarry
import tarry.aio

T = TypeVar("T")

_THREADS = concurrent.futures.ThreadPoolExecutor(max_workers=32, thread_name_prefix="conformance")
_END = object()


async def in_thread(blocking: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Calls what blocks, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(blocking, *arguments, **named))


def threaded(client: tarry.Client) -> tarry.aio.Client:
    """It looks like the other client, and is the client of threads."""
    return cast(tarry.aio.Client, _Client(client))


class _Threaded:
    """Every method is called in a thread; properties are read."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._wrapped, name)
        return functools.partial(in_thread, attribute) if callable(attribute) else attribute

    async def __aenter__(self) -> Any:
        await in_thread(self._wrapped.__enter__)
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await in_thread(self._wrapped.__exit__, *failure)


class _Client(_Threaded):
    def topics(self, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.topics(**named))

    def buckets(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.buckets(*arguments, **named))

    def subscriptions(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.subscriptions(*arguments, **named))

    def consumers(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.consumers(*arguments, **named))

    def scheduled(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.scheduled(*arguments, **named))

    def backlog(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.backlog(*arguments, **named))

    def dead_letters(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.dead_letters(*arguments, **named))

    def pending_deletes(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.pending_deletes(*arguments, **named))

    def dead_deletes(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.dead_deletes(*arguments, **named))

    def ended_deletes(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.ended_deletes(*arguments, **named))

    def sweep_orphans(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.sweep_orphans(*arguments, **named))

    def collect_garbage(self, **named: Any) -> AsyncIterator[Any]:
        return _iterate(self._wrapped.collect_garbage(**named))

    def add_stream(self, *arguments: Any, **named: Any) -> _AddStream:
        return _AddStream(self._wrapped.add_stream(*arguments, **named))

    def producer(self, *arguments: Any, **named: Any) -> _AddStream:
        return _AddStream(self._wrapped.producer(*arguments, **named))

    def subscribe(self, *arguments: Any, **named: Any) -> tarry.aio.Opening[Any]:
        async def opening() -> Any:
            return _Subscription(await in_thread(self._wrapped.subscribe, *arguments, **named))

        return tarry.aio.Opening(opening)

    def subscribe_key_shared(self, *arguments: Any, **named: Any) -> tarry.aio.Opening[Any]:
        async def opening() -> Any:
            return _Subscription(await in_thread(self._wrapped.subscribe_key_shared, *arguments, **named))

        return tarry.aio.Opening(opening)


class _AddStream(_Threaded):
    async def add(self, *arguments: Any, **named: Any) -> _Answer:
        return _Answer(await in_thread(self._wrapped.add, *arguments, **named))


class _Subscription(_Threaded):
    def ack(self, given: Any) -> _Answer:
        return _Answer(self._wrapped.ack(given))

    def nack(self, given: Any, **named: Any) -> _Answer:
        return _Answer(self._wrapped.nack(given, **named))

    def reject(self, given: Any, reason: str = "", **named: Any) -> _Answer:
        return _Answer(self._wrapped.reject(given, reason, **named))

    def extend(self, given: Any) -> _Answer:
        return _Answer(self._wrapped.extend(given))

    def add_consumer(self, consumer: tarry.Consumer) -> _Answer:
        return _Answer(self._wrapped.add_consumer(consumer))

    def remove_consumer(self, consumer: tarry.Consumer) -> _Answer:
        return _Answer(self._wrapped.remove_consumer(consumer))

    def plan(self, *arguments: Any, **named: Any) -> _Answer:
        return _Answer(self._wrapped.plan(*arguments, **named))

    def mark_delete(self, ledger_id: int, entry_id: int) -> _Answer:
        return _Answer(self._wrapped.mark_delete(ledger_id, entry_id))

    def ack_unconfirmed(self, given: Any) -> None:
        self._wrapped.ack_unconfirmed(given)

    def release(self, given: Any) -> None:
        self._wrapped.release(given)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(iter(self._wrapped))


class _Answer:
    """A future of a thread that an event loop can await."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


async def _iterate(items: Any) -> AsyncIterator[Any]:
    while (item := await in_thread(next, items, _END)) is not _END:
        yield item
