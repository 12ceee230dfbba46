"""Rows for one subscription alone: they are sealed, checkpointed and recovered beside the shared ones, and leave with
their subscription, whatever happens between two durable steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set

import pytest

from daemon.errors import NotFound, OutcomeUnknown
from storage_backends.formats import names
from storage_backends.formats.manifest import TopicManifest, decode_topic_manifest
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver, no_positions
from tests._support.fault_store import Call, Fault
from tests._support.merging_process import MergingProcess
from tests.daemon._support.calling import clear, get
from tests.daemon.shard.test_crash_points import At

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=40", "journal.checkpoint_slots=5")
BUCKETS = "/buckets/"
FAR_MS = 500_000

Position = tuple[int, int]


def manifests(machines: EngineFixture, topic: str = "t") -> list[TopicManifest]:
    prefix = names.topic_manifest_prefix(0, names.topic_id(topic))
    return [decode_topic_manifest(machines.store.get(key)) for key in machines.keys(prefix)]


def indexes_of(tip: TopicManifest) -> list[int]:
    """Whose the live buckets are."""
    return sorted(live.subscription_id for live in tip.live)


def positions(ledger_id: int, entries: Sequence[int]) -> set[Position]:
    return {(ledger_id, entry) for entry in entries}


async def seal(daemon: Daemon, topic: str = "t") -> None:
    await daemon.call(daemon.engine.requests.seal(topic))


async def delete(daemon: Daemon, subscription: str) -> None:
    await daemon.call(daemon.engine.requests.delete_subscription("t", subscription))


async def with_subscriptions(daemon: Daemon, *subscriptions: str) -> Daemon:
    for subscription in subscriptions:
        await daemon.call(daemon.engine.requests.create_subscription("t", subscription))
    return daemon


async def everything(daemon: Daemon, subscription: str) -> Receiver:
    """What the subscription is owed, all of which is due within a minute."""
    receiver = await daemon.receiver("t", subscription)
    await asyncio.sleep(60)
    assert not receiver.early
    assert len(receiver.rows) == len(set(receiver.rows)), "no row twice"
    return receiver


# ---- seals


async def test_one_seal_makes_a_bucket_of_every_index_that_has_rows(machines: EngineFixture) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a", "b", "c")
    await one.add("t", 1, range(10), FAR_MS)
    await one.add("t", 1, range(5, 15), FAR_MS, subscription="a")
    await one.add("t", 2, range(3), FAR_MS, subscription="c")
    before = len(manifests(machines))
    await seal(one)
    tip = machines.topic_tip()
    assert [(live.subscription_id, live.rows) for live in tip.live] == [(0, 10), (1, 10), (3, 3)]
    assert len(manifests(machines)) == before + 1
    assert tip.applied == one.shards[0].applied_slot
    assert not one.topic("t").core.indexes.has_mutable_rows


async def test_the_limits_of_a_seal_count_the_rows_of_all_indexes_together(machines: EngineFixture) -> None:
    one = await with_subscriptions(
        await machines.served_by("one", *SMALL[1:2], "bucket.min_index_count_per_bucket=40"), "a", "b"
    )
    await one.add("t", 1, range(20), FAR_MS, subscription="a")
    await one.add("t", 1, range(19), FAR_MS, subscription="b")
    await asyncio.sleep(2)
    assert not machines.keys(BUCKETS)
    await one.add("t", 9, [1], FAR_MS)
    await one.until(lambda: len(machines.topic_tip().live) == 3)


@pytest.mark.parametrize("sealed", [False, True], ids=["in memory", "sealed"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["journal", "checkpoint"])
async def test_rows_for_one_subscription_go_to_it_alone_also_after_a_crash(
    machines: EngineFixture, sealed: bool, checkpointed: bool
) -> None:
    settings = ("journal.checkpoint_slots=1",) if checkpointed else ()
    one = await with_subscriptions(await machines.served_by("one", *settings), "a", "b")
    await one.add("t", 1, range(10), 20_000)
    await one.add("t", 1, range(8, 20), 21_000, subscription="a")
    await one.add("t", 2, range(5), 20_000, subscription="b")
    if sealed:
        await seal(one)
    await asyncio.sleep(5)
    one.kill()
    two = await machines.served_by("one")
    first, second = await everything(two, "a"), await everything(two, "b")
    assert first.positions == positions(1, range(20))
    assert len(first.rows) == 22, "a position that was added twice, for all and for one, is handed out twice"
    assert second.positions == positions(1, range(10)) | positions(2, range(5))


async def test_what_was_acknowledged_in_an_own_bucket_before_a_seal_does_not_come_again_after_a_crash(
    machines: EngineFixture,
) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a")
    await one.add("t", 1, range(20), 100, subscription="a")
    await seal(one)
    receiver = await one.receiver("t", "a")
    rows = await receiver.received(20)
    await receiver.acknowledge(rows[:12])
    await one.add("t", 2, range(3), 20_000, subscription="a")
    await seal(one)
    one.kill()
    two = await machines.served_by("one")
    again = await everything(two, "a")
    assert again.positions == {row[:2] for row in rows[12:]} | positions(2, range(3))


class OwnClient:
    """Adds for all, for `a` and for `b` in turn, acknowledges the even entries, and remembers what was answered."""

    def __init__(self) -> None:
        self.owed: dict[str, set[Position]] = {"a": set(), "b": set()}
        self.done: dict[str, set[Position]] = {"a": set(), "b": set()}
        self.asked: dict[str, set[Position]] = {"a": set(), "b": set()}
        self._next = 0

    async def work(self, daemon: Daemon, batches: int) -> None:
        """Ends early when the daemon does."""
        try:
            receivers = {name: await daemon.receiver("t", name) for name in self.owed}
            for _ in range(batches):
                await self._batch(daemon)
                await asyncio.sleep(0.3)
                for name, receiver in receivers.items():
                    await self._acknowledge(name, receiver)
        except asyncio.CancelledError:
            assert daemon.dead

    async def _batch(self, daemon: Daemon) -> None:
        self._next += 1
        to = (None, "a", "b")[self._next % 3]
        ledger_id, entries = self._next // 6, range(self._next * 10, self._next * 10 + 10)
        delay_ms = 200 if self._next % 2 else 50_000
        await daemon.add("t", ledger_id, entries, delay_ms, subscription=to)
        for name in self.owed if to is None else (to,):
            self.owed[name] |= positions(ledger_id, entries)

    async def _acknowledge(self, name: str, receiver: Receiver) -> None:
        rows = [row for row in receiver.rows if row[1] % 2 == 0 and row[:2] not in self.asked[name]]
        if rows:
            self.asked[name] |= {row[:2] for row in rows}
            await receiver.acknowledge(rows)
            self.done[name] |= {row[:2] for row in rows}

    async def check(self, daemon: Daemon) -> None:
        """On the successor: what was answered is owed, nobody else's rows come, and nothing that was acknowledged."""
        # Whether an acknowledgement without an answer is durable, nobody knows.
        for name, owed in self.owed.items():
            receiver = await everything(daemon, name)
            assert not receiver.positions & self.done[name]
            assert owed - self.asked[name] <= receiver.positions
            others = self.owed["b" if name == "a" else "a"] - owed
            assert not receiver.positions & others


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize(
    "name",
    [
        "log.before_put",
        "log.after_put",
        "seal.before_bucket_put",
        "seal.after_bucket_put",
        "checkpoint.before_put",
        "checkpoint.after_put",
    ],
)
async def test_a_crash_around_a_seal_of_several_indexes_loses_nothing_that_was_answered(
    machines: EngineFixture, name: str, nth: int
) -> None:
    one = await machines.served_by("one", *SMALL)
    client = OwnClient()
    place = At(one, name, nth)
    work = asyncio.ensure_future(client.work(one, 40))
    await one.until(lambda: place.reached)
    one.kill()
    await work
    await client.check(await machines.served_by("one", *SMALL))


