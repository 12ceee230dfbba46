"""Pages of rows in the order in which they come due, against a list of all rows."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.decisions.departures import LedgerRanges
from daemon.core.index.scan import BARS, LAST_MS, Bars, Place, ScanFilter, round_width_ms
from tests._support import parts
from tests.daemon.core._support.viewed_topic import Row, ViewedTopic, places_of

NOW_MS = 1_000_000
LEDGERS = (1, 2, 3, 2**40)
ENTRIES = (*range(12), 2**32 + 1, 2**40)


class Life:
    """What happens to a topic, drawn from a seed: rows come, become due, are acknowledged and leave.

    Most of it is nothing special, so that there is much to be looked at.
    """

    def __init__(self, seed: int, *, rows_max: int = 4) -> None:
        self.chosen = random.Random(seed)
        self.topic = ViewedTopic(rows_max=rows_max, time_step_ms=self.chosen.choice((5, 1_000)))
        self.topic.create_subscription()

    def goes_on(self, turns: int) -> None:
        changes = [self.put, self.cancel, self.leave, self.tick, self.tick_back, self.pass_some, self.acknowledge]
        changes += [self.waive, self.subscribe, self.begin, self.finish, self.seal]
        for _ in range(turns):
            self.chosen.choice([*changes, self.put, self.put, self.pass_some, self.acknowledge])()

    @property
    def number(self) -> int:
        return self.chosen.choice(list(self.topic.core.indexes))

    def put(self) -> None:
        first_ms = self.topic.now_ms - self.chosen.choice((0, 0, 8))
        rows = [
            (
                self.chosen.choice(LEDGERS),
                self.chosen.choice(ENTRIES),
                first_ms + self.chosen.randrange(1, self.chosen.choice((8, 60))),
            )
            for _ in range(self.chosen.randrange(30))
        ]
        self.topic.put(self.chosen.choice((0, 0, *self.topic.core.subscriptions)), rows)

    def cancel(self) -> None:
        number = self.number
        self.topic.cancel(number, self._waiting(number))

    def leave(self) -> None:
        self.topic.leaving |= self._waiting(self.number)

    def _waiting(self, number: int) -> BitMap64:
        buckets = self.topic.core.indexes[number].buckets
        bucket = self.chosen.choice(buckets)
        return BitMap64(key for key in bucket.present - bucket.passed if self.chosen.random() < 0.2)

    def tick(self) -> None:
        self.topic.now_ms += self.chosen.randrange(15)

    def tick_back(self) -> None:
        self.topic.now_ms -= self.chosen.randrange(5)

    def pass_some(self) -> None:
        # A row that is on its way out is left behind by the head, as one that is gone is; here it is gone at once.
        topic = self.topic
        left, topic.leaving = topic.leaving, BitMap64()
        for number, index in topic.core.indexes.items():
            topic.cancel(number, left & BitMap64.union(BitMap64(), *[each.present for each in index.buckets]))
        if self.chosen.random() < 0.6:
            topic.pass_all()
        else:
            topic.load(topic.core.indexes.wanted_segments(topic.now_ms))
            topic.pass_due(self.chosen.randrange(1, 6))

    def acknowledge(self) -> None:
        number, state = self.chosen.choice(list(self.topic.core.subscriptions.items()))
        backlog = self.topic.wanted(ScanFilter(subscription_id=number, since_ms=state.stored.since_ms, backlog=True))
        few = [place for place in backlog if self.chosen.random() < 0.3]
        self.topic.acknowledge(state, [((place.ledger_id, place.entry_id), place.deliver_at_ms) for place in few])

    def waive(self) -> None:
        if not self.topic.leaving and self.chosen.random() < 0.5:
            ledgers = np.array([self.chosen.choice(LEDGERS)], np.uint64)
            ranges = LedgerRanges(ledgers, np.array([self.chosen.choice(ENTRIES)], np.uint64), False)
            self.topic.trim_at_once(ranges, self.chosen.choice(list(self.topic.core.subscriptions)))

    def begin(self) -> None:
        self.topic.begin()

    def finish(self) -> None:
        if self.topic.begun:
            self.topic.finish()

    def seal(self) -> None:
        self.topic.seal_all()

    def subscribe(self) -> None:
        if len(self.topic.core.subscriptions) < 3 and not self.topic.leaving:
            self.topic.create_subscription()

    def asked(self, *, backlog: bool) -> ScanFilter:
        """Any question about what is pending, or about the backlog of a subscription."""
        number, state = self.chosen.choice(list(self.topic.core.subscriptions.items()))
        around_ms = self.topic.now_ms - 20
        first_ms = self.chosen.choice((0, 0, around_ms + self.chosen.randrange(70)))
        last_ms = self.chosen.choice((LAST_MS, LAST_MS, first_ms + self.chosen.randrange(30)))
        ledgers = sorted((self.chosen.choice(LEDGERS), self.chosen.choice(LEDGERS)))
        asked = ScanFilter(first_ms, last_ms, self.chosen.choice((None, None, (ledgers[0], ledgers[1]))))
        if backlog or self.chosen.random() < 0.6:
            return dataclasses.replace(asked, subscription_id=number, since_ms=state.stored.since_ms, backlog=backlog)
        return asked


def put_many(topic: ViewedTopic, index_id: int, count: int, *, seed: int, span_ms: int = 1_000) -> list[Row]:
    """Rows of one ledger at random times."""
    chosen = random.Random(seed)
    added = [(seed, entry, topic.now_ms + 1 + chosen.randrange(span_ms)) for entry in range(count)]
    topic.put(index_id, added)
    return added


SEEDS = st.integers(0, 2**64)


@settings(max_examples=parts.examples(60))
@given(SEEDS)
def test_a_page_is_what_a_list_of_all_rows_gives(seed: int) -> None:
    life = Life(seed)
    for _ in range(4):
        life.goes_on(15)
        for backlog in (False, False, True):
            asked = life.asked(backlog=backlog)
            limit = life.chosen.randrange(1, 12)
            wanted = life.topic.wanted(asked)
            page = life.topic.page(asked, None, limit, segments_a_round=life.chosen.randrange(1, 9))
            assert places_of(page.found) == wanted[:limit]
            assert page.next_after == (wanted[limit - 1] if len(wanted) > limit else None)
            assert list(itertools.chain(*map(places_of, life.topic.pages(asked, limit)))) == wanted


@settings(max_examples=parts.examples(60))
@given(SEEDS)
def test_a_histogram_is_what_counting_each_row_gives(seed: int) -> None:
    life = Life(seed, rows_max=2)
    for _ in range(4):
        life.goes_on(15)
        for _ in range(6):
            asked = dataclasses.replace(life.asked(backlog=False), first_ms=0, last_ms=LAST_MS)
            from_ms = life.topic.now_ms + life.chosen.randrange(-10, 50)
            bars = Bars(from_ms, from_ms + life.chosen.randrange(60), life.chosen.randrange(1, 60))
            assert life.topic.counts(asked, bars).rows.tolist() == life.topic.counted(asked, bars)


@given(SEEDS)
def test_a_page_that_ends_early_has_all_rows_up_to_where_the_next_begins(seed: int) -> None:
    life = Life(seed, rows_max=2)
    life.goes_on(60)
    asked = life.asked(backlog=False)
    found: list[Place] = []
    after = None
    while True:
        limit, segments_a_round = life.chosen.randrange(1, 20), life.chosen.randrange(1, 5)
        page = life.topic.page(asked, after, limit, segments_a_round=segments_a_round, rounds_max=0)
        found += places_of(page.found)
        if page.next_after is None:
            break
        assert after is None or page.next_after > after
        after = page.next_after
    assert found == life.topic.wanted(asked)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_that_stays_is_on_one_page_while_others_come_due_and_buckets_are_sealed(seed: int) -> None:
    topic = ViewedTopic(rows_max=8)
    topic.create_subscription()
    chosen = random.Random(seed)
    for number in range(1, 6):
        put_many(topic, chosen.choice((0, 0, 1)), 60, seed=number)
        topic.seal_all()
    put_many(topic, 0, 60, seed=6)
    before = topic.wanted(ScanFilter())

    def meanwhile() -> None:
        topic.now_ms += chosen.randrange(10)
        topic.pass_all()
        if chosen.random() < 0.2:
            topic.begin()
        elif topic.begun and chosen.random() < 0.5:
            topic.finish()

    shown = list(itertools.chain(*map(places_of, topic.pages(ScanFilter(), 7, meanwhile))))
    assert shown == sorted(set(shown)), "each once, and in order"
    stayed = set(topic.wanted(ScanFilter()))
    assert stayed <= set(shown) <= set(before)
    assert len(before) > len(stayed) > 0, "some came due, others did not"


def test_a_page_reads_the_segments_that_begin_before_its_last_row_and_no_others() -> None:
    topic = ViewedTopic(rows_max=10)
    for number in range(1, 5):
        put_many(topic, 0, 1_000, seed=number)
        topic.seal_all()
    page = topic.page(ScanFilter(), limit=20, segments_a_round=1)
    last_ms = page.found.place(-1).deliver_at_ms
    needed = sum(int((bucket.table.min_ms <= last_ms + 3).sum()) for bucket in topic.core.indexes.sealed.values())
    assert 4 <= topic.reads <= needed
    topic.reads = 0
    topic.page(ScanFilter(), page.next_after, limit=20, segments_a_round=1)
    assert topic.reads <= needed + 4, "what was before is not read again"


def test_a_bucket_of_other_ledgers_is_not_read() -> None:
    topic = ViewedTopic(rows_max=10)
    for number in range(1, 5):
        put_many(topic, 0, 100, seed=number)
        topic.seal_all()
    assert len(topic.page(ScanFilter(ledgers=(3, 3)), limit=1_000).found) == 100
    assert topic.reads == 10
    assert not len(topic.page(ScanFilter(ledgers=(5, 9)), limit=1_000).found)
    assert topic.reads == 10


def test_rows_of_one_time_are_paged_by_their_positions_and_then_by_their_indexes() -> None:
    topic = ViewedTopic(rows_max=3)
    topic.create_subscription()
    for index_id in (1, 0):
        topic.put(index_id, [(ledger, entry, NOW_MS + 5) for ledger in (2, 1) for entry in range(10)])
        topic.seal_all()
    shown = [places_of(found) for found in topic.pages(ScanFilter(), 1)]
    assert [place for (place,) in shown] == [
        Place(NOW_MS + 5, ledger, entry, index_id) for ledger in (1, 2) for entry in range(10) for index_id in (0, 1)
    ]


# ---- histograms


def test_what_lies_in_one_bar_and_of_which_nothing_is_gone_is_not_read() -> None:
    topic = ViewedTopic(rows_max=1_000, time_step_ms=100)
    for number in range(1, 5):
        put_many(topic, 0, 1_000, seed=number)
        topic.seal_all()
    bars = Bars(NOW_MS, NOW_MS + 2_000, 2_000)
    counts = topic.counts(ScanFilter(), bars)
    assert counts.rows.tolist() == [0, 4_000, 0]
    assert (topic.reads, counts.segments_read) == (0, 0)
    assert counts.segments_counted == sum(len(bucket.table) for bucket in topic.core.indexes.sealed.values())
    narrow = Bars(NOW_MS, NOW_MS + 2_000, 70)
    counts = topic.counts(ScanFilter(), narrow)
    assert counts.rows.tolist() == topic.counted(ScanFilter(), narrow)
    assert 0 < counts.segments_read == topic.reads


def test_of_buckets_with_rows_that_are_gone_only_what_lies_in_the_bars_is_read() -> None:
    topic = ViewedTopic(rows_max=10, time_step_ms=10)
    for number in range(1, 5):
        put_many(topic, 0, 1_000, seed=number)
        topic.seal_all()
        topic.cancel(0, list(topic.core.indexes[0].sealed.values())[-1].present[10:20])
    bars = Bars(NOW_MS + 100, NOW_MS + 200, 10)
    counts = topic.counts(ScanFilter(), bars)
    assert counts.rows.tolist() == topic.counted(ScanFilter(), bars)
    assert 0 < topic.reads < 4 * 30, "a fifth, not all"
    topic.reads = 0
    late = Bars(NOW_MS + 900, NOW_MS + 1_100, 10)
    assert topic.counts(ScanFilter(), late).rows.tolist() == topic.counted(ScanFilter(), late)
    assert 0 < topic.reads < 4 * 20, "what lies before the bars is not read either"


@pytest.mark.parametrize(
    ("span_ms", "width_ms"),
    [
        (0, 1),
        (1, 1),
        (60, 1),
        (3_600_000, 60_000),
        (86_400_000, 1_800_000),
        (7 * 86_400_000, 3 * 3_600_000),
        (365 * 86_400_000, 5 * 86_400_000),
    ],
)
def test_a_round_width_makes_about_sixty_bars(span_ms: int, width_ms: int) -> None:
    assert round_width_ms(span_ms) == width_ms


@given(st.integers(1, 2**63))
def test_a_width_that_nobody_chose_makes_neither_few_bars_nor_many(span_ms: int) -> None:
    count = Bars(0, span_ms, round_width_ms(span_ms)).count
    assert min(span_ms, BARS / 2) <= count <= 2 * BARS
