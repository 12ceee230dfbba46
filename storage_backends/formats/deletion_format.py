"""Encodes and decodes deletions of ledgers and offloaded objects (PIP-186): decisions, and a shard's state.

The values mirror the messages of deletion.proto. A decision says what was asked, not what came of it: the result
follows from the state in which it is applied, so the order of the slots is the only order. `daemon.core.deletions`
applies decisions; `slot_format` and `checkpoint_format` hold them.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar, overload

import numpy as np

from storage_backends.formats import column_format, format_errors, mirror
from storage_backends.formats.generated import deletion_pb2
from storage_backends.formats.row_columns import U64

S = TypeVar("S")


class LedgerComponent(enum.IntEnum):
    """The use of a ledger (PIP-186)."""

    MANAGED_LEDGER = 1
    MANAGED_CURSOR = 2
    SCHEMA_STORAGE = 3


class LedgerType(enum.IntEnum):
    # Its owner deletes it.
    LEDGER = 1
    # Objects in an object store
    OFFLOADED_LEDGER = 2


class DeletionOutcome(enum.IntEnum):
    # Not over
    PENDING = 0
    DELETED = 1
    ALREADY_GONE = 2
    IN_USE = 3
    METADATA_MISMATCH = 4
    MALFORMED = 5
    # Tried too often: a dead letter
    GIVEN_UP = 6
    # An attempt failed and another follows; only an answer has this outcome.
    FAILED = 7


class InUseChange(enum.IntEnum):
    RECORD = 1
    FORGET = 2
    # These, and no others of their type, are in use.
    REPLACE = 3
    # The state of the type is complete: the end of a REPLACE that was too long for one decision. No ledgers.
    COMPLETE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadContext:
    """The place of an offloaded ledger. `driver_metadata` are names and values, ascending by name."""

    uuid_msb: int
    uuid_lsb: int
    driver_name: str
    driver_metadata: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PendingDelete:
    """An object of a topic to delete (PIP-186, PendingDeleteLedgerInfo). Equal ones are the same."""

    component: LedgerComponent
    ledger_type: LedgerType
    ledger_id: int
    cursor_name: str | None = None
    schema_id: str | None = None
    offload_context: OffloadContext | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RecordDeletes:
    """Intents to delete ledgers of `topic`."""

    topic: str
    recorded_at_ms: int
    deletes: tuple[PendingDelete, ...]
    by_sweeper: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BeginDeletes:
    """Deletions whose next attempt begins."""

    at_ms: int
    deletion_id: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionAnswer:
    """The result of an attempt.

    Only a FAILED one has `retry_at_ms`, and `maybe_deleted` if something may have been deleted.
    """

    deletion_id: int
    outcome: DeletionOutcome
    at_ms: int
    retry_at_ms: int = 0
    maybe_deleted: bool = False
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerDeletes:
    answers: tuple[DeletionAnswer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RetryDeletes:
    """Dead letters that become pending again."""

    at_ms: int
    deletion_id: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PurgeDeletes:
    """Dead letters that are forgotten."""

    deletion_id: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class InUseLedgers:
    """Ledgers of one type, in columns u64[n]. Both halves of the UUID are 0 for a ledger without one."""

    ledger_type: LedgerType
    ledger_id: U64
    uuid_msb: U64
    uuid_lsb: U64

    def __post_init__(self) -> None:
        for name in ("ledger_id", "uuid_msb", "uuid_lsb"):
            column = getattr(self, name)
            if column.shape != self.ledger_id.shape or column.dtype != np.uint64:
                raise ValueError(f"{name} is {column.dtype}{column.shape}, it must be uint64{self.ledger_id.shape}")

    def __len__(self) -> int:
        return len(self.ledger_id)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ChangeInUse:
    """A change by an owner of the ledgers of `topic` that are in use."""

    topic: str
    change: InUseChange
    ledgers: InUseLedgers


DeletionRecord: TypeAlias = RecordDeletes | BeginDeletes | AnswerDeletes | RetryDeletes | PurgeDeletes | ChangeInUse
RECORDS: Final = (RecordDeletes, BeginDeletes, AnswerDeletes, RetryDeletes, PurgeDeletes, ChangeInUse)


@dataclasses.dataclass(frozen=True, slots=True)
class Deletion:
    """A recorded delete.

    `begun` means that an attempt has begun and has no answer, `maybe_deleted` that an attempt may have deleted
    something. `ended_at_ms` is when it ended or was given up (Unix milliseconds). `text` is the last message. `held`
    means that it ended because its owner reported the ledger in use; it becomes pending again when the owner withdraws
    that.
    """

    deletion_id: int
    topic: str
    pending_delete: PendingDelete
    recorded_at_ms: int
    by_sweeper: bool = False
    outcome: DeletionOutcome = DeletionOutcome.PENDING
    begun: bool = False
    maybe_deleted: bool = False
    failures: int = 0
    next_attempt_at_ms: int = 0
    ended_at_ms: int = 0
    text: str = ""
    held: bool = False


class MadeWhenRead(Sequence[Deletion], Generic[S]):
    """A deletion for each item of `source`, made by `make` at each read, so that few exist at once."""

    def __init__(self, source: Sequence[S], make: Callable[[S], Deletion]) -> None:
        self._source = source
        self._make = make

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, place: int) -> Deletion: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Deletion, ...]: ...

    def __getitem__(self, place: int | slice) -> Deletion | tuple[Deletion, ...]:
        if isinstance(place, slice):
            return tuple(map(self._make, self._source[place]))
        return self._make(self._source[place])

    def __iter__(self) -> Iterator[Deletion]:
        return map(self._make, self._source)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicInUse:
    """The ledgers of `topic` that an owner reports in use, each type at most once.

    `complete` are the types, ascending, for which the report is complete.
    """

    topic: str
    ledgers: tuple[InUseLedgers, ...] = ()
    complete: tuple[LedgerType, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeletionState:
    """The deletions of a shard as of a slot.

    `last_id` is the highest ever given. `deletions` ascend by id; they may be so many that the sequence makes each at
    the time it is read.
    """

    last_id: int = 0
    deletions: Sequence[Deletion] = ()
    in_use: tuple[TopicInUse, ...] = ()


# ---- as messages

_MIRRORED: Final = {
    "record": RecordDeletes,
    "begin": BeginDeletes,
    "answer": AnswerDeletes,
    "retry": RetryDeletes,
    "purge": PurgeDeletes,
}
_DECISIONS: Final = {kind: name for name, kind in _MIRRORED.items()}
_CHANGES: Final = {
    InUseChange.RECORD: deletion_pb2.ChangeInUse.RECORD,
    InUseChange.FORGET: deletion_pb2.ChangeInUse.FORGET,
    InUseChange.REPLACE: deletion_pb2.ChangeInUse.REPLACE,
    InUseChange.COMPLETE: deletion_pb2.ChangeInUse.COMPLETE,
}
_LEDGER_TYPES: Final = {
    LedgerType.LEDGER: deletion_pb2.PendingDelete.LEDGER,
    LedgerType.OFFLOADED_LEDGER: deletion_pb2.PendingDelete.OFFLOADED_LEDGER,
}
_COMPONENTS: Final = {
    LedgerComponent.MANAGED_LEDGER: deletion_pb2.PendingDelete.MANAGED_LEDGER,
    LedgerComponent.MANAGED_CURSOR: deletion_pb2.PendingDelete.MANAGED_CURSOR,
    LedgerComponent.SCHEMA_STORAGE: deletion_pb2.PendingDelete.SCHEMA_STORAGE,
}
_OUTCOMES: Final = {outcome: deletion_pb2.DeletionOutcome.Value(outcome.name) for outcome in DeletionOutcome}
_LEDGER_TYPE_OF: Final = {stored: ledger_type for ledger_type, stored in _LEDGER_TYPES.items()}
_COMPONENT_OF: Final = {stored: component for component, stored in _COMPONENTS.items()}
_OUTCOME_OF: Final = {stored: outcome for outcome, stored in _OUTCOMES.items()}

# Deletions in one message: C code encodes it without interruption, and all their values are alive at once.
_PORTION_DELETIONS: Final = 1_000


# Tags, lengths and numbers without texts and columns: upper bounds (bytes)
_RECORD_BYTES_MAX: Final = 64
_DELETE_BYTES_MAX: Final = 64
_PROPERTY_BYTES_MAX: Final = 16
_ANSWER_BYTES_MAX: Final = 48
_ID_BYTES_MAX: Final = 10


def fill_record(message: deletion_pb2.DeletionRecord, record: DeletionRecord) -> None:
    """Set the message of a record."""
    if isinstance(record, ChangeInUse):
        message.in_use.topic = record.topic
        message.in_use.change = _CHANGES[record.change]
        _fill_in_use(message.in_use.ledgers, record.ledgers)
        return
    decision = getattr(message, _DECISIONS[type(record)])
    decision.SetInParent()
    mirror.fill(decision, record)


def size_max(record: DeletionRecord) -> int:
    """Return an upper bound of a record's size in a slot (bytes). Cheap: nothing is encoded."""
    match record:
        case RecordDeletes():
            return _RECORD_BYTES_MAX + _text_bytes(record.topic) + sum(map(_delete_bytes, record.deletes))
        case AnswerDeletes():
            return _RECORD_BYTES_MAX + sum(_ANSWER_BYTES_MAX + _text_bytes(answer.text) for answer in record.answers)
        case ChangeInUse():
            return _RECORD_BYTES_MAX + _text_bytes(record.topic) + 3 * column_format.size_max(len(record.ledgers))
        case BeginDeletes() | RetryDeletes() | PurgeDeletes():
            return _RECORD_BYTES_MAX + _ID_BYTES_MAX * len(record.deletion_id)


