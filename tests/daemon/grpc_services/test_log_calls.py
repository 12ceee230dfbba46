"""What a log asks: what is in the index, and to drop what it has trimmed."""

from __future__ import annotations

import pytest

from daemon.topic import served_topic
from tarry.v1 import delayed_delivery_pb2 as pb
from tarry.v1 import dispatch_pb2
from tests.daemon.grpc_services._support.shown_rows import scheduled
from tests.daemon.grpc_services.conftest import Edge

ADD = "DelayedDelivery/AddMessages"
CONTAINS = "DelayedDelivery/ContainsMessages"
TRIM = "DelayedDelivery/TrimMessages"
CLEAR = "DelayedDelivery/ClearMessages"
FAR_MS = 2_000_000_000_000
U64_MAX = (1 << 64) - 1


async def add(edge: Edge, ledger_id: int, *entry_ids: int, due: int = FAR_MS) -> None:
    request = pb.AddMessagesRequest(topic="t", ledger_id=[ledger_id], entry_id=entry_ids, deliver_at_ms=[due])
    await edge.caller.unary(ADD, request)


async def subscribe(edge: Edge, *names: str) -> None:
    for name in names:
        request = dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription=name)
        await edge.caller.unary("Dispatch/CreateSubscription", request)


async def contained(edge: Edge, **asked: object) -> pb.ContainsMessagesResponse:
    answer: pb.ContainsMessagesResponse = await edge.caller.unary(
        CONTAINS,
        pb.ContainsMessagesRequest(**{"topic": "t", **asked}),  # type: ignore[arg-type]
    )
    return answer


def ranges(column: pb.EntryRanges) -> list[tuple[int, int, int]]:
    return list(zip(column.ledger_id, column.first_entry_id, column.last_entry_id, strict=True))


async def test_of_entries_0_to_9_with_1_to_8_delayed_a_cursor_reads_0_and_9(edge: Edge) -> None:
    await add(edge, 5, *range(1, 9))
    answer = await contained(edge, ledger_id=[5], entry_id=[0], last_entry_id=[9])
    assert (ranges(answer.pending), ranges(answer.due)) == ([(5, 1, 8)], [])
    assert not answer.HasField("continuation")


async def test_what_is_due_is_told_apart_from_what_is_not(edge: Edge) -> None:
    await subscribe(edge, "s")
    await add(edge, 5, 1, 2, 7)
    await add(edge, 5, 3, due=1)
    answer = await contained(edge, ledger_id=[5], entry_id=[0], last_entry_id=[9])
    assert (ranges(answer.pending), ranges(answer.due)) == ([(5, 1, 2), (5, 7, 7)], [(5, 3, 3)])


async def test_positions_are_answered_in_the_order_of_the_request(edge: Edge) -> None:
    await add(edge, 5, 1, 2)
    await add(edge, 6, 0, U64_MAX)
    answer = await contained(edge, ledger_id=[6, 5, 5, 6, 9], entry_id=[U64_MAX, 2, 1, 0, 1])
    assert ranges(answer.pending) == [(6, U64_MAX, U64_MAX), (5, 2, 2), (5, 1, 1), (6, 0, 0)]


async def test_an_answer_that_is_too_long_says_where_to_go_on(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_topic, "CONTAINED_RANGES_MAX", 1_000)
    for first in range(0, 2_000, 1000):
        await add(edge, 5, *range(2 * first, 2 * first + 2000, 2))
    answer = await contained(edge, ledger_id=[9, 5], entry_id=[0, 0], last_entry_id=[5, U64_MAX])
    assert len(answer.pending.ledger_id) == 1_000
    place = answer.continuation
    assert (place.index, place.entry_id) == (1, 2_000)
    rest = await contained(edge, ledger_id=[5], entry_id=[place.entry_id], last_entry_id=[U64_MAX])
    assert len(rest.pending.ledger_id) == 1_000
    assert not rest.HasField("continuation")


async def test_a_topic_that_does_not_exist_contains_nothing(edge: Edge) -> None:
    answer = await contained(edge, topic="nowhere", ledger_id=[1], entry_id=[1])
    assert (ranges(answer.pending), ranges(answer.due)) == ([], [])


async def test_a_subscription_contains_what_it_is_owed(edge: Edge) -> None:
    await subscribe(edge, "first", "second")
    await add(edge, 5, 1, 2)
    trim = pb.TrimMessagesRequest(topic="t", subscription="first", ledger_id=[5], entry_id=[1])
    assert (await edge.caller.unary(TRIM, trim)).trimmed == 1
    asked = {"ledger_id": [5], "entry_id": [0], "last_entry_id": [9]}
    assert ranges((await contained(edge, subscription="first", **asked)).pending) == [(5, 2, 2)]
    assert ranges((await contained(edge, subscription="second", **asked)).pending) == [(5, 1, 2)]
    assert ranges((await contained(edge, **asked)).pending) == [(5, 1, 2)]


async def test_a_trim_drops_each_ledger_up_to_its_entry(edge: Edge) -> None:
    await add(edge, 5, 1, 2, 3)
    await add(edge, 6, 1, U64_MAX)
    await add(edge, 7, 1)
    trim = pb.TrimMessagesRequest(topic="t", ledger_id=[5, 6], entry_id=[2, U64_MAX])
    assert (await edge.caller.unary(TRIM, trim)).trimmed == 4
    assert (await scheduled(edge)).keys() == {(5, 3), (7, 1)}


@pytest.mark.parametrize(("all_lower", "left"), [(True, {(6, 2), (7, 0)}), (False, {(5, 9), (6, 2), (7, 0)})])
async def test_lower_ledgers_are_trimmed_when_told(edge: Edge, all_lower: bool, left: set[tuple[int, int]]) -> None:
    for ledger_id, entry_id in ((5, 9), (6, 1), (6, 2), (7, 0)):
        await add(edge, ledger_id, entry_id)
    trim = pb.TrimMessagesRequest(topic="t", ledger_id=[6], entry_id=[1], all_lower_ledgers=all_lower)
    assert (await edge.caller.unary(TRIM, trim)).trimmed == 4 - len(left)
    assert (await scheduled(edge)).keys() == left


async def test_a_clear_drops_everything_of_a_topic_or_what_one_subscription_is_owed(edge: Edge) -> None:
    await subscribe(edge, "first", "second")
    await add(edge, 5, 1, 2)
    assert (await edge.caller.unary(CLEAR, pb.ClearMessagesRequest(topic="t", subscription="first"))).cleared == 2
    assert (await edge.caller.unary(CLEAR, pb.ClearMessagesRequest(topic="t", subscription="first"))).cleared == 0
    assert (await edge.caller.unary(CLEAR, pb.ClearMessagesRequest(topic="t"))).cleared == 2
    assert await scheduled(edge) == {}
