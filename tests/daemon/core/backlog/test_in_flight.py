"""The table of what was handed out, against a dict."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.backlog import in_flight
from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.position_keys import KeyedRows, keys_of
from storage_backends.formats.row_columns import U32, U64, Rows

keys = st.integers(0, 30)
actions = st.one_of(
    st.tuples(st.just("add"), st.sets(keys, min_size=1, max_size=9), st.integers(1, 3)),
    st.tuples(st.just("add to several"), st.sets(keys, min_size=1, max_size=9), st.integers(1, 3)),
    st.tuples(st.just("take"), st.lists(st.tuples(keys, st.integers(0, 1)), min_size=1, max_size=9), st.just(0)),
    st.tuples(st.just("move"), st.lists(st.tuples(keys, st.integers(0, 1)), min_size=1, max_size=9), st.integers(1, 3)),
    st.tuples(st.just("take whole"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.just("take together"), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.just(0)),
    st.tuples(st.just("close"), st.just(()), st.integers(1, 3)),
    st.tuples(st.just("withdraw"), st.sets(keys, max_size=5), st.just(0)),
)


def taken_of(table: InFlight, keys: U64, deliver_at_ms: U64) -> list[bool]:
    """Takes positions; which of them were there."""
    taken = table.take(keys, deliver_at_ms)
    return [True] * len(keys) if taken is None else taken.tolist()


class Watching:
    """Who holds what, by what a watcher is told."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def came(self, rows: KeyedRows, dispatchers: U32) -> None:
        self.held |= dict(zip(rows.keys.tolist(), dispatchers.tolist(), strict=True))

    def claimed(self, rows: KeyedRows, dispatchers: U32) -> None:
        for key, number in zip(rows.keys.tolist(), dispatchers.tolist(), strict=True):
            assert self.held.pop(key) == number

    returned = taken_back = claimed


def rows_of(chosen: list[int], deliver_at_ms: list[int]) -> KeyedRows:
    column = np.array(chosen, np.uint64)
    return KeyedRows(Rows(np.array(deliver_at_ms, np.uint64), column, column), column)


