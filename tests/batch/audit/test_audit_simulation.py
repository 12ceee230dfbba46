"""Audits of what simulated daemons, mergers and collectors leave, with all their crashes and lost answers.

A run of the simulation is recorded write by write. The audit then looks at the store at points of the run, and while
the run goes on between its reads. It finds the damage that the simulation planted, and nothing else.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from batch.audit.findings import Finding, Kind, Report
from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA
from tests.batch.audit._support.audits import LIMITS, audited, findings
from tests.simulation import run as simulation
from tests.simulation.oracle import WatchedStore

Write = tuple[str, bytes | None, Mapping[str, str]]

# The wall clock of a simulation stands nearly still.
PATIENT = dataclasses.replace(LIMITS, overdue_ms=1 << 50, orphan_age_ms=1 << 50)
PLACES = 6
# What follows from planted damage, or from a store that refuses to delete.
CONSEQUENCES = (Kind.QUARANTINED, Kind.GIVEN_UP, Kind.ROWS_UNACCOUNTED)


class Recorded(WatchedStore):
    """The store of a simulation that remembers every write, and what was damaged."""

    writes: ClassVar[list[Write]] = []
    damaged: ClassVar[set[str]] = set()

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        super().put(key, body, metadata=metadata)
        self.writes.append((key, body, dict(metadata)))

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        self.writes.append((key, body, dict(metadata)))

    def delete(self, key: str) -> None:
        super().delete(key)
        self.writes.append((key, None, NO_METADATA))

    def damage(self, key: str, place: int | None) -> None:
        super().damage(key, place)
        self.damaged.add(key)
        if place is None:
            self.writes.append((key, None, NO_METADATA))
        else:
            self.writes.append((key, *self.get_with_metadata(key)))


def apply(store: MemoryStore, write: Write) -> None:
    key, body, metadata = write
    if body is None:
        store.delete(key)
    else:
        store.put(key, body, metadata=metadata)


def unexpected(report: Report) -> list[Finding]:
    return [
        found for found in findings(report) if found.object not in Recorded.damaged and found.kind not in CONSEQUENCES
    ]


@pytest.mark.long
@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(1, 13))
def test_nothing_is_found_but_what_the_simulation_damaged(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WatchedStore", Recorded)
    monkeypatch.setattr(Recorded, "writes", [])
    monkeypatch.setattr(Recorded, "damaged", set())
    assert not simulation.run(seed).breaches
    writes, draw = Recorded.writes, random.Random(seed)
    for place in [*(draw.randrange(1, len(writes)) for _ in range(PLACES)), len(writes)]:
        store = MemoryStore()
        for write in writes[:place]:
            apply(store, write)
        if not any(entry.key == names.FORMAT_KEY for entry in store.list("")):
            continue
        assert unexpected(audited(store, limits=PATIENT)) == []
        assert unexpected(while_it_goes_on(store, iter(writes[place:]), draw)) == []


def while_it_goes_on(store: MemoryStore, meanwhile: Iterator[Write], draw: random.Random) -> Report:
    """The report of an audit between whose reads the run goes on."""
    pace, owed, lock = draw.choice((0.1, 1.0, 5.0)), 0.0, threading.Lock()

    def go_on(_: str) -> None:
        nonlocal owed
        with lock:
            owed += 2 * pace * draw.random()
            while owed >= 1:
                owed -= 1
                write = next(meanwhile, None)
                if write is not None:
                    apply(store, write)

    return audited(store, limits=PATIENT, before_read=go_on)
