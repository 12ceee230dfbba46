"""Stores objects in a local directory: the default of a daemon that runs alone.

An object `a/b/c` is the file `a/b/c`, with one exception. Keys `logs/<log id>/<20 digits>...` are numbered without end
and are kept in folders of 1,000 numbers, `00000000000000012000+/00000000000000012345`; no key contains a `+`, and
`list` undoes it. Names that begin with a dot are no objects: `.temporary/` holds files before they have their name,
`.locks/` the lock files, by which one process sees that another is dead.

A file is an envelope (`Envelope`) and the body. An object that is found is synchronised before the caller gets an
answer, file and folder: its writer may have died before it did so, and work that builds on the object would outlive it.
A ranged read is exempt, because it reads an object that a synchronised object names.

A file system that fails to synchronise forgets that it failed, and the next try succeeds without having done anything.
After one such failure the store refuses every operation; a new process finds out what the disk really has.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import ClassVar, Final, Self

import google_crc32c

from storage_backends.object_store import (
    METADATA_BYTES_MAX,
    NO_METADATA,
    AlreadyExists,
    Damaged,
    ListedObject,
    NotFound,
    ObjectInfo,
    ObjectStore,
    OutcomeUnknown,
    StoreRefused,
    StoreUnavailable,
    check_key,
    check_metadata,
    check_prefix,
    check_range,
)

ENVELOPE_BYTES_MAX: Final = 64 + 3 * METADATA_BYTES_MAX
"""Longest envelope (bytes): its fixed fields, and metadata with two separators for every two bytes or more."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The envelope in front of a body in its file.

    `size_bytes` is the size of the envelope itself. Form (little-endian): magic `TARRYOBJ`, u16 version, u16 length of
    the metadata, u32 CRC32C of the body, u64 length of the body, u32 CRC32C of all of the envelope but this field; then
    the metadata, a line `key=value` each.
    """

    metadata: Mapping[str, str]
    body_bytes: int
    body_crc32c: int
    size_bytes: int

    MAGIC: ClassVar = b"TARRYOBJ"
    VERSION: ClassVar = 1
    FIXED: ClassVar = struct.Struct("<8sHHIQ")
    CHECKSUM: ClassVar = struct.Struct("<I")

    @classmethod
    def encode(cls, body: bytes, metadata: Mapping[str, str]) -> bytes:
        """Encode the envelope of this body."""
        lines = "".join(f"{name}={value}\n" for name, value in metadata.items()).encode("ascii")
        fixed = cls.FIXED.pack(cls.MAGIC, cls.VERSION, len(lines), google_crc32c.value(body), len(body))
        return fixed + cls.CHECKSUM.pack(google_crc32c.value(fixed + lines)) + lines

    @classmethod
    def decode(cls, front: bytes, file_bytes: int, key: str, path: Path) -> Envelope:
        """Decode the envelope of a file of `file_bytes`.

        Raises `Damaged`, also if the file should have another length, and `StoreRefused` for another version.
        """
        head_bytes = cls.FIXED.size + cls.CHECKSUM.size
        if len(front) < head_bytes or not front.startswith(cls.MAGIC):
            raise Damaged(key, f"{path} is damaged at byte 0: it does not begin with an envelope")
        _, version, metadata_bytes, body_crc32c, body_bytes = cls.FIXED.unpack_from(front)
        (checksum,) = cls.CHECKSUM.unpack_from(front, cls.FIXED.size)
        size_bytes = head_bytes + metadata_bytes
        lines = front[head_bytes:size_bytes]
        if google_crc32c.value(front[: cls.FIXED.size] + lines) != checksum:
            raise Damaged(key, f"{path} is damaged at byte 0: the CRC32C of the envelope differs")
        if version != cls.VERSION:
            raise StoreRefused(key, f"{path} has envelope version {version}; this release reads version {cls.VERSION}")
        written_bytes = size_bytes + body_bytes
        if file_bytes != written_bytes:
            where = min(file_bytes, written_bytes)
            raise Damaged(key, f"{path} is damaged at byte {where}: it has {file_bytes} bytes of {written_bytes}")
        metadata = dict(line.split("=", 1) for line in lines.decode("ascii").splitlines())
        return cls(MappingProxyType(metadata), body_bytes, body_crc32c, size_bytes)


TEMPORARY_FOLDER: Final = ".temporary"
LOCKS_FOLDER: Final = ".locks"
OWNER_SUFFIX: Final = ".owner"
# Only the user of the processes that share the root may read and write what is stored.
FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

_KNOWN_FOLDERS_MAX: Final = 10_000
# Folders of logs that are held open: few are in use.
_HELD_FOLDERS_MAX: Final = 128
"""Folders remembered as synchronised; beyond that they are forgotten and synchronised once more."""

_PLACE_TRIES_MAX: Final = 10
"""Most times that an empty folder of a log may vanish between being made and receiving a file."""

_NUMBERED: Final = re.compile(r"((?:.*/)?logs/[0-9A-Z]{26}/)(\d{17})(\d{3}[^/]*)")
_NUMBERED_FOLDER: Final = re.compile(r"(\d{17})000\+")

# Answers of the file system that no repetition changes
_REFUSALS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMLINK, errno.EXDEV}
)
# Answers after which a file certainly did not get its name
_NOT_LINKED: Final = _REFUSALS | {errno.ENOENT, errno.ENOSPC, errno.EDQUOT}


class LocalDirectory(ObjectStore):
    """The objects as files beneath `root`, which is made if it does not exist.

    Several processes may use one root. With `deletions_survive`, an object that `delete` removed, or that `head` did
    not find, does not reappear after a power failure.
    """

    def __init__(self, root: str | os.PathLike[str], *, deletions_survive: bool = False) -> None:
        self.root: Final = Path(root).absolute()
        self._deletions_survive: Final = deletions_survive
        self._temporary_folder: Final = self.root / TEMPORARY_FOLDER
        self._known_folders: set[Path] = set()
        # Known folders that another process may remove and make again; held open, so that no other folder has their
        # identity
        self._held_folders: dict[Path, int] = {}
        self._holding = threading.Lock()
        self._broken: str | None = None
        self._numbers = itertools.count()
        with _translated(str(self.root)):
            _make_root(self.root)
            self._make_folder(self._temporary_folder)
            self._token, self._owner_file = _take_token(self._temporary_folder)
            _remove_leftovers(self._temporary_folder)

    def path_of(self, key: str) -> Path:
        """Return the path of the file that holds the object of this key."""
        check_key(key)
        numbered = _NUMBERED.fullmatch(key)
        if numbered is None:
            return self.root / key
        before, thousands, rest = numbered.groups()
        return self.root / f"{before}{thousands}000+" / f"{thousands}{rest}"

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        path = self.path_of(key)
        check_metadata(metadata)
        with self._usable(key), self._temporary(body, metadata) as temporary:
            self._place(path, lambda: os.rename(temporary, path))
            self._synchronise_folder(path.parent)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        path = self.path_of(key)
        check_metadata(metadata)
        with self._usable(key):
            with self._temporary(body, metadata) as temporary:
                existed = not self._link(temporary, path, key)
            try:
                if existed:
                    self._synchronise_file(path)
                self._synchronise_folder(path.parent)
            except OSError as error:
                # The name exists, and may not survive.
                raise OutcomeUnknown(key, str(error)) from error
        if existed:
            raise AlreadyExists(key, "exists")

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        path = self.path_of(key)
        with self._opened(key, path) as file:
            self._conclude_existing(file, path)
            data = _read(file, 0, os.fstat(file).st_size)
        return _opened_envelope(data, key, path)

    def get_run(self, keys: Sequence[str]) -> list[bytes]:
        # Every writer synchronises a file before it names it (`_temporary`), so only the name may be missing after a
        # power failure. Each folder is synchronised once, after the last name in it was seen and before the caller gets
        # an answer; synchronising each file would take longer than all else.
        bodies, folders = [], set()
        for key in keys:
            path = self.path_of(key)
            try:
                with self._opened(key, path) as file:
                    data = _read(file, 0, os.fstat(file).st_size)
            except NotFound:
                break
            folders.add(path.parent)
            bodies.append(_opened_envelope(data, key, path)[0])
        for folder in folders:
            with self._usable(str(folder)), suppress(FileNotFoundError):  # all of it was deleted since
                self._synchronise_folder(folder)
        return bodies

    @property
    def folder(self) -> str:
        return str(self.root)

    @property
    def reads_are_requests(self) -> bool:
        return False

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(offset, length)
        path = self.path_of(key)
        with self._opened(key, path) as file:
            envelope = _read_envelope(file, key, path)
            # A read takes memory for all that is asked for, before it finds less.
            length_there = max(0, min(length, envelope.body_bytes - offset))
            part = _read(file, envelope.size_bytes + offset, length_there)
        if len(part) != length:
            raise Damaged(key, f"{path}: the body has {envelope.body_bytes} bytes, too few for {length} from {offset}")
        return part

    def head(self, key: str) -> ObjectInfo:
        path = self.path_of(key)
        try:
            with self._opened(key, path) as file:
                self._conclude_existing(file, path)
                envelope = _read_envelope(file, key, path)
        except NotFound:
            with self._usable(key):
                self._conclude_missing(path)
            raise
        return ObjectInfo(key, envelope.body_bytes, envelope.metadata)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        check_prefix(prefix)
        return self._list(prefix, start_after or "")

    def _list(self, prefix: str, start_after: str) -> Iterator[ListedObject]:
        base = prefix[: prefix.rfind("/") + 1]
        with self._usable(prefix):
            os.stat(self._temporary_folder)  # an empty listing would not prove that there are no objects
            yield from _walk(self.root / base, base, prefix, start_after)

    def delete(self, key: str) -> None:
        path = self.path_of(key)
        with self._usable(key):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return self._conclude_missing(path)
            self._conclude_missing(path)
            if _NUMBERED_FOLDER.fullmatch(path.parent.name):
                with suppress(OSError):  # not empty, nearly always
                    os.rmdir(path.parent)

    def close(self) -> None:
        self._forget_folders()
        if self._owner_file >= 0:
            (self._temporary_folder / f"{self._token}{OWNER_SUFFIX}").unlink(missing_ok=True)
            os.close(self._owner_file)
            self._owner_file = -1

    @contextmanager
    def _temporary(self, body: bytes, metadata: Mapping[str, str]) -> Iterator[Path]:
        """Write a synchronised file with envelope and body; its temporary name is gone when the block ends."""
        path = self._temporary_folder / f"{self._token}.{next(self._numbers)}"
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
            try:
                _write(file, Envelope.encode(body, metadata), body)
                os.fsync(file)  # a failure concerns this file alone, which is discarded
            finally:
                os.close(file)
            yield path
        finally:
            # It was renamed, or it cannot be removed. The operation succeeded all the same; the next start removes the
            # file.
            with suppress(OSError):
                os.unlink(path)

    def _link(self, temporary: Path, path: Path, key: str) -> bool:
        """Give the file its name if no other file has it; return whether it did."""
        try:
            self._place(path, lambda: os.link(temporary, path))
        except FileExistsError:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "keys beneath this one exist", str(path)) from None
            return False
        except OSError as error:
            if error.errno in _NOT_LINKED:
                raise
            raise OutcomeUnknown(key, f"cannot link {path}: {error}") from error
        return True

    def _place(self, path: Path, place: Callable[[], None]) -> None:
        """Give a file its name, in a folder that survives.

        Other processes may remove an empty folder of a log meanwhile.
        """
        for _ in range(_PLACE_TRIES_MAX):
            self._make_folder(path.parent)
            try:
                place()
            except FileNotFoundError:
                self._forget_folders()
                continue
            if not self._is_as_known(path.parent):
                # Its new maker may have died before it synchronised the folder.
                self._forget_folders()
                self._make_folder(path.parent)
            return
        raise FileNotFoundError(errno.ENOENT, f"the folder vanished {_PLACE_TRIES_MAX} times", str(path.parent))

    def _make_folder(self, folder: Path) -> None:
        """Make the folder and those above it up to the root; each survives afterwards, whichever process made it."""
        if folder == self.root or folder in self._known_folders:
            return
        self._make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder, FOLDER_MODE)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if _NUMBERED_FOLDER.fullmatch(folder.name) else None
        try:
            self._synchronise_folder(folder.parent)
        except BaseException:
            if held is not None:
                os.close(held)
            raise
        if len(self._known_folders) >= _KNOWN_FOLDERS_MAX or len(self._held_folders) >= _HELD_FOLDERS_MAX:
            self._forget_folders()
        if held is not None:
            with self._holding:
                former = self._held_folders.get(folder)
                self._held_folders[folder] = held
            if former is not None:
                os.close(former)
        self._known_folders.add(folder)

    def _is_as_known(self, folder: Path) -> bool:
        """Return whether the folder of this name is still the one that was synchronised in its parent."""
        if not _NUMBERED_FOLDER.fullmatch(folder.name):
            return True
        with self._holding:
            file = self._held_folders.get(folder)
            return file is not None and os.path.samestat(os.fstat(file), os.stat(folder))

    def _forget_folders(self) -> None:
        self._known_folders.clear()
        with self._holding:
            held = list(self._held_folders.values())
            self._held_folders.clear()
            for file in held:
                os.close(file)

    def _conclude_existing(self, file: int, path: Path) -> None:
        """Synchronise a file and its folder, which may exist only in the page cache of a writer that died."""
        self._synchronise(file, path)
        with suppress(FileNotFoundError):  # deleted since, and its empty folder with it
            self._synchronise_folder(path.parent)

    def _conclude_missing(self, path: Path) -> None:
        """Make the absence of a file survive, if deletions must: its remover may have died before it did so."""
        if self._deletions_survive:
            with suppress(FileNotFoundError, NotADirectoryError):  # there is no such folder either
                self._synchronise_folder(path.parent)

    def _synchronise_file(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # deleted since
            file = os.open(path, os.O_RDONLY)
            try:
                self._synchronise(file, path)
            finally:
                os.close(file)

    def _synchronise_folder(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._synchronise(file, folder)
        finally:
            os.close(file)

    def _synchronise(self, file: int, path: Path) -> None:
        try:
            os.fsync(file)
        except OSError as error:
            self._broken = f"cannot synchronise {path} ({error}): restart the daemon to read the disk's state"
            raise

    @contextmanager
    def _opened(self, key: str, path: Path) -> Iterator[int]:
        """Open a file for reading. Raises `NotFound`."""
        with self._usable(key):
            try:
                file = os.open(path, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFound(key, "no such object") from error
            try:
                yield file
            except IsADirectoryError as error:
                raise NotFound(key, "no such object; it is a folder") from error
            finally:
                os.close(file)

    @contextmanager
    def _usable(self, key: str) -> Iterator[None]:
        """Refuse if synchronising failed before; turn errors of the file system into errors of the store."""
        if self._broken is not None:
            raise StoreUnavailable(key, self._broken)
        with _translated(key):
            yield


class HeldLock:
    """A lock that this process holds until `release`, or until it dies."""

    def __init__(self, name: str, file: int) -> None:
        self.name: Final = name
        self._file = file

    def release(self) -> None:
        """Release the lock. May be repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LocalLocks:
    """The lock files of a local directory, one for each name.

    The kernel releases a lock when its process is dead, and not before: the holder of the lock of a daemon id knows
    that no other process of that id lives on this machine.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._folder: Final = Path(root).absolute() / LOCKS_FOLDER

    def known(self, name: str) -> bool:
        """Return whether any process ever took the lock here; if not, its holder lives on another machine."""
        return (self._folder / name).exists()

    def try_lock(self, name: str) -> HeldLock | None:
        """Return the lock, or None while another process, or another holder in this one, has it.

        `name` is one part of a key. Raises `StoreRefused`, `StoreUnavailable`.
        """
        check_key(name)
        if "/" in name:
            raise ValueError(f"lock name {name!r} must be one part of a key")
        with _translated(f"{LOCKS_FOLDER}/{name}"):
            self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            file = _try_lock_file(self._folder / name, os.O_CREAT)
        return None if file is None else HeldLock(name, file)


def _try_lock_file(path: Path, flags: int) -> int | None:
    """Return the open file, locked, or None if another open file of it is locked."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, FILE_MODE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file


