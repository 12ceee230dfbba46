"""A topic of many small buckets with clients that never rest: they add, cancel, reschedule, receive, acknowledge and
negatively acknowledge through the client library, and tell an account of everything.

Owns: the rows, the calls and their pace. Does not own: the rules (`row_account`), the daemon, and the jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

import tarry
from tests._support.jobs import pause
from tests.batch.compaction._support.row_account import RowAccount

Row = tuple[int, int, int]

SUBSCRIPTION = "dispatcher"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
# Buckets are sealed by request while the topic is filled, and never merged by the daemon.
FILLING = tarry.TopicPolicy(
    max_num_buckets=-1,
    min_index_count_per_bucket=1_000_000_000,
    bucket_rows_max=1_000_000_000,
    bucket_bytes_max=1_000_000_000_000,
    bucket_age_max_ms=DAY_MS,
)
# Ledgers of rows that are added while the job runs; those before it are filled.
LIVE_LEDGERS_FROM = 1_000_000
_BUCKETS_PER_LEDGER = 4
# Rows that come due while the test runs: those of filled buckets at an even rate for longer than any test.
_SOON_SHARE, _FILLED_SOON_MS, _LIVE_SOON_MS = 0.3, 600_000, 6_000
# Rows are withdrawn so long before they are due that most of the answers are not that they are due.
_MARGIN_MS = 100
PATIENCE_S = 600.0
_PAUSE_S = 0.2
_NACK_SHARE, _NACK_MS = 0.05, (200, 2_000)
# Positions keep so long in the hands of the receiver before it answers.
_KEPT_SHARE = 0.2


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclasses.dataclass(frozen=True)
class Shape:
    """`own`: rows are in the index of the one subscription, not in the shared one. `seal_every`: turns of the traffic
    after which what it added is sealed. `moves_filled`: rows of filled buckets get new times and come back, too, so
    that buckets that are sealed later lie between those.
    """

    buckets: int
    rows: int
    own: bool = False
    seal_every: int = 10
    moves_filled: bool = False


class LiveTopic:
    """A context manager: leaving it ends the threads."""

    def __init__(self, address: str, name: str, shape: Shape, rng: random.Random) -> None:
        self.name = name
        self.account = RowAccount()
        self._shape = shape
        self._rng = rng
        self._index = SUBSCRIPTION if shape.own else None
        self._client = tarry.Client(address)
        self._calm = threading.Event()
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._cancelled: list[tuple[int, int]] = []
        self._ledger, self._entry = LIVE_LEDGERS_FROM, 0
        self.turns = 0
        self.counts = dict.fromkeys(("added", "cancelled", "rescheduled", "nacked", "added again", "sealed"), 0)

    def __enter__(self) -> LiveTopic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._client.close()

    def born_again(self, address: str) -> LiveTopic:
        """A topic of this name that has nothing of this one."""
        return LiveTopic(address, self.name, self._shape, self._rng)

    # ---- the phases

    def fill(self) -> None:
        """Sealed buckets of one topic; nothing is in memory alone."""
        client = self._client
        client.create_subscription(self.name, SUBSCRIPTION)
        client.set_policy(self.name, FILLING)
        for bucket in range(self._shape.buckets):
            ledger, part = divmod(bucket, _BUCKETS_PER_LEDGER)
            first = part * self._shape.rows
            self._add([(ledger, entry) for entry in range(first, first + self._shape.rows)])
            client.seal(self.name)
        assert self.buckets() == self._shape.buckets

    def begin(self) -> None:
        """The traffic, in threads; also again, when it was settled."""
        self._calm.clear()
        self._stopping.clear()
        for run in (self._call_on, self._receive_on):
            thread = threading.Thread(target=self._noting_failure, args=(run,), name=f"{run.__name__} {self.name}")
            self._threads.append(thread)
            thread.start()

    def wait_for_turns(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Until the traffic went on for so many turns."""
        until, deadline_s = self.turns + count, time.monotonic() + timeout_s
        while self.turns < until:
            self._raise_failure()
            assert time.monotonic() < deadline_s, f"{self.name}: the traffic has not made {count} turns"
            pause(0.02)

    def wait_until(self, reached: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            self._raise_failure()
            assert time.monotonic() < deadline_s, f"{self.name}: not within {timeout_s:g} s: {what}"
            pause(0.02)

    def check_settled(self) -> None:
        """Ends the traffic; then every row came, or is listed, as the account says. `begin` goes on."""
        self._calm.set()
        self._threads[0].join()
        before = self.account.waiting(from_ms=0)
        listed = list(self.listed())
        self.account.wait_until_owed_came(now_ms())
        self._stop()
        self.account.check(before, listed)

    # ---- reading

    def buckets(self) -> int:
        return self._client.stats(self.name).buckets

    def bucket_names(self) -> set[str]:
        """The last part of the key of each sealed bucket."""
        return {bucket.bucket.rpartition("/")[2] for bucket in self._client.buckets(self.name)}

    def listed(self) -> Iterator[Row]:
        """Every row that is not due yet, as the daemon lists them."""
        token = ""
        while True:
            page = self._client.scheduled_page(self.name, token, page_size=10_000)
            yield from zip(page.ledger_id.tolist(), page.entry_id.tolist(), page.deliver_at_ms.tolist(), strict=True)
            token = page.next_page_token
            if not token:
                return

    def next_of_filled_buckets(self, count: int) -> list[Row]:
        """The rows of filled buckets that come due next."""
        waiting = [row for row in self.account.waiting(from_ms=now_ms()) if row[0] < LIVE_LEDGERS_FROM]
        return sorted(waiting, key=lambda row: row[2])[:count]

    def seal(self) -> None:
        """A commit of the owner: it learns of every merge before."""
        self._client.seal(self.name)

    # ---- the traffic

    def _call_on(self) -> None:
        while not self._calm.wait(self._rng.uniform(0, 2 * _PAUSE_S)):
            self._add_some()
            self._cancel_some()
            self._reschedule_some()
            self.turns += 1
            if self.turns % self._shape.seal_every == 0:
                self._client.seal(self.name)
                self.counts["sealed"] += 1

    def _add_some(self) -> None:
        rows = self._rng.randint(1, 40)
        if self._entry > 1_000:
            self._ledger, self._entry = self._ledger + 1, 0
        first, self._entry = self._entry, self._entry + rows
        self._add([(self._ledger, entry) for entry in range(first, first + rows)])
        self.counts["added"] += rows
        again = self._cancelled[:4]
        del self._cancelled[:4]
        if again:
            self._add(again)
            self.counts["added again"] += len(again)

    def _cancel_some(self) -> None:
        rows = self._chosen(12)
        ledger_id, entry_id, _ = _columns(rows)
        if not rows:
            return
        done = self._client.cancel(self.name, ledger_id, entry_id, subscription=self._index)
        kept = _left(rows, done)
        self.account.withdrawn(kept)
        self._cancelled += [row[:2] for row in kept if self._may_move(row)]
        self.counts["cancelled"] += len(kept)

    def _reschedule_some(self) -> None:
        rows = [row for row in self._chosen(12) if self._may_move(row)]
        if not rows:
            return
        moved = [(ledger, entry, self._due((ledger, entry))) for ledger, entry, _ in rows]
        self.account.asking(moved)
        ledger_id, entry_id, deliver_at_ms = _columns(moved)
        done = self._client.reschedule(
            self.name, ledger_id, entry_id, deliver_at_ms=deliver_at_ms, subscription=self._index
        )
        old, new = _left(rows, done), _left(moved, done)
        self.account.made(new, refused=set(moved) - set(new))
        self.account.withdrawn(old)
        self.counts["rescheduled"] += len(new)

    def _chosen(self, count: int) -> list[Row]:
        """Rows that are not due at once; some of them are due before long."""
        rows = self.account.some_waiting(self._rng, count, from_ms=now_ms() + _MARGIN_MS)
        return list({row[:2]: row for row in rows}.values())

    def _may_move(self, row: Row) -> bool:
        return self._shape.moves_filled or row[0] >= LIVE_LEDGERS_FROM

    def _add(self, positions: Sequence[tuple[int, int]]) -> None:
        rows = [(ledger, entry, self._due((ledger, entry))) for ledger, entry in positions]
        self.account.asking(rows)
        ledger_id, entry_id, deliver_at_ms = _columns(rows)
        added = self._client.add(self.name, ledger_id, entry_id, deliver_at_ms=deliver_at_ms, subscription=self._index)
        assert (added.accepted, len(added.raised_index)) == (len(rows), 0), added
        self.account.made(rows)

    def _due(self, position: tuple[int, int]) -> int:
        """A time that the position never had."""
        while True:
            until_ms = _FILLED_SOON_MS if position[0] < LIVE_LEDGERS_FROM else _LIVE_SOON_MS
            soon = self._rng.random() < _SOON_SHARE
            later_ms = self._rng.randint(500, until_ms) if soon else self._rng.randint(HOUR_MS, DAY_MS)
            deliver_at_ms = now_ms() + later_ms
            if not self.account.knows((*position, deliver_at_ms)):
                return deliver_at_ms

    def _receive_on(self) -> None:
        answers: list[Future[Any]] = []
        with self._client.subscribe(self.name, SUBSCRIPTION) as subscription:
            kept: list[tarry.Batch] = []
            while not self._stopping.is_set():
                batch = subscription.receive(timeout_s=0.05)
                if batch is not None:
                    rows = _rows(batch)
                    counted = zip(rows, batch.redelivery_count.tolist(), strict=True)
                    self.account.received(counted, at_ms=batch.received_at_ms)
                    kept.append(batch)
                if self._calm.is_set() or self._rng.random() > _KEPT_SHARE:
                    for each in kept:
                        answers += self._answer(subscription, each)
                    kept.clear()
            for each in kept:
                answers += self._answer(subscription, each)
            subscription.flush(PATIENCE_S)
        assert sum(future.result() for future in answers) == 0, "answers were ignored"

    def _answer(self, subscription: tarry.Subscription, batch: tarry.Batch) -> Iterator[Future[tarry.Ignored]]:
        mask = np.array([self._rng.random() < _NACK_SHARE for _ in range(len(batch))], np.bool_)
        if self._calm.is_set():
            mask[:] = False
        if mask.any():
            back, delay_ms = batch.take(mask), self._rng.randint(*_NACK_MS)
            self.account.nacking(_rows(back), not_before_ms=now_ms() + delay_ms)
            nacked: Future[tarry.Ignored] = Future()
            subscription.nack(back, delay_ms=delay_ms).add_done_callback(
                lambda done: nacked.set_result(done.result().ignored)
            )
            self.counts["nacked"] += len(back)
            yield nacked
        if not mask.all():
            done = batch.take(~mask)
            self.account.acknowledging(_rows(done))
            yield subscription.ack(done)

    # ---- threads

    def _stop(self) -> None:
        self._calm.set()
        self._stopping.set()
        while self._threads:
            self._threads.pop(0).join()
        self._raise_failure()

    def _noting_failure(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as failure:  # noqa: BLE001 - it is raised in the test
            self._failures.append(failure)

    def _raise_failure(self) -> None:
        if self._failures:
            raise AssertionError(f"{self.name}: the traffic failed") from self._failures[0]


@contextlib.contextmanager
def filled(address: str, shapes: dict[str, Shape], seed: int) -> Iterator[list[LiveTopic]]:
    """Topics that are filled, all at the same time."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        topics = [
            stack.enter_context(LiveTopic(address, name, shape, random.Random(rng.random())))
            for name, shape in shapes.items()
        ]
        for topic in topics:
            topic.fill()
        yield topics


def _columns(rows: Sequence[Row]) -> tuple[list[int], list[int], list[int]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _rows(batch: tarry.Batch) -> list[Row]:
    return list(zip(batch.ledger_id.tolist(), batch.entry_id.tolist(), batch.deliver_at_ms.tolist(), strict=True))


def _left(rows: Sequence[Row], done: tarry.Cancelled | tarry.Rescheduled) -> list[Row]:
    """The rows of a request that it was done to."""
    assert not done.may_have_landed, "an answer was lost, and nothing died"
    indexes = (done.not_found_index, done.already_due_index, done.in_flight_index)
    as_they_were = {place for index in indexes for place in index.tolist()}
    return [row for place, row in enumerate(rows) if place not in as_they_were]
