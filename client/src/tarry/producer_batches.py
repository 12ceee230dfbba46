"""Makes batches of a producer's single rows, without I/O, threads or waiting; the time is an argument.

Decides which rows are sent together and when, and the outcome of each row. There is one open batch for each kind of
time, which ends by lingering, by its rows or by a flush. A refused batch is split. The number of unanswered rows is
bounded. `tarry.add_requests` tracks requests in flight.
The driver (`tarry.aio.producer`) settles what `outcomes` returns and only then calls `remove`. A caller that waits
until rows are answered therefore finds every one of them settled.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
from array import array
from collections.abc import Sequence
from typing import Any, Generic, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors, reasons, results

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """The result of a row that a producer added: it is durable, unless it was returned.

    A position that was already in the index looks like a new one: its time is unchanged. The daemon counts such rows
    and does not name them.
    """

    returned: bool = False
    """True if it was already due and not stored (AlreadyDue.RETURN)"""
    raised_deliver_at_ms: int | None = None
    """The stored time if it is later than requested (ms), otherwise None"""


Outcome: TypeAlias = Added | errors.TarryError
_STORED, _RETURNED = Added(), Added(returned=True)
_DELIVER_AT, _DELAY, _LEVEL = "deliver_at_ms", "delay_ms", "delay_level"
_NEVER_S = math.inf


class Batch(Generic[Answer]):
    """Rows of one kind of time, in order of arrival.

    A later batch has a higher `number`; parts of a batch have that of the whole.
    """

    __slots__ = (
        "_entry_id",
        "_key_hash",
        "_ledger_id",
        "_time",
        "answers",
        "column",
        "due_at_s",
        "number",
        "on_invalid",
    )

    def __init__(self, number: int, column: str) -> None:
        """Begin a batch with a time column of this name."""
        self.number = number
        self.column = column
        self.answers: list[Answer] = []
        self.due_at_s = _NEVER_S
        self.on_invalid = reasons.OnInvalid.RETURN
        self._ledger_id = array("Q")
        self._entry_id = array("Q")
        self._time = array("i" if column == _LEVEL else "Q")
        self._key_hash = array("I")

    def __len__(self) -> int:
        return len(self.answers)

    def append(
        self,
        answer: Answer,
        ledger_id: SupportsIndex,
        entry_id: SupportsIndex,
        *,
        time: SupportsIndex | None,
        key_hash: object,
    ) -> int:
        """Append a row and return the new number of rows. Raises InvalidArgument and leaves the batch unchanged."""
        answers = self.answers
        try:
            # C arrays refuse what is no number of their size, and cost less than a check before.
            self._ledger_id.append(ledger_id)  # type: ignore[arg-type]
            self._entry_id.append(entry_id)  # type: ignore[arg-type]
            self._time.append(time)  # type: ignore[arg-type]
            self._key_hash.append(key_hash)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            for column in (self._ledger_id, self._entry_id, self._time, self._key_hash):
                del column[len(answers) :]
            raise self._wrong_row(ledger_id, entry_id, time, key_hash) from None
        answers.append(answer)
        return len(answers)

    def columns(self) -> dict[str, NDArray[np.integer]]:
        """Return the columns by the argument names of `AddStream.add`."""
        given: dict[str, NDArray[np.integer]] = {
            "ledger_id": _short(np.frombuffer(self._ledger_id, np.uint64)),
            "entry_id": np.frombuffer(self._entry_id, np.uint64),
            self.column: _short(np.frombuffer(self._time, np.int32 if self.column == _LEVEL else np.uint64)),
        }
        hashes = _short(np.frombuffer(self._key_hash, np.uint32))
        # On the wire, hash 0 is that of a row without a key.
        return given | {"key_hash": hashes} if hashes.any() else given

    def halves(self) -> list[Batch[Answer]]:
        """Return both halves of at least two rows, in order."""
        middle = len(self) // 2
        return [self._rows(slice(0, middle)), self._rows(slice(middle, None))]

    def _rows(self, rows: slice) -> Batch[Answer]:
        part: Batch[Answer] = Batch(self.number, self.column)
        part.answers = self.answers[rows]
        part._ledger_id, part._entry_id = self._ledger_id[rows], self._entry_id[rows]
        part._time, part._key_hash = self._time[rows], self._key_hash[rows]
        return part

    def _wrong_row(self, *values: object) -> errors.InvalidArgument:
        """Return the error to raise for a row with a value that is no number of its column."""
        names = ("ledger_id", "entry_id", self.column, "key_hash")
        for name, value, bits in zip(names, values, (64, 64, 64, 32), strict=True):
            if name == _LEVEL:
                continue
            try:
                columns.check_unsigned(name, value, bits=bits)  # type: ignore[arg-type]
            except errors.InvalidArgument as error:
                return error
        return errors.InvalidArgument(f"{self.column} is {values[2]!r}; it must be a whole number of 32 bits")


class Batches(Generic[Answer]):
    """The batches of one producer.

    `Answer` is the future type of the driver, which makes one for each row and finds it in the batch.
    """

    def __init__(self, *, linger_ms: float, rows_max: int, outstanding_max: int) -> None:
        """Limit a batch to `rows_max` rows, and unanswered rows to `outstanding_max`. Raises InvalidArgument."""
        if not 0 <= linger_ms < math.inf:
            raise errors.InvalidArgument(f"linger_ms is {linger_ms}; it must be 0 or more")
        for name, value in (("batch_rows", rows_max), ("max_outstanding", outstanding_max)):
            if value < 1:
                raise errors.InvalidArgument(f"{name} is {value}; it must be at least 1")
        self._linger_s = linger_ms / 1000
        self._rows_max = rows_max
        self._outstanding_max = outstanding_max
        self._open: dict[str, Batch[Answer]] = {}
        """Time column -> batch that still takes rows"""
        self._ready: collections.deque[Batch[Answer]] = collections.deque()
        self._unanswered: set[Batch[Answer]] = set()
        self._last_number = 0
        self._taken_rows = 0
        """Rows sent and not answered"""
        self._first_failure: errors.TarryError | None = None
        self.outstanding = 0
        """Rows not answered"""
        self._on_invalid = reasons.OnInvalid.RETURN
        """Used for the next batch. A daemon that does not know RETURN ends it for good."""
        self.ended: errors.TarryError | None = None

    @property
    def may_put(self) -> bool:
        """True if another row may be put, or if `put` would raise what ended the producer."""
        return self.outstanding < self._outstanding_max or self.ended is not None

    def put(
        self,
        answer: Answer,
        ledger_id: SupportsIndex,
        entry_id: SupportsIndex,
        *,
        deliver_at_ms: SupportsIndex | None,
        delay_ms: SupportsIndex | None,
        delay_level: SupportsIndex | None,
        key_hash: SupportsIndex | NDArray[np.uint32] | None,
        now_s: float,
    ) -> bool:
        """Add a row; return True if that changes when the next batch is due.

        Raises InvalidArgument, or what ended the producer.
        """
        if self.ended is not None:
            raise self.ended
        if (deliver_at_ms is None) + (delay_ms is None) + (delay_level is None) != 2:
            raise errors.InvalidArgument("exactly one of deliver_at_ms, delay_ms and delay_level must be given")
        column, time = _DELIVER_AT, deliver_at_ms
        if delay_ms is not None:
            column, time = _DELAY, delay_ms
        elif delay_level is not None:
            column, time = _LEVEL, delay_level
        if key_hash is None:
            key_hash = 0
        elif isinstance(key_hash, np.ndarray) and key_hash.size == 1:
            # The form in which `tarry.key_hash` returns one key
            key_hash = key_hash.item()
        batch = self._open.get(column)
        if batch is None:
            self._last_number += 1
            self._open[column] = batch = Batch(self._last_number, column)
        rows = batch.append(answer, ledger_id, entry_id, time=time, key_hash=key_hash)
        self.outstanding += 1
        if rows == 1:
            batch.due_at_s = now_s + self._linger_s
            self._unanswered.add(batch)
        if rows == self._rows_max:
            self._ready.append(self._open.pop(column))
            return True
        return rows == 1 or self.outstanding == self._outstanding_max

    @property
    def is_waiting(self) -> bool:
        """True if a batch is due, or will be."""
        return bool(self._ready) or any(self._open.values())

    def due_in_s(self, now_s: float) -> float | None:
        """Return how long the next batch lingers (seconds), not below 0, or None if there is none."""
        if self._ready:
            return 0.0
        lingering = [batch.due_at_s for batch in self._open.values() if batch]
        if not lingering:
            return None
        if self._is_stuck:
            return 0.0
        return max(0.0, min(lingering) - now_s)

    def take(self, now_s: float) -> Batch[Answer] | None:
        """Return the batch to send now, if any is due."""
        lingered = [batch for batch in self._open.values() if batch and (batch.due_at_s <= now_s or self._is_stuck)]
        # Oldest first: otherwise full batches of one kind of time would block the others.
        batch = min((*itertools.islice(self._ready, 1), *lingered), key=_number_of, default=None)
        if batch is None:
            return None
        if batch in lingered:
            del self._open[batch.column]
        else:
            self._ready.popleft()
        batch.on_invalid = self._on_invalid
        self._taken_rows += len(batch)
        return batch

    def flush(self) -> int:
        """Make every row due now; return the number of the last batch that has some of them."""
        self._ready.extend(batch for batch in self._open.values() if batch)
        self._open.clear()
        return self._last_number

    def is_answered(self, number: int) -> bool:
        """Return True if every row of the batches up to that number is answered."""
        return all(batch.number > number for batch in self._unanswered)

    def outcomes(
        self, batch: Batch[Answer], result: results.AddResult | None, error: errors.TarryError | None
    ) -> Sequence[Outcome] | None:
        """Return the outcome of each row of a taken batch, or None if it is due again, changed or in halves."""
        self._taken_rows -= len(batch)
        if result is not None:
            outcomes = _outcomes(result, len(batch))
        elif (parts := self._again(batch, error)) is not None:
            self._unanswered.remove(batch)
            self._unanswered.update(parts)
            # Ahead of later batches
            self._ready = collections.deque(sorted((*parts, *self._ready), key=_number_of))
            return None
        else:
            # One copy for each row, because an exception keeps the places where it was raised
            outcomes = [copy.copy(error) for _ in batch.answers if error is not None]
        if self._first_failure is None and (result is None or result.refused):
            self._first_failure = next(each for each in outcomes if isinstance(each, errors.TarryError))
        return outcomes

    def remove(self, batch: Batch[Answer]) -> None:
        """Forget a batch whose rows are settled."""
        if batch in self._unanswered:
            self._unanswered.remove(batch)
            self.outstanding -= len(batch)

    def end(self, error: errors.TarryError) -> None:
        """Refuse further rows, and make none due. Idempotent."""
        if self.ended is None:
            self.ended = error

    def left(self) -> list[Batch[Answer]]:
        """Return everything unanswered, when no more answers will arrive."""
        self._open.clear()
        self._ready.clear()
        return list(self._unanswered)

    def raise_first_failure(self) -> None:
        """Raise the first failure since the last call, if any."""
        failure, self._first_failure = self._first_failure, None
        if failure is not None:
            raise failure

    def too_many(self, timeout_s: float) -> errors.DeadlineExceeded:
        """Return the error to raise if `may_put` stays False for this time (seconds)."""
        return errors.DeadlineExceeded(
            f"{self.outstanding} rows are outstanding, and none was answered within {timeout_s:g} s"
        )

    def unanswered(self, timeout_s: float | None) -> errors.DeadlineExceeded:
        """Return the error to raise if rows stay unanswered for this time (seconds)."""
        return errors.DeadlineExceeded(f"{self.outstanding} rows are unanswered after {timeout_s or 0:g} s")

    @property
    def _is_stuck(self) -> bool:
        """True if no row can be put before a batch is sent.

        While a batch is in flight, its answer makes room for more; sending at once then would keep batches as small as
        the first of them.
        """
        is_full = self.outstanding >= self._outstanding_max
        return is_full and not self._taken_rows and not self._ready

    def _again(self, batch: Batch[Answer], error: errors.TarryError | None) -> list[Batch[Answer]] | None:
        """Return the batches as which a failed one is sent again, or None if it is not."""
        if self.ended is not None:
            return None
        is_returning = batch.on_invalid is reasons.OnInvalid.RETURN
        if is_returning and isinstance(error, errors.Unsupported):
            self._on_invalid = reasons.OnInvalid.REFUSE
            return [batch]
        if len(batch) > 1 and _may_be_of_some_rows(error, is_returning=is_returning):
            return batch.halves()
        return None


def _short(column: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return a single value if it is the same for all rows."""
    return column[:1] if (column == column[0]).all() else column


