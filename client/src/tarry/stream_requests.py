"""Requests of a subscription's stream until they are answered, and how long acknowledgements wait to be joined.

`tarry.receiving` decides when requests are sent, repeated and joined. This module knows what a request still names and
what settles it, and divides the answer to joined acknowledgements among them.
A request costs the daemon more than its positions. A subscription with few acknowledgements a second has nothing to
join within a few ms, but a client with many such subscriptions sends a request for each. Therefore the wait grows with
the acknowledgements of the client: 5 ms up to 100 a second, 50 ms from 1,000 on, by default. It ends at the same
moments for all subscriptions, so that those of one stream leave as one message. A caller that waits for each answer
before its next acknowledgement gains nothing by joining, and waits no longer than at rest.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import attempts, batch, columns, reasons, results, streams, wire
from tarry.v1 import dispatch_pb2

Answer = TypeVar("Answer")
Settled: TypeAlias = streams.Settled[Answer, Any]


@dataclasses.dataclass(slots=True, eq=False)
class Request(Generic[Answer]):
    """A request that is not known to be done."""

    request_id: int
    encode: Callable[[int, Any], bytes]
    rows: Any
    """Argument of `encode`; unused if the request names no positions"""
    answer: Answer
    read: Callable[[dispatch_pb2.Done, results.Ignored], object]
    positions: columns.Positions = batch.NOTHING
    size_rows: int = 0
    """Positions named at first"""
    leaving: list[tuple[int, batch.Batch]] = dataclasses.field(default_factory=list)
    """Rows no longer held because of the request, by receiver"""
    attempt: int = 1
    places: NDArray[np.int64] | None = None
    """Indexes of the positions that are left; None for all"""
    needs: attempts.Need | None = None
    """Feature that the daemon must have"""
    sent_places: NDArray[np.int64] | None = None
    """`places` at the last send, to which an answer refers"""

    @property
    def is_acknowledgement(self) -> bool:
        return self.encode is wire.encode_acknowledge

    @property
    def sent_rows(self) -> int:
        """The number of positions at the last send."""
        return self.size_rows if self.sent_places is None else len(self.sent_places)

    def message(self) -> bytes:
        """Return the bytes of the request, which is sent now."""
        self.sent_places = self.places
        return self.encode(self.request_id, self.rows)

    @property
    def asks_for_nothing(self) -> bool:
        """True if none of its positions are left."""
        return bool(self.size_rows) and not self.positions.rows

    def leave_out(self, taken_back: columns.Positions) -> None:
        """Leave out positions that the daemon took back before it read the request, which must not be repeated.

        A forwarded request keeps them: otherwise the position would be delivered again under the name that failed,
        which its receiver does not take twice.
        """
        if self.needs is not None:
            self.leaving = without(self.leaving, taken_back)
            return
        stays = ~batch.members(self.positions, taken_back)
        if not stays.all():
            self.rows, self.positions = self.rows.take(stays), self.positions.take(stays)
            self.places = (np.arange(self.size_rows) if self.places is None else self.places)[stays]
            self.leaving = without(self.leaving, taken_back)

    def settled(self, done: dispatch_pb2.Done) -> Settled[Answer]:
        """Return the request settled with the answer to what was sent."""
        return self.settled_with(done, results.Ignored.from_message(done, self.sent_rows))

    def settled_with(self, done: dispatch_pb2.Done, ignored: results.Ignored) -> Settled[Answer]:
        """Return the request settled with an answer and the ignored positions of what was sent."""
        if self.sent_places is not None:
            ignored = ignored.placed(self.sent_places, self.size_rows)
        return streams.Settled(self.request_id, self.answer, self.read(done, ignored), None)

    def settled_unsent(self) -> Settled[Answer]:
        """Return the request settled without asking, because nothing is left to ask for."""
        self.sent_places = self.places
        return self.settled(dispatch_pb2.Done())


@dataclasses.dataclass(slots=True, eq=False)
class Joined(Generic[Answer]):
    """Acknowledgements sent as one request; each is settled separately."""

    request_id: int
    members: list[Request[Answer]]
    attempt: int = 1

    def message(self) -> bytes:
        """Return the bytes of the request, which is sent now."""
        for member in self.members:
            member.sent_places = member.places
        positions = batch.concatenate([member.positions for member in self.members])
        return wire.encode_acknowledge(self.request_id, positions)

    def settled(self, done: dispatch_pb2.Done) -> list[Settled[Answer]]:
        """Return each member settled with the ignored ones of its own positions."""
        index, reason = reasons.rows_and_reasons(done.ignored_index, done.ignored_reason)
        settled, first = [], 0
        for member in self.members:
            rows = member.sent_rows
            own = (index >= first) & (index < first + rows)
            ignored = results.Ignored(int(own.sum()), index[own] - first, reason[own], rows)
            settled.append(member.settled_with(done, ignored))
            first += rows
        return settled


def joinable(requests: Iterable[Request[Answer]], rows_max: int) -> Iterator[list[Request[Answer]]]:
    """Yield groups of acknowledgements, in order, that may form one request.

    A group has at most `rows_max` rows, and redelivery counts in all of them or none: a single one without would make
    all mean any delivery.
    """
    group: list[Request[Answer]] = []
    rows = 0
    for request in requests:
        positions = request.positions
        names_counts = positions.redelivery_count is not None
        if group and (
            rows + positions.rows > rows_max or names_counts != (group[0].positions.redelivery_count is not None)
        ):
            yield group
            group, rows = [], 0
        group.append(request)
        rows += positions.rows
    if group:
        yield group


def without(held: list[tuple[int, batch.Batch]], positions: columns.Positions) -> list[tuple[int, batch.Batch]]:
    """Return what is left without the positions, by receiver."""
    left = [(receiver, part.take(~batch.members(part.positions, positions))) for receiver, part in held]
    return [(receiver, part) for receiver, part in left if len(part)]


# Acknowledgements a second at which the wait would be one second
_PER_SECOND = 20_000
# Averaging time of the rate (seconds)
_COUNTED_S = 1.0
# After this many acknowledgements in a row that each followed an answer, the caller counts as waiting for each.
_ALONE_MAX = 8
# A longer wait was chosen by the caller and is kept in full (seconds).
_TOGETHER_MAX_S = 0.1


class AckPace:
    """The rate of acknowledgements of all subscriptions of a client.

    Threads may share it: two that count at the same time may count one.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Measure with a monotonic clock (seconds)."""
        self.now_s = now_s
        self._per_second = 0.0
        self._counted_at_s = now_s()

    def acknowledged(self) -> None:
        """Count one acknowledgement."""
        self._per_second = self.per_second + 1 / _COUNTED_S
        self._counted_at_s = self.now_s()

    @property
    def per_second(self) -> float:
        """The recent rate (per second)."""
        return self._per_second * math.exp((self._counted_at_s - self.now_s()) / _COUNTED_S)


class AckLinger:
    """The wait of one subscription's acknowledgements for others."""

    def __init__(self, least_ms: int, most_ms: int | None = None, pace: AckPace | None = None) -> None:
        """Wait `least_ms` at rest and up to `most_ms` under load.

        A `least_ms` of 0 means that none waits; `most_ms` None means the wait at rest. Raises InvalidArgument.
        """
        columns.check_unsigned("ack_linger_ms", least_ms, bits=32)
        if most_ms is not None:
            columns.check_unsigned("ack_linger_max_ms", most_ms, bits=32)
        self._least_s = least_ms / 1000
        self._most_s = max(least_ms, most_ms or 0) / 1000
        self._pace = pace or AckPace()
        self._alone = _ALONE_MAX

    @property
    def is_off(self) -> bool:
        """True if none waits."""
        return not self._least_s

    def acknowledged(self, *, alone: bool) -> None:
        """Count one acknowledgement; `alone` if every earlier request was answered."""
        self._pace.acknowledged()
        self._alone = self._alone + 1 if alone else 0

    def wait_s(self) -> float:
        """Return how long an acknowledgement made now waits (seconds)."""
        linger_s = self._least_s
        wanted_s = 0.0 if self._alone >= _ALONE_MAX else min(self._pace.per_second / _PER_SECOND, self._most_s)
        # In steps, so that most subscriptions share the same moments
        while 2 * linger_s <= wanted_s:
            linger_s *= 2
        if wanted_s >= self._most_s:
            linger_s = self._most_s
        if linger_s > _TOGETHER_MAX_S:
            return linger_s
        return linger_s - self._pace.now_s() % linger_s
