"""The commands of two-phase deletion as a user runs them, with a real daemon, an owner of ledgers and an archive."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import tarry
from examples import processes
from storage_backends.local_directory import LocalDirectory
from tests._support.ledger_owner_server import LedgerOwnerServer, ledger_owner_server
from tests._support.processes import Daemons
from tests.client.cli._support.shell import PATIENCE_S, Shell

CONFIGURATION = """
[deletion]
reconsume_later_seconds = 1
max_retry_delete_count = 0

[[deletion.owners]]
name = "owner"
topic_prefixes = ["orders"]
delete_url = "{url}"

[[deletion.object_stores]]
name = "archive"
drivers = ["aws-s3"]
kind = "local"
path = "{path}"
"""
METADATA = {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": "orders"}


@pytest.fixture
def owner() -> Iterator[LedgerOwnerServer]:
    with ledger_owner_server() as serving:
        serving.ledgers.update(dict.fromkeys(range(1, 6), METADATA))
        yield serving


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[LocalDirectory]:
    store = LocalDirectory(tmp_path / "archive")
    yield store
    store.close()


@pytest.fixture
def shell(tmp_path: Path, owner: LedgerOwnerServer, archive: LocalDirectory) -> Iterator[Shell]:
    daemons = Daemons(tmp_path)
    try:
        settings = {"daemon.shards": 4, **processes.local_store(tmp_path / "root")}
        configuration = CONFIGURATION.format(url=owner.url, path=archive.root)
        daemon = daemons.make("tarryd", settings, configuration=configuration)
        daemon.start_serving()
        yield Shell(daemon.address)
    finally:
        daemons.end()


def offload(archive: LocalDirectory, ledger_id: int) -> uuid.UUID:
    """The UUID in the names of its objects."""
    given = uuid.uuid4()
    for end in ("", "-index"):
        stored = {key.replace("/", "-"): value for key, value in METADATA.items()}
        archive.put(f"{given}-ledger-{ledger_id}{end}", b"entries", metadata=stored)
    return given


def all_over(shell: Shell) -> None:
    """Waits until nothing is in flight any more."""
    give_up_at = time.monotonic() + PATIENCE_S
    with tarry.Client(shell.address) as client:
        while client.deletion_stats().in_flight:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)


def ended(shell: Shell) -> list[tuple[int, str, bool]]:
    """Ledger, outcome and whether a sweep found it, of what has ended when nothing is in flight any more."""
    all_over(shell)
    listed = [json.loads(line) for line in shell.out("deletions ended --json").splitlines()]
    return sorted((each["pending_delete"]["ledger_id"], each["outcome"], each["by_sweeper"]) for each in listed)


# More than a dozen processes, each of which loads its libraries: longer than the time of a test when cores are busy.
def test_ledgers_are_recorded_deleted_given_up_tried_again_and_forgotten(
    shell: Shell, owner: LedgerOwnerServer, archive: LocalDirectory
) -> None:
    """What the tour shows."""
    unanswered = shell.result("deletions record orders --ledger 1-2")
    assert unanswered.returncode == 2
    assert "--yes" in unanswered.stderr
    assert shell.out("deletions record orders --ledger 1-2 --yes") == "recorded 2 deletions of orders\n"
    assert ended(shell) == [(1, "deleted", False), (2, "deleted", False)]
    assert sorted(owner.ledgers) == [3, 4, 5]

    offloaded = offload(archive, 3)
    shell.out(f"deletions record orders --ledger 3 --driver aws-s3 --uuid {offloaded} --yes")
    assert (3, "deleted", False) in ended(shell)
    assert not list(archive.list(str(offloaded)))
    shell.out("deletions record orders --ledger 4 --cursor billing --yes")
    all_over(shell)
    shown = shell.parsed("deletions show 4")
    assert (shown["state"], shown["outcome"]) == ("ended", "metadata_mismatch")
    assert sorted(owner.ledgers) == [3, 4, 5]

    owner.status = 503
    shell.out("deletions record orders --ledger 5 --yes")
    all_over(shell)
    dead = json.loads(shell.out("deletions dead orders --json"))
    assert (dead["pending_delete"]["ledger_id"], dead["state"], dead["failures"]) == (5, "given_up", 1)
    assert "503" in dead["text"]
    owner.status = 200
    assert shell.parsed(f"deletions retry --id {dead['deletion_id']}") == {"retried": 1}
    all_over(shell)
    assert sorted(owner.ledgers) == [3, 4]

    shell.out("deletions record nobodys --ledger 9 --yes")
    all_over(shell)
    assert "unknown owner" in shell.out("deletions dead nobodys")
    assert shell.parsed("deletions purge nobodys --yes") == {"purged": 1}
    unknown = shell.result("deletions show 9")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert shell.out("deletions list --json") == ""


def test_a_sweep_looks_first_and_deletes_when_it_is_told(shell: Shell, archive: LocalDirectory) -> None:
    orphan = offload(archive, 7)
    first = shell.result("sweep archive --grace 0ms")
    assert first.returncode == 0
    assert "its topic" in first.stdout
    (line,) = (line.split("\t") for line in first.stdout.splitlines() if str(orphan) in line)
    assert (line[0], line[3], line[-1]) == ("orders", "7", "unknown")
    assert "--unknown-topics" in first.stderr
    steps = [json.loads(line) for line in shell.out("sweep archive --json").splitlines()]
    assert steps[-1]["done"]
    assert steps[-1]["counts"]["young"]["objects"] == 2

    shell.out("sweep archive --grace 0ms --delete --unknown-topics")
    assert ended(shell) == [(7, "deleted", True)]
    assert not list(archive.list(str(orphan)))
    missing = shell.result("sweep nowhere")
    assert missing.returncode == 1
    assert "deletion.object_stores" in missing.stderr
