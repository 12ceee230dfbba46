"""Deletions of ledgers: recording them, lists and counts, dead letters, quotas."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from daemon.core.deletions import deletion_checks
from daemon.errors import InvalidArgument, OutcomeUnknown, QuotaExceeded, Unavailable
from daemon.ledger_deletion.deletion_values import DeletionFilter, DeletionPlace, Refusal, RefusedDelete
from daemon.ledger_stores.ledger_store import Answer
from storage_backends.formats.deletion_format import DeletionOutcome, DeletionRecord, LedgerComponent, LedgerType
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon.ledger_deletion._support.deleting import (
    ALL,
    DEAD,
    PENDING,
    TOPIC,
    ScriptedLedgers,
    calls_of,
    failed,
    forget,
    ids,
    ledger,
    ledgers,
    listed,
    offloaded,
    outcomes,
    over,
    record,
    stats,
    use,
)

IN_USE, DELETED = DeletionOutcome.IN_USE, DeletionOutcome.DELETED


# ---- recording


async def test_what_is_recorded_is_deleted_and_its_outcome_is_kept(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    recorded = await record(one, 1, 2, 3)
    assert (recorded.recorded, recorded.already_recorded, recorded.refused) == (3, (), ())
    await over(one)
    assert stores.deleted == [1, 2, 3]
    assert await outcomes(one) == {1: DELETED, 2: DELETED, 3: DELETED}
    assert await listed(one, PENDING) == []


async def test_a_record_is_answered_and_known_when_it_is_durable(machines: EngineFixture) -> None:
    ScriptedLedgers(machines)
    one = await machines.served_by()
    held = one.pause("put_if_absent", JOURNAL)
    recording = record(one, 1)
    await held.reached()
    await asyncio.sleep(1)
    assert not recording.done()
    assert (await stats(one)).in_flight == 0
    held.release()
    assert (await recording).recorded == 1
    assert one.shards[0].deletions.state.counts.in_flight == 1


async def test_a_record_whose_slot_is_uncertain_has_an_unknown_outcome_and_counts_later(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = one.pause("put_if_absent", JOURNAL)
    with pytest.raises(OutcomeUnknown):
        await record(one, 1)
    with pytest.raises(Unavailable, match="has not answered"):
        await record(one, 2)
    held.release()
    await one.until(lambda: stores.deleted == [1])


async def test_what_is_recorded_again_while_it_is_pending_or_dead_is_recorded_once(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan_always(1, failed())
    one = await machines.served_by("one", "deletion.max_retry_delete_count=0")
    assert (await record(one, 1, 2, 1)).already_recorded == (2,)
    await over(one)
    again = await record(one, 5, 1)
    assert (again.recorded, again.already_recorded) == (2, (1,))
    assert ids(await listed(one, DEAD)) == [1]
    await over(one)
    assert (await record(one, 2)).already_recorded == ()


async def test_each_record_that_is_malformed_is_refused_by_its_place(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    nameless = dataclasses.replace(ledger(2), component=LedgerComponent.MANAGED_CURSOR)
    made = [ledger(1), nameless, ledger(3), ledger(1)]
    recorded = await one.call(
        calls_of(one).record_pending_deletes(TOPIC, made, problems={1: "component is 9", 3: "ledger_type is 0"})
    )
    assert recorded.recorded == 3
    assert recorded.already_recorded == (5,)
    assert [(each.index, each.reason) for each in recorded.refused] == [
        (place, Refusal.MALFORMED) for place in (1, 2, 3)
    ]
    assert "cursor_name" in recorded.refused[1].text
    await over(one)
    assert stores.deleted == [1, 3]


async def test_a_request_has_a_topic_and_a_bounded_number_of_records(machines: EngineFixture) -> None:
    one = await machines.served_by()
    with pytest.raises(InvalidArgument, match="deletes has 0 records"):
        await record(one)
    with pytest.raises(InvalidArgument, match=f"1 to {deletion_checks.DELETES_MAX}"):
        await record(one, *range(deletion_checks.DELETES_MAX + 1))
    for topic in ("", "x" * 1025, "t/n/persistent/x"):
        with pytest.raises(InvalidArgument, match="topic"):
            await record(one, 1, topic=topic)
        with pytest.raises(InvalidArgument, match="topic"):
            await use(one, ledgers(1), topic=topic)
    assert (await stats(one)).in_flight == 0


async def test_where_two_phase_deletion_is_off_each_record_is_refused_and_what_is_recorded_goes_on(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by()
    await record(one, 1, topic="t")
    off = TopicPolicy(two_phase_deletion_enabled=False)
    await one.call(one.engine.requests.set_topic_policy("t", off))
    refused = await record(one, 2, topic="t")
    assert refused.recorded == 0
    assert refused.refused == (RefusedDelete(0, Refusal.DISABLED, refused.refused[0].text),)
    await over(one, timeout_s=700)
    assert stores.deleted == [1]
    assert (await record(one, 3, topic="other")).recorded == 1


async def test_a_topic_without_a_policy_has_the_daemon_s_setting(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "deletion.two_phase_deletion_enabled=false")
    assert (await record(one, 1)).refused[0].reason is Refusal.DISABLED
    on = TopicPolicy(two_phase_deletion_enabled=True)
    await one.call(one.engine.requests.set_topic_policy("t", on))
    assert (await record(one, 1, topic="t")).recorded == 1


async def test_deleting_a_topic_of_positions_leaves_its_deletions(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by()
    await one.add("t", 1, [1])
    await record(one, 1, topic="t")
    await one.call(one.engine.requests.delete_topic("t"))
    await over(one, timeout_s=700)
    assert stores.deleted == [1]


# ---- lists and counts


async def test_lists_go_on_from_page_to_page_over_all_shards_and_are_filtered(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "daemon.shards=4", "deletion.max_retry_delete_count=0")
    for number in range(30):
        stores.plan_always(number, failed())
        await record(one, number, topic=f"t{number % 7}")
    cursor = ledger(40, LedgerComponent.MANAGED_CURSOR)
    stores.plan_always(40, failed())
    await record(one, cursor, topic="t0")
    await over(one)
    for page_size in (1, 4, 0):
        found = await listed(one, DEAD, page_size=page_size)
        assert sorted(ids(found)) == [*range(30), 40]
    assert ids(await listed(one, DEAD, DeletionFilter(topic="t1"))) == [1, 8, 15, 22, 29]
    assert ids(await listed(one, DEAD, DeletionFilter(component=LedgerComponent.MANAGED_CURSOR))) == [40]
    assert ids(await listed(one, DEAD, DeletionFilter(ledger_id=5))) == [5]
    assert await listed(one, DEAD, DeletionFilter(ledger_type=LedgerType.OFFLOADED_LEDGER)) == []
    page = await one.call(calls_of(one).list_deletes(DEAD, ALL, 0, None))
    places = frozenset(DeletionPlace(each.shard, each.deletion.deletion_id) for each in page.deletions[:3])
    named = await listed(one, DEAD, DeletionFilter(deletions=places))
    assert ids(named) == [each.deletion.pending_delete.ledger_id for each in page.deletions[:3]]
    assert await listed(one, DEAD, DeletionFilter(deletions=frozenset({DeletionPlace(99, 1)}))) == []


async def test_counts_tell_what_is_in_flight_of_what_and_since_when(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.max_retry_delete_count=1", "deletion.parallelism=1")
    held = stores.hold_before_guard(one, 1)
    oldest_ms = one.now_ms()
    await record(one, 1)
    await held.reached()
    await asyncio.sleep(1)
    await record(one, ledger(2, LedgerComponent.SCHEMA_STORAGE), offloaded(3), topic="other")
    await use(one, ledgers(7, 8))
    found = await stats(one)
    assert (found.in_flight, found.given_up, found.in_use) == (3, 0, 2)
    assert found.begun >= 1
    assert oldest_ms <= found.oldest_ms < oldest_ms + 500
    counted = {(each.component, each.ledger_type): each.in_flight for each in found.counts}
    assert counted == {
        (LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER): 1,
        (LedgerComponent.MANAGED_LEDGER, LedgerType.OFFLOADED_LEDGER): 1,
        (LedgerComponent.SCHEMA_STORAGE, LedgerType.LEDGER): 1,
    }
    of_topic = await stats(one, "other")
    assert (of_topic.in_flight, of_topic.in_use) == (2, 0)
    assert (await stats(one, TOPIC)).in_use == 2
    assert (await stats(one, "nobody's")).in_flight == 0
    held.release()
    await over(one)
    assert (await stats(one)).oldest_ms == 0


async def test_behind_the_last_id_there_is_there_is_no_page(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan_always(1, failed())
    one = await machines.served_by()
    await record(one, 1)
    page = await one.call(calls_of(one).list_deletes(PENDING, ALL, 10, DeletionPlace(0, (1 << 64) - 1)))
    assert (page.deletions, page.next_after) == ((), None)


# ---- dead letters


async def test_dead_letters_are_retried_from_the_start_or_purged(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.max_retry_delete_count=0")
    for number in (1, 2, 3):
        stores.plan(number, failed("unknown owner"))
    await record(one, 1, 2, 3)
    await over(one)
    dead = await listed(one, DEAD)
    assert [(each.failures, each.text) for each in dead] == [(1, "unknown owner")] * 3
    assert await one.call(calls_of(one).retry_dead(DeletionFilter(ledger_id=2), all=False)) == 1
    await over(one)
    assert stores.deleted == [2]
    assert await one.call(calls_of(one).purge_dead(DeletionFilter(ledger_id=1), all=False)) == 1
    assert ids(await listed(one, DEAD)) == [3]
    assert await one.call(calls_of(one).retry_dead(ALL, all=True)) == 1
    await over(one)
    assert await one.call(calls_of(one).retry_dead(ALL, all=True)) == 0
    for call in (calls_of(one).retry_dead, calls_of(one).purge_dead):
        with pytest.raises(InvalidArgument, match="filter is empty"):
            await one.call(call(ALL, all=False))


async def test_many_dead_letters_are_retried_and_purged_in_portions(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.max_retry_delete_count=0", "deletion.parallelism=64")
    for number in range(1_300):
        stores.plan(number, failed())
    for first in (0, 650):
        await record(one, *range(first, first + 650))
    await over(one)
    slots = one.shards[0].applied_slot
    assert await one.call(calls_of(one).purge_dead(DeletionFilter(ledger_id=5), all=False)) == 1
    assert await one.call(calls_of(one).retry_dead(ALL, all=True)) == 1_299
    assert one.shards[0].applied_slot >= slots + 4
    await over(one)
    assert len(stores.deleted) == 1_299


# ---- quotas


async def test_too_many_pending_deletions_and_dead_letters_are_refused(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by(
        "one", "deletion.pending_max=3", "deletion.max_retry_delete_count=0", "daemon.shards=4"
    )
    stores.plan(1, failed())
    held = stores.hold_before_guard(one, 2)
    await record(one, 1, topic="a")
    await record(one, 2, topic="b")
    await held.reached()
    with pytest.raises(QuotaExceeded, match="pending_max is 3") as refused:
        await record(one, 3, 4, topic="c")
    assert refused.value.retry_after_ms is not None
    assert (await record(one, 3, topic="c")).recorded == 1
    held.release()
    await over(one)
    assert (await record(one, 5, 6, topic="c")).recorded == 2
    with pytest.raises(QuotaExceeded) as refused:
        await record(one, 10, 11, 12, 13, topic="c")
    assert refused.value.retry_after_ms is None


async def test_deletions_that_wait_for_their_ledgers_to_be_free_count_too(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.pending_max=2")
    await use(one, ledgers(1, 2))
    await record(one, 1, 2)
    await over(one)
    with pytest.raises(QuotaExceeded, match="pending_max is 2"):
        await record(one, 3)
    await forget(one, ledgers(1, 2))
    await one.until(lambda: len(stores.deleted) == 2)
    assert (await record(one, 3)).recorded == 1


async def test_requests_that_come_together_share_the_quota(machines: EngineFixture) -> None:
    ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.pending_max=100")
    held = one.pause("put_if_absent", JOURNAL)
    requests = [record(one, *range(10 * number, 10 * number + 10)) for number in range(15)]
    await held.reached()
    held.release()
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert sum(isinstance(answer, QuotaExceeded) for answer in answers) == 5


async def test_too_many_ledgers_in_use_are_refused_but_not_those_that_take_the_place_of_others(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", "deletion.in_use_max=10")
    await use(one, ledgers(*range(8)))
    with pytest.raises(QuotaExceeded, match="in_use_max is 10"):
        await use(one, ledgers(10, 11, 12))
    await use(one, ledgers(*range(20, 30)), replace=True)
    assert (await stats(one)).in_use == 10
    assert await forget(one, ledgers(20)) == 1
    with pytest.raises(InvalidArgument, match="ledger_id has 0 rows"):
        await forget(one, ledgers())


# ---- what they cost


async def test_no_slot_holds_more_than_the_loop_applies_in_a_moment(machines: EngineFixture) -> None:
    ScriptedLedgers(machines)
    one = await machines.served_by()
    state = one.shards[0].deletions.state
    apply, applied = state.apply, []

    def counted(entry: DeletionRecord) -> object:
        applied.append((one.shards[0].applied_slot, entry))
        return apply(entry)

    state.apply = counted  # type: ignore[method-assign, assignment]
    held = one.pause("put_if_absent", JOURNAL)
    requests = [record(one, *range(1_000 * n, 1_000 * n + 1_000)) for n in range(3)]
    requests += [record(one, 5_000 + n) for n in range(5)]
    await held.reached()
    held.release()
    await asyncio.gather(*requests)
    by_slot: dict[int, int] = {}
    for slot, entry in applied:
        by_slot[slot] = by_slot.get(slot, 0) + len(getattr(entry, "deletes", ()))
    assert max(by_slot.values()) <= 1_000
    assert sum(by_slot.values()) == 3_005


# ---- metrics


async def test_each_of_the_proposal_s_metrics_counts_what_it_says(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.max_retry_delete_count=1", "deletion.jitter=0")
    plain, in_objects = {"ledger_type": "ledger"}, {"ledger_type": "offloaded_ledger"}
    value = one.metrics.registry.get_sample_value

    def counted(name: str, labels: dict[str, str] | None = None) -> float | None:
        return value(f"tarry_deletions_{name}", labels or {})

    stores.plan(1, failed(), failed())
    stores.plan(12, failed())
    stores.plan(3, Answer(DeletionOutcome.METADATA_MISMATCH))
    stores.plan(4, Answer(DeletionOutcome.ALREADY_GONE))
    stores.plan(5, Answer(DeletionOutcome.MALFORMED))
    await use(one, ledgers(6))
    await record(one, *range(1, 7), 1)
    cursor = ledger(7, LedgerComponent.MANAGED_CURSOR)
    held = stores.hold_before_guard(one, 7)
    await record(one, offloaded(11), offloaded(12), cursor)
    await held.reached()
    await asyncio.sleep(100)
    assert counted("recorded_total", plain) == 7
    assert counted("recorded_total", in_objects) == 2
    assert counted("in_flight", {"component": "managed_ledger"}) == 2
    assert counted("in_flight", {"component": "managed_cursor"}) == 1
    assert 99 <= (counted("oldest_seconds") or 0) < 103
    held.release()
    await over(one, timeout_s=2_000)
    await asyncio.sleep(2)
    assert counted("attempted_total") == 10
    assert counted("deleted_total", plain) == 2
    assert counted("deleted_total", in_objects) == 2
    assert counted("failed_total", plain) == 2
    assert counted("failed_total", in_objects) == 1
    expected = {"deleted": 4, "in_use": 1, "metadata_mismatch": 1, "already_gone": 1, "malformed": 1}
    assert {outcome: counted("ended_total", {"outcome": outcome}) for outcome in expected} == expected
    assert counted("given_up_total") == 1
    assert (counted("dead"), counted("held")) == (1, 1)
    assert counted("in_flight", {"component": "managed_ledger"}) == 0
    assert counted("oldest_seconds") == 0
    assert value("tarry_deletion_ledgers_in_use", {}) == 1


async def test_nothing_counts_twice_when_a_daemon_takes_over(machines: EngineFixture) -> None:
    ScriptedLedgers(machines)
    one = await machines.served_by()
    await record(one, 1, 2)
    await over(one)
    one.kill()
    two = await machines.served_by()
    value = two.metrics.registry.get_sample_value
    assert value("tarry_deletions_recorded_total", {"ledger_type": "ledger"}) == 0
    assert value("tarry_deletions_ended_total", {"outcome": "deleted"}) == 0


async def test_a_lost_answer_of_a_slot_loses_no_deletion(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    for _ in range(6):
        one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    await record(one, 1, 2)
    await over(one)
    assert stores.deleted == [1, 2]
    assert await outcomes(one) == {1: DELETED, 2: DELETED}
