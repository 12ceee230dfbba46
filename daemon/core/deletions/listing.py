"""Which deletions are asked for.

Owns: the filter, and finding what it holds for, page by page.
Does not own: the deletions (`kept`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from itertools import islice

from pyroaring import BitMap64

from daemon.core.deletions.kept import KeptDeletions, Kind
from storage_backends.formats.deletion_format import Deletion, LedgerComponent, LedgerType

# Deletions that are looked at for one page, whatever the filter leaves of them.
LOOKED_AT_MAX = 1_000
_ID_MAX = (1 << 64) - 1


class ListedState(enum.Enum):
    # They wait, or an attempt has begun.
    PENDING = enum.auto()
    # Given up.
    DEAD = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionFilter:
    """A choice of deletions: everything that is given holds for them. `topic`: empty for every one."""

    topic: str = ""
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletion_ids: frozenset[int] | None = None

    def holds_for_kind(self, kind: Kind) -> bool:
        """Whether the filter admits a kind, by its topic, component and type; the ledger and the
        ids are not looked at.
        """
        return (
            self.topic in ("", kind.topic)
            and self.component in (None, kind.component)
            and self.ledger_type in (None, kind.ledger_type)
        )


ALL = DeletionFilter()


def page(
    deletions: KeptDeletions, ids: BitMap64, wanted: DeletionFilter, after_id: int, limit: int
) -> tuple[list[Deletion], int | None]:
    """Those of `ids` above `after_id` that the filter holds for, ascending, at most `limit`; and the `after_id` of the
    next page, None when there is none. Looks at a bounded number: a page may be short, or empty, and yet have a next.
    """
    found: list[Deletion] = []
    looked_at = after_id
    kinds: dict[int, bool] = {}
    for deletion_id in islice(_above(ids, wanted, after_id), LOOKED_AT_MAX):
        kind = deletions.kind_number_of(deletion_id)
        is_wanted = kinds.get(kind)
        if is_wanted is None:
            is_wanted = kinds[kind] = wanted.holds_for_kind(deletions.kind(kind))
        if is_wanted and wanted.ledger_id in (None, deletions.ledger_id_of(deletion_id)):
            if len(found) == limit:
                return found, looked_at
            found.append(deletions[deletion_id])
        looked_at = deletion_id
    more = next(_above(ids, wanted, looked_at), None) is not None
    return found, looked_at if more else None


def _above(ids: BitMap64, wanted: DeletionFilter, after_id: int) -> Iterator[int]:
    if after_id >= _ID_MAX:
        return iter(())
    if wanted.deletion_ids is None:
        return iter(ids.iter_equal_or_larger(after_id + 1))
    return iter(sorted(each for each in wanted.deletion_ids if each > after_id and each in ids))