@pytest.mark.parametrize("then", [Fault.FAIL_BEFORE, Fault.NONE], ids=["not landed", "landed"])
@pytest.mark.parametrize("nth", [2, 3])
async def test_a_crash_at_the_manifest_of_a_seal_of_several_indexes_loses_nothing(
    machines: EngineFixture, nth: int, then: Fault
) -> None:
    one = await with_subscriptions(await machines.served_by("one", *SMALL), "a", "b")
    client = OwnClient()
    seals = 0

    def decide(call: Call) -> Fault:
        nonlocal seals
        if call.operation == "put_if_absent" and "/topics/" in call.key:
            seals += 1
            if seals == nth:
                one.loop.call_soon_threadsafe(one.kill)
                return then
        return Fault.NONE

    one.decide = decide
    work = asyncio.ensure_future(client.work(one, 40))
    await one.until(lambda: one.dead)
    await work
    await client.check(await machines.served_by("one", *SMALL))


async def test_a_seal_that_is_slower_than_the_orphan_floor_costs_the_shard_and_no_row(machines: EngineFixture) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a", "b")
    await one.add("t", 1, range(10), 20_000, subscription="a")
    await one.add("t", 2, range(10), 20_000)
    epoch = one.shards[0].epoch
    held = one.pause("put", BUCKETS)
    sealing = one.call(one.engine.requests.seal("t"))
    await held.reached()
    MergingProcess(machines.store).set_floor()
    held.release()
    with pytest.raises(OutcomeUnknown):
        await sealing
    await one.until(lambda: 0 in one.shards and one.shards[0].epoch > epoch)
    await one.serving()
    assert (await everything(one, "a")).positions == positions(1, range(10)) | positions(2, range(10))
    assert (await everything(one, "b")).positions == positions(2, range(10))


