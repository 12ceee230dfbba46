"""Damaged buckets: neither read nor deleted; what is missing with them, until it is added again.

Owns: what is missing of one damaged bucket, and what was added or left since.
Does not own: finding damage (the engine), the manifest's mark (`storage_backends.topic_manifest`), and the rows that
were added again (`mutable_bucket`).

A quarantined bucket holds no row: its positions may be added again, and what is added is missing no longer. It goes on
learning what leaves, so that its stored progress, which is that of any bucket, says what is missing after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.index.bucket import Bucket, GoneSet
from daemon.core.index.positions import PAGE_BITS, PageTable, pages_of, within
from storage_backends.formats.manifest import LiveBucket

_PAGE_LAST = (1 << PAGE_BITS) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class RebuildNeeded:
    """Rows of a range of ledgers that were lost with a damaged bucket and are to be added again.

    `rows`: not gone and not added since. `damage`: what was found. `positions_known`: whether it is known which
    positions are missing; if not, `rows` counts any position of these ledgers that is added.
    """

    first_ledger_id: int
    last_ledger_id: int
    rows: int
    bucket: str
    damage: str
    positions_known: bool


class QuarantinedBucket(Bucket):
    """One damaged bucket of the topic's manifest. `present`: the positions that are missing, empty where nobody knows
    them; nothing of it is due.

    `gone`, `acknowledged`: as stored, or as the bucket had them when it was found to be damaged.
    """

    def __init__(
        self,
        live: LiveBucket,
        *,
        present: BitMap64 | None,
        gone: GoneSet,
        acknowledged: dict[int, BitMap64],
        pages: PageTable,
    ) -> None:
        """`present`: None where the bucket's head cannot be read."""
        super().__init__(live.object.name, BitMap64() if present is None else present, gone, live.subscription_id)
        self.live = live
        self.acknowledged = acknowledged
        self.positions_known = present is not None
        self._pages = pages
        # Of a page of which nothing is missing nothing is asked again, unless nobody knows what is missing.
        kept = (self.present,) if self.positions_known else (*gone.freeze(), *acknowledged.values())
        self.pages = BitMap.union(*map(pages_of, kept)) if kept else BitMap()
        pages.hold(self.pages)

    @property
    def missing_rows(self) -> int:
        if self.positions_known:
            return self.present_rows
        return max(0, self.live.rows - (0 if self.gone is None else len(self.gone)))

    def rebuild_needed(self) -> RebuildNeeded:
        return RebuildNeeded(
            first_ledger_id=self.live.first_ledger_id,
            last_ledger_id=self.live.last_ledger_id,
            rows=self.missing_rows,
            bucket=self.name,
            damage=self.live.damage,
            positions_known=self.positions_known,
        )

    def missing(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are missing here, or that count as such: any position of its ledgers that is not
        gone, where nobody knows. Positions that another bucket holds are not to be asked for."""
        if self.positions_known:
            return self.present & keys
        if not self.missing_rows:
            return BitMap64()
        first, last = self.live.first_ledger_id, self.live.last_ledger_id
        own = [page for page in pages_of(keys) if first <= self._pages.ledger_of(page) <= last]
        named = within(keys, [(page << PAGE_BITS, page << PAGE_BITS | _PAGE_LAST) for page in own])
        for part in self.gone.freeze() if self.gone is not None else ():
            named -= part
        return named

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        """Positions are missing no longer: added again, or gone."""
        if self.positions_known:
            return super().remove(keys)
        hit = self.missing(keys)
        if hit and self.gone is not None:
            fresh_pages = pages_of(hit) - self.pages
            self._pages.hold(fresh_pages)
            self.pages |= fresh_pages
            self.gone.add(hit)
        # Also when none is missing any more: what was acknowledged here says nothing of a row that was added since.
        for acknowledged in self.acknowledged.values():
            acknowledged -= keys
        return hit, 0

    def stand_in(self) -> BitMap64:
        """Positions of its first ledger, to be made gone in place of those that are missing and nobody knows.

        That is right only when every position of its ledgers leaves.
        """
        if self.positions_known or not self.missing_rows or self.gone is None:
            return BitMap64()
        nothing = np.zeros(1, np.uint64)
        first_key = int(self._pages.intern(nothing + np.uint64(self.live.first_ledger_id), nothing)[0])
        keys = BitMap64()
        keys.add_range(first_key, first_key + self.missing_rows + len(self.gone))
        return keys

    def release_pages(self) -> None:
        """The bucket is no more; call once."""
        self._pages.release(self.pages)


def added_again(damaged: Collection[QuarantinedBucket], added: BitMap64, slot: int) -> None:
    """Positions were added in a slot: they are missing no longer. They are new rows, owed to every subscription."""
    for bucket in damaged:
        if bucket.positions_known or slot > bucket.live.quarantined_slot:
            bucket.remove(added)


def learns_positions(damaged: Collection[QuarantinedBucket]) -> bool:
    """Whether positions of pages that no bucket holds may say something of one of these."""
    return any(not bucket.positions_known and bucket.missing_rows for bucket in damaged)


def rebuild_needed(damaged: Iterable[QuarantinedBucket]) -> tuple[RebuildNeeded, ...]:
    """The buckets of which rows are missing, by their ledgers."""
    needed = (bucket.rebuild_needed() for bucket in damaged if bucket.missing_rows)
    return tuple(sorted(needed, key=lambda each: (each.first_ledger_id, each.last_ledger_id, each.bucket)))
