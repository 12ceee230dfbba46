"""Dead letters: kept until they are replayed or purged, whatever happens; each is replayed or purged once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from daemon import call_values
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.errors import (
    DelayTooLong,
    InvalidArgument,
    NotFound,
    NotOwner,
    OutcomeUnknown,
    QuotaExceeded,
)
from daemon.topic import topic_dead_letters
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.manifest import SubscriptionPolicy, TopicPolicy
from storage_backends.formats.slot_format import DeadLetterReason
from tests._support.engine_fixture import Daemon, EngineFixture, no_positions
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import (
    acknowledge,
    cancel,
    clear,
    create,
    delete_topic,
    entries_of,
    get,
    rows_of,
    stats,
    trim,
    up_to,
)
from tests.daemon._support.dead_letter_calls import (
    buried,
    ids_of,
    listed,
    nack,
    positions_of,
    purge,
    reject,
    replay,
    texts_of,
    with_ids,
)

OFTEN = ("journal.checkpoint_slots=5",)


async def counts(daemon: Daemon, subscription: str = "s") -> call_values.SubscriptionStats:
    found = (await stats(daemon)).subscriptions
    return next(each for each in found if each.subscription == subscription)


async def add_slots(daemon: Daemon, count: int) -> None:
    """So many slots later, and the checkpoints that follow from them."""
    for number in range(count):
        await daemon.add("t", 1_000 + number, [1], delay_ms=9_000_000)
        await asyncio.sleep(0.2)


# ---- what is kept


async def test_a_rejected_position_is_kept_with_reason_counts_and_times(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    rows = await buried(one, 3, text="no such customer")
    page = await listed(one)
    assert positions_of(page) == [(1, 0), (1, 1), (1, 2)]
    assert ids_of(page) == sorted(set(ids_of(page)))
    assert page.rows.deliver_at_ms.tolist() == [row[2] for row in rows]
    assert page.rows.redelivery_count.tolist() == [1] * 3
    assert page.rows.reason.tolist() == [DeadLetterReason.REJECTED] * 3
    assert page.rows.batch_index.tolist() == [NO_BATCH_INDEX] * 3
    assert texts_of(page) == ["no such customer"] * 3
    assert page.rows.dead_at_ms.tolist() == [page.as_of_ms] * 3
    found = await counts(one)
    assert (found.dead_letters, found.backlog, found.nacked) == (3, 0, 0)
    assert not entries_of(await get(one))


async def test_a_position_that_is_nacked_too_often_dies_with_all_its_counts(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, policy=SubscriptionPolicy(max_redeliver_count=2))
    await one.add("t", 1, [7], delay_ms=1)
    for _ in range(3):
        await asyncio.sleep(1)
        assert (await nack(one, rows_of(await get(one, wait_ms=5_000)))).ignored == 0
    page = await listed(one)
    assert positions_of(page) == [(1, 7)]
    assert page.rows.redelivery_count.tolist() == [3]
    assert page.rows.reason.tolist() == [DeadLetterReason.TOO_OFTEN]


@pytest.mark.parametrize("successor", ["one", "two"])
async def test_dead_letters_outlive_a_crash_and_a_takeover(machines: EngineFixture, successor: str) -> None:
    one = await machines.served_by("one")
    await create(one)
    await buried(one, 5, text="broken")
    before = await listed(one)
    one.kill()
    two = await machines.served_by(successor)
    after = await listed(two)
    for name in ("dead_letter_id", "ledger_id", "entry_id", "batch_index", "deliver_at_ms", "key_hash"):
        assert getattr(after.rows, name).tolist() == getattr(before.rows, name).tolist(), name
    for name in ("redelivery_count", "dead_at_ms", "reason"):
        assert getattr(after.rows, name).tolist() == getattr(before.rows, name).tolist(), name
    assert texts_of(after) == texts_of(before)
    await asyncio.sleep(60)
    assert not entries_of(await get(two)), "what is dead is in no backlog"


@pytest.mark.parametrize("sealed", [False, True])
async def test_dead_letters_outlive_the_slots_that_made_them(machines: EngineFixture, sealed: bool) -> None:
    one = await machines.served_by("one", *OFTEN)
    await create(one)
    await buried(one, 5, text="broken")
    made = machines.keys(JOURNAL)
    await purge(one, with_ids(ids_of(await listed(one))[1]))
    if sealed:
        await one.call(one.engine.requests.seal("t"))
    await add_slots(one, 25)
    assert not set(made) & set(machines.keys(JOURNAL))
    one.kill()
    two = await machines.served_by("two", *OFTEN)
    page = await listed(two)
    assert positions_of(page) == [(1, 0), (1, 2), (1, 3), (1, 4)]
    assert texts_of(page) == ["broken"] * 4
    assert (await replay(two)).replayed == 4
    await asyncio.sleep(1)
    assert sorted(entries_of(await get(two))) == [0, 2, 3, 4]


async def test_an_owner_that_was_superseded_replays_and_purges_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one)
    await buried(one, 5)
    one.suspend()
    two = await machines.served_by("two")
    await purge(two, with_ids(ids_of(await listed(two))[0]))
    replaying, purging = replay(one), purge(one)
    one.resume()
    with pytest.raises(OutcomeUnknown):
        await replaying
    with pytest.raises(NotOwner):
        await purging
    await asyncio.sleep(5)
    assert positions_of(await listed(two)) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert (await counts(two)).backlog == 0


async def test_an_id_is_never_used_again(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await create(one)
    await buried(one, 3)
    last = ids_of(await listed(one))[-1]
    assert await purge(one) == 3
    await add_slots(one, 25)
    one.kill()
    two = await machines.served_by("one")
    await buried(two, 1, ledger_id=2)
    assert ids_of(await listed(two)) > [last]


async def test_neither_trim_nor_clear_drops_dead_letters(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 4)
    await trim(one, up_to(100, 1))
    await trim(one, up_to(100, 1), subscription="s")
    await clear(one, subscription="s")
    await clear(one)
    assert len(ids_of(await listed(one))) == 4
    assert (await counts(one)).dead_letters == 4
    assert (await replay(one)).replayed == 4


async def test_a_dead_letter_of_one_subscription_leaves_the_claim_of_the_others(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await create(one, "other")
    rows = await buried(one, 4)
    assert (await counts(one, "other")).backlog == 4
    assert not ids_of(await listed(one, subscription="other"))
    assert one.topic("t").core.indexes.present_rows == 4
    assert sorted(rows_of(await get(one, subscription="other"))) == sorted(rows)
    await acknowledge(one, rows[:3], subscription="other")
    await reject(one, rows[3:], subscription="other")
    assert one.topic("t").core.indexes.present_rows == 0, "all are done with them"
    assert len(ids_of(await listed(one))) == 4
    assert positions_of(await listed(one, subscription="other")) == [(1, 3)]


async def test_the_deletion_of_a_subscription_takes_its_dead_letters_and_says_how_many(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await create(one)
    await create(one, "other")
    rows = await buried(one, 4)
    await get(one, subscription="other")
    await reject(one, rows[:1], subscription="other")
    assert await one.call(one.engine.requests.delete_subscription("t", "s")) == 4
    with pytest.raises(NotFound):
        await listed(one)
    await create(one)
    assert not ids_of(await listed(one))
    assert len(ids_of(await listed(one, subscription="other"))) == 1
    one.kill()
    two = await machines.served_by("two")
    assert not ids_of(await listed(two))


async def test_a_topic_that_is_deleted_leaves_no_dead_letters_to_the_one_after_it(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 4)
    await delete_topic(one)
    await create(one)
    assert not ids_of(await listed(one))


# ---- reading


async def test_a_filter_chooses_by_ids_ledgers_reason_and_time(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, policy=SubscriptionPolicy(max_redeliver_count=0))
    await buried(one, 3)
    between_ms = machines.now_ms() + 1
    await one.add("t", 5, range(2), delay_ms=1)
    await asyncio.sleep(1)
    await nack(one, rows_of(await get(one)))
    ids = ids_of(await listed(one))
    wanted: list[tuple[DeadLetterFilter, list[tuple[int, int]]]] = [
        (with_ids(ids[0], ids[3]), [(1, 0), (5, 0)]),
        (with_ids(ids[-1] + 7), []),
        (DeadLetterFilter(ledgers=(2, 9)), [(5, 0), (5, 1)]),
        (DeadLetterFilter(reason=DeadLetterReason.TOO_OFTEN), [(5, 0), (5, 1)]),
        (DeadLetterFilter(reason=DeadLetterReason.REJECTED, ledgers=(5, 5)), []),
        (DeadLetterFilter(from_ms=between_ms), [(5, 0), (5, 1)]),
        (DeadLetterFilter(until_ms=between_ms), [(1, 0), (1, 1), (1, 2)]),
        (DeadLetterFilter(from_ms=between_ms, until_ms=between_ms), []),
    ]
    for asked, positions in wanted:
        assert positions_of(await listed(one, asked)) == positions, asked
    assert await purge(one, DeadLetterFilter(reason=DeadLetterReason.TOO_OFTEN)) == 2
    assert (await replay(one, DeadLetterFilter(ledgers=(5, 5)))).replayed == 0
    assert (await replay(one, DeadLetterFilter(until_ms=between_ms))).replayed == 3


async def test_pages_follow_each_other_while_others_die_and_leave(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 10)
    first = await listed(one, page_size=4)
    await buried(one, 3, ledger_id=2)
    ids = ids_of(first)
    assert first.next_after == ids[-1]
    await purge(one, with_ids(ids[1], ids[-1], ids[-1] + 1))
    second = await listed(one, page_size=4, after_id=first.next_after)
    assert second.next_after is not None
    third = await listed(one, page_size=1_000, after_id=second.next_after)
    assert third.next_after is None
    found = positions_of(first) + positions_of(second) + positions_of(third)
    assert found == [(1, entry) for entry in range(10) if entry != 4] + [(2, entry) for entry in range(3)]


async def test_bad_filters_and_pages_are_refused(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.rows_per_request_max=10")
    await create(one)
    bad: list[tuple[str, DeadLetterFilter]] = [
        (r"dead_letter_id has 11 ids; it must have at most 10", with_ids(*range(11))),
        (r"dead_letter_id\[2\] is 5; it must be above the id before it, 5", with_ids(1, 5, 5)),
        (r"dead_letter_id\[1\] is 4; it must be above the id before it, 5", with_ids(5, 4)),
        (r"last_ledger_id is 1, before first_ledger_id, which is 2", DeadLetterFilter(ledgers=(2, 1))),
        (r"until_ms is 4; it must be at least from_ms, which is 5", DeadLetterFilter(from_ms=5, until_ms=4)),
    ]
    for says, asked in bad:
        for refused in (listed(one, asked), replay(one, asked), purge(one, asked)):
            with pytest.raises(InvalidArgument, match=says):
                await refused
    for size in (-1, 10_001):
        with pytest.raises(InvalidArgument, match="page_size"):
            await listed(one, page_size=size)
    with pytest.raises(DelayTooLong, match="delay_ms is 9000000000000; the largest delay is"):
        await replay(one, delay_ms=9_000_000_000_000)
    for unknown in (listed(one, subscription="x"), replay(one, subscription="x"), purge(one, subscription="x")):
        with pytest.raises(NotFound, match="'x'"):
            await unknown


# ---- replaying


async def test_a_replayed_position_is_handed_out_again_as_if_for_the_first_time(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, [1], delay_ms=1)
    await asyncio.sleep(1)
    await nack(one, rows_of(await get(one)))
    await asyncio.sleep(1)
    again = (await get(one)).handed_out
    assert again.redelivery_count is not None
    assert again.redelivery_count.tolist() == [1]
    await nack(one, [(1, 1, int(again.rows.deliver_at_ms[0]))], reject=True)
    assert (await listed(one)).rows.redelivery_count.tolist() == [2]
    now_ms = machines.now_ms()
    assert await replay(one) == call_values.Replayed(replayed=1, skipped=0)
    assert not ids_of(await listed(one))
    await asyncio.sleep(1)
    handed_out = (await get(one)).handed_out
    assert handed_out.rows.entry_id.tolist() == [1]
    assert handed_out.rows.deliver_at_ms.tolist() == [now_ms], "it is due when it is replayed"
    assert handed_out.redelivery_count is None or not handed_out.redelivery_count.any()
    assert await acknowledge(one, [(1, 1, now_ms)]) == 0
    assert (await counts(one)).backlog == 0


async def test_a_replayed_position_comes_to_its_subscription_alone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await create(one, "other")
    rows = await buried(one, 3)
    await acknowledge(one, rows_of(await get(one, subscription="other")), subscription="other")
    assert (await replay(one)).replayed == 3
    await asyncio.sleep(1)
    assert (await counts(one, "other")).backlog == 0
    assert sorted(entries_of(await get(one))) == sorted(row[1] for row in rows)


async def test_a_listening_dispatcher_gets_what_is_replayed_at_once(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 3)
    receiver = await one.receiver("t")
    await replay(one)
    await receiver.received(3, timeout_s=1)
    assert not receiver.early


async def test_what_is_replayed_with_a_delay_waits_for_it_and_may_be_cancelled(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    receiver_gets = await buried(one, 4)
    due_ms = machines.now_ms() + 60_000
    assert (await replay(one, delay_ms=60_000)).replayed == 4
    found = await counts(one)
    assert (found.dead_letters, found.own_pending, found.backlog) == (0, 4, 0)
    assert (await stats(one)).next_due_ms == due_ms
    assert (await cancel(one, 1, [2], subscription="s")).cancelled == 1
    one.kill()
    two = await machines.served_by("two")
    receiver = await two.receiver("t")
    await asyncio.sleep((due_ms - machines.now_ms()) / 1000 - 1)
    assert not receiver.rows
    await receiver.received(3)
    assert sorted(receiver.rows) == [(1, row[1], due_ms) for row in sorted(receiver_gets) if row[1] != 2]
    assert not receiver.early


async def test_what_was_replayed_stays_so_after_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await create(one)
    await buried(one, 6)
    ids = ids_of(await listed(one))
    assert (await replay(one, with_ids(*ids[:4]))).replayed == 4
    one.kill()
    two = await machines.served_by("two", *OFTEN)
    assert ids_of(await listed(two)) == ids[4:]
    assert (await counts(two)).backlog == 4
    await add_slots(two, 25)
    two.kill()
    three = await machines.served_by("three")
    assert ids_of(await listed(three)) == ids[4:]
    assert sorted(entries_of(await get(three))) == [0, 1, 2, 3]


async def test_a_replay_skips_positions_of_which_the_subscription_has_a_row(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 3)
    await one.add("t", 1, [1], delay_ms=60_000, subscription="s")
    assert await replay(one) == call_values.Replayed(replayed=2, skipped=1)
    assert positions_of(await listed(one)) == [(1, 1)]
    assert await replay(one) == call_values.Replayed(replayed=0, skipped=1)
    await cancel(one, 1, [1], subscription="s")
    assert await replay(one) == call_values.Replayed(replayed=1, skipped=0)


async def test_a_replay_leaves_what_dies_meanwhile(machines: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 1)
    one = await machines.served_by()
    await create(one, policy=SubscriptionPolicy(max_redeliver_count=0))
    await buried(one, 20)
    last = ids_of(await listed(one))[-1]
    stream = await one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    stream.grant(1_000)
    handed_out_rows = 0

    async def give_back() -> None:
        nonlocal handed_out_rows
        while True:
            handed_out = await stream.next_messages()
            handed_out_rows += len(handed_out.rows)
            await stream.negative_acknowledge(call_values.Nack(handed_out.held()))

    giving_back = one.call(give_back())
    assert await replay(one) == call_values.Replayed(replayed=20, skipped=0)
    assert len(ids_of(await listed(one))) > 1, "the first ones died again before the last was replayed"
    await one.until(lambda: handed_out_rows == 20)
    await asyncio.sleep(5)
    giving_back.cancel()
    assert handed_out_rows == 20, "each once"
    assert min(ids_of(await listed(one))) > last
    assert len(ids_of(await listed(one))) == 20


async def test_of_replays_and_purges_at_a_time_each_dead_letter_is_in_one(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 7)
    one = await machines.served_by()
    await create(one)
    await buried(one, 100)
    first, purged, second = await asyncio.gather(replay(one), purge(one), replay(one))
    assert first.replayed + second.replayed + purged == 100
    assert min(first.replayed, second.replayed, purged) > 0, "they take turns"
    assert (first.skipped, second.skipped) == (0, 0)
    await asyncio.sleep(1)
    assert len(entries_of(await get(one))) == first.replayed + second.replayed
    assert not ids_of(await listed(one))


async def test_a_replay_that_takes_long_is_unknown_and_goes_on(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 5)
    one = await machines.served_by()
    await create(one)
    await buried(one, 20)
    held = one.pause("put_if_absent", JOURNAL)
    replaying = replay(one)
    await held.reached()
    with pytest.raises(OutcomeUnknown, match="the replay has taken 60 s; it continues"):
        await replaying
    assert len(ids_of(await listed(one))) == 20
    held.release()
    await one.until(lambda: not len(one.topic("t").subscription("s").dead_letters))
    assert (await counts(one)).backlog == 20


async def test_a_replay_goes_on_when_its_caller_has_gone(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 5)
    one = await machines.served_by()
    await create(one)
    await buried(one, 20)
    held = one.pause("put_if_absent", JOURNAL)
    replaying = replay(one)
    await held.reached()
    replaying.cancel()
    held.release()
    await one.until(lambda: not len(one.topic("t").subscription("s").dead_letters))
    assert (await counts(one)).backlog == 20


@pytest.mark.parametrize("leave", [replay, purge])
async def test_a_replay_or_purge_ends_when_its_subscription_is_deleted_and_is_not_refused_since_it_has_begun(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Daemon], asyncio.Task[object]]
) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 5)
    one = await machines.served_by()
    await create(one)
    await buried(one, 20)
    held = one.pause("put_if_absent", JOURNAL)
    leaving = leave(one)
    await held.reached()
    deleting = one.call(one.engine.requests.delete_subscription("t", "s"))
    await asyncio.sleep(0.1)
    held.release()
    assert await deleting == 15
    with pytest.raises(OutcomeUnknown, match="deleted"):
        await leaving
    with pytest.raises(NotFound, match="no subscription"):
        await leave(one)


async def test_quotas_hold_for_what_is_replayed(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 10)
    policy = TopicPolicy(pending_rows_max=4)
    await one.call(one.engine.requests.set_topic_policy("t", policy))
    with pytest.raises(OutcomeUnknown, match="pending_rows_max is 4"):
        await replay(one, delay_ms=60_000)
    with pytest.raises(QuotaExceeded, match="pending_rows_max is 4"):
        await replay(one, delay_ms=60_000)
    found = await counts(one)
    assert (found.own_pending, found.dead_letters) == (4, 6), "what there was room for"
    assert (await replay(one)).replayed == 6, "what is due at once is not pending"


async def test_a_replay_yields_to_others_between_its_portions(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_dead_letters, "PORTION_ROWS", 1)
    one = await machines.served_by()
    await create(one)
    await buried(one, 50)
    replaying = replay(one)
    await one.add("t", 9, [1], delay_ms=60_000)
    assert not replaying.done()
    assert (await replaying).replayed == 50


# ---- purging


async def test_what_is_purged_stays_so_after_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await buried(one, 6)
    ids = ids_of(await listed(one))
    assert await purge(one, with_ids(*ids[::2], ids[-1] + 9)) == 3
    one.kill()
    two = await machines.served_by("two")
    assert ids_of(await listed(two)) == ids[1::2]
    assert (await counts(two)).backlog == 0
    assert await purge(two) == 3
    assert await purge(two) == 0


# ---- messages of a batch


async def test_one_message_of_a_batch_dies_and_is_replayed_alone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, [8], delay_ms=1)
    await asyncio.sleep(1)
    rows = rows_of(await get(one))
    assert (await nack(one, rows, batch_index=3, reject=True)).dead_lettered == 1
    page = await listed(one)
    assert positions_of(page) == [(1, 8)]
    assert page.rows.batch_index.tolist() == [3]
    assert (await counts(one)).in_flight == 1, "the entry as a whole stays where it is"
    assert (await replay(one)).replayed == 1
    await asyncio.sleep(1)
    handed_out = (await get(one)).handed_out
    assert handed_out.rows.entry_id.tolist() == [8]
    assert handed_out.batch_index is not None
    assert handed_out.batch_index.tolist() == [3]


async def test_a_message_of_a_batch_that_is_replayed_with_a_delay_is_counted_and_not_listed(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, [8], delay_ms=1)
    await asyncio.sleep(1)
    await nack(one, rows_of(await get(one, lease_ms=3_600_000)), batch_index=3, reject=True)
    assert (await replay(one, delay_ms=60_000)).replayed == 1
    assert (await counts(one)).own_pending == 1
    for view in (call_values.View(), call_values.View(subscription="s")):
        page = await one.call(one.engine.requests.list_scheduled("t", view, 0, None))
        assert not len(page.rows), "the list names entries"
        assert (await one.call(one.engine.requests.histogram("t", view, 0))).rows.sum() == 0
    receiver = await one.receiver("t")
    await asyncio.sleep(61)
    await one.until(lambda: len(receiver.rows) == 1)
