"""A store that fails as stores fail, around any store.

Fault model. Each call is decided once, by a `Decide` function, before it reaches the inner store:
- `FAIL_BEFORE`: nothing happens, `StoreUnavailable`.
- `FAIL_AFTER`: it is done, its answer is lost, whatever it was: `OutcomeUnknown` from `put_if_absent`, else
  `StoreUnavailable`.
- `DELIVER_LATE`: a write is not done now, and its sender is told what `FAIL_AFTER` tells; `deliver_late` does it, at a
  time when its sender may long be gone.
- `ANSWER_EXISTS`: `put_if_absent` does nothing and says `AlreadyExists`, as servers answer 409 though nobody has won.
- `REFUSE`: nothing happens, `StoreRefused`: permissions were taken away.
- `SHORT`: a read finds fewer bytes than were written, and says so: `Damaged`.
- `FLIP_BIT`: a read gives the bytes with one bit inverted, and does not notice.
- `Pause`: the call waits until the test releases it, and then goes on with another fault or none.
From `go_down` to `come_back` every call is `FAIL_BEFORE`, also those of paused calls that are released meanwhile.

Not in the model: stores that break the promises of the port (lost objects, incomplete listings, two winners). A listing
is decided when it begins and is whole then.

Owns: the faults and the record of calls. Does not own: time; nothing here waits but a `Pause`, for the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Final

from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    Damaged,
    ListedObject,
    ObjectInfo,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

PAUSE_TIMEOUT_S: Final = 300.0
"""A paused call that nobody releases fails after this time, so that a test fails instead of hanging."""

READS: Final = frozenset({"get_with_metadata", "get_range"})
WRITES: Final = frozenset({"put", "put_if_absent", "delete"})


class Fault(Enum):
    """What happens to one call; the head of the module says what each means."""

    NONE = "none"
    FAIL_BEFORE = "fail before"
    FAIL_AFTER = "fail after"
    DELIVER_LATE = "deliver late"
    ANSWER_EXISTS = "answer exists"
    REFUSE = "refuse"
    SHORT = "short"
    FLIP_BIT = "flip bit"


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """The call stops: `reached` is set, and it goes on with `then` when the test sets `released`."""

    then: Fault = Fault.NONE
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the operation as the port names it (`get` is `get_with_metadata`), key or prefix, number from 0 on."""

    operation: str
    key: str
    number: int


Decide = Callable[[Call], Fault | Pause]


def no_fault(call: Call) -> Fault:
    """Everything works."""
    return Fault.NONE


def seeded(random: Random, weights: Mapping[Fault, float]) -> Decide:
    """Each call is hit by a fault that applies to it, with the probability `weights` gives that fault.

    The same seed and the same order of calls give the same faults.
    """

    def decide(call: Call) -> Fault:
        drawn = random.random()
        for fault, probability in weights.items():
            if drawn < probability:
                return fault if applies(fault, call.operation) else Fault.NONE
            drawn -= probability
        return Fault.NONE

    return decide


def applies(fault: Fault, operation: str) -> bool:
    """Whether the fault can happen to the operation."""
    if fault is Fault.ANSWER_EXISTS:
        return operation == "put_if_absent"
    if fault is Fault.DELIVER_LATE:
        return operation in WRITES
    if fault in (Fault.SHORT, Fault.FLIP_BIT):
        return operation in READS
    return True


