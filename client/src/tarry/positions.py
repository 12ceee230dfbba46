"""Maps the message ids of your message log to positions, and back.

Each mapping is a class with two functions, `to_positions` and its exact inverse `from_positions`, and a name with a
version, such as "kafka/1". A mapping never changes, because its positions are stored: a changed one gets another
version and a class of its own. Arguments are columns or single values, which are columns of length 1; results are
columns of one length.
If a stream or topic of a log is deleted and created again, it counts from its first id again. Its Tarry topic then
needs another name that contains the generation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors

TextId: TypeAlias = str | bytes

_U64_MAX = 2**64 - 1
_I64_MAX = 2**63 - 1
_I32_MAX = 2**31 - 1
# Ledger of logs that have one number for a message
_ONLY_LEDGER = 1
# Redis: the time of an id in the high bits, its sequence number in the low ones
_SEQUENCE_BITS = 20
_SEQUENCE_MAX = 2**_SEQUENCE_BITS - 1
_TIME_MAX = 2 ** (64 - _SEQUENCE_BITS) - 1
_REDIS_LEDGER = 0
_REDIS_FORM = re.compile(r"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})")
# The daemon's limits for single messages of batches; above them only whole entries can be named.
_BATCH_INDEX_MAX = 2**16 - 1
_BATCHED_ENTRY_ID_MAX = 2**48 - 1
_NO_PULSAR_INDEX = -1


class Entries(NamedTuple):
    """Positions, as columns of one length. `client.add(topic, *entries, delay_ms=...)` takes them unchanged."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]


