"""Numbers the indexes of a topic, and the messages of a batch.

0 is the shared index, a subscription's id its own one, and that plus 2^63 the one of its batch parts: there a position
is one message of an entry, with the entry id `entry_id * 2^16 + batch_index`. Positions of one entry are neighbours
there, in the order of entries.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from storage_backends.formats.row_columns import U32, U64

SHARED: Final = 0
_BATCH_PARTS: Final = 1 << 63
# The owner of planned positions without a row, which is no index. Subscriptions are counted up from 1 and do not come
# so far, and it is none of batch parts: its positions are whole entries.
PLANNED_OWNER: Final = _BATCH_PARTS - 1
# The whole entry, in a column with a batch index for each row
NO_BATCH_INDEX: Final = (1 << 32) - 1
BATCH_BITS: Final = 16
BATCH_INDEX_MAX: Final = (1 << BATCH_BITS) - 1
# Parts of entries beyond cannot be named.
BATCHED_ENTRY_ID_MAX: Final = (1 << (64 - BATCH_BITS)) - 1


def batch_parts_of(subscription_id: int) -> int:
    """Return the index of a subscription's batch parts."""
    return subscription_id | _BATCH_PARTS


def subscription_of(index_id: int) -> int:
    """Return the subscription whose index it is, or 0 for the shared one."""
    return index_id & ~_BATCH_PARTS


def is_of_batch_parts(index_id: int) -> bool:
    return bool(index_id & _BATCH_PARTS)


def are_of_batch_parts(index_ids: U64) -> npt.NDArray[np.bool_]:
    """Return a mask of the indexes of batch parts in a column of index ids."""
    return (index_ids >> np.uint64(63)).astype(np.bool_)


def serves(index_id: int, subscription_id: int) -> bool:
    """Return whether a subscription is owed rows of the index."""
    return index_id in (SHARED, subscription_id, batch_parts_of(subscription_id))


def part_entry_id(entry_id: U64, batch_index: U32) -> U64:
    """Return the entry ids of batch parts."""
    return (entry_id << np.uint64(BATCH_BITS)) | batch_index.astype(np.uint64)


def of_part(entry_id: U64) -> tuple[U64, U32]:
    """Return (entry_id, batch_index) of batch parts."""
    return entry_id >> np.uint64(BATCH_BITS), (entry_id & np.uint64(BATCH_INDEX_MAX)).astype(np.uint32)
