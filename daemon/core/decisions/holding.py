"""What a dispatcher that comes back may go on with.

Owns: which rows the positions are that it declares to hold, by their times and their redelivery counts.
Does not own: finding rows of the backlog (`claims`), and holding them (`topic`, `key_shared_backlogs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from daemon.core.backlog.in_flight import Mask, Places
from daemon.core.decisions.claims import HeldPositions, claimed_in
from daemon.core.decisions.ignored import are_kept_back
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.index import Index
from daemon.core.index.positions import KeyedRows, contained


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Claimed:
    """Rows that claims are for: `claims`, the place of the claim of each row, of `claims_count`."""

    rows: KeyedRows
    claims: Places
    claims_count: int

    def of_claims(self, of_rows: Mask) -> Mask:
        """What holds of rows, of the claims that are for them; of the others it does not."""
        of_claims = np.zeros(self.claims_count, np.bool_)
        of_claims[self.claims] = of_rows
        return of_claims


def rows_claimed(
    indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions, found: KeyedRows
) -> Claimed:
    """The rows that claims are for, with the count that was named, and that do not wait for a NACKED row of their key.

    `indexes`: those that the rows may be in, in the order in which they are asked. `found`: of `find_in_backlog`. Of
    claims for one row the first one counts.
    """
    kept_back = are_kept_back(state, found)

    def fits(rows: KeyedRows, named: HeldPositions) -> Mask:
        free = ~contained(rows.keys, kept_back)
        if named.redelivery_count is None:
            return free
        same: Mask = state.counted(rows).counts() == named.redelivery_count
        return free & same

    parts, places, left = [KeyedRows.empty()], [np.empty(0, np.intp)], claims
    for index in indexes:
        rows, taken, left = claimed_in(index, left, found, fits)
        parts.append(rows)
        places.append(taken.places())
    return Claimed(KeyedRows.concat(parts), np.concatenate(places), len(claims))
