"""Daemons that are killed, and one that is paused, while ledgers are recorded, said to be in use, and deleted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples import processes
from tests._support.processes import Daemons
from tests.wire._support import deletion_traffic
from tests.wire._support.deletion_traffic import Archive, Kind, Owners

# Fewer than a shard remembers of those that ended.
COUNTS = {
    Kind.UNUSED: 350,
    Kind.HALF_GONE: 50,
    Kind.IN_USE: 100,
    Kind.RACED: 250,
    Kind.COME_BACK: 100,
    Kind.ANOTHER: 50,
    Kind.LEFT: 100,
}
KILLS = 4
PAUSED = 600
IMPATIENT: dict[str, object] = {"ownership.heartbeat_interval_s": 0.5}
# Small, so that the journal is written to checkpoints, and its slots are deleted, all the time.
SETTINGS: dict[str, object] = {
    "daemon.shards": 2,
    "journal.checkpoint_slots": 20,
    # That a process has ended is told by its lock: no heartbeat is missed because the machine is busy.
    "ownership.heartbeat_interval_s": 60,
    "deletion.parallelism": 2,
    "deletion.reconsume_later_seconds": 1,
}


@pytest.mark.parametrize("seed", [186, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5))])
def test_nothing_in_use_is_deleted_and_everything_recorded_is_though_the_owner_is_killed_again_and_again(
    seed: int, daemons: Daemons, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    ledgers = deletion_traffic.ledgers_of(rng, COUNTS)
    archive = Archive(tmp_path / "archive", ledgers, rng)
    settings = SETTINGS | processes.local_store(tmp_path / "root")
    owner, successor = (
        daemons.make(name, settings, configuration=archive.configuration) for name in ("first", "second")
    )
    owner.start_serving()
    successor.start()
    with Owners((owner.address, successor.address), archive, ledgers, rng) as owners:
        met_calls = 0
        for _ in range(KILLS):
            owners.begin(1 / (KILLS + 1))
            met_calls += owners.wait_until_deleting()
            owner.kill()
            successor.wait_for_health(serving=True)
            owner.start()
            owner, successor = successor, owner
            owners.watch(owner.address)
        owners.begin()
        owners.wait_until_answered()
        owners.wait_until_over()
        assert deletion_traffic.breaches(owners, archive, ledgers)[:5] == []

    assert met_calls, "no kill met a call: the test shows nothing"
    raced = [archive.is_gone(ledger) for ledger in ledgers if ledger.kind is Kind.RACED]
    assert not all(raced), "no statement was in time: the test shows nothing"
    assert any(raced), "no statement was too late: the test shows nothing"


@pytest.mark.long
def test_a_paused_owner_that_was_superseded_begins_no_deletion_when_it_goes_on(
    daemons: Daemons, tmp_path: Path
) -> None:
    rng = random.Random(16569)
    ledgers = deletion_traffic.ledgers_of(rng, {Kind.UNUSED: PAUSED})
    archive = Archive(tmp_path / "archive", ledgers, rng)
    # Files are not taken over while the process lives.
    settings = SETTINGS | processes.local_store(tmp_path / "root") | {"store.log_form": "objects"}
    owner = daemons.make("paused", settings, configuration=archive.configuration)
    successor = daemons.make("successor", settings | IMPATIENT, configuration=archive.configuration)
    owner.start_serving()
    with Owners((owner.address,), archive, ledgers, rng) as before:
        before.begin()
        before.wait_until_answered()
        owner.stop()
    successor.start_serving()
    with Owners((successor.address,), archive, [], rng) as after:
        waiting = [ledger for ledger in ledgers if archive.is_whole(ledger)]
        for job in deletion_traffic.jobs_of(waiting, rng, size=100):
            after.state(job)
        owner.resume()
        # What it had durably begun of a shard it may make until it knows that this shard is lost.
        owner.wait_for_log("the shards were lost")
        attempted = owner.metric("tarry_deletions_attempted_total")
        after.wait_until_over()
        assert deletion_traffic.breaches(after, archive, ledgers)[:5] == []
    assert owner.metric("tarry_deletions_attempted_total") == attempted
    accepted = sum(said.accepted for said in after.said.values())
    assert accepted > PAUSED / 4, f"only {accepted} were still waiting: the test shows nothing"
    assert accepted < PAUSED, "nothing was deleted: the test shows nothing"
