"""The type of the file system of a path, by the table of mounts of the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage_backends import store_opening


def device_of(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def mounts(tmp_path: Path, *lines: str) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text("".join(f"{line}\n" for line in lines))
    return table


def test_the_type_is_that_of_the_device_of_the_path(tmp_path: Path) -> None:
    table = mounts(
        tmp_path,
        "21 1 0:999999 / /elsewhere rw shared:1 - nfs4 server:/export rw",
        f"22 1 {device_of(tmp_path)} / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    )
    assert store_opening.type_of(tmp_path, table) == "ext4"


def test_of_two_mounts_of_a_device_the_later_one_hides_the_other(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    table = mounts(tmp_path, f"21 1 {device} / /a rw - nfs4 x rw", f"22 1 {device} / /a rw master:1 - xfs y rw")
    assert store_opening.type_of(tmp_path, table) == "xfs"


def test_where_files_have_another_device_than_their_mount_the_longest_mount_point_counts(tmp_path: Path) -> None:
    inner = tmp_path / "with space"
    inner.mkdir()
    point = str(inner.resolve()).replace(" ", "\\040")
    table = mounts(
        tmp_path,
        "21 1 0:999997 / / rw - ext4 x rw",
        f"22 1 0:999998 / {point} rw - btrfs y rw",
        f"23 1 0:999999 / {tmp_path.resolve()} rw - nfs z rw",
        "a line that nobody understands",
    )
    assert store_opening.type_of(inner, table) == "btrfs"
    assert store_opening.type_of(tmp_path, table) == "nfs"


def test_a_path_that_does_not_exist_yet_is_on_the_file_system_of_what_exists_above_it(tmp_path: Path) -> None:
    table = mounts(tmp_path, f"22 1 {device_of(tmp_path)} / / rw - zfs x rw")
    assert store_opening.type_of(tmp_path / "not" / "there", table) == "zfs"


@pytest.mark.parametrize("lines", [(), ("21 1 0:999999 / /elsewhere rw - ext4 x rw",), ("22 1",)])
def test_what_no_table_names_is_unknown(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert store_opening.type_of(tmp_path, mounts(tmp_path, *lines)) == store_opening.UNKNOWN


def test_a_system_without_a_table_says_nothing(tmp_path: Path) -> None:
    assert store_opening.type_of(tmp_path, tmp_path / "missing") == store_opening.UNKNOWN


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs"])
def test_these_are_of_one_machine(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_opening, "type_of", lambda path: name)
    assert store_opening.not_of_one_machine(tmp_path) is None


@pytest.mark.parametrize("name", ["nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "9p", store_opening.UNKNOWN])
def test_these_may_be_shared(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_opening, "type_of", lambda path: name)
    assert store_opening.not_of_one_machine(tmp_path) == name


def test_this_machine_says_something_of_the_root() -> None:
    assert store_opening.type_of(Path("/")) != ""
