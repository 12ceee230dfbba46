"""Rows that may not be stored leave a request that wants them back, and the others are decided on as if alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core import limits
from daemon.core.decisions import add_decisions
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome, RefusedReason
from daemon.core.index.delay_levels import DelayLevels, parse
from daemon.errors import DelayTooLong, InvalidArgument
from storage_backends.formats.slot_format import AddRecord
from tests.daemon.core._support.journaled_topic import JournaledTopic
from tests.planted import registry

NOW_MS = 1_795_000_000_000
MAX_MS = 10_000
# Requests that a planted bug may take to be found.
PLANTED_EXAMPLES_MAX = 400
LIMITS = limits.RequestLimits(1000, 1000, 255, 10, MAX_MS)
# The last level is above the largest delay.
TABLE = parse("1s 5s 1m", clamp=False, delay_max_ms=60_000)
CLAMPED = dataclasses.replace(TABLE, clamp=True)

LONG, SECONDS, LEVEL = RefusedReason.DELAY_TOO_LONG, RefusedReason.TIME_IN_SECONDS, RefusedReason.DELAY_LEVEL
# Values of a row, each with the reason for which it is refused.
VALUES: dict[str, list[tuple[int, RefusedReason | None]]] = {
    "deliver_at_ms": [
        (NOW_MS + 5_000, None),
        (NOW_MS + MAX_MS, None),
        (NOW_MS, None),
        (NOW_MS + 50, None),
        (10**9 - 1, None),
        (978_307_200_000, None),
        (NOW_MS + MAX_MS + 1, LONG),
        (2**64 - 1, LONG),
        (10**9, SECONDS),
        (NOW_MS // 1000, SECONDS),
        (978_307_199_999, SECONDS),
    ],
    "delay_ms": [(0, None), (5, None), (MAX_MS, None), (MAX_MS + 1, LONG), (2**64 - 1, LONG)],
    "delay_level": [(0, None), (1, None), (2, None), (3, LONG), (4, LEVEL), (2**31 - 1, LEVEL), (-1, LEVEL)],
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: (entry, value, reason for which the row is refused) of each row."""

    column: str
    rows: list[tuple[int, int, RefusedReason | None]]
    return_already_due: bool
    subscription_id: int

    def batch(self, places: Sequence[int], *, return_invalid: bool) -> AddBatch:
        values = [self.rows[place][1] for place in places]
        dtype = np.int32 if self.column == "delay_level" else np.uint64
        columns: dict[str, Any] = dict.fromkeys(VALUES) | {self.column: np.array(values, dtype)}
        entries = [self.rows[place][0] for place in places]
        return AddBatch(
            ledger_id=np.full(len(places), 7, np.uint64),
            entry_id=np.array(entries, np.uint64),
            key_hash=np.array(entries, np.uint32),
            return_already_due=self.return_already_due,
            return_invalid=return_invalid,
            **columns,
        )

    @property
    def valid(self) -> list[int]:
        return [place for place, (_, _, reason) in enumerate(self.rows) if reason is None]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    column = draw(st.sampled_from(sorted(VALUES)))
    row = st.tuples(st.integers(0, 9), st.sampled_from(VALUES[column]))
    rows = [(entry, *value) for entry, value in draw(st.lists(row, min_size=1, max_size=12))]
    return Asked(column, rows, draw(st.booleans()), draw(st.integers(0, 1)))


def topic(*, shared_index: bool = True) -> JournaledTopic:
    """It has rows of two entries; its second subscription was created 100 ms ahead: what is earlier is raised."""
    one = JournaledTopic(now_ms=NOW_MS + 100)
    one.create_subscription()
    one.create_subscription()
    one.add([(7, 3), (7, 8)], NOW_MS + 500)
    one.now_ms = NOW_MS
    one.shared_index = shared_index
    return one


def staged(
    one: JournaledTopic, batch: AddBatch, subscription_id: int, levels: DelayLevels = TABLE
) -> tuple[tuple[AddRecord, ...], AddOutcome]:
    return one.core.stage_add(
        batch,
        now_ms=NOW_MS,
        request_limits=LIMITS,
        subscription_id=subscription_id,
        shared_index=one.shared_index,
        levels=levels,
    )


def listed(records: Sequence[AddRecord]) -> list[tuple[object, ...]]:
    return [
        (
            record.subscription_id,
            record.delay_level,
            record.rows.entry_id.tolist(),
            record.rows.deliver_at_ms.tolist(),
            None if record.rows.key_hash is None else record.rows.key_hash.tolist(),
        )
        for record in records
    ]


def store_the_others_as_if_alone(asked: Asked, shared_index: bool) -> None:
    whole, alone = topic(shared_index=shared_index), topic(shared_index=shared_index)
    records, outcome = staged(whole, asked.batch(range(len(asked.rows)), return_invalid=True), asked.subscription_id)
    reasons = [reason for _, _, reason in asked.rows]
    assert outcome.refused.index.tolist() == [place for place, reason in enumerate(reasons) if reason is not None]
    assert outcome.refused.reason.tolist() == [reason for reason in reasons if reason is not None]

    valid = asked.valid
    if not valid:
        assert (records, outcome.accepted, outcome.duplicates, outcome.late_on_arrival) == ((), 0, 0, 0)
        return
    expected_records, expected = staged(alone, asked.batch(valid, return_invalid=False), asked.subscription_id)
    assert listed(records) == listed(expected_records)
    for name in ("accepted", "duplicates", "late_on_arrival"):
        assert getattr(outcome, name) == getattr(expected, name), name
    assert outcome.returned_index.tolist() == [valid[place] for place in expected.returned_index]
    assert outcome.raised_index.tolist() == [valid[place] for place in expected.raised_index]
    assert outcome.raised_deliver_at_ms.tolist() == expected.raised_deliver_at_ms.tolist()


