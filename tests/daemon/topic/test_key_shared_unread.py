"""The order of a key where a segment that is due is not read yet: after a restart, and without one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from daemon.core.decisions import feeding
from daemon.core.decisions.key_shared_backlogs import KeySharedBacklogs
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import SegmentRange
from daemon.topic.bucket_reads import SegmentLoader
from storage_backends.formats.manifest import NackOrder
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.key_dispatching import HALF, HASHES, Sent, add, by_key, consumer, open_by_key, sticky

KEY = 7
TINY = (
    "bucket.max_indexes_per_bucket_snapshot_segment=10",
    "bucket.min_indexes_per_bucket_snapshot_segment=0",
    "delivery.lookahead_ms=0",
)


async def seal(daemon: Daemon) -> None:
    await daemon.call(daemon.engine.requests.seal("t"))


async def restarted(machines: EngineFixture, daemon: Daemon) -> Daemon:
    """The next one, as soon as it serves."""
    daemon.kill()
    after = await machines.daemon("one").start()
    return await after.until(lambda: after.engine.health.serving)


def places(sent: Sequence[Sent]) -> list[tuple[int, int, int]]:
    return [(each.row.deliver_at_ms, each.row.ledger, each.entry) for each in sent]


def overtakes(sent: Sequence[Sent]) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Rows that came right after one that is due later."""
    found = places(sent)
    return [(before, row) for before, row in itertools.pairwise(found) if row < before]


async def handed_out_after_a_restart(machines: EngineFixture, rows: int) -> list[Sent]:
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "s", by_key()))
    await add(one, 1, range(rows), [KEY] * rows)
    await seal(one)
    await add(one, 2, range(rows), [KEY] * rows, 1)
    await asyncio.sleep(1)
    after = await restarted(machines, one)
    shared = await open_by_key(after, [consumer(1)])
    return await shared.next(2 * rows)


async def test_after_a_restart_no_row_of_a_key_passes_one_whose_segment_is_not_read(machines: EngineFixture) -> None:
    sent = await handed_out_after_a_restart(machines, 3_000)
    assert overtakes(sent) == []
    assert [(each.row.ledger, each.entry) for each in sent] == [(n, entry) for n in (1, 2) for entry in range(3_000)]


def nothing_is_held_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeySharedBacklogs, "bound", lambda self, state: None)


