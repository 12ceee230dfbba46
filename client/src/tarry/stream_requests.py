"""Requests of a subscription's stream until they are answered, and acknowledgements that are sent as one.

Owns: what a request still names, what it is settled with, and how the answer to joined acknowledgements is shared out.
Does not own: when they are sent, repeated and joined (`tarry.receiving`); the bytes (`tarry.wire`).

How long acknowledgements wait for others, by how many a client makes.

Owns: counting them over all subscriptions of the client, and the moments at which they leave together.
Does not own: what waits, and what is sent together (`tarry.receiving`).

What costs a daemon is each request, not each position. A subscription with few acknowledgements a second has nothing to
join within a few ms; a client with many such subscriptions sends as many requests as it acknowledges. So the time grows
with the acknowledgements of the client: 5 ms up to 100 a second, 50 ms from 1,000 on, unless the caller says otherwise.
It ends at the same moments for all subscriptions, so that those of one stream leave as one message.

Who waits for each answer before the next acknowledgement gains nothing by joining, and waits no longer than at rest.
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
    """What `encode` encodes; of no use where the request names no positions."""
    answer: Answer
    read: Callable[[dispatch_pb2.Done, results.Ignored], object]
    positions: columns.Positions = batch.NOTHING
    size_rows: int = 0
    """Positions that it had at first."""
    leaving: list[tuple[int, batch.Batch]] = dataclasses.field(default_factory=list)
    """What is held no longer because of it, by receiver."""
    attempt: int = 1
    places: NDArray[np.int64] | None = None
    """Which of the positions that it had at first it has; None: all."""
    needs: attempts.Need | None = None
    """What the daemon has to be able to do."""
    sent_places: NDArray[np.int64] | None = None
    """`places` when it was sent: an answer is about these."""

    @property
    def is_acknowledgement(self) -> bool:
        return self.encode is wire.encode_acknowledge

    @property
    def sent_rows(self) -> int:
        """How many positions it had when it was sent."""
        return self.size_rows if self.sent_places is None else len(self.sent_places)

    def message(self) -> bytes:
        """The bytes of the request, to be sent now."""
        self.sent_places = self.places
        return self.encode(self.request_id, self.rows)

    @property
    def asks_for_nothing(self) -> bool:
        """Whether nothing is left of the positions that it had."""
        return bool(self.size_rows) and not self.positions.rows

    def leave_out(self, taken_back: columns.Positions) -> None:
        """The daemon ignores what it took back before it read this: it is not to be repeated.

        But for what is forwarded: it would come again by the name that failed, which who has that does not take twice.
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
        """With the answer to what was sent."""
        return self.settled_with(done, results.Ignored.from_message(done, self.sent_rows))

    def settled_with(self, done: dispatch_pb2.Done, ignored: results.Ignored) -> Settled[Answer]:
        """`ignored`: of what was sent."""
        if self.sent_places is not None:
            ignored = ignored.placed(self.sent_places, self.size_rows)
        return streams.Settled(self.request_id, self.answer, self.read(done, ignored), None)

    def settled_unsent(self) -> Settled[Answer]:
        """Without asking: nothing is left to ask for."""
        self.sent_places = self.places
        return self.settled(dispatch_pb2.Done())


@dataclasses.dataclass(slots=True, eq=False)
class Joined(Generic[Answer]):
    """Acknowledgements that are one request of the wire; each is settled by itself."""

    request_id: int
    members: list[Request[Answer]]
    attempt: int = 1

    def message(self) -> bytes:
        """The bytes of the request, to be sent now."""
        for member in self.members:
            member.sent_places = member.places
        positions = batch.concatenate([member.positions for member in self.members])
        return wire.encode_acknowledge(self.request_id, positions)

    def settled(self, done: dispatch_pb2.Done) -> list[Settled[Answer]]:
        """Each with what was ignored of its own positions."""
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
    """Acknowledgements, in their order, by what may be one request: of at most so many rows, all of them with
    redelivery counts or none, since one without would make all of them mean any hand-out.
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
    """What is left of them, by receiver."""
    left = [(receiver, part.take(~batch.members(part.positions, positions))) for receiver, part in held]
    return [(receiver, part) for receiver, part in left if len(part)]


# So many acknowledgements a second make the time a second.
_PER_SECOND = 20_000
# Over how long they are counted, in seconds.
_COUNTED_S = 1.0
# After so many acknowledgements, each behind the answer to the one before, the caller is one that waits for each.
_ALONE_MAX = 8
# A longer time than this, in seconds, is somebody's choice, and is kept to the full.
_TOGETHER_MAX_S = 0.1


class AckPace:
    """Acknowledgements a second of all subscriptions of a client.

    Threads may share it: two that count at once may count one.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s`: a clock that never goes back, in seconds."""
        self.now_s = now_s
        self._per_second = 0.0
        self._counted_at_s = now_s()

    def acknowledged(self) -> None:
        """Counts one."""
        self._per_second = self.per_second + 1 / _COUNTED_S
        self._counted_at_s = self.now_s()

    @property
    def per_second(self) -> float:
        """How many there were in a second, of late."""
        return self._per_second * math.exp((self._counted_at_s - self.now_s()) / _COUNTED_S)


class AckLinger:
    """How long the acknowledgements of one subscription wait for others."""

    def __init__(self, least_ms: int, most_ms: int | None = None, pace: AckPace | None = None) -> None:
        """`least_ms`: at rest; 0: none waits. `most_ms`: however many there are; None: as at rest. Raises
        InvalidArgument.
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
        """Whether none waits."""
        return not self._least_s

    def acknowledged(self, *, alone: bool) -> None:
        """Counts one. `alone`: every request before it was answered."""
        self._pace.acknowledged()
        self._alone = self._alone + 1 if alone else 0

    def wait_s(self) -> float:
        """How long what is acknowledged now waits, in seconds."""
        linger_s = self._least_s
        wanted_s = 0.0 if self._alone >= _ALONE_MAX else min(self._pace.per_second / _PER_SECOND, self._most_s)
        # In steps, so that the moments of most subscriptions are the same.
        while 2 * linger_s <= wanted_s:
            linger_s *= 2
        if wanted_s >= self._most_s:
            linger_s = self._most_s
        if linger_s > _TOGETHER_MAX_S:
            return linger_s
        return linger_s - self._pace.now_s() % linger_s
