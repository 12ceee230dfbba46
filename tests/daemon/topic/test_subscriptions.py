"""Subscriptions that come and go, their streams, and what survives a crash of either."""

from __future__ import annotations

import asyncio

import pytest

from daemon.call_values import HandedOut
from daemon.errors import NotFound, TarryError
from daemon.topic.open_streams import IN_PASS_ROWS_MAX, StreamClosed
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver, no_positions
from tests._support.fault_store import Fault
from tests.daemon._support.calling import held
from tests.daemon.topic._support.full_outlet import FullOutlet

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")


def names_of(daemon: Daemon, topic: str = "t") -> set[str]:
    return {state.stored.name for state in daemon.topic(topic).core.subscriptions.values()}


async def test_a_subscription_survives_a_crash_with_its_id_and_is_owed_the_same(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    created = await one.call(one.engine.requests.create_subscription("t", "s"))
    await one.add("t", 1, range(10), delay_ms=0)
    await asyncio.sleep(1)
    later = await one.call(one.engine.requests.create_subscription("t", "late"))
    await one.add("t", 2, range(10))
    one.kill()
    two = await machines.served_by("one")
    again = await two.call(two.engine.requests.create_subscription("t", "s"))
    assert (again.subscription_id, again.since_ms, again.created) == (created.subscription_id, created.since_ms, False)
    first, second = await two.receiver("t", "s"), await two.receiver("t", "late")
    await first.received(20)
    await second.received(10)
    await asyncio.sleep(30)
    assert later.created
    assert {position[0] for position in second.positions} == {2}


async def test_creating_a_subscription_whose_commit_lost_its_answer_creates_one(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, [1])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="/topics/")
    created = await one.call(one.engine.requests.create_subscription("t", "s"))
    assert created.created
    assert names_of(one) == {"s"}


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
async def test_a_crash_while_a_subscription_is_created_leaves_one_or_none(
    machines: EngineFixture, fault: Fault
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, [1])
    one.script.plan("put_if_absent", fault, key_part="/topics/")
    held = one.pause("head", "/topics/")
    creating = one.call(one.engine.requests.create_subscription("t", "s"))
    await held.reached()
    one.kill()
    two = await machines.served_by("one")
    assert creating.cancelled()
    again = await two.call(two.engine.requests.create_subscription("t", "s"))
    assert again.created is (fault is Fault.FAIL_BEFORE)
    assert again.subscription_id == 1


async def test_a_deleted_subscription_stays_deleted_and_what_only_it_was_owed_is_gone(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(30), delay_ms=100)
    await one.add("t", 2, range(10), delay_ms=50_000)
    await receiver.received(30)
    await one.call(one.engine.requests.delete_subscription("t", "s"))
    assert isinstance(receiver.ended, NotFound)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    assert names_of(two) == set()
    with pytest.raises(NotFound):
        await two.call(two.engine.requests.open_dispatch("t", "s", no_positions()))
    again = await two.receiver("t", "s")
    await again.received(10)
    await asyncio.sleep(30)
    assert {position[0] for position in again.positions} == {2}
    states = two.topic("t").core.subscriptions
    assert list(states) == [2], "an id is never used again"


async def test_a_crash_between_the_gone_rows_and_the_manifest_of_a_deletion_can_be_deleted_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t", "s")
    await one.add("t", 1, range(10), delay_ms=100)
    await receiver.received(10)
    held = one.pause("put_if_absent", "/topics/", then=Fault.FAIL_BEFORE)
    deleting = one.call(one.engine.requests.delete_subscription("t", "s"))
    await held.reached()
    one.kill()
    await asyncio.wait([deleting])
    two = await machines.served_by("one")
    assert names_of(two) == {"s"}
    await two.call(two.engine.requests.delete_subscription("t", "s"))
    assert names_of(two) == set()


