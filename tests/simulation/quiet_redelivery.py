"""What a daemon has in memory of redeliveries against the truth, at a moment when nothing is under way.

Owns: the comparison of what waits for its redelivery, of counts, dead letters and delay levels, and of how they are
shown. Does not own: the rows (`quiet`), and the truth (`redelivery_truth`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Set

import numpy as np

from daemon.call_values import BacklogPage
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import delay_levels
from daemon.core.index.bucket import Bucket
from daemon.core.index.position_keys import keys_of
from tests._support.engine_fixture import Daemon
from tests.simulation.columns import positions_of, rows_of
from tests.simulation.oracle import Oracle, Row, TopicTruth
from tests.simulation.positions import Position, entry_of, in_index, is_part, owner_of
from tests.simulation.redelivery_promises import as_listed, letters_of
from tests.simulation.redelivery_truth import Nacked

# What has come back is in the tracker no longer after so long, virtual ms.
TAKEN_AFTER_MS = 1_000
PAGE_ROWS = 3

Breach = Callable[[str], None]


def compare(truth: TopicTruth, core: TopicState, oracle: Oracle, passed: Set[Position], breach: Breach) -> None:
    """In memory. `passed`: positions that are due."""
    for number in sorted(truth.subscriptions.keys() & core.subscriptions.keys()):
        state = core.subscriptions[number]
        _compare_waiting(truth, core, state, oracle.latest_ms(), breach)
        _compare_counts(truth, core, state, breach)
        _compare_limits(truth, state, breach)
        ended = truth.redeliveries.ended
        for position, row in truth.rows.items():
            slot, count = ended.get((number, entry_of(position)), (0, 0))
            is_mine = is_part(position) and owner_of(position) == number
            if is_mine and slot > row.slot and row.count(number) <= count:
                breach(f"{position} stays, and its entry has left: {row}")
        shown = list(letters_of(state.dead_letters.freeze().rows()))
        there = _letters(truth, number)
        if shown != there:
            breach(f"subscription {number} has dead letters {shown}, they are {there}")
    levels = collections.Counter(row.level for position, row in truth.rows.items() if position not in passed)
    del levels[0]
    pending = delay_levels.pending_rows(index.levels for index in core.indexes.values())
    if pending != dict(levels):
        breach(f"{pending} rows of levels are pending in memory, there are {dict(levels)}")


def _letters(truth: TopicTruth, number: int) -> list[object]:
    letters = truth.redeliveries.dead_letters.get(number, {})
    return [as_listed(letters[each]) for each in sorted(letters)]


def _nacked(truth: TopicTruth, number: int) -> dict[Position, Nacked]:
    return {
        position: row.nacked[number]
        for position, row in truth.rows.items()
        if number in row.nacked and number in truth.owes(row)
    }


def _compare_waiting(
    truth: TopicTruth, core: TopicState, state: SubscriptionState, latest_ms: int, breach: Breach
) -> None:
    keyed, times_ms = state.nacks.freeze().rows()
    owners = core.indexes.places.owners(keyed.keys).tolist()
    waiting = {
        in_index((ledger_id, entry_id), owner): time_ms
        for (ledger_id, entry_id, _), owner, time_ms in zip(rows_of(keyed.rows), owners, times_ms.tolist(), strict=True)
    }
    nacked = _nacked(truth, state.subscription_id)
    for position, time_ms in waiting.items():
        if position not in nacked or nacked[position].redeliver_at_ms != time_ms:
            breach(f"{position} waits until {time_ms} in memory, and is {nacked.get(position)}")
    lost = {
        position: each
        for position, each in nacked.items()
        if each.redeliver_at_ms > latest_ms and position not in waiting
    }
    if lost:
        breach(f"subscription {state.subscription_id}: {lost} do not wait in memory")


def _compare_counts(truth: TopicTruth, core: TopicState, state: SubscriptionState, breach: Breach) -> None:
    nacked = _nacked(truth, state.subscription_id)
    for index in core.indexes.serving(state.subscription_id):
        for bucket in index.buckets:
            keys = keys_of(bucket.present)
            counts = state.counts.of(keys)
            counted = [0] * len(keys) if counts is None else counts.tolist()
            for position, count in zip(_positions(core, bucket), counted, strict=True):
                row = truth.rows.get(position)
                if row is None or state.subscription_id not in truth.owes(row):
                    continue
                should_be = nacked[position].count if position in nacked else 0
                if count != should_be:
                    breach(f"{position} counts {count} in memory, and is {nacked.get(position)}")


def _compare_limits(truth: TopicTruth, state: SubscriptionState, breach: Breach) -> None:
    number = state.subscription_id
    own = [position for position in _nacked(truth, number) if owner_of(position)]
    if state.own_nacked_rows != len(own):
        breach(f"subscription {number}: {state.own_nacked_rows} own rows are negatively acknowledged, and are {own}")
    for subscription_id, slot, letters_max in truth.redeliveries.spared:
        letters = truth.redeliveries.letters_about(number, slot)
        if subscription_id == number and letters < letters_max:
            breach(f"subscription {number} gives up nothing in slot {slot}, and has {letters} dead letters")


def _positions(core: TopicState, bucket: Bucket) -> list[Position]:
    ledger_id, entry_id = core.index.pages.positions(keys_of(bucket.present))
    positions = zip(ledger_id.tolist(), entry_id.tolist(), strict=True)
    return [in_index(position, bucket.index_id) for position in positions]


def settled_ms(daemon: Daemon, state: SubscriptionState) -> int:
    """What came back until then, by the daemon's clock, waits no longer. Where READY is full it does."""
    return daemon.now_ms() - TAKEN_AFTER_MS if state.takes_redeliveries else 0


