"""Positions that were planned: their keys, and whose plans they are."""

from __future__ import annotations

import numpy as np

from daemon.core.index.position_keys import UNKNOWN_KEY, PagePlaces, PageTable, bitmap_of
from daemon.core.key_shared import key_share
from daemon.core.key_shared.key_share import PlannedPositions
from storage_backends.formats.index_ids import PLANNED_OWNER
from storage_backends.formats.row_columns import U64
from tests.daemon.core._support.journaled_topic import Position

A, B = 1, 2


def columns(*positions: Position) -> tuple[U64, U64]:
    return np.array([at[0] for at in positions], np.uint64), np.array([at[1] for at in positions], np.uint64)


def plan(planned: PlannedPositions, stream: int, *positions: Position) -> U64:
    keys = planned.intern(*columns(*positions))
    planned.add(stream, keys)
    return keys


def test_a_planned_position_has_another_key_than_a_row_of_it() -> None:
    places = PagePlaces()
    planned = PlannedPositions(places)
    row_key = PageTable(places).intern(*columns((1, 5)))
    (key,) = plan(planned, A, (1, 5))
    assert key != row_key[0]
    assert places.owners(np.array([key]))[0] == PLANNED_OWNER
    assert planned.are_planned(np.array([row_key[0], key, UNKNOWN_KEY])).tolist() == [False, True, False]
    assert [column.tolist() for column in planned.positions(planned.keys)] == [[1], [5]]


def test_a_position_of_which_nothing_is_known_is_not_planned() -> None:
    planned = PlannedPositions(PagePlaces())
    assert not planned.were_any
    assert planned.find(*columns((1, 5))).tolist() == [UNKNOWN_KEY]
    plan(planned, A, (1, 6))
    assert planned.were_any
    assert not planned.are_planned(planned.find(*columns((1, 5), (2, 6)))).any()


def test_a_stream_that_closes_takes_what_no_other_one_planned() -> None:
    planned = PlannedPositions(PagePlaces())
    both, alone = plan(planned, A, (1, 1), (1, 2)).tolist()
    plan(planned, B, (1, 1), (1, 3))
    assert [*planned.close(A)] == [alone]
    planned.settle(bitmap_of(np.array([alone], np.uint64)))
    assert both in planned.close(B)
    assert not planned.close(A)


def test_what_is_settled_is_nobodys_plan_any_more() -> None:
    planned = PlannedPositions(PagePlaces())
    keys = plan(planned, A, (1, 1), (1, 2))
    planned.settle(bitmap_of(keys[:1]))
    assert len(planned) == 1
    assert planned.close(A) == bitmap_of(keys[1:])


def test_ledgers_of_which_nothing_is_planned_any_more_are_forgotten() -> None:
    planned = PlannedPositions(PagePlaces())
    ledgers = 4 * key_share._PAGES_SLACK
    for ledger in range(ledgers):
        keys = plan(planned, A, (ledger, 1))
        planned.settle(bitmap_of(keys))
    (kept,) = plan(planned, A, (ledgers, 1)).tolist()
    known = [ledger for ledger in range(ledgers) if planned.find(*columns((ledger, 1)))[0] != UNKNOWN_KEY]
    assert len(known) <= key_share._PAGES_SLACK + 1
    assert planned.find(*columns((ledgers, 1))).tolist() == [kept]
