"""Requests are read as the generated code reads them, plain ones without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from google.protobuf import message
from hypothesis import given
from hypothesis import strategies as st

from daemon import call_values, errors
from daemon.core.decisions.add_decisions import AddBatch, AddRow
from daemon.core.decisions.claims import HeldPositions
from daemon.grpc_services import parsing, row_requests
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

U64 = st.integers(0, (1 << 64) - 1)
COLUMN = st.lists(U64, max_size=4)
NO_LEVELS: list[int] = []
LEVELS = st.just(NO_LEVELS) | st.lists(st.integers(-70, 70) | st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)
BOUNDS = parsing.Bounds(size_bytes_max=1 << 20, rows_max=1_000_000)
HASHES = st.lists(st.integers(0, (1 << 32) - 1), max_size=4)

ADDS = st.builds(
    delayed_delivery_pb2.StreamAddMessagesRequest,
    request_id=U64,
    add=st.builds(
        delayed_delivery_pb2.AddMessagesRequest,
        topic=st.text(max_size=5),
        ledger_id=COLUMN,
        entry_id=COLUMN,
        deliver_at_ms=COLUMN,
        delay_ms=COLUMN,
        delay_level=LEVELS,
        key_hash=HASHES,
        already_due=st.integers(0, 3),
        on_invalid=st.integers(0, 3),
        subscription=st.text(max_size=3),
    ),
)
ACKNOWLEDGEMENTS = st.builds(
    dispatch_pb2.SubscribeRequest,
    acknowledge=st.builds(
        dispatch_pb2.Acknowledge,
        request_id=U64,
        ledger_id=COLUMN,
        entry_id=COLUMN,
        deliver_at_ms=COLUMN,
        batch_index=HASHES,
    ),
)
NACKS = st.builds(
    dispatch_pb2.SubscribeRequest,
    negative_acknowledge=st.builds(
        dispatch_pb2.NegativeAcknowledge,
        request_id=U64,
        ledger_id=COLUMN,
        entry_id=COLUMN,
        deliver_at_ms=COLUMN,
        batch_index=HASHES,
        delay_ms=COLUMN,
        reject=st.booleans(),
        reason=st.text(max_size=3),
        key_hash=HASHES,
        redelivery_count=HASHES,
        forwarded=st.booleans(),
    ),
)
# What may stand before, after or between fields: others, twice the same, none at all.
SPLICES = st.tuples(
    st.integers(0, 200),
    st.sampled_from(
        [
            b"",
            b"\x08\x07",
            b"\x12\x00",
            b"\x1a\x08abcdefgh",
            b"\x38\x01",
            b"\x42\x02ab",
            b"\x50\x02",
            b"\x50\x82\x00",
            b"\x4a\x01\x05",
            b"\x4a\x02\x85\x00",
            b"\x4a\x0a" + b"\xff" * 9 + b"\x01",
            b"\x7a\x01x",
            b"\x82\x01\x00",
            b"\x80",
        ]
    )
    | st.binary(max_size=4),
)


@dataclasses.dataclass(frozen=True)
class Read:
    """The numbers of a request, for comparison."""

    request_id: int
    topic: str
    subscription: str | None
    columns: list[list[int] | None]
    returns: tuple[bool, bool] = (False, False)


def listed(*columns_read: Any) -> list[list[int] | None]:
    return [None if column is None else column.tolist() for column in columns_read]


def add_by_runtime(data: bytes) -> Read | None:
    try:
        request = delayed_delivery_pb2.StreamAddMessagesRequest.FromString(data)
        batch = row_requests.add_batch(request.add)
    except (message.DecodeError, errors.InvalidArgument):
        return None
    assert batch.return_already_due == (request.add.already_due == delayed_delivery_pb2.ALREADY_DUE_RETURN)
    assert batch.return_invalid == (request.add.on_invalid == delayed_delivery_pb2.ON_INVALID_RETURN)
    return of_add(request.request_id, request.add.topic, request.add.subscription or None, batch)


def unary_add_by_runtime(data: bytes, request_id: int) -> Read | None:
    try:
        request = delayed_delivery_pb2.AddMessagesRequest.FromString(data)
        batch = row_requests.add_batch(request)
    except (message.DecodeError, errors.InvalidArgument):
        return None
    return of_add(request_id, request.topic, request.subscription or None, batch)


def add_by_bytes(data: bytes) -> Read | None:
    try:
        request_id, topic, subscription, rows = row_requests.stream_add(data, BOUNDS)
        return of_add(request_id, topic, subscription, rows())
    except errors.InvalidArgument:
        return None


def unary_add_by_bytes(data: bytes, request_id: int) -> Read | None:
    """An add that is a call of its own, as a request of a stream with that id would be."""
    try:
        topic, subscription, rows = read_add(data)
    except errors.InvalidArgument:
        return None
    return of_add(request_id, topic, subscription, rows.batch() if isinstance(rows, AddRow) else rows)


def read_add(data: bytes) -> tuple[str, str | None, AddRow | AddBatch]:
    """The parts of an add that is a call of its own; its names are checked once."""
    checked: list[tuple[str, str]] = []
    topic, subscription, rows = row_requests.add(data, BOUNDS, check=lambda *names: checked.append(names))
    assert checked == [(topic, subscription or "")]
    return topic, subscription, rows


def of_add(request_id: int, topic: str, subscription: str | None, batch: AddBatch) -> Read:
    columns = (batch.ledger_id, batch.entry_id, batch.deliver_at_ms, batch.delay_ms, batch.delay_level, batch.key_hash)
    returns = (batch.return_already_due, batch.return_invalid)
    return Read(request_id, topic, subscription, listed(*columns), returns)


def acknowledge_by_runtime(data: bytes) -> Read | None:
    try:
        request = dispatch_pb2.SubscribeRequest.FromString(data)
        if request.WhichOneof("request") != "acknowledge":
            return None
        positions = row_requests.acknowledged(request.acknowledge)
    except (message.DecodeError, errors.InvalidArgument):
        return None
    return Read(request.acknowledge.request_id, "", None, of_positions(positions))


def acknowledge_by_bytes(data: bytes) -> Read | None:
    try:
        read = row_requests.subscribe(data, BOUNDS)
        if isinstance(read, row_requests.Acknowledged):
            return Read(read.request_id, "", None, of_positions(read.positions()))
    except errors.InvalidArgument:
        pass
    return None


def of_positions(positions: HeldPositions) -> list[list[int] | None]:
    return listed(*(getattr(positions, each.name) for each in dataclasses.fields(positions)))


def nack_by_runtime(data: bytes) -> Read | None:
    try:
        request = dispatch_pb2.SubscribeRequest.FromString(data)
        if request.WhichOneof("request") != "negative_acknowledge":
            return None
        nack = row_requests.nack(request.negative_acknowledge)
    except (message.DecodeError, errors.InvalidArgument):
        return None
    return read_nack(request.negative_acknowledge.request_id, nack)


def nack_by_bytes(data: bytes) -> Read | None:
    try:
        read = row_requests.subscribe(data, BOUNDS)
        if isinstance(read, row_requests.NegativelyAcknowledged):
            return read_nack(read.request_id, read.nack())
    except errors.InvalidArgument:
        pass
    return None


def read_nack(request_id: int, nack: call_values.Nack) -> Read:
    of_nack = [*of_positions(nack.positions), *listed(nack.delay_ms, nack.delay_level, nack.key_hash)]
    return Read(request_id, nack.text, str((nack.reject, nack.forwarded)), of_nack)


@pytest.fixture
def plain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to the generated code."""

    def parse(message_type: type[message.Message], data: bytes, *, size_bytes_max: int) -> None:
        pytest.fail(f"{len(data)} bytes of {message_type.DESCRIPTOR.name} are left to the generated code")

    monkeypatch.setattr(parsing, "parse", parse)


