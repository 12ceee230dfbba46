"""What callers pass in and get back about deletions of ledgers.

Owns: the shapes of the calls.
Does not own: their meaning (`daemon.core.deletions`), what is stored (`storage_backends.formats.deletion_format`) and
the wire (`daemon.grpc_services`).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from daemon.core.deletions.orphans import OrphanedLedger, SweepCounts
from storage_backends.formats.deletion_format import Deletion, LedgerComponent, LedgerType

__all__ = [
    "DeletionCount",
    "DeletionFilter",
    "DeletionPage",
    "DeletionPlace",
    "DeletionStats",
    "InUseRecorded",
    "ListedDeletion",
    "OrphanedLedger",
    "RecordedDeletes",
    "Refusal",
    "RefusedDelete",
    "SweepCounts",
    "SweepProgress",
    "SweepWish",
]


class DeletionPlace(NamedTuple):
    """Names a deletion among all."""

    shard: int
    deletion_id: int


class Refusal(enum.Enum):
    """Why a delete was not recorded."""

    MALFORMED = "malformed"
    DISABLED = "disabled"


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedDelete:
    """A delete that was not recorded. `index`: its place in the request. `text`: for people."""

    index: int
    reason: Refusal
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedDeletes:
    """`recorded`: how many are durable, those that were recorded before included; `already_recorded`: these, by their
    places in the request, ascending, as `refused`.
    """

    recorded: int
    already_recorded: tuple[int, ...] = ()
    refused: tuple[RefusedDelete, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class InUseRecorded:
    """`recorded`: ledgers of the request that count as in use; `being_deleted`: those that do not, by their rows."""

    recorded: int
    being_deleted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionFilter:
    """Which deletions are meant: every field narrows. `topic`: empty = all. `deletions`: these alone."""

    topic: str = ""
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletions: frozenset[DeletionPlace] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ListedDeletion:
    """A deletion, and where it is."""

    shard: int
    deletion: Deletion


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionPage:
    """`deletions`: by shard, then in the order in which they were recorded. `next_after`: None on the last page."""

    deletions: tuple[ListedDeletion, ...]
    next_after: DeletionPlace | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionCount:
    """How many deletions there are of one component and type. `oldest_ms`: when the oldest in flight was recorded or
    retried, 0: there is none.
    """

    component: LedgerComponent
    ledger_type: LedgerType
    in_flight: int
    oldest_ms: int
    given_up: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionStats:
    """`in_flight`: what is not over; dead letters are. `begun`: of these, those whose attempt has begun. `held`: what
    ended as its owner states that the ledger is in use. `in_use`: ledgers that are, as their owners say. `counts`: of
    components and types that have any.
    """

    in_flight: int
    begun: int
    oldest_ms: int
    given_up: int
    held: int
    in_use: int
    counts: tuple[DeletionCount, ...]
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class SweepWish:
    """Fields as in `tarry.v1.SweepOrphansRequest`; `grace_ms`: None = what the configuration says."""

    store: str
    prefix: str = ""
    grace_ms: int | None = None
    delete: bool = False
    unknown_topics: bool = False
    force: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is; fields as in `tarry.v1.SweepOrphansResponse`."""

    orphans: tuple[OrphanedLedger, ...]
    counts: SweepCounts
    done: bool = False
    refused: str = ""
