"""Owners of offloaded ledgers, through daemons that die meanwhile: what they ask for, and what must be there then.

They speak through the client library, and never give up.

Owns: the ledgers of each kind, their objects in a directory, the calls, and the rules, checked against the objects.
Does not own: the daemons, and when they die.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import tarry
from storage_backends.local_directory import LocalDirectory
from tests.wire._support.traffic import now_ms

TOPICS = ("persistent://public/default/flights", "persistent://public/default/trains", "ferries")
LEDGER_NAMES = ("public/default/persistent/flights", "public/default/persistent/trains", "ferries")
CURSOR, SCHEMA = "dispatcher", "flights-value"
DRIVER = "filesystem"
CALLERS = 8
PAUSE_S = 0.05
# When it is said that ledgers are in use whose deletion is recorded meanwhile: before that is sent, in a moment, when
# something of them is gone.
BEFORE, IN_A_MOMENT, TOO_LATE = range(3)
LATE_S = 0.3
# So many are many.
IN_FLIGHT = 20
TIMEOUT_S = 600.0


class Kind(enum.Enum):
    UNUSED = "recorded"
    HALF_GONE = "recorded, and one of its two objects is gone already"
    IN_USE = "in use, and recorded after that was answered"
    RACED = "recorded while it is said to be in use"
    COME_BACK = "in use, recorded, and then in use no longer"
    ANOTHER = "recorded, and its metadata is of something else"
    LEFT = "not recorded"


# What is to be there in the end; of RACED ones it depends on what was answered.
GOES = frozenset({Kind.UNUSED, Kind.HALF_GONE, Kind.COME_BACK})
# The second one: of an attempt whose daemon died before it could answer.
GONE = frozenset({tarry.DeletionOutcome.DELETED, tarry.DeletionOutcome.ALREADY_GONE})


@dataclasses.dataclass(frozen=True)
class Ledger:
    ledger_id: int
    uuid: uuid.UUID
    topic: int
    component: tarry.LedgerComponent
    kind: Kind

    @property
    def keys(self) -> tuple[str, str]:
        name = f"{self.uuid}-ledger-{self.ledger_id}"
        return name, f"{name}-index"

    @property
    def delete(self) -> tarry.PendingDelete:
        return tarry.PendingDelete(
            self.ledger_id,
            self.component,
            tarry.LedgerType.OFFLOADED_LEDGER,
            cursor_name=CURSOR if self.component is tarry.LedgerComponent.MANAGED_CURSOR else None,
            schema_id=SCHEMA if self.component is tarry.LedgerComponent.SCHEMA_STORAGE else None,
            offload_context=tarry.OffloadContext(self.uuid, DRIVER),
        )

    @property
    def metadata(self) -> dict[str, str]:
        if self.component is tarry.LedgerComponent.SCHEMA_STORAGE:
            schema = SCHEMA if self.kind is not Kind.ANOTHER else f"{SCHEMA}-2"
            return {"application": "pulsar", "component": "schema", "pulsar-schemaid": schema}
        metadata = {"application": "pulsar", "component": "managed-ledger"}
        metadata["pulsar-managed-ledger"] = LEDGER_NAMES[self.topic]
        # Of a cursor, although the record says that it is a topic's; and the other way round.
        if (self.component is tarry.LedgerComponent.MANAGED_CURSOR) is not (self.kind is Kind.ANOTHER):
            metadata["pulsar-cursor"] = CURSOR
        return metadata


def ledgers_of(rng: random.Random, counts: dict[Kind, int]) -> list[Ledger]:
    """So many of each kind, of any topic and component."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    return [
        Ledger(
            number,
            uuid.UUID(int=rng.getrandbits(128), version=4),
            rng.randrange(len(TOPICS)),
            rng.choice(list(tarry.LedgerComponent)),
            kind,
        )
        for number, kind in enumerate(kinds)
    ]


