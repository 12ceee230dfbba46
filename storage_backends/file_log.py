"""Stores a log as records in files of a local file system: `.logs/<log id>/`, files named by their first number.

`store_opening` alone opens such logs; they stand apart as one of two implementations of `slot_log`.

    u32 length of the slot | u64 number | u32 CRC32C of both and of the slot | the slot | end mark      little-endian

The creator of slots holds an exclusive lock on the file LOCK of the log until `close`, or until its process is dead: a
fencer that has the lock knows that the owner is dead. A record is written behind the others and synchronised before it
counts, and a new file's name before a record is in it. Therefore at most the last record of the last file is
incomplete, and then it was never certain: it is torn, and the next holder of the lock cuts it off. A broken record with
a whole record behind it is damage. A broken last record of full length with its end mark is damage, too, because zeros
stand where the last blocks of a record were never written.

A file system that fails to synchronise forgets that it failed; after one such failure the log refuses every operation.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from storage_backends import object_store
from storage_backends.formats import format_errors, framing, log_slot_format, names
from storage_backends.formats.log_slot_format import SlotIdentity
from storage_backends.slot_log import LogHeld, ReadSlot, SlotLog

LOGS_FOLDER: Final = ".logs"
LOCK_FILE: Final = "LOCK"
_TEMPORARY_FILE: Final = "REPLACING"
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Size of a file (bytes) beyond which a record begins another one; a longer record has a file of its own."""
MISSING_TOLD_MAX: Final = 10_000
"""Missing records before a file that are named. A file without a whole record that lies further off is foreign."""

_FRAME: Final = struct.Struct("<IQI")
_FRAMED: Final = struct.Struct("<IQ")
_END: Final = b"\x17"
_RECORD_BYTES_MIN: Final = _FRAME.size + log_slot_format.HEADER_BYTES + len(_END)
_NUMBER_DIGITS: Final = 20
_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700


