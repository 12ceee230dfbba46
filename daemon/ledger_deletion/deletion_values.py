"""Defines the values that callers pass and get about deletions of ledgers.

Their meaning is in `daemon.core.deletions`, stored forms in `storage_backends.formats.deletion_format`.
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
    """The name of a deletion among those of all shards."""

    shard: int
    deletion_id: int


class Refusal(enum.Enum):
    """The reason why a delete was not recorded."""

    MALFORMED = "malformed"
    DISABLED = "disabled"


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedDelete:
    """A delete that was not recorded. `index` is its place in the request, and `text` explains it."""

    index: int
    reason: Refusal
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedDeletes:
    """The outcome of recording deletes: `recorded` are durable now, including those that were before.

    `already_recorded` has the places of the latter in the request; these and `refused` ascend.
    """

    recorded: int
    already_recorded: tuple[int, ...] = ()
    refused: tuple[RefusedDelete, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class InUseRecorded:
    """The outcome of recording ledgers in use.

    `recorded` counts those in force, and `being_deleted` has the rows of the others.
    """

    recorded: int
    being_deleted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionFilter:
    """A filter of deletions, narrowed by every field. An empty `topic` means all; `deletions` selects these only."""

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
    """A page of deletions, by shard, then in the order of recording. `next_after` is None on the last page."""

    deletions: tuple[ListedDeletion, ...]
    next_after: DeletionPlace | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionCount:
    """The number of deletions of one component and type.

    `oldest_ms` is when the oldest in flight was recorded or retried (Unix ms), 0 if there is none.
    """

    component: LedgerComponent
    ledger_type: LedgerType
    in_flight: int
    oldest_ms: int
    given_up: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionStats:
    """Counts of deletions.

    `in_flight` ones are not over (dead letters are), and an attempt of the `begun` ones has begun. `held` ones ended
    because their owner reports the ledger in use. `in_use` counts ledgers that owners report. `counts` has the
    components and types with any deletions.
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
    """The parameters of a sweep, as in `tarry.v1.SweepOrphansRequest`.

    A `grace_ms` of None means the configured one.
    """

    store: str
    prefix: str = ""
    grace_ms: int | None = None
    delete: bool = False
    unknown_topics: bool = False
    force: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SweepProgress:
    """The progress of a sweep; fields as in `tarry.v1.SweepOrphansResponse`."""

    orphans: tuple[OrphanedLedger, ...]
    counts: SweepCounts
    done: bool = False
    refused: str = ""
