"""Sweeps of very many objects: exactly the orphans are found and deleted, and memory stays small."""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

import tarry
from examples import processes
from tests._support.many_ledgers import STORE, LedgersInDirectory, LedgersOnS3, ManyLedgers
from tests._support.owned_ledgers import OwnedLedger
from tests._support.processes import Daemons

FEW = 2_000
MANY = 100_000
# Of the whole process, its start included.
RESIDENT_BYTES_MAX = 200_000_000
# moto looks through all objects for each page of the listing.
SWEPT_WITHIN_S = 1_200.0
DELETED_WITHIN_S = 600.0
SIZES = [
    FEW,
    pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(1_800)]),
]


@pytest.mark.parametrize("objects", SIZES)
def test_a_sweep_of_a_directory_finds_exactly_the_orphans_in_little_memory(
    objects: int, daemons: Daemons, tmp_path: Path
) -> None:
    many = ManyLedgers(objects)
    with LedgersInDirectory(many, tmp_path / "offloaded") as place:
        sweep_and_delete(many, daemon_of(daemons, tmp_path, place.configuration))

        assert place.keys() == {key for key, ledger in many.entries() if ledger.ledger[0] not in many.orphans}


@pytest.mark.parametrize("objects", SIZES)
def test_a_sweep_of_a_bucket_finds_exactly_the_orphans_in_little_memory(
    objects: int, daemons: Daemons, tmp_path: Path
) -> None:
    many = ManyLedgers(objects)
    with LedgersOnS3(many, tmp_path) as place:
        place.start(timeout_s=600)
        sweep_and_delete(many, daemon_of(daemons, tmp_path, place.configuration))


def daemon_of(daemons: Daemons, directory: Path, configuration: str) -> processes.DaemonProcess:
    daemon = daemons.make("tarryd", processes.local_store(directory / "root"), configuration=configuration)
    daemon.start_serving()
    return daemon


def sweep_and_delete(many: ManyLedgers, daemon: processes.DaemonProcess) -> None:
    """Everything but the orphans is said to be in use; the orphans are found, recorded and deleted."""
    with tarry.Client(daemon.address) as client:
        say_in_use(client, many)
        before = daemon.usage()

        began_s = time.monotonic()
        steps = list(client.sweep_orphans(STORE, grace_ms=0, delete=True, timeout_s=SWEPT_WITHIN_S))
        took_s = time.monotonic() - began_s

        after = daemon.usage()
        report(many, took_s, before, after)
        found = [orphan.pending_delete.ledger_id for step in steps for orphan in step.orphans]
        assert sorted(found) == sorted(many.orphans)
        counts = steps[-1].counts
        assert (steps[-1].done, steps[-1].refused) == (True, "")
        assert counts.listed.objects == many.objects
        orphaned = sum(ledger.ledger[0] in many.orphans for _, ledger in many.entries())
        assert (counts.orphaned.objects, counts.in_use.objects) == (orphaned, many.objects - orphaned)
        assert counts.ledgers_recorded == len(many.orphans)
        assert after.resident_bytes_max <= RESIDENT_BYTES_MAX
        assert outcomes(client) == {tarry.DeletionOutcome.DELETED: len(many.orphans)}


def say_in_use(client: tarry.Client, many: ManyLedgers) -> None:
    of_topics: dict[str, list[OwnedLedger]] = collections.defaultdict(list)
    for ledger in many.ledgers:
        if ledger.ledger[0] not in many.orphans:
            of_topics[ledger.topic].append(ledger)
    for topic, ledgers in of_topics.items():
        client.record_in_use(
            topic,
            [each.ledger[0] for each in ledgers],
            ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
            uuid=[uuid.UUID(int=(each.ledger[1] << 64) + each.ledger[2]) for each in ledgers],
            replace=True,
        )


def outcomes(client: tarry.Client) -> collections.Counter[tarry.DeletionOutcome | None]:
    """What came of all deletions, when they are over."""
    deadline_s = time.monotonic() + DELETED_WITHIN_S
    while client.deletion_stats().in_flight:
        assert time.monotonic() < deadline_s, f"deletions are in flight for {DELETED_WITHIN_S:g} s"
        threading.Event().wait(0.05)
    return collections.Counter(each.outcome for each in client.ended_deletes())


def report(many: ManyLedgers, took_s: float, before: processes.Usage, after: processes.Usage) -> None:
    """pytest shows it with `-rP`, or when the test fails."""
    sys.stdout.write(
        f"{many.objects} objects, {os.cpu_count()} cores: {took_s:.1f} s, {after.cpu_s - before.cpu_s:.1f} s of CPU; "
        f"resident at most {after.resident_bytes_max / 1e6:.0f} MB, "
        f"{(after.resident_bytes_max - before.resident_bytes) / 1e6:.0f} MB more than before\n"
    )
