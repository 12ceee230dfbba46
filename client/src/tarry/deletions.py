"""Values of two-phase deletion of ledgers and offloaded ledgers (PIP-186), frozen and free of wire types.

They cover records, their state, and what a sweep finds, to and from messages. Comments in `proto/tarry/v1` define each
field; the daemon checks limits.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors, inspection, wire
from tarry.v1 import ledger_deletion_pb2

UuidColumn: TypeAlias = uuid.UUID | Sequence[uuid.UUID | None]
"""One UUID for all ledgers, or one for each; None means any UUID"""
DeletionsMessage: TypeAlias = (
    ledger_deletion_pb2.ListPendingDeletesResponse
    | ledger_deletion_pb2.ListDeadDeletesResponse
    | ledger_deletion_pb2.ListEndedDeletesResponse
)
E = TypeVar("E", bound=enum.IntEnum)

_HALF_BITS = 64
_HALF_MASK = 2**_HALF_BITS - 1


class LedgerComponent(enum.IntEnum):
    """The purpose of a ledger."""

    MANAGED_LEDGER = ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_LEDGER
    """Messages of a topic"""
    MANAGED_CURSOR = ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_CURSOR
    """A subscription's cursor"""
    SCHEMA_STORAGE = ledger_deletion_pb2.LEDGER_COMPONENT_SCHEMA_STORAGE
    """A schema"""


class LedgerType(enum.IntEnum):
    """The holder of a ledger."""

    LEDGER = ledger_deletion_pb2.LEDGER_TYPE_LEDGER
    """Its owner, who deletes it"""
    OFFLOADED_LEDGER = ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER
    """An object store"""


class DeletionState(enum.IntEnum):
    """The progress of a deletion."""

    WAITING = ledger_deletion_pb2.Deletion.STATE_WAITING
    """It waits for its next attempt."""
    BEGUN = ledger_deletion_pb2.Deletion.STATE_BEGUN
    """An attempt is in flight, or was when a daemon ended."""
    GIVEN_UP = ledger_deletion_pb2.Deletion.STATE_GIVEN_UP
    """A dead letter"""
    ENDED = ledger_deletion_pb2.Deletion.STATE_ENDED


class DeletionOutcome(enum.IntEnum):
    """The result of a deletion that ended."""

    DELETED = ledger_deletion_pb2.Deletion.OUTCOME_DELETED
    ALREADY_GONE = ledger_deletion_pb2.Deletion.OUTCOME_ALREADY_GONE
    IN_USE = ledger_deletion_pb2.Deletion.OUTCOME_IN_USE
    """It was not deleted. If its owner recorded it with `record_in_use`, it is pending again when that is withdrawn."""
    METADATA_MISMATCH = ledger_deletion_pb2.Deletion.OUTCOME_METADATA_MISMATCH
    """The ledger differs from the record; it was not deleted."""
    MALFORMED = ledger_deletion_pb2.Deletion.OUTCOME_MALFORMED
    """The store cannot interpret the record."""


class RefusalReason(enum.IntEnum):
    """A reason why a deletion was not recorded."""

    MALFORMED = ledger_deletion_pb2.RefusedDelete.REASON_MALFORMED
    """A field is missing, wrong or not allowed."""
    DISABLED = ledger_deletion_pb2.RefusedDelete.REASON_DISABLED
    """The topic's policy has `two_phase_deletion_enabled` off."""


@dataclasses.dataclass(frozen=True)
class OffloadContext:
    """The location of an offloaded ledger. Example: `OffloadContext(offload_uuid, "aws-s3", {"bucket": "archive"})`."""

    uuid: uuid.UUID
    """Part of the names of the two objects"""
    driver_name: str
    """Object store, named as in the daemon's `deletion.object_stores`"""
    # Excluded from the hash, because a mapping has none
    driver_metadata: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """The driver's metadata of the location, such as `bucket`"""

    def to_message(self) -> ledger_deletion_pb2.OffloadContext:
        """Return the message. Raises TypeError or ValueError if a field cannot hold a value."""
        msb, lsb = uuid_halves(self.uuid)
        return ledger_deletion_pb2.OffloadContext(
            uuid_msb=msb, uuid_lsb=lsb, driver_name=self.driver_name, driver_metadata=self.driver_metadata
        )

    @staticmethod
    def from_message(message: ledger_deletion_pb2.OffloadContext) -> OffloadContext:
        return OffloadContext(
            uuid.UUID(int=message.uuid_msb << _HALF_BITS | message.uuid_lsb),
            message.driver_name,
            dict(sorted(message.driver_metadata.items())),
        )


