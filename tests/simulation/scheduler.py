"""The order of everybody's steps, by a seed.

A step is one call to the store by one daemon, one sleep of its threads, or one crash point. Each takes a virtual time
that the seed draws; the step that is ready first comes next. How the times are drawn differs from seed to seed: nearly
nothing and all at once, so that any order of those who wait is as likely as any other; around a few milliseconds; or
with a long tail, where a step comes after hundreds of others.

Owns: the draws, and where a job gives back its turn. Does not own: turns (`tests._support.virtual_loop`), faults.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from storage_backends.formats import names
from storage_backends.object_store import NO_METADATA, ListedObject, NotFound, ObjectInfo, ObjectStore, StoreError
from tests._support import fault_places
from tests._support.engine_fixture import Daemon, Killed
from tests._support.fault_places import JOURNAL
from tests._support.virtual_loop import VirtualLoop
from tests.simulation import fired as counted
from tests.simulation.fired import Fired
from tests.simulation.history import History

T = TypeVar("T")

# What tells a daemon that it was still the owner when it asked: of the log that it has opened (L10).
CONFIRMS = ("put_if_absent", "head")

# A step's time: (mean in seconds, share of steps that take SLOW_FACTOR times as long).
PACES = ((0.000_2, 0.0), (0.004, 0.0), (0.004, 0.01), (0.03, 0.003))
SLOW_FACTOR = 200.0
# In some runs everything about one kind of object takes longer: what is usually over at once overlaps with the rest.
SLOW_KINDS = ("", "", "/buckets/", "/checkpoint/", "/manifest/", JOURNAL)
SLOW_KIND_S = 2.0
# So often the answer of a call travels as long as the request.
SLOW_ANSWERS = 0.15


class Pace:
    """Draws how long each step takes. `slow_kind`: the kind of object that is slow, whatever the seed says. `fired`
    counts what was slow therefore.
    """

    def __init__(self, seed: int, fired: Fired, *, slow_kind: str | None = None) -> None:
        self.fired = fired
        self._random = random.Random(f"pace {seed}")
        self._mean_s, self._slow_share = self._random.choice(PACES)
        drawn = self._random.choice(SLOW_KINDS)
        self._slow_kind = drawn if slow_kind is None else slow_kind

    def calm(self) -> None:
        """From now on nothing is slow."""
        self._mean_s, self._slow_share, self._slow_kind = 0.001, 0.0, ""

    def step_s(self, key: str) -> float:
        if self._slow_kind and self._slow_kind in key and self._random.random() < 0.3:
            self.fired[counted.slow(self._slow_kind)] += 1
            return self._random.random() * SLOW_KIND_S
        seconds = self._random.random() * 2 * self._mean_s
        return seconds * SLOW_FACTOR if self._slow_share and self._random.random() < self._slow_share else seconds

    def answer_s(self, key: str) -> float:
        return self.step_s(key) if self._random.random() < SLOW_ANSWERS else 0.0


class SteppedStore(ObjectStore):
    """A daemon's way to a store. `before` and `after` are told of each call; what they raise is its outcome."""

    def __init__(
        self,
        daemon: Daemon,
        inner: ObjectStore,
        pace: Pace,
        history: History,
        before: Callable[[Daemon, str, str], None],
        after: Callable[[Daemon, str, str], None],
    ) -> None:
        self._daemon = daemon
        self._inner = inner
        self._loop: VirtualLoop = daemon.loop
        self._pace = pace
        self._history = history
        self._before = before
        self._after = after
        # How the keys of the log begin that the daemon has opened last.
        self._own_log = names.log_prefix("none")

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        self._call("put", key, lambda: self._inner.put(key, body, metadata=metadata), sent=body)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self._call("put_if_absent", key, lambda: self._inner.put_if_absent(key, body, metadata=metadata), sent=body)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        return self._call("get_with_metadata", key, lambda: self._inner.get_with_metadata(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._call("get_range", key, lambda: self._inner.get_range(key, offset, length))

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        return self._call("list", prefix, lambda: self._inner.list(prefix, start_after=start_after))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._inner.delete(key))

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def _call(self, operation: str, key: str, call: Callable[[], T], *, sent: bytes = b"") -> T:
        sent_s = self._loop.time()
        if operation == "put_if_absent" and fault_places.is_slot(key) and names.number_of(key) == 1:
            self._own_log = key.removesuffix(names.numbered_key("", 1))
        self._wait(self._pace.step_s(key))
        self._before(self._daemon, operation, key)
        line = f"{self._daemon.name} {operation} {key}"
        if sent:
            line += f" {len(sent)}:{zlib.crc32(sent):08x}"
        try:
            result = call()
        except StoreError as error:
            self._history.note(f"{line} -> {type(error).__name__}")
            self._answered(operation, key, sent_s, answered=isinstance(error, NotFound))
            raise
        self._history.note(line)
        self._answered(operation, key, sent_s, answered=True)
        return result

    def _answered(self, operation: str, key: str, sent_s: float, *, answered: bool) -> None:
        self._after(self._daemon, operation, key)
        answer_s = self._pace.answer_s(key)
        if answer_s:
            self._wait(answer_s)
        if answered and operation in CONFIRMS and key.startswith(self._own_log):
            self._pace.fired[counted.confirmed_by(operation)] += 1
            self._daemon.confirmed_s = max(self._daemon.confirmed_s, sent_s)

    def _wait(self, seconds: float) -> None:
        self._loop.block(seconds)
        if self._daemon.dead:
            raise Killed
