"""Positions compared over all indexes of a topic."""

from __future__ import annotations

import numpy as np

from daemon.core.index.position_keys import KeyedRows, PositionOrder, are_greater
from storage_backends.formats.index_ids import batch_parts_of, part_entry_id
from tests.daemon.core.key_shared._support.keyed import Keyed

SUBSCRIPTION = 3


def some_rows() -> tuple[PositionOrder, KeyedRows]:
    """(1:5), its messages 0 and 2, (1:4) and (0:9), in another order."""
    whole = Keyed()
    parts = Keyed(whole.places, owner=batch_parts_of(SUBSCRIPTION))
    part_ids = part_entry_id(np.array([5, 5], np.uint64), np.array([2, 0], np.uint32)).tolist()
    rows = KeyedRows.concat(
        [
            parts.rows([((1, each), 1) for each in part_ids]),
            whole.rows([((1, 5), 1), ((0, 9), 1), ((1, 4), 1)]),
        ]
    )
    return PositionOrder(whole.places), rows


def test_messages_of_a_batch_stand_behind_their_entry_in_their_order() -> None:
    order, rows = some_rows()
    ledger_id, entry_id, message = order.columns(order.ordered(rows))
    assert list(zip(ledger_id.tolist(), entry_id.tolist(), message.tolist(), strict=True)) == [
        (0, 9, 0),
        (1, 4, 0),
        (1, 5, 0),
        (1, 5, 1),
        (1, 5, 3),
    ]


def test_a_position_is_greater_by_ledger_then_entry_then_message_and_never_than_itself() -> None:
    order, rows = some_rows()
    columns = order.columns(order.ordered(rows))
    for place in range(len(rows)):
        others = [np.repeat(column[place], len(rows)) for column in columns]
        assert are_greater(columns, others).tolist() == [each > place for each in range(len(rows))]
