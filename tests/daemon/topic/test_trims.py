"""Trims and clears: what leaves, for whom, and that nothing of it is handed out from their decision on."""

from __future__ import annotations

import asyncio

import pytest

from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.core.decisions.departures import LedgerRanges
from daemon.errors import InvalidArgument, NotFound, OutcomeUnknown, TarryError, Unavailable
from storage_backends.formats.slot_format import DeadLetterReason
from tests._support.engine_fixture import EngineFixture, Receiver, no_positions
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import acknowledge, clear, create, dead_letter, get, rows_of, trim, up_to

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")


async def test_a_trim_drops_a_ledgers_rows_up_to_an_entry_due_or_not(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", permits=5)
    await one.add("t", 1, range(10), delay_ms=0)
    await one.add("t", 1, range(10, 40), delay_ms=20_000)
    await one.add("t", 2, range(10), delay_ms=20_000)
    await receiver.received(5)
    assert await trim(one, up_to(29, 1)) == 30
    assert one.topic("t").core.index.pending_rows == 20
    receiver.stream.grant(1000)
    await receiver.received(5 + 20)
    await asyncio.sleep(30)
    assert {row[:2] for row in receiver.rows[5:]} == {(1, e) for e in range(30, 40)} | {(2, e) for e in range(10)}


async def test_a_trim_with_all_lower_ledgers_is_a_mark_delete_position(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in (1, 5, 9):
        await one.add("t", ledger_id, range(10), delay_ms=20_000)
    assert await trim(one, up_to(4, 5, all_lower_ledgers=True)) == 15
    receiver = await one.receiver("t")
    await receiver.received(15)
    assert receiver.positions == {(5, e) for e in range(5, 10)} | {(9, e) for e in range(10)}


@pytest.mark.parametrize("settings", [(), SMALL])
async def test_what_was_trimmed_stays_away_after_a_crash_and_may_be_added_again(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    for ledger_id in range(4):
        await one.add("t", ledger_id, range(15), delay_ms=1_000)
    assert await trim(one, up_to(9, 1, 2)) == 20
    assert (await one.add("t", 1, range(5), delay_ms=1_000)).accepted == 5
    one.kill()
    two = await machines.served_by("one", *settings)
    receiver = await two.receiver("t")
    await receiver.received(45)
    await asyncio.sleep(30)
    left = {(ledger, entry) for ledger in range(4) for entry in range(15)}
    left -= {(ledger, entry) for ledger in (1, 2) for entry in range(10)}
    assert receiver.positions == left | {(1, entry) for entry in range(5)}
    assert len(receiver.rows) == len(receiver.positions)


async def test_a_trim_for_one_subscription_leaves_the_others_theirs(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await create(one, "a")
    await create(one, "b")
    await one.add("t", 1, range(30), delay_ms=1_000)
    assert await trim(one, up_to(19, 1), subscription="a") == 20
    one.kill()
    two = await machines.served_by("one", *SMALL)
    first, second = await two.receiver("t", "a"), await two.receiver("t", "b")
    await second.received(30)
    await asyncio.sleep(30)
    assert first.positions == {(1, entry) for entry in range(20, 30)}
    assert await trim(two, up_to(19, 1), subscription="b") == 20
    index = two.topic("t").core.index
    assert sum(bucket.present_rows for bucket in index.buckets) == 10, "what nobody is owed any longer is gone"


async def test_a_clear_drops_everything_and_later_adds_are_not_affected(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", permits=3)
    for ledger_id in range(5):
        await one.add("t", ledger_id, range(15), delay_ms=0 if ledger_id < 2 else 50_000)
    await receiver.received(3)
    assert await clear(one) == 75
    assert await clear(one) == 0
    await one.add("t", 1, range(3), delay_ms=1_000)
    receiver.stream.grant(100)
    await receiver.received(6)
    await asyncio.sleep(60)
    assert [row[:2] for row in receiver.rows[3:]] == [(1, 0), (1, 1), (1, 2)]
    assert await receiver.acknowledge(receiver.rows[:3]) == 3, "what was in flight was cleared, too"


async def test_clearing_a_subscription_leaves_its_leases_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await create(one, "other")
    await one.add("t", 1, range(10), delay_ms=1)
    await asyncio.sleep(1)
    leased = await get(one, 4)
    assert await clear(one, subscription="s") == 10
    assert await acknowledge(one, rows_of(leased)) == 4
    assert not rows_of(await get(one))
    await asyncio.sleep(60)
    assert not rows_of(await get(one))
    assert len(rows_of(await get(one, subscription="other"))) == 10


# ---- rule 2


async def test_nothing_is_handed_out_that_a_staged_trim_makes_gone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    stream = await one.receiver("t", "s")
    await create(one, "pulled")
    await one.add("t", 1, range(10), delay_ms=1_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(5, 1))
    await held.reached()
    waiting = get(one, subscription="pulled", wait_ms=9_000)
    await asyncio.sleep(5)
    assert not stream.rows
    assert not trimming.done()
    held.release()
    assert await trimming == 6
    await stream.received(4)
    assert {row[1] for row in rows_of(await waiting)} == {6, 7, 8, 9} == {row[1] for row in stream.rows}


async def test_a_staged_trim_withholds_until_it_is_applied_though_its_caller_was_told_unknown(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    stream = await one.receiver("t", "s")
    await one.add("t", 1, range(10), delay_ms=13_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(5, 1))
    await held.reached()
    with pytest.raises(OutcomeUnknown):
        await trimming
    # The log was confirmed lately enough: nothing but the trim keeps the rows back.
    await asyncio.sleep(4)
    assert one.topic("t").shard.may_hand_out
    assert not stream.rows
    with pytest.raises(Unavailable):
        await one.add("t", 1, [3])
    held.release()
    await stream.received(4)
    await asyncio.sleep(5)
    assert {row[1] for row in stream.rows} == {6, 7, 8, 9}
    assert (await one.add("t", 1, [3])).accepted == 1


async def test_a_trim_goes_on_although_its_caller_has_gone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    stream = await one.receiver("t", "s")
    await one.add("t", 1, range(10), delay_ms=1_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(5, 1))
    await held.reached()
    trimming.cancel()
    await asyncio.sleep(3)
    assert trimming.cancelled()
    assert not stream.rows
    held.release()
    await stream.received(4)
    assert {row[1] for row in stream.rows} == {6, 7, 8, 9}


async def test_a_trim_for_one_subscription_holds_up_nobody_else(machines: EngineFixture) -> None:
    one = await machines.served_by()
    trimmed, other = await one.receiver("t", "trimmed"), await one.receiver("t", "other")
    await one.add("t", 1, range(10), delay_ms=1_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(5, 1), subscription="trimmed")
    await held.reached()
    await other.received(10, timeout_s=3)
    assert not trimmed.rows
    held.release()
    assert await trimming == 6
    await trimmed.received(4)


# ---- races


async def test_an_add_after_a_staged_trim_is_not_affected_by_it(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=5_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(99, 1))
    await held.reached()
    adding = one.add("t", 1, range(5, 15), delay_ms=5_000)
    await asyncio.sleep(1)
    held.release()
    assert await trimming == 10
    assert (await adding).accepted == 10
    receiver = await one.receiver("t")
    await receiver.received(10)


async def test_an_add_that_was_staged_before_a_trim_is_trimmed(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, [0], delay_ms=5_000)
    held = one.pause("put_if_absent", JOURNAL)
    adding = one.add("t", 1, range(1, 10), delay_ms=5_000)
    await held.reached()
    trimming = trim(one, up_to(99, 1))
    await asyncio.sleep(1)
    assert not trimming.done()
    held.release()
    assert (await adding).accepted == 9
    assert await trimming == 10


async def test_acknowledgements_and_trims_of_the_same_rows_count_each_row_once(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=0)
    rows = await receiver.received(10)
    held = one.pause("put_if_absent", JOURNAL)
    acknowledging = receiver.acknowledge(rows[:5])
    await held.reached()
    trimming = trim(one, up_to(99, 1))
    later = receiver.acknowledge(rows[5:])
    await asyncio.sleep(1)
    held.release()
    assert await acknowledging == 0
    assert await trimming + (5 - await later) == 5
    state = next(iter(one.topic("t").core.subscriptions.values()))
    assert (state.backlog, len(state.in_flight), len(state.acknowledging)) == (0, 0, 0)


async def test_trims_at_the_same_time_come_one_after_the_other(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in range(5):
        await one.add("t", ledger_id, range(30), delay_ms=5_000)
    counts = await asyncio.gather(*(trim(one, up_to(19, number % 5)) for number in range(10)), clear(one))
    assert sum(counts) == 150


async def test_a_trim_of_more_rows_than_a_slot_names_is_one_trim(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.SLOT_ROWS_MAX", 100)
    one = await machines.served_by()
    await create(one)
    await create(one, "other")
    await one.add("t", 1, range(1000), delay_ms=5_000)
    slots = len(machines.keys(JOURNAL))
    assert await trim(one, up_to(899, 1), subscription="s") == 900
    assert len(machines.keys(JOURNAL)) >= slots + 9
    receiver, other = await one.receiver("t"), await one.receiver("t", "other")
    await other.received(1000)
    assert {row[1] for row in receiver.rows} == set(range(900, 1000))


# ---- portions, and dead letters


async def test_other_requests_pass_between_the_portions_of_a_trim(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.PORTION_ROWS", 10)
    one = await machines.served_by()
    await one.add("t", 1, range(100), delay_ms=5_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(89, 1))
    await held.reached()
    added = one.add("t", 1, [200, 201], delay_ms=5_000)
    again = one.add("t", 1, [0, 1], delay_ms=5_000)
    held.release()
    assert (await added).accepted == (await again).accepted == 2
    assert not trimming.done(), "the adds waited for one portion alone"
    assert await trimming == 90
    receiver = await one.receiver("t")
    await receiver.received(14)
    assert receiver.positions == {(1, entry) for entry in (0, 1, *range(90, 100), 200, 201)}


async def test_a_trim_that_fails_in_the_middle_has_done_a_part_and_may_be_repeated(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.PORTION_ROWS", 10)
    one = await machines.served_by("one")
    await one.add("t", 1, range(100), delay_ms=5_000)
    slots = 0

    def crash_at_the_third(name: str) -> None:
        nonlocal slots
        slots += name == "log.after_put"
        if slots == 3:
            one.kill()

    one.at_crash_point = crash_at_the_third
    trimming = trim(one, up_to(89, 1))
    await asyncio.wait([trimming])
    two = await machines.served_by("one")
    left = two.topic("t").core.index.pending_rows
    assert 60 <= left <= 80
    assert await trim(two, up_to(89, 1)) == left - 10


async def test_what_is_trimmed_to_dead_letters_is_in_flight_no_longer_and_listed_after_a_crash(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.DEAD_LETTER_PORTION_ROWS", 7)
    one = await machines.served_by("one", *SMALL)
    receiver, other = await one.receiver("t"), await one.receiver("t", "other")
    await one.add("t", 1, range(30), delay_ms=0)
    rows = await receiver.received(30)
    await receiver.acknowledge(rows[:5])
    trimmed = await dead_letter(one, up_to(19, 1))
    assert (trimmed.rows, trimmed.dead_lettered, trimmed.more) == (15, 15, False)
    assert await receiver.acknowledge(rows[5:]) == 15
    await other.received(30)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    page = await two.call(two.engine.requests.list_dead_letters("t", "s", DeadLetterFilter(), 100, 0))
    assert page.rows.entry_id.tolist() == sorted(row[1] for row in rows[5:] if row[1] < 20)
    assert set(page.rows.reason.tolist()) == {DeadLetterReason.TRIMMED}
    receiver = await two.receiver("t")
    await asyncio.sleep(10)
    assert not receiver.rows


async def test_a_request_makes_a_bounded_number_of_dead_letters_and_says_that_there_may_be_more(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.DEAD_LETTER_PORTION_ROWS", 10)
    monkeypatch.setattr("daemon.shard.topic_changes._ENOUGH_DEAD_LETTERS", 20)
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, range(45), delay_ms=5_000)
    answers = [await dead_letter(one, up_to(99, 1)) for _ in range(3)]
    assert [(each.dead_lettered, each.more) for each in answers] == [(30, True), (15, False), (0, False)]


async def test_dead_letters_of_a_trim_need_a_subscription(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, [1])
    with pytest.raises(InvalidArgument, match="dead_letter is set, and subscription is empty"):
        await one.call(one.engine.requests.trim("t", None, up_to(9, 1), dead_letter=True))


# ---- crashes


@pytest.mark.parametrize("subscription", [None, "s"])
@pytest.mark.parametrize("point", ["log.before_put", "log.after_put"])
async def test_a_crash_around_the_slot_of_a_trim_leaves_all_or_nothing(
    machines: EngineFixture, subscription: str | None, point: str
) -> None:
    one = await machines.served_by("one")
    await create(one)
    await create(one, "other")
    await one.add("t", 1, range(10), delay_ms=1_000)

    def crash(name: str) -> None:
        if name == point:
            one.kill()

    one.at_crash_point = crash
    trimming = trim(one, up_to(4, 1), subscription=subscription)
    await asyncio.wait([trimming])
    assert trimming.cancelled()
    two = await machines.served_by("one")
    landed = point == "log.after_put"
    assert await trim(two, up_to(4, 1), subscription=subscription) == (0 if landed else 5)
    receiver, other = await two.receiver("t"), await two.receiver("t", "other")
    await receiver.received(5)
    await other.received(10 if subscription else 5)
    await asyncio.sleep(20)
    assert len(receiver.rows) == 5


async def test_an_owner_that_lost_the_shard_answers_no_trim(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10), delay_ms=1_000)
    await asyncio.sleep(0.1)
    one.freeze()
    trimming, nothing = trim(one, up_to(4, 1)), trim(one, up_to(4, 77))
    two = await machines.served_by("two")
    receiver = await two.receiver("t")
    one.thaw()
    for task in (trimming, nothing):
        with pytest.raises(TarryError):
            await task
    await receiver.received(10)


async def test_that_there_was_nothing_to_trim_is_said_only_by_the_owner(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10))
    await asyncio.sleep(0.1)
    one.freeze()
    trimming = trim(one, up_to(99, 2))
    two = await machines.served_by("two")
    await two.add("t", 2, range(10))
    one.thaw()
    with pytest.raises(TarryError):
        await trimming


async def test_a_trim_whose_slot_lost_its_answer_is_found_and_answered(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert await trim(one, up_to(4, 1)) == 5


# ---- refused


async def test_a_refused_trim_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.rows_per_request_max=5")
    await one.add("t", 1, range(5))
    bad: list[LedgerRanges] = [up_to(9), up_to(9, *range(6)), up_to(9, 1, 2, 1), up_to(9, 1, 2, all_lower_ledgers=True)]
    for ranges in bad:
        with pytest.raises(InvalidArgument):
            await trim(one, ranges)
    with pytest.raises(InvalidArgument, match="topic has 0 bytes"):
        await trim(one, up_to(9, 1), topic="")
    with pytest.raises(InvalidArgument, match="subscription has 0 bytes"):
        await trim(one, up_to(9, 1), subscription="")
    with pytest.raises(NotFound):
        await trim(one, up_to(9, 1), subscription="nobody")
    with pytest.raises(NotFound):
        await clear(one, topic="nothing")
    assert one.topic("t").core.index.pending_rows == 5
    assert len(machines.keys("/topics/")) == 1, "a trim bears no topic"


async def test_that_there_is_no_such_topic_is_said_only_by_the_owner(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, [1])
    await asyncio.sleep(0.1)
    one.freeze()
    asked = [clear(one, topic="new"), clear(one, subscription="new"), get(one, subscription="new")]
    two = await machines.served_by("two")
    await create(two, "new")
    await two.add("new", 1, [1])
    one.thaw()
    for task in asked:
        with pytest.raises(TarryError) as caught:
            await task
        assert not isinstance(caught.value, NotFound)


async def test_a_store_that_is_away_makes_a_trim_unavailable_or_unknown_and_undone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t", permits=0)
    await one.add("t", 1, range(10), delay_ms=0)
    one.store.go_down()
    adding = one.add("t", 2, [1])
    await asyncio.sleep(1)
    waiting = trim(one, up_to(4, 1))
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(OutcomeUnknown):
        await adding
    one.store.come_back()
    await one.serving()
    receiver.stream.grant(100)
    await receiver.received(10)


async def test_a_stream_that_opens_while_a_trim_is_staged_holds_nothing_of_it(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=0)
    await receiver.received(10)
    receiver.stream.close()
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(4, 1))
    await held.reached()
    opening = one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    await asyncio.sleep(1)
    held.release()
    await trimming
    stream = await opening
    stream.grant(100)
    again = Receiver(one, "t", stream)
    await again.received(5)
    await asyncio.sleep(5)
    assert {row[1] for row in again.rows} == {5, 6, 7, 8, 9}


async def test_a_trim_that_names_too_many_ledgers_is_refused_and_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    with pytest.raises(InvalidArgument, match="ledger_id has 1001 rows; a request must have 1 to 1000"):
        await trim(one, up_to(4, *range(1_001)))
    assert one.topic("t").core.index.pending_rows == 10