@dataclasses.dataclass(frozen=True)
class PendingDelete:
    """A ledger of a topic to delete (PIP-186, PendingDeleteLedgerInfo); by default one of its message ledgers.

    A ledger that exists both as a ledger and as an offloaded one takes two.
    Examples: `PendingDelete(7)`, `PendingDelete(8, LedgerComponent.MANAGED_CURSOR, cursor_name="departures")`,
    `PendingDelete(7, ledger_type=LedgerType.OFFLOADED_LEDGER, offload_context=OffloadContext(offload_uuid, "aws-s3"))`.
    """

    ledger_id: int
    component: LedgerComponent = LedgerComponent.MANAGED_LEDGER
    ledger_type: LedgerType = LedgerType.LEDGER
    cursor_name: str | None = None
    """Required for a MANAGED_CURSOR and not allowed elsewhere"""
    schema_id: str | None = None
    """Required for SCHEMA_STORAGE and not allowed elsewhere"""
    offload_context: OffloadContext | None = None
    """Required for an OFFLOADED_LEDGER and not allowed elsewhere"""

    def to_message(self) -> ledger_deletion_pb2.PendingDelete:
        """Return the message. Raises TypeError or ValueError if a field cannot hold a value."""
        return ledger_deletion_pb2.PendingDelete(
            component=LedgerComponent(self.component).value,
            cursor_name=self.cursor_name or "",
            schema_id=self.schema_id or "",
            ledger_type=LedgerType(self.ledger_type).value,
            ledger_id=self.ledger_id,
            offload_context=None if self.offload_context is None else self.offload_context.to_message(),
        )

    @staticmethod
    def from_message(message: ledger_deletion_pb2.PendingDelete) -> PendingDelete:
        offloaded = message.offload_context if message.HasField("offload_context") else None
        return PendingDelete(
            ledger_id=message.ledger_id,
            component=_member(LedgerComponent, message.component),
            ledger_type=_member(LedgerType, message.ledger_type),
            cursor_name=message.cursor_name or None,
            schema_id=message.schema_id or None,
            offload_context=None if offloaded is None else OffloadContext.from_message(offloaded),
        )


@dataclasses.dataclass(frozen=True)
class RefusedDelete:
    """A deletion that was not recorded: its ledger must stay in the owner's metadata."""

    delete: PendingDelete
    reason: RefusalReason
    text: str
    """Explanation for people"""


