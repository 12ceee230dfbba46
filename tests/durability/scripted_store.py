"""A store in memory whose answers a test scripts, one by one.

Fault model: a conditional PUT may land and lose its answer, be lost, land after its caller was told nothing, be
repeated underneath so that its own success looks like a conflict, or be turned away; a HEAD may fail.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping

from storage_backends import memory, object_store


class Fault(enum.Enum):
    """What becomes of one call. `NONE`: it works."""

    NONE = enum.auto()
    ANSWER_LOST = enum.auto()
    REQUEST_LOST = enum.auto()
    LANDS_LATE = enum.auto()
    ANSWERED_AS_CONFLICT = enum.auto()
    UNAVAILABLE = enum.auto()
    REFUSED = enum.auto()


class ScriptedStore(memory.MemoryStore):
    """`put_faults` and `head_faults` are used up one a call, then calls work. `calls`: (operation, key) of all writes
    and HEADs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.put_faults: collections.deque[Fault] = collections.deque()
        self.head_faults: collections.deque[Fault] = collections.deque()
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self._late: list[tuple[str, bytes, Mapping[str, str]]] = []

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self.calls.append(("put_if_absent", key))
        self.bodies.append(body)
        fault = self.put_faults.popleft() if self.put_faults else Fault.NONE
        match fault:
            case Fault.ANSWER_LOST:
                super().put_if_absent(key, body, metadata=metadata)
                raise object_store.OutcomeUnknown(key, "the answer was lost")
            case Fault.ANSWERED_AS_CONFLICT:
                super().put_if_absent(key, body, metadata=metadata)
                raise object_store.AlreadyExists(key, "exists")
            case Fault.LANDS_LATE:
                self._late.append((key, body, metadata))
                raise object_store.OutcomeUnknown(key, "the answer was lost")
            case Fault.REQUEST_LOST:
                raise object_store.OutcomeUnknown(key, "the request was lost")
        _raise_if_down(fault, key)
        super().put_if_absent(key, body, metadata=metadata)

    def head(self, key: str) -> object_store.ObjectInfo:
        self.calls.append(("head", key))
        _raise_if_down(self.head_faults.popleft() if self.head_faults else Fault.NONE, key)
        return super().head(key)

    def land_late(self) -> None:
        """What was under way arrives now; what finds its key taken changes nothing."""
        for key, body, metadata in self._late:
            try:
                super().put_if_absent(key, body, metadata=metadata)
            except object_store.AlreadyExists:
                pass
        self._late = []


def _raise_if_down(fault: Fault, key: str) -> None:
    if fault is Fault.UNAVAILABLE:
        raise object_store.StoreUnavailable(key, "no route")
    if fault is Fault.REFUSED:
        raise object_store.StoreRefused(key, "access denied")
