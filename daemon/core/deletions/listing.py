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

from daemon.core.deletions.kept import KeptDeletions
from storage_backends.formats.deletions import Deletion, LedgerComponent, LedgerType

# Deletions that are looked at for one page, whatever the filter leaves of them.
LOOKED_AT_MAX = 10_000


class ListedState(enum.Enum):
    # They wait, or an attempt has begun.
    PENDING = enum.auto()
    # Given up.
    DEAD = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionFilter:
    """Those that everything that is given holds for. `topic`: empty for every one."""

    topic: str = ""
    component: LedgerComponent | None = None
    ledger_type: LedgerType | None = None
    ledger_id: int | None = None
    deletion_ids: frozenset[int] | None = None

    def holds_for(self, deletion: Deletion) -> bool:
        delete = deletion.pending_delete
        return (
            self.topic in ("", deletion.topic)
            and self.component in (None, delete.component)
            and self.ledger_type in (None, delete.ledger_type)
            and self.ledger_id in (None, delete.ledger_id)
            and (self.deletion_ids is None or deletion.deletion_id in self.deletion_ids)
        )


ALL = DeletionFilter()


def page(
    deletions: KeptDeletions, ids: BitMap64, wanted: DeletionFilter, after_id: int, limit: int
) -> tuple[list[Deletion], int | None]:
    """Of `ids` those above `after_id` that the filter holds for, ascending, at most `limit`; and the `after_id` of the
    next page, None when there is none. Looks at a bounded number: a page may be short, or empty, and yet have a next.
    """
    found: list[Deletion] = []
    looked_at = after_id
    for deletion_id in islice(_above(ids, wanted, after_id), LOOKED_AT_MAX):
        deletion = deletions[deletion_id]
        if wanted.holds_for(deletion):
            if len(found) == limit:
                return found, looked_at
            found.append(deletion)
        looked_at = deletion_id
    more = next(_above(ids, wanted, looked_at), None) is not None
    return found, looked_at if more else None


def _above(ids: BitMap64, wanted: DeletionFilter, after_id: int) -> Iterator[int]:
    if wanted.deletion_ids is None:
        return iter(ids.iter_equal_or_larger(after_id + 1))
    return iter(sorted(each for each in wanted.deletion_ids if each > after_id and each in ids))
