"""A log in files: crashes at every call, torn and short writes, a full disk, failed synchronisation, the lock."""

from __future__ import annotations

import errno
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_backends import file_log, log_fence, object_store
from storage_backends.file_log import FileLog, FileLogs
from storage_backends.formats import framing, log_slot_format
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.slot_log import LogHeld
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import FENCER, LOG_ID


class Crashed(BaseException):
    """The process is dead."""


class Disk:
    """In place of `os` in the log: it ends the process before its `crash_at`-th call that changes something, or fails.

    `short`: how many bytes a `write` takes at most. `fails`: the error of the calls of that name.
    """

    CHANGING = ("write", "pwrite", "ftruncate", "fsync", "fdatasync", "mkdir", "open")

    def __init__(self, *, crash_at: int | None = None, short: int | None = None) -> None:
        self.calls: list[str] = []
        self.crash_at = crash_at
        self.short = short
        self.fails: dict[str, int] = {}
        self.files: set[int] = set()
        # By file, how many bytes have been synchronised: all that is left after a power failure.
        self.synchronised: dict[Path, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGING and name != "close":
            return real
        return lambda *args, **named: self._call(name, real, args, named)

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if name == "close":
            self.files.discard(args[0])
            return real(*args)
        if name in self.fails:
            raise OSError(self.fails[name], os.strerror(self.fails[name]))
        self.calls.append(name)
        if self.crash_at is not None and len(self.calls) > self.crash_at:
            raise Crashed
        if name == "write" and self.short is not None:
            args = (args[0], bytes(args[1])[: self.short])
        result = real(*args, **named)
        if name == "open":
            self.files.add(result)
        elif name in ("fsync", "fdatasync"):
            path = Path(f"/proc/self/fd/{args[0]}").readlink()
            if path.is_file():
                self.synchronised[path] = path.stat().st_size
        return result

    def end_process(self) -> None:
        """Its files are closed, and with them its locks."""
        for file in self.files:
            os.close(file)
        self.files.clear()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(file_log, "os", disk)
    yield disk
    disk.crash_at, disk.short, disk.fails = None, None, {}
    disk.end_process()


def log_of(folder: Path) -> FileLog:
    return FileLogs(folder).log(LOG_ID)


def path_of(folder: Path, first: int) -> Path:
    return folder / ".logs" / LOG_ID / f"{first:020d}"


def written(folder: Path, through: int) -> FileLog:
    log = log_of(folder)
    for number in range(1, through + 1):
        log.create(number, log_slots.slot(number))
    return log


def record(number: int) -> bytes:
    """The bytes of a slot in a file."""
    slot = log_slots.slot(number)
    framed = struct.pack("<IQ", len(slot), number)
    return framed + framing.crc32c(framed, slot).to_bytes(4, "little") + slot + b"\x17"


def shown(log: FileLog) -> list[int]:
    return [slot.number for slot in log.read(0, 1 << 50)]


def fenced(folder: Path) -> int:
    """The number of the fence that a candidate writes."""
    log = log_of(folder)
    fence = log_fence.fence_log(log, FENCER, delays_s=iter(()), sleep=lambda _: None)
    log.close()
    return fence.number


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "FILE_BYTES_MAX", 4_096)


def of_each_call(tmp_path: Path, disk: Disk) -> Iterator[tuple[Path, int]]:
    """A log with two slots that has crashed at each call of `append` in turn, and the last slot that was certain."""
    for crash_at in range(200):
        folder = tmp_path / f"crash{crash_at}"
        folder.mkdir()
        disk.crash_at = None
        log = written(folder, 2)
        disk.calls, disk.crash_at = [], crash_at
        certain = 2
        try:
            log.create(3, log_slots.data(3))
            certain = 3
            log.create(4, log_slots.data(4, bytes(5_000)))
            certain = 4
        except Crashed:
            disk.end_process()
            disk.crash_at = None
            yield folder, certain
        else:
            assert crash_at > 5
            log.close()
            return


def test_a_process_that_dies_at_any_call_of_an_append_loses_nothing_certain(
    tmp_path: Path, disk: Disk, small_files: None
) -> None:
    for folder, certain in of_each_call(tmp_path, disk):
        before = shown(log_of(folder))
        assert before in ([*range(1, certain + 1)], [*range(1, certain + 2)])
        fence = fenced(folder)
        assert fence == before[-1] + 1
        assert shown(log_of(folder)) == [*before, fence]


@pytest.mark.parametrize("left", ["nothing", "a part", "zeros"])
def test_a_power_failure_at_any_call_of_an_append_loses_nothing_certain(
    left: str, tmp_path: Path, disk: Disk, small_files: None
) -> None:
    for folder, certain in of_each_call(tmp_path, disk):
        for path in (folder / ".logs" / LOG_ID).glob("0*"):
            kept, size = disk.synchronised.get(path, 0), path.stat().st_size
            content = path.read_bytes()
            if left == "a part":
                kept += (size - kept) // 2
            path.write_bytes(content[:kept] + (bytes(size - kept) if left == "zeros" else b""))
        before = shown(log_of(folder))
        assert before[:certain] == [*range(1, certain + 1)]
        assert fenced(folder) == before[-1] + 1