def spliced(data: bytes, splice: tuple[int, bytes]) -> bytes:
    place = min(splice[0], len(data))
    return data[:place] + splice[1] + data[place:]


@given(request=ADDS, splice=SPLICES, cut=st.integers(0, 3))
def test_an_add_is_read_as_the_runtime_reads_it(
    request: delayed_delivery_pb2.StreamAddMessagesRequest, splice: tuple[int, bytes], cut: int
) -> None:
    for data in (request.SerializeToString(), spliced(request.SerializeToString(), splice)):
        for part in (data, data[: len(data) - cut]):
            assert add_by_bytes(part) == add_by_runtime(part)


@given(request=ADDS, splice=SPLICES, cut=st.integers(0, 3))
def test_an_add_by_itself_is_read_as_the_runtime_reads_it(
    request: delayed_delivery_pb2.StreamAddMessagesRequest, splice: tuple[int, bytes], cut: int
) -> None:
    plain = request.add.SerializeToString()
    for data in (plain, spliced(plain, splice)):
        part = data[: len(data) - cut]
        assert unary_add_by_bytes(part, 1) == unary_add_by_runtime(part, 1)


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("time", ["deliver_at_ms", "delay_ms"])
@pytest.mark.parametrize("key_hash", [None, 0, (1 << 32) - 1])
def test_an_add_of_one_row_is_read_as_numbers(time: str, key_hash: int | None) -> None:
    fields: dict[str, Any] = {time: [1 << 40]} | ({} if key_hash is None else {"key_hash": [key_hash]})
    add = delayed_delivery_pb2.AddMessagesRequest(topic="é", ledger_id=[3], entry_id=[(1 << 64) - 1], **fields)
    read = read_add(add.SerializeToString())
    deliver_at_ms, delay_ms = (1 << 40, None) if time == "deliver_at_ms" else (None, 1 << 40)
    assert read == ("é", None, AddRow(3, (1 << 64) - 1, deliver_at_ms, delay_ms, key_hash))


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("fields", [{"already_due": 2}, {"on_invalid": 2}, {"subscription": "s"}, {"entry_id": [1, 2]}])
def test_an_add_of_which_more_may_have_to_be_said_is_read_as_columns(fields: dict[str, Any]) -> None:
    given_fields: dict[str, Any] = {"ledger_id": [1], "entry_id": [1], "delay_ms": [5]} | fields
    read = read_add(delayed_delivery_pb2.AddMessagesRequest(topic="t", **given_fields).SerializeToString())
    assert isinstance(read[2], AddBatch)


