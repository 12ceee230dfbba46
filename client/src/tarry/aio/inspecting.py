"""Looking at topics, on the event loop.

Owns: the calls of a client that change nothing: counts, lists, what is pending.
Does not own: requests and answers (`tarry.calls`), and performing them (`tarry.aio.connections`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tarry import calls, consumer_stats, inspection, redelivery, results
from tarry.aio import connections

T = TypeVar("T")
P = TypeVar("P", inspection.ScheduledPage, inspection.BacklogPage, inspection.DeadLetterPage)


class Inspecting:
    """A part of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    def topics(self, *, timeout_s: float | None = None) -> AsyncIterator[inspection.TopicSummary]:
        """As `tarry.Client.topics`."""
        return items(lambda token: self.topics_page(token, timeout_s=timeout_s))

    async def topics_page(
        self, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.TopicPage:
        """One page of topics, from the token of the page before on; `page_size` 0 = 1,000, which is also the most.

        Example: `client.topics_page().topics_loading`
        """
        return await self._connections.run(
            self._calls.topics_page(page_token, page_size=page_size, timeout_s=timeout_s)
        )

    async def stats(self, topic: str, *, timeout_s: float | None = None) -> inspection.TopicStats:
        """As `tarry.Client.stats`."""
        return await self._connections.run(self._calls.stats(topic, timeout_s=timeout_s))

    def buckets(self, topic: str, *, timeout_s: float | None = None) -> AsyncIterator[inspection.BucketSummary]:
        """As `tarry.Client.buckets`."""
        return items(lambda token: self.buckets_page(topic, token, timeout_s=timeout_s))

    async def buckets_page(
        self, topic: str, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.BucketPage:
        """One page of buckets, as `topics_page`. Raises NotFound.

        Example: `client.buckets_page("flights").mutable_rows`
        """
        return await self._connections.run(
            self._calls.buckets_page(topic, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def subscriptions(
        self, topic: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[inspection.SubscriptionStats]:
        """As `tarry.Client.subscriptions`."""
        return items(lambda token: self.subscriptions_page(topic, token, timeout_s=timeout_s))

    async def subscriptions_page(
        self, topic: str, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.SubscriptionPage:
        """One page of subscriptions, as `topics_page`. Raises NotFound.

        Example: `client.subscriptions_page("flights", page_size=10).items`
        """
        return await self._connections.run(
            self._calls.subscriptions_page(topic, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def consumers(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[consumer_stats.ConsumerStats]:
        """As `tarry.Client.consumers`."""
        return items(lambda token: self.consumers_page(topic, subscription, token, timeout_s=timeout_s))

    async def consumers_page(
        self,
        topic: str,
        subscription: str,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> consumer_stats.ConsumerPage:
        """As `tarry.Client.consumers_page`."""
        return await self._connections.run(
            self._calls.consumers_page(topic, subscription, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    async def key_shared_stats(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> consumer_stats.KeySharedStats | None:
        """As `tarry.Client.key_shared_stats`."""
        return (await self.consumers_page(topic, subscription, page_size=1, timeout_s=timeout_s)).key_shared

    def scheduled(
        self,
        topic: str,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        ledgers: tuple[int, int] | None = None,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[inspection.ScheduledPage]:
        """As `tarry.Client.scheduled`."""
        return _pages(
            lambda token: self.scheduled_page(
                topic,
                token,
                from_ms=from_ms,
                until_ms=until_ms,
                ledgers=ledgers,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    async def scheduled_page(
        self,
        topic: str,
        page_token: str = "",
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        ledgers: tuple[int, int] | None = None,
        subscription: str | None = None,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> inspection.ScheduledPage:
        """One page of rows that are not due yet, from the token of the page before on; `page_size` 0 = 1,000, at most
        10,000. The rest as `scheduled`.

        Example: `client.scheduled_page("flights", page_size=10).deliver_at_ms`
        """
        return await self._connections.run(
            self._calls.scheduled_page(
                topic,
                page_token,
                from_ms=from_ms,
                until_ms=until_ms,
                ledgers=ledgers,
                subscription=subscription,
                page_size=page_size,
                timeout_s=timeout_s,
            )
        )

    async def histogram(
        self,
        topic: str,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        width_ms: int | None = None,
        ledgers: tuple[int, int] | None = None,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> inspection.Histogram:
        """As `tarry.Client.histogram`."""
        return await self._connections.run(
            self._calls.histogram(
                topic,
                from_ms=from_ms,
                until_ms=until_ms,
                width_ms=width_ms,
                ledgers=ledgers,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    def backlog(
        self,
        topic: str,
        subscription: str,
        *,
        ledgers: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[inspection.BacklogPage]:
        """As `tarry.Client.backlog`."""
        return _pages(lambda token: self.backlog_page(topic, subscription, token, ledgers=ledgers, timeout_s=timeout_s))

    async def backlog_page(
        self,
        topic: str,
        subscription: str,
        page_token: str = "",
        *,
        ledgers: tuple[int, int] | None = None,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> inspection.BacklogPage:
        """One page of a backlog, as `scheduled_page`. Raises NotFound.

        Example: `client.backlog_page("flights", "departures").state`
        """
        return await self._connections.run(
            self._calls.backlog_page(
                topic, subscription, page_token, ledgers=ledgers, page_size=page_size, timeout_s=timeout_s
            )
        )

    def dead_letters(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[inspection.DeadLetterPage]:
        """As `tarry.Client.dead_letters`."""
        return _pages(lambda token: self.dead_letters_page(topic, subscription, which, token, timeout_s=timeout_s))

    async def dead_letters_page(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None = None,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> inspection.DeadLetterPage:
        """As `tarry.Client.dead_letters_page`."""
        return await self._connections.run(
            self._calls.dead_letters_page(
                topic, subscription, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    async def lookup(self, topic: str, *, timeout_s: float | None = None) -> results.TopicLocation:
        """As `tarry.Client.lookup`."""
        return await self._connections.run(self._calls.lookup(topic, timeout_s=timeout_s))


async def items(page_from: Callable[[str], Awaitable[inspection.Page[T]]]) -> AsyncIterator[T]:
    """What is listed, page by page."""
    token = ""
    while True:
        page = await page_from(token)
        for item in page.items:
            yield item
        token = page.next_page_token
        if not token:
            return


async def _pages(page_from: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
    token = ""
    while True:
        page = await page_from(token)
        if len(page):
            yield page
        token = page.next_page_token
        if not token:
            return
