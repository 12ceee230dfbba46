"""Reading shards out of logs: what belongs to whom, what is complete, and what a hole says."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from storage_backends import commit, file_log, object_store
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind
from storage_backends.formats.manifest import LogRange, ShardManifest
from storage_backends.log_reading import Extent, LogEnd, ShardSections, Verdict, extents_once, judged, read_logs
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import StoreUnavailable
from tests._support.fault_store import Fault, FaultStore, Script
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import LOG_ID, OTHER_LOG_ID


class Root:
    """Logs on a store that fails as `script` says."""

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self.script = Script()
        self.store = FaultStore(MemoryStore(), self.script)
        self.logs = ObjectLogs(self.store, executor)
        self.heads: dict[str, dict[int, Head]] = {}

    def put(self, log_id: str, number: int, sections: Mapping[int, Head]) -> bytes:
        """A slot with a section for each of these shards."""
        heads = self.heads.setdefault(log_id, {})
        heads.update(sections)
        header = LogSlotHeader(log_id=log_id, number=number, kind=LogSlotKind.DATA, heads=dict(heads))
        bodies = {shard: f"{shard} {head.epoch} {head.last_slot}".encode() for shard, head in sections.items()}
        body = log_slot_format.encode_log_slot(header, bodies)
        self.store.put(f"logs/{log_id}/{number:020d}", body)
        return body

    def read(
        self, *manifests: ShardManifest, ends: Mapping[str, LogEnd] | None = None, from_slot: int = 0
    ) -> list[ShardSections]:
        shards = [ShardSections(manifest, from_slot) for manifest in manifests]
        read_logs(self.logs, shards, ends or {})
        return shards

    def end(self, log_id: str, number: int) -> dict[str, LogEnd]:
        """The end of a log whose last slot is that one."""
        return {log_id: LogEnd(number, self.heads[log_id])}

    def asked_for(self, before: int) -> list[str]:
        """The keys of slots that were read since so many calls."""
        return sorted(call.key for call in self.store.calls[before:] if call.operation == "get_with_metadata")


@pytest.fixture
def root() -> Iterator[Root]:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield Root(executor)


def closed(log_id: str, epoch: int, numbers: tuple[int, int], slots: tuple[int, int]) -> LogRange:
    """`numbers`: after and through; `slots`: first and last."""
    return LogRange(
        log_id=log_id, epoch=epoch, after=numbers[0], through=numbers[1], first_slot=slots[0], last_slot=slots[1]
    )


def opened(log_id: str, epoch: int, after: int, first_slot: int) -> LogRange:
    return LogRange(log_id=log_id, epoch=epoch, after=after, through=None, first_slot=first_slot, last_slot=None)


def manifest(shard: int, *ranges: LogRange) -> ShardManifest:
    return ShardManifest(head=commit.NO_HEAD, shard=shard, epoch=ranges[-1].epoch, ranges=ranges)


def slots_of(sections: ShardSections, ends: Mapping[str, LogEnd] | None = None) -> list[int]:
    return [section.slot for section in sections.complete(ends or {})]


def test_sections_of_two_logs_are_one_sequence(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.put(LOG_ID, 3, {0: Head(1, 2), 1: Head(1, 1)})
    root.put(OTHER_LOG_ID, 2, {0: Head(2, 3)})
    zero = manifest(0, closed(LOG_ID, 1, (1, 3), (1, 2)), opened(OTHER_LOG_ID, 2, 1, 3))
    one = manifest(1, closed(LOG_ID, 1, (1, 3), (1, 1)))
    ends = root.end(OTHER_LOG_ID, 2)
    shards = root.read(zero, one, ends=ends)
    assert slots_of(shards[0], ends) == [1, 2, 3]
    assert [section.body for section in shards[1].complete({})] == [b"1 1 1"]


def test_each_slot_is_read_once_for_all_shards(root: Root) -> None:
    for number in range(2, 12):
        root.put(LOG_ID, number, {shard: Head(1, number - 1) for shard in range(5)})
    manifests = [manifest(shard, closed(LOG_ID, 1, (shard + 1, 11), (shard + 1, 10))) for shard in range(5)]
    before = len(root.store.calls)
    root.read(*manifests)
    assert root.asked_for(before) == [f"logs/{LOG_ID}/{number:020d}" for number in range(2, 12)]


def test_what_no_range_covers_is_left_alone(root: Root) -> None:
    """A stray in an emptied number, a section of another epoch, and one that a checkpoint has."""
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.put(LOG_ID, 3, {0: Head(1, 2)})
    root.put(LOG_ID, 4, {0: Head(1, 3)})
    root.put(LOG_ID, 5, {0: Head(3, 4)})
    shards = root.read(manifest(0, closed(LOG_ID, 1, (2, 4), (2, 3))), from_slot=1)
    assert slots_of(shards[0]) == [2, 3]
    shards = root.read(manifest(0, closed(LOG_ID, 1, (2, 5), (2, 3))), from_slot=2)
    assert slots_of(shards[0]) == [3]


def test_a_hole_is_damage_of_its_shard_alone_named_by_log_slot_and_shard_slot(root: Root) -> None:
    for number in (2, 3, 4):
        root.put(LOG_ID, number, {0: Head(1, number - 1), **({1: Head(1, 1)} if number == 2 else {})})
    root.store.delete(f"logs/{LOG_ID}/{3:020d}")
    zero = manifest(0, closed(LOG_ID, 1, (1, 4), (1, 3)))
    shards = root.read(zero, manifest(1, closed(LOG_ID, 1, (1, 4), (1, 1))))
    with pytest.raises(object_store.Damaged) as damaged:
        shards[0].complete({})
    assert str(damaged.value) == (
        f"logs/{LOG_ID}/: shard 0, shard slot 2, after slot 2 and before slot 4: it is missing"
    )
    assert slots_of(shards[1]) == [1]


def test_the_last_section_may_be_the_one_that_is_missing(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.put(LOG_ID, 3, {0: Head(1, 2)})
    root.store.delete(f"logs/{LOG_ID}/{3:020d}")
    ends = root.end(LOG_ID, 3)
    shards = root.read(manifest(0, opened(LOG_ID, 1, 1, 1)), ends=ends)
    with pytest.raises(object_store.Damaged, match="shard slot 2, after slot 2: it is missing"):
        shards[0].complete(ends)


def test_a_wrong_bit_in_a_section_costs_its_shard(root: Root) -> None:
    body = bytearray(root.put(LOG_ID, 2, {0: Head(1, 1), 1: Head(1, 1)}))
    body[-1] ^= 1
    root.store.put(f"logs/{LOG_ID}/{2:020d}", bytes(body))
    shards = root.read(*(manifest(shard, closed(LOG_ID, 1, (1, 2), (1, 1))) for shard in (0, 1)))
    assert slots_of(shards[0]) == [1]
    with pytest.raises(object_store.Damaged, match=f"section of shard 1 in slot 2 of log {LOG_ID} is damaged"):
        shards[1].complete({})


def test_a_damaged_header_costs_the_shards_that_had_a_section_there(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1), 1: Head(1, 1)})
    body = bytearray(root.put(LOG_ID, 3, {1: Head(1, 2)}))
    body[40] ^= 1
    root.store.put(f"logs/{LOG_ID}/{3:020d}", bytes(body))
    root.put(LOG_ID, 4, {0: Head(1, 2)})
    zero, one = root.read(
        manifest(0, closed(LOG_ID, 1, (1, 4), (1, 2))), manifest(1, closed(LOG_ID, 1, (1, 4), (1, 2)))
    )
    assert slots_of(zero) == [1, 2]
    with pytest.raises(object_store.Damaged, match=r"shard 1, shard slot 2, .* log slot is damaged at byte"):
        one.complete({})


def test_a_body_that_the_store_finds_damaged_is_read_for_the_sections_that_are_whole(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.script.plan("get_with_metadata", Fault.SHORT, times=2)
    shards = root.read(manifest(0, closed(LOG_ID, 1, (1, 2), (1, 1))))
    assert slots_of(shards[0]) == [1]


def test_a_shard_slot_that_lies_in_two_log_slots_is_damage(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.put(LOG_ID, 3, {0: Head(1, 1)})
    shards = root.read(manifest(0, closed(LOG_ID, 1, (1, 3), (1, 1))))
    with pytest.raises(object_store.Damaged, match="shard slot 1 is also in slot 2 of log"):
        shards[0].complete({})


def test_ranges_that_leave_a_shard_slot_out_are_damage(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 1)})
    root.put(LOG_ID, 3, {0: Head(2, 3)})
    shards = root.read(manifest(0, closed(LOG_ID, 1, (1, 2), (1, 1)), closed(LOG_ID, 2, (2, 3), (3, 3))))
    with pytest.raises(object_store.Damaged, match=r"shard slot 2, .*: no log range has it"):
        shards[0].complete({})


def test_an_open_range_without_a_section_ends_before_it_begins(root: Root) -> None:
    root.put(LOG_ID, 2, {0: Head(1, 7)})
    ends = root.end(LOG_ID, 2)
    shards = root.read(manifest(0, opened(LOG_ID, 3, 2, 8)), ends=ends, from_slot=7)
    assert slots_of(shards[0], ends) == []


def test_nothing_is_read_of_a_log_that_has_nothing_new_of_a_shard(root: Root) -> None:
    """A checkpoint covers what shard 0 has there, and shard 1 has nothing."""
    for number in range(2, 8):
        root.put(LOG_ID, number, {0: Head(1, number - 1)})
    root.put(LOG_ID, 8, {2: Head(1, 1)})
    before, ends = len(root.store.calls), root.end(LOG_ID, 8)
    (covered,) = root.read(manifest(0, opened(LOG_ID, 1, 1, 1)), ends=ends, from_slot=6)
    (silent,) = root.read(manifest(1, opened(LOG_ID, 1, 1, 1)), ends=ends)
    assert [slots_of(covered, ends), slots_of(silent, ends), root.asked_for(before)] == [[], [], []]
    root.read(manifest(0, opened(LOG_ID, 1, 1, 1)), ends=ends, from_slot=5)
    assert root.asked_for(before) == [f"logs/{LOG_ID}/{number:020d}" for number in range(2, 9)]


def test_extents_that_overlap_or_meet_are_one() -> None:
    wanted = [Extent("a", 4, 9), Extent("a", 1, 4), Extent("b", 2, 3), Extent("a", 6, 7), Extent("a", 12, 13)]
    assert extents_once([*wanted, Extent("c", 5, 5)]) == [Extent("a", 1, 9), Extent("a", 12, 13), Extent("b", 2, 3)]


def test_a_log_that_the_store_does_not_give_costs_the_shards_that_need_it(root: Root) -> None:
    for number in range(2, 6):
        root.put(LOG_ID, number, {0: Head(1, number - 1), 1: Head(1, number - 1)})
    for number in (2, 3):
        root.put(OTHER_LOG_ID, number, {1: Head(2, number + 3), 2: Head(1, number - 1)})
    root.script.plan("get_with_metadata", Fault.FAIL_BEFORE, key_part=f"{OTHER_LOG_ID}/{3:020d}", times=10)
    shards = root.read(
        manifest(0, closed(LOG_ID, 1, (1, 5), (1, 4))),
        manifest(1, closed(LOG_ID, 1, (1, 5), (1, 4)), closed(OTHER_LOG_ID, 2, (1, 3), (5, 6))),
        manifest(2, closed(OTHER_LOG_ID, 1, (1, 3), (1, 2))),
    )
    assert slots_of(shards[0]) == [1, 2, 3, 4]
    for unread in shards[1:]:
        with pytest.raises(StoreUnavailable, match=OTHER_LOG_ID):
            unread.complete({})


def test_a_log_that_fails_costs_no_shard_that_needs_only_what_was_read_of_it(root: Root) -> None:
    for number in (*range(2, 6), *range(10, 12)):
        root.put(LOG_ID, number, {0: Head(1, number - 1), 1: Head(1, number - 1)})
    root.script.plan("get_with_metadata", Fault.FAIL_BEFORE, key_part=f"{LOG_ID}/{11:020d}", times=10)
    early, late = root.read(
        manifest(0, closed(LOG_ID, 1, (1, 5), (1, 4))), manifest(1, closed(LOG_ID, 1, (9, 11), (9, 10)))
    )
    assert slots_of(early) == [1, 2, 3, 4]
    with pytest.raises(StoreUnavailable):
        late.complete({})


def test_slots_that_are_missing_are_not_looked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "FILE_BYTES_MAX", 4_096)
    log = file_log.FileLogs(tmp_path).log(LOG_ID)
    for number in range(1, 101):
        log.create(number, log_slots.slot(number))
    log.close()
    files = sorted(path for path in (tmp_path / ".logs" / LOG_ID).iterdir() if path.name != file_log.LOCK_FILE)
    assert len(files) > 2
    files[1].unlink()
    parsed: list[int] = []
    parse = file_log._parse

    def counted(data: bytes, first: int, following: int | None) -> file_log._Parsed:
        parsed.append(first)
        return parse(data, first, following)

    monkeypatch.setattr(file_log, "_parse", counted)
    shard = ShardSections(manifest(log_slots.SHARD, closed(LOG_ID, log_slots.EPOCH, (0, 100), (1, 99))), 0)
    read_logs(file_log.FileLogs(tmp_path), [shard], {})
    assert len(parsed) < len(files)
    with pytest.raises(object_store.Damaged, match="its record is missing"):
        shard.complete({})


def test_what_a_manifest_says_that_is_read_again() -> None:
    read_by = manifest(0, closed(LOG_ID, 1, (1, 4), (1, 3)), opened(OTHER_LOG_ID, 2, 3, 4))
    assert judged(read_by, read_by) is Verdict.STANDS
    assert judged(read_by, manifest(0, opened(OTHER_LOG_ID, 3, 3, 4))) is Verdict.SUPERSEDED
    assert judged(read_by, manifest(0, opened(OTHER_LOG_ID, 2, 3, 4))) is Verdict.BEGIN_AGAIN
    moved = manifest(0, closed(LOG_ID, 1, (1, 4), (1, 3)), opened(OTHER_LOG_ID, 2, 5, 4))
    assert judged(read_by, moved) is Verdict.BEGIN_AGAIN
