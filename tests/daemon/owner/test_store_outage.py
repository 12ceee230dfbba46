"""The store is away: nothing is answered on doubtful ground, and everything recovers by itself."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import OutcomeUnknown, Unavailable
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault

SETTINGS = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=45", "journal.checkpoint_slots=7")


async def test_adds_are_refused_after_two_seconds_and_those_that_wait_end_unknown_after_ten(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 0, [0])
    one.store.go_down()
    went_down_s = machines.loop.time()
    first = one.add("t", 1, range(10))
    await asyncio.sleep(1.5)
    second = one.add("t", 2, range(10))
    await one.until(lambda: not one.engine.health.serving)
    assert 2 <= machines.loop.time() - went_down_s <= 3.5
    with pytest.raises(Unavailable):
        await one.add("t", 3, range(10))
    assert not first.done()
    with pytest.raises(OutcomeUnknown):
        await first
    with pytest.raises(OutcomeUnknown):
        await second
    assert 10 <= machines.loop.time() - went_down_s <= 11.5
    one.store.come_back()
    await one.serving()
    for ledger_id in (1, 2):
        assert (await one.add("t", ledger_id, range(10))).duplicates == 10, "the slots were still being tried"
    assert (await one.add("t", 3, range(10))).accepted == 10, "what was refused changed nothing"
    await receiver.received(31)
    assert len(receiver.positions) == len(receiver.rows)


async def test_without_head_a_lost_answer_stalls_the_shard_until_it_is_certain(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    one.script.plan("head", Fault.FAIL_BEFORE, key_part=JOURNAL, times=1000)
    one.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=JOURNAL, times=1000)
    add = one.add("t", 1, range(10))
    with pytest.raises(OutcomeUnknown):
        await add
    assert not one.engine.health.serving
    one.kill()
    two = await machines.served_by("one")
    assert (await two.add("t", 1, range(10))).duplicates == 10


async def test_hand_outs_stop_15_s_after_the_last_confirmation_and_resume(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 0, [0], delay_ms=8_000)
    await one.add("t", 0, [1], delay_ms=20_000)
    one.store.go_down()
    await receiver.received(1, timeout_s=10)
    await asyncio.sleep(25)
    assert receiver.positions == {(0, 0)}
    assert not one.engine.health.serving
    one.store.come_back()
    await receiver.received(2, timeout_s=10)
    await one.serving()


async def test_hand_outs_stop_while_the_journal_stalls_too(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 0, [0], delay_ms=20_000)
    one.store.go_down()
    add = one.add("t", 0, [1])
    await asyncio.sleep(40)
    assert not receiver.rows
    assert isinstance(add.exception(), OutcomeUnknown)
    one.store.come_back()
    await receiver.received(2, timeout_s=10)


async def test_a_daemon_that_starts_without_a_store_serves_when_it_comes_back(machines: EngineFixture) -> None:
    one = machines.daemon()
    one.store.go_down()
    starting = asyncio.ensure_future(one.start())
    await asyncio.sleep(60)
    assert not one.engine.health.serving
    assert "cannot be reached" in one.engine.health.reason
    one.store.come_back()
    await starting
    await one.serving()
    assert (await one.add("t", 0, [0])).accepted == 1


async def test_an_outage_of_any_length_loses_no_row_and_no_seal(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SETTINGS)
    receiver = await one.receiver("t")
    for ledger_id in range(3):
        await one.add("t", ledger_id, range(30), delay_ms=100)
    one.store.go_down()
    await asyncio.sleep(1800)
    one.store.come_back()
    await one.serving()
    for ledger_id in range(3, 6):
        await one.add("t", ledger_id, range(30), delay_ms=100)
    await receiver.received(180)
    assert len(receiver.positions) == 180
    one.kill()
    two = await machines.served_by("one", *SETTINGS)
    again = await two.receiver("t")
    await again.received(180)


@pytest.mark.parametrize("clean", [True, False])
async def test_after_an_unclean_takeover_acknowledgements_are_answered_when_15_s_are_over(
    machines: EngineFixture, clean: bool
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, range(10), delay_ms=0)
    if clean:
        await one.stop()
    else:
        one.kill()
    two = await machines.served_by("two")
    served_s = machines.loop.time()
    receiver = await two.receiver("t")
    rows = await receiver.received(10)
    assert await receiver.acknowledge(rows) == 0
    waited_s = machines.loop.time() - served_s
    assert waited_s < 1 if clean else 14 < waited_s < 16