def _delete_bytes(delete: PendingDelete) -> int:
    context = delete.offload_context
    size_bytes = _DELETE_BYTES_MAX + _text_bytes(delete.cursor_name or "") + _text_bytes(delete.schema_id or "")
    if context is not None:
        size_bytes += _text_bytes(context.driver_name)
        for name, value in context.driver_metadata:
            size_bytes += _PROPERTY_BYTES_MAX + _text_bytes(name) + _text_bytes(value)
    return size_bytes


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def record_of(message: deletion_pb2.DeletionRecord, what: str, offset: int) -> DeletionRecord:
    """Read a decision on deletions. Raises FormatError."""
    decision = message.WhichOneof("decision")
    if decision is None:
        raise format_errors.FormatError(what, offset, "this release does not know the kind of a decision on deletions")
    with format_errors.reading(what, offset):
        if decision == "in_use":
            change = InUseChange(message.in_use.change)
            return ChangeInUse(message.in_use.topic, change, _in_use_of(message.in_use.ledgers, what, offset))
        made: DeletionRecord = mirror.made_from(_MIRRORED[decision], getattr(message, decision))
        return made


def portions(state: DeletionState) -> Iterator[DeletionState]:
    """Yield the state in parts of few deletions each; their messages, concatenated, are the state's message."""
    left = iter(state.deletions)
    yield DeletionState(state.last_id, tuple(itertools.islice(left, _PORTION_DELETIONS)), state.in_use)
    while deletions := tuple(itertools.islice(left, _PORTION_DELETIONS)):
        yield DeletionState(state.last_id, deletions)