@given(requests(), st.booleans())
def test_the_others_are_stored_as_if_the_request_had_no_others(asked: Asked, shared_index: bool) -> None:
    store_the_others_as_if_alone(asked, shared_index)


def store_the_others_of_any_request() -> None:
    """Until one meets a planted bug, which nobody needs to have shrunk."""
    of_search = hypothesis.settings(max_examples=PLANTED_EXAMPLES_MAX, phases=(hypothesis.Phase.generate,))
    of_search(given(requests(), st.booleans())(store_the_others_as_if_alone))()


@given(requests())
def test_what_refuses_a_whole_request_is_what_is_returned_of_one_that_wants_it_back(asked: Asked) -> None:
    """One rule, whatever is asked for."""
    batch = asked.batch(range(len(asked.rows)), return_invalid=False)
    if len(asked.valid) == len(asked.rows):
        staged(topic(), batch, asked.subscription_id)
        return
    with pytest.raises((DelayTooLong, InvalidArgument)):
        staged(topic(), batch, asked.subscription_id)


def shifted_index_of_a_request() -> None:
    """Row 0 is refused, so that each index of the others is one higher than among themselves."""
    rows: list[tuple[int, int, RefusedReason | None]] = [
        (1, 2**64 - 1, LONG), (2, NOW_MS + 5_000, None), (4, NOW_MS + 50, None), (5, NOW_MS, None),
    ]  # fmt: skip
    for returned, index in ((False, ([], [2, 3])), (True, ([3], [2]))):
        asked = Asked("deliver_at_ms", rows, returned, 0)
        _, outcome = staged(topic(), asked.batch(range(4), return_invalid=True), 0)
        assert (outcome.returned_index.tolist(), outcome.raised_index.tolist()) == index
        assert outcome.refused.index.tolist() == [0]


def test_indexes_are_those_of_the_request_that_was_sent() -> None:
    shifted_index_of_a_request()


def test_a_level_above_a_table_that_clamps_is_the_highest() -> None:
    asked = Asked("delay_level", [(1, 9, None), (2, 2, None), (4, -1, LEVEL)], False, 0)
    _, outcome = staged(topic(), asked.batch(range(3), return_invalid=True), 0, CLAMPED)
    assert outcome.refused.index.tolist() == [0, 2]
    assert outcome.refused.reason.tolist() == [LONG, LEVEL], "the highest level is above the largest delay"


def test_quotas_are_asked_for_the_valid_rows_alone_and_not_at_all_without_any() -> None:
    seen: list[int] = []

    def admit(accepted: Sequence[Any]) -> None:
        seen.extend(len(rows) for rows in accepted)

    one = topic()
    too_long: tuple[int, int, RefusedReason | None] = (2, 2**64 - 1, LONG)
    requested: list[list[tuple[int, int, RefusedReason | None]]] = [[(1, 5, None), too_long], [too_long]]
    for entries in requested:
        batch = Asked("delay_ms", entries, False, 0).batch(range(len(entries)), return_invalid=True)
        one.core.stage_add(batch, now_ms=NOW_MS, request_limits=LIMITS, levels=TABLE, admit=admit)
    assert seen == [1]


def test_a_row_that_is_refused_leaves_no_trace_in_the_index() -> None:
    one = topic()
    pages = len(one.core.index.pages)
    asked = Asked("delay_ms", [(70_000, MAX_MS + 1, LONG), (700_000, 2**60, LONG)], False, 0)
    assert staged(one, asked.batch(range(2), return_invalid=True), 0)[0] == ()
    assert len(one.core.index.pages) == pages
    assert not one.core.index.staged.keys


# ---- planted bugs


def the_index_of_a_row_is_that_among_the_valid_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AddOutcome, "placed", lambda self, places, refused: dataclasses.replace(self, refused=refused))


def a_level_that_there_is_not_is_level_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DelayLevels, "unknown", lambda self, levels: None)


def a_refused_row_is_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AddBatch, "take", lambda self, places: dataclasses.replace(self, deliver_at_ms=None, delay_ms=(
        np.zeros(len(self.entry_id), np.uint64)), delay_level=None))  # fmt: skip


def a_time_in_seconds_is_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "in_seconds", lambda deliver_at_ms, now_ms: None)


def all_rows_are_charged(patch: pytest.MonkeyPatch) -> None:
    stage = add_decisions.stage

    def charged(batch, indexes, *, admit, **rest):  # type: ignore[no-untyped-def]
        admit([batch.entry_id])
        return stage(batch, indexes, admit=add_decisions.admit_all, **rest)

    patch.setattr(add_decisions, "stage", charged)


PLANTED: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]], ...] = (
    (the_index_of_a_row_is_that_among_the_valid_ones, shifted_index_of_a_request),
    (a_level_that_there_is_not_is_level_0, test_a_level_above_a_table_that_clamps_is_the_highest),
    (a_refused_row_is_stored, store_the_others_of_any_request),
    (a_time_in_seconds_is_at_once, store_the_others_of_any_request),
    (all_rows_are_charged, test_quotas_are_asked_for_the_valid_rows_alone_and_not_at_all_without_any),
)


@pytest.mark.rotating
@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, DelayTooLong, InvalidArgument, ExceptionGroup)):
        story()


registry.register("stories of a topic", (plant for plant, _ in PLANTED))
