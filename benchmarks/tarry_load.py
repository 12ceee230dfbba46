"""Adds rows to Tarry through one stream, and drains a subscription with every row acknowledged.

It is one client process's use of `tarry`, timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

import tarry
from benchmarks import load

PERMITS = 100_000
PATIENCE_S = 120.0
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class Reach:
    """The address of a daemon, and the credentials for it; may be passed to another process."""

    address: str
    tls: tarry.Tls | None = None
    token_file: Path | None = None

    def client(self) -> tarry.Client:
        return tarry.Client(self.address, tls=self.tls, token_file=self.token_file)


@dataclasses.dataclass(frozen=True)
class Added:
    """The result of an add.

    `accepted` counts rows that were answered as durable and new. `seconds` last from the first request to the last
    answer.
    """

    accepted: int
    seconds: float


def add(client: tarry.Client, topic: str, rows: load.Rows, *, batch_rows: int, in_flight: int) -> Added:
    """Add all rows, with so many requests unanswered."""
    answers: list[Future[tarry.AddResult]] = []
    batches = list(rows.batches(batch_rows))
    with client.add_stream(topic, in_flight=in_flight) as stream:
        began_s = time.perf_counter()
        for batch in batches:
            first, last = batch.ledger_id[0], batch.ledger_id[-1]
            # One number if the batch has one ledger, as a broker's own requests do
            ledger = int(first) if first == last and (batch.ledger_id == first).all() else batch.ledger_id
            answers.append(stream.add(ledger, batch.entry_id, deliver_at_ms=batch.deliver_at_ms))
        stream.flush()
        seconds = time.perf_counter() - began_s
    return Added(sum(answer.result().accepted for answer in answers), seconds)


def wait_for(client: tarry.Client, topic: str, what: str, reached: Callable[[tarry.TopicStats], bool]) -> None:
    """Wait until the topic's counts satisfy `reached`. Raises TimeoutError, naming `what` is missing."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not reached(stats := client.stats(topic)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"topic {topic} has not {what} after {PATIENCE_S:g} s: {stats}")
        time.sleep(_POLL_S)


class Drain:
    """A receiver that acknowledges until `rows` rows came, and keeps them for the account."""

    def __init__(self, rows: int) -> None:
        self._wanted = rows
        self.batches: list[tarry.Batch] = []
        self._answers: list[Future[tarry.Ignored]] = []
        self.first_received_s = 0.0
        self.durable_s = 0.0

    def run(self, subscription: tarry.Subscription) -> None:
        """Receive and acknowledge; note times of `time.perf_counter`. Raises TimeoutError if rows stop coming."""
        received = 0
        while received < self._wanted:
            batch = subscription.receive(timeout_s=PATIENCE_S)
            if batch is None:
                raise TimeoutError(f"{received} of {self._wanted} rows came, and no more within {PATIENCE_S:g} s")
            if not received:
                self.first_received_s = time.perf_counter()
            received += len(batch)
            self.batches.append(batch)
            self._answers.append(subscription.ack(batch))
        subscription.flush(PATIENCE_S)
        self.durable_s = time.perf_counter()

    def problem(self, rows: load.Rows) -> str | None:
        """Return what is wrong with the rows or their acknowledgements, or None."""
        ignored = sum(answer.result() for answer in self._answers)
        return problem_of(self.batches, rows) or (f"{ignored:,} acknowledgements were ignored" if ignored else None)


def problem_of(batches: Sequence[tarry.Batch], rows: load.Rows) -> str | None:
    """Return what is wrong unless each of the rows came exactly once, with its time."""
    return difference(rows_of(batches), rows)


def rows_of(batches: Sequence[tarry.Batch]) -> load.Rows:
    """Return the received rows, in their order."""
    return load.Rows(
        np.concatenate([batch.ledger_id for batch in batches]),
        np.concatenate([batch.entry_id for batch in batches]),
        np.concatenate([batch.deliver_at_ms for batch in batches]),
    )


def difference(came: load.Rows, rows: load.Rows) -> str | None:
    """Compare received rows with owed ones, in any order; return the difference, or None."""
    positions, owed = came.joined(), rows.joined()
    order, order_owed = np.argsort(positions), np.argsort(owed)
    if not np.array_equal(positions[order], owed[order_owed]):
        return f"{len(came):,} rows came, {len(np.intersect1d(positions, owed)):,} of the {len(rows):,} that are owed"
    differ = came.deliver_at_ms[order] != rows.deliver_at_ms[order_owed]
    return f"{np.count_nonzero(differ):,} rows came with another due time" if differ.any() else None
