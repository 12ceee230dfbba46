"""Every order of committers, a collector and a network that loses answers, within bounds.

Owns: the decisions of a run, whose turn it is, the store as one committer sees it, and the search over all runs.
Does not own: what is committed, and what must hold after a run.

Each operation of the store is a step. Before each step the running committer may be pre-empted, garbage may be
collected (a day passes, and every manifest but the last is deleted), a held back PUT may arrive; and a step may lose
its answer. How often each of these happens in one run is bounded, all runs within the bounds are made, by depth-first
search.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping

from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    ListedObject,
    ObjectInfo,
    OutcomeUnknown,
    StoreUnavailable,
)
from tests._support.virtual_clock import VirtualClock

DAY_S = 86_400.0
HANDOVER_TIMEOUT_S = 300.0
# They act in one run after the other: starting them takes as long as a short run.
THREADS = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="actor")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How often each kind of trouble may happen in one run."""

    preemptions: int = 2
    lost_puts: int = 1
    failed_heads: int = 0
    collections: int = 1


class Broken(AssertionError):
    """An invariant does not hold."""


class Choices:
    """The decisions of one run: first those of `prefix`, then always the first option."""

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self._prefix = prefix
        self.made: list[tuple[int, int]] = []

    def pick(self, options: int) -> int:
        place = len(self.made)
        choice = self._prefix[place] if place < len(self._prefix) else 0
        self.made.append((choice, options))
        return choice

    def next_prefix(self) -> tuple[int, ...] | None:
        """The decisions of the next run in depth-first order; None after the last."""
        while self.made:
            choice, options = self.made.pop()
            if choice + 1 < options:
                return (*(each for each, _ in self.made), choice + 1)
        return None


class Run:
    """One run: the store, the clock and whose turn it is. A thread runs only while it holds the turn."""

    def __init__(self, choices: Choices, bounds: Bounds, prefix: str) -> None:
        self._choices = choices
        self._prefix = prefix
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.trace: list[str] = []
        self._preemptions = bounds.preemptions
        self._lost_puts = bounds.lost_puts
        self._failed_heads = bounds.failed_heads
        self._collections = bounds.collections
        self._held_back: Callable[[], None] | None = None
        self._actors: dict[str, Callable[[], None]] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._acting = ""
        self._done = _taken_lock()
        self._failures: list[BaseException] = []

    def run(self, actors: Mapping[str, Callable[[], None]]) -> None:
        self._actors = dict(actors)
        self._hand_over(next(iter(actors)))
        if not self._done.acquire(timeout=HANDOVER_TIMEOUT_S):
            raise TimeoutError(f"a run does not end: {self.trace}")
        if self._failures:
            raise self._failures[0]
        self._arrive()

    def _act(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self._failures.append(error)
        del self._actors[name]
        if self._actors:
            self._hand_over(next(iter(self._actors)))
        else:
            self._done.release()

    def _wait(self, name: str) -> None:
        if not self._turns[name].acquire(timeout=HANDOVER_TIMEOUT_S):
            raise TimeoutError(f"{name} never got its turn: {self.trace}")

    def _hand_over(self, name: str) -> None:
        self._acting = name
        if name in self._turns:
            self._turns[name].release()
        else:
            self._turns[name] = _taken_lock()
            THREADS.submit(self._act, name, self._actors[name])

    def step(self, label: str) -> None:
        """Called by the running committer before an operation: what happens first."""
        name = self._acting
        while True:
            options = ["go on"]
            if self._preemptions:
                options += [other for other in self._actors if other != name]
            if self._collections and sum(1 for _ in self.store.list(self._prefix)) > 1:
                options.append("collect")
            if self._held_back is not None:
                options.append("arrive")
            chosen = options[self._choices.pick(len(options))]
            self.trace.append(f"{name}: {label}" if chosen == "go on" else chosen)
            if chosen == "go on":
                return
            if chosen == "collect":
                self._collect()
            elif chosen == "arrive":
                self._arrive()
            else:
                self._preemptions -= 1
                self._hand_over(chosen)
                self._wait(name)

    def _collect(self) -> None:
        self._collections -= 1
        self.clock.now_s += DAY_S
        for entry in sorted(self.store.list(self._prefix), key=lambda entry: entry.key)[:-1]:
            self.store.delete(entry.key)

    def _arrive(self) -> None:
        write, self._held_back = self._held_back, None
        if write is not None:
            write()

    def loses_put(self, write: Callable[[], None]) -> bool:
        """Whether the answer of a PUT is lost; then it has landed, or will arrive later or, at the end, never."""
        if not self._lost_puts or self._held_back is not None:
            return False
        chosen = self._choices.pick(3)
        if not chosen:
            return False
        self._lost_puts -= 1
        self.trace.append(["", "answer lost", "held back"][chosen])
        if chosen == 1:
            write()
        else:
            self._held_back = write
        return True

    def fails_head(self) -> bool:
        if not self._failed_heads or not self._choices.pick(2):
            return False
        self._failed_heads -= 1
        self.trace.append("HEAD fails")
        return True


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class SteppedStore(MemoryStore):
    """The view that one committer or collector has of the store of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self._run.step(f"put {key[-2:]}")

        def write() -> None:
            try:
                self._run.store.put_if_absent(key, body, metadata=metadata)
            except AlreadyExists:
                pass

        if self._run.loses_put(write):
            raise OutcomeUnknown(key, "the answer is lost")
        self._run.store.put_if_absent(key, body, metadata=metadata)

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        self._run.step(f"put {key[-6:]}")
        self._run.store.put(key, body, metadata=metadata)

    def delete(self, key: str) -> None:
        self._run.step(f"delete {key[-6:]}")
        self._run.store.delete(key)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        self._run.step(f"get {key[-2:]}")
        return self._run.store.get_with_metadata(key)

    def head(self, key: str) -> ObjectInfo:
        self._run.step(f"head {key[-2:]}")
        if self._run.fails_head():
            raise StoreUnavailable(key, "not now")
        return self._run.store.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        self._run.step("list")
        return self._run.store.list(prefix, start_after=start_after)


def explore(once: Callable[[Choices], None]) -> int:
    """Makes every run; how many there were. `once` makes one, checks it, and adds its trace to what it raises."""
    prefix: tuple[int, ...] | None = ()
    for runs in itertools.count():
        if prefix is None:
            return runs
        choices = Choices(prefix)
        once(choices)
        prefix = choices.next_prefix()
    raise AssertionError