@dataclasses.dataclass(frozen=True)
class RecordedDeletes:
    """The result of recording deletions."""

    recorded: tuple[PendingDelete, ...]
    """Durable: these ledgers may leave the owner's metadata now."""
    already_recorded: tuple[PendingDelete, ...]
    """Those of `recorded` that had been recorded before and are not over"""
    refused: tuple[RefusedDelete, ...]

    def remaining(self, ledger_ids: Iterable[int]) -> list[int]:
        """Return the ledgers of a topic that must stay in its metadata, in the given order.

        Only ledgers whose given deletions were all recorded may leave.
        Example: `client.record_pending_deletes("flights", [tarry.PendingDelete(1)]).remaining([1, 2, 3])`
        """
        leaving = {each.ledger_id for each in self.recorded} - {each.delete.ledger_id for each in self.refused}
        return [ledger_id for ledger_id in ledger_ids if ledger_id not in leaving]

    @staticmethod
    def from_message(
        message: ledger_deletion_pb2.RecordPendingDeletesResponse, given: Sequence[PendingDelete]
    ) -> RecordedDeletes:
        """Read the answer to a request with the `given` deletions."""
        refused = {
            each.index: RefusedDelete(given[each.index], _member(RefusalReason, each.reason), each.text)
            for each in message.refused
        }
        recorded = tuple(each for index, each in enumerate(given) if index not in refused)
        if len(recorded) != message.recorded:
            # An owner that drops an unrecorded ledger would lose it.
            raise errors.Internal(f"of {len(given)} deletions {message.recorded} are recorded, {len(refused)} refused")
        return RecordedDeletes(
            recorded, tuple(given[index] for index in message.already_recorded), tuple(refused.values())
        )

    @staticmethod
    def merge(parts: Sequence[RecordedDeletes]) -> RecordedDeletes:
        """Combine the results of several requests."""
        return RecordedDeletes(
            recorded=tuple(each for part in parts for each in part.recorded),
            already_recorded=tuple(each for part in parts for each in part.already_recorded),
            refused=tuple(each for part in parts for each in part.refused),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class InUseRecorded:
    """The result of recording ledgers as in use."""

    __repr__ = columns.short_repr

    recorded: int
    """Ledgers that count as in use now: no deletion of them begins."""
    being_deleted_index: NDArray[np.int64]
    """Indexes of ledgers recorded too late: their deletion has begun, and they must not be used."""

    @staticmethod
    def from_message(message: ledger_deletion_pb2.RecordInUseResponse) -> InUseRecorded:
        return InUseRecorded(message.recorded, wire.decode_indexes(message.being_deleted))

    @staticmethod
    def merge(parts: Sequence[tuple[int, InUseRecorded]]) -> InUseRecorded:
        """Combine the results of several requests, each with the index of its first ledger."""
        return InUseRecorded(
            recorded=sum(part.recorded for _, part in parts),
            being_deleted_index=np.concatenate([part.being_deleted_index + first for first, part in parts]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeletionFilter:
    """A filter of deletions; all given fields must match.

    Example: `DeletionFilter(topic="flights", ledger_type=tarry.LedgerType.OFFLOADED_LEDGER)`.
    """

    topic: str | None = None
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletion_ids: Sequence[str] | None = None
    """Their `deletion_id`s, in any order"""


@dataclasses.dataclass(frozen=True)
class Deletion:
    """A recorded deletion and its state."""

    deletion_id: str
    """Unique among all deletions"""
    topic: str
    pending_delete: PendingDelete
    recorded_at_ms: int
    by_sweeper: bool
    """True if a sweep found it"""
    state: DeletionState
    outcome: DeletionOutcome | None
    """None until it has ended"""
    failures: int
    """Attempts that failed"""
    next_attempt_at_ms: int | None
    """Unix time of the next attempt (ms); None if it is not waiting"""
    maybe_deleted: bool
    """An attempt without an answer may have deleted something, so the ledger can no longer be in use."""
    ended_at_ms: int | None
    """Unix time when it ended or was given up (ms)"""
    text: str
    """The last explanation: why an attempt failed, or what did not match"""

    @staticmethod
    def from_message(message: ledger_deletion_pb2.Deletion) -> Deletion:
        return Deletion(
            deletion_id=message.deletion_id,
            topic=message.topic,
            pending_delete=PendingDelete.from_message(message.pending_delete),
            recorded_at_ms=message.recorded_at_ms,
            by_sweeper=message.by_sweeper,
            state=_member(DeletionState, message.state),
            outcome=_member(DeletionOutcome, message.outcome) if message.outcome else None,
            failures=message.failures,
            next_attempt_at_ms=message.next_attempt_at_ms or None,
            maybe_deleted=message.maybe_deleted,
            ended_at_ms=message.ended_at_ms or None,
            text=message.text,
        )


@dataclasses.dataclass(frozen=True)
class DeletionPage(inspection.Page[Deletion]):
    """Deletions, shard by shard; pending ones in the order in which they were recorded."""

    @staticmethod
    def from_message(message: DeletionsMessage) -> DeletionPage:
        return DeletionPage(
            tuple(Deletion.from_message(each) for each in message.deletions), message.next_page_token, message.as_of_ms
        )


@dataclasses.dataclass(frozen=True)
class DeletionCount:
    """Counts of the deletions of one component and type."""

    component: LedgerComponent
    ledger_type: LedgerType
    in_flight: int
    oldest_ms: int | None
    given_up: int
    held: int

    @staticmethod
    def from_message(message: ledger_deletion_pb2.DeletionCount) -> DeletionCount:
        return DeletionCount(
            component=_member(LedgerComponent, message.component),
            ledger_type=_member(LedgerType, message.ledger_type),
            in_flight=message.in_flight,
            oldest_ms=message.oldest_ms or None,
            given_up=message.given_up,
            held=message.held,
        )


@dataclasses.dataclass(frozen=True)
class DeletionStats:
    """Counts of deletions."""

    in_flight: int
    """Deletions that are not over, without held ones; 0 means that all are over (PIP-186,
    getEstimatedInflightDeletionLedgerCount).
    """
    begun: int
    """Those of `in_flight` with an attempt that has begun"""
    oldest_ms: int | None
    """Unix time when the oldest of them was recorded or retried (ms)"""
    given_up: int
    """Dead letters, which are over"""
    held: int
    """Deletions that ended because the owner recorded the ledger as in use (`record_in_use`); pending again when the
    owner withdraws that
    """
    in_use: int
    """Ledgers that their owners recorded as in use"""
    counts: tuple[DeletionCount, ...]
    """By component and type, without empty ones"""
    as_of_ms: int

    @staticmethod
    def from_message(message: ledger_deletion_pb2.GetDeletionStatsResponse) -> DeletionStats:
        return DeletionStats(
            in_flight=message.in_flight,
            begun=message.begun,
            oldest_ms=message.oldest_ms or None,
            given_up=message.given_up,
            held=message.held,
            in_use=message.in_use,
            counts=tuple(DeletionCount.from_message(each) for each in message.counts),
            as_of_ms=message.as_of_ms,
        )


@dataclasses.dataclass(frozen=True)
class OrphanedLedger:
    """An offloaded ledger that no record names and no topic uses."""

    topic: str
    pending_delete: PendingDelete
    """The deletion that would be recorded"""
    size_bytes: int
    """Size of all its objects (bytes)"""
    modified_ms: int
    """Unix time when the youngest object was written (ms)"""
    unknown_topic: bool
    """True if the ledgers in use of its topic were never recorded"""

    @staticmethod
    def from_message(message: ledger_deletion_pb2.OrphanedLedger) -> OrphanedLedger:
        return OrphanedLedger(
            topic=message.topic,
            pending_delete=PendingDelete.from_message(message.pending_delete),
            size_bytes=message.size_bytes,
            modified_ms=message.modified_ms,
            unknown_topic=message.unknown_topic,
        )


@dataclasses.dataclass(frozen=True)
class SweptObjects:
    """A number of objects and their size (bytes)."""

    objects: int
    size_bytes: int

    @staticmethod
    def from_message(message: ledger_deletion_pb2.SweptObjects) -> SweptObjects:
        return SweptObjects(message.objects, message.size_bytes)


@dataclasses.dataclass(frozen=True)
class SweepCounts:
    """The counts of a sweep so far. Fields are those of `tarry.v1.SweepCounts`."""

    listed: SweptObjects
    foreign: SweptObjects
    in_use: SweptObjects
    recorded: SweptObjects
    young: SweptObjects
    orphaned: SweptObjects
    of_unknown_topics: SweptObjects
    unidentified: SweptObjects
    unanswered: SweptObjects
    ledgers_recorded: int
    """Ledgers whose deletion this sweep has recorded"""
    ledgers_left: int
    """Ledgers whose deletion it should have recorded but has not"""

    @staticmethod
    def from_message(message: ledger_deletion_pb2.SweepCounts) -> SweepCounts:
        ledgers: dict[str, Any] = {"ledgers_recorded": message.ledgers_recorded, "ledgers_left": message.ledgers_left}
        objects: dict[str, Any] = {
            field.name: SweptObjects.from_message(getattr(message, field.name))
            for field in dataclasses.fields(SweepCounts)
            if field.name not in ledgers
        }
        return SweepCounts(**objects, **ledgers)


@dataclasses.dataclass(frozen=True)
class SweepStep:
    """The progress of a sweep."""

    orphans: tuple[OrphanedLedger, ...]
    """Found since the step before"""
    counts: SweepCounts
    """Counts so far"""
    done: bool
    """True for the last step"""
    refused: str
    """Reason why nothing was recorded; empty if there is none"""

    @staticmethod
    def from_message(message: ledger_deletion_pb2.SweepOrphansResponse) -> SweepStep:
        return SweepStep(
            orphans=tuple(OrphanedLedger.from_message(each) for each in message.orphans),
            counts=SweepCounts.from_message(message.counts),
            done=message.done,
            refused=message.refused,
        )


def uuid_halves(value: uuid.UUID | None) -> tuple[int, int]:
    """Return the most and the least significant half; 0 and 0 for None."""
    return (0, 0) if value is None else (value.int >> _HALF_BITS, value.int & _HALF_MASK)


def _member(kind: type[E], number: int) -> E:
    try:
        return kind(number)
    except ValueError:
        raise errors.Internal(f"{kind.__name__} is {number}; this version of the client does not know it") from None
