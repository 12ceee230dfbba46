"""Many clients of one daemon at once: producers that add the same positions in pairs, readers that count meanwhile.

What a reader is told is held against what had been answered when it asked, and what had been sent when it was told:
- each position whose add was answered is contained, none that was not sent is, and a request is there whole or not at
  all;
- no fewer rows are pending than were answered, no more than were sent, and never fewer than before;
- the next row that is due is always the same.
In the end each position was accepted once, and was a duplicate once.

Owns: the load and these rules. Does not own: the daemon.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import threading
import time
from collections.abc import Callable

import tarry

TOPIC = "many"
PRODUCERS = 16
ROWS_OF_PRODUCER = 1_000
READERS = 20
BATCH_ROWS = 100
"""A producer adds its own positions and those of its neighbour: a pair has a ledger, both add all of it in step."""
ROWS_OF_LEDGER = 2 * ROWS_OF_PRODUCER
LEDGERS = PRODUCERS // 2
BATCHES = ROWS_OF_LEDGER // BATCH_ROWS
FIRST_LEDGER = 1_000
"""Of the one row that is due before all others."""
PATIENCE_S = 600.0


@dataclasses.dataclass
class Count:
    """What the producers were told, and breaches of the rules."""

    accepted: int = 0
    duplicates: int = 0
    reads: int = 0
    buckets: int = 0
    breaches: list[str] = dataclasses.field(default_factory=list)


class Load:
    """All clients of one run; `run` returns when they have ended."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._sent: list[set[int]] = [set() for _ in range(LEDGERS)]
        self._answered: list[set[int]] = [set() for _ in range(LEDGERS)]
        self._done = threading.Event()
        self._count = Count()
        self._first_due_ms = 1_000 * int(time.time()) + 1_800_000

    def run(self) -> Count:
        with tarry.Client(self._address, timeout_s=PATIENCE_S) as client:
            client.add(TOPIC, FIRST_LEDGER, 1, deliver_at_ms=self._first_due_ms)
            self._run_clients()
            self._check_end(client)
        return self._count

    def _run_clients(self) -> None:
        in_step = [threading.Barrier(2) for _ in range(LEDGERS)]
        reads: tuple[Callable[[tarry.Client, random.Random], None], ...] = (self._read_contained, self._read_counts())
        with concurrent.futures.ThreadPoolExecutor(PRODUCERS + READERS) as threads:
            readers = [threads.submit(self._read, reads[number % 2], number) for number in range(READERS)]
            producers = [
                threads.submit(self._produce, number // 2, in_step[number // 2]) for number in range(PRODUCERS)
            ]
            try:
                for producer in producers:
                    producer.result()
            finally:
                self._done.set()
            for reader in readers:
                reader.result()

    # ---- producers

    def _produce(self, ledger: int, in_step: threading.Barrier) -> None:
        with tarry.Client(self._address, timeout_s=PATIENCE_S) as client:
            for batch in range(BATCHES):
                with self._lock:
                    self._sent[ledger].add(batch)
                in_step.wait(PATIENCE_S)
                first = batch * BATCH_ROWS
                result = client.add(
                    TOPIC,
                    ledger,
                    list(range(first, first + BATCH_ROWS)),
                    deliver_at_ms=self._first_due_ms + 1_000 + batch,
                )
                with self._lock:
                    self._answered[ledger].add(batch)
                    self._count.accepted += result.accepted
                    self._count.duplicates += result.duplicates

    # ---- readers

    def _read(self, read: Callable[[tarry.Client, random.Random], None], seed: int) -> None:
        numbers = random.Random(seed)
        with tarry.Client(self._address, timeout_s=PATIENCE_S) as client:
            while not self._done.is_set():
                read(client, numbers)
                with self._lock:
                    self._count.reads += 1

    def _read_contained(self, client: tarry.Client, numbers: random.Random) -> None:
        ledger = numbers.randrange(LEDGERS)
        with self._lock:
            answered = set(self._answered[ledger])
        found = self._contained(client, ledger)
        with self._lock:
            sent = set(self._sent[ledger])
        whole = {entry // BATCH_ROWS for entry in found}
        if len(found) != len(whole) * BATCH_ROWS:
            self._breach(f"a request is contained in part: {len(found)} rows of {len(whole)} requests")
        if answered - whole:
            self._breach(f"ledger {ledger}: requests {sorted(answered - whole)} were answered and are not contained")
        if whole - sent:
            self._breach(f"ledger {ledger}: requests {sorted(whole - sent)} were not sent and are contained")

    def _contained(self, client: tarry.Client, ledger: int) -> set[int]:
        contained = client.contains(TOPIC, ledger, 0, last_entry_id=2 * ROWS_OF_LEDGER)
        return {entry for _, first, last in contained.pending for entry in range(first, last + 1)}

    def _read_counts(self) -> Callable[[tarry.Client, random.Random], None]:
        before: dict[tarry.Client, int] = {}

        def read(client: tarry.Client, _: random.Random) -> None:
            answered = self._rows_of(self._answered)
            stats = client.stats(TOPIC)
            sent = self._rows_of(self._sent)
            if not answered <= stats.pending <= sent:
                self._breach(f"{stats.pending} rows are pending, of {answered} that were answered and {sent} sent")
            if stats.pending < before.get(client, 0):
                self._breach(f"{stats.pending} rows are pending, and {before[client]} were before")
            if stats.next_due_ms != self._first_due_ms:
                self._breach(f"the next row is due at {stats.next_due_ms}, not at {self._first_due_ms}")
            before[client] = stats.pending

        return read

    def _rows_of(self, batches: list[set[int]]) -> int:
        with self._lock:
            return 1 + BATCH_ROWS * sum(map(len, batches))

    # ---- the end

    def _check_end(self, client: tarry.Client) -> None:
        everything = PRODUCERS * ROWS_OF_PRODUCER
        if (self._count.accepted, self._count.duplicates) != (everything, everything):
            self._breach(f"{self._count.accepted} rows were accepted and {self._count.duplicates} were duplicates")
        stats = client.stats(TOPIC)
        self._count.buckets = stats.buckets
        if stats.pending != everything + 1:
            self._breach(f"{stats.pending} rows are pending in the end")
        for ledger in range(LEDGERS):
            if self._contained(client, ledger) != set(range(ROWS_OF_LEDGER)):
                self._breach(f"ledger {ledger} is not contained as it was added")

    def _breach(self, breach: str) -> None:
        with self._lock:
            self._count.breaches.append(breach)
