"""Requests of a subscription's stream until they are answered, and acknowledgements that are sent as one.

Owns: what a request still names, what it is settled with, and how the answer to joined acknowledgements is shared out.
Does not own: when they are sent, repeated and joined (`tarry.receiving`); the bytes (`tarry.wire`).
"""

from __future__ import annotations

import dataclasses
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
