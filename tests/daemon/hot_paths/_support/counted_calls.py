"""What runs is counted: the same program gives the same counts, however fast or busy the machine is.

Owns: which calls count as whose. Does not own: what is run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

REPOSITORY = Path(__file__).resolve().parents[4]
OURS = tuple(f"{REPOSITORY / folder}/" for folder in ("daemon", "storage_backends", "client/src/tarry"))
LOOP = f"{Path(asyncio.__file__).parent}/"
_CREATE_TASK = asyncio.BaseEventLoop.create_task.__code__


@dataclasses.dataclass(frozen=True)
class Counts:
    """`calls`: of functions of the product, each step of a coroutine among them. `compiled`: calls of compiled code
    that they make. `loop`: calls within asyncio, for a future, a callback or a wait. `tasks`: how many are made.
    `store`: requests to the store.
    """

    calls: float
    compiled: float
    loop: float
    tasks: float
    store: float

    def over(self, units: int) -> Counts:
        """Those of one of so many units."""
        return Counts(**{name: round(count / units, 2) for name, count in dataclasses.asdict(self).items()})

    def beyond(self, limits: Counts) -> dict[str, tuple[float, float]]:
        """What is more than its limit: the count, and the limit."""
        pairs = ((each.name, getattr(self, each.name), getattr(limits, each.name)) for each in dataclasses.fields(self))
        return {name: (count, limit) for name, count, limit in pairs if count > limit}


class Counter:
    """A context manager that counts what this thread does inside it; of other threads, their requests to the store."""

    def __init__(self, store_requests: Callable[[], int]) -> None:
        self._store_requests = store_requests
        self._kinds: dict[CodeType, str] = {}
        self._counted = dict.fromkeys(("ours", "compiled", "loop", "tasks", "other"), 0)
        self._requests = 0

    def __enter__(self) -> Counter:
        self._requests = self._store_requests()
        # What is left of other tests must not end inside.
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self._requests = self._store_requests() - self._requests

    @property
    def counts(self) -> Counts:
        counted = self._counted
        return Counts(counted["ours"], counted["compiled"], counted["loop"], counted["tasks"], self._requests)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._counted[self._kind(frame.f_code)] += 1
            self._counted["tasks"] += frame.f_code is _CREATE_TASK
        elif event == "c_call" and self._kind(frame.f_code) == "ours":
            self._counted["compiled"] += 1

    def _kind(self, code: CodeType) -> str:
        if (kind := self._kinds.get(code)) is None:
            name = code.co_filename
            kind = "ours" if name.startswith(OURS) else "loop" if name.startswith(LOOP) else "other"
            self._kinds[code] = kind
        return kind