def test_a_process_that_dies_while_it_opens_a_log_leaves_none_or_one_that_is_open(tmp_path: Path, disk: Disk) -> None:
    for crash_at in range(200):
        folder = tmp_path / f"crash{crash_at}"
        folder.mkdir()
        disk.calls, disk.crash_at = [], crash_at
        log = log_of(folder)
        try:
            log.create(1, log_slots.opening())
        except Crashed:
            disk.end_process()
            disk.crash_at = None
            if log_of(folder).highest() is not None:
                assert fenced(folder) == 2
            continue
        assert crash_at > 8
        log.close()
        return


def test_a_write_that_takes_a_part_goes_on(tmp_path: Path, disk: Disk) -> None:
    disk.short = 7
    written(tmp_path, 4).close()
    assert shown(log_of(tmp_path)) == [1, 2, 3, 4]


def test_a_full_disk_refuses_the_slot_and_takes_it_later(tmp_path: Path, disk: Disk) -> None:
    log = written(tmp_path, 2)
    disk.fails = {"write": errno.ENOSPC}
    with pytest.raises(object_store.StoreUnavailable, match="No space left"):
        log.create(3, log_slots.data(3))
    assert log.head(3) is None
    disk.fails = {}
    log.create(3, log_slots.data(3))
    log.close()
    assert shown(log_of(tmp_path)) == [1, 2, 3]