@given(request=ACKNOWLEDGEMENTS, splice=SPLICES, cut=st.integers(0, 3))
def test_an_acknowledgement_is_read_as_the_runtime_reads_it(
    request: dispatch_pb2.SubscribeRequest, splice: tuple[int, bytes], cut: int
) -> None:
    for data in (request.SerializeToString(), spliced(request.SerializeToString(), splice)):
        for part in (data, data[: len(data) - cut]):
            assert acknowledge_by_bytes(part) == acknowledge_by_runtime(part)


@given(request=NACKS, splice=SPLICES, cut=st.integers(0, 3))
def test_a_negative_acknowledgement_is_read_as_the_runtime_reads_it(
    request: dispatch_pb2.SubscribeRequest, splice: tuple[int, bytes], cut: int
) -> None:
    for data in (request.SerializeToString(), spliced(request.SerializeToString(), splice)):
        for part in (data, data[: len(data) - cut]):
            assert nack_by_bytes(part) == nack_by_runtime(part)


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("ledgers", [1, None])
@pytest.mark.parametrize("time", ["deliver_at_ms", "delay_ms"])
@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("subscription", ["", "for é alone"])
def test_the_plain_form_is_not_left_to_the_runtime(
    rows: int, ledgers: int | None, time: str, hashes: bool, subscription: str
) -> None:
    fields: dict[str, Any] = {"ledger_id": range(ledgers or rows), "entry_id": range(rows), time: [1 << 40] * rows}
    if hashes:
        fields["key_hash"] = range(rows)
    add = delayed_delivery_pb2.AddMessagesRequest(topic="persistent://é", subscription=subscription, **fields)
    data = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=(1 << 40) + 3, add=add).SerializeToString()
    assert add_by_bytes(data) == add_by_runtime(data) is not None


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize(
    "levels",
    [[0], [5], [63], [64], [256], [-1], [(1 << 31) - 1], [-(1 << 31)], [5] * 3, [0, 63, -64], [1] * 1000],
    ids=lambda levels: f"{len(levels)} from {levels[0]}",
)
def test_the_plain_form_of_delay_levels_is_not_left_to_the_runtime(levels: list[int]) -> None:
    rows = max(len(levels), 3)
    add = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=[1], entry_id=range(rows), delay_level=levels, subscription="s"
    )
    data = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=add).SerializeToString()
    read = add_by_bytes(data)
    assert read == add_by_runtime(data) is not None
    assert read is not None
    assert read.columns[4] == (levels * rows if len(levels) == 1 else levels)


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("already_due", delayed_delivery_pb2.AlreadyDue.values())
@pytest.mark.parametrize("on_invalid", delayed_delivery_pb2.OnInvalid.values())
def test_what_is_returned_is_not_left_to_the_runtime(
    already_due: delayed_delivery_pb2.AlreadyDue.ValueType, on_invalid: delayed_delivery_pb2.OnInvalid.ValueType
) -> None:
    add = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=[1], entry_id=[1], delay_ms=[1], already_due=already_due, on_invalid=on_invalid
    )
    data = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=add).SerializeToString()
    read = add_by_bytes(data)
    assert read == add_by_runtime(data) is not None
    assert read is not None
    assert read.returns == (already_due == 2, on_invalid == 2)


