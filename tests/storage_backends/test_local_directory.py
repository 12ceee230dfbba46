"""What only a local directory does: files, synchronising, leftovers, damage, locks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_backends.local_directory import LOCKS_FOLDER, TEMPORARY_FOLDER, LocalDirectory, LocalLocks
from storage_backends.object_store import (
    AlreadyExists,
    Damaged,
    NotFound,
    OutcomeUnknown,
    StoreRefused,
    StoreUnavailable,
)
from tests._support.processes import child

SLOT = "logs/00000000000000000000000001/00000000000000012345"
REPOSITORY = Path(__file__).parents[2]


class SystemCalls:
    """Records what is synchronised and named, in order; fails what it is told to."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.seen: list[str] = []
        self.failing: dict[str, int] = {}
        patch.setattr(
            os, "fsync", self._watched("fsync", os.fsync, lambda file: Path(f"/proc/self/fd/{file}").readlink())
        )
        patch.setattr(os, "link", self._watched("link", os.link, lambda _, to: to))
        patch.setattr(os, "rename", self._watched("rename", os.rename, lambda _, to: to))
        patch.setattr(os, "mkdir", self._watched("mkdir", os.mkdir, lambda folder, mode=0o777: folder))

    def _watched(self, name: str, call: Callable[..., None], subject: Callable[..., object]) -> Callable[..., None]:
        def watched(*arguments: object) -> None:
            path = Path(str(subject(*arguments)))
            inside = path == self.root or self.root in path.parents
            shown = str(path.relative_to(self.root)) if inside else "outside"
            if shown.startswith(f"{TEMPORARY_FOLDER}/"):
                shown = "temporary"
            line = f"{name} {shown}"
            self.seen.append(line)
            if line in self.failing:
                raise OSError(self.failing[line], os.strerror(self.failing[line]))
            call(*arguments)

        return watched


@pytest.fixture
def store(tmp_path: Path) -> LocalDirectory:
    return LocalDirectory(tmp_path)


@pytest.fixture
def calls(store: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> SystemCalls:
    return SystemCalls(store.root, monkeypatch)


def _temporaries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / TEMPORARY_FOLDER).iterdir())


# Layout


def test_an_object_is_a_file_of_its_name(store: LocalDirectory, tmp_path: Path) -> None:
    store.put("FORMAT", b"body")
    assert store.path_of("FORMAT") == tmp_path / "FORMAT"
    assert (tmp_path / "FORMAT").read_bytes().endswith(b"body")


def test_where_deletions_survive_their_folder_is_synchronised_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalDirectory(tmp_path, deletions_survive=True)
    store.put("a/b", b"")
    calls = SystemCalls(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "unlink", calls._watched("unlink", os.unlink, lambda path: path))
    store.delete("a/b")
    assert calls.seen == ["unlink a/b", "fsync a"]
    # Another process may have removed it, and died before it synchronised the folder.
    calls.seen.clear()
    store.delete("a/b")
    with pytest.raises(NotFound):
        store.head("a/b")
    assert calls.seen == ["unlink a/b", "fsync a", "fsync a"]
    for nowhere in ("a/b/c", "c/d"):
        store.delete(nowhere)
        with pytest.raises(NotFound):
            store.head(nowhere)
    calls.failing["fsync a"] = errno.EIO
    with pytest.raises(StoreUnavailable):
        store.delete("a/b")
    with pytest.raises(StoreUnavailable, match="restart"):
        store.head("a/b")


def test_otherwise_a_deletion_costs_no_synchronisation(store: LocalDirectory, calls: SystemCalls) -> None:
    store.put("a/b", b"")
    calls.seen.clear()
    store.delete("a/b")
    with pytest.raises(NotFound):
        store.head("a/b")
    assert calls.seen == []