def test_a_disk_that_fills_up_in_a_record_keeps_nothing_of_it(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = written(tmp_path, 2)
    size = path_of(tmp_path, 1).stat().st_size
    disk.short = 7
    write = disk._call

    def fill(name: str, real: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = write(name, real, args, named)
        if name == "write":
            disk.fails = {"write": errno.ENOSPC}
        return result

    monkeypatch.setattr(disk, "_call", fill)
    with pytest.raises(object_store.StoreUnavailable):
        log.create(3, log_slots.data(3))
    assert path_of(tmp_path, 1).stat().st_size == size


def test_a_failed_synchronisation_ends_the_use_of_the_log(tmp_path: Path, disk: Disk) -> None:
    log = written(tmp_path, 2)
    disk.fails = {"fdatasync": errno.EIO}
    with pytest.raises(object_store.OutcomeUnknown, match="restart"):
        log.create(3, log_slots.data(3))
    disk.fails = {}
    for use in (lambda: log.create(3, log_slots.data(3)), lambda: log.head(2), log.highest):
        with pytest.raises(object_store.StoreUnavailable, match="restart"):
            use()
    log.close()


# ---- torn and damaged


def altered(folder: Path, change: Callable[[bytearray], None], *, first: int = 1) -> None:
    path = path_of(folder, first)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def test_a_record_that_is_cut_off_anywhere_was_never_certain(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    whole = path_of(tmp_path, 1).read_bytes()
    begin = whole.index(b"TyLS", whole.index(b"section 2"))
    for end in range(begin - 16, len(whole)):
        path_of(tmp_path, 1).write_bytes(whole[:end])
        assert shown(log_of(tmp_path)) == [1, 2]


def test_a_torn_record_is_cut_off_before_the_fence(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    whole = path_of(tmp_path, 1).read_bytes()
    path_of(tmp_path, 1).write_bytes(whole[:-5])
    assert fenced(tmp_path) == 3
    assert shown(log_of(tmp_path)) == [1, 2, 3]
    found = log_of(tmp_path).head(3)
    assert found is not None
    assert found.kind is LogSlotKind.FENCE
    log_of(tmp_path).delete_through(2)
    assert shown(log_of(tmp_path)) == [3]


def test_a_wrong_bit_anywhere_loses_no_other_slot_and_is_never_taken_for_torn(tmp_path: Path) -> None:
    """Neither in the last record nor in one before it."""
    written(tmp_path, 3).close()
    whole = path_of(tmp_path, 1).read_bytes()
    ends = [whole.index(b"TyLS", 17) - 16, whole.index(b"TyLS", whole.index(b"section 2")) - 16, len(whole)]
    for place, bit in itertools.product(range(len(whole)), (0x01, 0x10, 0x80)):
        content = bytearray(whole)
        content[place] ^= bit
        hit = next(number for number, end in enumerate(ends, 1) if place < end)
        records, end = file_log._parse(bytes(content), 1, None)
        read = {record.number: record for record in records}
        assert sorted(read) == [1, 2, 3], place
        assert read[hit].damage
        assert all(read[number].slot == log_slots.slot(number) for number in {1, 2, 3} - {hit})
        assert end == len(whole), "nothing of it would be cut off"


def test_a_wrong_bit_in_a_section_leaves_the_header_readable_for_a_fence(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    altered(tmp_path, lambda content: content.__setitem__(-3, content[-3] ^ 1))
    assert fenced(tmp_path) == 4


def test_a_file_that_is_missing_between_two_is_damage(tmp_path: Path, small_files: None) -> None:
    log = written(tmp_path, 2)
    for number in (3, 4):
        log.create(number, log_slots.data(number, bytes(4_000)))
    log.close()
    path_of(tmp_path, 3).unlink()
    read = {slot.number: slot for slot in log_of(tmp_path).read(0, 10)}
    assert read[3].body is None
    assert read[3].damage == "its record is missing; slot 4 is there"


def test_files_are_short_and_whole_files_go(tmp_path: Path, small_files: None) -> None:
    log = log_of(tmp_path)
    log.create(1, log_slots.opening())
    for number in range(2, 40):
        log.create(number, log_slots.data(number, bytes(700)))
    files = sorted((tmp_path / ".logs" / LOG_ID).glob("0*"))
    assert len(files) > 5
    assert all(file.stat().st_size <= 4_096 for file in files)
    log.delete_through(38)
    assert [file.name for file in files[:-1] if file.exists()] == []
    assert shown(log)[-1] == 39
    log.close()


def test_what_is_no_file_of_a_log_is_none_and_is_named(tmp_path: Path) -> None:
    written(tmp_path, 1).close()
    logs = FileLogs(tmp_path)
    folder = path_of(tmp_path, 1).parent
    foreign = [folder / "notes.txt", folder / ("9" * 20), folder.parent / "notes"]
    for path in foreign:
        path.write_text("")
    (folder / f"{7:020d}").mkdir()
    assert log_of(tmp_path).highest() == 1
    assert logs.log_ids() == {LOG_ID}
    assert sorted(logs.foreign()) == sorted(map(str, (*foreign, folder / f"{7:020d}")))


FAR = 1 << 40


@pytest.mark.parametrize("content", ["", "mine", "a copy"])
@pytest.mark.parametrize("begin", [1, FAR], ids=["above", "below"])
def test_a_foreign_file_with_a_number_far_away_as_its_name_is_named_and_changes_nothing(
    tmp_path: Path, begin: int, content: str
) -> None:
    numbers = [*range(begin, begin + 3)]
    first, foreign = path_of(tmp_path, begin), path_of(tmp_path, 1 if begin == FAR else FAR)
    first.parent.mkdir(parents=True)
    first.write_bytes(b"".join(record(number) for number in numbers))
    foreign.write_bytes(first.read_bytes() if content == "a copy" and begin == 1 else content.encode())
    assert log_of(tmp_path).numbers() == numbers
    assert log_of(tmp_path).highest() == numbers[-1]
    assert shown(log_of(tmp_path)) == numbers
    assert FileLogs(tmp_path).foreign() == [str(foreign)]
    assert fenced(tmp_path) == numbers[-1] + 1


def test_a_record_with_a_number_far_away_takes_little_memory(tmp_path: Path) -> None:
    written(tmp_path, 1).close()
    path_of(tmp_path, FAR).write_bytes(record(FAR))
    numbers = log_of(tmp_path).numbers()
    assert len(numbers) < 3 * file_log.MISSING_TOLD_MAX
    assert numbers[-1] == FAR
    read = {slot.number: slot for slot in log_of(tmp_path).read(0, 2)}
    assert read[2].damage == f"its record is missing; slot {FAR} is there"


def test_where_many_slots_are_small_the_next_file_is_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "MISSING_TOLD_MAX", 2)
    written(tmp_path, 8).close()
    path_of(tmp_path, 9).write_bytes(b"torn")
    assert log_of(tmp_path).firsts() == [1, 9]
    assert log_of(tmp_path).numbers() == [*range(1, 9)]


# ---- the lock

HOLDER = """
import sys
from storage_backends.file_log import FileLogs
from tests.storage_backends._support import log_slots
log = FileLogs(sys.argv[1]).log(log_slots.LOG_ID)
log.create(1, log_slots.opening())
log.create(2, log_slots.data(2))
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_log_is_fenced_when_its_owner_is_dead_and_not_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    repository = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repository) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"holds\n"
            with pytest.raises(LogHeld, match=rf"process {owner.pid} since 20.* UTC, which is running"):
                fenced(tmp_path)
            assert log_of(tmp_path).highest() == 2
        finally:
            owner.kill()
    assert fenced(tmp_path) == 3


def test_a_slot_that_would_leave_a_gap_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path, 2)
    with pytest.raises(ValueError, match=r"slot 4 of log .* after slot 2"):
        log.create(4, log_slots.data(4))
    log.close()


def test_a_log_that_was_closed_is_used_no_more(tmp_path: Path) -> None:
    log = written(tmp_path, 2)
    log.close()
    log.close()
    with pytest.raises(object_store.StoreUnavailable, match="it is closed"):
        log.create(3, log_slots.data(3))


def test_only_what_has_slots_is_a_log(tmp_path: Path) -> None:
    assert FileLogs(tmp_path).log_ids() == frozenset()
    with pytest.raises(object_store.StoreUnavailable, match="there is no such log"):
        log_of(tmp_path).create(2, log_slots.data(2))
    written(tmp_path, 1).close()
    assert FileLogs(tmp_path).log_ids() == {LOG_ID}
    assert log_slot_format.is_log_id(LOG_ID)
