"""Rows that are requests by themselves, on whole engines: decided together, each answered for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon.call_values import View
from daemon.core.decisions.add_decisions import AddOutcome, AddRow
from daemon.core.decisions.topic_state import TopicState
from daemon.core.quotas import Caller
from daemon.errors import InvariantViolated, QuotaExceeded, TarryError
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic import topic_adds
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import create, delete_topic, stats

DELAY_MS = 60_000
CALLER = Caller("client", 50)


def add(daemon: Daemon, entry_id: int, *, at_ms: int | None = None, key_hash: int | None = None) -> asyncio.Task[Any]:
    """The outcome; None where the row is to go by itself."""

    async def asked() -> AddOutcome | None:
        row = AddRow(7, entry_id, daemon.now_ms() + DELAY_MS if at_ms is None else at_ms, None, key_hash)
        answer = daemon.engine.requests.add_row("t", row, CALLER)
        return None if answer is None else await answer

    return daemon.call(asked())


async def served(machines: EngineFixture, *settings: str) -> Daemon:
    """A daemon with the topic, on which nothing is under way."""
    daemon = await machines.served_by("one", *settings)
    await create(daemon)
    assert (await add(daemon, 0)).accepted == 1
    return daemon


def slots(machines: EngineFixture) -> int:
    return len(machines.slots())


def counted(daemon: Daemon, result: str) -> float | None:
    return daemon.metrics.registry.get_sample_value("tarry_add_rows_total", {"topic": "t", "result": result})


async def passed(daemon: Daemon, milliseconds: float) -> None:
    await daemon.call(asyncio.sleep(milliseconds / 1000))


async def test_rows_of_one_turn_are_in_one_slot_and_each_is_answered_for_itself(machines: EngineFixture) -> None:
    one = await served(machines)
    before = slots(machines)
    answers = await asyncio.gather(*(add(one, entry) for entry in (1, 2, 0, 3, 2)))
    assert [(each.accepted, each.duplicates) for each in answers] == [(1, 0), (1, 0), (0, 1), (1, 0), (0, 1)]
    assert slots(machines) == before + 1
    assert (await stats(one)).pending == 4
    assert (counted(one, "accepted"), counted(one, "duplicate")) == (4, 2)


async def test_a_row_that_is_there_is_answered_when_that_is_certain(machines: EngineFixture) -> None:
    one = await served(machines)
    before = slots(machines)
    answer = await add(one, 0)
    assert (answer.accepted, answer.duplicates) == (0, 1)
    assert slots(machines) == before


async def test_rows_that_come_beside_others_wait_until_these_are_durable(machines: EngineFixture) -> None:
    one = await served(machines)
    before = slots(machines)
    held = one.pause("put_if_absent", JOURNAL)
    first = add(one, 1)
    await held.reached()
    others = []
    for entry in range(2, 8):
        others.append(add(one, entry))
        await passed(one, 0.5)
    assert len(one.topic("t").core.index.staged.keys) == 1
    held.release()
    await first
    # Whoever was answered comes again, within the millisecond.
    await passed(one, 0.5)
    others.append(add(one, 8))
    assert not any(each.done() for each in others)
    assert [each.accepted for each in await asyncio.gather(*others)] == [1] * 7
    assert slots(machines) == before + 2


async def test_a_row_waits_no_longer_than_its_limit_for_others(machines: EngineFixture) -> None:
    one = await served(machines)
    held = one.pause("put_if_absent", JOURNAL)
    first = add(one, 1)
    await held.reached()
    others = []
    for entry in range(2, 32):
        others.append(add(one, entry))
        await passed(one, 0.5)
    staged = one.topic("t").core.index.staged
    assert len(staged.keys) > 2 * topic_adds.LOOKS_MAX * 0.9, "the first of them are decided"
    held.release()
    await asyncio.gather(first, *others)
    assert (await stats(one)).pending == 32


async def test_a_row_is_added_although_its_caller_goes_away(machines: EngineFixture) -> None:
    one = await served(machines)
    gone, other = add(one, 1), add(one, 2)
    await asyncio.sleep(0)
    gone.cancel()
    assert (await other).accepted == 1
    assert gone.cancelled()
    assert (await stats(one)).pending == 3


async def test_a_row_is_found_after_a_kill_when_it_was_answered(machines: EngineFixture) -> None:
    one = await served(machines)
    answered = await asyncio.gather(*(add(one, entry) for entry in range(1, 20)))
    assert all(each.accepted for each in answered)
    one.kill()
    two = await machines.served_by("two")
    assert (await stats(two)).pending == 20


@pytest.mark.parametrize("late_ms", [0, 1, 10_000])
async def test_a_row_whose_time_has_come_goes_by_itself(machines: EngineFixture, late_ms: int) -> None:
    one = await served(machines)
    assert await add(one, 1, at_ms=one.now_ms() - late_ms) is None


async def test_a_row_that_is_too_far_ahead_goes_by_itself(machines: EngineFixture) -> None:
    one = await served(machines)
    assert await add(one, 1, at_ms=one.now_ms() + (1 << 60)) is None


async def test_a_row_of_a_topic_that_is_new_goes_by_itself(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    assert await add(one, 1) is None


async def test_quotas_hold_for_each_row(machines: EngineFixture) -> None:
    one = await served(machines)
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(pending_rows_max=3)))
    adding = [add(one, entry) for entry in (1, 0, 2, 3)]
    assert [(each.accepted, each.duplicates) for each in await asyncio.gather(*adding[:3])] == [(1, 0), (0, 1), (1, 0)]
    with pytest.raises(QuotaExceeded, match="pending_rows_max is 3"):
        await adding[3]


async def test_rows_are_in_the_own_index_of_each_subscription_where_none_is_shared(machines: EngineFixture) -> None:
    one = await served(machines)
    await create(one, "other")
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(shared_index=False)))
    assert (await add(one, 1)).accepted == 1
    assert (await stats(one)).pending == 3


async def test_rows_keep_their_key_hash(machines: EngineFixture) -> None:
    one = await served(machines)
    await asyncio.gather(add(one, 1, key_hash=5), add(one, 2), add(one, 3, key_hash=(1 << 32) - 1))
    page = await one.call(one.engine.requests.list_scheduled("t", View(), 10, None))
    assert page.rows.key_hash is not None
    assert page.rows.key_hash.tolist() == [0, 5, 0, (1 << 32) - 1]


async def test_a_row_waits_while_its_topic_changes_as_a_whole(machines: EngineFixture) -> None:
    one = await served(machines)
    held = one.pause("put_if_absent", JOURNAL)
    before = add(one, 1)
    await held.reached()
    clearing = one.call(one.engine.requests.clear("t", None))
    await passed(one, 1)
    behind = add(one, 2)
    await passed(one, 1)
    assert not clearing.done()
    held.release()
    assert (await before).accepted == 1
    assert await clearing == 2
    assert (await behind).accepted == 1
    assert (await stats(one)).pending == 1


async def test_rows_that_wait_when_their_topic_is_deleted_are_refused(machines: EngineFixture) -> None:
    one = await served(machines)
    held = one.pause("put_if_absent", JOURNAL)
    before = add(one, 1)
    await held.reached()
    deleting = delete_topic(one)
    await passed(one, 1)
    behind = [add(one, entry) for entry in (2, 3)]
    held.release()
    await asyncio.gather(before, deleting)
    for each in await asyncio.gather(*behind, return_exceptions=True):
        assert isinstance(each, TarryError)


async def test_whoever_waits_is_told_that_the_shard_is_lost(machines: EngineFixture) -> None:
    one = await served(machines)
    held = one.pause("put_if_absent", JOURNAL)
    adding = [add(one, 1)]
    await held.reached()
    adding += [add(one, entry) for entry in (2, 3)]
    await passed(one, 1)
    closing = one.call(one.engine.close())
    for each in await asyncio.gather(*adding, return_exceptions=True):
        assert isinstance(each, TarryError), each
    held.release()
    await closing


async def test_what_breaks_an_invariant_is_the_topic_s_failure(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await served(machines)

    def broken(*_: object) -> None:
        raise InvariantViolated("planted")

    with monkeypatch.context() as patched:
        patched.setattr(TopicState, "stage_rows", broken)
        for each in await asyncio.gather(add(one, 1), add(one, 2), return_exceptions=True):
            assert isinstance(each, TopicFailed)
    assert (await stats(one)).pending == 1, "it is loaded again"
    assert (await add(one, 1)).accepted == 1


async def test_a_slot_whose_answer_was_lost_answers_every_row_of_it_once(machines: EngineFixture) -> None:
    one = await served(machines)
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert [each.accepted for each in await asyncio.gather(*(add(one, entry) for entry in range(1, 9)))] == [1] * 8
    assert (await stats(one)).pending == 9