def test_a_root_that_went_away_is_not_an_empty_one(store: LocalDirectory, tmp_path: Path) -> None:
    store.put("a", b"")
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable, match=TEMPORARY_FOLDER):
        list(store.list(""))
    tmp_path.mkdir()
    with pytest.raises(StoreUnavailable, match=TEMPORARY_FOLDER):
        list(store.list("a"))


def test_a_folder_of_a_log_holds_a_thousand_slots(store: LocalDirectory, tmp_path: Path) -> None:
    for number in (0, 999, 1000, 12345):
        store.put_if_absent(f"logs/00000000000000000000000001/{number:020d}", b"", metadata={})
    log = tmp_path / "logs/00000000000000000000000001"
    assert {str(path.relative_to(log)) for path in log.glob("*/*")} == {
        "00000000000000000000+/00000000000000000000",
        "00000000000000000000+/00000000000000000999",
        "00000000000000001000+/00000000000000001000",
        "00000000000000012000+/00000000000000012345",
    }


def test_only_the_folder_of_a_log_is_divided(store: LocalDirectory, tmp_path: Path) -> None:
    key = "shards/00/manifest/00000000000000012345"
    assert store.path_of(key) == tmp_path / key
    key = "logs/no-log-id/00000000000000012345"
    assert store.path_of(key) == tmp_path / key


def test_a_folder_of_a_log_goes_with_its_last_slot_and_comes_again(store: LocalDirectory) -> None:
    other = LocalDirectory(store.root)
    folder = store.path_of(SLOT).parent
    for _ in range(2):
        store.put_if_absent(SLOT, b"body", metadata={})
        assert folder.is_dir()
        other.delete(SLOT)
        assert not folder.exists()
    assert folder.parent.is_dir()
    store.put(SLOT, b"body")
    assert other.get(SLOT) == b"body"


def test_an_object_and_a_folder_of_one_name_are_refused(store: LocalDirectory) -> None:
    store.put("a/b", b"x")
    for refused in ("a", "a/b/c"):
        with pytest.raises(StoreRefused, match=refused):
            store.put_if_absent(refused, b"y", metadata={})
        with pytest.raises(StoreRefused, match=refused):
            store.put(refused, b"y")
    assert [found.key for found in store.list("")] == ["a/b"]
    assert store.get("a/b") == b"x"


def test_a_root_that_is_missing_is_made_with_what_is_above_it(tmp_path: Path) -> None:
    with LocalDirectory(tmp_path / "not" / "yet") as store:
        store.put("a", b"x")
    with LocalDirectory(tmp_path / "not" / "yet") as store:
        assert store.get("a") == b"x"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreRefused, match="file"):
        LocalDirectory(tmp_path / "file" / "root")


# Synchronising


def test_a_slot_costs_one_synchronised_file_and_one_synchronised_folder(
    store: LocalDirectory, calls: SystemCalls
) -> None:
    store.put_if_absent("logs/00000000000000000000000001/00000000000000012344", b"", metadata={})
    calls.seen.clear()
    store.put_if_absent(SLOT, b"body", metadata={"commitid": "1"})
    folder = "logs/00000000000000000000000001/00000000000000012000+"
    assert calls.seen == ["fsync temporary", f"link {folder}/00000000000000012345", f"fsync {folder}"]


def test_a_replacing_put_is_synchronised_before_and_after_it_has_its_name(
    store: LocalDirectory, calls: SystemCalls
) -> None:
    store.put("daemons/one", b"1")
    calls.seen.clear()
    store.put("daemons/one", b"2")
    assert calls.seen == ["fsync temporary", "rename daemons/one", "fsync daemons"]


def test_a_new_folder_is_synchronised_in_its_parent(store: LocalDirectory, calls: SystemCalls) -> None:
    store.put("a/b/c", b"x")
    assert calls.seen == [
        "fsync temporary",
        *("mkdir a", "fsync .", "mkdir a/b", "fsync a"),
        *("rename a/b/c", "fsync a/b"),
    ]


