"""The object stores that settings name.

Owns: the translation of settings into those of a store.
Does not own: the settings (`storage_settings`), the stores, and when one is opened and closed.

Of which type the file system of a path is, and whether one machine alone can have it.

Owns: the types that are known to be of one machine, and asking the system.
Does not own: what depends on it (`log_opening`).

The logs of a root, in the form that its FORMAT says.

Owns: which implementation a form has, which form a new root gets, and refusing files on a file system that is not of
one machine alone.
Does not own: the forms (`object_log`, `file_log`), and FORMAT (`root_format`).
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


class Place(Protocol):
    """Settings that say where a store is: `path` of kind `local`, `s3` of kind `s3`."""

    @property
    def kind(self) -> Literal["local", "s3"]: ...

    @property
    def path(self) -> str: ...

    @property
    def s3(self) -> S3: ...


def open_store(place: Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
    """The store of this place.

    `deletions_survive`: a power failure, too, which costs a local directory a synchronisation each.

    Raises `StoreError`.
    """
    if place.kind == "local":
        return local_directory.LocalDirectory(place.path, deletions_survive=deletions_survive)
    # The AWS SDK takes a third of the time in which a daemon starts: only where it is needed.
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
    """The type of the file system of `path`, which need not exist yet, where other machines may have it, too, or where
    nobody knows; None where one machine alone has it.
    """
    found = type_of(path)
    return None if found in _OF_ONE_MACHINE else found


def type_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """The type as the system names it, such as ext4; `UNKNOWN` where it does not say. `mounts`: its table of mounts."""
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
    """By the longest mount point above it: some file systems give other devices to files than to their mounts."""
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


log = logging.getLogger(__name__)

Wanted = Literal["auto", "objects", "files"]


def form_of_new_root(store: ObjectStore, wanted: Wanted) -> LogForm:
    """The form of the logs of a root that is made in this store. Raises StoreRefused for files where none can be."""
    if wanted == "objects" or (wanted == "auto" and store.folder is None):
        return LogForm.OBJECTS
    if store.folder is None:
        raise StoreRefused("store.log_form", "it is 'files', and the store is no local directory: use 'objects'")
    shared = _shared(store.folder)
    if shared is None:
        return LogForm.FILES
    if wanted == "files":
        raise StoreRefused("store.log_form", f"it is 'files', and {shared}: use 'objects'")
    log.warning("%s: the logs of this root are objects; let daemons of one machine alone use it", shared)
    return LogForm.OBJECTS


def open_logs(form: LogForm, store: ObjectStore, executor: concurrent.futures.Executor) -> SlotLogs:
    """The logs of the root in this store, whose FORMAT says `form`. `executor`: see `ObjectLogs`.

    Raises StoreRefused for files that are elsewhere, or on a file system that other machines may share.
    """
    if form is LogForm.OBJECTS:
        return ObjectLogs(store, executor)
    if store.folder is None:
        raise StoreRefused("FORMAT", "the logs of this root are files of a local directory, and the store is none")
    shared = _shared(store.folder)
    if shared is not None:
        raise StoreRefused("FORMAT", f"the logs of this root are files, and {shared}, where no lock holds")
    return FileLogs(store.folder)


def _shared(folder: str) -> str | None:
    other = not_of_one_machine(Path(folder))
    return None if other is None else f"{folder} is on a file system of type {other}, which machines may share"
