"""What a listing of offloaded ledgers comes to: which of them nobody knows.

Owns: how listed objects make ledgers, what is found of each, the counts, and when so much is orphaned that it is more
likely a mistake.
Does not own: listing, asking the store and the owners, what is recorded and in use, and recording
(`daemon.ledger_deletion.sweeping`); the objects' names (`object_names`) and their metadata (`metadata`).

The first of these that holds counts: somebody says that the ledger is in use, it has a record, it is young, its
metadata does not say whose it is, its owner does not answer, or says that it is in use; nobody ever said what is in use
of its topic. Otherwise it is an orphan. So a ledger that is in use stays whatever its metadata claims.

A store lists in any order. What has been seen of a ledger waits for its other object until the listing ends; what is in
use or recorded is not waited for. Memory is that of ledgers that wait.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from daemon.core import limits
from daemon.core.deletions import deletion_checks, ledger_metadata
from daemon.core.deletions.ledger_metadata import OffloadedName
from daemon.core.garbage_rules import NOTHING, ObjectCount
from daemon.errors import InvalidArgument, QuotaExceeded
from storage_backends.formats.deletion_format import LedgerType, OffloadContext, PendingDelete
from storage_backends.object_store import ListedObject

ORPHANS_MAX: Final = 100_000
"""Orphans that one sweep records; it counts and tells those beyond."""

WAITING_MAX: Final = 100_000
"""Ledgers of which one object was listed, and not yet the other."""


# ---- counting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepCounts:
    """What a sweep found so far; fields as in `tarry.v1.SweepCounts`."""

    listed: ObjectCount = NOTHING
    foreign: ObjectCount = NOTHING
    in_use: ObjectCount = NOTHING
    recorded: ObjectCount = NOTHING
    young: ObjectCount = NOTHING
    orphaned: ObjectCount = NOTHING
    of_unknown_topics: ObjectCount = NOTHING
    unidentified: ObjectCount = NOTHING
    unanswered: ObjectCount = NOTHING
    ledgers_recorded: int = 0
    ledgers_left: int = 0


class Finding(enum.Enum):
    """What is found of a ledger. The value is its count in `SweepCounts`."""

    IN_USE = "in_use"
    RECORDED = "recorded"
    YOUNG = "young"
    ORPHANED = "orphaned"
    OF_UNKNOWN_TOPIC = "of_unknown_topics"
    UNIDENTIFIED = "unidentified"
    # Its owner, or the store, did not say what it must say.
    UNANSWERED = "unanswered"
    # It was listed and is not there any more: no count but `listed`.
    GONE = ""


# ---- ledgers


@dataclasses.dataclass(frozen=True, slots=True)
class ListedLedger:
    """What was listed of an offloaded ledger: its data, its index or both. `size_bytes`: of these together.
    `modified_ms`: when the younger one was written, by the store's clock.
    """

    name: OffloadedName
    has_data: bool
    has_index: bool
    size_bytes: int
    modified_ms: int

    @property
    def is_whole(self) -> bool:
        return self.has_data and self.has_index

    @property
    def swept(self) -> ObjectCount:
        return ObjectCount(self.has_data + self.has_index, self.size_bytes)

    def with_other(self, other: ListedLedger) -> ListedLedger:
        """With what else was listed of it. Some stores show an object twice while its folder changes."""
        if other.is_whole:
            return other
        if self.is_whole or self.has_data == other.has_data:
            return self
        size_bytes, modified_ms = self.size_bytes + other.size_bytes, max(self.modified_ms, other.modified_ms)
        return ListedLedger(self.name, True, True, size_bytes, modified_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class ListedPage:
    """A part of a listing: everything, what is no offloaded ledger's, and the ledgers."""

    listed: ObjectCount
    foreign: ObjectCount
    ledgers: Sequence[ListedLedger]

    @classmethod
    def of(cls, entries: Iterable[ListedObject]) -> ListedPage:
        listed = foreign = NOTHING
        ledgers: dict[OffloadedName, ListedLedger] = {}
        for entry in entries:
            each = ObjectCount(1, entry.size_bytes)
            listed += each
            name = ledger_metadata.parse(entry.key)
            if name is None:
                foreign += each
                continue
            is_index = entry.key == name.index
            ledger = ListedLedger(name, not is_index, is_index, entry.size_bytes, entry.modified_ms)
            seen = ledgers.get(name)
            ledgers[name] = ledger if seen is None else seen.with_other(ledger)
        return cls(listed, foreign, tuple(ledgers.values()))