class Archive:
    """The objects of offloaded ledgers in a directory."""

    def __init__(self, path: Path, ledgers: Sequence[Ledger], rng: random.Random) -> None:
        self._store = LocalDirectory(path)
        self._files: dict[Ledger, dict[Path, bytes]] = {}
        for ledger in ledgers:
            keys = ledger.keys if ledger.kind is not Kind.HALF_GONE else (rng.choice(ledger.keys),)
            for key in keys:
                self._store.put(key, f"{ledger.kind.value}: {key}".encode(), metadata=ledger.metadata)
            paths = [self._store.path_of(key) for key in keys]
            self._files[ledger] = {path: path.read_bytes() for path in paths}
        self._foreign = path / "notes-of-somebody"
        self._foreign.write_text("not an object of an offloaded ledger")

    @property
    def configuration(self) -> str:
        """TOML by which a daemon deletes here."""
        return (
            f'[[deletion.object_stores]]\nname = "archive"\ndrivers = ["{DRIVER}"]\n'
            f'kind = "local"\npath = "{self._store.root}"\n'
        )

    def is_whole(self, ledger: Ledger) -> bool:
        """All of its objects are there, as they were."""
        try:
            return all(path.read_bytes() == content for path, content in self._files[ledger].items())
        except FileNotFoundError:
            return False

    def is_gone(self, ledger: Ledger) -> bool:
        return not any(path.exists() for path in self._files[ledger])

    def breaches(self) -> list[str]:
        """Something else was touched."""
        known = {path for files in self._files.values() for path in files}
        found = {path for path in self._store.root.iterdir() if not path.name.startswith(".")}
        wrong = [f"{path.name} is there, and nobody put it" for path in found - known - {self._foreign}]
        return wrong if self._foreign in found else [*wrong, f"{self._foreign.name} is gone"]


@dataclasses.dataclass
class Said:
    """What was answered to the statement that a ledger is in use. `at_ms`: when; `was_whole`: its objects, then."""

    at_ms: int
    accepted: bool
    was_whole: bool