def _take_token(folder: Path) -> tuple[str, int]:
    """Return a name for the temporaries of this store, and the locked file that shows that its process lives."""
    while True:
        token = f"{os.getpid()}-{secrets.token_hex(8)}"
        path = folder / f"{token}{OWNER_SUFFIX}"
        file = _try_lock_file(path, os.O_CREAT | os.O_EXCL)
        if file is None:
            continue
        # Another process that removes leftovers may have locked and removed the file before it was locked here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return token, file
        os.close(file)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporaries of stores whose process is dead, and then the file that showed it."""
    names = os.listdir(folder)
    for token in {name.split(".", 1)[0] for name in names}:
        owner = folder / f"{token}{OWNER_SUFFIX}"
        try:
            file = _try_lock_file(owner, 0)
        except FileNotFoundError:
            file = -1  # it was closed, or another process removes the same leftovers
        if file is None:
            continue
        for name in names:
            if name.split(".", 1)[0] == token and name != owner.name:
                (folder / name).unlink(missing_ok=True)
        owner.unlink(missing_ok=True)
        if file >= 0:
            os.close(file)


def _make_root(root: Path) -> None:
    """Make the root and the missing folders above it, each in a synchronised folder."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    for folder in missing or [root]:
        with suppress(PermissionError):  # a folder that may not be read was not written to either
            file = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _walk(folder: Path, base: str, prefix: str, start_after: str) -> Iterator[ListedObject]:
    """Yield the objects in `folder` and beneath; their keys begin with `base`."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                numbered = _NUMBERED_FOLDER.fullmatch(entry.name)
                begin = f"{base}{numbered[1]}" if numbered else f"{base}{entry.name}/"
                in_prefix = begin.startswith(prefix) or prefix.startswith(begin)
                if in_prefix and begin >= start_after[: len(begin)]:
                    yield from _walk(Path(entry.path), base if numbered else begin, prefix, start_after)
                continue
            key = base + entry.name
            if key.startswith(prefix) and key > start_after:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    found = entry.stat(follow_symlinks=False)
                    yield ListedObject(key, found.st_size, found.st_mtime_ns // 1_000_000)


def _opened_envelope(data: bytes, key: str, path: Path) -> tuple[bytes, Mapping[str, str]]:
    """Return body and metadata of a whole file. Raises `Damaged`."""
    envelope = Envelope.decode(data[:ENVELOPE_BYTES_MAX], len(data), key, path)
    body = data[envelope.size_bytes :]
    if google_crc32c.value(body) != envelope.body_crc32c:
        raise Damaged(key, f"{path} is damaged at byte {envelope.size_bytes} or above: the CRC32C of the body differs")
    return body, envelope.metadata


def _read_envelope(file: int, key: str, path: Path) -> Envelope:
    return Envelope.decode(os.pread(file, ENVELOPE_BYTES_MAX, 0), os.fstat(file).st_size, key, path)


def _read(file: int, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset`, fewer only at the end of the file."""
    parts = []
    while length > 0:
        part = os.pread(file, length, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(file: int, *parts: bytes) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file, rest) :]


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise errors of the file system as errors of the store."""
    try:
        yield
    except OSError as error:
        kind = StoreRefused if error.errno in _REFUSALS else StoreUnavailable
        raise kind(key, f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
