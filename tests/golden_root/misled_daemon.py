"""`tarryd` with a store that refuses what it is told to, a clock that steps, and small limits of what is one object.

What it writes is written by the daemon's own code; only states that are rare are brought about: a seal that does not
get through, a topic that cannot be loaded, an object that cannot be deleted, a clock that went back.

Owns: the file that the variable `GOLDEN_CONTROL` names, JSON: `refused` has pairs of an operation of the store and a
part of the key, `step_ms` how far the wall clock is ahead. Does not own: who writes it (`make`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from daemon import main, process
from daemon.ledger_deletion import shard_deletions
from daemon.runtime.clocks import SystemClock
from daemon.topic import bucket_lifecycle
from storage_backends import object_store, store_opening
from tests._support.fault_store import Call, Fault, FaultStore

CONTROL = "GOLDEN_CONTROL"
INLINE_PROGRESS_BYTES = 300
LEDGERS_A_DECISION = 4


def _control() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ[CONTROL]).read_text())
    return found


def _decide(call: Call) -> Fault:
    refused = any(call.operation == operation and part in call.key for operation, part in _control()["refused"])
    return Fault.FAIL_BEFORE if refused else Fault.NONE


class _SteppingClock(SystemClock):
    def now_ms(self) -> int:
        return super().now_ms() + int(_control()["step_ms"])


class _MisledStore(FaultStore):
    @property
    def folder(self) -> str | None:
        return self.inner.folder


def _misled_store(place: store_opening.Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
    return _MisledStore(_open_store(place, deletions_survive=deletions_survive), _decide)


_open_store = store_opening.open_store

if __name__ == "__main__":
    store_opening.open_store = _misled_store
    process.SystemClock = _SteppingClock  # type: ignore[attr-defined]
    bucket_lifecycle.INLINE_PROGRESS_BYTES = INLINE_PROGRESS_BYTES
    shard_deletions.LEDGERS_A_DECISION = LEDGERS_A_DECISION
    sys.exit(main.main())
