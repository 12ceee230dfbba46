"""Heartbeats are written in time, and only a silence that was really observed makes a daemon suspected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec
import pytest

from daemon.owner import heartbeat
from daemon.owner.heartbeat import ReportedShard
from storage_backends import memory_store, object_store
from storage_backends.formats import names, requirements
from tests._support.virtual_clock import VirtualClock, settle

T = TypeVar("T")


async def run(work: Callable[[], T]) -> T:
    return work()


def beat_of(sequence: int, instance: str = "first") -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(
        daemon_id="north",
        address="127.0.0.1:7461",
        shards=(0, 1),
        epochs=(5, 7),
        manifests=(11, 12),
        instance=instance,
        sequence=sequence,
        features=("schedule_ids",),
    )


class FailingWrites(memory_store.MemoryStore):
    failing = False

    def put(self, key: str, body: bytes, *, metadata: object = None) -> None:
        if self.failing:
            raise object_store.StoreUnavailable(key, "no route")
        super().put(key, body)


def heart_of(
    store: object_store.ObjectStore,
    clock: VirtualClock,
    log_state: Callable[[], heartbeat.LogState] = heartbeat.LogState,
    *,
    owned: Mapping[int, ReportedShard] = MappingProxyType({0: ReportedShard(5, 11), 1: ReportedShard(7, 12)}),
) -> heartbeat.HeartbeatLoop:
    return heartbeat.HeartbeatLoop(
        store,
        daemon_id="north",
        address="127.0.0.1:7461",
        owned=lambda: owned,
        log_state=log_state,
        instance="first",
        run=run,
        sleep=clock.sleep,
    )


async def start(
    store: object_store.ObjectStore,
    clock: VirtualClock,
    log_state: Callable[[], heartbeat.LogState] = heartbeat.LogState,
) -> asyncio.Task[None]:
    beating = asyncio.create_task(heart_of(store, clock, log_state).beats())
    await settle()
    return beating


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_beat_is_written_at_once_and_every_three_seconds() -> None:
    store, clock = memory_store.MemoryStore(), VirtualClock()
    beating = await start(store, clock)
    assert heartbeat.read_heartbeat(store, "north") == beat_of(1)
    await clock.advance(2.9)
    assert heartbeat.read_heartbeat(store, "north") == beat_of(1)
    await clock.advance(0.1)
    assert heartbeat.read_heartbeat(store, "north") == beat_of(2)
    await clock.advance(6.0)
    assert heartbeat.read_heartbeat(store, "north") == beat_of(4)
    await stop(beating)


async def test_a_change_is_written_at_once_and_the_next_beat_follows_three_seconds_later() -> None:
    store, clock = memory_store.MemoryStore(), VirtualClock()
    owned = {0: ReportedShard(5, 11), 1: ReportedShard(7, 12)}
    heart = heart_of(store, clock, owned=owned)
    beating = asyncio.create_task(heart.beats())
    await clock.advance(1.0)
    owned[1] = ReportedShard(8, 13)
    heart.changed()
    await settle()
    changed = msgspec.structs.replace(beat_of(2), epochs=(5, 8), manifests=(11, 13))
    assert heartbeat.read_heartbeat(store, "north") == changed
    del owned[0]
    await clock.advance(2.9)
    assert heartbeat.read_heartbeat(store, "north") == changed
    await clock.advance(0.1)
    left = msgspec.structs.replace(beat_of(3), shards=(1,), epochs=(8,), manifests=(13,))
    assert heartbeat.read_heartbeat(store, "north") == left
    await stop(beating)


def test_a_heartbeat_claims_its_shards_unless_its_log_has_ended_or_an_older_version_has_written_it() -> None:
    beat = msgspec.structs.replace(beat_of(1), log_id="log")
    assert dict(beat.claims) == {0: (5, "north", "log", 11), 1: (7, "north", "log", 12)}
    assert not dict(msgspec.structs.replace(beat, log_ended=True).claims)
    assert not dict(msgspec.structs.replace(beat, epochs=(), manifests=()).claims)


async def test_an_outage_of_the_store_is_survived_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = FailingWrites(), VirtualClock()
    store.failing = True
    beating = await start(store, clock)
    await clock.advance(9.0)
    assert heartbeat.read_heartbeat(store, "north") is None
    store.failing = False
    await clock.advance(3.0)
    assert heartbeat.read_heartbeat(store, "north") == beat_of(5)
    assert [record.message for record in caplog.records] == [
        "heartbeats cannot be written: daemons/north: no route",
    ]
    await stop(beating)


async def test_a_beat_tells_of_the_log_as_it_is_then() -> None:
    store, clock = memory_store.MemoryStore(), VirtualClock()
    states = [heartbeat.LogState("log", 7), heartbeat.LogState("log", 9, True)]
    beating = await start(store, clock, lambda: states.pop(0))
    seen = heartbeat.read_heartbeat(store, "north")
    assert seen == msgspec.structs.replace(beat_of(1), log_id="log", last_slot=7)
    await clock.advance(3.0)
    seen = heartbeat.read_heartbeat(store, "north")
    assert seen == msgspec.structs.replace(beat_of(2), log_id="log", last_slot=9, log_ended=True)
    await stop(beating)


async def test_a_beat_tells_which_requirements_of_manifests_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = memory_store.MemoryStore(), VirtualClock()
    beating = await start(store, clock, lambda: heartbeat.LogState("log", 7))
    seen = heartbeat.read_heartbeat(store, "north")
    assert seen is not None
    assert seen.features == tuple(sorted(requirements.KNOWN)) == ("schedule_ids",)
    monkeypatch.setattr(requirements, "KNOWN", frozenset({"b", "a"}))
    await clock.advance(3.0)
    seen = heartbeat.read_heartbeat(store, "north")
    assert seen is not None
    assert seen.features == ("a", "b")
    await stop(beating)


def test_an_older_daemon_reports_that_it_meets_no_requirement() -> None:
    store = memory_store.MemoryStore()
    older = {"daemon_id": "north", "address": "north:1", "shards": [], "instance": "i", "sequence": 1}
    store.put(names.daemon_key("north"), msgspec.json.encode(older))
    seen = heartbeat.read_heartbeat(store, "north")
    assert seen is not None
    assert seen.features == ()


@pytest.mark.parametrize("body", [b"", b"{", b'{"daemon_id": "north"}', b"\xff"])
def test_a_heartbeat_that_cannot_be_read_counts_as_none(body: bytes) -> None:
    store = memory_store.MemoryStore()
    store.put(names.daemon_key("north"), body)
    assert heartbeat.read_heartbeat(store, "north") is None


def suspected_after(watch: heartbeat.Watch, *observations: tuple[float, heartbeat.Heartbeat | None]) -> bool:
    for now_s, seen in observations:
        watch.observe(seen, now_s=now_s)
    return watch.suspected


def test_three_missed_beats_make_a_daemon_suspected() -> None:
    watch = heartbeat.Watch()
    assert not suspected_after(watch, (0.0, beat_of(1)), (3.0, beat_of(1)), (6.0, beat_of(1)))
    assert suspected_after(watch, (9.0, beat_of(1)))
    assert watch.suspected_for_s(10.0) == 1.0


def test_any_change_ends_the_suspicion() -> None:
    watch = heartbeat.Watch()
    assert suspected_after(watch, *((3.0 * number, beat_of(1)) for number in range(4)))
    assert not suspected_after(watch, (12.0, beat_of(2)))
    assert watch.suspected_for_s(12.0) == 0.0


def test_a_process_that_was_started_again_is_a_change_though_it_counts_from_one() -> None:
    watch = heartbeat.Watch()
    assert suspected_after(watch, *((3.0 * number, beat_of(1)) for number in range(4)))
    assert not suspected_after(watch, (12.0, beat_of(1, instance="second")))


def test_looking_often_does_not_count_a_miss_twice() -> None:
    watch = heartbeat.Watch()
    assert not suspected_after(watch, *((0.1 * number, beat_of(1)) for number in range(80)))


def test_a_pause_of_the_observer_is_one_missed_beat() -> None:
    watch = heartbeat.Watch()
    assert not suspected_after(watch, (0.0, beat_of(1)), (3600.0, beat_of(1)), (3603.0, beat_of(1)))
    assert suspected_after(watch, (3606.0, beat_of(1)))


def test_an_outage_of_the_store_makes_nobody_suspected() -> None:
    watch = heartbeat.Watch()
    assert not suspected_after(watch, (0.0, beat_of(1)), (3.0, beat_of(1)), (6.0, beat_of(1)))
    watch.store_failed(now_s=9.0)
    assert not suspected_after(watch, (12.0, beat_of(1)), (15.0, beat_of(1)))
    assert suspected_after(watch, (18.0, beat_of(1)))


# ---- whether the log of a daemon may have ended


def watch_of(*seen: heartbeat.Heartbeat | None, apart_s: float = 1.0) -> heartbeat.Watch:
    watch = heartbeat.Watch()
    for number, each in enumerate(seen):
        watch.observe(each, now_s=apart_s * number)
    return watch


def with_log(sequence: int, log_id: str = "log", *, log_ended: bool = False) -> heartbeat.Heartbeat:
    return msgspec.structs.replace(beat_of(sequence), log_id=log_id, log_ended=log_ended)


@pytest.mark.parametrize(
    ("watch", "may_have_ended"),
    [
        (watch_of(with_log(1), with_log(2)), False),
        (watch_of(with_log(1), with_log(1)), False),
        (watch_of(with_log(1), with_log(1), apart_s=3.0), True),
        (watch_of(with_log(1), with_log(1), with_log(2), apart_s=3.0), False),
        (watch_of(with_log(1, "another")), True),
        (watch_of(with_log(1, "")), True),
        (watch_of(with_log(1, log_ended=True)), True),
        (watch_of(None, None, apart_s=3.0), False),
        (heartbeat.Watch(), False),
    ],
    ids=[
        "it beats and writes the log",
        "the next beat is not due yet",
        "a beat was missed",
        "it beats again",
        "it writes another log",
        "it has no log yet",
        "it says that the log has ended",
        "it never had a heartbeat",
        "its heartbeat was not read yet",
    ],
)
def test_the_end_of_a_log_is_worth_a_look(watch: heartbeat.Watch, may_have_ended: bool) -> None:
    assert watch.may_have_ended("log") is may_have_ended


def test_a_heartbeat_that_is_nested_without_end_cannot_be_read() -> None:
    store = memory_store.MemoryStore()
    store.put(names.daemon_key("north"), b'{"more":' + b"[" * 200_000)
    assert heartbeat.read_heartbeat(store, "north") is None