def fill_state(message: deletion_pb2.DeletionState, state: DeletionState) -> None:
    """Set the message of a shard's state."""
    message.last_id = state.last_id
    for deletion in state.deletions:
        _add_deletion(message, deletion)
    for topic in state.in_use:
        complete = [_LEDGER_TYPES[ledger_type] for ledger_type in topic.complete]
        added = message.in_use.add(topic=topic.topic, complete=complete)
        for ledgers in topic.ledgers:
            _fill_in_use(added.ledgers.add(), ledgers)


def state_of(message: deletion_pb2.DeletionState, what: str, offset: int) -> DeletionState:
    """Return a state whose deletions are made from the message at the time they are read. Raises FormatError."""
    for each in message.deletions:
        if not (each.pending_delete.component and each.pending_delete.ledger_type):
            raise format_errors.FormatError(
                what, offset, f"deletion {each.deletion_id} has no component, or no ledger type"
            )
    with format_errors.reading(what, offset):
        in_use = tuple(
            TopicInUse(
                topic.topic,
                tuple(_in_use_of(ledgers, what, offset) for ledgers in topic.ledgers),
                tuple(LedgerType(ledger_type) for ledger_type in topic.complete),
            )
            for topic in message.in_use
        )
    return DeletionState(message.last_id, MadeWhenRead(message.deletions, _deletion_of), in_use)


