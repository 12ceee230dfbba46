"""Merges the decisions of many slots, so that replay applies few large ones: an ordinary service has a slot a row.

Owns: which decisions of neighbouring slots may be applied as one, and in which order then.
Does not own: what a decision does when it is applied (`daemon.core.decisions.topic`), and merging within a slot
(`SlotBuilder` of `storage_backends.formats.slot_format`).

Only adds and acknowledgements are merged, in runs that nothing else interrupts. Within a run the adds come first: those
of different positions commute, and an acknowledgement of a position never overtakes its add. A position that is added
again after its acknowledgement ends the run before that add.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_backends.formats import slot_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, AddRecord, Record

# Records that are looked at together. More would hardly be faster, and are in memory twice.
RUN_RECORDS_MAX = 5_000

Decided: TypeAlias = tuple[int, Record]


def merged(decided: Iterable[Decided], *, created_slots: Iterable[int]) -> Iterator[Decided]:
    """The decisions of one topic, slot by slot, as fewer ones that lead to the same state; each with its last slot.

    `created_slots`: of its subscriptions; a decision is about those alone that were created in a slot below its own.
    """
    borders = sorted(created_slots)

    def run_of(one: Decided) -> tuple[bool, int]:
        slot, record = one
        return isinstance(record, AddRecord | AcknowledgeRecord), bisect_left(borders, slot)

    for (may_merge, _), run in itertools.groupby(decided, run_of):
        if not may_merge:
            yield from run
            continue
        while part := list(itertools.islice(run, RUN_RECORDS_MAX)):
            while part:
                end = _first_added_again(part)
                yield from _as_few(part[:end])
                part = part[end:]


def _as_few(run: Sequence[Decided]) -> Iterator[Decided]:
    slot = run[-1][0]
    for kind in (AddRecord, AcknowledgeRecord):
        groups: dict[tuple[object, ...], list[Record]] = {}
        for _, record in run:
            if isinstance(record, kind):
                groups.setdefault(slot_format.merge_key(record), []).append(record)
        for records in groups.values():
            yield slot, slot_format.merged(records)


def _first_added_again(run: Sequence[Decided]) -> int:
    """The place of the first add of a position that an earlier record of the run acknowledges; else their number."""
    records = [record for _, record in run]
    rows = [record.rows for record in records if isinstance(record, AddRecord | AcknowledgeRecord)]
    place = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    is_add = np.repeat([isinstance(record, AddRecord) for record in records], [len(each) for each in rows])
    if is_add.all() or not is_add.any():
        return len(run)
    order, begins = _by_position(rows)
    place, is_add = place[order], is_add[order]
    first_left = np.minimum.reduceat(np.where(is_add, len(run), place), begins)
    again = is_add & (place > np.repeat(first_left, np.diff(begins, append=len(place))))
    return int(place[again].min()) if again.any() else len(run)


def _by_position(rows: Sequence[Rows]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The order by position of all rows, and where each position begins in it."""
    ledger_id = np.concatenate([each.ledger_id for each in rows])
    entry_id = np.concatenate([each.entry_id for each in rows])
    order = np.lexsort((entry_id, ledger_id))
    ledger_id, entry_id = ledger_id[order], entry_id[order]
    other = np.ones(len(order), dtype=np.bool_)
    other[1:] = (ledger_id[1:] != ledger_id[:-1]) | (entry_id[1:] != entry_id[:-1])
    return order, np.flatnonzero(other)
