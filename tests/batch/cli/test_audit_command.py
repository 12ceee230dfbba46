"""`tarry-spark audit` on a local directory, with worker processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batch.cli import entry, terminal
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from tests.batch.audit._support.audits import MANIFESTS, keys, sound_root


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    return sound_root()


@pytest.fixture
def place(written: MemoryStore, tmp_path: Path) -> Path:
    """A local directory with a sound root."""
    with LocalDirectory(tmp_path / "root") as local:
        for key in keys(written, ""):
            body, metadata = written.get_with_metadata(key)
            local.put(key, body, metadata=metadata)
    return tmp_path / "root"


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "batch.cli.entry",
        "audit",
        "--store",
        str(place),
        "--engine",
        "local",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def stored(place: Path) -> dict[str, bytes]:
    """Every object's file."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.relative_to(place).parts[0].startswith(".")
    }


def damage(place: Path) -> str:
    """A bit of the newest manifest of topic `t` is another one; its key."""
    key = max(f"{MANIFESTS}{path.name}" for path in (place / MANIFESTS).iterdir())
    body = (place / key).read_bytes()
    (place / key).write_bytes(body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    return key


def test_a_sound_root_ends_with_0_and_is_left_as_it_was(place: Path, tmp_path: Path) -> None:
    before = stored(place)
    ended = run(place, "--json", "--output", str(tmp_path / "report.json"))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["errors"], report["store"], report["engine"], report["topics"]) == (0, str(place), "local", 3)
    # They left in the time of the story, years ago: the daemons' settings say when that is too long.
    assert report["counts"]["tombstone_overdue"] == report["warnings"] > 0
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert stored(place) == before


def test_errors_end_with_1_and_people_see_what_where_and_how_bad(place: Path) -> None:
    key = damage(place)
    ended = run(place, "--parallelism", "2")
    assert ended.returncode == 1
    assert key in ended.stdout
    assert "damaged" in ended.stdout
    assert "its bytes are not those written" in ended.stdout
    assert "1 errors" in ended.stdout


def test_a_topic_is_audited_alone(place: Path) -> None:
    damage(place)
    ended = run(place, "--topic", "other", "--quiet")
    assert ended.returncode == 0, ended.stdout
    assert not ended.stderr


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs it in this process; for what ends before any task begins."""
    monkeypatch.setattr(terminal, "configure", lambda *, quiet: None)
    return lambda *arguments: CliRunner().invoke(entry.cli, ["audit", "--engine", "local", *map(str, arguments)])


def test_what_cannot_run_ends_with_1_and_says_why(command: Callable[..., Result], place: Path, tmp_path: Path) -> None:
    for arguments, text in (
        (("--store", tmp_path / "nowhere"), "the directory does not exist"),
        (("--store", tmp_path), "FORMAT is missing"),
        (("--store", place, "--topic", "nowhere"), "topic 'nowhere' does not exist in the root"),
    ):
        ended = command(*arguments, "--json")
        assert ended.exit_code == 1
        assert text in ended.stderr
        assert not ended.stdout


def test_a_wrong_sample_ends_with_2(command: Callable[..., Result], place: Path) -> None:
    assert command("--store", place, "--sample", "1.5").exit_code == 2
