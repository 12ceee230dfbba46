"""What a dispatcher that comes back may go on with.

Owns: which rows the positions are that it declares to hold, by their times and their redelivery counts.
Does not own: finding rows of the backlog (`claims`), and holding them (`topic`, `key_sharing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from daemon.core.claims import HeldPositions, matched
from daemon.core.ignored import are_kept_back
from daemon.core.in_flight import Mask, Places
from daemon.core.index import Index
from daemon.core.positions import KeyedRows, contained
from daemon.core.subscription_state import SubscriptionState


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
    parts, named = [KeyedRows.empty()], [np.empty(0, np.intp)]
    left = claims
    kept_back = are_kept_back(state, found)
    for index in indexes:
        keys = left.keys_in(index)
        _, here = matched(keys, left.deliver_at_ms, found)
        here &= ~contained(keys, kept_back)
        if left.redelivery_count is not None:
            counts = state.counts.of(keys)
            here &= left.redelivery_count == (0 if counts is None else counts)
        hits = np.flatnonzero(here)
        hits = hits[np.sort(np.unique(keys[hits], return_index=True)[1])]
        parts.append(matched(keys[hits], left.deliver_at_ms[hits], found)[0])
        named.append(left.places()[hits])
        left = left.take(np.delete(np.arange(len(left)), hits))
    return Claimed(KeyedRows.concat(parts), np.concatenate(named), len(claims))
