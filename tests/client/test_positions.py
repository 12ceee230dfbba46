"""Message ids of a log become positions and come back: exactly, in order, refused by name, for good."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry.positions import MAPPINGS, Kafka1, NatsStream1, Pulsar1, RabbitStream1, RedisSequences1, RedisStream1

I32_MAX, I64_MAX, U64_MAX = 2**31 - 1, 2**63 - 1, 2**64 - 1
BATCHED_MAX = 2**48 - 1
WHOLE = tarry.NO_BATCH_INDEX

# An id, as the numbers by which its log orders it.
Id = tuple[int, ...]


def columns_of(ids: Sequence[Id]) -> list[list[int]]:
    return [list(column) for column in zip(*ids, strict=True)]


def redis_texts(ids: Sequence[Id]) -> list[str]:
    return [f"{time_ms}-{sequence}" for time_ms, sequence in ids]


def redis_numbers(texts: Sequence[str]) -> list[Id]:
    return [tuple(map(int, text.split("-"))) for text in texts]


def rows_of(returned: Any) -> list[Id]:
    return list(zip(*(column.tolist() for column in returned), strict=True))


TO_POSITIONS: dict[str, Callable[[Sequence[Id]], tuple[Any, ...]]] = {
    Kafka1.NAME: lambda ids: Kafka1.to_positions(*columns_of(ids)),
    NatsStream1.NAME: lambda ids: NatsStream1.to_positions(*columns_of(ids)),
    RabbitStream1.NAME: lambda ids: RabbitStream1.to_positions(*columns_of(ids)),
    RedisStream1.NAME: lambda ids: RedisStream1.to_positions(redis_texts(ids)),
    RedisSequences1.NAME: lambda ids: RedisSequences1.to_positions(redis_texts(ids)),
    Pulsar1.NAME: lambda ids: Pulsar1.to_positions(*columns_of(ids)),
}
FROM_POSITIONS: dict[str, Callable[..., list[Id]]] = {
    Kafka1.NAME: lambda *positions: rows_of(Kafka1.from_positions(*positions)),
    NatsStream1.NAME: lambda *positions: rows_of([NatsStream1.from_positions(*positions)]),
    RabbitStream1.NAME: lambda *positions: rows_of([RabbitStream1.from_positions(*positions)]),
    RedisStream1.NAME: lambda *positions: redis_numbers(RedisStream1.from_positions(*positions)),
    RedisSequences1.NAME: lambda *positions: redis_numbers(RedisSequences1.from_positions(*positions)),
    Pulsar1.NAME: lambda *positions: rows_of(Pulsar1.from_positions(*positions)),
}


def near(least: int, most: int) -> st.SearchStrategy[int]:
    """Numbers of a range, many of them at its ends, so that ids are neighbours, too."""
    return st.one_of(st.integers(least, most), st.integers(least, least + 3), st.integers(most - 3, most))


IDS: dict[str, st.SearchStrategy[Id]] = {
    Kafka1.NAME: st.tuples(near(0, I32_MAX), near(0, I64_MAX)),
    NatsStream1.NAME: st.tuples(near(1, U64_MAX)),
    RabbitStream1.NAME: st.tuples(near(0, U64_MAX)),
    RedisStream1.NAME: st.tuples(near(0, 2**44 - 1), near(0, 2**20 - 1)).filter(any),
    RedisSequences1.NAME: st.tuples(near(0, U64_MAX), near(0, U64_MAX)).filter(any),
    Pulsar1.NAME: st.one_of(
        st.tuples(near(0, I64_MAX), near(0, I64_MAX), st.just(-1)),
        st.tuples(near(0, I64_MAX), near(0, 2**48 - 1), near(0, 2**16 - 1)),
    ),
}
LISTS = {name: st.lists(ids, min_size=1, max_size=30) for name, ids in IDS.items()}

# Of each mapping ids, and the positions that they have for good: stored ones mean what these do. Never change a line;
# another way to map is another mapping.
GOLDEN: dict[str, dict[Id, Id]] = {
    "kafka/1": {(0, 0): (0, 0), (3, 17): (3, 17), (I32_MAX, I64_MAX): (I32_MAX, I64_MAX)},
    "nats-stream/1": {(1,): (1, 1), (17,): (1, 17), (U64_MAX,): (1, U64_MAX)},
    "rabbitmq-stream/1": {(0,): (1, 0), (17,): (1, 17), (U64_MAX,): (1, U64_MAX)},
    "redis-stream/1": {
        (0, 1): (0, 1),
        (1, 0): (0, 1_048_576),
        (1_795_773_600_000, 0): (0, 1_883_005_098_393_600_000),
        (1_795_773_600_000, 7): (0, 1_883_005_098_393_600_007),
        (2**44 - 1, 2**20 - 1): (0, U64_MAX),
    },
    "redis-sequences/1": {
        (0, 1): (1, 0),
        (1, 0): (0, 1),
        (1_795_773_600_000, 7): (7, 1_795_773_600_000),
        (U64_MAX, U64_MAX): (U64_MAX, U64_MAX),
    },
    "pulsar/1": {
        (0, 0, -1): (0, 0, WHOLE),
        (7, 1, -1): (7, 1, WHOLE),
        (7, 1, 0): (7, 1, 0),
        (7, 1, 65_535): (7, 1, 65_535),
        (I64_MAX, 2**48 - 1, 3): (I64_MAX, 2**48 - 1, 3),
        (I64_MAX, I64_MAX, -1): (I64_MAX, I64_MAX, WHOLE),
    },
}

every_mapping = pytest.mark.parametrize("name", MAPPINGS)


@every_mapping
@given(data=st.data())
def test_ids_come_back_from_their_positions(name: str, data: st.DataObject) -> None:
    ids = data.draw(LISTS[name])
    assert FROM_POSITIONS[name](*TO_POSITIONS[name](ids)) == ids


@every_mapping
@given(data=st.data())
def test_different_ids_have_different_positions(name: str, data: st.DataObject) -> None:
    ids = data.draw(LISTS[name])
    assert len(set(rows_of(TO_POSITIONS[name](ids)))) == len(set(ids))


@pytest.mark.parametrize("name", [name for name in MAPPINGS if name != RedisSequences1.NAME])
@given(data=st.data())
def test_later_ids_have_higher_positions(name: str, data: st.DataObject) -> None:
    # Messages of one batch are one entry.
    numbers = 2 if name == Pulsar1.NAME else None
    ids = sorted({each[:numbers]: each for each in data.draw(LISTS[name])}.values())
    positions = [each[:2] for each in rows_of(TO_POSITIONS[name](ids))]
    assert all(earlier < later for earlier, later in itertools.pairwise(positions))


@given(ids=LISTS[RedisSequences1.NAME])
def test_later_ids_with_one_sequence_number_have_higher_positions_where_it_is_the_ledger(ids: list[Id]) -> None:
    positions = rows_of(RedisSequences1.to_positions(redis_texts(sorted(set(ids), key=lambda each: each[::-1]))))
    assert positions == sorted(positions)


@every_mapping
def test_a_mapping_never_changes(name: str) -> None:
    ids, positions = list(GOLDEN[name]), list(GOLDEN[name].values())
    assert rows_of(TO_POSITIONS[name](ids)) == positions
    assert FROM_POSITIONS[name](*columns_of(positions)) == ids


@every_mapping
@given(data=st.data())
def test_columns_are_unsigned_and_of_one_length(name: str, data: st.DataObject) -> None:
    ids = data.draw(LISTS[name])
    positions = TO_POSITIONS[name](ids)
    assert [column.dtype for column in positions[:2]] == [np.uint64, np.uint64]
    assert {column.shape for column in positions} == {(len(ids),)}


def test_one_value_is_a_column_of_length_1() -> None:
    assert rows_of(Kafka1.to_positions(3, 17)) == [(3, 17)]
    assert rows_of(Kafka1.from_positions(3, np.uint64(17))) == [(3, 17)]
    assert rows_of(NatsStream1.to_positions(17)) == [(1, 17)]
    assert NatsStream1.from_positions(1, 17).tolist() == [17]
    assert rows_of(RabbitStream1.to_positions(np.array(17))) == [(1, 17)]
    assert RabbitStream1.from_positions(1, 17).tolist() == [17]
    assert rows_of(RedisStream1.to_positions("1-7")) == rows_of(RedisStream1.to_positions(b"1-7"))
    assert RedisStream1.from_positions(0, 2**20 + 7) == ["1-7"]
    assert rows_of(Pulsar1.to_positions(7, 1)) == [(7, 1, WHOLE)]
    assert rows_of(Pulsar1.from_positions(7, 1)) == [(7, 1, -1)]


def test_one_value_is_that_of_every_row() -> None:
    assert rows_of(Kafka1.to_positions(3, range(2))) == [(3, 0), (3, 1)]
    assert rows_of(Kafka1.to_positions([3, 4], 0)) == [(3, 0), (4, 0)]
    assert rows_of(Kafka1.from_positions(3, [0, 1])) == [(3, 0), (3, 1)]
    assert rows_of(Pulsar1.to_positions(7, [0, 1], 5)) == [(7, 0, 5), (7, 1, 5)]
    assert RedisStream1.from_positions(0, [1, 2]) == ["0-1", "0-2"]


def test_no_rows_have_no_positions() -> None:
    assert rows_of(Kafka1.to_positions(3, [])) == []
    assert rows_of(RedisStream1.to_positions([])) == []
    assert rows_of(RedisSequences1.to_positions([])) == []
    assert RedisStream1.from_positions(0, []) == []
    assert rows_of(Pulsar1.to_positions(7, np.empty(0, np.int64))) == []


def test_arrays_of_any_integers_and_of_text_are_columns() -> None:
    for dtype in (np.int8, np.int32, np.uint32, np.int64, np.uint64, object):
        assert rows_of(Kafka1.to_positions(3, np.array([1, 2], dtype))) == [(3, 1), (3, 2)]
    ids: Any
    for ids in (np.array(["1-0", "1-12"]), np.array([b"1-0", b"1-12"]), iter(["1-0", b"1-12"])):
        assert rows_of(RedisStream1.to_positions(ids)) == [(0, 2**20), (0, 2**20 + 12)]


def test_what_is_given_is_not_what_is_returned() -> None:
    offsets = np.array([1, 2], np.uint64)
    positions = RabbitStream1.to_positions(offsets)
    offsets[:] = 0
    assert positions.entry_id.tolist() == [1, 2]


def test_positions_have_the_types_of_their_log() -> None:
    assert [each.dtype for each in Kafka1.from_positions(3, 17)] == [np.int32, np.int64]
    assert [each.dtype for each in Pulsar1.from_positions(7, 1)] == [np.int64, np.int64, np.int32]
    assert Pulsar1.to_positions(7, 1, 3).batch_index.dtype == np.uint32


def test_a_message_of_a_batch_and_its_entry_as_a_whole_are_of_one_entry() -> None:
    positions = Pulsar1.to_positions([7, 7, 7], [1, 1, 1], [-1, 0, 1])
    assert positions.ledger_id.tolist() == [7, 7, 7]
    assert positions.entry_id.tolist() == [1, 1, 1]
    assert positions.batch_index.tolist() == [WHOLE, 0, 1]


# What callers without types give.
HALVES: Any = [1, 1.5]
TEXT: Any = "17"
NOTHING: Any = None
Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Kafka1.to_positions([0, -1], 5), "partition[1] is -1; it must be from 0 to 2147483647"),
        (lambda: Kafka1.to_positions(2**31, 5), "partition[0] is 2147483648; it must be from 0 to 2147483647"),
        (lambda: Kafka1.to_positions(0, [1, 2**63]), f"offset[1] is {2**63}; it must be from 0 to {I64_MAX}"),
        (lambda: Kafka1.to_positions(0, np.array([1, 2, -7])), "offset[2] is -7; it must be from 0 to"),
        (lambda: Kafka1.to_positions([1, 2], [1, 2, 3]), "offset has 3 rows; it must have 1 or 2, as the others"),
        (lambda: Kafka1.to_positions([], [1, 2, 3]), "offset has 3 rows; it must have 1 or 0, as the others"),
        (lambda: Kafka1.from_positions(2**31, 5), "ledger_id[0] is 2147483648; it must be from 0 to 2147483647"),
        (lambda: Kafka1.from_positions(0, [5, 2**63]), f"entry_id[1] is {2**63}; it must be from 0 to"),
        (lambda: NatsStream1.to_positions([1, 0]), f"sequence[1] is 0; it must be from 1 to {U64_MAX}"),
        (lambda: NatsStream1.to_positions(2**64), f"sequence[0] is {2**64}; it must be from 1 to {U64_MAX}"),
        (lambda: NatsStream1.from_positions([1, 2], 5), "ledger_id[1] is 2; it must be from 1 to 1"),
        (lambda: NatsStream1.from_positions(1, 0), "entry_id[0] is 0; it must be from 1 to"),
        (lambda: RabbitStream1.to_positions(-1), f"offset[0] is -1; it must be from 0 to {U64_MAX}"),
        (lambda: RabbitStream1.from_positions(0, 5), "ledger_id[0] is 0; it must be from 1 to 1"),
        (lambda: RedisStream1.from_positions([0, 1], 5), "ledger_id[1] is 1; it must be from 0 to 0"),
        (lambda: RedisStream1.from_positions(0, [5, 0]), "entry_id[1] is 0; it must be from 1 to"),
        (
            lambda: RedisSequences1.from_positions([0, 0], [5, 0]),
            "ledger_id[1] and entry_id[1] are 0; one of them must be at least 1",
        ),
        (lambda: RedisSequences1.from_positions(0, -5), "entry_id[0] is -5; it must be from 0 to"),
        (lambda: Pulsar1.to_positions(-1, 5), f"ledger_id[0] is -1; it must be from 0 to {I64_MAX}"),
        (lambda: Pulsar1.to_positions(7, 2**63), f"entry_id[0] is {2**63}; it must be from 0 to {I64_MAX}"),
        (lambda: Pulsar1.to_positions(7, 5, [0, -2]), "batch_index[1] is -2; it must be from -1 to 65535"),
        (lambda: Pulsar1.to_positions(7, 5, 65_536), "batch_index[0] is 65536; it must be from -1 to 65535"),
        (
            lambda: Pulsar1.to_positions(7, [1, 2**48, 2**48], [0, -1, 0]),
            f"entry_id[2] is {2**48}; an entry of which batch_index[2] names a message may be at most {BATCHED_MAX}",
        ),
        (lambda: Pulsar1.from_positions(2**63, 5), f"ledger_id[0] is {2**63}; it must be from 0 to"),
        (lambda: Pulsar1.from_positions(7, 5, [WHOLE, 65_536]), "batch_index[1] is 65536; it must be from 0 to 65535"),
        (
            lambda: Pulsar1.from_positions(7, 2**48, 1),
            f"entry_id[0] is {2**48}; an entry of which batch_index[0] names",
        ),
        (lambda: RabbitStream1.to_positions(HALVES), "offset[1] is 1.5; it must be an integer"),
        (lambda: RabbitStream1.to_positions(np.array([0.5])), "offset[0] is 0.5; it must be an integer"),
        (lambda: RabbitStream1.to_positions([1, True]), "offset[1] is True; it must be an integer"),
        (lambda: RabbitStream1.to_positions(TEXT), "offset[0] is '17'; it must be an integer"),
        (lambda: RabbitStream1.to_positions(NOTHING), "offset[0] is None; it must be an integer"),
        (lambda: RabbitStream1.to_positions(np.zeros((2, 2), np.uint64)), "offset has 2 dimensions; a column has 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_field_row_value_and_limit(call: Call, says: str) -> None:
    with pytest.raises(tarry.InvalidArgument) as refused:
        call()
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1-",
        "-1",
        "1-2-3",
        "01-0",
        "1-00",
        "+1-0",
        "1 -0",
        "1-0\n",
        "1-*",
        "$",
        "1.5-0",
        "\u0661-0",
        "1" * 5_000 + "-0",
    ],
)
def test_what_is_no_id_of_redis_is_refused(text: str) -> None:
    for given_id in (text, text.encode()):
        with pytest.raises(tarry.InvalidArgument, match=r"ids\[1\] is .*; it has the form <ms>-<sequence number>"):
            RedisStream1.to_positions(["1-0", given_id])
        with pytest.raises(tarry.InvalidArgument, match=r"ids\[1\] is .*; it has the form <ms>-<sequence number>"):
            RedisSequences1.to_positions(["1-0", given_id])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{2**44}-0", f"its ms may be at most {2**44 - 1}"),
        (f"1-{2**20}", f"its sequence number may be at most {2**20 - 1}"),
        (f"{U64_MAX}-{U64_MAX}", f"its ms may be at most {2**44 - 1}"),
        ("0-0", "which names no entry; the lowest id is 0-1"),
    ],
)
def test_an_id_of_redis_that_does_not_fit_is_refused(text: str, says: str) -> None:
    with pytest.raises(tarry.InvalidArgument) as refused:
        RedisStream1.to_positions(["1-0", text])
    assert f"ids[1] is {text!r}" in str(refused.value)
    assert says in str(refused.value)


def test_any_id_that_redis_holds_fits_where_its_sequence_number_is_the_ledger() -> None:
    assert rows_of(RedisSequences1.to_positions(f"{U64_MAX}-{2**20}")) == [(2**20, U64_MAX)]
    for text, says in ((f"{2**64}-0", "its ms may be"), (f"0-{2**64}", "its sequence number may be")):
        with pytest.raises(tarry.InvalidArgument, match=f"{says} at most {U64_MAX}"):
            RedisSequences1.to_positions(text)


def test_what_is_no_text_is_refused_as_an_id_of_redis() -> None:
    ids: Any = ["1-0", 5]
    with pytest.raises(tarry.InvalidArgument, match=r"ids\[1\] is 5; it has the form"):
        RedisStream1.to_positions(ids)


def test_mappings_are_known_by_name_and_version_and_have_golden_values() -> None:
    assert [each.NAME for each in MAPPINGS.values()] == list(MAPPINGS) == list(GOLDEN)
    assert tarry.positions.MAPPINGS is MAPPINGS
