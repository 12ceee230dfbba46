"""What is pending, what is due, and how many come due when: as people and dashboards ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from daemon import call_values, config
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.index.scan import Place
from daemon.errors import Corruption, InvalidArgument, NotFound, QuotaExceeded, Unavailable
from daemon.owner.engine import Engine
from daemon.topic import bucket_reads, viewing
from storage_backends.formats import index_ids
from storage_backends.formats.bucket_format import SegmentInfo
from storage_backends.formats.manifest import SubscriptionPolicy
from storage_backends.formats.row_columns import Rows
from storage_backends.object_store import ObjectStore
from tests._support import real_engine
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests.daemon._support.calling import acknowledge, cancel, create, get, rows_of, stats
from tests.daemon._support.dead_letter_calls import nack
from tests.daemon.topic.test_damage import alter_part

SMALL = (
    "bucket.min_index_count_per_bucket=20",
    "bucket.rows_max=20",
    "bucket.max_num_buckets=-1",
    "bucket.max_indexes_per_bucket_snapshot_segment=5",
    "bucket.min_indexes_per_bucket_snapshot_segment=0",
)
NOTHING_AHEAD = ("delivery.lookahead_ms=0",)
FAR_MS = 300_000
Shown = tuple[int, int, int]
"""deliver_at_ms, ledger, entry"""


def scheduled(
    daemon: Daemon, page_size: int = 0, after: Place | None = None, **view: object
) -> asyncio.Task[call_values.ScheduledPage]:
    asked = call_values.View(**view)  # type: ignore[arg-type]
    return daemon.call(daemon.engine.requests.list_scheduled("t", asked, page_size, after))


def histogram(daemon: Daemon, width_ms: int = 0, **view: object) -> asyncio.Task[call_values.Histogram]:
    asked = call_values.View(**view)  # type: ignore[arg-type]
    return daemon.call(daemon.engine.requests.histogram("t", asked, width_ms))


def backlog(
    daemon: Daemon,
    page_size: int = 0,
    after: Place | None = None,
    *,
    subscription: str = "s",
    ledgers: tuple[int, int] | None = None,
) -> asyncio.Task[call_values.BacklogPage]:
    return daemon.call(daemon.engine.requests.list_backlog("t", subscription, ledgers, page_size, after))


def shown(rows: Rows) -> list[Shown]:
    return list(zip(rows.deliver_at_ms.tolist(), rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True))


async def add_spread(daemon: Daemon, ledger_id: int, count: int, *, first_ms: int, step_ms: int) -> list[Shown]:
    """Entries of a ledger, each due a step after the one before."""
    times = np.arange(count, dtype=np.uint64) * np.uint64(step_ms) + np.uint64(first_ms)
    batch = AddBatch(
        ledger_id=np.full(count, ledger_id, np.uint64),
        entry_id=np.arange(count, dtype=np.uint64),
        deliver_at_ms=times,
        delay_ms=None,
        key_hash=np.arange(count, dtype=np.uint32),
        return_already_due=False,
    )
    await daemon.call(daemon.engine.requests.add("t", batch))
    return [(int(time_ms), ledger_id, entry) for entry, time_ms in enumerate(times)]


async def with_buckets(machines: EngineFixture, count: int, *settings: str) -> tuple[Daemon, list[Shown]]:
    """Sealed buckets of 20 rows each that come due among each other, and a few rows that are in none."""
    one = await machines.served_by("one", *SMALL, *settings)
    await create(one)
    added = []
    for ledger_id in range(1, count + 1):
        first_ms = machines.now_ms() + FAR_MS + ledger_id
        added += await add_spread(one, ledger_id, 20, first_ms=first_ms, step_ms=1_000)
        await one.until(lambda ledger_id=ledger_id: len(one.topic("t").core.indexes.sealed) == ledger_id)  # type: ignore[misc]
    added += await add_spread(one, 99, 5, first_ms=machines.now_ms() + FAR_MS, step_ms=7_000)
    return one, sorted(added)


async def all_pages(daemon: Daemon, page_size: int, **view: object) -> list[Shown]:
    found: list[Shown] = []
    after = None
    while True:
        page = await scheduled(daemon, page_size, after, **view)
        found += shown(page.rows)
        if page.next_after is None:
            return found
        after = page.next_after


# ---- scheduled


async def test_what_is_scheduled_is_shown_in_the_order_in_which_it_comes_due(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 4)
    page = await scheduled(one)
    assert shown(page.rows) == added
    assert page.rows.key_hash is not None
    assert page.rows.key_hash.tolist() == [entry for _, _, entry in added]
    assert (page.next_after, page.as_of_ms) == (None, machines.now_ms())
    assert page.subscriptions == ("",)
    assert not page.subscription_index.any()
    assert await all_pages(one, 7) == added
    part = [row for row in added if added[10][0] <= row[0] < added[50][0]]
    assert await all_pages(one, 7, from_ms=added[10][0], until_ms=added[50][0]) == part
    assert await all_pages(one, 7, ledgers=(2, 3)) == [row for row in added if row[1] in (2, 3)]


async def test_pages_go_on_where_they_were_over_seals_merges_and_rows_that_come_due(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 6)
    first = await scheduled(one, 10)
    await one.call(one.engine.requests.seal("t"))
    await one.call(one.engine.requests.merge("t", 2))
    second = await scheduled(one, 10, first.next_after)
    assert shown(first.rows) + shown(second.rows) == added[:20]
    await asyncio.sleep((added[30][0] - machines.now_ms()) / 1000)
    third = await scheduled(one, 1_000, second.next_after)
    assert shown(third.rows) == added[31:], "what has come due meanwhile is not pending any more"


async def test_rows_of_own_indexes_are_shown_with_the_names_of_their_subscriptions(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 1)
    await create(one, "other")
    own = machines.now_ms() + FAR_MS + 500
    batch = AddBatch(
        ledger_id=np.array([1, 1], np.uint64),
        entry_id=np.array([3, 300], np.uint64),
        deliver_at_ms=np.array([own, own + 1], np.uint64),
        delay_ms=None,
        key_hash=None,
        return_already_due=False,
    )
    await one.call(one.engine.requests.add("t", batch, "other"))
    mine = [(own, 1, 3), (own + 1, 1, 300)]
    page = await scheduled(one)
    assert shown(page.rows) == sorted(added + mine)
    named = [page.subscriptions[index] for index in page.subscription_index.tolist()]
    assert [row for row, name in zip(shown(page.rows), named, strict=True) if name == "other"] == mine
    assert page.subscriptions == ("", "other")
    assert shown((await scheduled(one, subscription="s")).rows) == added
    assert shown((await scheduled(one, subscription="other")).rows) == sorted(added + mine)
    found = await stats(one)
    assert {each.subscription: each.own_pending for each in found.subscriptions} == {"s": 0, "other": 2}
    assert (found.pending, found.last_due_ms, found.merges) == (len(added) + 2, max(added)[0], 0)


async def test_what_is_cancelled_is_shown_no_more(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 3)
    await cancel(one, 2, range(5, 15))
    left = [row for row in added if row[1] != 2 or row[2] not in range(5, 15)]
    assert shown((await scheduled(one)).rows) == left
    assert (await histogram(one, 1_000)).rows.sum() == len(left)


async def test_a_cancellation_that_is_not_durable_holds_the_answer_up(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 1)
    held = one.pause("put_if_absent", JOURNAL)
    cancelling = cancel(one, 1, [4])
    await held.reached()
    looking = scheduled(one)
    await asyncio.sleep(0.5)
    assert not looking.done()
    held.release()
    assert shown((await looking).rows) == [row for row in added if row[1:] != (1, 4)]
    assert (await cancelling).cancelled == 1


async def test_looking_leaves_what_is_in_memory_as_it_is(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 4, *NOTHING_AHEAD)
    cache = one.topic("t").core.indexes.cache
    before = cache.rows
    reads = sum(call.operation == "get_range" for call in one.store.calls)
    assert len(shown((await scheduled(one)).rows)) == len(added)
    assert cache.rows == before
    assert sum(call.operation == "get_range" for call in one.store.calls) > reads


# ---- backlogs


async def test_a_backlog_is_shown_with_what_is_handed_out(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 3)
    await asyncio.sleep((added[40][0] - machines.now_ms()) / 1000)
    due = added[:41]
    assert shown((await backlog(one)).rows) == due
    leased = rows_of(await get(one, 10))
    page = await backlog(one)
    assert shown(page.rows) == due
    assert page.in_flight.tolist() == [True] * 10 + [False] * 31
    await acknowledge(one, leased[:4])
    page = await backlog(one, 20)
    assert shown(page.rows) == due[4:24]
    assert page.in_flight.tolist() == [True] * 6 + [False] * 14
    rest = await backlog(one, 1_000, page.next_after)
    assert shown(rest.rows) == due[24:]
    assert shown((await backlog(one, ledgers=(3, 3))).rows) == [row for row in due[4:] if row[1] == 3]
    assert shown((await scheduled(one)).rows) == added[41:]


async def test_of_a_backlog_that_is_in_hand_no_segment_is_read_that_was_acknowledged(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD)
    # To it everything is still owed: nothing of the buckets is gone.
    await create(one, "other")
    receiver = await one.receiver("t")
    await asyncio.sleep((added[50][0] - machines.now_ms()) / 1000)
    await receiver.received(51)
    await receiver.acknowledge(receiver.rows[:45])
    read: list[int] = []
    read_segments = bucket_reads.read_segments

    def counted(store: ObjectStore, key: str, segments: Sequence[SegmentInfo]) -> list[Rows]:
        read.append(len(segments))
        return read_segments(store, key, segments)

    monkeypatch.setattr(bucket_reads, "read_segments", counted)
    cache = one.topic("t").core.indexes.cache
    for bucket in one.topic("t").core.indexes.sealed:
        cache.discard_bucket(bucket)
    page = await backlog(one)
    assert shown(page.rows) == added[45:51]
    assert page.in_flight.all()
    assert sum(read) <= 7, "the last one of each, and what the head takes up"
    waiting = [*receiver.rows[48:], (9, 9, 0)]
    await nack(one, waiting, delay_ms=600_000)
    read.clear()
    page = await backlog(one)
    assert sorted(shown(page.rows)) == sorted([*added[45:51], (0, 9, 9)])
    assert sum(read) <= 7, "the same where some wait for their redelivery"
    read.clear()
    assert shown((await backlog(one, subscription="other")).rows) == added[:51]
    assert sum(read) >= 10, "of what nobody holds everything is read"
    receiver.stream.close()
    assert shown((await backlog(one)).rows) == shown(page.rows)


async def test_an_acknowledgement_that_is_not_durable_holds_a_backlog_up(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 1)
    await asyncio.sleep((added[9][0] - machines.now_ms()) / 1000)
    leased = rows_of(await get(one, 5))
    held = one.pause("put_if_absent", JOURNAL)
    acknowledging = acknowledge(one, leased[:2])
    await held.reached()
    looking = backlog(one)
    await asyncio.sleep(0.5)
    assert not looking.done()
    held.release()
    assert shown((await looking).rows) == added[2:10]
    assert await acknowledging == 0


async def test_each_subscription_has_a_backlog_of_its_own(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 2)
    await create(one, "other")
    await asyncio.sleep((added[9][0] - machines.now_ms()) / 1000)
    await acknowledge(one, rows_of(await get(one, 6, subscription="other")), subscription="other")
    assert shown((await backlog(one)).rows) == added[:10]
    assert shown((await backlog(one, subscription="other")).rows) == added[6:10]


async def test_a_backlog_tells_what_waits_for_its_redelivery_until_when_and_how_often(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 3)
    await asyncio.sleep((added[30][0] - machines.now_ms()) / 1000)
    exact = SubscriptionPolicy(nack_precision_bits=0)
    await one.call(one.engine.requests.update_subscription("t", "s", exact))
    rows = rows_of(await get(one, 20, lease_ms=3_600_000))
    await nack(one, rows[5:15], delay_ms=60_000)
    await nack(one, rows[5:7], delay_ms=90_000)
    until_ms = [machines.now_ms() + 90_000] * 2 + [machines.now_ms() + 60_000] * 8
    page = await backlog(one)
    assert shown(page.rows) == added[:31]
    assert page.in_flight.tolist() == [True] * 5 + [False] * 10 + [True] * 5 + [False] * 11
    assert page.redeliver_at_ms is not None
    assert page.redeliver_at_ms.tolist() == [0] * 5 + until_ms + [0] * 16
    assert page.redelivery_count is not None
    assert page.redelivery_count.tolist() == [0] * 5 + [1] * 10 + [0] * 16
    assert page.batch_index is None
    (found,) = (await stats(one)).subscriptions
    assert (found.backlog, found.in_flight, found.nacked) == (31, 10, 10)
    assert found.next_redelivery_ms == machines.now_ms() + 60_000
    await asyncio.sleep(61)
    page = await backlog(one)
    assert page.redeliver_at_ms is not None
    assert np.count_nonzero(page.redeliver_at_ms) == 2
    assert page.redelivery_count is not None
    assert np.count_nonzero(page.redelivery_count) == 10, "a count stays until the row leaves the backlog"


async def test_what_waits_for_its_redelivery_is_shown_wherever_it_lies(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD)
    receiver = await one.receiver("t")
    await asyncio.sleep((added[50][0] - machines.now_ms()) / 1000)
    await receiver.received(51)
    early, late = receiver.rows[:3], receiver.rows[48:]
    await nack(one, early, delay_ms=600_000)
    await receiver.acknowledge(receiver.rows[3:48])
    page = await backlog(one)
    assert [(row[2], row[0], row[1]) for row in (*early, *late)] == shown(page.rows)
    assert page.in_flight.tolist() == [False] * 3 + [True] * 3
    first = await backlog(one, 2)
    assert shown(first.rows) + shown((await backlog(one, 9, first.next_after)).rows) == shown(page.rows)


async def test_what_waits_for_its_redelivery_is_no_row_that_nobody_takes(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, range(3), delay_ms=1)
    await asyncio.sleep(1)
    await nack(one, rows_of(await get(one)), delay_ms=60_000)
    await asyncio.sleep(30)
    assert (await stats(one)).oldest_due_ms == 0
    (numbers,) = await one.call(one.engine.requests._topic_numbers())
    assert (numbers.nacked, numbers.backlog, numbers.oldest_due_age_s) == (3, 3, 0.0)


async def test_messages_of_a_batch_are_shown_with_their_indexes_and_in_backlogs_alone(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 1)
    await asyncio.sleep((added[1][0] - machines.now_ms()) / 1000)
    rows = rows_of(await get(one))
    await nack(one, rows[:1], batch_index=4, delay_ms=60_000)
    await nack(one, rows[:1], batch_index=2, delay_ms=60_000)
    page = await backlog(one)
    assert sorted(shown(page.rows)) == sorted([*added[:2], added[0], added[0]])
    assert page.batch_index is not None
    whole = index_ids.NO_BATCH_INDEX
    named = list(zip(shown(page.rows), page.batch_index.tolist(), page.in_flight.tolist(), strict=True))
    parts = [(added[0], 2, False), (added[0], 4, False)]
    assert sorted(named) == sorted([(row, whole, True) for row in added[:2]] + parts)
    paged: list[tuple[Shown, int]] = []
    after = None
    while True:
        each = await backlog(one, 1, after)
        indexes = [whole] if each.batch_index is None else each.batch_index.tolist()
        paged += zip(shown(each.rows), indexes, strict=True)
        after = each.next_after
        if after is None:
            break
    assert paged == [row[:2] for row in named]
    assert shown((await scheduled(one)).rows) == added[2:]
    await one.call(one.engine.requests.seal("t"))
    found = await one.call(one.engine.requests.list_buckets("t", 0, ""))
    assert sorted(bucket.subscription for bucket in found.buckets) == ["", "", "s"]
    assert sorted(shown((await backlog(one)).rows)) == sorted(shown(page.rows))


# ---- histograms


async def test_a_histogram_counts_what_is_pending_from_now_to_the_last_row(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 4)
    whole = await histogram(one)
    assert (whole.from_ms, whole.as_of_ms) == (machines.now_ms(), machines.now_ms())
    assert whole.until_ms > added[-1][0] >= whole.until_ms - whole.width_ms
    assert 30 <= len(whole.rows) <= 120
    assert (whole.rows.sum(), whole.rows_before, whole.rows_after) == (len(added), 0, 0)
    from_ms, until_ms = added[10][0], added[50][0]
    part = await histogram(one, 700, from_ms=from_ms, until_ms=until_ms)
    assert part.until_ms == until_ms
    wanted = [
        sum(0 <= row[0] - start < 700 and row[0] < until_ms for row in added) for start in range(from_ms, until_ms, 700)
    ]
    assert part.rows.tolist() == wanted
    assert (part.rows_before, part.rows_after) == (10, len(added) - 50)
    assert part.segments_read > 0
    mine = await histogram(one, 1_000, ledgers=(2, 2), subscription="s")
    assert mine.rows.sum() == 20


async def test_a_histogram_of_wide_bars_reads_nothing(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 4, *NOTHING_AHEAD)
    reads = sum(call.operation == "get_range" for call in one.store.calls)
    found = await histogram(one, 10 * FAR_MS)
    assert found.rows.tolist() == [len(added)]
    assert (found.segments_counted, found.segments_read) == (16, 0)
    assert sum(call.operation == "get_range" for call in one.store.calls) == reads


async def test_a_histogram_of_nothing_has_no_bars(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    found = await histogram(one)
    assert (found.from_ms, found.until_ms, found.rows.tolist()) == (machines.now_ms(), machines.now_ms(), [])


# ---- refusals


async def test_what_is_asked_badly_is_refused(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    bad: list[tuple[str, asyncio.Task[object]]] = [
        ("until_ms is 4; it must be at least from_ms, which is 5", scheduled(one, from_ms=5, until_ms=4)),
        ("last_ledger_id is 1, before first_ledger_id, which is 2", scheduled(one, ledgers=(2, 1))),
        ("page_size is 10001", scheduled(one, 10_001)),
        ("page_size is 10001", backlog(one, 10_001)),
        ("last_ledger_id is 1", backlog(one, ledgers=(2, 1))),
        ("until_ms is 5; it must be at least from_ms", histogram(one, until_ms=5)),
        ("10001 bars; the limit is 10000", histogram(one, 1, from_ms=5, until_ms=10_006)),
    ]
    for says, asked in bad:
        with pytest.raises(InvalidArgument, match=says):
            await asked
    unknown: Sequence[asyncio.Task[object]] = (
        scheduled(one, subscription="x"),
        backlog(one, subscription="x"),
        histogram(one, subscription="x"),
    )
    for asked in unknown:
        with pytest.raises(NotFound, match="'x'"):
            await asked


async def test_a_damaged_bucket_is_named_and_quarantined_and_the_others_are_shown_from_then_on(
    machines: EngineFixture,
) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD)
    damaged = machines.topic_tip().live[0]
    alter_part(machines, damaged, "segment")
    with pytest.raises(Corruption, match=damaged.object.name):
        await scheduled(one)
    await one.until(lambda: bool(one.topic("t").core.rebuild_needed()))
    lost = damaged.first_ledger_id
    assert shown((await scheduled(one)).rows) == [row for row in added if row[1] != lost]


async def test_a_bucket_that_is_merged_and_collected_while_it_is_looked_at_is_looked_for_again(
    machines: EngineFixture,
) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD)
    for look in (scheduled, histogram):
        sources = list(one.topic("t").core.indexes.sealed)
        held = one.pause("get_range", sources[0])
        looking = scheduled(one) if look is scheduled else histogram(one, 500)
        await held.reached()
        await one.call(one.engine.requests.merge("t", len(sources) - 1))
        await one.until(lambda source=sources[0]: source not in one.topic("t").core.indexes.sealed)  # type: ignore[misc]
        for source in sources:
            if source not in one.topic("t").core.indexes.sealed:
                machines.store.delete(source)
        held.release()
        found = await looking
        if isinstance(found, call_values.ScheduledPage):
            assert shown(found.rows) == added
        else:
            assert found.rows.sum() == len(added)
    assert not one.topic("t").core.rebuild_needed()


async def test_what_took_the_place_of_a_bucket_that_others_merged_and_deleted_is_read(
    machines: EngineFixture,
) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD, "bucket.max_num_buckets=-1")
    other = MergingProcess(machines.store)
    sources = other.live()
    other.merge_all()
    other.collect(sources)
    assert shown((await scheduled(one)).rows) == added
    assert not one.topic("t").core.rebuild_needed()


async def test_a_position_that_came_back_is_shown_once_though_its_buckets_are_merged_while_it_is_looked_at(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL, *NOTHING_AHEAD)
    await create(one)
    await add_spread(one, 1, 20, first_ms=machines.now_ms() + 10, step_ms=1)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 1)
    await asyncio.sleep(1)
    handed = rows_of(await get(one, 20, lease_ms=60_000))
    assert await acknowledge(one, handed[15:]) == 0
    came_back = (await add_spread(one, 1, 20, first_ms=machines.now_ms() + 500, step_ms=1))[15:]
    await one.call(one.engine.requests.seal("t"))
    await asyncio.sleep(70)
    found, looks = viewing.Viewing._found, 0

    async def merged_before_the_second(*asked: object) -> object:
        nonlocal looks
        looks += 1
        if looks == 2:
            await one.call(one.engine.requests.merge("t", 1))
        return await found(*asked)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "SEGMENTS_A_ROUND", 1)
        patch.setattr(viewing.Viewing, "_found", merged_before_the_second)
        rows = shown((await backlog(one)).rows)
    assert len(one.topic("t").core.indexes.sealed) == 1
    assert [row[1:] for row in rows] == [(1, entry) for entry in range(20)]
    assert rows[15:] == came_back


async def test_a_store_that_fails_is_told(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 2, *NOTHING_AHEAD)
    bucket = next(iter(one.topic("t").core.indexes.sealed))
    one.script.plan("get_range", Fault.FAIL_BEFORE, key_part=bucket)
    with pytest.raises(Unavailable, match=bucket):
        await scheduled(one)
    assert shown((await scheduled(one)).rows) == added


async def test_a_page_that_takes_long_ends_early_and_the_next_goes_on(machines: EngineFixture) -> None:
    one, added = await with_buckets(machines, 3, *NOTHING_AHEAD)
    found: list[Shown] = []
    after = None
    pages = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "LOOK_S", -1.0)
        patch.setattr(viewing, "SEGMENTS_A_ROUND", 2)
        while True:
            page = await scheduled(one, 1_000, after)
            found += shown(page.rows)
            pages += 1
            if page.next_after is None:
                break
            after = page.next_after
        with pytest.raises(QuotaExceeded, match="limit") as refused:
            await histogram(one)
    assert found == added
    assert pages > 3
    assert refused.value.retry_after_ms is not None


# ---- beside hand-out


async def test_counting_a_million_rows_takes_the_loop_next_to_nothing() -> None:
    settings = config.load(
        environment={},
        overrides=["daemon.id=one", "daemon.address=one:1", "daemon.shards=1", "limits.rows_per_request_max=100000"],
    )
    count, requests = 100_000, 10
    random = np.random.default_rng(1)
    async with real_engine.serving(settings) as engine:
        from_ms = time.time_ns() // 1_000_000 + 3_600_000
        for number in range(requests):
            batch = AddBatch(
                ledger_id=np.full(count, number, np.uint64),
                entry_id=random.permutation(count).astype(np.uint64),
                deliver_at_ms=(from_ms + random.integers(0, 86_400_000, count)).astype(np.uint64),
                delay_ms=None,
                key_hash=None,
                return_already_due=False,
            )
            await engine.requests.add("t", batch)
        await engine.requests.seal("t")
        for number in range(requests):
            # So that no bucket is whole, and every segment of the bars is read.
            await engine.requests.cancel("t", None, np.full(1, number, np.uint64), np.full(1, 7, np.uint64))
        await _check_histogram(engine, from_ms, requests * (count - 1))


async def _check_histogram(engine: Engine, from_ms: int, rows: int) -> None:
    loop_began_s, all_began_s = time.thread_time(), time.process_time()
    view = call_values.View(from_ms=from_ms, until_ms=from_ms + 86_400_000)
    found = await engine.requests.histogram("t", view, 10_000)
    on_loop_s, in_all_s = time.thread_time() - loop_began_s, time.process_time() - all_began_s
    assert found.rows.sum() == rows
    assert found.segments_read >= 200
    assert in_all_s > 10 * on_loop_s, "the work is done in threads"
    assert on_loop_s < 0.1
