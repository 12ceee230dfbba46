"""Inspects topics.

Has the calls that change nothing: counts, lists, pending rows. `tarry.calls` builds the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tarry import calls, columns, inspection, redelivery, results
from tarry.aio import connections

T = TypeVar("T")
P = TypeVar("P", inspection.ScheduledPage, inspection.BacklogPage, inspection.DeadLetterPage)


class Inspecting:
    """The inspection calls of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    def topics(self, *, timeout_s: float | None = None) -> AsyncIterator[inspection.TopicSummary]:
        """Yield the topics of the daemon, ordered by name, page by page.

        Example: `[topic.topic async for topic in client.topics() if topic.pending]`
        """
        return items(lambda token: self.topics_page(token, timeout_s=timeout_s))

    async def topics_page(
        self, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.TopicPage:
        """Return one page of topics, starting at the previous page's token; `page_size` 0 means 1,000, the maximum.

        Example: `(await client.topics_page()).topics_loading`
        """
        return await self._connections.run(
            self._calls.topics_page(page_token, page_size=page_size, timeout_s=timeout_s)
        )

    async def stats(self, topic: str, *, timeout_s: float | None = None) -> inspection.TopicStats:
        """Return the counts of one topic. Raises NotFound.

        Example: `(await client.stats("flights")).pending`
        """
        return await self._connections.run(self._calls.stats(topic, timeout_s=timeout_s))

    def buckets(self, topic: str, *, timeout_s: float | None = None) -> AsyncIterator[inspection.BucketSummary]:
        """Yield the sealed buckets of a topic, ordered by (first ledger, last ledger), page by page. Raises NotFound.

        Example: `sum([bucket.size_bytes async for bucket in client.buckets("flights")])`
        """
        return items(lambda token: self.buckets_page(topic, token, timeout_s=timeout_s))

    async def buckets_page(
        self, topic: str, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.BucketPage:
        """Return one page of buckets, as `topics_page` does. Raises NotFound.

        Example: `(await client.buckets_page("flights")).mutable_rows`
        """
        return await self._connections.run(
            self._calls.buckets_page(topic, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def subscriptions(
        self, topic: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[inspection.SubscriptionStats]:
        """Yield the subscriptions of a topic, ordered by name, page by page. Raises NotFound.

        Example: `max([each.backlog async for each in client.subscriptions("flights")])`
        """
        return items(lambda token: self.subscriptions_page(topic, token, timeout_s=timeout_s))

    async def subscriptions_page(
        self, topic: str, page_token: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> inspection.SubscriptionPage:
        """Return one page of subscriptions, as `topics_page` does. Raises NotFound.

        Example: `(await client.subscriptions_page("flights", page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.subscriptions_page(topic, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def consumers(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[inspection.ConsumerStats]:
        """Yield the consumers of a KEY_SHARED subscription in the order in which they joined, page by page.

        Yields none if no client has opened it as KEY_SHARED. Raises NotFound.
        Example: `{each.name: each.unacked async for each in client.consumers("flights", "departures")}`
        """
        return items(lambda token: self.consumers_page(topic, subscription, token, timeout_s=timeout_s))

    async def consumers_page(
        self,
        topic: str,
        subscription: str,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> inspection.ConsumerPage:
        """Return one page of consumers, as `topics_page` does, with what the keys wait for. Raises NotFound.

        Example: `(await client.consumers_page("flights", "departures", page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.consumers_page(topic, subscription, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    async def key_shared_stats(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> inspection.KeySharedStats | None:
        """Return what the keys of a subscription wait for, or None if no client opened it as KEY_SHARED.

        Raises NotFound.
        Example: `await client.key_shared_stats("flights", "departures")`
        """
        page = await self.consumers_page(topic, subscription, page_size=1, timeout_s=timeout_s)
        return page.key_shared

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
        """Yield the rows that are not due yet, in due order, as pages.

        `from_ms` and `until_ms` are Unix times (ms), the end excluded; None leaves that side open. `ledgers` is (first,
        last), both included. With `subscription`, only rows that it is owed. Raises NotFound.
        Example: `async for page in client.scheduled("flights", until_ms=noon_ms): print(page.entry_id)`
        """
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
        """Return one page of rows that are not due yet, starting at the previous page's token.

        `page_size` is at most 10,000; 0 means 1,000. The other arguments are those of `scheduled`.
        Example: `(await client.scheduled_page("flights", page_size=10)).deliver_at_ms`
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
        """Return the exact number of rows that come due in each of many bars of one width.

        `from_ms` None means now, `until_ms` None means after the last row, and `width_ms` None means about 60 bars of a
        round width. The other arguments are those of `scheduled`. Raises NotFound.
        Example: `(await client.histogram("flights", width_ms=60_000)).rows.max()`
        """
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

    async def retention(
        self, topic: str, ledger_id: columns.Column | None = None, *, timeout_s: float | None = None
    ) -> inspection.Retention:
        """Return what a topic needs of its message log: for each ledger the lowest entry with a row, waiting or due.

        `ledger_id` restricts the answer to these ledgers; one missing from the answer holds nothing. None means all.
        A log may be cut below the lowest position, as far as its messages have been added, less those that consumers
        may still negatively acknowledge. Raises NotFound, or Unsupported if the daemon is too old to report it.
        Example: `(await client.retention("flights")).lowest_position`
        """
        return await self._connections.run(self._calls.retention(topic, ledger_id, timeout_s=timeout_s))

    def backlog(
        self,
        topic: str,
        subscription: str,
        *,
        ledgers: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[inspection.BacklogPage]:
        """Yield the rows that a subscription is owed, due and unacknowledged, in due order, as pages like `scheduled`.

        Example: `sum([len(page) async for page in client.backlog("flights", "departures")])`
        """
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
        """Return one page of a backlog, as `scheduled_page` does. Raises NotFound.

        Example: `(await client.backlog_page("flights", "departures")).state`
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
        """Yield the dead letters of a subscription, oldest first, as pages like `scheduled`.

        `which` None means all. Raises NotFound, or InvalidArgument if a range ends before it begins.
        Example: `async for page in client.dead_letters("flights", "departures"): print(page.dead_letter_id)`
        """
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
        """Return one page of dead letters, as `scheduled_page` does. Raises NotFound, InvalidArgument.

        Example: `(await client.dead_letters_page("flights", "departures", page_size=10)).dead_letter_id`
        """
        return await self._connections.run(
            self._calls.dead_letters_page(
                topic, subscription, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    async def lookup(self, topic: str, *, timeout_s: float | None = None) -> results.TopicLocation:
        """Return the shard of a topic and its owner, even if the topic does not exist; any daemon answers.

        Example: `(await client.lookup("flights")).owner_address`
        """
        return await self._connections.run(self._calls.lookup(topic, timeout_s=timeout_s))


async def items(page_from: Callable[[str], Awaitable[inspection.Page[T]]]) -> AsyncIterator[T]:
    """Yield the items of a list, page by page."""
    token = ""
    while True:
        page = await page_from(token)
        for item in page.items:
            yield item
        token = page.next_page_token
        if not token:
            return


async def _pages(page_from: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
    """Yield all pages that are not empty."""
    token = ""
    while True:
        page = await page_from(token)
        if len(page):
            yield page
        token = page.next_page_token
        if not token:
            return