def test_a_number_of_an_enum_that_is_not_known_is_refused() -> None:
    unknown: list[tuple[str, dict[str, Any]]] = [(field, {field: 3}) for field in ("already_due", "on_invalid")]
    for field, given_fields in unknown:
        add = delayed_delivery_pb2.AddMessagesRequest(
            topic="t", ledger_id=[1], entry_id=[1], delay_ms=[1], **given_fields
        )
        data = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=add).SerializeToString()
        assert add_by_bytes(data) is None, field


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("request_id", [0, 1, (1 << 40) + 3])
def test_the_plain_form_of_an_acknowledgement_is_not_left_to_the_runtime(request_id: int) -> None:
    positions = {"ledger_id": [7], "entry_id": range(1000), "deliver_at_ms": range(1000)}
    request = dispatch_pb2.SubscribeRequest(acknowledge=dispatch_pb2.Acknowledge(request_id=request_id, **positions))
    data = request.SerializeToString()
    assert acknowledge_by_bytes(data) == acknowledge_by_runtime(data) is not None


@pytest.mark.usefixtures("plain_only")
@pytest.mark.parametrize("request_id", [0, (1 << 40) + 3])
@pytest.mark.parametrize("delays", [0, 1, 1000])
@pytest.mark.parametrize("times", [0, 1000])
def test_the_plain_form_of_a_negative_acknowledgement_is_not_left_to_the_runtime(
    request_id: int, delays: int, times: int
) -> None:
    nack = dispatch_pb2.NegativeAcknowledge(
        request_id=request_id,
        ledger_id=[7],
        entry_id=range(1000),
        deliver_at_ms=range(times),
        delay_ms=range(delays),
    )
    data = dispatch_pb2.SubscribeRequest(negative_acknowledge=nack).SerializeToString()
    assert nack_by_bytes(data) == nack_by_runtime(data) is not None


@pytest.mark.usefixtures("plain_only")
def test_columns_are_the_reader_s_own() -> None:
    """What the engine keeps must not keep the request alive, nor be bound to where it stands in it."""
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1, 2], deliver_at_ms=[3, 4])
    data = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=add).SerializeToString()
    *_, rows = row_requests.stream_add(data, BOUNDS)
    batch = rows()
    for column in (batch.ledger_id, batch.entry_id, batch.deliver_at_ms):
        assert column is not None
        assert column.base is None
        assert column.flags.writeable
        assert column.flags.aligned
        assert column.dtype == np.uint64
