"""Which form the logs of a root have, and where logs in files are refused."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_backends import store_opening
from storage_backends.file_log import FileLogs
from storage_backends.formats.manifest import LogForm
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import StoreRefused
from storage_backends.store_opening import Wanted
from tests._support.fault_store import FaultStore
from tests._support.virtual_loop import InlineExecutor
from tests.storage_backends._support import log_slots


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalDirectory]:
    store = LocalDirectory(tmp_path / "root")
    yield store
    store.close()


@pytest.fixture
def executor() -> concurrent.futures.Executor:
    return InlineExecutor()


def on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The file system of every path is of this type."""
    monkeypatch.setattr(store_opening, "type_of", lambda path: name)


@pytest.mark.parametrize(
    ("wanted", "file_system", "form"),
    [
        ("auto", "ext4", LogForm.FILES),
        ("files", "ext4", LogForm.FILES),
        ("objects", "ext4", LogForm.OBJECTS),
        ("auto", "nfs4", LogForm.OBJECTS),
        ("objects", "nfs4", LogForm.OBJECTS),
        ("auto", store_opening.UNKNOWN, LogForm.OBJECTS),
    ],
)
def test_a_new_root_in_a_local_directory_has_logs_of_this_form(
    local: LocalDirectory, monkeypatch: pytest.MonkeyPatch, wanted: Wanted, file_system: str, form: LogForm
) -> None:
    on(monkeypatch, file_system)
    assert store_opening.form_of_new_root(local, wanted) is form


def test_objects_on_a_file_system_that_machines_may_share_are_a_warning(
    local: LocalDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, "nfs4")
    store_opening.form_of_new_root(local, "auto")
    assert "is on a file system of type nfs4, which machines may share" in caplog.text
    assert "only daemons of one machine may use it" in caplog.text


@pytest.mark.parametrize("wanted", ["auto", "objects"])
def test_any_other_store_has_objects(wanted: Wanted) -> None:
    assert store_opening.form_of_new_root(MemoryStore(), wanted) is LogForm.OBJECTS


def test_files_are_refused_where_there_is_no_directory() -> None:
    with pytest.raises(StoreRefused, match=r"store.log_form: it is 'files', but the store is not a local directory"):
        store_opening.form_of_new_root(MemoryStore(), "files")


def test_files_are_refused_on_a_file_system_that_machines_may_share(
    local: LocalDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "nfs")
    with pytest.raises(StoreRefused, match=r"store.log_form: .*of type nfs, which machines may share; use 'objects'"):
        store_opening.form_of_new_root(local, "files")


# ---- opening


def test_logs_are_opened_in_the_form_that_the_root_has(
    local: LocalDirectory, executor: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "ext4")
    files = store_opening.open_logs(LogForm.FILES, local, executor)
    objects = store_opening.open_logs(LogForm.OBJECTS, local, executor)
    assert (type(files), type(objects)) == (FileLogs, ObjectLogs)
    for logs in (files, objects):
        slots = logs.log(log_slots.LOG_ID)
        slots.create(1, log_slots.opening())
        assert logs.log_ids() == {log_slots.LOG_ID}
        slots.close()


def test_files_are_refused_by_name_where_the_root_was_carried_to(
    local: LocalDirectory, executor: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "nfs")
    with pytest.raises(StoreRefused, match=r"FORMAT: the logs of this root are files, but .* locks do not hold there"):
        store_opening.open_logs(LogForm.FILES, local, executor)
    with pytest.raises(StoreRefused, match=r"FORMAT: .*files of a local directory, but the store is not one"):
        store_opening.open_logs(LogForm.FILES, FaultStore(MemoryStore()), executor)
