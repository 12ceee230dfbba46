"""Shows pending and due rows: pages, and how many come due when.

`daemon.owner.requests` alone uses it; it stands apart because it reads many rows with bounded memory and time, next to
everything else. A view may cover a large part of the index, and deliveries must not suffer. All work that grows with
the rows is done in threads, on parts of one bucket at a time. Segments that are kept in memory are for deliveries: a
view neither loads nor drops any. `daemon.core.index.scan` chooses what to read.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pyroaring import BitMap64

from daemon.call_values import BacklogPage, Histogram, ScheduledPage, View
from daemon.core import limits
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.bucket import Bucket, SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of, contained
from daemon.core.index.runs import earliest, first_time_ms
from daemon.core.index.scan import (
    BARS_MAX,
    LAST_MS,
    Bars,
    Counts,
    Found,
    Page,
    PageScan,
    Part,
    PartCount,
    Place,
    Read,
    ScanFilter,
    SealedPart,
    part_of,
    round_width_ms,
)
from daemon.errors import Corruption, InvalidArgument, QuotaExceeded, Unavailable
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import NewerData
from daemon.topic import bucket_reads
from daemon.topic.served_topic import ServedTopic
from storage_backends.formats import index_ids
from storage_backends.formats.row_columns import U32, Rows
from storage_backends.object_store import StoreError

T = TypeVar("T")

# Parts of buckets that all views read at a time
READS_MAX = 8
# Segments that a page reads before the next ones are chosen
SEGMENTS_A_ROUND = 32
# Rows that are read with one request, unless a single segment has more
READ_ROWS = 20_000
# Buckets that are processed before others have their turn
BUCKETS_A_TURN = 50
# Time after which a page ends early, and a count is refused (seconds)
LOOK_S = 30.0
LOOK_RETRY_MS = 5_000


class _LeftError(Exception):
    """A bucket that was to be read has left the index."""


class Viewing:
    """The views of one daemon on the rows of its topics. Called on the loop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._reads = asyncio.Semaphore(READS_MAX)

    async def scheduled(self, topic: ServedTopic, view: View, page_size: int, after: Place | None) -> ScheduledPage:
        """Return a page of the rows of whole entries that are not due yet, in due order.

        Raises NotFound, InvalidArgument, Corruption naming the bucket, Unavailable.
        """
        limit = limits.page_rows(page_size)
        names = {number: state.stored.name for number, state in topic.core.subscriptions.items()}
        as_of_ms = self._as_of(topic)
        asked, indexes = _asked(topic, view)
        page = await self._page(topic, asked, indexes, after, limit)
        shown, of_row = np.unique(page.found.index_id, return_inverse=True)
        shared_first = [0, *(number for number in shown.tolist() if number)]
        return ScheduledPage(
            rows=page.found.rows.rows,
            subscription_index=np.searchsorted(shared_first, shown).astype(np.uint32)[of_row],
            subscriptions=tuple("" if not number else names.get(number, "") for number in shared_first),
            next_after=page.next_after,
            as_of_ms=as_of_ms,
        )

    async def backlog(
        self,
        topic: ServedTopic,
        subscription: str,
        ledgers: tuple[int, int] | None,
        page_size: int,
        after: Place | None,
    ) -> BacklogPage:
        """Return a page of due rows that a subscription is owed and has not acknowledged. Raises as `scheduled`."""
        limit = limits.page_rows(page_size)
        state = topic.subscription(subscription)
        asked, indexes = _asked(topic, View(ledgers=ledgers, subscription=subscription), backlog=True)
        as_of_ms = self._as_of(topic)
        page = await self._page(topic, asked, indexes, after, limit, state)
        keys = page.found.rows.keys
        # All sets are as of one moment; the times of redelivery are found in a frozen copy.
        named = bitmap_of(keys)
        in_flight = contained(keys, state.held_among(named) | (state.nacking & named))
        redelivery_count = state.counts.of(keys)
        redeliver_at_ms = None
        if state.nacks.keys.intersect(named):
            nacked = state.nacks.freeze()
            redeliver_at_ms = await self._run(lambda: nacked.times_of(keys))
            in_flight &= redeliver_at_ms == 0
        rows, batch_index = _unpacked(page.found)
        return BacklogPage(
            rows=rows,
            in_flight=in_flight,
            redeliver_at_ms=redeliver_at_ms,
            redelivery_count=redelivery_count,
            batch_index=batch_index,
            next_after=page.next_after,
            as_of_ms=as_of_ms,
        )

    async def histogram(self, topic: ServedTopic, view: View, width_ms: int) -> Histogram:
        """Count the rows of whole entries that come due in each bar.

        Raises as `scheduled`, and QuotaExceeded if it takes too long.
        """
        as_of_ms = self._as_of(topic)
        asked, indexes = _asked(topic, View(ledgers=view.ledgers, subscription=view.subscription))
        last_ms = max((index.last_due_ms() or 0 for index in indexes), default=0)
        bars = _bars(view, width_ms, now_ms=as_of_ms, last_ms=last_ms)
        counts = await self._looked_at(
            topic, None, lambda deadline_s: self._counts(topic, asked, indexes, bars, deadline_s)
        )
        return Histogram(
            from_ms=bars.from_ms,
            until_ms=bars.until_ms,
            width_ms=bars.width_ms,
            rows=counts.rows[1:-1],
            rows_before=int(counts.rows[0]),
            rows_after=int(counts.rows[-1]),
            segments_counted=counts.segments_counted,
            segments_read=counts.segments_read,
            as_of_ms=as_of_ms,
        )

    def _as_of(self, topic: ServedTopic) -> int:
        """Return the time now (Unix ms). Due rows in memory count as due from their time on."""
        now_ms = self._environment.clock.now_ms()
        topic.pass_due(now_ms)
        return now_ms

    # ---- pages

    async def _page(
        self,
        topic: ServedTopic,
        asked: ScanFilter,
        indexes: Sequence[Index],
        after: Place | None,
        limit: int,
        state: SubscriptionState | None = None,
    ) -> Page:
        """Return a page; `state` is the subscription whose backlog it is."""
        return await self._looked_at(
            topic,
            state,
            lambda deadline_s: self._scanned(topic, PageScan(asked, after, limit), indexes, state, deadline_s),
        )

    async def _scanned(
        self,
        topic: ServedTopic,
        scan: PageScan,
        indexes: Sequence[Index],
        state: SubscriptionState | None,
        deadline_s: float,
    ) -> Page:
        bounds = None
        if state is not None:
            nacked = _Nacked()
            if len(state.nacks):
                frozen = state.nacks.freeze()
                nacked = await self._run(lambda: _Nacked.of(frozen))
            bounds = _Backlog(state, nacked)
        for number, (bucket, pages) in enumerate(_buckets(indexes), 1):
            scan.add(bucket, pages, 0 if bounds is None else bounds.first_ms_of(bucket))
            if not number % BUCKETS_A_TURN:
                await asyncio.sleep(0)
        while reads := scan.next_reads(SEGMENTS_A_ROUND):
            found = await _all_of([self._found(topic, scan, read, state) for read in reads])
            await self._run(lambda found=found: scan.take(found))  # type: ignore[misc]
            if self._environment.clock.elapsed_s() > deadline_s and scan.can_end:
                break
        return scan.page()

    async def _found(self, topic: ServedTopic, scan: PageScan, read: Read, state: SubscriptionState | None) -> Found:
        async with self._reads:
            part = _part(topic, read.bucket, read.pages, scan.asked, _leaving(topic, state))
            if part is None:
                return Found.empty()
            cached = topic.core.indexes.cache.of_bucket(read.bucket.name)
            return await self._read(
                topic, read.bucket, lambda: scan.find(part, read, self._segments(part, read.segments, cached))
            )

    # ---- counts

    async def _counts(
        self, topic: ServedTopic, asked: ScanFilter, indexes: Sequence[Index], bars: Bars, deadline_s: float
    ) -> Counts:
        counts = Counts.nothing(bars)
        buckets = _buckets(indexes)
        for first in range(0, len(buckets), BUCKETS_A_TURN):
            for each in await _all_of(
                [
                    self._counted(topic, bucket, pages, asked, bars, deadline_s)
                    for bucket, pages in buckets[first : first + BUCKETS_A_TURN]
                ]
            ):
                counts += each
        return counts

    async def _counted(
        self, topic: ServedTopic, bucket: Bucket, pages: PageTable, asked: ScanFilter, bars: Bars, deadline_s: float
    ) -> Counts:
        async with self._reads:
            if self._environment.clock.elapsed_s() > deadline_s:
                raise QuotaExceeded(
                    f"counting the rows of topic {topic.core.name} takes longer than {LOOK_S:.0f} s, which is the "
                    "limit; ask for fewer ledgers or a shorter range",
                    retry_after_ms=LOOK_RETRY_MS,
                )
            part = _part(topic, bucket, pages, asked, _leaving(topic, None))
            if part is None:
                return Counts.nothing(bars)
            cached = topic.core.indexes.cache.of_bucket(bucket.name)
            return await self._read(topic, bucket, lambda: self._count(part, asked, bars, cached))

    def _count(self, part: Part, asked: ScanFilter, bars: Bars, cached: Mapping[int, KeyedRows]) -> Counts:
        counting = PartCount(part, bars, asked.ledgers)
        for number, rows in self._segments(part, counting.needed, cached):
            counting.read(number, rows)
            if counting.is_complete:
                break
        return counting.counts()

    # ---- reading

    async def _looked_at(
        self, topic: ServedTopic, state: SubscriptionState | None, look: Callable[[float], Awaitable[T]]
    ) -> T:
        """Repeat `look` if a bucket has left before it was read."""
        deadline_s = self._environment.clock.elapsed_s() + LOOK_S
        while True:
            try:
                looked = await look(deadline_s)
            except _LeftError as error:
                if self._environment.clock.elapsed_s() > deadline_s:
                    raise Unavailable(f"topic {topic.core.name}: {error}; try again") from error
                await asyncio.sleep(0)
                continue
            if _leaving(topic, state):
                # Rows that are leaving are no longer shown, so they must have left when this is answered.
                await topic.slots.confirmed()
            return looked

    async def _read(self, topic: ServedTopic, bucket: Bucket, work: Callable[[], T]) -> T:
        try:
            return await self._run(work)
        except NewerData:
            raise
        except Corruption as error:
            # Others may have merged it, and collection deleted it, before this owner has read the manifest.
            missing = isinstance(error, bucket_reads.BucketMissing)
            gone = missing and not await topic.bucket_is_live(bucket.name)
            if gone or topic.core.indexes.bucket(bucket.name) is not bucket:
                raise _LeftError(f"bucket {bucket.name} was merged or dropped while it was read") from error
            topic.buckets.quarantine(bucket.name, str(error))
            raise
        except StoreError as error:
            raise Unavailable(f"bucket {bucket.name} cannot be read, try again: {error}") from error

    def _run(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._environment.pools.calls.run_part(work)

    def _segments(
        self, part: Part, numbers: Sequence[int], cached: Mapping[int, KeyedRows]
    ) -> Iterator[tuple[int, KeyedRows]]:
        """Yield the rows of segments, ascending. Runs in a thread."""
        if not isinstance(part, SealedPart):
            return
        for run in _runs(part, numbers, cached):
            if run[0] in cached:
                yield run[0], cached[run[0]]
                continue
            infos = part.table.infos[run[0] : run[-1] + 1]
            rows = bucket_reads.read_segments(self._environment.store, part.name, infos)
            for number, each in zip(run, rows, strict=True):
                yield number, part.pages.keyed(each)


def _runs(part: SealedPart, numbers: Sequence[int], cached: Mapping[int, KeyedRows]) -> Iterator[list[int]]:
    """Yield segments that are read with one request, or one that is in memory."""
    run: list[int] = []
    rows = 0
    for number in numbers:
        follows = run and number == run[-1] + 1 and number not in cached and run[0] not in cached
        segment_rows = part.table.infos[number].rows
        if run and not (follows and rows + segment_rows <= READ_ROWS):
            yield run
            run, rows = [], 0
        run.append(number)
        rows += segment_rows
    if run:
        yield run


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; raise the first error once all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Nacked:
    """The NACKED positions. `first_ms` is the earliest time of those that were ever pending; None if there are none."""

    keys: BitMap64 = dataclasses.field(default_factory=BitMap64)
    first_ms: int | None = None

    @staticmethod
    def of(frozen: FrozenNacks) -> _Nacked:
        """Return the NACKED positions. O(n): runs in a thread."""
        keys = BitMap64()
        first_ms: int | None = None
        for rows, _ in frozen.parts():
            keys |= bitmap_of(rows.keys)
            first_ms = earliest(first_ms, first_time_ms(rows.rows.deliver_at_ms, 1))
        return _Nacked(keys, first_ms)


class _Backlog:
    """The time from which on each bucket has rows of a backlog: most passed rows are acknowledged, and not read.

    READY, IN_FLIGHT and NACKED rows are in memory with their times; if a bucket has others, nothing is known. A bucket
    with rows that never were pending, due at time 0, is read from there on.
    """

    def __init__(self, state: SubscriptionState, nacked: _Nacked) -> None:
        self._subscription_id = state.subscription_id
        self._known = state.in_hand() | nacked.keys
        self._first_ms = earliest(state.first_in_hand_ms(1), nacked.first_ms)

    def first_ms_of(self, bucket: Bucket) -> int:
        never_pending = isinstance(bucket, SealedBucket) and not bucket.table.min_ms[0]
        if self._first_ms is None or never_pending:
            return 0
        rest = bucket.passed - self._known
        if rest and self._subscription_id in bucket.acknowledged:
            rest -= bucket.acknowledged[self._subscription_id]
        return 0 if rest else self._first_ms


def _part(topic: ServedTopic, bucket: Bucket, pages: PageTable, asked: ScanFilter, leaving: BitMap64) -> Part | None:
    """Return the part of a bucket that is viewed, or None if there is none.

    Raises _LeftError if the bucket was merged meanwhile: its sets are not valid then.
    """
    index = topic.core.indexes.get(bucket.index_id)
    if index is None:
        # It left with its subscription.
        return None
    if bucket.name and bucket.present_rows and not index.serves(bucket.name):
        raise _LeftError(f"bucket {bucket.name} was merged while it was read")
    return part_of(bucket, pages, asked, leaving)


def _leaving(topic: ServedTopic, state: SubscriptionState | None) -> BitMap64:
    """Return the positions that a staged decision removes from the index, or from a subscription's backlog."""
    leaving = topic.core.indexes.leaving
    return leaving if state is None or not state.acknowledging else leaving | state.acknowledging


def _unpacked(found: Found) -> tuple[Rows, U32 | None]:
    """Return rows of any index as clients see them, and their batch indexes; None if all are whole entries."""
    rows = found.rows.rows
    parts = found.index_id >= np.uint64(index_ids.batch_parts_of(0))
    if not parts.any():
        return rows, None
    entry_id, batch_index = rows.entry_id.copy(), np.full(len(rows), index_ids.NO_BATCH_INDEX, np.uint32)
    entry_id[parts], batch_index[parts] = index_ids.of_part(rows.entry_id[parts])
    return dataclasses.replace(rows, entry_id=entry_id), batch_index


def _buckets(indexes: Sequence[Index]) -> list[tuple[Bucket, PageTable]]:
    return [(bucket, index.pages) for index in indexes for bucket in index.buckets]


def _asked(topic: ServedTopic, view: View, *, backlog: bool = False) -> tuple[ScanFilter, list[Index]]:
    """Return the filter of a view, and its indexes. Raises NotFound, InvalidArgument."""
    if view.until_ms and view.until_ms < view.from_ms:
        raise InvalidArgument(f"until_ms is {view.until_ms}; it must be at least from_ms, which is {view.from_ms}")
    limits.check_ledgers(view.ledgers)
    asked = ScanFilter(view.from_ms, view.until_ms - 1 if view.until_ms else LAST_MS, view.ledgers, backlog=backlog)
    if view.subscription is None:
        return asked, topic.core.indexes.of_entries()
    stored = topic.subscription(view.subscription).stored
    asked = ScanFilter(
        asked.first_ms, asked.last_ms, asked.ledgers, stored.subscription_id, stored.since_ms, backlog=backlog
    )
    indexes = topic.core.indexes
    return asked, (indexes.serving if backlog else indexes.of_entries)(stored.subscription_id)


def _bars(view: View, width_ms: int, *, now_ms: int, last_ms: int) -> Bars:
    """Return the bars of a request; they end behind the last row by default. Raises InvalidArgument."""
    from_ms = view.from_ms or now_ms
    until_ms = view.until_ms or max(from_ms, last_ms + 1)
    if until_ms < from_ms:
        raise InvalidArgument(f"until_ms is {until_ms}; it must be at least from_ms, which is {from_ms}")
    width_ms = width_ms or round_width_ms(until_ms - from_ms)
    bars = Bars(from_ms, until_ms, width_ms)
    if bars.count > BARS_MAX:
        raise InvalidArgument(
            f"width_ms is {width_ms}: from {from_ms} to {until_ms} it makes {bars.count} bars; the limit is {BARS_MAX}"
        )
    if not view.until_ms:
        bars = Bars(from_ms, min(from_ms + bars.count * width_ms, LAST_MS), width_ms)
    return bars