class Owners:
    """Threads that call. A context manager: leaving it ends them when their calls are answered.

    `addresses`: of the daemons. What is in flight is asked of the one that `watch` names, the first one until then:
    without a topic there is no owner whom a client could follow.
    """

    def __init__(
        self, addresses: Sequence[str], archive: Archive, ledgers: Sequence[Ledger], rng: random.Random
    ) -> None:
        self.said: dict[Ledger, Said] = {}
        self._archive = archive
        self._rng = rng
        self._client = tarry.Client(f"ipv4:{','.join(addresses)}", timeout_s=TIMEOUT_S)
        self._watching = tarry.Client(addresses[0], timeout_s=TIMEOUT_S)
        self._callers = concurrent.futures.ThreadPoolExecutor(CALLERS, "owner")
        self._racers = concurrent.futures.ThreadPoolExecutor(CALLERS, "owner")
        self._jobs = jobs_of(ledgers, rng)
        self._all = len(self._jobs)
        self._running: list[concurrent.futures.Future[None]] = []

    def __enter__(self) -> Owners:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._callers, self._racers):
            pool.shutdown(cancel_futures=True)
        self._client.close()
        self._watching.close()

    def watch(self, address: str) -> None:
        self._watching.close()
        self._watching = tarry.Client(address, timeout_s=TIMEOUT_S)

    def begin(self, share: float = 1.0) -> None:
        """So much of the jobs, one after another for each caller."""
        for _ in range(min(len(self._jobs), math.ceil(share * self._all))):
            pause_s, late_s = self._rng.uniform(0, PAUSE_S), self._rng.uniform(0, LATE_S)
            when = self._rng.choice((BEFORE, IN_A_MOMENT, TOO_LATE))
            self._running.append(self._callers.submit(self._run, self._jobs.pop(), pause_s, when, late_s))

    def wait_until_deleting(self) -> bool:
        """Deletions are in flight. Whether calls are under way, too."""
        self._wait_until("deletions are in flight", lambda: self._watching.deletion_stats().in_flight >= IN_FLIGHT)
        return not self._answered()

    def wait_until_answered(self) -> None:
        """Every call of the jobs that were begun."""
        self._wait_until("every call is answered", self._answered)

    def wait_until_over(self) -> None:
        """Nothing is in flight, and nothing was given up."""
        self._wait_until("nothing is in flight", lambda: not self._watching.deletion_stats().in_flight)
        assert self._watching.deletion_stats().given_up == 0

    def _answered(self) -> bool:
        """Raises what a job failed with."""
        for each in self._running:
            if each.done():
                each.result()
        return all(each.done() for each in self._running)

    def _wait_until(self, what: str, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        pause = threading.Event()
        while not reached():
            assert time.monotonic() < deadline_s, (
                f"not within {TIMEOUT_S:g} s: {what}; {self._watching.deletion_stats()}"
            )
            pause.wait(0.01)

    def ended(self) -> dict[int, list[tarry.Deletion]]:
        """What came of each ledger, by its id: of several records where one was sent again after it had ended."""
        ended: dict[int, list[tarry.Deletion]] = {}
        for each in self._watching.ended_deletes():
            ended.setdefault(each.pending_delete.ledger_id, []).append(each)
        return ended

    # ---- what an owner does

    def _run(self, job: Sequence[Ledger], pause_s: float, when: int, late_s: float) -> None:
        clock = threading.Event()
        clock.wait(pause_s)
        match job[0].kind:
            case Kind.IN_USE:
                self.state(job)
                self._record(job)
            case Kind.COME_BACK:
                self.state(job)
                self._record(job)
                self._client.forget_in_use(
                    TOPICS[job[0].topic],
                    [each.ledger_id for each in job],
                    ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
                    uuid=[each.uuid for each in job],
                )
            case Kind.RACED:
                self._race(job, when, late_s)
            case Kind.LEFT:
                pass
            case _:
                self._record(job)

    def _race(self, job: Sequence[Ledger], when: int, late_s: float) -> None:
        if when is BEFORE:
            stating = self._racers.submit(self.state, job)
            self._record(job)
            stating.result()
            return
        recording = self._racers.submit(self._record, job)
        if when is IN_A_MOMENT:
            threading.Event().wait(late_s)
        else:
            self._wait_until("a ledger is deleted", lambda: not all(map(self._archive.is_whole, job)))
        self.state(job)
        recording.result()

    def _record(self, job: Sequence[Ledger]) -> None:
        recorded = self._client.record_pending_deletes(TOPICS[job[0].topic], [each.delete for each in job])
        assert (len(recorded.recorded), recorded.refused) == (len(job), ())

    def state(self, job: Sequence[Ledger]) -> None:
        """Says that these are in use."""
        said = self._client.record_in_use(
            TOPICS[job[0].topic],
            [each.ledger_id for each in job],
            ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
            uuid=[each.uuid for each in job],
        )
        at_ms = now_ms()
        late = set(said.being_deleted_index.tolist())
        for index, ledger in enumerate(job):
            self.said[ledger] = Said(at_ms, index not in late, self._archive.is_whole(ledger))


def jobs_of(ledgers: Sequence[Ledger], rng: random.Random, size: int = 10) -> list[list[Ledger]]:
    """Ledgers of one topic and kind, in any order."""
    jobs = []
    for topic in range(len(TOPICS)):
        for kind in Kind:
            alike = [ledger for ledger in ledgers if (ledger.topic, ledger.kind) == (topic, kind)]
            jobs += [alike[first : first + size] for first in range(0, len(alike), size)]
    rng.shuffle(jobs)
    return jobs


def breaches(owners: Owners, archive: Archive, ledgers: Sequence[Ledger]) -> list[str]:
    """What is not as it was promised, when nothing is in flight any more."""
    ended = owners.ended()
    wrong = archive.breaches()
    for ledger in ledgers:
        said, ends = owners.said.get(ledger), ended.get(ledger.ledger_id, [])
        what = f"{ledger.keys[0]} ({ledger.kind.value}; {said}; {ends})"
        goes = ledger.kind in GOES
        if said is not None and ledger.kind is not Kind.COME_BACK:
            # What was gone already when the statement came was deleted before it, and its record has ended before.
            gone_at_ms = [end.ended_at_ms for end in ends if end.outcome in GONE]
            was_gone = any(at_ms is not None and at_ms <= said.at_ms for at_ms in gone_at_ms)
            goes = not said.accepted or (not said.was_whole and was_gone)
        if goes and not archive.is_gone(ledger):
            wrong.append(f"{what} is still there")
        if not goes and not archive.is_whole(ledger):
            wrong.append(f"{what} is not there any more")
        if said is not None and not said.accepted and ledger.kind in (Kind.IN_USE, Kind.COME_BACK):
            wrong.append(f"{what} was too late, though nobody had recorded it")
    return wrong