@pytest.mark.parametrize("batches_max", [2, in_flight.BATCHES_MAX])
@given(steps=st.lists(actions, max_size=40))
def test_the_table_is_a_dict_from_position_to_time_and_dispatcher(
    batches_max: int, steps: list[tuple[str, object, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "BATCHES_MAX", batches_max)
        check(steps)


def check(steps: list[tuple[str, object, int]]) -> None:
    table, expected = InFlight(), dict[int, tuple[int, int]]()
    watching = table.watcher = Watching()
    handed_out: list[KeyedRows] = []
    for step, (action, argument, dispatcher) in enumerate(steps):
        if action.startswith("add"):
            fresh = [key for key in argument if key not in expected]  # type: ignore[attr-defined]
            if fresh:
                several = action == "add to several"
                holders = {key: 1 + (key + dispatcher) % 3 if several else dispatcher for key in fresh}
                handed_out.append(rows_of(fresh[::-1], [step + key for key in fresh[::-1]]))
                column = np.array([holders[key] for key in fresh[::-1]], np.uint32)
                table.add(handed_out[-1], column if several else dispatcher)
                expected |= {key: (step + key, holders[key]) for key in fresh}
        elif action == "take whole":
            if handed_out:
                batch = handed_out[argument % len(handed_out)]  # type: ignore[operator]
                times = batch.rows.deliver_at_ms + np.uint64(dispatcher)
                claims = list(zip(batch.keys.tolist(), times.tolist(), strict=True))
                wanted = [key in expected and expected[key][0] == time for key, time in claims]
                assert taken_of(table, batch.keys, times) == wanted
                expected = {key: each for key, each in expected.items() if (key, each[0]) not in claims}
        elif action == "take together":
            if handed_out:
                batches = [handed_out[number % len(handed_out)] for number in argument]  # type: ignore[attr-defined]
                batch = KeyedRows.concat(batches)
                wanted = []
                for claim in zip(batch.keys.tolist(), batch.rows.deliver_at_ms.tolist(), strict=True):
                    wanted.append(claim[0] in expected and expected[claim[0]][0] == claim[1])
                    if wanted[-1]:
                        del expected[claim[0]]
                assert taken_of(table, batch.keys, batch.rows.deliver_at_ms) == wanted
        elif action == "take":
            claims = [(key, expected.get(key, (7, 0))[0] + off) for key, off in argument]  # type: ignore[attr-defined]
            wanted = []
            for key, time in claims:
                wanted.append(key in expected and expected[key][0] == time)
                if wanted[-1]:
                    del expected[key]
            assert taken_of(table, *np.array(claims, np.uint64).T) == wanted
        elif action == "move":
            claims = [(key, expected.get(key, (7, 0))[0] + off) for key, off in argument]  # type: ignore[attr-defined]
            # Of whoever is not the one that it goes to.
            others = {1, 2, 3} - {dispatcher}
            moved = {key for key, time in claims if key in expected and expected[key][0] == time}
            moved = {key for key in moved if expected[key][1] in others}
            named, times = np.array(claims, np.uint64).T
            assert np.count_nonzero(table.move(named, times, others, dispatcher)) == len(moved)
            expected |= {key: (expected[key][0], dispatcher) for key in moved}
            # A watcher is not told: what is watched is not moved.
            watching.held |= dict.fromkeys(moved, dispatcher)
        elif action == "close":
            taken = table.take_dispatcher(dispatcher)
            held = {key: time for key, (time, by) in expected.items() if by == dispatcher}
            assert dict(zip(taken.keys.tolist(), taken.rows.deliver_at_ms.tolist(), strict=True)) == held
            expected = {key: each for key, each in expected.items() if each[1] != dispatcher}
        else:
            taken = table.take_keys(BitMap64(argument))  # type: ignore[arg-type]
            assert set(taken.keys.tolist()) == expected.keys() & argument  # type: ignore[operator]
            expected = {key: each for key, each in expected.items() if key not in argument}  # type: ignore[operator]
        assert len(table) == len(expected)
        assert watching.held == {key: by for key, (_, by) in expected.items()}
        named = np.arange(31, dtype=np.uint64)
        if action == "move":
            assert table.holders_of(named).tolist() == [expected.get(key, (0, 0))[1] for key in range(31)]
        holders_of = [by for _, by in expected.values()]
        assert [table.held_rows(number) for number in (1, 2, 3)] == [holders_of.count(number) for number in (1, 2, 3)]
        assert keys_of(table.keys()).tolist() == sorted(expected)
        for delivered in handed_out[-3:]:
            claims = list(zip(delivered.keys.tolist(), delivered.rows.deliver_at_ms.tolist(), strict=True))
            for number in (1, 2, 3):
                still = table.are_held(delivered, np.full(len(delivered), number, np.uint32))
                assert still.tolist() == [expected.get(key) == (time, number) for key, time in claims]
        for asked in (range(31), range(0, 31, 2), ()):
            assert set(table.among(BitMap64(asked))) == expected.keys() & set(asked)
        assert table.first_due_ms() == min((time for time, _ in expected.values()), default=None)


def test_a_delivery_is_held_with_its_count_and_no_other() -> None:
    table, one = InFlight(), np.ones(2, np.uint32)
    again = dataclasses.replace(rows_of([4, 5], [7, 7]), redelivery_count=np.array([0, 2], np.uint32))
    table.add(again, 1)
    assert table.are_held(again, one).tolist() == [True, True]
    assert table.are_held(rows_of([4, 5], [7, 7]), one).tolist() == [True, False]
    table.take(np.array([4], np.uint64), np.array([7], np.uint64))
    assert table.are_held(again, one).tolist() == [False, True]
    assert table.are_held(KeyedRows.empty(), np.empty(0, np.uint32)).tolist() == []
