"""Defines the findings of an audit and its report as JSON.

It has the kinds of findings with their meanings, and limits how many of a kind are listed. The command makes the tables
for people.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from types import MappingProxyType
from typing import Any, Final

REPORT_VERSION: Final = 1

FINDINGS_MAX: Final = 1000
"""Most findings of a kind that are listed; beyond that they are counted."""


class Severity(enum.StrEnum):
    """The weight of a finding.

    `error` means that something is lost, damaged, or was never allowed; `warning`, that an operator should check it;
    `info`, that it happens normally.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Kind(enum.StrEnum):
    """The kinds of defects of a root."""

    DAMAGED = "damaged"
    DISAGREES = "disagrees"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    NEWER = "newer"
    CHAIN_BROKEN = "chain_broken"
    CHAIN_RULE = "chain_rule"
    MANIFEST_MISSING = "manifest_missing"
    NO_MANIFEST = "no_manifest"
    SLOT_MISSING = "slot_missing"
    LOG_RULE = "log_rule"
    BEYOND_LOG = "beyond_log"
    POSITION_TWICE = "position_twice"
    QUARANTINED = "quarantined"
    ROWS_UNACCOUNTED = "rows_unaccounted"
    TOMBSTONE_OVERDUE = "tombstone_overdue"
    TOMBSTONE_GONE = "tombstone_gone"
    GIVEN_UP = "given_up"
    ORPHAN = "orphan"
    UNNAMED = "unnamed"
    FOREIGN = "foreign"


MEANING: Final = MappingProxyType(
    {
        Kind.DAMAGED: "its bytes are not those written",
        Kind.DISAGREES: "it is whole, but differs from what the object that names it says",
        Kind.MISSING: "a manifest names it, but it does not exist",
        Kind.UNREADABLE: "the store did not return it: the audit is incomplete",
        Kind.NEWER: "only a newer release reads it: the audit is incomplete",
        Kind.CHAIN_BROKEN: "a manifest does not continue the one before it",
        Kind.CHAIN_RULE: "a manifest contradicts the one before it",
        Kind.MANIFEST_MISSING: "a manifest that must be kept is missing",
        Kind.NO_MANIFEST: "there are objects, but no manifest",
        Kind.SLOT_MISSING: "a slot or section that a shard needs is missing",
        Kind.LOG_RULE: "a slot of a log contradicts the one before it",
        Kind.BEYOND_LOG: "a manifest knows more than its log or shard ever had, or less than the log has",
        Kind.POSITION_TWICE: "two live buckets of one index hold the same row",
        Kind.QUARANTINED: "a bucket was found damaged: its rows are not served",
        Kind.ROWS_UNACCOUNTED: "rows that exist nowhere else: gone since, or lost",
        Kind.TOMBSTONE_OVERDUE: "it left its manifest long ago, and still exists",
        Kind.TOMBSTONE_GONE: "it left its manifest, and was deleted before its grace was over",
        Kind.GIVEN_UP: "its deletion failed too often, and was given up",
        Kind.ORPHAN: "no manifest will ever name it: collection deletes it",
        Kind.UNNAMED: "no manifest names it yet: it is in flight, or abandoned",
        Kind.FOREIGN: "it is no object of a root",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A defect of an object.

    `object` is a key. `topic` is a name, or an id if the name is unknown, or "" without a topic. `shard` is -1 without
    a shard. `offset` counts in the object's bytes, or is None if that has no meaning.
    """

    kind: Kind
    severity: Severity
    object: str
    detail: str
    shard: int = -1
    topic: str = ""
    offset: int | None = None

    def as_json(self) -> dict[str, Any]:
        found = {
            "severity": self.severity.value,
            "kind": self.kind.value,
            "object": self.object,
            "topic": self.topic or None,
            "shard": None if self.shard < 0 else self.shard,
            "detail": self.detail,
        }
        return found if self.offset is None else found | {"offset": self.offset}


@dataclasses.dataclass(frozen=True, slots=True)
class Flaw:
    """A defect of something that was read, before its weight is known."""

    kind: Kind
    detail: str
    offset: int | None = None


@dataclasses.dataclass(slots=True)
class Tally:
    """The findings and counts of a part of an audit.

    `objects` and `size_bytes` count what was read, by kind. `rows` counts those of decoded buckets. `moved_on` counts
    objects that were named or listed, and had left when they were read.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    objects: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    size_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter[tuple[Kind, Severity]] = dataclasses.field(default_factory=collections.Counter)
    rows: int = 0
    moved_on: int = 0

    def find(self, found: Finding) -> None:
        """Count a finding, and list it while there are not too many of its kind."""
        self.kinds[found.kind, found.severity] += 1
        if self._count(found.kind) <= FINDINGS_MAX:
            self.findings.append(found)

    def _count(self, kind: Kind) -> int:
        return sum(self.kinds[kind, severity] for severity in Severity)

    def saw(self, what: str, size_bytes: int) -> None:
        """Count an object that was read in full."""
        self.objects[what] += 1
        self.size_bytes[what] += size_bytes

    def add(self, other: Tally) -> None:
        """Add the findings and counts of another part."""
        room = {kind: FINDINGS_MAX - self._count(kind) for kind in Kind}
        for found in other.findings:
            if room[found.kind] > 0:
                self.findings.append(found)
                room[found.kind] -= 1
        self.kinds.update(other.kinds)
        self.objects.update(other.objects)
        self.size_bytes.update(other.size_bytes)
        self.rows += other.rows
        self.moved_on += other.moved_on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of an audit of a root. `sample` is the part of the live buckets that was read in full."""

    store: str
    engine: str
    started_ms: int
    seconds: float
    sample: float
    shards: int
    topics: int
    tally: Tally

    @property
    def errors(self) -> int:
        return self.count(Severity.ERROR)

    def count(self, severity: Severity) -> int:
        """Count the findings of this severity, including those that are not listed."""
        return sum(count for (_, found), count in self.tally.kinds.items() if found is severity)

    def in_order(self) -> list[Finding]:
        """Return the findings that are listed, the worst first."""
        rank = list(Severity)
        kinds = list(Kind)
        return sorted(
            self.tally.findings, key=lambda each: (rank.index(each.severity), kinds.index(each.kind), each.object)
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it; its keys are documented and stay."""
        tally = self.tally
        counts: collections.Counter[str] = collections.Counter()
        for (kind, _), count in tally.kinds.items():
            counts[kind.value] += count
        listed = collections.Counter(found.kind.value for found in tally.findings)
        return {
            "version": REPORT_VERSION,
            "store": self.store,
            "engine": self.engine,
            "started_ms": self.started_ms,
            "seconds": round(self.seconds, 3),
            "sample": self.sample,
            "shards": self.shards,
            "topics": self.topics,
            "objects": tally.objects.total(),
            "bytes": tally.size_bytes.total(),
            "rows": tally.rows,
            "by_object": {
                what: {"objects": count, "bytes": tally.size_bytes[what]}
                for what, count in sorted(tally.objects.items())
            },
            "moved_on": tally.moved_on,
            "errors": self.count(Severity.ERROR),
            "warnings": self.count(Severity.WARNING),
            "infos": self.count(Severity.INFO),
            "counts": dict(sorted(counts.items())),
            "left_out": {kind: count - listed[kind] for kind, count in sorted(counts.items()) if count > listed[kind]},
            "findings": [found.as_json() for found in self.in_order()],
        }
