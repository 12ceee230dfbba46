"""Knows the consumers of a KEY_SHARED subscription, their streams and permits.

Tables of hashes know a consumer by its ordinal, at least 1, which is reused after the consumer has left; 0 means no
consumer. `hash_selectors` knows a consumer's hashes, `in_flight` the rows that it holds.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from daemon.core.index.position_keys import Mask
from daemon.core.key_shared.hash_slots import U16, HashRange
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32

I64 = npt.NDArray[np.int64]
_ORDINALS_AT_FIRST = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """A consumer as it joins: an instance of its own, whatever its name.

    `number` is the dispatcher number under which it holds rows, unique in the subscription. `stream` is the number of
    its stream. `hash_ranges` are the hash slots that it asks for.
    """

    number: int
    stream: int
    name: str
    address: str = ""
    permits: int = 0
    hash_ranges: tuple[HashRange, ...] = ()


class Consumers:
    """Consumers by ordinal and by number. One that has left keeps its ordinal until `forget`."""

    def __init__(self) -> None:
        self._by_ordinal: list[Joining | None] = [None]
        self._free: list[int] = []
        # Number -> ordinal, in the order of joining
        self._ordinals: dict[int, int] = {}
        self._numbers = np.zeros(_ORDINALS_AT_FIRST, np.uint32)
        self._streams = np.zeros(_ORDINALS_AT_FIRST, np.uint32)
        self._permits = np.zeros(_ORDINALS_AT_FIRST, np.int64)
        self._takes = np.zeros(_ORDINALS_AT_FIRST, np.bool_)
        self._full: set[int] = set()
        self._departed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ordinals)

    def __contains__(self, number: int) -> bool:
        return number in self._ordinals

    def __iter__(self) -> Iterator[tuple[int, Joining]]:
        """Iterate over (ordinal, consumer) in the order of joining."""
        return ((ordinal, self[ordinal]) for ordinal in self._ordinals.values())

    def __getitem__(self, ordinal: int) -> Joining:
        consumer = self._by_ordinal[ordinal]
        if consumer is None:
            raise InvariantViolated(f"no consumer has the ordinal {ordinal}")
        return consumer

    # ---- joining and leaving

    def next_ordinals(self, count: int) -> list[int]:
        """Return the ordinals that the next consumers to join will have."""
        free = heapq.nsmallest(count, self._free)
        first = len(self._by_ordinal)
        return free + list(range(first, first + count - len(free)))

    def join(self, joining: Sequence[Joining]) -> None:
        for consumer in joining:
            if consumer.number in self._ordinals:
                raise InvariantViolated(f"a consumer has the number {consumer.number} already")
            ordinal = heapq.heappop(self._free) if self._free else self._next_ordinal()
            self._by_ordinal[ordinal] = consumer
            self._ordinals[consumer.number] = ordinal
            self._numbers[ordinal], self._streams[ordinal] = consumer.number, consumer.stream
            self._permits[ordinal] = consumer.permits
            self._takes[ordinal] = consumer.stream not in self._full

    def _next_ordinal(self) -> int:
        ordinal = len(self._by_ordinal)
        self._by_ordinal.append(None)
        if ordinal == len(self._numbers):
            for name in ("_numbers", "_streams", "_permits", "_takes"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        return ordinal

    def leave(self, numbers: Collection[int]) -> None:
        for number in numbers:
            ordinal = self._departed[number] = self._ordinals.pop(number)
            self._by_ordinal[ordinal] = None
            self._numbers[ordinal] = self._streams[ordinal] = self._permits[ordinal] = 0
            self._takes[ordinal] = False

    @property
    def departed(self) -> list[int]:
        """The numbers of consumers that have left and are not forgotten."""
        return list(self._departed)

    def forget(self, number: int) -> None:
        """Forget a consumer that has left: its ordinal is free."""
        heapq.heappush(self._free, self._departed.pop(number))

    # ---- who is who

    def ordinal_of(self, number: int) -> int:
        return self._ordinals[number]

    def ordinals_of(self, numbers: U32) -> U16:
        """Return the ordinals of a column of numbers, each of a consumer that is present or not forgotten."""
        if not numbers.strides[0] or (numbers == numbers[0]).all():
            return np.broadcast_to(np.asarray(self._ordinal(int(numbers[0])), np.uint16), len(numbers))
        distinct, inverse = np.unique(numbers, return_inverse=True)
        return np.array([self._ordinal(number) for number in distinct.tolist()], np.uint16)[inverse]

    def _ordinal(self, number: int) -> int:
        ordinal = self._ordinals.get(number)
        return self._departed[number] if ordinal is None else ordinal

    def numbers_of(self, ordinals: U16) -> U32:
        """Return the numbers of a column of ordinals; 0 for ordinal 0."""
        numbers: U32 = self._numbers[ordinals]
        return numbers

    def streams_of(self, ordinals: U16) -> U32:
        streams: U32 = self._streams[ordinals]
        return streams

    def are_on(self, stream: int) -> Mask:
        """Return the mask of ordinals whose consumer is on a stream."""
        here: Mask = self._streams == np.uint32(stream)
        return here

    def behind(self, number: int, limit: int) -> list[tuple[int, Joining]]:
        """Return (ordinal, consumer) of at most `limit` consumers with higher numbers, in the order of numbers."""
        there = np.flatnonzero(self._numbers > np.uint32(number))
        chosen = there[np.argsort(self._numbers[there])[:limit]]
        return [(ordinal, self[ordinal]) for ordinal in chosen.tolist()]

    def on_stream(self, stream: int) -> list[int]:
        """Return the numbers of the consumers of a stream."""
        return [consumer.number for _, consumer in self if consumer.stream == stream]

    # ---- permits

    def grant(self, number: int, permits: int, permits_max: int) -> bool:
        """Add permits, up to `permits_max`; return whether the consumer had none."""
        ordinal = self._ordinals[number]
        had = int(self._permits[ordinal])
        self._permits[ordinal] = min(had + permits, permits_max)
        return not had

    def permits_of(self, ordinal: int) -> int:
        return int(self._permits[ordinal])

    @property
    def permits_together(self) -> int:
        """The number of rows that may still be sent to all consumers."""
        return int(self._permits.sum())

    def sent(self, ordinals: U16) -> None:
        """Use one permit of a consumer for each time that it is named."""
        self._permits -= np.bincount(ordinals, minlength=len(self._permits))

    def set_full(self, stream: int, is_full: bool) -> None:
        """Set whether a stream takes nothing now: its consumers then count as having no permits."""
        (self._full.add if is_full else self._full.discard)(stream)
        self._takes[self._streams == np.uint32(stream)] = not is_full

    def permits(self) -> I64:
        """Return how many rows may be sent now to the consumer of each ordinal."""
        return np.where(self._takes, self._permits, 0)