class Pairing:
    """Ledgers of which one object was listed wait here for the other one."""

    def __init__(self, waiting_max: int = WAITING_MAX) -> None:
        self._waiting_max = waiting_max
        self._waiting: dict[OffloadedName, ListedLedger] = {}

    def add(self, ledgers: Iterable[ListedLedger]) -> list[ListedLedger]:
        """Adds orphans that are whole now. Raises QuotaExceeded when more than `waiting_max` wait."""
        whole = []
        for ledger in ledgers:
            seen = self._waiting.pop(ledger.name, None)
            paired = ledger if seen is None else seen.with_other(ledger)
            if paired.is_whole:
                whole.append(paired)
            else:
                self._waiting[ledger.name] = paired
        if len(self._waiting) > self._waiting_max:
            raise QuotaExceeded(
                f"prefix: of more than {self._waiting_max} ledgers that are neither in use nor recorded one object was "
                "listed and not the other; sweep with longer prefixes, such as the first digits of the UUID",
                retry_after_ms=None,
            )
        return whole

    def rest(self, portion: int) -> Iterator[list[ListedLedger]]:
        """When everything was listed: those of which one object was, some at a time."""
        while self._waiting:
            yield [self._waiting.popitem()[1] for _ in range(min(portion, len(self._waiting)))]


def is_young(ledger: ListedLedger, now_ms: int, grace_ms: int) -> bool:
    """Whether it may be on its way into its owner's metadata."""
    return ledger.modified_ms > now_ms - grace_ms


# ---- what the store and the owner say


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerClaim:
    """What an offloaded ledger is by its own metadata, as it would be recorded."""

    topic: str
    pending_delete: PendingDelete


def claim_of(
    ledger: ListedLedger,
    data: Mapping[str, str] | None,
    index: Mapping[str, str] | None,
    place: OffloadContext,
    *,
    topic_bytes_max: int,
) -> LedgerClaim | Finding:
    """What the metadata of its two objects says that it is; None: there is no such object now. `place`: of what is
    swept, without a UUID.

    YOUNG: an object is there that was not listed, so that it was written since. UNIDENTIFIED: they do not say whose
    they are, or not the same, or something that could not be recorded.
    """
    if (data is not None and not ledger.has_data) or (index is not None and not ledger.has_index):
        return Finding.YOUNG
    identities = {ledger_metadata.identify(each) for each in (data, index) if each is not None}
    if not identities:
        return Finding.GONE
    identity = identities.pop()
    if identity is None or identities:
        return Finding.UNIDENTIFIED
    name = ledger.name
    delete = PendingDelete(
        component=identity.component,
        ledger_type=LedgerType.OFFLOADED_LEDGER,
        ledger_id=name.ledger_id,
        cursor_name=identity.cursor_name,
        offload_context=dataclasses.replace(place, uuid_msb=name.uuid_msb, uuid_lsb=name.uuid_lsb),
    )
    claim = LedgerClaim(identity.topic, delete)
    return claim if _may_be_recorded(claim, topic_bytes_max) else Finding.UNIDENTIFIED


def _may_be_recorded(claim: LedgerClaim, topic_bytes_max: int) -> bool:
    """Anybody may have written the metadata."""
    try:
        limits.check_name("topic", claim.topic, topic_bytes_max)
        deletion_checks.check_topic(claim.topic)
        deletion_checks.check_pending_delete(claim.pending_delete)
    except InvalidArgument:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class OrphanedLedger:
    """A ledger that a sweep found orphaned, as `tarry.v1.OrphanedLedger`. `size_bytes`: of its objects together,
    `modified_ms`: when the youngest was written, `unknown_topic`: its owner never said all that is in use of the topic.
    """

    topic: str
    pending_delete: PendingDelete
    size_bytes: int
    modified_ms: int
    unknown_topic: bool


# ---- guards


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Orphans that exceed both, as a share of the bytes listed and in bytes, are more likely a mistake."""

    share: float
    size_bytes: int

    def refusal(self, found: ObjectCount, listed: ObjectCount) -> str:
        """Why nothing is recorded; empty when nothing stands against it."""
        if found.size_bytes <= self.size_bytes or found.size_bytes <= self.share * listed.size_bytes:
            return ""
        return (
            f"{found.objects} orphaned objects of {found.size_bytes} bytes are more than {self.share:g} of the "
            f"{listed.size_bytes} bytes listed, and more than {self.size_bytes} bytes: nothing was recorded"
        )


class Tally:
    """The counts of a sweep while it goes on."""

    def __init__(self) -> None:
        self._counts: dict[str, ObjectCount] = {}
        self.ledgers_recorded = 0
        self.ledgers_left = 0

    def listed(self, page: ListedPage) -> None:
        self._add("listed", page.listed)
        self._add("foreign", page.foreign)

    def found(self, finding: Finding, objects: ObjectCount) -> None:
        if finding is not Finding.GONE:
            self._add(finding.value, objects)

    def counts(self) -> SweepCounts:
        return SweepCounts(**self._counts, ledgers_recorded=self.ledgers_recorded, ledgers_left=self.ledgers_left)

    def _add(self, name: str, objects: ObjectCount) -> None:
        self._counts[name] = self._counts.get(name, NOTHING) + objects