async def test_each_subscription_acknowledges_for_itself(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    first, second = await one.receiver("t", "a"), await one.receiver("t", "b")
    await one.add("t", 1, range(25), delay_ms=100)
    await first.received(25)
    await second.received(25)
    await first.acknowledge(first.rows)
    await second.acknowledge(second.rows[:10])
    one.kill()
    two = await machines.served_by("one", *SMALL)
    first_again, second_again = await two.receiver("t", "a"), await two.receiver("t", "b")
    await second_again.received(15)
    await asyncio.sleep(30)
    assert not first_again.rows
    assert second_again.positions == {row[:2] for row in second.rows[10:]}


# ---- streams


async def test_no_more_is_handed_out_than_permits_were_granted(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t", permits=3)
    await one.add("t", 1, range(10), delay_ms=0)
    await asyncio.sleep(10)
    assert len(receiver.rows) == 3
    receiver.stream.grant(4)
    await asyncio.sleep(10)
    assert len(receiver.rows) == 7


async def test_dispatchers_of_one_subscription_share_what_is_due(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receivers = [await one.receiver("t", permits=10) for _ in range(3)]
    await one.add("t", 1, range(30), delay_ms=0)
    await asyncio.sleep(10)
    assert [len(receiver.rows) for receiver in receivers] == [10, 10, 10]
    assert len(set().union(*(receiver.positions for receiver in receivers))) == 30


async def test_what_a_stream_has_no_room_to_send_is_handed_out_to_others(machines: EngineFixture) -> None:
    one = await machines.served_by()
    full, other = await one.receiver("t", permits=10), await one.receiver("t", permits=10)
    full.stream.outlet = outlet = FullOutlet()
    await one.add("t", 1, range(30), delay_ms=0)
    await asyncio.sleep(10)
    assert (len(full.rows), len(other.rows)) == (0, 10)
    outlet.make_room()
    await full.received(10)
    other.stream.grant(10)
    await other.received(20)


class Sent:
    """What a stream sends within passes."""

    def __init__(self, receiver: Receiver) -> None:
        self.parts: list[HandedOut] = []
        receiver.stream.send = self.parts.append

    @property
    def entries(self) -> list[int]:
        return [entry for part in self.parts for entry in part.rows.entry_id.tolist()]


async def test_a_stream_that_sends_at_once_has_sent_what_came_due_when_its_topic_has_passed_it(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    sent = Sent(receiver)
    await one.add("t", 1, range(10), delay_ms=1_000)
    assert not sent.entries
    machines.loop.pass_time(1)
    assert one.topic("t").pass_due(machines.now_ms()) == 10
    assert sent.entries == list(range(10))
    await asyncio.sleep(10)
    assert (len(sent.entries), receiver.rows) == (10, [])


async def test_what_a_pass_does_not_send_comes_to_who_waits_for_it(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t", permits=IN_PASS_ROWS_MAX + 50)
    sent = Sent(receiver)
    await one.add("t", 1, range(IN_PASS_ROWS_MAX + 100), delay_ms=10)
    await asyncio.sleep(10)
    assert (len(sent.entries), len(receiver.rows)) == (IN_PASS_ROWS_MAX, 50)
    receiver.stream.grant(1_000)
    await receiver.received(100)
    assert sorted([*sent.entries, *(row[1] for row in receiver.rows)]) == list(range(IN_PASS_ROWS_MAX + 100))


async def test_a_stream_that_has_spent_its_permits_in_a_pass_does_not_hold_up_those_behind_it(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    first = await one.receiver("t", permits=5)
    sent = Sent(first)
    await one.add("t", 1, range(5), delay_ms=10)
    await asyncio.sleep(1)
    assert len(sent.entries) == 5
    second = await one.receiver("t", permits=10)
    await one.add("t", 2, range(10), delay_ms=10)
    await second.received(10)
    first.stream.grant(5)
    await one.add("t", 3, range(5), delay_ms=10)
    await asyncio.sleep(1)
    assert (len(sent.entries), first.rows) == (10, [])


async def test_a_stream_that_sends_at_once_takes_its_turn_where_others_wait(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receivers = [await one.receiver("t", permits=10) for _ in range(2)]
    sent = [Sent(receiver) for receiver in receivers]
    await one.add("t", 1, range(20), delay_ms=10)
    await asyncio.sleep(10)
    assert [len(receiver.rows) for receiver in receivers] == [10, 10]
    assert not any(each.parts for each in sent)


async def test_a_stream_that_has_no_room_sends_nothing_in_a_pass(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    sent, outlet = Sent(receiver), FullOutlet()
    receiver.stream.outlet = outlet
    await one.add("t", 1, range(10), delay_ms=10)
    await asyncio.sleep(10)
    assert (sent.entries, receiver.rows) == ([], [])
    outlet.make_room()
    await receiver.received(10)


async def test_a_stream_that_closes_returns_what_it_holds_first_and_in_order(machines: EngineFixture) -> None:
    one = await machines.served_by()
    first = await one.receiver("t", permits=5)
    second = await one.receiver("t", permits=0)
    await one.add("t", 1, range(10), delay_ms=0)
    await first.received(5)
    await first.acknowledge(first.rows[:2])
    first.stream.close()
    second.stream.grant(100)
    await second.received(8)
    assert [row[1] for row in second.rows] == [2, 3, 4, 5, 6, 7, 8, 9]
    await asyncio.sleep(1)
    assert isinstance(first.ended, StreamClosed)


async def test_positions_that_a_dispatcher_holds_are_not_handed_out_again_by_the_next_owner(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t", permits=10)
    await one.add("t", 1, range(30), delay_ms=0)
    rows = await receiver.received(10)
    one.kill()
    two = await machines.served_by("two", *SMALL)
    stream = await two.call(two.engine.requests.open_dispatch("t", "s", held(rows)))
    assert stream.held == 10
    assert stream.epoch == 2
    stream.grant(100)
    again = Receiver(two, "t", stream)
    await again.received(20)
    await asyncio.sleep(30)
    assert not again.positions & receiver.positions
    assert await again.acknowledge(rows) == 0


async def test_held_positions_with_another_time_are_not_held(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(3), delay_ms=0)
    receiver = await one.receiver("t")
    rows = await receiver.received(3)
    receiver.stream.close()
    another_time = (*rows[0][:2], rows[0][2] + 1)
    stream = await one.call(one.engine.requests.open_dispatch("t", "s", held([another_time, *rows[1:]])))
    assert stream.held == 2


async def test_an_acknowledgement_of_what_is_not_in_the_backlog_is_ignored_and_counted(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(3), delay_ms=0)
    rows = await receiver.received(3)
    assert await receiver.acknowledge([rows[0], (9, 9, 9), (*rows[1][:2], rows[1][2] + 1)]) == 2
    assert await receiver.acknowledge(rows[:1]) == 1


async def test_a_backlog_larger_than_ready_is_read_on_in_order(machines: EngineFixture) -> None:
    settings = ("bucket.min_index_count_per_bucket=100", "bucket.rows_max=500", "delivery.ready_rows_max=100")
    one = await machines.served_by("one", *settings)
    await one.call(one.engine.requests.create_subscription("t", "s"))
    for ledger_id in range(10):
        await one.add("t", ledger_id, range(300), delay_ms=0)
    await asyncio.sleep(5)
    receiver = await one.receiver("t", permits=700)
    await receiver.received(700)
    for _ in range(4):
        await receiver.acknowledge(receiver.rows[-700:])
        receiver.stream.grant(700)
        await asyncio.sleep(5)
    await receiver.received(3000)
    assert len(receiver.positions) == 3000
    times = [row[2] for row in receiver.rows]
    assert times == sorted(times)


async def test_a_lost_shard_ends_its_streams(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    one.freeze()
    await machines.served_by("two")
    one.thaw()
    await one.until(lambda: receiver.ended is not None)
    assert isinstance(receiver.ended, TarryError)
    with pytest.raises(TarryError):
        await receiver.acknowledge([(1, 1, 1)])


# ---- several topics


async def test_many_topics_of_several_shards_recover_together(machines: EngineFixture) -> None:
    settings = ("daemon.shards=4", *SMALL)
    one = await machines.served_by("one", *settings)
    topics = [f"topic-{number}" for number in range(40)]
    await asyncio.gather(*(one.add(topic, 1, range(25)) for topic in topics))
    one.kill()
    two = await machines.served_by("one", *settings)
    receivers = [await two.receiver(topic) for topic in topics]
    for receiver in receivers:
        await receiver.received(25)
    page = await two.engine.requests.list_topics(10, "")
    assert len(page.topics) == 10
    assert page.next_after == page.topics[-1].topic


async def test_first_adds_of_a_topic_at_the_same_time_bear_it_once(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    outcomes = await asyncio.gather(*(one.add("t", 1, range(10)) for _ in range(5)))
    assert sorted(outcome.accepted for outcome in outcomes) == [0, 0, 0, 0, 10]
    assert len(machines.keys("/topics/")) == 1


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
async def test_a_crash_at_the_birth_of_a_topic_leaves_it_to_be_born(machines: EngineFixture, fault: Fault) -> None:
    one = await machines.served_by("one")
    one.script.plan("put_if_absent", fault, key_part="/topics/")
    held = one.pause("head", "/topics/")
    add = one.add("t", 1, range(10))
    await held.reached()
    one.kill()
    two = await machines.served_by("one")
    assert add.cancelled() or add.exception() is not None
    assert (await two.add("t", 1, range(10))).accepted == 10


async def test_a_clock_that_steps_back_fires_nothing_early_and_nothing_twice(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    await one.add("t", 1, [1], delay_ms=10_000)
    await one.add("t", 1, [2], delay_ms=1_000)
    await receiver.received(1)
    machines.step_ms -= 60_000
    await asyncio.sleep(30)
    assert len(receiver.rows) == 1
    machines.step_ms += 60_000
    await receiver.received(2, timeout_s=2)
    assert not receiver.early
