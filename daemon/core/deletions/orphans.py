"""Decides which listed offloaded ledgers are orphans.

`daemon.ledger_deletion.sweeping` lists, asks the store and the owners, and records.

The first of these conditions that holds decides; a ledger without any is an orphan:

- a report says that the ledger is in use, it has a record, or it is young
- its metadata does not say whose it is
- its owner does not answer, or says that it is in use
- the owner never reported all that its topic uses

So a ledger that is in use stays, whatever its metadata claims.

A store lists in any order. A listed object waits for the other one of its ledger until the listing ends, unless the
ledger is in use or recorded. Memory is that of the waiting ledgers.
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
"""Orphans that one sweep records; further ones are only counted and reported."""

WAITING_MAX: Final = 100_000
"""Ledgers of which one object was listed and the other was not yet"""


# ---- counting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepCounts:
    """The results of a sweep so far; fields as in `tarry.v1.SweepCounts`."""

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
    """The finding on a ledger. The value is its count in `SweepCounts`."""

    IN_USE = "in_use"
    RECORDED = "recorded"
    YOUNG = "young"
    ORPHANED = "orphaned"
    OF_UNKNOWN_TOPIC = "of_unknown_topics"
    UNIDENTIFIED = "unidentified"
    # The owner or the store did not give the required answer.
    UNANSWERED = "unanswered"
    # Listed, but gone since: counts only as `listed`.
    GONE = ""


# ---- ledgers


@dataclasses.dataclass(frozen=True, slots=True)
class ListedLedger:
    """The listed objects of an offloaded ledger: its data, its index or both.

    `size_bytes` is their total size. `modified_ms` is when the younger one was written, by the store's clock (Unix ms).
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
        """Merge what else was listed of it. Some stores list an object twice while its folder changes."""
        if other.is_whole:
            return other
        if self.is_whole or self.has_data == other.has_data:
            return self
        size_bytes, modified_ms = self.size_bytes + other.size_bytes, max(self.modified_ms, other.modified_ms)
        return ListedLedger(self.name, True, True, size_bytes, modified_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class ListedPage:
    """A part of a listing: counts of all objects and of foreign ones, and the ledgers."""

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
    """Ledgers of which one object was listed and that wait for the other one."""

    def __init__(self, waiting_max: int = WAITING_MAX) -> None:
        self._waiting_max = waiting_max
        self._waiting: dict[OffloadedName, ListedLedger] = {}

    def add(self, ledgers: Iterable[ListedLedger]) -> list[ListedLedger]:
        """Add ledgers; return those that are whole now. Raise QuotaExceeded if more than `waiting_max` wait."""
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
        """Yield the ledgers that still wait, `portion` at a time. Call this after the whole listing."""
        while self._waiting:
            yield [self._waiting.popitem()[1] for _ in range(min(portion, len(self._waiting)))]


def is_young(ledger: ListedLedger, now_ms: int, grace_ms: int) -> bool:
    """Return whether it may still be on its way into its owner's metadata."""
    return ledger.modified_ms > now_ms - grace_ms


# ---- answers of the store and the owner


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerClaim:
    """An offloaded ledger according to its own metadata, as it would be recorded."""

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
    """Derive the claim from the metadata of the two objects, each None if the object does not exist now.

    `place` describes what is swept, without a UUID. Returns YOUNG if an object exists that was not listed, so it was
    written since. Returns UNIDENTIFIED if the metadata names no owner, or different ones, or could not be recorded.
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
    """Check the claim like a request, since any program may have written the metadata."""
    try:
        limits.check_name("topic", claim.topic, topic_bytes_max)
        deletion_checks.check_topic(claim.topic)
        deletion_checks.check_pending_delete(claim.pending_delete)
    except InvalidArgument:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class OrphanedLedger:
    """A ledger that a sweep found orphaned, as `tarry.v1.OrphanedLedger`.

    `size_bytes` is the total size of its objects, and `modified_ms` is when the youngest was written (Unix ms).
    `unknown_topic` is whether its owner never reported everything in use of the topic.
    """

    topic: str
    pending_delete: PendingDelete
    size_bytes: int
    modified_ms: int
    unknown_topic: bool


# ---- guards


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Limits on orphans: beyond both a share of the listed bytes and a size (bytes), a mistake is more likely."""

    share: float
    size_bytes: int

    def refusal(self, found: ObjectCount, listed: ObjectCount) -> str:
        """Return why nothing is recorded; empty if nothing speaks against it."""
        if found.size_bytes <= self.size_bytes or found.size_bytes <= self.share * listed.size_bytes:
            return ""
        return (
            f"{found.objects} orphaned objects of {found.size_bytes} bytes are more than {self.share:g} of the "
            f"{listed.size_bytes} bytes listed, and more than {self.size_bytes} bytes: nothing was recorded"
        )


class Tally:
    """The counts of a sweep in progress."""

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
