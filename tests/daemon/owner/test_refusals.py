"""A refused request has changed nothing: what was staged, or is in force, is answered with OK or an unknown outcome."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from daemon.errors import Corruption, NotOwner, OutcomeUnknown, QuotaExceeded, TarryError, Unavailable
from daemon.group_commit.shard_slots import ShardSlots
from daemon.ledger_deletion import shard_deletions
from daemon.topic import topic_manifests
from storage_backends import commit
from storage_backends.formats import names
from tests._support.bad_text import put_bad_successor
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import (
    Row,
    acknowledge,
    clear,
    create,
    dead_letter,
    delete_topic,
    extend,
    get,
    rows_of,
    stats,
    trim,
    up_to,
)
from tests.daemon._support.dead_letter_calls import nack
from tests.daemon.ledger_deletion._support import deleting

QUICK = "ownership.heartbeat_interval_s=0.5"
ROWS = 4

Deed = Callable[[Daemon, list[Row]], asyncio.Task[Any]]


async def rows_left(daemon: Daemon) -> int:
    """How many rows the subscription is owed; 0 if there is none, or no topic."""
    try:
        found = (await stats(daemon)).subscriptions
    except TarryError:
        return 0
    return sum(each.backlog for each in found if each.subscription == "s")


DEEDS: dict[str, tuple[Deed, int]] = {
    "acknowledgement": (acknowledge, 0),
    "acknowledgement of some": (lambda two, rows: acknowledge(two, [*rows, (9, 9, 9)]), 0),
    "negative acknowledgement": (lambda two, rows: nack(two, rows, delay_ms=600_000), ROWS),
    "rejection": (lambda two, rows: nack(two, rows, reject=True), 0),
    "trim": (lambda two, rows: trim(two, up_to(100, 1)), 0),
    "trim of a subscription": (lambda two, rows: trim(two, up_to(100, 1), subscription="s"), 0),
    "trim to dead letters": (lambda two, rows: dead_letter(two, up_to(100, 1)), 0),
    "clear": (lambda two, rows: clear(two), 0),
    "deletion of the topic": (lambda two, rows: delete_topic(two), 0),
    "deletion of the subscription": (
        lambda two, rows: two.call(two.engine.requests.delete_subscription("t", "s")),
        0,
    ),
}


@pytest.mark.parametrize(("deed", "left"), DEEDS.values(), ids=list(DEEDS))
async def test_what_waits_for_a_former_owner_is_not_refused_when_the_shard_is_lost_meanwhile(
    machines: EngineFixture, deed: Deed, left: int
) -> None:
    one = await machines.served_by("one", QUICK, "daemon.address=one:1")
    await create(one)
    await one.add("t", 1, range(ROWS), delay_ms=100)
    await asyncio.sleep(1)
    rows = rows_of(await get(one, lease_ms=1_000))
    assert len(rows) == ROWS
    two = await machines.daemon("two", QUICK).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    one.suspend()
    await two.serving()
    answer = deed(two, rows)
    await asyncio.sleep(2)
    assert not answer.done(), "it is decided, and waits for the former owner"
    two.suspend()
    one.resume()
    await one.until(lambda: not one.engine.health.serving)
    await one.serving()
    two.resume()
    with pytest.raises(OutcomeUnknown, match=r"may or may not have taken effect.* a retry is safe: .*epoch") as unknown:
        await answer
    assert unknown.value.owner_address == "one:1", "there it is to be repeated"
    assert await rows_left(one) == left, "it took effect"


async def lost(daemon: Daemon, error: TarryError | None = None) -> None:
    """It loses its shard while it sends the next slot."""
    held = daemon.pause("put_if_absent", JOURNAL)
    await held.reached()
    daemon.context.run(daemon.shards[0].lose, error or NotOwner("the test takes it away", owner_address="two:2"))
    held.release()


async def test_whoever_is_in_a_slot_is_told_that_the_outcome_is_unknown_and_others_why(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(2), delay_ms=60_000)
    losing = asyncio.ensure_future(lost(one))
    await asyncio.sleep(0)
    added, again = one.add("t", 1, [2], delay_ms=60_000), one.add("t", 1, [0], delay_ms=60_000)
    await losing
    with pytest.raises(OutcomeUnknown, match="the test takes it away") as unknown:
        await added
    assert unknown.value.owner_address == "two:2"
    with pytest.raises(NotOwner, match="the test takes it away"):
        await again


async def test_a_new_topic_whose_first_add_is_refused_is_an_effect(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.due_rows_per_second_max=2")
    with pytest.raises(OutcomeUnknown, match="due_rows_per_second_max"):
        await one.add("t", 1, range(3))
    assert (await stats(one)).pending == 0
    with pytest.raises(QuotaExceeded, match="due_rows_per_second_max"):
        await one.add("t", 1, range(3))


async def test_a_subscription_that_may_be_committed_is_not_refused(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "s")
    held = one.pause("put_if_absent", "/topics/")
    created = create(one, "another")
    await held.reached()
    one.context.run(one.shards[0].lose, NotOwner("the test takes it away"))
    with pytest.raises(OutcomeUnknown, match="the test takes it away"):
        await created
    held.release()


async def test_a_subscription_whose_commit_finds_damage_before_it_writes_is_refused(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "s")
    put_bad_successor(machines.store, names.topic_manifest_prefix(0, names.topic_id("t")), "t")
    with pytest.raises(Corruption, match="topic is not UTF-8"):
        await create(one, "another")


async def test_a_subscription_whose_commit_may_have_landed_before_it_finds_damage_is_not_refused(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    await create(one, "s")
    ends = iter([commit.CommitOutcomeUnknown("no answer"), commit.DamagedBefore("a manifest", "it is damaged")])

    def commit_once(*_: object, **__: object) -> None:
        raise next(ends)

    monkeypatch.setattr(topic_manifests, "commit_once", commit_once)
    with pytest.raises(OutcomeUnknown, match="it is damaged"):
        await create(one, "another")


async def test_a_lease_that_was_extended_is_not_refused_since_it_cannot_be_confirmed(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one)
    await one.add("t", 1, range(2), delay_ms=0)
    rows = rows_of(await get(one, lease_ms=5_000))
    await asyncio.sleep(1)
    one.freeze()
    extended = extend(one, rows, 60_000)
    not_leased = extend(one, [(7, 7, 7)], 60_000)
    with pytest.raises(OutcomeUnknown, match="has not answered for 10 s"):
        await extended
    with pytest.raises(Unavailable, match="has not answered for 10 s"):
        await not_leased
    one.thaw()
    await asyncio.sleep(10)
    assert not rows_of(await get(one)), "it is in force"


async def test_ledgers_that_were_recorded_in_part_are_not_refused(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_deletions, "DELETES_A_DECISION", 1)
    deleting.ScriptedLedgers(machines)
    one = await machines.served_by("one")
    accepts = itertools.chain((True,), itertools.repeat(False))

    def check(slots: object) -> None:
        if not next(accepts):
            raise QuotaExceeded("the test has no room", retry_after_ms=1)

    monkeypatch.setattr(ShardSlots, "check_accepting", check)
    with pytest.raises(OutcomeUnknown, match="the test has no room"):
        await deleting.record(one, 1, 2)
    assert [each.pending_delete.ledger_id for each in deleting.pending(one)] == [1]
