"""Opens the object store that settings name, and the logs of a root in the form that its FORMAT says.

Logs in files need a file system that belongs to one machine alone; the types known to do so are listed here, and files
on any other are refused. `storage_settings` declares the settings, `root_format` reads FORMAT.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from pathlib import Path
from typing import Final, Literal, Protocol

from storage_backends import local_directory, object_store
from storage_backends.file_log import FileLogs
from storage_backends.formats.manifest import LogForm
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import ObjectStore, StoreRefused
from storage_backends.slot_log import SlotLogs
from storage_backends.storage_settings import S3

log = logging.getLogger(__name__)


class Place(Protocol):
    """The settings that say where a store is: `path` for kind `local`, `s3` for kind `s3`."""

    @property
    def kind(self) -> Literal["local", "s3"]: ...

    @property
    def path(self) -> str: ...

    @property
    def s3(self) -> S3: ...


def open_store(place: Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
    """Open the store of this place.

    Raises `StoreError`. With `deletions_survive`, deletions survive a power failure, which costs a local directory a
    synchronisation each.
    """
    if place.kind == "local":
        return local_directory.LocalDirectory(place.path, deletions_survive=deletions_survive)
    # Import the AWS SDK only if it is needed: it takes a third of the time in which a daemon starts.
    from storage_backends import s3

    given = place.s3
    return s3.S3Store(
        s3.S3Settings(
            bucket=given.bucket,
            prefix=given.prefix,
            endpoint_url=given.endpoint_url,
            region=given.region,
            addressing_style=given.addressing,
            checksums=given.checksums,
            connect_timeout_s=given.connect_timeout_s,
            read_timeout_s=given.read_timeout_s,
            attempts=given.attempts,
            connections_max=given.connections_max,
        )
    )


_OF_ONE_MACHINE: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs"}
)
UNKNOWN: Final = "unknown"
_MOUNTS: Final = Path("/proc/self/mountinfo")


def not_of_one_machine(path: Path) -> str | None:
    """Return the type of the path's file system if other machines may share it or its type is unknown.

    Returns None if it belongs to one machine alone. The path need not exist yet.
    """
    found = type_of(path)
    return None if found in _OF_ONE_MACHINE else found


def type_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of the path's file system as the system names it, such as ext4, or `UNKNOWN`.

    `mounts` is the system's table of mounts.
    """
    there = path.absolute()
    while not there.exists():
        there = there.parent
    device = there.stat().st_dev
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return UNKNOWN
    # A mount hides what was mounted there before it.
    for line in reversed(lines):
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == f"{os.major(device)}:{os.minor(device)}" and after:
            return after.split()[0]
    return _type_by_path(there.resolve(), lines)


def _type_by_path(there: Path, lines: list[str]) -> str:
    """Find the type by the longest mount point above the path.

    Some file systems give files other devices than their mounts.
    """
    found, longest = UNKNOWN, -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ")
        if there.is_relative_to(point) and len(point) >= longest:
            found, longest = after.split()[0], len(point)
    return found


Wanted = Literal["auto", "objects", "files"]


def form_of_new_root(store: ObjectStore, wanted: Wanted) -> LogForm:
    """Choose the form of the logs of a root that is made in this store. Raises StoreRefused if it cannot be files."""
    if wanted == "objects" or (wanted == "auto" and store.folder is None):
        return LogForm.OBJECTS
    if store.folder is None:
        raise StoreRefused("store.log_form", "it is 'files', but the store is not a local directory; use 'objects'")
    shared = _shared(store.folder)
    if shared is None:
        return LogForm.FILES
    if wanted == "files":
        raise StoreRefused("store.log_form", f"it is 'files', but {shared}; use 'objects'")
    log.warning("%s: the logs of this root are objects; only daemons of one machine may use it", shared)
    return LogForm.OBJECTS


def open_logs(form: LogForm, store: ObjectStore, executor: concurrent.futures.Executor) -> SlotLogs:
    """Open the logs of the root in this store, whose FORMAT says `form`.

    `executor` is that of `ObjectLogs`. Raises StoreRefused for files that are elsewhere, or on a file system that other
    machines may share.
    """
    if form is LogForm.OBJECTS:
        return ObjectLogs(store, executor)
    if store.folder is None:
        raise StoreRefused("FORMAT", "the logs of this root are files of a local directory, but the store is not one")
    shared = _shared(store.folder)
    if shared is not None:
        raise StoreRefused("FORMAT", f"the logs of this root are files, but {shared}; locks do not hold there")
    return FileLogs(store.folder)


def _shared(folder: str) -> str | None:
    other = not_of_one_machine(Path(folder))
    return None if other is None else f"{folder} is on a file system of type {other}, which machines may share"