async def test_rows_that_do_not_wait_for_what_is_not_read_are_found_out(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_is_held_up(monkeypatch)
    assert overtakes(await handed_out_after_a_restart(machines, 30))


async def in_tiny_segments(machines: EngineFixture) -> list[Sent]:
    """Rows of two buckets and of the one in memory take turns to come due, while a consumer listens."""
    one = await machines.served_by("one", *TINY)
    shared = await open_by_key(one, [consumer(1)], policy=by_key())
    for ledger in (1, 2, 3):
        # Some together, so that a pass takes segments of several buckets.
        for delay_ms, first in ((2_000, 0), (2_000 + ledger, 40), (4_000, 80)):
            await add(one, ledger, range(first, first + 40), [KEY] * 40, delay_ms)
        if ledger < 3:
            await seal(one)
    return await shared.next(360)


async def test_with_segments_of_ten_rows_that_are_loaded_when_they_are_due_a_key_keeps_its_order(
    machines: EngineFixture,
) -> None:
    assert overtakes(await in_tiny_segments(machines)) == []


async def test_a_subscription_that_is_fed_beside_a_segment_that_is_not_read_is_found_out(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeySharedBacklogs, "hold_up", lambda self, states, now_ms: None)
    assert overtakes(await in_tiny_segments(machines))


async def busy_while_much_comes_due(machines: EngineFixture) -> list[Sent]:
    """When all is due the first segment is in memory and the others are not: the daemon was too busy to look."""
    one = await machines.served_by("one", *TINY, "delivery.lookahead_ms=1000")
    shared = await open_by_key(one, [consumer(1)], policy=by_key())
    await add(one, 1, range(10), [KEY] * 10, 4_000)
    await add(one, 1, range(10, 40), [KEY] * 30, 6_000)
    await seal(one)
    await add(one, 2, range(40), [KEY] * 40, 6_000)
    await asyncio.sleep(3.9)
    one.loop.pass_time(3.0)
    return await shared.next(80)


async def test_what_turns_out_not_to_be_read_is_not_passed(machines: EngineFixture) -> None:
    assert overtakes(await busy_while_much_comes_due(machines)) == []


def the_pass_goes_on(patch: pytest.MonkeyPatch) -> None:
    take_due = Indexes._take_due

    def further(self: Indexes, now_ms: int, limit: int, *, ends_at_unread: bool) -> Any:
        del ends_at_unread
        return take_due(self, now_ms, limit, ends_at_unread=False)

    patch.setattr(Indexes, "_take_due", further)


async def test_rows_that_are_taken_beyond_what_turns_out_not_to_be_read_are_found_out(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_pass_goes_on(monkeypatch)
    assert overtakes(await busy_while_much_comes_due(machines))


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No segment is read before it is set."""
    event = asyncio.Event()
    read = SegmentLoader._read_until_there

    async def when_readable(self: SegmentLoader, segments: SegmentRange) -> list[KeyedRows]:
        await event.wait()
        return await read(self, segments)

    monkeypatch.setattr(SegmentLoader, "_read_until_there", when_readable)
    return event


async def nacked_and_restarted(machines: EngineFixture, readable: asyncio.Event) -> tuple[list[Sent], list[Sent]]:
    """What was nacked before a restart, and what is handed out after it: its time comes while its row is not read, and
    rows of another key come due meanwhile.
    """
    one = await machines.served_by("one")
    policy = by_key(nack_order=NackOrder.BLOCK_KEY)
    shared = await open_by_key(one, [consumer(1, permits=20)], policy=policy)
    await add(one, 1, range(20), [KEY] * 20)
    first = await shared.next(20)
    assert await shared.acknowledge(first[:4]) == 0
    assert await shared.nack([first[4]], 8_000) is not None
    await seal(one)
    await add(one, 2, range(20), [KEY] * 20)
    await asyncio.sleep(5)
    after = await restarted(machines, one)
    again = await open_by_key(after, [consumer(1)])
    passes, pass_due = 0, TopicState.pass_due

    def counted(core: TopicState, now_ms: int, limit: int) -> int:
        nonlocal passes
        passes += 1
        assert passes < 100, "what has to wait wakes nobody"
        return pass_due(core, now_ms, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopicState, "pass_due", counted)
        assert await again.nothing_more(for_s=20.0)
        await add(after, 3, [0], [KEY + 1])
        assert await again.nothing_more()
    readable.set()
    return [first[4]], [each for each in await again.next(37) if each.row.ledger != 3]


async def test_after_a_restart_what_was_nacked_goes_first_and_nothing_passes_what_is_not_read(
    machines: EngineFixture, readable: asyncio.Event
) -> None:
    (nacked,), sent = await nacked_and_restarted(machines, readable)
    assert (sent[0].row.ledger, sent[0].entry) == (nacked.row.ledger, nacked.entry)
    assert overtakes(sent) == []


async def let_go_and_sought(machines: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Of a key whose consumer has no permits more rows wait than there is room for. It has some when later ones are
    due, of which those in between are not read.
    """
    one = await machines.served_by("one", *TINY, "delivery.ready_rows_max=10")
    one_key = [consumer(1, (0, HALF - 1), permits=0), consumer(2, (HALF, HASHES - 1))]
    shared = await open_by_key(one, one_key, policy=sticky())
    await add(one, 1, range(40), [KEY] * 40)
    await add(one, 2, range(40), [KEY] * 40, 4_000)
    await seal(one)
    await add(one, 3, range(40), [KEY] * 40, 4_001)
    await one.until(lambda: one.topic("t").core.subscriptions[1].key_shared.let_go is not None)  # type: ignore[union-attr]
    read, readable = SegmentLoader._read_until_there, asyncio.Event()

    async def when_readable(self: SegmentLoader, segments: SegmentRange) -> list[KeyedRows]:
        # The rows of the first ledger are in the first four segments.
        if segments.last >= 4:
            await readable.wait()
        return await read(self, segments)

    monkeypatch.setattr(SegmentLoader, "_read_until_there", when_readable)
    await asyncio.sleep(6)
    shared.stream.grant(1_000, 1)
    first = await shared.next(40)
    await shared.nothing_more()
    readable.set()
    return first + await shared.next(80)


async def test_rows_that_were_let_go_and_are_sought_do_not_pass_what_is_not_read(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = await let_go_and_sought(machines, monkeypatch)
    assert overtakes(sent) == []
    assert len(set(places(sent))) == 120


async def test_rows_that_are_sought_whatever_is_not_read_are_found_out(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = feeding.find_let_go

    def without_bound(indexes: Any, cache: Any, state: Any, limit: int, bound: Any = None) -> list[SegmentRange]:
        return find(indexes, cache, state, limit)

    monkeypatch.setattr(feeding, "find_let_go", without_bound)
    assert overtakes(await let_go_and_sought(machines, monkeypatch))


async def settled_by_an_earlier_time(machines: EngineFixture, readable: asyncio.Event) -> list[Sent]:
    """What is handed out while the first rows are not read, and somebody settles what was due a minute ago."""
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "s", by_key()))
    await add(one, 1, range(20), [KEY] * 20)
    await seal(one)
    await add(one, 2, range(20), [KEY] * 20, 1)
    await asyncio.sleep(1)
    after = await restarted(machines, one)
    shared = await open_by_key(after, [consumer(1)])
    assert await shared.nothing_more(for_s=0.5)
    topic = after.topic("t")
    topic.pass_due(after.now_ms() - 60_000)
    topic.served_subscription(topic.core.subscriptions[1]).refill()
    await asyncio.sleep(0)
    readable.set()
    return await shared.next(40)


async def test_who_settles_what_was_due_earlier_lets_nothing_pass_what_is_not_read(
    machines: EngineFixture, readable: asyncio.Event
) -> None:
    assert overtakes(await settled_by_an_earlier_time(machines, readable)) == []


async def test_a_shared_subscription_of_the_same_topic_does_not_wait_for_what_is_not_read(
    machines: EngineFixture, readable: asyncio.Event
) -> None:
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "k", by_key()))
    await one.call(one.engine.requests.create_subscription("t", "s"))
    await add(one, 1, range(20), [KEY] * 20)
    await seal(one)
    await add(one, 2, range(20), [KEY] * 20, 1)
    await asyncio.sleep(1)
    after = await restarted(machines, one)
    shared = await open_by_key(after, [consumer(1)], subscription="k")
    receiver = await after.receiver("t")
    assert {row[0] for row in await receiver.received(20)} == {2}
    assert await shared.nothing_more()
    readable.set()
    assert overtakes(await shared.next(40)) == []
    await receiver.received(40)