def _number_of(batch: Batch[Any]) -> int:
    return batch.number


def _may_be_of_some_rows(error: errors.TarryError | None, *, is_returning: bool) -> bool:
    """Return True if fewer rows may be accepted.

    There may be more rows than a quota admits at once. Some may also be invalid, which a daemon that returns invalid
    rows reports differently.
    """
    if isinstance(error, errors.ResourceExhausted):
        return not errors.is_retryable(error)
    return not is_returning and isinstance(error, (errors.InvalidArgument, errors.OutOfRange))


def _outcomes(result: results.AddResult, rows: int) -> list[Outcome]:
    outcomes: list[Outcome] = [_STORED] * rows
    for row in result.returned_index.tolist():
        outcomes[row] = _RETURNED
    for row, time in zip(result.raised_index.tolist(), result.raised_deliver_at_ms.tolist(), strict=True):
        outcomes[row] = Added(raised_deliver_at_ms=time)
    for row, reason in result.refused.items():
        outcomes[row] = _refusal(reason)
    return outcomes


def _refusal(reason: reasons.RefusedReason | int) -> errors.TarryError:
    """Return the failure of a row that was not stored while others of its batch were."""
    if reason is reasons.RefusedReason.DELAY_TOO_LONG:
        return errors.OutOfRange("the row is further ahead than the largest delay; it was not stored")
    if reason is reasons.RefusedReason.TIME_IN_SECONDS:
        return errors.InvalidArgument("deliver_at_ms can only be meant in seconds; it must be in ms; it was not stored")
    if reason is reasons.RefusedReason.DELAY_LEVEL:
        return errors.InvalidArgument("delay_level is none of the topic's table; the row was not stored")
    return errors.InvalidArgument(f"the daemon refused the row for reason {int(reason)}; it was not stored")