def test_a_folder_that_another_process_made_is_synchronised_too(store: LocalDirectory, calls: SystemCalls) -> None:
    (store.root / "a").mkdir()
    calls.seen.clear()
    store.put("a/b", b"x")
    assert calls.seen.index("fsync .") < calls.seen.index("rename a/b")


def test_a_folder_of_a_log_that_another_process_removed_and_made_anew_is_synchronised_again(
    store: LocalDirectory, calls: SystemCalls
) -> None:
    first, second = (f"logs/00000000000000000000000001/{slot:020}" for slot in (1, 2))
    store.put_if_absent(first, b"x", metadata={})
    folder = store.path_of(first).parent
    store.path_of(first).unlink()
    folder.rmdir()
    folder.mkdir()
    calls.seen.clear()
    store.put_if_absent(second, b"x", metadata={})
    assert "fsync logs/00000000000000000000000001" in calls.seen


@pytest.mark.parametrize("concluding", ["put_if_absent", "get", "head"])
def test_what_is_found_to_exist_is_synchronised_before_it_is_said(
    store: LocalDirectory, calls: SystemCalls, concluding: str
) -> None:
    store.put("a/b", b"written by a process that died before it synchronised")
    calls.seen.clear()
    if concluding == "put_if_absent":
        with pytest.raises(AlreadyExists):
            store.put_if_absent("a/b", b"x", metadata={})
    elif concluding == "get":
        store.get("a/b")
    else:
        store.head("a/b")
    assert calls.seen[-2:] == ["fsync a/b", "fsync a"]


def test_of_a_run_of_slots_each_folder_is_synchronised_once_before_anybody_is_told(
    store: LocalDirectory, calls: SystemCalls
) -> None:
    slots = [f"logs/00000000000000000000000001/{number:020d}" for number in range(998, 1003)]
    for key in slots[:-1]:
        store.put_if_absent(key, key.encode(), metadata={})
    calls.seen.clear()
    assert store.get_run(slots) == [key.encode() for key in slots[:-1]]
    folders = {f"fsync {store.path_of(key).parent.relative_to(store.root)}" for key in (slots[0], slots[2])}
    assert sorted(calls.seen) == sorted(folders)
    calls.failing[sorted(folders)[0]] = errno.EIO
    with pytest.raises(StoreUnavailable):
        store.get_run(slots)


def test_a_ranged_read_synchronises_nothing(store: LocalDirectory, calls: SystemCalls) -> None:
    store.put("a/b", b"body")
    calls.seen.clear()
    store.get_range("a/b", 1, 2)
    assert calls.seen == []


# Failing file systems


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_file_that_cannot_be_written_leaves_nothing_and_may_be_tried_again(
    store: LocalDirectory, calls: SystemCalls, number: int
) -> None:
    before = _temporaries(store.root)
    calls.failing["fsync temporary"] = number
    with pytest.raises(StoreUnavailable, match=os.strerror(number)):
        store.put_if_absent(SLOT, b"body", metadata={})
    calls.failing.clear()
    assert _temporaries(store.root) == before
    with pytest.raises(NotFound):
        store.head(SLOT)
    store.put_if_absent(SLOT, b"body", metadata={})


def test_a_read_only_file_system_is_a_refusal(store: LocalDirectory, calls: SystemCalls) -> None:
    calls.failing["link a"] = errno.EROFS
    with pytest.raises(StoreRefused, match="a: "):
        store.put_if_absent("a", b"x", metadata={})


def test_a_link_that_fails_for_no_known_reason_may_have_landed(store: LocalDirectory, calls: SystemCalls) -> None:
    calls.failing["link a"] = errno.EIO
    with pytest.raises(OutcomeUnknown, match="a: "):
        store.put_if_absent("a", b"x", metadata={})


