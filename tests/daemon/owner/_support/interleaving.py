"""Runs actors in threads, one store operation at a time, in an order that a seed decides.

Each actor stops before each of its operations until the scheduler lets it go on. Orders are drawn as in probabilistic
concurrency testing: the actor with the highest priority runs, and at a few random places it becomes the lowest. Long
pauses at the worst moment, which is what breaks takeovers, come up far more often than with fair dice.
"""

from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from storage_backends import memory_store, object_store

T = TypeVar("T")
DEADLOCK_S = 300.0


class Scheduler:
    """`priority_changes` of the first `steps_expected` steps demote whoever runs."""

    def __init__(self, seed: int, *, priority_changes: int = 4, steps_expected: int = 90) -> None:
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(steps_expected) for _ in range(priority_changes)}
        self._turn = threading.Condition()
        self._waiting: dict[str, int] = {}
        self._running: str | None = None
        self._lowest = 0
        self._failures: list[BaseException] = []
        self.trace: list[str] = []

    def step(self, label: str) -> None:
        """Called by an actor before each operation; returns when it is its turn."""
        name = threading.current_thread().name
        with self._turn:
            if name not in self._waiting:
                return
            self._running = None
            self._turn.notify_all()
            if not self._turn.wait_for(lambda: self._running == name, DEADLOCK_S):
                raise TimeoutError(f"{name} never got its turn: {self.trace}")
            self.trace.append(f"{name}: {label}")

    def run(self, actors: Mapping[str, Callable[[], None]]) -> None:
        """Runs all actors to their end; raises what an actor raised."""
        priorities = list(range(1, len(actors) + 1))
        self._random.shuffle(priorities)
        self._waiting = dict(zip(actors, priorities, strict=True))
        threads = [threading.Thread(target=self._act, args=(act,), name=name) for name, act in actors.items()]
        for number, thread in enumerate(threads):
            self._running = thread.name
            thread.start()
            self._until_idle(number)
        for number in range(10_000):
            with self._turn:
                if not self._waiting:
                    break
                chosen = max(self._waiting, key=lambda name: self._waiting[name])
                if number in self._changes:
                    self._lowest -= 1
                    self._waiting[chosen] = self._lowest
                    chosen = max(self._waiting, key=lambda name: self._waiting[name])
                self._running = chosen
                self._turn.notify_all()
            self._until_idle(number)
        for thread in threads:
            thread.join(DEADLOCK_S)
        if self._failures:
            raise self._failures[0]

    def _until_idle(self, number: int) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._running is None, DEADLOCK_S):
                raise TimeoutError(f"step {number} never ended: {self.trace}")

    def _act(self, act: Callable[[], None]) -> None:
        name = threading.current_thread().name
        try:
            self.step("begin")
            act()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            error.add_note("\n".join(self.trace))
            self._failures.append(error)
        finally:
            with self._turn:
                del self._waiting[name]
                self._running = None
                self._turn.notify_all()


class SteppedStore(memory_store.MemoryStore):
    """A store whose every operation waits for its turn. `landed` hears of each successful conditional PUT."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self.landed: Callable[[str, bytes], None] = lambda key, body: None

    def _step(self, label: str) -> None:
        if self.scheduler is not None:
            self.scheduler.step(label)

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = object_store.NO_METADATA) -> None:
        self._step(f"put {key}")
        super().put(key, body, metadata=metadata)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self._step(f"put_if_absent {key}")
        super().put_if_absent(key, body, metadata=metadata)
        self.landed(key, body)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        self._step(f"get {key}")
        return super().get_with_metadata(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[object_store.ListedObject]:
        self._step(f"list {prefix}")
        return super().list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        self._step(f"delete {key}")
        super().delete(key)


class InlineExecutor(concurrent.futures.Executor):
    """Runs what is submitted at once, in the calling thread."""

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)
        return future