class FileLogs:
    """The logs in a local directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._folder: Final = Path(root).absolute() / LOGS_FOLDER

    def log(self, log_id: str) -> FileLog:
        return FileLog(self._folder / log_id, log_id)

    def log_ids(self) -> frozenset[str]:
        with _translated(names.LOGS_PREFIX):
            try:
                listed = os.listdir(self._folder)
            except FileNotFoundError:
                return frozenset()
            return frozenset(name for name in listed if log_slot_format.is_log_id(name) and self.log(name).highest())

    def foreign(self) -> list[str]:
        with _translated(names.LOGS_PREFIX), suppress(FileNotFoundError):
            return [str(path) for path in self._folder.rglob("*") if not self._is_of_log(path)]
        return []

    def _is_of_log(self, path: Path) -> bool:
        match path.relative_to(self._folder).parts:
            case [log_id]:
                return log_slot_format.is_log_id(log_id)
            case [log_id, name] if log_slot_format.is_log_id(log_id):
                return path.is_file() and (name == LOCK_FILE or names.number_in("", name) in self.log(log_id).firsts())
        return False


class _Record(NamedTuple):
    """A record of a file.

    `slot` holds its bytes, or None if only its absence is known. `damage` is empty if the record is whole.
    """

    number: int
    slot: bytes | None
    damage: str = ""


class _Parsed(NamedTuple):
    """The records of a file, up to byte `end`; the rest is torn."""

    records: list[_Record]
    end: int


class _ReadFile(NamedTuple):
    """The records of a file that was read in this `state`.

    `state` holds the first number of the file and of the next one, the size (bytes) and the last change (ns).
    """

    state: tuple[int, int | None, int, int]
    records: list[_Record]


class FileLog(SlotLog):
    """One log. The first `create` takes the lock, and raises LogHeld while another process holds it."""

    def __init__(self, folder: Path, log_id: str) -> None:
        super().__init__(log_id)
        self._folder = folder
        self._using = threading.Lock()
        self._broken: str | None = None
        self._lock_file: int | None = None
        # While this object holds the lock: the last number, and the file that records are appended to, None for a new
        # one
        self._last = 0
        self._file: int | None = None
        self._file_bytes = 0
        # The file that was read last, if all its records are whole: a reader of a log asks for a few slots at a time.
        self._read_last: _ReadFile | None = None

    def create(self, number: int, slot: bytes) -> None:
        ends = log_slot_format.identity_of(slot).kind.ends
        with self._using, self._usable():
            self._hold(may_make=number == 1)
            if number <= self._last:
                raise object_store.AlreadyExists(self._key(number), f"the log goes up to slot {self._last}")
            if number > self._last + 1:
                raise ValueError(f"slot {number} of log {self.log_id} after slot {self._last} would leave a gap")
            record = _framed(number, slot)
            file = self._file
            if file is None or ends or self._file_bytes + len(record) > FILE_BYTES_MAX:
                file = self._begin_file(number)
            self._append(file, number, record)

    def head(self, number: int) -> SlotIdentity | None:
        with self._using:
            if self._lock_file is not None and number > self._last:
                return None
        for read in self.read(number - 1, number):
            if read.body is None:
                raise object_store.Damaged(self._key(number), read.damage)
            try:
                return log_slot_format.identity_of(read.body)
            except ValueError as error:
                raise object_store.Damaged(self._key(number), str(error)) from error
        return None

    def read(self, after: int, through: int) -> list[ReadSlot]:
        with self._using, self._usable():
            firsts = self.firsts()
            found: list[ReadSlot] = []
            for place, first in enumerate(firsts):
                following = firsts[place + 1] if place + 1 < len(firsts) else None
                if first > through or (following is not None and following <= after + 1):
                    continue
                records = self._records_of(first, following)
                found += [ReadSlot(*record) for record in records if after < record.number <= through]
            return found

    def highest(self) -> int | None:
        with self._using, self._usable():
            if self._lock_file is not None and self._last:
                return self._last
            return self._stored_highest()

    def numbers(self) -> list[int]:
        with self._using, self._usable():
            highest = self._stored_highest() or 0
            firsts = [first for first in self.firsts() if first <= highest]
            # A file may have any number as its name.
            spans = (
                range(first, min(after, self._far(first)))
                for first, after in itertools.pairwise((*firsts, highest + 1))
            )
            return [*itertools.chain.from_iterable(spans)]

    def replace(self, number: int, slot: bytes) -> None:
        with self._using, self._usable():
            self._hold(may_make=False)
            firsts = self.firsts()
            first = max(each for each in firsts if each <= number)
            following = min((each for each in firsts if each > number), default=None)
            parts = []
            for record in self._records_of(first, following):
                body = slot if record.number == number else record.slot
                if body is None:
                    raise object_store.Damaged(self._key(record.number), record.damage)
                parts.append(_framed(record.number, body))
            self._replace_file(first, b"".join(parts))

    def delete_through(self, number: int) -> None:
        with self._using, self._usable():
            highest = (self._last if self._lock_file is not None else self._stored_highest()) or 0
            if number >= highest:
                raise ValueError(f"slot {highest} of log {self.log_id} is its highest, which must stay")
            firsts = self.firsts()
            for first, following in itertools.pairwise(firsts):
                if following <= number + 1:
                    self._path(first).unlink(missing_ok=True)

    def close(self) -> None:
        with self._using:
            for file in (self._file, self._lock_file):
                if file is not None:
                    os.close(file)
            self._file = self._lock_file = self._read_last = None
            self._broken = self._broken or "it is closed"

    # ---- the holder of the lock

    def _hold(self, *, may_make: bool) -> None:
        """Take the lock if it is not held here, and prepare the end of the log for appending."""
        if self._lock_file is not None:
            return
        if may_make:
            for folder in (self._folder.parent, self._folder):
                with suppress(FileExistsError):
                    os.mkdir(folder, _FOLDER_MODE)
                self._synchronise_folder(folder.parent)
        path = self._folder / LOCK_FILE
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _MODE)
        except FileNotFoundError as error:
            raise object_store.StoreUnavailable(names.log_prefix(self.log_id), "there is no such log") from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(file, 200, 0).decode(errors="replace").strip()
                raise LogHeld(self.log_id, holder or "another process") from None
            os.ftruncate(file, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            os.pwrite(file, f"process {os.getpid()} since {since}\n".encode(), 0)
            self._cut_torn()
        except BaseException:
            os.close(file)
            raise
        self._lock_file, self._read_last = file, None

    def _cut_torn(self) -> None:
        """Cut off the torn end: with the lock held, no other process will complete it."""
        firsts = self.firsts()
        self._last = firsts[-1] - 1 if firsts else 0
        if not firsts:
            return
        file = os.open(self._path(firsts[-1]), os.O_RDWR)
        try:
            data = _read_file(file)
            records, end = _parse(data, firsts[-1], None)
            if end < len(data):
                os.ftruncate(file, end)
            self._synchronise(file)
        finally:
            os.close(file)
        if records:
            self._last = records[-1].number
        self._synchronise_folder(self._folder)

    def _begin_file(self, number: int) -> int:
        """Begin a file. An empty one may exist, if its maker died before it wrote a record."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        try:
            self._synchronise_folder(self._folder)
        except BaseException:
            os.close(file)
            raise
        self._file, self._file_bytes = file, 0
        return file

    def _replace_file(self, first: int, content: bytes) -> None:
        """Replace a file as a whole, so that a crash leaves the former one or this one."""
        temporary = self._folder / _TEMPORARY_FILE
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, _MODE)) as file:
            file.write(content)
            file.flush()
            self._synchronise(file.fileno())
        os.rename(temporary, self._path(first))
        self._synchronise_folder(self._folder)
        if self._file is not None:
            # It may be the one that was replaced: the next record begins another one.
            os.close(self._file)
            self._file = None

    def _append(self, file: int, number: int, record: bytes) -> None:
        try:
            written = os.write(file, record)
            while written < len(record):
                # A file system with little room writes a part; the next call fails with the reason, or goes on.
                written += os.write(file, record[written:])
        except OSError:
            # Cut off the part that was written, so that it never lands; if that fails, nothing is written behind it.
            try:
                os.ftruncate(file, self._file_bytes)
                os.lseek(file, self._file_bytes, os.SEEK_SET)
            except OSError as error:
                self._broken = f"cannot cut off the partial slot {number} ({error}): restart the daemon"
                raise object_store.OutcomeUnknown(self._key(number), self._broken) from error
            raise
        try:
            os.fdatasync(file)
        except OSError as error:
            self._broken = f"cannot synchronise slot {number} ({error}): restart the daemon to read the disk's state"
            raise object_store.OutcomeUnknown(self._key(number), self._broken) from error
        self._file_bytes += len(record)
        self._last = number

    # ---- what is stored

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:0{_NUMBER_DIGITS}d}"

    def _key(self, number: int) -> str:
        return names.log_slot_key(self.log_id, number)

    def firsts(self) -> list[int]:
        """Return the first numbers of the files, ascending, without foreign ones."""
        try:
            with os.scandir(self._folder) as listed:
                found = (names.number_in("", each.name) for each in listed if each.is_file(follow_symlinks=False))
                named = sorted(number for number in found if number is not None)
        except FileNotFoundError:
            return []
        foreign = {
            each
            for first, following in itertools.pairwise(named)
            if following - first > MISSING_TOLD_MAX and following > self._far(first)
            for each in (first, following)
            if not self._has_whole(each)
        }
        return [first for first in named if first not in foreign]

    def _far(self, first: int) -> int:
        """Return the number after all that the file of this first number may hold, and that may be missing there."""
        try:
            size_bytes = self._path(first).stat().st_size
        except FileNotFoundError:
            size_bytes = FILE_BYTES_MAX
        return first + size_bytes // _RECORD_BYTES_MIN + MISSING_TOLD_MAX + 1

    def _has_whole(self, first: int) -> bool:
        try:
            data = self._path(first).read_bytes()
        except FileNotFoundError:
            return False
        return _whole_at(data, 0, first) is not None or _next_whole(data, 0, first) is not None

    def _stored_highest(self) -> int | None:
        firsts = self.firsts()
        for place in range(len(firsts) - 1, -1, -1):
            following = firsts[place + 1] if place + 1 < len(firsts) else None
            records = self._records_of(firsts[place], following)
            if records:
                return records[-1].number
        return None

    def _records_of(self, first: int, following: int | None) -> list[_Record]:
        """Read the records of a file, including those missing before the next file.

        Every record returned survives a power failure.
        """
        try:
            file = os.open(self._path(first), os.O_RDONLY)
        except FileNotFoundError:
            return []  # deleted since it was listed
        try:
            status = os.fstat(file)
            state = first, following, status.st_size, status.st_mtime_ns
            if self._read_last is not None and self._read_last.state == state:
                return self._read_last.records
            records, _ = _parse(_read_file(file), first, following)
            if following is None and records:
                # Its writer may have died, or may die, before it synchronises.
                self._synchronise(file)
                self._synchronise_folder(self._folder)
            whole = self._lock_file is None and not any(each.damage for each in records)
            self._read_last = _ReadFile(state, records) if whole else None
            return records
        finally:
            os.close(file)

    def _synchronise(self, file: int) -> None:
        try:
            os.fdatasync(file)
        except OSError as error:
            self._broken = f"cannot synchronise ({error}): restart the daemon to read the disk's state"
            raise

    def _synchronise_folder(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        except OSError as error:
            self._broken = f"cannot synchronise {folder} ({error}): restart the daemon to read the disk's state"
            raise
        finally:
            os.close(file)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        if self._broken is not None:
            raise object_store.StoreUnavailable(names.log_prefix(self.log_id), self._broken)
        with _translated(names.log_prefix(self.log_id)):
            yield


# ---- the bytes of a file


def _framed(number: int, slot: bytes) -> bytes:
    """Return the record of a slot."""
    framed = _FRAMED.pack(len(slot), number)
    return framed + framing.crc32c(framed, slot).to_bytes(4, "little") + slot + _END


def _parse(data: bytes, first: int, following: int | None) -> _Parsed:
    """Parse the records of a file whose first number is `first`.

    `following` is the first number of the next file, if any.
    """
    records: list[_Record] = []
    place, number = 0, first
    while place < len(data):
        whole = _whole_at(data, place, number) or _next_whole(data, place, number)
        if whole is None or (whole.place > place and whole.number > number):
            broken = _broken(data, place, number, whole)
            if broken is None:
                break
            records.append(broken)
            place, number = len(data) if whole is None else whole.place, number + 1
            continue
        records += (
            _Record(each, None, f"its record is broken; slot {whole.number} is whole")
            for each in range(number, whole.number)
        )
        records.append(_Record(whole.number, whole.slot))
        place, number = whole.end, whole.number + 1
    if following is not None:
        records += (
            _Record(each, None, f"its record is missing; slot {following} is there")
            for each in range(number, min(following, number + MISSING_TOLD_MAX))
        )
    return _Parsed(records, place)


class _Whole(NamedTuple):
    """A whole record, from `place` to `end` in its file."""

    place: int
    number: int
    slot: bytes
    end: int


def _whole_at(data: bytes, place: int, number: int) -> _Whole | None:
    """Return the record of that number or a later one that begins at `place`, or None if there is no whole one."""
    begin = place + _FRAME.size
    if place < 0 or begin > len(data):
        return None
    length, found, crc32c = _FRAME.unpack_from(data, place)
    end = begin + length
    slot = data[begin:end]
    if found < number or data[end : end + len(_END)] != _END:
        return None
    if framing.crc32c(data[place : place + _FRAMED.size], slot) != crc32c:
        return None
    return _Whole(place, found, slot, end + len(_END))


def _next_whole(data: bytes, place: int, number: int) -> _Whole | None:
    """Return the first whole record behind `place` of that number or a later one, found by the magic of its slot."""
    at = data.find(log_slot_format.MAGIC, place + 1 + _FRAME.size)
    while at >= 0:
        whole = _whole_at(data, at - _FRAME.size, number)
        if whole is not None:
            return whole
        at = data.find(log_slot_format.MAGIC, at + 1)
    return None


def _broken(data: bytes, place: int, number: int, later: _Whole | None) -> _Record | None:
    """Return the broken record of that number at `place`, or None if it is torn. `later` is the next whole one."""
    begin = place + _FRAME.size
    slot = data[begin : (len(data) if later is None else later.place) - len(_END)]
    if _is_whole(slot, number):
        return _Record(number, slot, f"the frame of its record is broken, at byte {place} of its file")
    damage = f"the CRC32C of its record differs, at byte {place} of its file"
    if later is not None:
        return _Record(number, slot, damage)
    if begin > len(data):
        return None
    length, found, _ = _FRAME.unpack_from(data, place)
    mark = begin + length
    # At the end of a record whose last blocks were never written there are zeros, or nothing.
    if found == number and length and mark < len(data) and data[mark]:
        return _Record(number, data[begin:mark], damage)
    return None


def _is_whole(slot: bytes, number: int) -> bool:
    """Return whether these bytes are a slot of that number with whole sections.

    Such a slot was certain, whatever its frame says.
    """
    try:
        read = log_slot_format.decode_log_slot(slot)
        for shard in read.shards:
            read.section(shard)
    except format_errors.FormatError:
        return False
    return read.header.number == number


def _read_file(file: int) -> bytes:
    parts = []
    while part := os.read(file, FILE_BYTES_MAX):
        parts.append(part)
    return b"".join(parts)


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise errors of the file system as errors of the store."""
    try:
        yield
    except PermissionError as error:
        raise object_store.StoreRefused(key, f"{error.strerror}: {error.filename}") from error
    except OSError as error:
        raise object_store.StoreUnavailable(key, str(error)) from error