# ---- deletion


async def filled(daemon: Daemon) -> Daemon:
    """`a` and `b` are owed rows of the shared index and of their own, in buckets, in memory, waiting and due."""
    await with_subscriptions(daemon, "a", "b")
    for name in ("a", "b"):
        await daemon.add("t", 1, range(10), 30_000, subscription=name)
        await daemon.add("t", 1, range(10, 15), 100, subscription=name)
    await daemon.add("t", 2, range(10), 30_000)
    await seal(daemon)
    for name in ("a", "b"):
        await daemon.add("t", 3, range(10), 30_000, subscription=name)
    await daemon.add("t", 4, range(10), 30_000)
    await asyncio.sleep(1)
    return daemon


OWN = positions(1, range(15)) | positions(3, range(10))
SHARED = positions(2, range(10)) | positions(4, range(10))


async def check_deleted(machines: EngineFixture, daemon: Daemon, *, waiting: Set[Position] = SHARED) -> None:
    """`a` is no more, `b` is owed all that it was, and `a` created again starts with what is `waiting` for all."""
    with pytest.raises(NotFound):
        await daemon.call(daemon.engine.requests.open_dispatch("t", "a", no_positions()))
    assert 1 not in indexes_of(machines.topic_tip())
    created = await daemon.call(daemon.engine.requests.create_subscription("t", "a"))
    assert created.created
    assert created.subscription_id > 2
    assert (await everything(daemon, "b")).positions == OWN | SHARED
    assert (await everything(daemon, "a")).positions == waiting, "nothing of its former own rows"


async def test_a_subscription_leaves_with_its_own_rows_and_starts_empty_when_it_is_created_again(
    machines: EngineFixture,
) -> None:
    one = await filled(await machines.served_by("one"))
    core = one.topic("t").core
    assert set(core.indexes) == {0, 1, 2}
    receiver = await one.receiver("t", "a")
    buckets = {live.object.name for live in machines.topic_tip().live if live.subscription_id == 1}
    await delete(one, "a")
    assert isinstance(receiver.ended, NotFound)
    assert set(core.indexes) == {0, 2}
    tip = machines.topic_tip()
    assert buckets <= {tombstone.object.name for tombstone in tip.tombstones}
    assert indexes_of(tip) == [0, 2]
    await check_deleted(machines, one)


async def test_what_is_left_of_a_deleted_subscription_in_checkpoint_and_journal_does_not_come_back(
    machines: EngineFixture,
) -> None:
    one = await filled(await machines.served_by("one", "journal.checkpoint_slots=4"))
    await one.add("t", 5, range(5), 30_000, subscription="a")
    await delete(one, "a")
    one.kill()
    two = await machines.served_by("one")
    assert set(two.topic("t").core.indexes) == {0, 2}
    await check_deleted(machines, two)


