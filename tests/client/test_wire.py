"""The hand-written bytes are what the generated code reads and writes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf import message as protobuf_message
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from tarry import batch, columns, wire
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


def u64s(rows: int) -> st.SearchStrategy[list[int]]:
    return st.one_of(st.lists(u64, min_size=1, max_size=1), st.lists(u64, min_size=rows, max_size=rows))


def level_columns(rows: int) -> st.SearchStrategy[list[int]]:
    level = st.one_of(st.integers(-3, 70), st.integers(-(2**31), 2**31 - 1))
    return st.one_of(st.lists(level, min_size=1, max_size=1), st.lists(level, min_size=rows, max_size=rows))


@st.composite
def adds(draw: st.DrawFn, *, levels: bool = True) -> dict[str, Any]:
    rows = draw(st.integers(1, 300))
    given_columns: dict[str, Any] = {
        "ledger_id": draw(u64s(rows)),
        "entry_id": draw(st.lists(u64, min_size=rows, max_size=rows)),
        draw(st.sampled_from(["deliver_at_ms", "delay_ms"])): draw(u64s(rows)),
    }
    if levels and draw(st.booleans()):
        del given_columns["deliver_at_ms" if "deliver_at_ms" in given_columns else "delay_ms"]
        given_columns["delay_level"] = draw(level_columns(rows))
    if draw(st.booleans()):
        given_columns["key_hash"] = draw(st.lists(u32, min_size=rows, max_size=rows))
    return given_columns


@given(
    topic=st.text(min_size=1),
    given_columns=adds(),
    already_due=st.integers(0, 2),
    on_invalid=st.integers(0, 2),
    request_id=u64,
)
def test_an_add_is_the_message_that_the_generated_code_makes(
    topic: str, given_columns: dict[str, Any], already_due: int, on_invalid: int, request_id: int
) -> None:
    rows = columns.add_columns(**given_columns)
    encoded = wire.encode_stream_add(request_id, wire.encode_add(topic.encode(), rows, already_due, b"", on_invalid))
    expected = delayed_delivery_pb2.StreamAddMessagesRequest(
        request_id=request_id,
        add=delayed_delivery_pb2.AddMessagesRequest(
            topic=topic,
            already_due=already_due,  # type: ignore[arg-type]
            on_invalid=on_invalid,  # type: ignore[arg-type]
            **given_columns,
        ),
    )
    assert delayed_delivery_pb2.StreamAddMessagesRequest.FromString(encoded) == expected


@given(topic=st.text(min_size=1), subscription=st.text(), given_columns=adds())
def test_an_add_for_one_subscription_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, given_columns: dict[str, Any]
) -> None:
    rows = columns.add_columns(**given_columns)
    encoded = wire.encode_add(topic.encode(), rows, 1, subscription.encode())
    expected = delayed_delivery_pb2.AddMessagesRequest(
        topic=topic,
        already_due=delayed_delivery_pb2.ALREADY_DUE_DELIVER,
        subscription=subscription,
        **given_columns,
    )
    assert delayed_delivery_pb2.AddMessagesRequest.FromString(encoded) == expected


@given(topic=st.text(), subscription=st.text(), rows=st.lists(st.tuples(u64, u64), min_size=1, max_size=300))
def test_a_cancellation_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, rows: list[tuple[int, int]]
) -> None:
    ledger_id, entry_id = [row[0] for row in rows], [row[1] for row in rows]
    asked = columns.entry_columns(ledger_id, entry_id)
    expected = delayed_delivery_pb2.CancelMessagesRequest(
        topic=topic, subscription=subscription, ledger_id=ledger_id, entry_id=entry_id
    )
    encoded = wire.encode_cancel(topic.encode(), subscription.encode(), asked)
    assert delayed_delivery_pb2.CancelMessagesRequest.FromString(encoded) == expected


@given(topic=st.text(), subscription=st.text(), given_columns=adds(levels=False))
def test_a_reschedule_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, given_columns: dict[str, Any]
) -> None:
    rows = columns.add_columns(**given_columns)
    expected = delayed_delivery_pb2.RescheduleMessagesRequest(topic=topic, subscription=subscription, **given_columns)
    encoded = wire.encode_reschedule(topic.encode(), subscription.encode(), rows)
    assert delayed_delivery_pb2.RescheduleMessagesRequest.FromString(encoded) == expected


@given(request_id=u64, rows=st.lists(st.tuples(u64, u64, u64), min_size=1, max_size=300))
def test_an_acknowledgement_is_the_message_that_the_generated_code_makes(
    request_id: int, rows: list[tuple[int, int, int]]
) -> None:
    encoded = wire.encode_acknowledge(request_id, columns_of(rows))
    expected = dispatch_pb2.SubscribeRequest(
        acknowledge=dispatch_pb2.Acknowledge(
            request_id=request_id,
            ledger_id=[row[0] for row in rows],
            entry_id=[row[1] for row in rows],
            deliver_at_ms=[row[2] for row in rows],
        )
    )
    assert dispatch_pb2.SubscribeRequest.FromString(encoded) == expected


def columns_of(rows: list[tuple[int, int, int]]) -> columns.Positions:
    ledger_id, entry_id, deliver_at_ms = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    return columns.Positions(ledger_id, entry_id, deliver_at_ms)


@st.composite
def nacks(draw: st.DrawFn) -> tuple[columns.NackColumns, dict[str, Any]]:
    """What is sent, and the fields of its message."""
    rows = draw(st.integers(1, 300))
    positions: dict[str, Any] = {
        name: draw(st.lists(u64, min_size=rows, max_size=rows)) for name in ("ledger_id", "entry_id", "deliver_at_ms")
    }
    if draw(st.booleans()):
        positions["batch_index"] = draw(st.lists(u32, min_size=rows, max_size=rows))
    terms: dict[str, Any] = draw(
        st.one_of(
            st.just({}),
            st.builds(lambda column: {"delay_ms": column}, u64s(rows)),
            st.builds(lambda column: {"delay_level": column}, level_columns(rows)),
            st.builds(lambda text: {"reject": True, "reason": text}, st.text()),
        )
    )
    if draw(st.booleans()):
        terms["key_hash"] = draw(st.lists(u32, min_size=1, max_size=1))
    return columns.nack_columns(columns.positions(**positions), **terms), positions | terms


@given(topic=st.text(), subscription=st.text(), nack=nacks(), request_id=u64)
def test_a_negative_acknowledgement_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, nack: tuple[columns.NackColumns, dict[str, Any]], request_id: int
) -> None:
    given_columns, named = nack
    encoded = wire.encode_nack(request_id, given_columns)
    expected = dispatch_pb2.NegativeAcknowledge(request_id=request_id, **named)
    assert dispatch_pb2.SubscribeRequest.FromString(encoded) == dispatch_pb2.SubscribeRequest(
        negative_acknowledge=expected
    )
    request = wire.encode_nack_request(topic.encode(), subscription.encode(), given_columns)
    assert dispatch_pb2.NegativeAcknowledgeRequest.FromString(request) == dispatch_pb2.NegativeAcknowledgeRequest(
        topic=topic, subscription=subscription, **named
    )


@given(rows=st.lists(st.tuples(u64, u64, u64, u32), min_size=1, max_size=50), request_id=u64, lease_ms=u64)
def test_batch_indexes_go_with_every_request_that_names_positions(
    rows: list[tuple[int, int, int, int]], request_id: int, lease_ms: int
) -> None:
    ledger_id, entry_id, deliver_at_ms, batch_index = (list(column) for column in zip(*rows, strict=True))
    positions = columns.positions(ledger_id, entry_id, deliver_at_ms, batch_index)
    named: dict[str, Any] = {
        "ledger_id": ledger_id, "entry_id": entry_id, "deliver_at_ms": deliver_at_ms, "batch_index": batch_index
    }  # fmt: skip
    on_stream = dispatch_pb2.SubscribeRequest.FromString
    assert on_stream(wire.encode_acknowledge(request_id, positions)) == dispatch_pb2.SubscribeRequest(
        acknowledge=dispatch_pb2.Acknowledge(request_id=request_id, **named)
    )
    assert on_stream(wire.encode_extend(request_id, positions)) == dispatch_pb2.SubscribeRequest(
        extend=dispatch_pb2.Extend(request_id=request_id, **named)
    )
    opening = on_stream(*wire.encode_open(b"t", b"s", 1, positions)).open
    assert list(opening.held_batch_index) == batch_index
    acknowledge = wire.encode_acknowledge_request(b"t", b"s", positions)
    assert dispatch_pb2.AcknowledgeRequest.FromString(acknowledge) == dispatch_pb2.AcknowledgeRequest(
        topic="t", subscription="s", **named
    )
    extend = wire.encode_extend_lease(b"t", b"s", positions, lease_ms)
    assert dispatch_pb2.ExtendLeaseRequest.FromString(extend) == dispatch_pb2.ExtendLeaseRequest(
        topic="t", subscription="s", lease_ms=lease_ms, **named
    )


@given(topic=st.text(), subscription=st.text(), rows=st.lists(st.tuples(u64, u64, u64), max_size=300))
def test_an_open_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, rows: list[tuple[int, int, int]]
) -> None:
    held = columns_of(rows) if rows else batch.concatenate([])
    kind = dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
    expected = dispatch_pb2.SubscribeRequest(
        open=dispatch_pb2.Open(
            topic=topic,
            subscription=subscription,
            type=kind,
            held_ledger_id=[row[0] for row in rows],
            held_entry_id=[row[1] for row in rows],
            held_deliver_at_ms=[row[2] for row in rows],
        )
    )
    (encoded,) = wire.encode_open(topic.encode(), subscription.encode(), kind, held)
    assert dispatch_pb2.SubscribeRequest.FromString(encoded) == expected


def test_an_open_with_more_positions_than_a_request_holds_is_several_that_continue_each_other() -> None:
    rows = [(7, entry, 1_000 + entry) for entry in range(1_000)]
    held = columns_of(rows)
    consumers = [dispatch_pb2.Consumer(consumer_id=1, name="x" * 2_000)]
    by_key = wire.OpenConsumers(consumers, np.ones(1_000, np.uint32), np.arange(1_000, dtype=np.uint32))
    kind = dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED
    (whole,) = wire.encode_open(b"t", b"s", kind, held, by_key)
    several = wire.encode_open(b"t", b"s", kind, held, by_key, bytes_max=12_000)
    assert len(several) > 3
    assert all(len(each) <= 12_000 for each in several)
    parts = [dispatch_pb2.SubscribeRequest.FromString(each).open for each in several]
    assert [part.more_held for part in parts] == [True] * (len(parts) - 1) + [False]
    joined = dispatch_pb2.Open()
    for part in parts:
        joined.MergeFrom(part)
    joined.more_held = False
    assert joined == dispatch_pb2.SubscribeRequest.FromString(whole).open


@given(permits=u32, consumer_id=u32)
def test_a_flow_is_the_message_that_the_generated_code_makes(permits: int, consumer_id: int) -> None:
    expected = dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=permits, consumer_id=consumer_id))
    assert dispatch_pb2.SubscribeRequest.FromString(wire.encode_flow(permits, consumer_id)) == expected


@given(
    rows=st.lists(st.tuples(u64, u64, u64, u32, u32), max_size=50),
    names=st.lists(st.text(), max_size=5),
    has_hashes=st.booleans(),
)
def test_an_open_for_consumers_is_the_message_that_the_generated_code_makes(
    rows: list[tuple[int, int, int, int, int]], names: list[str], has_hashes: bool
) -> None:
    held = columns_of([row[:3] for row in rows]) if rows else batch.concatenate([])
    consumers = [
        dispatch_pb2.Consumer(consumer_id=number, name=name, permits=number) for number, name in enumerate(names)
    ]
    consumer_id, key_hash = [row[3] for row in rows], [row[4] for row in rows]
    by_key = wire.OpenConsumers(
        consumers, np.array(consumer_id, np.uint32), np.array(key_hash, np.uint32) if has_hashes else None
    )
    kind = dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED
    expected = dispatch_pb2.SubscribeRequest(
        open=dispatch_pb2.Open(
            topic="t",
            subscription="s",
            type=kind,
            held_ledger_id=[row[0] for row in rows],
            held_entry_id=[row[1] for row in rows],
            held_deliver_at_ms=[row[2] for row in rows],
            consumers=consumers,
            held_consumer_id=consumer_id,
            held_key_hash=key_hash if has_hashes else [],
        )
    )
    (encoded,) = wire.encode_open(b"t", b"s", kind, held, by_key)
    assert dispatch_pb2.SubscribeRequest.FromString(encoded) == expected


@given(request_id=u64, consumer_id=u32, name=st.text(), place=st.tuples(u64, u64))
def test_what_is_said_of_consumers_is_the_message_that_the_generated_code_makes(
    request_id: int, consumer_id: int, name: str, place: tuple[int, int]
) -> None:
    read = dispatch_pb2.SubscribeRequest.FromString
    consumer = dispatch_pb2.Consumer(consumer_id=consumer_id, name=name)
    assert read(wire.encode_add_consumer(request_id, consumer)) == dispatch_pb2.SubscribeRequest(
        add_consumer=dispatch_pb2.AddConsumer(request_id=request_id, consumer=consumer)
    )
    assert read(wire.encode_remove_consumer(request_id, consumer_id)) == dispatch_pb2.SubscribeRequest(
        remove_consumer=dispatch_pb2.RemoveConsumer(request_id=request_id, consumer_id=consumer_id)
    )
    assert read(wire.encode_mark_delete(request_id, place)) == dispatch_pb2.SubscribeRequest(
        mark_delete=dispatch_pb2.MarkDelete(request_id=request_id, ledger_id=place[0], entry_id=place[1])
    )


@given(
    request_id=u64,
    ledger_id=u64,
    entry_id=st.lists(u64, min_size=1, max_size=300),
    key_hash=st.one_of(st.none(), st.lists(u32, min_size=1, max_size=1)),
)
def test_a_plan_is_the_message_that_the_generated_code_makes(
    request_id: int, ledger_id: int, entry_id: list[int], key_hash: list[int] | None
) -> None:
    asked = columns.plan_columns(ledger_id, entry_id, key_hash)
    expected = dispatch_pb2.PlanDispatch(
        request_id=request_id, ledger_id=[ledger_id], entry_id=entry_id, key_hash=key_hash
    )
    assert dispatch_pb2.SubscribeRequest.FromString(
        wire.encode_plan(request_id, asked)
    ) == dispatch_pb2.SubscribeRequest(plan_dispatch=expected)


@given(
    topic=st.text(),
    subscription=st.text(),
    rows=st.lists(st.tuples(u64, u64, u64), min_size=1, max_size=300),
    lease_ms=u64,
)
def test_what_is_said_of_leases_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, rows: list[tuple[int, int, int]], lease_ms: int
) -> None:
    named: dict[str, Any] = {
        "topic": topic,
        "subscription": subscription,
        "ledger_id": [row[0] for row in rows],
        "entry_id": [row[1] for row in rows],
        "deliver_at_ms": [row[2] for row in rows],
    }
    names = topic.encode(), subscription.encode()
    acknowledge = wire.encode_acknowledge_request(*names, columns_of(rows))
    assert dispatch_pb2.AcknowledgeRequest.FromString(acknowledge) == dispatch_pb2.AcknowledgeRequest(**named)
    extend = wire.encode_extend_lease(*names, columns_of(rows), lease_ms)
    assert dispatch_pb2.ExtendLeaseRequest.FromString(extend) == dispatch_pb2.ExtendLeaseRequest(
        **named, lease_ms=lease_ms
    )


@given(
    topic=st.text(),
    subscription=st.text(),
    rows=st.lists(st.tuples(u64, u64, u64), min_size=1, max_size=300),
    with_last=st.booleans(),
)
def test_what_is_asked_of_contains_is_the_message_that_the_generated_code_makes(
    topic: str, subscription: str, rows: list[tuple[int, int, int]], with_last: bool
) -> None:
    asked = columns.EntryColumns(*columns_of(rows)[:2], columns_of(rows)[2] if with_last else None)
    expected = delayed_delivery_pb2.ContainsMessagesRequest(
        topic=topic,
        subscription=subscription,
        ledger_id=[row[0] for row in rows],
        entry_id=[row[1] for row in rows],
        last_entry_id=[row[2] for row in rows] if with_last else [],
    )
    encoded = wire.encode_contains(topic.encode(), subscription.encode(), asked)
    assert delayed_delivery_pb2.ContainsMessagesRequest.FromString(encoded) == expected


@given(values=st.lists(u64, max_size=300), counts=st.lists(u32, max_size=300))
def test_a_received_column_is_an_array_of_its_numbers(values: list[int], counts: list[int]) -> None:
    message = dispatch_pb2.Messages(ledger_id=values, key_hash=counts)
    assert wire.decode_u64(message.ledger_id).tolist() == values
    assert wire.decode_u32(message.key_hash).tolist() == counts
    assert wire.decode_u64(message.ledger_id).flags.writeable


@given(
    epoch=u64,
    rows=st.lists(st.tuples(u64, u64, u64), max_size=300),
    others=st.lists(st.one_of(st.just([]), st.lists(u32, min_size=1, max_size=300)), min_size=4, max_size=4),
)
def test_due_positions_are_what_the_generated_code_reads(
    epoch: int, rows: list[tuple[int, int, int]], others: list[list[int]]
) -> None:
    messages = dispatch_pb2.Messages(
        epoch=epoch,
        ledger_id=[row[0] for row in rows],
        entry_id=[row[1] for row in rows],
        deliver_at_ms=[row[2] for row in rows],
        key_hash=others[0],
        redelivery_count=others[1],
        batch_index=others[2],
        consumer_id=others[3],
    )
    decoded = wire.decode_messages(dispatch_pb2.SubscribeResponse(messages=messages).SerializeToString())
    assert decoded is not None
    assert_same(decoded, messages)
    assert decoded.entry_id.flags.writeable


def assert_same(decoded: wire.MessagesColumns, messages: dispatch_pb2.Messages) -> None:
    assert decoded.epoch == messages.epoch
    assert decoded.ledger_id.tolist() == list(messages.ledger_id)
    assert decoded.entry_id.tolist() == list(messages.entry_id)
    assert decoded.deliver_at_ms.tolist() == list(messages.deliver_at_ms)
    for name in ("key_hash", "redelivery_count", "batch_index", "consumer_id"):
        column = getattr(decoded, name)
        assert ([] if column is None else column.tolist()) == list(getattr(messages, name))


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda data: bytes((0x12, len(data))) + data)))
def test_bytes_that_are_read_at_all_are_read_as_the_generated_code_does(data: bytes) -> None:
    decoded = wire.decode_messages(data)
    if decoded is not None:
        assert_same(decoded, dispatch_pb2.SubscribeResponse.FromString(data).messages)


def test_other_answers_and_columns_in_pieces_are_left_to_the_generated_code() -> None:
    for response in (
        dispatch_pb2.SubscribeResponse(done=dispatch_pb2.Done(request_id=1)),
        dispatch_pb2.SubscribeResponse(opened=dispatch_pb2.Opened(epoch=1)),
        dispatch_pb2.SubscribeResponse(),
    ):
        assert wire.decode_messages(response.SerializeToString()) is None
    epoch = bytes((0x08, *(0xFF,) * 10, 0x01))
    assert wire.decode_messages(bytes((0x12, len(epoch))) + epoch) is None
    piece = dispatch_pb2.Messages(ledger_id=[1], entry_id=[2], deliver_at_ms=[3]).SerializeToString()
    assert wire.decode_messages(bytes((0x12, 2 * len(piece))) + piece + piece) is None


def test_big_endian_columns_are_sent_little_endian() -> None:
    rows = columns.add_columns(np.array([1], dtype=">u8"), np.array([2, 3], dtype=">i4"), delay_ms=4)
    message = delayed_delivery_pb2.AddMessagesRequest.FromString(wire.encode_add(b"t", rows, 0))
    assert (list(message.ledger_id), list(message.entry_id), list(message.delay_ms)) == ([1], [2, 3], [4])


@pytest.mark.parametrize("lane", [1, 127, 128, 2**32 - 1])
def test_requests_of_lanes_are_the_messages_that_the_generated_code_makes_and_several_are_one(lane: int) -> None:
    flow = wire.encode_flow(7)
    joined = wire.encode_lane(lane, flow) + wire.encode_lane_close(lane)
    request = dispatch_pb2.SubscribeRequest.FromString(flow)
    assert dispatch_pb2.SubscribeManyRequest.FromString(joined) == dispatch_pb2.SubscribeManyRequest(
        requests=[dispatch_pb2.LaneRequest(lane=lane, request=request), dispatch_pb2.LaneRequest(lane=lane, close=True)]
    )


def test_answers_of_lanes_are_read_as_the_generated_code_reads_them() -> None:
    done = dispatch_pb2.SubscribeResponse(done=dispatch_pb2.Done(request_id=3))
    plain = [dispatch_pb2.LaneResponse(lane=lane, response=done) for lane in (1, 300)]
    refusal = status_pb2.Status(code=5, message="no such topic")
    ended = dispatch_pb2.LaneResponse(lane=2, ended=refusal)
    expected = [wire.LaneResponse(lane, done.SerializeToString(), None) for lane in (1, 300)]
    assert wire.decode_lanes(dispatch_pb2.SubscribeManyResponse(responses=plain).SerializeToString()) == expected
    with_the_end = dispatch_pb2.SubscribeManyResponse(responses=[*plain, ended]).SerializeToString()
    assert wire.decode_lanes(with_the_end) == [*expected, wire.LaneResponse(2, b"", refusal)]
    assert wire.decode_lanes(b"") == []
    # A field of a newer daemon, and one that is there twice.
    newer = plain[0].SerializeToString() + b"\x78\x01"
    assert wire.decode_lanes(b"\x0a" + bytes([len(newer)]) + newer) == expected[:1]
    for cut in range(1, len(with_the_end)):
        with contextlib.suppress(protobuf_message.DecodeError):
            wire.decode_lanes(with_the_end[:cut])
