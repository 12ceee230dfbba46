"""Of which type the file system of a path is, and whether one machine alone can have it.

Owns: the types that are known to be of one machine, and asking the system.
Does not own: what depends on it (`log_opening`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
