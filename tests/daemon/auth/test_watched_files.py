"""Files that change are read again once they rest; what is wrong changes nothing and is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.auth import WatchedFiles


def watched(path: Path) -> WatchedFiles[int]:
    return WatchedFiles([str(path)], lambda: int(path.read_text()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_a_change_is_read_when_two_looks_have_seen_it(path: Path) -> None:
    files = watched(path)
    assert files.look() is None
    path.write_text("22")
    assert (files.look(), files.value) == (None, 1)
    assert (files.look(), files.value) == (True, 22)
    assert files.look() is None


def test_a_file_that_is_another_one_with_the_same_content_is_no_change(path: Path) -> None:
    files = watched(path)
    other = path.with_name("other")
    other.write_text("1")
    other.replace(path)
    assert (files.look(), files.look(), files.value) == (None, False, 1)


def test_what_is_wrong_changes_nothing_and_is_told_once(path: Path) -> None:
    files = watched(path)
    path.write_text("no number")
    assert files.look() is None
    with pytest.raises(ValueError, match="invalid literal"):
        files.look()
    assert (files.look(), files.value) == (None, 1)
    path.write_text("333")
    assert (files.look(), files.look(), files.value) == (None, True, 333)


def test_a_file_that_is_gone_is_wrong_and_comes_back(path: Path) -> None:
    files = watched(path)
    path.unlink()
    assert files.look() is None
    with pytest.raises(FileNotFoundError):
        files.look()
    path.write_text("4")
    assert (files.look(), files.look(), files.value) == (None, True, 4)