async def compare_views(daemon: Daemon, core: TopicState, truth: TopicTruth, oracle: Oracle, breach: Breach) -> None:
    """What people are shown of what waits, and of dead letters."""
    requests = daemon.engine.requests
    for number, stored in truth.subscriptions.items():
        passed_ms = settled_ms(daemon, core.subscriptions[number])
        stats = await daemon.call(requests.topic_stats(truth.name))
        mine = next(each for each in stats.subscriptions if each.subscription_id == number)
        times_ms = [each.redeliver_at_ms for each in _nacked(truth, number).values()]
        least = sum(time_ms > oracle.latest_ms() for time_ms in times_ms)
        most = sum(time_ms > passed_ms for time_ms in times_ms)
        if not least <= mine.nacked <= most:
            breach(f"subscription {stored.name}: {mine.nacked} are shown as nacked, there are {least} to {most}")
        letters = truth.redeliveries.dead_letters.get(number, {})
        if mine.dead_letters != len(letters):
            breach(f"subscription {stored.name}: {mine.dead_letters} dead letters are shown, there are {len(letters)}")
        listed: list[object] = []
        after: int | None = 0
        while after is not None:
            asked = DeadLetterFilter()
            page = await daemon.call(requests.list_dead_letters(truth.name, stored.name, asked, PAGE_ROWS, after))
            listed += letters_of(page.rows)
            after = page.next_after
        if listed != _letters(truth, number):
            breach(f"subscription {stored.name}: {listed} are listed as dead letters of {_letters(truth, number)}")


def compare_backlog(
    truth: TopicTruth, number: int, page: BacklogPage, latest_ms: int, passed_ms: int, breach: Breach
) -> None:
    """States and counts of a page. `passed_ms`: see `settled_ms`, when it was asked for; `latest_ms`: now, by any."""
    rows = len(page.rows)
    times_ms = np.zeros(rows, np.uint64) if page.redeliver_at_ms is None else page.redeliver_at_ms
    counts = np.zeros(rows, np.uint32) if page.redelivery_count is None else page.redelivery_count
    positions = positions_of(page.rows, page.batch_index, number)
    columns = (page.rows.deliver_at_ms.tolist(), times_ms.tolist(), counts.tolist())
    for position, deliver_at_ms, time_ms, count in zip(positions, *columns, strict=True):
        may_be = list(_may_be(truth.rows, position, deliver_at_ms, number))
        fits = [
            (not time_ms or (nacked is not None and nacked.redeliver_at_ms == time_ms))
            and count == (0 if nacked is None else nacked.count)
            and (nacked is None or nacked.redeliver_at_ms <= latest_ms or time_ms > 0)
            and (nacked is None or nacked.redeliver_at_ms > passed_ms or not time_ms)
            for nacked in may_be
        ]
        if may_be and not any(fits):
            breach(f"{position} of {deliver_at_ms} is shown as {time_ms=} {count=}, and is {may_be}")


def _may_be(rows: Mapping[Position, Row], position: Position, deliver_at_ms: int, number: int) -> list[Nacked | None]:
    keys = (position,) if is_part(position) else (position, in_index(position, number))
    found = [rows[key] for key in keys if key in rows and owner_of(key) in (0, number)]
    return [row.nacked.get(number) for row in found if row.deliver_at_ms == deliver_at_ms]