def test_after_a_folder_could_not_be_synchronised_nothing_is_answered(
    store: LocalDirectory, calls: SystemCalls
) -> None:
    store.put("a/b", b"x")
    calls.failing["fsync a"] = errno.EIO
    with pytest.raises(OutcomeUnknown, match="a/c: "):
        store.put_if_absent("a/c", b"x", metadata={"commitid": "1"})
    calls.failing.clear()
    for operation in (
        lambda: store.put_if_absent("a/c", b"x", metadata={"commitid": "1"}),
        lambda: store.put("a/d", b"x"),
        lambda: store.head("a/c"),
        lambda: store.get("a/b"),
        lambda: store.get_range("a/b", 0, 1),
        lambda: list(store.list("")),
        lambda: store.delete("a/b"),
    ):
        with pytest.raises(StoreUnavailable, match="restart"):
            operation()
    assert LocalDirectory(store.root).head("a/c").metadata == {"commitid": "1"}


# Damage


def _damage(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _flip(place: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[place] ^= 0x10

    return change


@pytest.mark.parametrize("place", range(60))
def test_any_flipped_bit_is_found_and_named_with_path_and_place(store: LocalDirectory, place: int) -> None:
    store.put_if_absent(SLOT, b"twenty bytes of body", metadata={"commitid": "01"})
    path = store.path_of(SLOT)
    assert path.stat().st_size == 60
    _damage(path, _flip(place))
    with pytest.raises(Damaged, match=r"00000000000000012000\+/00000000000000012345 is damaged at byte \d+"):
        store.get(SLOT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=40), metadata=st.sampled_from([{}, {"commitid": "01", "x": "y"}]), drawing=st.data())
def test_any_bits_that_flip_are_damage_and_never_another_body(
    store: LocalDirectory, body: bytes, metadata: dict[str, str], drawing: st.DataObject
) -> None:
    store.put("object", body, metadata=metadata)
    path = store.path_of("object")
    size = path.stat().st_size
    bits = drawing.draw(st.sets(st.integers(0, 8 * size - 1), min_size=1, max_size=4))

    def flip(data: bytearray) -> None:
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8

    _damage(path, flip)
    with pytest.raises(Damaged, match=r"^object: .* is damaged at byte \d+"):
        store.get("object")


def test_an_envelope_with_the_body_of_another_object_is_damaged(store: LocalDirectory) -> None:
    store.put("first", b"one body")
    store.put("second", b"another.")
    front = store.path_of("first").stat().st_size - 8
    _damage(store.path_of("first"), lambda data: data.__setitem__(slice(front, None), b"another."))
    with pytest.raises(Damaged, match="first"):
        store.get("first")
    assert store.get("second") == b"another."


def test_damage_of_the_envelope_is_found_by_head_and_ranged_reads(store: LocalDirectory) -> None:
    store.put("bucket", b"x" * 100, metadata={"commitid": "1"})
    _damage(store.path_of("bucket"), _flip(30))
    with pytest.raises(Damaged, match="CRC32C of the envelope"):
        store.head("bucket")
    with pytest.raises(Damaged, match="CRC32C of the envelope"):
        store.get_range("bucket", 0, 10)


@pytest.mark.parametrize("kept", [0, 5, 27, 28, 35, 50, 138])
def test_a_truncated_file_is_found_by_every_read(store: LocalDirectory, kept: int) -> None:
    store.put("bucket", b"x" * 100, metadata={"commitid": "1"})
    path = store.path_of("bucket")
    assert path.stat().st_size == 139
    os.truncate(path, kept)
    for read in (lambda: store.get("bucket"), lambda: store.head("bucket"), lambda: store.get_range("bucket", 0, 1)):
        with pytest.raises(Damaged, match=rf"{path} is damaged at byte ({kept}|0):"):
            read()


def test_a_file_that_grew_is_damaged(store: LocalDirectory) -> None:
    store.put("bucket", b"x" * 100)
    path = store.path_of("bucket")
    size = path.stat().st_size
    _damage(path, lambda data: data.extend(b"more"))
    with pytest.raises(Damaged, match=f"damaged at byte {size}"):
        store.get("bucket")


def test_a_damaged_file_is_listed_and_still_holds_its_key(store: LocalDirectory) -> None:
    store.put("slot", b"x")
    _damage(store.path_of("slot"), bytearray.clear)
    assert [found.key for found in store.list("")] == ["slot"]
    with pytest.raises(AlreadyExists):
        store.put_if_absent("slot", b"y", metadata={})


# Leftovers of the dead

CRASHING_WRITER = """
import os, signal, sys
from storage_backends.local_directory import LocalDirectory
store = LocalDirectory(sys.argv[1])
store.put("written", b"before")
def stop(*arguments):
    print("ready", flush=True)
    signal.pause()
os.link = stop
store.put_if_absent("logs/00000000000000000000000001/00000000000000000001", b"x" * 1000, metadata={"commitid": "1"})
"""


def test_temporaries_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    living = LocalDirectory(tmp_path)
    with child(
        [sys.executable, "-c", CRASHING_WRITER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        while_living = _temporaries(tmp_path)
        assert len(while_living) == 3  # two owners, one file that is being written
        LocalDirectory(tmp_path).close()
        assert _temporaries(tmp_path) == while_living
        assert {found.key for found in living.list("")} == {"written"}
        writer.send_signal(signal.SIGKILL)
    with LocalDirectory(tmp_path) as store:
        assert len(_temporaries(tmp_path)) == 2
        assert {found.key for found in store.list("")} == {"written"}
        store.put_if_absent("logs/00000000000000000000000001/00000000000000000001", b"next", metadata={"commitid": "2"})
    living.put("still", b"works")
    living.close()
    assert _temporaries(tmp_path) == []


def test_a_temporary_without_an_owner_is_removed(tmp_path: Path) -> None:
    LocalDirectory(tmp_path).close()
    (tmp_path / TEMPORARY_FOLDER / "123-abc.7").write_bytes(b"x")
    LocalDirectory(tmp_path).close()
    assert _temporaries(tmp_path) == []


# Locks


def test_a_lock_has_one_holder_until_it_is_released(tmp_path: Path) -> None:
    locks, other = LocalLocks(tmp_path), LocalLocks(tmp_path)
    held = locks.try_lock("daemon-1")
    assert held is not None
    assert held.name == "daemon-1"
    assert locks.try_lock("daemon-1") is None
    assert other.try_lock("daemon-1") is None
    with other.try_lock("daemon-2") or pytest.fail("another name is another lock"):
        pass
    held.release()
    held.release()
    again = other.try_lock("daemon-1")
    assert again is not None
    again.release()


def test_a_lock_is_free_as_soon_as_its_holder_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, signal\n"
        "from storage_backends.local_directory import LocalLocks\n"
        "held = LocalLocks(sys.argv[1]).try_lock('daemon-1')\n"
        "print(held is not None, flush=True)\n"
        "signal.pause()\n"
    )
    locks = LocalLocks(tmp_path)
    with child(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert locks.try_lock("daemon-1") is None
        holder.send_signal(signal.SIGSTOP)
        assert locks.try_lock("daemon-1") is None
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=600)
    held = locks.try_lock("daemon-1")
    assert held is not None
    held.release()


def test_locks_are_no_objects(store: LocalDirectory) -> None:
    with LocalLocks(store.root).try_lock("daemon-1") or pytest.fail("the lock is free"):
        assert (store.root / LOCKS_FOLDER / "daemon-1").exists()
        assert list(store.list("")) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b"])
def test_a_bad_lock_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"name|key"):
        LocalLocks(tmp_path).try_lock(name)


def test_a_range_that_is_far_too_long_is_damage_and_takes_no_memory(store: LocalDirectory) -> None:
    store.put("bucket", b"0123456789")
    for offset, length in ((0, 1 << 50), (20, 1 << 50), (5, 6)):
        with pytest.raises(Damaged, match=f"the body has 10 bytes, too few for {length} from {offset}"):
            store.get_range("bucket", offset, length)
