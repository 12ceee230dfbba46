"""What the engine that is all in memory shows of its topics.

Owns: lists, counts and pages, made row by row. Does not own: the rows (`fake_topic`) and what changes them
(`fake_engine`).
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from daemon import call_values, errors
from daemon.core import limits
from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.retention import RetentionScan
from daemon.core.index.scan import Place
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import U64, Rows
from tests._support.fake_topic import EPOCH, Subscription, Topic

PAGE_DEFAULT, PAGE_MAX, BARS_MAX = 1_000, 10_000, 10_000

# deliver_at_ms, ledger, entry, the subscription whose own index it is in, 0 the shared one.
Shown = tuple[int, ...]


class FakeViews(abc.ABC):
    """The calls that only look."""

    topics: dict[str, Topic]
    rebuild_needed: tuple[RebuildNeeded, ...]
    now_ms: Callable[[], int]

    @abc.abstractmethod
    def _topic(self, topic: str) -> Topic: ...

    @abc.abstractmethod
    def find(self, topic: str, subscription: str) -> Subscription: ...

    @abc.abstractmethod
    def _check_names(self, topic: str, subscription: str | None = None) -> None: ...

    async def list_topics(self, page_size: int, after: str, prefixes: tuple[str, ...]) -> call_values.TopicPage:
        shown = {name: topic for name, topic in self.topics.items() if name.startswith(prefixes)}
        page, next_after = _page(shown, page_size, after)
        return call_values.TopicPage(
            topics=tuple(
                call_values.TopicSummary(
                    topic=name,
                    shard=0,
                    pending=self.topics[name].pending(self.now_ms()),
                    buckets=len(self.topics[name].buckets),
                    subscriptions=len(self.topics[name].subscriptions),
                    next_due_ms=self.topics[name].next_due_ms(self.now_ms()),
                    due=self.topics[name].due(self.now_ms()),
                )
                for name in page
            ),
            next_after=next_after,
            as_of_ms=self.now_ms(),
            topics_loading=0,
            topics_damaged=0,
        )

    async def topic_stats(self, topic: str) -> call_values.TopicStats:
        known = self._topic(topic)
        return call_values.TopicStats(
            topic=topic,
            topic_id="id",
            shard=0,
            epoch=EPOCH,
            incarnation=known.incarnation,
            pending=known.pending(self.now_ms()),
            mutable_rows=len(known.mutable),
            buckets=len(known.buckets),
            bucket_bytes=0,
            loaded_rows=0,
            next_due_ms=known.next_due_ms(self.now_ms()),
            oldest_due_ms=0,
            applied_slot=0,
            subscriptions=tuple(known.stats(name, self.now_ms()) for name in sorted(known.subscriptions)),
            as_of_ms=self.now_ms(),
            rebuild_needed=self.rebuild_needed,
            last_due_ms=max((row[0] for row in known.scheduled(None, self.now_ms())), default=0),
            merges=0,
            survey=_survey(known.lowest_entries()),
            due=known.due(self.now_ms()),
        )

    async def retained(
        self, topic: str, ledger_ids: U64 | None, page_size: int, after: int | None
    ) -> call_values.RetentionPage:
        known = self._topic(topic)
        lowest = known.lowest_entries()
        _check_asked(ledger_ids)
        asked = sorted(lowest) if ledger_ids is None else sorted(set(lowest) & set(ledger_ids.tolist()))
        left = [ledger_id for ledger_id in asked if after is None or ledger_id > after]
        page = left[: limits.page_rows(page_size)]
        return call_values.RetentionPage(
            ledger_id=np.array(page, np.uint64),
            lowest_entry_id=np.array([lowest[ledger_id] for ledger_id in page], np.uint64),
            uncertain=tuple((needed.first_ledger_id, needed.last_ledger_id) for needed in self.rebuild_needed),
            next_after=page[-1] if len(page) < len(left) else None,
            as_of_ms=self.now_ms(),
        )

    async def list_subscriptions(self, topic: str, page_size: int, after: str) -> call_values.SubscriptionPage:
        known = self._topic(topic)
        page, next_after = _page(known.subscriptions, page_size, after)
        return call_values.SubscriptionPage(
            subscriptions=tuple(known.stats(name, self.now_ms()) for name in page),
            next_after=next_after,
            as_of_ms=self.now_ms(),
        )

    async def list_consumers(
        self, topic: str, subscription: str, page_size: int, after: int
    ) -> call_values.ConsumerPage:
        """Nobody has a subscription open as KEY_SHARED here."""
        self.find(topic, subscription)
        return call_values.ConsumerPage((), next_after=None, as_of_ms=self.now_ms(), key_shared=None)

    async def list_buckets(self, topic: str, page_size: int, after: str) -> call_values.BucketPage:
        known = self._topic(topic)
        page, next_after = _page(known.buckets, page_size, after)
        return call_values.BucketPage(
            buckets=tuple(known.bucket(name, self.now_ms()) for name in page),
            next_after=next_after,
            as_of_ms=self.now_ms(),
            mutable_rows=len(known.mutable),
        )

    async def list_scheduled(
        self, topic: str, view: call_values.View, page_size: int, after: Place | None
    ) -> call_values.ScheduledPage:
        self._check_names(topic, view.subscription)
        known = self._topic(topic)
        rows = _within(view, known.scheduled(_known(known, topic, view.subscription), self.now_ms()))
        page, next_after = _rows_after(rows, page_size, after)
        names = ["", *sorted({known.name_of(row[3]) for row in page if row[3]})]
        return call_values.ScheduledPage(
            rows=_columns(known, page),
            subscription_index=np.array([names.index(known.name_of(row[3])) for row in page], np.uint32),
            subscriptions=tuple(names),
            next_after=next_after,
            as_of_ms=self.now_ms(),
        )

    async def histogram(self, topic: str, view: call_values.View, width_ms: int) -> call_values.Histogram:
        self._check_names(topic, view.subscription)
        known = self._topic(topic)
        found = known.scheduled(_known(known, topic, view.subscription), self.now_ms())
        times = [row[0] for row in _within(call_values.View(ledgers=view.ledgers), found)]
        from_ms = view.from_ms or self.now_ms()
        until_ms = view.until_ms or max([from_ms, *(time_ms + 1 for time_ms in times)])
        if until_ms < from_ms:
            raise errors.InvalidArgument(f"until_ms: {until_ms} is before from_ms, {from_ms}")
        width_ms = width_ms or max(1, (until_ms - from_ms) // 60)
        count = -(-(until_ms - from_ms) // width_ms)
        if count > BARS_MAX:
            raise errors.InvalidArgument(f"width_ms: {width_ms} makes {count} bars, the limit is {BARS_MAX}")
        until_ms = view.until_ms or from_ms + count * width_ms
        bars = collections.Counter((each - from_ms) // width_ms for each in times if from_ms <= each < until_ms)
        return call_values.Histogram(
            from_ms=from_ms,
            until_ms=until_ms,
            width_ms=width_ms,
            rows=np.array([bars[number] for number in range(count)], np.int64),
            rows_before=sum(each < from_ms for each in times),
            rows_after=sum(each >= until_ms for each in times),
            segments_counted=0,
            segments_read=0,
            as_of_ms=self.now_ms(),
        )

    async def list_backlog(
        self,
        topic: str,
        subscription: str,
        ledgers: tuple[int, int] | None,
        page_size: int,
        after: Place | None,
    ) -> call_values.BacklogPage:
        self._check_names(topic, subscription)
        known = self._topic(topic)
        _known(known, topic, subscription)
        state = known.subscriptions[subscription]
        # Messages of a batch come after their entry.
        rows = [(*row[:3], row[3] + 1 if len(row) > 3 else 0) for row in known.backlog(state, self.now_ms())]
        page, next_after = _rows_after(_within(call_values.View(ledgers=ledgers), rows), page_size, after)
        named = [row[:3] if not row[3] else (*row[:3], row[3] - 1) for row in page]
        redeliver_at_ms = np.array([state.nacked.get(row, 0) for row in named], np.uint64)
        counts = np.array([state.counts.get(row, 0) for row in named], np.uint32)
        parts = np.array([row[3] if len(row) > 3 else NO_BATCH_INDEX for row in named], np.uint32)
        return call_values.BacklogPage(
            rows=_columns(known, page),
            in_flight=np.array([row[1:] in state.in_flight for row in named], np.bool_),
            redeliver_at_ms=redeliver_at_ms if redeliver_at_ms.any() else None,
            redelivery_count=counts if counts.any() else None,
            batch_index=parts if (parts != NO_BATCH_INDEX).any() else None,
            next_after=next_after,
            as_of_ms=self.now_ms(),
        )


def _known(known: Topic, topic: str, subscription: str | None) -> str | None:
    if subscription is not None and subscription not in known.subscriptions:
        raise errors.NotFound(f"subscription: there is no {subscription!r} of topic {topic!r}")
    return subscription


def _within(view: call_values.View, rows: Iterable[Shown]) -> list[Shown]:
    if view.until_ms and view.until_ms < view.from_ms:
        raise errors.InvalidArgument(f"until_ms: {view.until_ms} is before from_ms, {view.from_ms}")
    first, last = view.ledgers or (0, (1 << 64) - 1)
    if last < first:
        raise errors.InvalidArgument(f"last_ledger_id: {last} is before first_ledger_id, {first}")
    until_ms = view.until_ms or 1 << 64
    return [row for row in rows if view.from_ms <= row[0] < until_ms and first <= row[1] <= last]


def _rows_after(rows: Iterable[Shown], page_size: int, after: Place | None) -> tuple[list[Shown], Place | None]:
    if page_size > PAGE_MAX:
        raise errors.InvalidArgument(f"page_size: {page_size}, the limit is {PAGE_MAX}")
    size = page_size or PAGE_DEFAULT
    rest = sorted(row for row in rows if after is None or row > tuple(after))
    return rest[:size], Place(*rest[size - 1]) if len(rest) > size else None


def _columns(known: Topic, rows: list[Shown]) -> Rows:
    due, ledger_id, entry_id, _ = zip(*rows, strict=True) if rows else ((), (), (), ())
    hashes = [known.key_hash((row[1], row[2])) for row in rows]
    return Rows(
        np.array(due, np.uint64),
        np.array(ledger_id, np.uint64),
        np.array(entry_id, np.uint64),
        np.array(hashes, np.uint32) if any(hashes) else None,
    )


def _page(names: Iterable[str], page_size: int, after: str) -> tuple[list[str], str | None]:
    rest = sorted(name for name in names if name > after)
    return rest[:page_size], rest[page_size - 1] if len(rest) > page_size else None


def _check_asked(ledger_ids: U64 | None) -> None:
    if ledger_ids is None:
        return
    limits.check_rows("ledger_id", len(ledger_ids), 1_000)
    asked = ledger_ids.tolist()
    for ledger_id in asked:
        if asked.count(ledger_id) > 1:
            raise errors.InvalidArgument(f"ledger_id names ledger {ledger_id} twice; once is enough")


def _survey(lowest: Mapping[int, int]) -> RetentionScan:
    return RetentionScan(min(lowest.items(), default=None), len(lowest))
