"""Adds rows at a steady rate, receives and acknowledges them, until `end` is called.

Adding and receiving are processes of their own, so that adding does not delay the reading of the clock at receipt. Each
row must arrive once, with its time. `compaction` alone uses this module, which knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

import tarry
from benchmarks import lateness, load, side_process, tarry_load, workbench
from examples import verdict

SUBSCRIPTION = "dispatcher"
DELAYS_MS = (1_000, 3_000)
# The longest time that it may go on (seconds)
SECONDS_MAX, QUICK_SECONDS_MAX = 1_800, 300
_RECEIVE_S = 0.2


@dataclasses.dataclass(frozen=True)
class Came:
    """The received rows that were added in time. `problem` says what is wrong with all rows, or is None."""

    deliver_at_ms: NDArray[np.int64]
    lateness_ms: NDArray[np.int64]
    problem: str | None

    def lateness_of(self, *spans_ms: tuple[int, int]) -> NDArray[np.int64]:
        """Return the lateness (ms) of the rows due within one of these spans, each from a time on and before another.

        Raises TimeTooShort if there is none.
        """
        chosen = np.zeros(len(self.deliver_at_ms), bool)
        for from_ms, until_ms in spans_ms:
            chosen |= (self.deliver_at_ms >= from_ms) & (self.deliver_at_ms < until_ms)
        if not chosen.any():
            raise workbench.TimeTooShort(f"no row that was added in time was due within {spans_ms}")
        return self.lateness_ms[chosen]


class SteadyLoad:
    """A steady load; a context manager, inside which rows are added. `end` may be called once."""

    def __init__(self, address: str, topic: str, rows_per_s: int, seed: int, *, quick: bool) -> None:
        self.first_due_ms = 0
        """The time from which rows are due all the time (ms)"""
        least_ms, most_ms = DELAYS_MS
        seconds_max = QUICK_SECONDS_MAX if quick else SECONDS_MAX
        self._plan = lateness.Plan(seconds_max, rows_per_s, least_ms, most_ms, seed)
        self._receiving = side_process.SideProcess(_receive, address, topic)
        self._adding = side_process.SideProcess(lateness.add_steadily, tarry_load.Reach(address), topic, self._plan)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for process in (self._receiving, self._adding):
            self._stack.enter_context(process)
        self._plan = dataclasses.replace(self._plan, start_ms=load.now_ms() + lateness.LEAD_MS)
        self.first_due_ms = self._plan.start_ms + self._plan.delay_until_ms
        self._adding.send(self._plan.start_ms)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def end(self) -> Came:
        """Stop adding; return when all rows were received and acknowledged durably, or too much is missing."""
        self._adding.send("end")
        answered_at_ms = self._adding.result()
        rows = slice(len(answered_at_ms))
        ledger_id, entry_id = self._plan.positions()
        owed = load.Rows(ledger_id[rows], entry_id[rows], self._plan.deliver_at_ms()[rows])
        self._receiving.send(len(owed))
        came, received_at_ms, ignored = self._receiving.result()
        problem = tarry_load.difference(came, owed) or (
            f"{ignored:,} acknowledgements were ignored" if ignored else None
        )
        if problem is None and (answered_at_ms == verdict.NEVER).any():
            problem = f"{np.count_nonzero(answered_at_ms == verdict.NEVER):,} rows were not added"
        number = (came.ledger_id * np.uint64(lateness.ROWS_PER_LEDGER) + came.entry_id).astype(np.int64)
        deliver_at_ms = came.deliver_at_ms.astype(np.int64)
        in_time = answered_at_ms[np.minimum(number, len(owed) - 1)] < deliver_at_ms
        return Came(deliver_at_ms[in_time], (received_at_ms - deliver_at_ms)[in_time], problem)


def _receive(address: str, topic: str, parent: Connection) -> None:
    """Receive in a process of its own.

    Receives the number of rows when adding has ended; sends the rows, when each came (ms), and how many
    acknowledgements were ignored.
    """
    batches: list[tarry.Batch] = []
    answers: list[Future[tarry.Ignored]] = []
    came, owed, deadline_s = 0, None, float("inf")
    with (
        tarry.Client(address) as client,
        client.subscribe(topic, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS) as subscription,
    ):
        parent.send("ready")
        while (owed is None or came < owed) and time.monotonic() < deadline_s:
            batch = subscription.receive(_RECEIVE_S)
            if batch is not None:
                came += len(batch)
                batches.append(batch)
                answers.append(subscription.ack(batch))
            if owed is None and parent.poll():
                owed, deadline_s = parent.recv(), time.monotonic() + tarry_load.PATIENCE_S
        subscription.flush(tarry_load.PATIENCE_S)
    received_at_ms = np.concatenate([batch.received_at_ms_by_row for batch in batches])
    parent.send((tarry_load.rows_of(batches), received_at_ms, sum(answer.result() for answer in answers)))
