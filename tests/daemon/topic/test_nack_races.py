"""Races of negative acknowledgements: with each other, with their slots, with crashes and with the next owner."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from daemon.errors import TarryError, Unavailable
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.outcomes import Counts, counts_of
from tests.daemon._support.calling import stats, trim, up_to
from tests.daemon._support.nacking import (
    DEAD,
    MINUTE_MS,
    NACKED,
    Claim,
    assert_back_after,
    claims,
    counts,
    dispatcher,
    entries,
    nack,
    nack_of,
    with_rows,
)


async def test_what_a_staged_nack_names_is_handed_to_nobody_and_whoever_names_it_waits(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 10)
    held = one.pause("put_if_absent", JOURNAL)
    nacking = listener.nack(rows[:6], 10_000)
    await held.reached()
    acknowledging, again = listener.acknowledge(rows[:2]), listener.nack(rows[2:4], 15_000)
    extending = listener.extend(rows[4:])
    await asyncio.sleep(0.1)
    listener.stream.close()
    second = await dispatcher(one, policy=None)
    assert entries(await second.next(4)) == [6, 7, 8, 9]
    await asyncio.sleep(3)
    assert second.nothing_more()
    assert not any(task.done() for task in (nacking, acknowledging, again, extending))
    held.release()
    assert await nacking == NACKED
    assert await acknowledging == 0
    assert await again == NACKED
    assert await extending == 6
    back = await second.next(4)
    assert (entries(back), counts(back)) == ([4, 5, 2, 3], [1] * 4)
    await asyncio.sleep(10)
    assert second.nothing_more()


async def test_a_late_nack_waits_for_a_row_that_is_added_again_so_that_it_comes_under_another_name(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 2)
    assert await listener.acknowledge(rows) == 0
    held = one.pause("put_if_absent", JOURNAL)
    adding = one.add("t", 1, range(2), delay_ms=rows[0].deliver_at_ms - machines.now_ms())
    await held.reached()
    late = dataclasses.replace(nack_of(rows, 1_000), forwarded=True)
    nacking = one.call(counts_of(listener.stream.negative_acknowledge, late))
    await asyncio.sleep(0.1)
    assert not nacking.done()
    held.release()
    assert (await adding).accepted == 2
    assert await nacking == NACKED
    back = [row for row in await listener.next(2) if row.redeliveries]
    back = back or await listener.next(2)
    assert (entries(back), counts(back)) == ([0, 1], [1, 1])


async def test_a_request_is_not_decided_before_one_that_came_first_and_had_to_wait(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    gate = one.topic("t").gate

    async def both() -> tuple[int, int]:
        gate._open.clear()
        nacking = asyncio.ensure_future(listener.stream.negative_acknowledge(nack_of(rows, 10_000)))
        gate._open.set()
        acknowledging = asyncio.ensure_future(listener.stream.acknowledge(claims(rows)))
        return len((await nacking).ignored), len(await acknowledging)

    assert await one.call(both()) == (0, 0)
    # The acknowledgement has ended what was NACKED by then.
    await asyncio.sleep(15)
    assert listener.nothing_more()


async def test_a_nack_that_is_repeated_on_the_next_owner_counts_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    held = one.pause("put_if_absent", JOURNAL)
    lost = listener.nack(rows, 5_000)
    await held.reached()
    held.release()
    await asyncio.sleep(0.05)
    one.kill()
    await asyncio.wait([lost])
    two = await machines.served_by("one")
    assert await nack(two, rows, 5_000) == NACKED
    back = await (await dispatcher(two, policy=None)).next(5)
    assert counts(back) == [1] * 5


async def test_who_waits_for_a_staged_nack_that_is_not_durable_is_told_in_time(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 6)
    held = one.pause("put_if_absent", JOURNAL)
    nacking = listener.nack(rows[:4], MINUTE_MS)
    await held.reached()
    begun_s = machines.elapsed_s()
    waiting = [listener.acknowledge(rows[:1]), listener.nack(rows[1:2], 5_000), listener.extend(rows[2:])]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers), answers
    assert machines.elapsed_s() - begun_s < 11
    held.release()
    await asyncio.gather(nacking, return_exceptions=True)
    assert await listener.nack(rows[:4], 1_000) == NACKED
    assert counts(await listener.next(4)) == [1] * 4


@pytest.mark.parametrize("point", ["log.before_put", "log.after_put"])
async def test_a_crash_around_the_slot_leaves_them_all_nacked_or_none(machines: EngineFixture, point: str) -> None:
    one, listener, rows = await with_rows(machines, 10)

    def crash(name: str) -> None:
        if name == point:
            one.kill()

    nacked_ms = machines.now_ms()
    one.at_crash_point = crash
    asked = listener.nack(rows[:6], 20_000)
    await asyncio.wait([asked])
    assert asked.cancelled()
    two = await machines.served_by("one")
    again = await dispatcher(two, policy=None)
    landed = point == "log.after_put"
    back = await again.next(10)
    assert {row.entry: row.redeliveries for row in back} == {entry: int(landed and entry < 6) for entry in range(10)}
    assert_back_after([row for row in back if row.redeliveries], nacked_ms, 20_000, late_ms=100)


async def test_a_nack_whose_slot_lost_its_answer_is_found_and_answered(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert await listener.nack(rows, 1_000) == NACKED
    assert counts(await listener.next(5)) == [1] * 5


async def test_an_owner_that_lost_the_shard_answers_no_nack(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 6)
    await asyncio.sleep(0.1)
    one.freeze()
    asked = [
        listener.nack(rows[:2], 1_000),
        listener.nack([(9, 9, 5)], 1_000),
        listener.extend(rows[2:]),
        nack(one, [(7, 7, 0)], 1_000),
    ]
    two = await machines.served_by("two")
    again = await dispatcher(two, policy=None)
    one.thaw()
    for task in asked:
        with pytest.raises(TarryError):
            await task
    assert counts(await again.next(6)) == [0] * 6
    await asyncio.sleep(30)
    assert again.nothing_more()


async def test_a_nack_is_answered_when_no_former_owner_can_hand_the_position_out(machines: EngineFixture) -> None:
    quick = "ownership.heartbeat_interval_s=0.5"
    one, _, rows = await with_rows(machines, 4, quick)
    await asyncio.sleep(0.1)
    one.freeze()
    two = await machines.served_by("two", quick)
    again = await dispatcher(two, policy=None)
    took_over_s = machines.elapsed_s()
    rows = await again.next(4)
    assert await again.nack(rows, MINUTE_MS) == NACKED
    assert machines.elapsed_s() - took_over_s > 5, "until then a dispatcher of the former owner may get them"
    one.thaw()
    assert counts(await again.next(4)) == [1] * 4


async def test_negative_acknowledgements_at_once_of_the_same_positions_count_once_and_the_last_time_holds(
    machines: EngineFixture,
) -> None:
    _, listener, rows = await with_rows(machines, 5)
    nacked_ms = machines.now_ms()
    asked = [listener.nack(rows, delay_ms) for delay_ms in (9_000, 1_000, 5_000)]
    assert await asyncio.gather(*asked) == [NACKED] * 3
    back = await listener.next(5)
    assert counts(back) == [1] * 5
    assert_back_after(back, nacked_ms, 5_000, late_ms=100)
    await asyncio.sleep(20)
    assert listener.nothing_more()


@pytest.mark.parametrize("first", ["the entry", "its messages"])
@pytest.mark.parametrize("how", ["acknowledged", "rejected"])
async def test_of_an_entry_that_leaves_no_message_stays_whatever_was_staged_first(
    machines: EngineFixture, first: str, how: str
) -> None:
    one, listener, rows = await with_rows(machines, 3)
    parts: list[Claim] = [(*rows[0][:3], number) for number in range(3)]
    await listener.nack(parts[:2], 100)
    back = await listener.next(2)
    held = one.pause("put_if_absent", JOURNAL)

    def leave() -> asyncio.Task[int] | asyncio.Task[Counts]:
        return listener.acknowledge(rows[:1]) if how == "acknowledged" else listener.nack(rows[:1], reject=True)

    leaving = leave() if first == "the entry" else None
    await asyncio.sleep(0.1)
    nacking = listener.nack([back[0], parts[2]], 1_000)
    await asyncio.sleep(0.1)
    leaving = leaving or leave()
    await held.reached()
    await asyncio.sleep(0.1)
    held.release()
    assert await leaving == (0 if how == "acknowledged" else DEAD)
    assert await nacking == (Counts(2, 0) if first == "the entry" else NACKED)
    await asyncio.sleep(20)
    assert listener.nothing_more()
    assert await listener.acknowledge([*parts, rows[0]]) == 4
    assert (await stats(one)).subscriptions[0].backlog == 2
    one.kill()
    two = await machines.served_by("one")
    again = await dispatcher(two, policy=None)
    assert entries(await again.next(2)) == [1, 2]
    await asyncio.sleep(20)
    assert again.nothing_more()


async def test_a_trim_waits_for_what_is_staged_and_takes_it(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    held = one.pause("put_if_absent", JOURNAL)
    nacking = listener.nack(rows, 1_000)
    await held.reached()
    trimming = trim(one, up_to(2, 1))
    await asyncio.sleep(2)
    held.release()
    assert await nacking == NACKED
    assert await trimming == 3
    await asyncio.sleep(10)
    assert {row.entry for row in listener.got[5:]} >= {3, 4}
    assert (await stats(one)).subscriptions[0].backlog == 2
