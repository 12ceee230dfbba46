"""Another process merges buckets behind the owner's back, at any moment: nothing is lost, and nothing that is gone
comes back, now or after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from daemon.core.decisions.withdrawal_decisions import RescheduleBatch
from daemon.owner import merge_watch
from daemon.topic import leases
from storage_backends import commit
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket
from storage_backends.topic_manifest import ClaimTopic
from tests._support.engine_fixture import Daemon, EngineFixture, Held, Receiver
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests.daemon._support import calling
from tests.daemon._support.calling import acknowledge, trim, up_to

BUCKETS = "/buckets/"
MANIFESTS = "/topics/"
# The buckets of the owner are merged by others alone.
ALONE = ("bucket.max_num_buckets=-1",)
# Nothing of a bucket is read before it is needed, and no collection looks at the manifest before.
NEARLY = (*ALONE, "delivery.lookahead_ms=100", "collection.interval_s=86400")
DUE_MS = 30_000

Position = tuple[int, int]
Answer = TypeVar("Answer")


def positions(ledger_id: int, entries: Iterable[int]) -> set[Position]:
    return {(ledger_id, entry) for entry in entries}


async def seal(daemon: Daemon) -> None:
    await daemon.call(daemon.engine.requests.seal("t"))


async def bucket_of(
    daemon: Daemon,
    ledger_id: int,
    entries: Sequence[int] = range(20),
    delay_ms: int = DUE_MS,
    *,
    subscription: str | None = None,
) -> None:
    """A bucket with entries of one ledger."""
    await daemon.add("t", ledger_id, entries, delay_ms, subscription=subscription)
    await seal(daemon)


async def with_two_buckets(machines: EngineFixture, *settings: str, delay_ms: int = DUE_MS) -> Daemon:
    """Ledgers 1 and 2, 20 entries each; a subscription `s` is owed them."""
    one = await machines.served_by("one", *(settings or ALONE))
    await one.call(one.engine.requests.create_subscription("t", "s"))
    for ledger_id in (1, 2):
        await bucket_of(one, ledger_id, delay_ms=delay_ms)
    return one


def served(daemon: Daemon) -> set[str]:
    return set(daemon.topic("t").core.indexes.sealed)


async def learned(daemon: Daemon, merged: LiveBucket) -> None:
    await daemon.until(lambda: merged.object.name in served(daemon), timeout_s=merge_watch.LOOK_S + 5)


async def cancel(daemon: Daemon, ledger_id: int, entries: Sequence[int]) -> None:
    outcome = await daemon.call(
        daemon.engine.requests.cancel(
            "t", None, np.full(len(entries), ledger_id, np.uint64), np.array(entries, np.uint64)
        )
    )
    assert outcome.cancelled == len(entries)


async def reschedule(daemon: Daemon, ledger_id: int, entries: Sequence[int], delay_ms: int) -> None:
    batch = RescheduleBatch(
        ledger_id=np.full(len(entries), ledger_id, np.uint64),
        entry_id=np.array(entries, np.uint64),
        deliver_at_ms=None,
        delay_ms=np.full(len(entries), delay_ms, np.uint64),
        key_hash=None,
    )
    outcome = await daemon.call(daemon.engine.requests.reschedule("t", None, batch))
    assert outcome.rescheduled == len(entries)


async def everything(daemon: Daemon, subscription: str = "s") -> Receiver:
    """What is due within two minutes."""
    receiver = await daemon.receiver("t", subscription)
    await asyncio.sleep(120)
    assert not receiver.early
    assert len(receiver.rows) == len(receiver.positions), "no position twice"
    assert daemon.engine.health.serving
    return receiver


def reads_merged_away(daemon: Daemon) -> float:
    return daemon.metrics.registry.get_sample_value("tarry_merged_away_reads_total") or 0.0


BOTH = positions(1, range(20)) | positions(2, range(20))


# ---- learning


async def test_a_merge_of_another_process_is_learned_within_a_minute_and_its_rows_are_handed_out_once(
    machines: EngineFixture,
) -> None:
    one = await with_two_buckets(machines, delay_ms=200_000)
    sources = served(one)
    merged = MergingProcess(machines.store).merge_all()
    await learned(one, merged)
    assert served(one).isdisjoint(sources)
    receiver = await one.receiver("t")
    await receiver.received(40)
    assert receiver.positions == BOTH
    assert len(receiver.rows) == 40


async def test_a_commit_of_its_own_tells_the_owner_of_a_merge(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines, delay_ms=200_000)
    merged = MergingProcess(machines.store).merge_all()
    await bucket_of(one, 3, delay_ms=200_000)
    await one.until(lambda: merged.object.name in served(one), timeout_s=2)
    assert len(served(one)) == 2


async def test_merges_of_merged_buckets_are_learned_though_those_in_between_were_not(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    await bucket_of(one, 3)
    receiver = await one.receiver("t")
    await cancel(one, 1, range(5))
    other = MergingProcess(machines.store)
    inner = other.merge(other.live()[:2])
    outer = other.merge_all()
    assert inner.object.name not in served(one)
    await cancel(one, 3, range(5))
    await learned(one, outer)
    assert served(one) == {outer.object.name}
    await receiver.received(50)
    assert receiver.positions == BOTH - positions(1, range(5)) | positions(3, range(5, 20))


async def test_a_merge_that_leaves_no_row_leaves_no_bucket_behind(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    await bucket_of(one, 3)
    held = one.pause("put_if_absent", MANIFESTS, then=Fault.FAIL_BEFORE)
    await trim(one, up_to(100, 1, 2))
    await held.reached()
    other = MergingProcess(machines.store)
    # What is gone is in the manifest with the next seal only.
    written = other.write(other.live()[:2])
    assert written.operation.bucket is not None
    held.release()
    await one.until(lambda: len(other.live()) == 1)
    with pytest.raises(commit.Refused):
        other.commit(written)
    assert (await everything(one)).positions == positions(3, range(20))


# ---- what is gone stays gone


async def gone_in_every_way(daemon: Daemon, receiver: Receiver) -> set[Position]:
    """Some rows of both ledgers leave; what is left of them."""
    await cancel(daemon, 1, [0, 1])
    await reschedule(daemon, 2, [18, 19], 45_000)
    await trim(daemon, up_to(4, 2))
    await receiver.received(31)
    due = [row for row in receiver.rows if row[:2] in positions(1, range(4, 8)) | positions(2, range(5, 9))]
    await receiver.acknowledge(due)
    return BOTH - positions(1, [0, 1, *range(4, 8)]) - positions(2, range(9))


@pytest.mark.parametrize("sealed", [False, True], ids=["journal", "sealed"])
@pytest.mark.parametrize("known", [False, True], ids=["not learned", "learned"])
@pytest.mark.parametrize(
    "settings", [ALONE, (*ALONE, "journal.checkpoint_slots=1")], ids=["no checkpoint", "checkpoint"]
)
async def test_what_left_between_the_plan_and_the_commit_of_a_merge_is_gone_also_after_a_restart(
    machines: EngineFixture, settings: tuple[str, ...], known: bool, sealed: bool
) -> None:
    one = await with_two_buckets(machines, *settings)
    receiver = await one.receiver("t")
    other = MergingProcess(machines.store)
    written = other.write(other.live())
    left = await gone_in_every_way(one, receiver)
    if sealed:
        await bucket_of(one, 9, range(3), delay_ms=200_000)
    merged = other.commit(written)
    assert merged is not None
    if known:
        await learned(one, merged)
        more = [row for row in receiver.rows if row[:2] in positions(1, [10, 11]) | positions(2, [12])]
        await receiver.acknowledge(more)
        left -= {row[:2] for row in more}
        if sealed:
            await bucket_of(one, 9, range(3, 6), delay_ms=200_000)
    await asyncio.sleep(1)
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert merged.object.name in served(two)
    assert (await everything(two)).positions == left


async def test_what_is_acknowledged_after_a_merge_that_is_not_learned_yet_is_gone(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines, delay_ms=100)
    receiver = await one.receiver("t")
    rows = await receiver.received(40)
    await receiver.acknowledge(rows[:5])
    merged = MergingProcess(machines.store).merge_all()
    await receiver.acknowledge(rows[5:15])
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert served(two) == {merged.object.name}
    assert (await everything(two)).positions == {row[:2] for row in rows[15:]}


async def test_each_subscription_has_acknowledged_in_a_merged_bucket_what_it_had_in_its_sources(
    machines: EngineFixture,
) -> None:
    one = await with_two_buckets(machines, delay_ms=100)
    await one.call(one.engine.requests.create_subscription("t", "u"))
    await bucket_of(one, 3, delay_ms=100)
    await bucket_of(one, 4, delay_ms=100)
    first, second = await one.receiver("t", "s"), await one.receiver("t", "u")
    await first.received(80)
    await second.received(40)
    await first.acknowledge([row for row in first.rows if row[1] < 10])
    await second.acknowledge([row for row in second.rows if row[1] >= 10])
    other = MergingProcess(machines.store)
    await seal(one)
    merged = other.merge_all()
    await learned(one, merged)
    await bucket_of(one, 9, range(3), delay_ms=500_000)
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert (await everything(two, "s")).positions == {row[:2] for row in first.rows if row[1] >= 10}
    assert (await everything(two, "u")).positions == {row[:2] for row in second.rows if row[1] < 10}


# ---- in the middle of something


async def test_a_merge_between_the_cut_and_the_commit_of_a_seal(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    receiver = await one.receiver("t")
    await cancel(one, 1, [0, 1])
    await one.add("t", 3, range(20), DUE_MS)
    held = one.pause("put", BUCKETS)
    sealing = one.call(one.engine.requests.seal("t"))
    await held.reached()
    await cancel(one, 1, [2, 3])
    merged = MergingProcess(machines.store).merge_all()
    await cancel(one, 2, [0])
    adopting = one.pause("get_range", merged.object.name)
    held.release()
    await sealing
    await adopting.reached()
    # Its progress names the sources.
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert len(served(two)) == 2
    left = BOTH - positions(1, range(4)) - {(2, 0)} | positions(3, range(20))
    assert (await everything(two)).positions == left
    assert not receiver.rows


@pytest.mark.parametrize("learn", [False, True], ids=["not learned", "learned"])
async def test_the_bucket_of_a_seal_is_merged_by_another_process_before_the_commit_has_returned(
    machines: EngineFixture, learn: bool
) -> None:
    one = await with_two_buckets(machines)
    await one.add("t", 3, range(20), DUE_MS)
    sealing, answered = await until_put_and_not_answered(one, one.engine.requests.seal("t"))
    await cancel(one, 3, [0, 1])
    other = MergingProcess(machines.store)
    merged = other.merge_all()
    assert merged.rows == 60
    if learn:
        answered.release()
        await sealing
        await learned(one, merged)
        assert served(one) == {merged.object.name}
        await bucket_of(one, 9, range(3), delay_ms=500_000)
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert (await everything(two)).positions == BOTH | positions(3, range(2, 20))


async def until_put_and_not_answered(
    daemon: Daemon, call: Coroutine[Any, Any, Answer]
) -> tuple[asyncio.Task[Answer], Held]:
    """The next manifest has landed, and its sender waits for what HEAD says of it."""
    daemon.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=MANIFESTS)
    answered = daemon.pause("head", MANIFESTS)
    task = daemon.call(call)
    await answered.reached()
    return task, answered


@pytest.mark.parametrize("adopted", [False, True], ids=["crash before it is adopted", "adopted"])
async def test_a_merge_between_the_decision_and_the_commit_of_a_drop(machines: EngineFixture, adopted: bool) -> None:
    one = await with_two_buckets(machines)
    other = MergingProcess(machines.store)
    dropping = one.pause("put_if_absent", MANIFESTS)
    await cancel(one, 1, range(20))
    await dropping.reached()
    merged = other.merge_all()
    assert merged.rows == 40, "that the rows are gone only the owner knew"
    adopting = one.pause("get_range", merged.object.name)
    await one.add("t", 3, range(3), 200_000)
    dropping.release()
    await adopting.reached()
    if adopted:
        # Its progress is as of a moment at which the sources are served yet.
        sealing = one.call(one.engine.requests.seal("t"))
        await asyncio.sleep(1)
        adopting.release()
        await sealing
        assert merged.object.name in served(one)
        assert len(served(one)) == 2
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert (await everything(two)).positions == positions(2, range(20))


async def test_a_merge_while_a_takeover_is_loading_and_its_sources_are_deleted(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    await cancel(one, 1, [0, 1])
    epoch = one.shards[0].epoch
    one.kill()
    other = MergingProcess(machines.store)
    sources = other.live()
    two = machines.daemon("one", *ALONE)
    reading = two.pause("get_range", sources[1].object.name)
    await two.start()
    await reading.reached()
    merged = other.merge_all()
    other.collect(sources)
    reading.release()
    await two.serving()
    assert two.shards[0].epoch == epoch + 1, "the shard was not lost over it"
    assert served(two) == {merged.object.name}
    assert two.damage_found("bucket") == 0
    assert (await everything(two)).positions == BOTH - positions(1, [0, 1])
    assert not any(live.quarantined for live in other.tip().live)


async def test_a_merge_between_a_claim_and_the_reading_of_what_it_found(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    await bucket_of(one, 3, delay_ms=DUE_MS)
    epoch = one.shards[0].epoch
    one.kill()
    other = MergingProcess(machines.store)
    two = machines.daemon("one", *ALONE)
    claiming = two.pause("put_if_absent", names.topic_manifest_prefix(0, names.topic_id("t")))
    await two.start()
    await claiming.reached()
    first = other.merge_run(2)
    reading = two.pause("get_range", first.object.name)
    claiming.release()
    await reading.reached()
    sources = other.live()
    merged = other.merge_all()
    other.collect(sources)
    reading.release()
    await two.serving()
    assert two.shards[0].epoch == epoch + 1, "the shard was not lost over it"
    assert served(two) == {merged.object.name}
    assert two.damage_found("bucket") == 0
    assert (await everything(two)).positions == BOTH | positions(3, range(20))
    assert not any(live.quarantined for live in other.tip().live)


async def test_a_merge_while_a_takeover_is_loading_what_it_has_read_already(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines)
    await cancel(one, 1, [0, 1])
    one.kill()
    other = MergingProcess(machines.store)
    last = other.live()[-1].object.name
    two = machines.daemon("one", *ALONE)
    reading = two.pause("get_range", last)
    await two.start()
    await reading.reached()
    merged = other.merge_all()
    reading.release()
    await two.serving()
    await learned(two, merged)
    assert (await everything(two)).positions == BOTH - positions(1, [0, 1])


# ---- objects that are no longer there


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_bucket_that_was_merged_and_deleted_is_not_damaged_but_read_from_what_took_its_place(
    machines: EngineFixture, restarted: bool
) -> None:
    one = await with_two_buckets(machines, *NEARLY)
    if restarted:
        one.kill()
        one = await machines.served_by("one", *NEARLY)
    receiver = await one.receiver("t")
    other = MergingProcess(machines.store, hints=False)
    sources = other.live()
    merged = other.merge_all()
    other.collect(sources)
    await receiver.received(40)
    assert receiver.positions == BOTH
    assert not receiver.early
    assert served(one) == {merged.object.name}
    assert reads_merged_away(one) >= 1, "it was the read that told it"
    assert one.damage_found("bucket") == 0
    assert not any(live.quarantined for live in other.tip().live)


async def test_requests_that_name_rows_of_a_bucket_that_was_merged_and_deleted_wait_for_what_took_its_place(
    machines: EngineFixture,
) -> None:
    one = await with_two_buckets(machines, *NEARLY)
    receiver = await one.receiver("t")
    rows = await receiver.received(40)
    receiver.stream.close()
    other = MergingProcess(machines.store, hints=False)
    sources = other.live()
    merged = other.merge_all()
    other.collect(sources)
    for source in sources:
        # As if other topics had needed the room.
        one.topic("t").core.indexes.cache.discard_bucket(source.object.name)
    held = one.pause("get_range", merged.object.name)
    of_one_bucket = [row for row in rows if row[0] == 1]
    finds_it_missing = acknowledge(one, of_one_bucket[:10])
    await held.reached()
    comes_then = acknowledge(one, of_one_bucket[10:])
    await asyncio.sleep(1)
    held.release()
    assert (await finds_it_missing, await comes_then) == (0, 0)
    assert (await everything(one)).positions == positions(2, range(20))


async def test_a_damaged_bucket_that_was_merged_is_not_quarantined_and_its_rows_come(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines, *NEARLY)
    one.kill()
    other = MergingProcess(machines.store)
    sources = other.live()
    two = await machines.served_by("one", *NEARLY)
    receiver = await two.receiver("t")
    merged = other.merge_all()
    for source in sources:
        body, metadata = machines.store.get_with_metadata(source.object.name)
        machines.store.put(source.object.name, bytes(len(body)), metadata=metadata)
    await receiver.received(40)
    assert receiver.positions == BOTH
    assert served(two) == {merged.object.name}
    assert two.engine.health.serving
    assert not any(live.quarantined for live in other.tip().live)


async def merged_and_deleted(daemon: Daemon, other: MergingProcess) -> Held:
    """The daemon has no segment in memory, and its read of the merged bucket waits."""
    for name in served(daemon):
        daemon.topic("t").core.indexes.cache.discard_bucket(name)
    sources = other.live()
    merged = other.merge_all()
    adopting = daemon.pause("get_range", merged.object.name)
    other.collect(sources)
    return adopting


async def test_what_came_due_in_a_bucket_that_was_merged_and_deleted_does_not_leave_as_if_it_had_not(
    machines: EngineFixture,
) -> None:
    one = await with_two_buckets(machines, *NEARLY)
    adopting = await merged_and_deleted(one, MergingProcess(machines.store, hints=False))
    await adopting.reached()
    assert not one.topic("t").core.indexes.readable
    await asyncio.sleep(1)
    cancelling = calling.cancel(one, 1, range(3))
    rescheduling = calling.reschedule(one, 2, range(3), 60_000)
    await asyncio.sleep(1)
    assert not cancelling.done()
    assert not rescheduling.done()
    adopting.release()
    cancelled, rescheduled = await cancelling, await rescheduling
    assert (cancelled.cancelled, cancelled.already_due.tolist()) == (0, [0, 1, 2])
    assert (rescheduled.rescheduled, rescheduled.already_due.tolist()) == (0, [0, 1, 2])
    assert (await everything(one)).positions == BOTH


async def test_a_lease_waits_for_what_came_due_in_a_bucket_that_was_merged_and_deleted(machines: EngineFixture) -> None:
    one = await with_two_buckets(machines, *NEARLY)
    adopting = await merged_and_deleted(one, MergingProcess(machines.store, hints=False))
    await adopting.reached()
    await asyncio.sleep(1)
    leasing = calling.get(one, max_rows=100)
    await asyncio.sleep(leases.SETTLE_S / 2)
    assert not leasing.done()
    adopting.release()
    assert len(calling.rows_of(await leasing)) == 40


async def with_an_idle_backlog(machines: EngineFixture) -> Daemon:
    """All rows are due, and subscription `u` has no dispatcher either."""
    one = await with_two_buckets(machines, *NEARLY)
    await one.call(one.engine.requests.create_subscription("t", "u"))
    await asyncio.sleep(DUE_MS / 1_000 + 1)
    assert one.topic("t").core.indexes.due_rows == 40
    return one


async def test_a_subscription_that_is_read_while_its_buckets_were_merged_and_deleted_gets_all_of_its_backlog(
    machines: EngineFixture,
) -> None:
    one = await with_an_idle_backlog(machines)
    adopting = await merged_and_deleted(one, MergingProcess(machines.store, hints=False))
    first = await one.receiver("t", "s")
    await adopting.reached()
    second = await one.receiver("t", "u")
    await one.add("t", 3, range(3), 100)
    await asyncio.sleep(1)
    adopting.release()
    await first.received(43)
    await second.received(43)
    assert first.positions == second.positions == BOTH | positions(3, range(3))


async def test_what_is_acknowledged_in_a_bucket_that_was_merged_and_deleted_is_not_ignored(
    machines: EngineFixture,
) -> None:
    one = await with_an_idle_backlog(machines)
    first = await one.receiver("t", "s")
    rows = await first.received(40)
    first.stream.close()
    adopting = await merged_and_deleted(one, MergingProcess(machines.store, hints=False))
    _ = await one.receiver("t", "u")
    await adopting.reached()
    acknowledging = acknowledge(one, rows[:30])
    await asyncio.sleep(1)
    adopting.release()
    assert await acknowledging == 0
    assert (await everything(one)).positions == {row[:2] for row in rows[30:]}


async def test_a_backlog_that_passed_over_a_damaged_bucket_has_its_rows_if_that_was_merged(
    machines: EngineFixture,
) -> None:
    one = await with_an_idle_backlog(machines)
    other = MergingProcess(machines.store, hints=False)
    sources = other.live()
    merged = other.merge_all()
    for source in sources:
        one.topic("t").core.indexes.cache.discard_bucket(source.object.name)
        body, metadata = machines.store.get_with_metadata(source.object.name)
        machines.store.put(source.object.name, bytes(len(body)), metadata=metadata)
    quarantining = one.pause("put_if_absent", MANIFESTS)
    first = await one.receiver("t", "s")
    await quarantining.reached()
    second = await one.receiver("t", "u")
    await asyncio.sleep(1)
    quarantining.release()
    await learned(one, merged)
    await first.received(40)
    await second.received(40)
    assert first.positions == second.positions == BOTH
    assert not any(live.quarantined for live in other.tip().live)


# ---- own indexes


async def test_buckets_of_an_own_index_are_merged_and_leave_with_their_subscription(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ALONE)
    for name in ("s", "u"):
        await one.call(one.engine.requests.create_subscription("t", name))
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, range(20), DUE_MS, subscription="u")
        await bucket_of(one, ledger_id, subscription="s")
    other = MergingProcess(machines.store)
    merged, leaving = other.merge_all(1), other.merge_all(2)
    adopting = one.pause("get_range", leaving.object.name)
    await asyncio.sleep(0)
    await adopting.reached()
    await one.call(one.engine.requests.delete_subscription("t", "u"))
    adopting.release()
    await learned(one, merged)
    assert (await everything(one)).positions == BOTH
    assert [live.object.name for live in other.tip().live] in ([merged.object.name], [])
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert set(two.topic("t").core.indexes) <= {0, 1}


async def test_a_merge_is_learned_while_the_deletion_of_a_subscription_is_committed_and_not_answered(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *ALONE)
    for name in ("s", "u"):
        await one.call(one.engine.requests.create_subscription("t", name))
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, range(20), DUE_MS, subscription="u")
        await bucket_of(one, ledger_id)
    merged = MergingProcess(machines.store).merge_all()
    deleting, answered = await until_put_and_not_answered(one, one.engine.requests.delete_subscription("t", "u"))
    # The collector reads the newest manifest.
    passes = one.engine.requests.collect(dry_run=False, force=False, retry_dead=False)
    await one.call(asyncio.wait_for(_exhausted(passes), 60))
    await one.until(lambda: merged.object.name in served(one))
    answered.release()
    await deleting
    assert served(one) == {merged.object.name}
    assert (await everything(one)).positions == BOTH


async def _exhausted(passes: AsyncIterator[object]) -> None:
    async for _ in passes:
        pass


async def test_rows_that_a_subscription_acknowledged_in_its_own_merged_bucket_do_not_come_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *ALONE)
    await one.call(one.engine.requests.create_subscription("t", "s"))
    for ledger_id in (1, 2):
        await bucket_of(one, ledger_id, delay_ms=100, subscription="s")
    receiver = await one.receiver("t")
    rows = await receiver.received(40)
    MergingProcess(machines.store).merge_all(1)
    assert await acknowledge(one, rows[:30]) == 0
    one.kill()
    two = await machines.served_by("one", *ALONE)
    assert (await everything(two)).positions == {row[:2] for row in rows[30:]}


async def test_a_merge_behind_the_claim_of_another_owner_tells_the_former_one_that_its_epoch_is_over(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    one = await with_two_buckets(machines)
    commits, epoch = one.shards[0].topics["t"].manifests, one.shards[0].epoch
    claim = ClaimTopic(epoch=epoch + 1)
    commit.commit(commits._manifests, claim, writer="other", created_ms=0, deadline_s=1.0)
    other = MergingProcess(machines.store)
    written = other.write(other.live())
    await one.call(commits.commit(lambda tip: written.operation))
    await one.until(lambda: 0 in one.shards and one.shards[0].epoch > epoch)
    assert any("owner epoch is 2, not 1" in each.getMessage() for each in caplog.records)
    assert (await everything(one)).positions == BOTH