# Written by hand, in a fifth of the time of `mirror`: a checkpoint has very many.
def _add_deletion(message: deletion_pb2.DeletionState, deletion: Deletion) -> None:
    delete, context = deletion.pending_delete, deletion.pending_delete.offload_context
    added = message.deletions.add(
        deletion_id=deletion.deletion_id,
        topic=deletion.topic,
        pending_delete=deletion_pb2.PendingDelete(
            component=_COMPONENTS[delete.component],
            cursor_name=delete.cursor_name,
            schema_id=delete.schema_id,
            ledger_type=_LEDGER_TYPES[delete.ledger_type],
            ledger_id=delete.ledger_id,
        ),
        recorded_at_ms=deletion.recorded_at_ms,
        by_sweeper=deletion.by_sweeper or None,
        outcome=_OUTCOMES[deletion.outcome] if deletion.outcome else None,
        begun=deletion.begun or None,
        maybe_deleted=deletion.maybe_deleted or None,
        failures=deletion.failures or None,
        next_attempt_at_ms=deletion.next_attempt_at_ms or None,
        ended_at_ms=deletion.ended_at_ms or None,
        text=deletion.text or None,
        held=deletion.held or None,
    )
    if context is not None:
        stored = added.pending_delete.offload_context
        stored.uuid_msb, stored.uuid_lsb = context.uuid_msb, context.uuid_lsb
        stored.driver_name = context.driver_name
        for name, value in context.driver_metadata:
            stored.driver_metadata.add(name=name, value=value)


def _deletion_of(message: deletion_pb2.Deletion) -> Deletion:
    delete, context = message.pending_delete, None
    if delete.HasField("offload_context"):
        stored = delete.offload_context
        metadata = tuple([(each.name, each.value) for each in stored.driver_metadata])
        context = OffloadContext(stored.uuid_msb, stored.uuid_lsb, stored.driver_name, metadata)
    return Deletion(
        message.deletion_id,
        message.topic,
        PendingDelete(
            _COMPONENT_OF[delete.component],
            _LEDGER_TYPE_OF[delete.ledger_type],
            delete.ledger_id,
            delete.cursor_name if delete.HasField("cursor_name") else None,
            delete.schema_id if delete.HasField("schema_id") else None,
            context,
        ),
        message.recorded_at_ms,
        message.by_sweeper,
        _OUTCOME_OF[message.outcome],
        message.begun,
        message.maybe_deleted,
        message.failures,
        message.next_attempt_at_ms,
        message.ended_at_ms,
        message.text,
        message.held,
    )


def _fill_in_use(message: deletion_pb2.InUseLedgers, ledgers: InUseLedgers) -> None:
    message.ledger_type = _LEDGER_TYPES[ledgers.ledger_type]
    message.ledgers = len(ledgers)
    message.ledger_id = column_format.encode_u64(ledgers.ledger_id)
    if ledgers.uuid_msb.any() or ledgers.uuid_lsb.any():
        message.uuid_msb = column_format.encode_u64(ledgers.uuid_msb)
        message.uuid_lsb = column_format.encode_u64(ledgers.uuid_lsb)


def _in_use_of(message: deletion_pb2.InUseLedgers, what: str, offset: int) -> InUseLedgers:
    distinct = message.ledger_id, message.uuid_msb, message.uuid_lsb
    # A request may name a ledger twice, which means the same as once; so does one that it names alone.
    alike = all(len(data) <= column_format.HEADER_BYTES for data in distinct)
    ledgers = min(1, message.ledgers) if alike else message.ledgers
    columns = column_format.Columns(ledgers, distinct, what=what, offset=offset)
    ledger_id = columns.u64("ledger_id", message.ledger_id)
    none = np.zeros(len(ledger_id), np.uint64)
    has_uuids = message.HasField("uuid_msb")
    return InUseLedgers(
        LedgerType(message.ledger_type),
        ledger_id,
        columns.u64("uuid_msb", message.uuid_msb) if has_uuids else none,
        columns.u64("uuid_lsb", message.uuid_lsb) if has_uuids else none,
    )