class EntryParts(NamedTuple):
    """Positions of single messages of batches, as columns of one length."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    batch_index: NDArray[np.uint32]
    """Index of the message within its batch entry, or `tarry.NO_BATCH_INDEX` for the whole entry"""


class KafkaOffsets(NamedTuple):
    """Records of a Kafka topic, as columns of one length."""

    partition: NDArray[np.int32]
    offset: NDArray[np.int64]


class PulsarMessages(NamedTuple):
    """Message ids of a Pulsar topic without their partition, as columns of one length."""

    ledger_id: NDArray[np.int64]
    entry_id: NDArray[np.int64]
    batch_index: NDArray[np.int32]
    """-1 for the whole entry, as in Pulsar"""


class Kafka1:
    """Mapping "kafka/1": records of a Kafka topic in one Tarry topic, with ledger = partition, entry = offset.

    Partitions are independent ledgers: trim each separately, never with `all_lower_ledgers`.
    """

    NAME: Final = "kafka/1"

    @staticmethod
    def to_positions(partition: columns.Column, offset: columns.Column) -> Entries:
        """Return the positions of records. Raises InvalidArgument.

        `partition` is 0 to 2^31 - 1, one for each record or one for all. `offset` is 0 to 2^63 - 1.
        Example: `client.add("orders", *tarry.positions.Kafka1.to_positions(3, [17, 18]), delay_ms=5_000)`
        """
        ledger_id = _whole_numbers("partition", partition, most=_I32_MAX)
        return Entries(*_of_one_length(partition=ledger_id, offset=_whole_numbers("offset", offset, most=_I64_MAX)))

    @staticmethod
    def from_positions(ledger_id: columns.Column, entry_id: columns.Column) -> KafkaOffsets:
        """Return the records of positions. Raises InvalidArgument for positions that `to_positions` cannot return."""
        partition = _whole_numbers("ledger_id", ledger_id, most=_I32_MAX)
        offset = _whole_numbers("entry_id", entry_id, most=_I64_MAX)
        partition, offset = _of_one_length(ledger_id=partition, entry_id=offset)
        return KafkaOffsets(partition.astype(np.int32), offset.astype(np.int64))


class NatsStream1:
    """Mapping "nats-stream/1": messages of a NATS JetStream stream, with ledger = 1, entry = stream sequence."""

    NAME: Final = "nats-stream/1"

    @staticmethod
    def to_positions(sequence: columns.Column) -> Entries:
        """Return the positions of messages by their stream sequence, 1 to 2^64 - 1. Raises InvalidArgument.

        Example: `tarry.positions.NatsStream1.to_positions([message.metadata.sequence.stream for message in messages])`
        """
        return _in_ledger(_ONLY_LEDGER, _whole_numbers("sequence", sequence, least=1))

    @staticmethod
    def from_positions(ledger_id: columns.Column, entry_id: columns.Column) -> NDArray[np.uint64]:
        """Return the stream sequences. Raises InvalidArgument for positions that `to_positions` cannot return."""
        return _of_ledger(_ONLY_LEDGER, ledger_id, _whole_numbers("entry_id", entry_id, least=1))


class RabbitStream1:
    """Mapping "rabbitmq-stream/1": messages of a RabbitMQ stream, with ledger = 1, entry = offset.

    Each partition of a super stream is a stream with a Tarry topic of its own.
    """

    NAME: Final = "rabbitmq-stream/1"

    @staticmethod
    def to_positions(offset: columns.Column) -> Entries:
        """Return the positions of messages by their offset, 0 to 2^64 - 1. Raises InvalidArgument.

        Example: `tarry.positions.RabbitStream1.to_positions(range(100, 200))`
        """
        return _in_ledger(_ONLY_LEDGER, _whole_numbers("offset", offset))

    @staticmethod
    def from_positions(ledger_id: columns.Column, entry_id: columns.Column) -> NDArray[np.uint64]:
        """Return the offsets. Raises InvalidArgument for positions that `to_positions` cannot return."""
        return _of_ledger(_ONLY_LEDGER, ledger_id, _whole_numbers("entry_id", entry_id))


class RedisStream1:
    """Mapping "redis-stream/1": entries of a Redis stream in its order, ledger = 0, entry = ms * 2^20 + sequence.

    An id is "<ms>-<sequence>", as XADD returns it: ms up to 2^44 - 1, in the year 2527, the sequence number up to
    1,048,575. Redis gives larger ones only when its clock has been set back, or in a script of more than a million
    XADDs. `RedisSequences1` costs less if the order does not matter.
    """

    NAME: Final = "redis-stream/1"

    @staticmethod
    def to_positions(ids: TextId | Iterable[TextId]) -> Entries:
        """Return the positions of entries by their ids, text or bytes. Raises InvalidArgument.

        Example: `tarry.positions.RedisStream1.to_positions(["1795773600000-0", b"1795773600000-1"])`
        """
        time_ms, sequence = _redis_numbers(ids, time_max=_TIME_MAX, sequence_max=_SEQUENCE_MAX)
        return _in_ledger(_REDIS_LEDGER, time_ms << np.uint64(_SEQUENCE_BITS) | sequence)

    @staticmethod
    def from_positions(ledger_id: columns.Column, entry_id: columns.Column) -> list[str]:
        """Return the ids as text. Raises InvalidArgument for positions that `to_positions` cannot return."""
        numbers = _of_ledger(_REDIS_LEDGER, ledger_id, _whole_numbers("entry_id", entry_id, least=1))
        return [f"{each >> _SEQUENCE_BITS}-{each & _SEQUENCE_MAX}" for each in numbers.tolist()]


class RedisSequences1:
    """Mapping "redis-sequences/1": entries of a Redis stream, with ledger = sequence number, entry = ms.

    Positions take a fraction of the bytes of `RedisStream1`, and any id fits, but their order is that of the stream
    only among equal sequence numbers. Do not use it for order by keys, cursors or `all_lower_ledgers`, or for streams
    with thousands of entries in one ms.
    """

    NAME: Final = "redis-sequences/1"

    @staticmethod
    def to_positions(ids: TextId | Iterable[TextId]) -> Entries:
        """Return the positions of entries by their ids, text or bytes. Raises InvalidArgument.

        Example: `tarry.positions.RedisSequences1.to_positions(["1795773600000-0", b"1795773600000-1"])`
        """
        time_ms, sequence = _redis_numbers(ids, time_max=_U64_MAX, sequence_max=_U64_MAX)
        return Entries(sequence, time_ms)

    @staticmethod
    def from_positions(ledger_id: columns.Column, entry_id: columns.Column) -> list[str]:
        """Return the ids as text. Raises InvalidArgument for positions that `to_positions` cannot return."""
        sequence, time_ms = _of_one_length(
            ledger_id=_whole_numbers("ledger_id", ledger_id), entry_id=_whole_numbers("entry_id", entry_id)
        )
        neither = np.flatnonzero((sequence == 0) & (time_ms == 0))
        if len(neither):
            row = int(neither[0])
            raise errors.InvalidArgument(f"ledger_id[{row}] and entry_id[{row}] are 0; one of them must be at least 1")
        return [f"{ms}-{number}" for ms, number in zip(time_ms.tolist(), sequence.tolist(), strict=True)]


class Pulsar1:
    """Mapping "pulsar/1": messages of a Pulsar topic, with its ledger and entry, and the index in a batch.

    The partition of a message id is not in its position: each partition of a Pulsar topic is a separate topic with
    ledgers of its own, and so is its Tarry topic. An add takes whole entries, a negative acknowledgement also single
    messages of them.
    """

    NAME: Final = "pulsar/1"

    @staticmethod
    def to_positions(
        ledger_id: columns.Column, entry_id: columns.Column, batch_index: columns.Column = _NO_PULSAR_INDEX
    ) -> EntryParts:
        """Return the positions of messages. Raises InvalidArgument.

        `ledger_id` and `entry_id` are 0 to 2^63 - 1. `batch_index` is 0 to 65,535, or -1 for the whole entry; only
        entries up to 2^48 - 1 allow single messages.
        Example: `tarry.positions.Pulsar1.to_positions(7, [0, 1, 1], [-1, 0, 1])`
        """
        ledgers = _whole_numbers("ledger_id", ledger_id, most=_I64_MAX)
        entries = _whole_numbers("entry_id", entry_id, most=_I64_MAX)
        indexes = _checked("batch_index", batch_index, _NO_PULSAR_INDEX, _BATCH_INDEX_MAX).astype(np.int64)
        ledgers, entries, indexes = _of_one_length(ledger_id=ledgers, entry_id=entries, batch_index=indexes)
        is_whole = indexes == _NO_PULSAR_INDEX
        _check_batched(entries, ~is_whole)
        return EntryParts(ledgers, entries, np.where(is_whole, columns.NO_BATCH_INDEX, indexes).astype(np.uint32))

    @staticmethod
    def from_positions(
        ledger_id: columns.Column, entry_id: columns.Column, batch_index: columns.Column | None = None
    ) -> PulsarMessages:
        """Return the messages. Raises InvalidArgument for positions that `to_positions` cannot return.

        `batch_index` is that of a delivery; None, and `tarry.NO_BATCH_INDEX` in a column, mean the whole entry.
        """
        ledgers = _whole_numbers("ledger_id", ledger_id, most=_I64_MAX)
        entries = _whole_numbers("entry_id", entry_id, most=_I64_MAX)
        given = _whole_numbers("batch_index", columns.NO_BATCH_INDEX if batch_index is None else batch_index)
        ledgers, entries, given = _of_one_length(ledger_id=ledgers, entry_id=entries, batch_index=given)
        is_whole = given == columns.NO_BATCH_INDEX
        _check_range("batch_index", np.where(is_whole, np.uint64(0), given), 0, _BATCH_INDEX_MAX)
        _check_batched(entries, ~is_whole)
        indexes = np.where(is_whole, _NO_PULSAR_INDEX, given.astype(np.int64))
        return PulsarMessages(ledgers.astype(np.int64), entries.astype(np.int64), indexes.astype(np.int32))


AnyMapping: TypeAlias = (
    type[Kafka1] | type[NatsStream1] | type[RabbitStream1] | type[RedisStream1] | type[RedisSequences1] | type[Pulsar1]
)
MAPPINGS: Final[Mapping[str, AnyMapping]] = {
    Kafka1.NAME: Kafka1,
    NatsStream1.NAME: NatsStream1,
    RabbitStream1.NAME: RabbitStream1,
    RedisStream1.NAME: RedisStream1,
    RedisSequences1.NAME: RedisSequences1,
    Pulsar1.NAME: Pulsar1,
}
"""All mappings by name; keep the name next to positions made by it."""


def _redis_numbers(
    ids: TextId | Iterable[TextId], *, time_max: int, sequence_max: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return (ms, sequence number) of each id. Raises InvalidArgument."""
    given = [ids] if isinstance(ids, (str, bytes)) else list(ids)
    numbers = [_redis_number(row, each, time_max=time_max, sequence_max=sequence_max) for row, each in enumerate(given)]
    both = np.array(numbers, np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def _redis_number(row: int, given: TextId, *, time_max: int, sequence_max: int) -> tuple[int, int]:
    """Return (ms, sequence number). Raises InvalidArgument if Redis writes no such id, or if its numbers do not fit."""
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
    found = _REDIS_FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise errors.InvalidArgument(f"ids[{row}] is {given!r}; it has the form <ms>-<sequence number>")
    time_ms, sequence = int(found[1]), int(found[2])
    for what, number, most in (("ms", time_ms, time_max), ("sequence number", sequence, sequence_max)):
        if number > most:
            raise errors.InvalidArgument(f"ids[{row}] is {given!r}; its {what} may be at most {most}")
    if not time_ms and not sequence:
        raise errors.InvalidArgument(f"ids[{row}] is {given!r}, which names no entry; the lowest id is 0-1")
    return time_ms, sequence


def _in_ledger(ledger_id: int, entry_id: NDArray[np.uint64]) -> Entries:
    return Entries(np.full(len(entry_id), ledger_id, np.uint64), entry_id)


def _of_ledger(only: int, ledger_id: columns.Column, entry_id: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the entries. Raises InvalidArgument for positions of another ledger."""
    ledgers = _whole_numbers("ledger_id", ledger_id, least=only, most=only)
    return _of_one_length(ledger_id=ledgers, entry_id=entry_id)[1]


def _check_batched(entry_id: NDArray[np.uint64], is_part: NDArray[np.bool_]) -> None:
    """Raise InvalidArgument for single messages of entries that do not allow them."""
    beyond = np.flatnonzero(is_part & (entry_id > np.uint64(_BATCHED_ENTRY_ID_MAX)))
    if len(beyond):
        row = int(beyond[0])
        raise errors.InvalidArgument(
            f"entry_id[{row}] is {entry_id[row]}; an entry of which batch_index[{row}] names a message may be at most "
            f"{_BATCHED_ENTRY_ID_MAX}"
        )


def _of_one_length(**given: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the columns, with those of length 1 repeated. Raises InvalidArgument if lengths differ."""
    lengths = {name: len(column) for name, column in given.items()}
    rows = next((length for length in lengths.values() if length != 1), 1)
    for name, length in lengths.items():
        if length not in (1, rows):
            raise errors.InvalidArgument(f"{name} has {length} rows; it must have 1 or {rows}, as the others")
    return tuple(np.broadcast_to(column, rows) for column in given.values())


def _whole_numbers(field: str, values: columns.Column, *, least: int = 0, most: int = _U64_MAX) -> NDArray[np.uint64]:
    return _checked(field, values, least, most).astype(np.uint64)


def _checked(field: str, values: columns.Column, least: int, most: int) -> NDArray[Any]:
    """Return the values as a column of integers. Raises InvalidArgument if a value is none or out of range."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "ui":
        array = values.reshape(1) if values.ndim == 0 else values
    else:
        array = _array_of(field, values.tolist() if isinstance(values, np.ndarray) else values)
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{field} has {array.ndim} dimensions; a column has 1")
    _check_range(field, array, least, most)
    return array


def _check_range(field: str, array: NDArray[Any], least: int, most: int) -> None:
    """Raise InvalidArgument for a number that is not from `least` to `most`."""
    for row in (int(array.argmin()), int(array.argmax())) if len(array) else ():
        if not least <= int(array[row]) <= most:
            raise errors.InvalidArgument(f"{field}[{row}] is {array[row]}; it must be from {least} to {most}")


def _array_of(field: str, values: Any) -> NDArray[Any]:
    """Return Python's numbers as objects, because no numpy type holds all of them. Raises InvalidArgument."""
    is_one = isinstance(values, (str, bytes)) or not isinstance(values, Iterable)
    given: list[Any] = [values] if is_one else list(values)
    for row, value in enumerate(given):
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
            raise errors.InvalidArgument(f"{field}[{row}] is {value!r}; it must be an integer")
    return np.array([operator.index(value) for value in given], dtype=object)
