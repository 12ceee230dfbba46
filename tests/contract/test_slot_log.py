"""What the port of a log promises, on every form of it."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_backends import log_fence, object_store
from storage_backends.file_log import FileLogs
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLogs
from storage_backends.s3 import S3Store
from storage_backends.slot_log import ReadSlot, SlotLog, SlotLogs
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import FENCER, LOG_ID, OTHER_LOG_ID

_roots = itertools.count()


@pytest.fixture(params=["memory", "local directory", "s3", "files"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotLogs]:
    """The logs of an empty root."""
    if request.param == "files":
        yield FileLogs(tmp_path)
        return
    store: object_store.ObjectStore
    if request.param == "memory":
        store = MemoryStore()
    elif request.param == "local directory":
        store = LocalDirectory(tmp_path / "root")
    else:
        store = S3Store(request.getfixturevalue("moto").settings("contract", prefix=f"slot-logs/{next(_roots)}"))
    with store, concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield ObjectLogs(store, executor)


@pytest.fixture
def owner(logs: SlotLogs) -> Iterator[SlotLog]:
    """A log in its owner's hand, not opened yet."""
    log = logs.log(LOG_ID)
    yield log
    log.close()


def written(log: SlotLog, through: int) -> SlotLog:
    """The log with slots up to this number."""
    for number in range(1, through + 1):
        log.create(number, log_slots.slot(number, log_id=log.log_id))
    return log


def numbers_of(slots: list[ReadSlot]) -> list[int]:
    return [slot.number for slot in slots]


def test_a_log_without_slots_shows_none(logs: SlotLogs, owner: SlotLog) -> None:
    assert owner.highest() is None
    assert owner.numbers() == []
    assert owner.head(1) is None
    assert owner.read(0, 10) == []
    assert logs.log_ids() == frozenset()


def test_what_was_created_is_shown_to_everybody(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 4)
    for log in (owner, logs.log(LOG_ID)):
        assert log.highest() == 4
        assert log.numbers() == [1, 2, 3, 4]
        assert log.head(3) == log_slot_format.identity_of(log_slots.data(3))
        assert log.head(5) is None
        assert log.read(1, 3) == [ReadSlot(number, log_slots.data(number)) for number in (2, 3)]
        assert numbers_of(log.read(0, 100)) == [1, 2, 3, 4]
    assert logs.log_ids() == {LOG_ID}


def test_a_number_is_created_once(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 2)
    with pytest.raises(object_store.AlreadyExists):
        owner.create(2, log_slots.data(2, b"another"))
    assert owner.read(1, 2) == [ReadSlot(2, log_slots.data(2))]


def test_of_two_writers_at_most_one_has_a_number(logs: SlotLogs) -> None:
    """An owner and a fencer, or two with one log id: each number has one winner, and the loser is told."""
    written(logs.log(LOG_ID), 1).close()
    results: dict[str, list[int]] = {"one": [], "two": []}
    begin = threading.Barrier(2)

    def write(name: str, log: SlotLog) -> None:
        begin.wait()
        for number in range(2, 12):
            try:
                log.create(number, log_slots.data(number, name.encode()))
            except (object_store.AlreadyExists, object_store.StoreUnavailable, ValueError):
                continue
            results[name].append(number)

    writers = {name: logs.log(LOG_ID) for name in results}
    threads = [threading.Thread(target=write, args=each) for each in writers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results["one"] + results["two"]) == list(range(2, 12))
    for read in logs.log(LOG_ID).read(1, 11):
        assert read.body is not None
        content = log_slot_format.decode_log_slot(read.body).section(log_slots.SHARD).decode()
        assert read.number in results[content]
    for log in writers.values():
        log.close()


def test_the_beginning_goes_and_the_end_stays(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 6)
    owner.delete_through(4)
    owner.delete_through(4)
    log = logs.log(LOG_ID)
    assert set(numbers_of(log.read(0, 10))) >= {5, 6}
    assert log.highest() == 6
    assert log.numbers() == numbers_of(log.read(0, 10))
    with pytest.raises(ValueError, match="must stay"):
        owner.delete_through(6)
    with pytest.raises(ValueError, match="must stay"):
        log.delete_through(6)
    owner.create(7, log_slots.data(7))
    assert log.highest() == 7


def test_a_fence_stays_and_what_lies_before_it_goes(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 3).close()
    fencer = logs.log(LOG_ID)
    fence = log_fence.fence_log(fencer, FENCER, delays_s=iter(()), sleep=lambda _: None)
    assert (fence.number, fence.end) == (4, 3)
    assert dict(fence.heads) == {log_slots.SHARD: (log_slots.EPOCH, 2)}
    fencer.close()
    collector = logs.log(LOG_ID)
    collector.delete_through(3)
    assert collector.numbers() == numbers_of(collector.read(0, 10)) == [4]
    found = collector.head(4)
    assert found is not None
    assert found.kind is LogSlotKind.FENCE


def test_a_slot_that_an_operator_gives_up_is_replaced_and_no_other_changes(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 3).create(4, log_slots.fence(4))
    owner.close()
    tool = logs.log(LOG_ID)
    for _ in range(2):
        tool.replace(3, log_slots.data(3, b"another content"))
    tool.close()
    log = logs.log(LOG_ID)
    expected = [log_slots.slot(1), log_slots.data(2), log_slots.data(3, b"another content"), log_slots.fence(4)]
    assert [slot.body for slot in log.read(0, 10)] == expected
    assert log.head(3) == log_slot_format.identity_of(expected[2])
    assert (log.highest(), log.numbers()) == (4, [1, 2, 3, 4])
    assert not any("REPLACING" in name for name in logs.foreign())
    log.close()


def test_a_log_that_is_fenced_twice_has_one_fence(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 2).close()
    fences = []
    for _ in range(2):
        fencer = logs.log(LOG_ID)
        fences.append(log_fence.fence_log(fencer, FENCER, delays_s=iter(()), sleep=lambda _: None))
        fencer.close()
    assert fences[0] == fences[1]
    assert logs.log(LOG_ID).highest() == 3


def test_a_log_without_slots_cannot_be_fenced(owner: SlotLog) -> None:
    with pytest.raises(object_store.Damaged, match="the store has lost it"):
        log_fence.fence_log(owner, FENCER, delays_s=iter(()), sleep=lambda _: None)


def test_logs_know_nothing_of_each_other(logs: SlotLogs, owner: SlotLog) -> None:
    written(owner, 3)
    other = written(logs.log(OTHER_LOG_ID), 2)
    assert (owner.highest(), other.highest()) == (3, 2)
    assert logs.log_ids() == {LOG_ID, OTHER_LOG_ID}
    other.close()
