"""What callers were told, row by row, and whether the daemons kept to it: an oracle with one dict.

Owns: the record of sends, answers, receipts and durable acknowledgements, and the rules that it is checked by.
Does not own: the traffic (`tests.wire._support.traffic`).

Rules. A row comes with the time that it was added with and not before it, never to a caller who did not add it, at most
once on one stream, and not under an epoch that is over. After a durable acknowledgement it comes again only if its add
was sent again after an answer was lost: such a send may have been a new row. An acknowledgement may be durable long
before it is answered: such a row may come on the stream on which it was acknowledged. A row whose add was answered OK
comes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable

Position = tuple[int, int]


@dataclasses.dataclass(slots=True)
class _Row:
    deliver_at_ms: int
    # False when only a lower bound is known: the daemon added a delay to its own clock.
    exact: bool
    sends: int = 0
    answered: bool = False
    receipts: int = 0
    durable: int = 0
    # Since it came last.
    acknowledged: bool = False
    # So often it came as a new row on a stream that had it, before its acknowledgement was answered.
    renewed: int = 0
    received_since_durable: bool = False
    last_stream: int = -1


class DeliveryHistory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[Position, _Row] = {}
        self._changed = threading.Condition()
        self._epochs: dict[str, int] = {}
        self._breaches: list[str] = []
        self.stale = 0
        """Rows that came under an epoch below the highest one seen: callers drop them."""
        self.repeats = 0
        self.answered_rows = 0
        self.received_rows = 0
        self.missing = 0
        """Rows answered OK that have not come yet."""

    def sending(self, positions: Iterable[Position], deliver_at_ms: Iterable[int], *, exact: bool) -> None:
        """An add is about to be sent, for the first time or again."""
        with self._changed:
            for position, due in zip(positions, deliver_at_ms, strict=True):
                self._rows.setdefault(position, _Row(due, exact)).sends += 1

    def answered(self, positions: Iterable[Position]) -> None:
        """The add was answered OK."""
        with self._changed:
            for position in positions:
                row = self._rows[position]
                if not row.answered:
                    row.answered = True
                    self.answered_rows += 1
                    self.missing += not row.receipts
            self._changed.notify_all()

    def received(
        self, topic: str, stream: int, epoch: int, messages: Iterable[tuple[int, int, int]], *, at_ms: int
    ) -> None:
        """Rows (ledger, entry, deliver_at_ms) came on a stream."""
        with self._changed:
            if epoch < self._epochs.get(topic, 0):
                self.stale += len(list(messages))
                return
            self._epochs[topic] = epoch
            for ledger, entry, due in messages:
                self._receive((ledger, entry), stream, due, at_ms)
            self._changed.notify_all()

    def acknowledging(self, positions: Iterable[Position]) -> None:
        """An acknowledgement is about to be sent."""
        with self._changed:
            for position in positions:
                self._rows[position].acknowledged = True

    def durable(self, topic: str, epoch: int, positions: Iterable[Position]) -> None:
        """The acknowledgement was answered."""
        with self._changed:
            if epoch < self._epochs.get(topic, 0):
                return
            for position in positions:
                row = self._rows[position]
                row.durable += 1
                row.received_since_durable = False
            self._changed.notify_all()

    def breach(self, text: str) -> None:
        """Something that must not happen, found by the traffic."""
        with self._changed:
            self._breaches.append(text)
            self._changed.notify_all()

    def wait_for(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until `reached()`, asked at each change. Raises `AssertionError` when the time is over."""
        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise AssertionError(f"{what}: not within {timeout_s:g} s; {self.describe()}")

    def describe(self) -> str:
        with self._changed:
            return (
                f"{len(self._rows)} rows sent, {self.answered_rows} answered, {self.received_rows} received, "
                f"{self.missing} of the answered missing, {self.repeats} repeats, {self.stale} stale"
            )

    def breaches(self) -> list[str]:
        """Everything that broke a rule so far; rows that are lost are those that have not come by now."""
        with self._changed:
            lost = [position for position, row in self._rows.items() if row.answered and not row.receipts]
            return [*self._breaches, *(f"{position} was answered OK and never came" for position in lost)]

    def _receive(self, position: Position, stream: int, due: int, at_ms: int) -> None:
        row = self._rows.get(position)
        if row is None:
            self._breaches.append(f"{position} came and was never sent")
            return
        if at_ms < due or at_ms < row.deliver_at_ms:
            self._breaches.append(f"{position} came at {at_ms}, early: due {due}, added with {row.deliver_at_ms}")
        if due != row.deliver_at_ms and (row.exact or due < row.deliver_at_ms):
            self._breaches.append(f"{position} came with {due}, and was added with {row.deliver_at_ms}")
        if row.durable and not row.received_since_durable:
            if row.durable >= row.sends:
                self._breaches.append(f"{position} came after its acknowledgement was durable")
        elif row.last_stream == stream:
            if row.acknowledged and row.sends > 1 + row.renewed:
                row.renewed += 1
            else:
                self._breaches.append(f"{position} came twice on one stream")
        self.repeats += row.receipts > 0
        self.received_rows += row.receipts == 0
        self.missing -= row.answered and not row.receipts
        row.receipts += 1
        row.received_since_durable = True
        row.acknowledged = False
        row.last_stream = stream
