"""Receives as a dispatcher through one subscription, keeps the account, and acknowledges durably.

`examples.verdict` has the account; the client library reconnects and gives permits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

import tarry
from examples import verdict


class Relay:
    """A dispatcher; a context manager, inside which its thread runs.

    A batch is kept for `hold_s` before it is acknowledged, as in a relay that waits for its own receiver.
    """

    def __init__(self, subscription: tarry.Subscription, account: verdict.Account, *, hold_s: float = 0.0) -> None:
        self._subscription = subscription
        self._account = account
        self._hold_s = hold_s
        self._waiting: deque[tuple[float, tarry.Batch, NDArray[np.int64]]] = deque()
        self._first_of_epoch_ms: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def wait_until(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `reached()`, called after every step.

        Returns False if the time is over. Raises the failure of the thread.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._progress:
            while True:
                if self._failure is not None:
                    raise self._failure
                if reached():
                    return True
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._progress.wait(min(remaining_s, 0.25))

    def first_received_above_ms(self, epoch: int) -> int | None:
        """Return when the first rows of a higher epoch came (Unix ms), or None."""
        with self._progress:
            return min((at_ms for each, at_ms in self._first_of_epoch_ms.items() if each > epoch), default=None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                # While no daemon can be reached, the library goes on trying.
                with contextlib.suppress(tarry.DeadlineExceeded):
                    batch = self._subscription.receive(timeout_s=self._patience_s())
                    if batch is not None:
                        self._take(batch)
                self._acknowledge_what_was_kept()
        except BaseException as failure:
            with self._progress:
                self._failure = failure
                self._progress.notify_all()
            if not isinstance(failure, tarry.TarryError):
                raise

    def _patience_s(self) -> float:
        if not self._waiting:
            return 0.1
        return max(0.0, self._waiting[0][0] - time.monotonic())

    def _take(self, batch: tarry.Batch) -> None:
        rows = self._account.note_received(
            batch.ledger_id,
            batch.entry_id,
            batch.deliver_at_ms,
            batch.key_hash,
            epoch=batch.epoch,
            at_ms=batch.received_at_ms_by_row,
        )
        with self._progress:
            self._first_of_epoch_ms.setdefault(batch.epoch, int(batch.received_at_ms_by_row.min()))
            self._progress.notify_all()
        self._waiting.append((time.monotonic() + self._hold_s, batch, rows))

    def _acknowledge_what_was_kept(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, batch, rows = self._waiting.popleft()
            self._subscription.ack(batch).add_done_callback(functools.partial(self._note_durable, rows))

    def _note_durable(self, rows: NDArray[np.int64], done: Future[int]) -> None:
        if done.exception() is None:
            self._account.note_durable(rows, time.time_ns() // 1_000_000)
        with self._progress:
            self._progress.notify_all()