@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_crash_between_any_two_steps_of_a_deletion_leaves_all_of_the_subscription_or_nothing(
    machines: EngineFixture, step: int, landed: bool
) -> None:
    one = await filled(await machines.served_by("one", *SMALL))
    steps = 0

    def decide(call: Call) -> Fault:
        nonlocal steps
        if one.dead or call.operation not in ("put", "put_if_absent") or "/daemons/" in call.key:
            return Fault.NONE
        steps += 1
        if steps == step + 1:
            one.loop.call_soon_threadsafe(one.kill)
            return Fault.NONE if landed else Fault.FAIL_BEFORE
        return Fault.NONE

    one.decide = decide
    deleting = one.call(one.engine.requests.delete_subscription("t", "a"))
    await asyncio.wait([deleting])
    await asyncio.sleep(20)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    left = {state.stored.name for state in two.topic("t").core.subscriptions.values()}
    if "a" not in left:
        await check_deleted(machines, two)
        return
    assert deleting.cancelled() or deleting.exception() is not None
    assert (await everything(two, "a")).positions == OWN | SHARED
    await delete(two, "a")
    await check_deleted(machines, two, waiting=set())


@pytest.mark.parametrize("crash", [False, True])
async def test_a_seal_that_was_cut_before_a_deletion_and_lands_after_it_does_not_bring_the_bucket_back(
    machines: EngineFixture, crash: bool
) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a", "b")
    held = one.pause("put", BUCKETS)
    await one.add("t", 1, range(15), 30_000, subscription="a")
    await one.add("t", 1, range(15), 30_000, subscription="b")
    await one.add("t", 2, range(10), 30_000)
    await one.add("t", 4, range(10), 30_000)
    sealing = one.call(one.engine.requests.seal("t"))
    await held.reached()
    await one.add("t", 3, range(10), 30_000, subscription="b")
    await one.add("t", 3, range(10), 30_000, subscription="a")
    await delete(one, "a")
    held.release()
    assert (await sealing).rows == 50
    assert indexes_of(machines.topic_tip()) == [0, 2]
    assert set(one.topic("t").core.indexes) == {0, 2}
    if crash:
        one.kill()
        one = await machines.served_by("one")
    await check_deleted(machines, one)


async def test_a_seal_of_nothing_but_a_deleted_subscription_is_committed_once_when_its_answer_is_lost(
    machines: EngineFixture,
) -> None:
    one = await with_subscriptions(await machines.served_by("one"), "a")
    held = one.pause("put", BUCKETS)
    await one.add("t", 1, range(15), 30_000, subscription="a")
    sealing = one.call(one.engine.requests.seal("t"))
    await held.reached()
    await delete(one, "a")
    # The commit is tried from the beginning: its first try landed.
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="/topics/")
    one.script.plan("head", Fault.FAIL_BEFORE, key_part="/topics/", times=200)
    held.release()
    await sealing
    assert one.engine.health.serving
    assert not machines.topic_tip().live
    assert (await one.add("t", 9, range(5), 1_000)).accepted == 5


async def test_deleting_a_subscription_while_its_segments_are_being_read_ends_the_reads(
    machines: EngineFixture,
) -> None:
    one = await with_subscriptions(await machines.served_by("one", "delivery.lookahead_ms=1000"), "a", "b")
    await one.add("t", 1, range(15), 5_000, subscription="a")
    await one.add("t", 1, range(15), 5_000, subscription="b")
    await seal(one)
    one.kill()
    two = await machines.served_by("one", "delivery.lookahead_ms=1000")
    own = next(live.object.name for live in machines.topic_tip().live if live.subscription_id == 1)
    held = two.pause("get_range", own)
    await held.reached()
    deleting = two.call(two.engine.requests.delete_subscription("t", "a"))
    await asyncio.sleep(1)
    held.release()
    await deleting
    assert (await everything(two, "b")).positions == positions(1, range(15))
    assert two.engine.health.serving


async def test_a_topic_that_is_cleared_drops_the_buckets_of_all_indexes(machines: EngineFixture) -> None:
    one = await filled(await machines.served_by("one"))
    assert await clear(one) == 70
    await one.until(lambda: not machines.topic_tip().live)
    assert not (await get(one, subscription="a")).handed_out.rows.ledger_id.tolist()