class Script:
    """Faults that the test puts in line, each for the first call that it fits; everything else works."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[tuple[str, str, Fault | Pause]] = []
        self._unmet: dict[tuple[str, str], None] = {}

    def plan(self, operation: str, fault: Fault | Pause, *, key_part: str = "", times: int = 1) -> None:
        """The next `times` calls of `operation` whose key contains `key_part` meet `fault`."""
        with self._lock:
            self._planned.extend([(operation, key_part, fault)] * times)
            self._unmet[operation, key_part] = None

    def pause(self, operation: str, *, key_part: str = "", then: Fault = Fault.NONE) -> Pause:
        """The next such call stops; the answer is to be waited for and released."""
        pause = Pause(then)
        self.plan(operation, pause, key_part=key_part)
        return pause

    def unmet(self) -> int:
        """How many planned faults no call has met yet."""
        with self._lock:
            return len(self._planned)

    def places_unmet(self) -> list[tuple[str, str]]:
        """Where faults were planned that no call has met at all since: operations, and parts of keys."""
        with self._lock:
            return list(self._unmet)

    def __call__(self, call: Call) -> Fault | Pause:
        with self._lock:
            for index, (operation, key_part, fault) in enumerate(self._planned):
                if operation == call.operation and key_part in call.key:
                    del self._planned[index]
                    self._unmet.pop((operation, key_part), None)
                    return fault
        return Fault.NONE


class FaultStore(ObjectStore):
    """`inner` with the faults that `decide` chooses. `close` leaves `inner` open: a successor may go on with it."""

    def __init__(self, inner: ObjectStore, decide: Decide = no_fault) -> None:
        self.inner: Final = inner
        self._decide = decide
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._down = False
        self._late: list[Callable[[], None]] = []

    @property
    def calls(self) -> Sequence[Call]:
        """Every call so far, in the order in which they came."""
        with self._lock:
            return tuple(self._calls)

    def go_down(self) -> None:
        """From now on every call fails before it does anything."""
        with self._lock:
            self._down = True

    def come_back(self) -> None:
        """Calls are decided again."""
        with self._lock:
            self._down = False

    def deliver_late(self) -> int:
        """Do the writes that were held back, in the order in which they were sent; how many took effect."""
        with self._lock:
            late, self._late = self._late, []
        landed = 0
        for write in late:
            try:
                write()
            except AlreadyExists:
                continue
            landed += 1
        return landed

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        self._write("put", key, lambda: self.inner.put(key, body, metadata=metadata))

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self._write("put_if_absent", key, lambda: self.inner.put_if_absent(key, body, metadata=metadata))

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        with self._call("get_with_metadata", key) as (call, fault):
            body, metadata = self.inner.get_with_metadata(key)
            return _altered(call, fault, body), metadata

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._call("get_range", key) as (call, fault):
            return _altered(call, fault, self.inner.get_range(key, offset, length))

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key):
            return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        with self._call("list", prefix):
            return iter(tuple(self.inner.list(prefix, start_after=start_after)))

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self.inner.delete(key))

    def clock_skew_s(self) -> float | None:
        return self.inner.clock_skew_s()

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def _write(self, operation: str, key: str, write: Callable[[], None]) -> None:
        with self._call(operation, key) as (call, fault):
            if fault is Fault.DELIVER_LATE:
                with self._lock:
                    self._late.append(write)
                raise _lost(call)
            write()

    @contextmanager
    def _call(self, operation: str, key: str) -> Iterator[tuple[Call, Fault]]:
        """One call to the inner store: nothing of it if it fails before, nothing of its answer if it fails after."""
        call, fault = self._begin(operation, key)
        try:
            yield call, fault
        finally:
            if fault is Fault.FAIL_AFTER:
                raise _lost(call)

    def _begin(self, operation: str, key: str) -> tuple[Call, Fault]:
        """Record the call, decide it, wait if it is paused, and raise what keeps it from the inner store."""
        with self._lock:
            call = Call(operation, key, len(self._calls))
            self._calls.append(call)
            decided = Fault.FAIL_BEFORE if self._down else self._decide(call)
        if isinstance(decided, Pause):
            decided.reached.set()
            if not decided.released.wait(PAUSE_TIMEOUT_S):
                raise TimeoutError(f"nobody released {call} for {PAUSE_TIMEOUT_S} s")
            with self._lock:
                decided = Fault.FAIL_BEFORE if self._down else decided.then
        if not applies(decided, operation):
            raise ValueError(f"{decided} cannot happen to {call}")
        if decided is Fault.FAIL_BEFORE:
            raise StoreUnavailable(key, "fault: the store is not reached")
        if decided is Fault.REFUSE:
            raise StoreRefused(key, "fault: not allowed")
        if decided is Fault.ANSWER_EXISTS:
            raise AlreadyExists(key, "fault: answered 409")
        return call, decided


def _lost(call: Call) -> StoreError:
    kind = OutcomeUnknown if call.operation == "put_if_absent" else StoreUnavailable
    return kind(call.key, "fault: the answer is lost")


def _altered(call: Call, fault: Fault, body: bytes) -> bytes:
    if fault is Fault.SHORT:
        raise Damaged(call.key, f"fault: the object ends after {len(body) // 2} bytes")
    if fault is Fault.FLIP_BIT and body:
        place = call.number % len(body)
        return body[:place] + bytes([body[place] ^ (1 << call.number % 8)]) + body[place + 1 :]
    return body
