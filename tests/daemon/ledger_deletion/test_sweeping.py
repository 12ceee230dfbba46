"""A sweep finds the offloaded ledgers that nobody knows, and those alone."""

from __future__ import annotations

import dataclasses

import pytest

from daemon.core.deletions.ledger_deletions import ListedState
from daemon.errors import (
    Unavailable,
)
from daemon.ledger_deletion import sweeping
from daemon.ledger_deletion.deletion_values import SweepWish
from daemon.ledger_stores.ledger_store import DeletionFailed, InUseAnswer
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType, PendingDelete
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Fault
from tests._support.owned_ledgers import in_use
from tests.daemon.ledger_deletion._support.sweeps import (
    BODY_BYTES,
    DAY_MS,
    DELETE,
    OLD,
    STORE,
    Swept,
    all_over,
    found,
    ids,
    listed,
    objects,
    record_in_vain,
    say_in_use,
    sweep,
)

# ---- what is an orphan


async def test_exactly_the_ledgers_that_nobody_knows_are_orphans(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    used, recorded, orphaned = (swept.write(7) for _ in range(3))
    foreign_topic = swept.write(2, "never-heard-of")
    schemas = swept.write(1, component=LedgerComponent.SCHEMA_STORAGE)
    swept.store.put("readme", b"entries")
    await say_in_use(one, "t", used)
    await record_in_vain(swept, one, recorded)
    machines.step_ms += 1_000
    young = swept.write(3)

    done = await sweep(one, dataclasses.replace(OLD, grace_ms=500))

    assert found(done) == ids(orphaned) | ids(foreign_topic)
    assert {orphan.pending_delete.ledger_id for orphan in done.orphans if orphan.unknown_topic} == ids(foreign_topic)
    counts = done.counts
    assert counts.listed == objects(2 * (7 + 7 + 7 + 2 + 1 + 3) + 1)
    assert counts.foreign == objects(1)
    assert counts.in_use == objects(14)
    assert counts.recorded == objects(14)
    assert counts.young == objects(2 * len(young))
    assert counts.orphaned == objects(14)
    assert counts.of_unknown_topics == objects(4)
    assert counts.unidentified == objects(2 * len(schemas))
    assert counts.unanswered == objects(0)
    assert (counts.ledgers_recorded, counts.ledgers_left) == (0, 0)


async def test_an_orphan_is_told_as_it_would_be_recorded(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (cursor,) = swept.write(1, "persistent://tenant/space/flights", LedgerComponent.MANAGED_CURSOR)
    modified_ms = machines.now_ms()
    machines.step_ms += 1_000

    (orphan,) = (await sweep(one)).orphans

    assert orphan.topic == "persistent://tenant/space/flights"
    assert orphan.pending_delete == cursor.pending_delete()
    assert (orphan.size_bytes, orphan.modified_ms, orphan.unknown_topic) == (2 * BODY_BYTES, modified_ms, True)


@pytest.mark.parametrize("part", ["index", "data"])
async def test_one_object_without_the_other_is_an_orphan_and_is_deleted(machines: EngineFixture, part: str) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", swept.write(1))
    there = swept.keys()
    (ledger,) = swept.write(1)
    swept.store.delete(ledger.keys[0 if part == "data" else 1])

    done = await sweep(one, DELETE)
    ended = await all_over(one)

    assert found(done) == ids([ledger])
    assert done.counts.orphaned == objects(1)
    assert [each.outcome for each in ended] == [DeletionOutcome.DELETED]
    assert swept.keys() == there


async def test_a_pair_of_which_one_half_is_young_stays(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (ledger,) = swept.write(1)
    index_key, _ = ledger.keys
    machines.step_ms += DAY_MS
    swept.store.put(index_key, b"entries", metadata=ledger.object_metadata)

    done = await sweep(one, SweepWish(STORE))

    assert (done.orphans, done.counts.young) == ((), objects(2))


async def test_the_grace_is_the_configured_one_unless_the_sweep_has_its_own(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.sweep_grace_s=3600")
    swept.write(1)
    machines.step_ms += 3_590_000

    assert (await sweep(one, SweepWish(STORE))).orphans == ()
    assert len((await sweep(one, SweepWish(STORE, grace_ms=3_000_000))).orphans) == 1
    machines.step_ms += 20_000
    assert len((await sweep(one, SweepWish(STORE))).orphans) == 1


async def test_a_topic_of_which_some_ledgers_are_said_to_be_in_use_is_not_known(machines: EngineFixture) -> None:
    """Nothing is said of the others."""
    swept = Swept(machines)
    one = await swept.daemon()
    new, *older = swept.write(4)
    await say_in_use(one, "t", [new], replace=False)
    plain = dataclasses.replace(new, ledger=(new.ledger[0], 0, 0))
    await one.call(one.engine.deletion_requests.record_in_use("t", in_use([plain], LedgerType.LEDGER), replace=True))

    done = await sweep(one, DELETE)

    assert (done.counts.of_unknown_topics, done.counts.in_use) == (objects(6), objects(2))
    assert found(done) == ids(older)
    assert done.counts.ledgers_recorded == 0


async def test_a_topic_is_known_once_its_owner_has_said_that_it_uses_nothing(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    orphaned = swept.write(2)
    assert (await sweep(one)).counts.of_unknown_topics == objects(4)

    await say_in_use(one, "t", [])
    done = await sweep(one)

    assert done.counts.orphaned == objects(4)
    assert found(done) == ids(orphaned)


async def test_a_ledger_in_use_stays_whatever_topic_its_metadata_claims(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "forger", [])
    (ledger,) = swept.write(1, "victim")
    await say_in_use(one, "victim", [ledger])
    for key in ledger.keys:
        swept.store.put(key, b"entries", metadata=dataclasses.replace(ledger, topic="forger").object_metadata)

    done = await sweep(one, dataclasses.replace(DELETE, unknown_topics=True, force=True))

    assert (done.orphans, done.counts.in_use) == ((), objects(2))


async def test_a_ledger_that_is_in_use_without_a_uuid_stays(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (ledger,) = swept.write(1)
    without = dataclasses.replace(ledger, ledger=(ledger.ledger[0], 0, 0))
    await say_in_use(one, "t", [without])

    assert (await sweep(one)).counts.in_use == objects(2)


async def test_what_is_a_dead_letter_is_recorded_and_no_orphan(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.max_retry_delete_count=0")
    ledgers = swept.write(2)
    await record_in_vain(swept, one, ledgers)
    assert len(await listed(one, ListedState.DEAD)) == 2

    done = await sweep(one, DELETE)

    assert (done.orphans, done.counts.recorded) == ((), objects(4))


async def test_objects_that_somebody_else_put_there_stay_whatever_the_sweep_may(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    mixed, bare = swept.write(2)
    swept.store.put(mixed.keys[0], b"entries", metadata=dataclasses.replace(mixed, topic="other").object_metadata)
    for key in bare.keys:
        swept.store.put(key, b"entries")
    swept.store.put(f"folder/{bare.keys[0]}", b"entries", metadata=bare.object_metadata)
    there = swept.keys()

    done = await sweep(one, dataclasses.replace(DELETE, unknown_topics=True, force=True))

    assert (done.counts.unidentified, done.counts.foreign) == (objects(4), objects(1))
    assert done.counts.ledgers_recorded == 0
    assert await all_over(one) == []
    assert swept.keys() == there


# ---- what owners say


@pytest.mark.parametrize("answer", [InUseAnswer.NOT_IN_USE, InUseAnswer.NO_SUCH_TOPIC])
async def test_a_ledger_whose_owner_does_not_use_it_is_an_orphan_of_a_known_topic(
    machines: EngineFixture, answer: InUseAnswer
) -> None:
    swept = Swept(machines, owner=lambda topic, delete: answer)
    one = await swept.daemon()
    swept.write(2, "asked/t")

    assert (await sweep(one)).counts.orphaned == objects(4)


async def test_an_owner_is_asked_also_of_topics_that_stated_what_is_in_use(machines: EngineFixture) -> None:
    swept = Swept(machines, owner=lambda topic, delete: InUseAnswer.IN_USE)
    one = await swept.daemon()
    await say_in_use(one, "asked/t", [])
    swept.write(2, "asked/t")

    done = await sweep(one, DELETE)

    assert (done.orphans, done.counts.in_use) == ((), objects(4))


async def test_a_ledger_whose_owner_does_not_answer_is_no_orphan_and_stays(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers come between.
    monkeypatch.setattr(sweeping, "UNANSWERED_IN_A_ROW_MAX", 2)

    def answer(topic: str, delete: PendingDelete) -> InUseAnswer:
        if delete.ledger_id % 2:
            raise DeletionFailed("no answer", maybe_deleted=False)
        return InUseAnswer.NOT_IN_USE

    swept = Swept(machines, owner=answer)
    one = await swept.daemon("deletion.parallelism=1")
    ledgers = swept.write(10, "asked/t")

    done = await sweep(one, DELETE)
    await all_over(one)

    assert (done.counts.orphaned, done.counts.unanswered) == (objects(10), objects(10))
    kept = [ledger for ledger in ledgers if ledger.ledger[0] % 2]
    assert swept.keys() == {key for ledger in kept for key in ledger.keys}


async def test_an_owner_that_never_answers_ends_the_sweep(machines: EngineFixture) -> None:
    asked = 0

    def answer(topic: str, delete: PendingDelete) -> InUseAnswer:
        nonlocal asked
        asked += 1
        raise DeletionFailed("nobody is there", maybe_deleted=False)

    swept = Swept(machines, owner=answer)
    one = await swept.daemon()
    swept.write(300, "asked/t")

    with pytest.raises(Unavailable, match=r"100 questions in a row had no answer.*nobody is there"):
        await sweep(one, DELETE)

    assert asked < 300
    assert await listed(one, ListedState.PENDING) == []


async def test_objects_that_may_not_be_looked_at_stay_and_do_not_end_the_sweep(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    locked, orphaned = swept.write(2)
    swept.script.plan("head", Fault.REFUSE, key_part=locked.keys[1])

    done = await sweep(one)

    assert found(done) == ids([orphaned])
    assert done.counts.unanswered == objects(2)
