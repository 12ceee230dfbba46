"""Logs of former owners go when no manifest names them; their ends stay, and so does whatever is not understood."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from daemon.owner import garbage_collection
from daemon.owner.garbage_collection import LogCollection
from daemon.owner.heartbeat import Heartbeat
from daemon.owner.traces import Traces
from storage_backends import object_store
from storage_backends.file_log import FileLogs
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import LogSlotKind
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Fault
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import LogOwner, owner_of
from tests.planted import registry
from tests.storage_backends._support import log_slots

FENCE, CLOSE, OPEN, DATA = LogSlotKind.FENCE, LogSlotKind.CLOSE, LogSlotKind.OPEN, LogSlotKind.DATA


def collection_of(owner: LogOwner) -> LogCollection:
    return LogCollection(owner.logs, owner.manifests, lambda: owner.living, owner.environment)


def kinds(machines: EngineFixture, log_id: str) -> list[LogSlotKind]:
    return [header.kind for header in log_owner.headers_of(machines, log_id)]


async def succeeded(machines: EngineFixture, *, closes: bool = False) -> tuple[LogOwner, LogOwner]:
    """(a former owner of shard 0 with two sections, its successor)."""
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    await north.write(0)
    if closes:
        await north.run(north.living.close())
    return north, await owner_of(machines, "south", 0)


async def collect_dead(owner: LogOwner) -> None:
    await owner.run(collection_of(owner).dead())


@pytest.mark.parametrize(("closes", "end"), [(False, FENCE), (True, CLOSE)])
async def test_a_log_that_nothing_names_goes_up_to_its_end(
    machines: EngineFixture, closes: bool, end: LogSlotKind
) -> None:
    north, south = await succeeded(machines, closes=closes)
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [OPEN, DATA, DATA, end], "a replay needs it"
    await south.checkpoint(0)
    await collect_dead(south)
    assert len(kinds(machines, north.log_id)) == 4, "the checkpoint may be damaged"
    await south.checkpoint(0)
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [end]
    calls = len(south.daemon.store.calls)
    await collect_dead(south)
    assert "delete" not in {call.operation for call in south.daemon.store.calls[calls:]}, "there is nothing to do"
    assert kinds(machines, north.log_id) == [end]


async def test_what_one_shard_needs_keeps_the_log_for_all(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0)
    await north.write(1)
    south = await owner_of(machines, "south", 0, 1)
    for _ in range(2):
        await south.checkpoint(0)
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [OPEN, DATA, DATA, FENCE]


async def test_a_log_without_an_end_may_have_an_owner(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north")
    south = await owner_of(machines, "south", 0)
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [OPEN]
    await north.take(1)
    await north.write(1)


async def test_a_false_fence_in_an_emptied_number_is_no_end(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    for _ in range(4):
        await north.write(0)
    for _ in range(2):
        await north.checkpoint(0)
    await north.living.truncated()
    # A fencer that had listed slot 2 as the highest.
    slots = log_owner.log_of(machines, north.log_id)
    slots.create(3, log_owner.fence_slot(north.log_id, 3))
    south = await owner_of(machines, "south", 1)
    # Nothing names it for a while: the collector sees the highest slot, which is DATA.
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [FENCE, DATA]
    await north.write(0)


async def test_what_is_damaged_keeps_everything(machines: EngineFixture, caplog: pytest.LogCaptureFixture) -> None:
    north, south = await succeeded(machines)
    for _ in range(2):
        await south.checkpoint(0)
    machines.store.put(names.shard_manifest_key(2, 1), b"damaged")
    await collect_dead(south)
    assert len(kinds(machines, north.log_id)) == 4
    assert "no log of a former owner is deleted" in caplog.text


async def test_what_is_foreign_among_logs_keeps_nothing(machines: EngineFixture) -> None:
    north, south = await succeeded(machines)
    for _ in range(2):
        await south.checkpoint(0)
    machines.store.put(f"{names.LOGS_PREFIX}note", b"no log")
    await collect_dead(south)
    assert len(kinds(machines, north.log_id)) == 1


async def test_a_store_that_cannot_be_read_deletes_nothing_and_says_so(machines: EngineFixture) -> None:
    north, south = await succeeded(machines)
    for _ in range(2):
        await south.checkpoint(0)
    south.daemon.script.plan("list", Fault.FAIL_BEFORE, key_part=names.shard_manifest_prefix(2))
    with pytest.raises(object_store.StoreUnavailable):
        await collect_dead(south)
    assert len(kinds(machines, north.log_id)) == 4
    await collect_dead(south)
    assert kinds(machines, north.log_id) == [FENCE]


async def the_manifests_are_read_after_the_ends(machines: EngineFixture) -> None:
    """Before the collector looks for ends a daemon takes a shard into a new log, writes, and is succeeded."""
    south = await owner_of(machines, "south", 0)
    held = south.daemon.pause("list", names.LOGS_PREFIX)
    pending = south.run(collection_of(south).dead())
    await held.reached()
    north = await owner_of(machines, "north", 1)
    await north.write(1)
    east = await owner_of(machines, "east", 1)
    held.release()
    await pending
    assert kinds(machines, north.log_id) == [OPEN, DATA, FENCE], "east names it"
    assert log_owner.known_by(east.claims[1]) == north.known[1]


async def test_a_log_that_got_its_end_meanwhile_is_looked_up_in_manifests_that_are_read_after_that(
    machines: EngineFixture,
) -> None:
    await the_manifests_are_read_after_the_ends(machines)


# ---- logs that have no end


def beat(machines: EngineFixture, owner: LogOwner, sequence: int, *, log_ended: bool = False) -> None:
    body = Heartbeat(
        daemon_id=owner.name,
        address="",
        shards=(),
        instance="",
        sequence=sequence,
        log_id=owner.log_id,
        last_slot=1,
        log_ended=log_ended,
    )
    machines.store.put(names.daemon_key(owner.name), msgspec.json.encode(body))


async def test_a_log_that_a_crash_left_gets_an_end_when_its_daemon_has_been_silent_for_an_hour(
    machines: EngineFixture,
) -> None:
    north, south = await owner_of(machines, "north"), await owner_of(machines, "south", 0)
    beat(machines, north, 1)
    north.daemon.kill()
    collection = collection_of(south)
    await south.run(collection.dead())
    await asyncio.sleep(garbage_collection.SILENT_S / 2)
    beat(machines, north, 2)
    await south.run(collection.dead())
    await asyncio.sleep(garbage_collection.SILENT_S - 1)
    await south.run(collection.dead())
    assert kinds(machines, north.log_id) == [OPEN], "it was still heard of"
    await asyncio.sleep(1)
    await south.run(collection.dead())
    assert kinds(machines, north.log_id) == [OPEN, FENCE]
    await south.run(collection.dead())
    assert kinds(machines, north.log_id) == [FENCE]


@pytest.mark.parametrize("again", [False, True])
async def test_a_log_of_which_no_daemon_tells_gets_an_end(machines: EngineFixture, again: bool) -> None:
    north, south = await owner_of(machines, "north"), await owner_of(machines, "south", 0)
    if again:
        # Its daemon lives, and has given the log up without an end.
        beat(machines, north, 1, log_ended=True)
    collection = collection_of(south)
    await south.run(collection.dead())
    await asyncio.sleep(garbage_collection.SILENT_S)
    if again:
        beat(machines, north, 2, log_ended=True)
    await south.run(collection.dead())
    assert kinds(machines, north.log_id) == [OPEN, FENCE]


async def a_silent_log_is_one_of_which_no_daemon_tells(machines: EngineFixture) -> None:
    north, south = await owner_of(machines, "north"), await owner_of(machines, "south", 0)
    collection = collection_of(south)
    for sequence in range(3):
        beat(machines, north, sequence)
        await south.run(collection.dead())
        assert kinds(machines, north.log_id) == [OPEN], "its daemon beats"
        await asyncio.sleep(2 * garbage_collection.SILENT_S)
    await north.take(1)
    await north.write(1)
    for _ in range(2):
        await asyncio.sleep(2 * garbage_collection.SILENT_S)
        await south.run(collection.dead())
    assert FENCE not in kinds(machines, north.log_id), "what a shard names is for who takes it over"
    await north.write(1)
    assert not north.ended


async def test_a_log_whose_daemon_beats_may_be_named_later(machines: EngineFixture) -> None:
    await a_silent_log_is_one_of_which_no_daemon_tells(machines)


async def test_a_log_that_a_living_process_holds_gets_no_end(
    machines: EngineFixture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    south = await owner_of(machines, "south", 0)
    log_id = south.environment.new_id()
    holder = FileLogs(tmp_path).log(log_id)
    holder.create(1, log_slots.opening(log_id))
    collection = LogCollection(FileLogs(tmp_path), south.manifests, lambda: None, south.environment)
    try:
        await south.run(collection.dead())
        await asyncio.sleep(garbage_collection.SILENT_S)
        await south.run(collection.dead())
    finally:
        holder.close()
    assert f"log {log_id}, which no shard names, has no end and gets none" in caplog.text
    await south.run(collection.dead())
    await south.run(collection.dead())
    reader = FileLogs(tmp_path).log(log_id)
    assert reader.numbers() == [2]
    reader.close()


# ---- the own log


async def test_what_no_shard_needs_of_the_own_log_is_counted_and_deleted(machines: EngineFixture) -> None:
    south = await owner_of(machines, "south", 0)
    own = collection_of(south)
    for _ in range(3):
        await south.write(0)
    south.daemon.script.plan("delete", Fault.FAIL_BEFORE, key_part=names.LOGS_PREFIX, times=2)
    for _ in range(2):
        await south.checkpoint(0)
        await south.living.truncated()
    would_go = await south.run(own.own(dry_run=True))
    assert would_go.objects == 3
    assert log_owner.numbers_of(machines, south.log_id) == [1, 2, 3, 4]
    assert await south.run(own.own(dry_run=False)) == would_go
    assert log_owner.numbers_of(machines, south.log_id) == [4]
    assert (await south.run(own.own(dry_run=False))).objects == 0
    await collect_dead(south)
    assert log_owner.numbers_of(machines, south.log_id) == [4], "the own log is never a dead one"


async def test_without_a_log_of_its_own_a_daemon_has_none_to_collect(machines: EngineFixture) -> None:
    north, south = await succeeded(machines)
    for _ in range(2):
        await south.checkpoint(0)
    collection = LogCollection(south.logs, south.manifests, lambda: None, south.environment)
    assert (await south.run(collection.own(dry_run=False))).objects == 0
    await south.run(collection.dead())
    assert kinds(machines, north.log_id) == [FENCE]
    assert kinds(machines, south.log_id) == [OPEN]


# ---- planted bugs


class _Read:
    """The manifests of a shard as they were read before."""

    def __init__(self, tip: object) -> None:
        self._tip = tip

    def read_tip(self) -> object:
        return self._tip


def the_manifests_are_read_first(patch: pytest.MonkeyPatch) -> None:
    delete_dead = LogCollection._delete_dead

    def delete(self: LogCollection, own: str | None) -> list[str]:
        manifests, before = self._manifests, [each.read_tip() for each in self._manifests]
        self._manifests = cast(Any, [_Read(tip) for tip in before])
        try:
            return delete_dead(self, own)
        finally:
            self._manifests = manifests

    patch.setattr(LogCollection, "_delete_dead", delete)
    # It finds most of what this bug would do, but not all.
    patch.setattr(Traces, "check_new", lambda traces, shard, manifests: None)


async def test_manifests_that_are_read_before_the_ends_are_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_manifests_are_read_first(monkeypatch)
    with pytest.raises(AssertionError, match="east names it"):
        await the_manifests_are_read_after_the_ends(machines)


async def test_silence_of_which_no_heartbeat_was_asked_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogCollection, "_heartbeats", lambda self: {})
    with pytest.raises(AssertionError, match="its daemon beats"):
        await a_silent_log_is_one_of_which_no_daemon_tells(machines)


registry.register(
    "collection of dead logs",
    [test_manifests_that_are_read_before_the_ends_are_found, test_silence_of_which_no_heartbeat_was_asked_is_found],
)
