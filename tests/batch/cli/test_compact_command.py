"""`tarry-spark compact` as people and schedulers call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from batch.cli.compact import Duration, Size
from batch.cli.entry import cli
from batch.engine.root import Root
from storage_backends.local_directory import LocalDirectory
from storage_backends.s3 import S3Store
from tests._support.moto_server import moto_server
from tests.batch.engine._support import roots
from tests.batch.engine._support.roots import StoredTopic


@pytest.fixture
def topic(tmp_path: Path) -> StoredTopic:
    """Of a root in `tmp_path / "root"`."""
    store = LocalDirectory(tmp_path / "root")
    roots.make_root(store)
    return StoredTopic(store, "flights")


def call(tmp_path: Path, *arguments: str) -> Result:
    local = ["compact", "--store", str(tmp_path / "root"), "--engine", "local", "--parallelism", "1"]
    return CliRunner().invoke(cli, [*local, *arguments])


def test_buckets_are_merged_by_processes_of_this_machine_and_the_result_is_json(
    tmp_path: Path, topic: StoredTopic
) -> None:
    topic.add(range(8))
    before = topic.waiting()
    result = call(tmp_path, "--json", "--metrics-file", str(tmp_path / "compaction.prom"))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert topic.waiting() == before
    assert (summary["status"], summary["buckets_before"], summary["buckets_after"]) == ("done", 8, 1)
    assert summary["engine"] == "local"
    (run,) = summary["run_results"]
    assert (run["topic"], run["outcome"], len(run["sources"])) == ("flights", "committed", 8)
    assert run["worker"]["pid"] != os.getpid()
    assert "tarry_compaction_exit_status 0.0" in (tmp_path / "compaction.prom").read_text()


def test_a_root_on_s3_is_merged_by_processes_that_connect_themselves(tmp_path: Path) -> None:
    with moto_server() as server, S3Store(server.settings("delays", prefix="root")) as store:
        roots.make_root(store)
        topic = StoredTopic(store, "flights")
        topic.add(range(1, 5))
        before = topic.waiting()
        place = ["--store", "s3://delays/root", "--set", f"store.s3.endpoint_url={server.endpoint_url}"]
        result = call(tmp_path, *place, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["buckets_after"] == len(topic.tip().live) == 1
        assert topic.waiting() == before


def test_people_get_a_table_and_what_was_read_and_written(tmp_path: Path, topic: StoredTopic) -> None:
    topic.add(range(4))
    result = call(tmp_path)
    assert result.exit_code == 0
    assert "flights" in result.stdout
    assert "buckets 4 -> 1" in result.stdout
    assert "planned topics=1 runs=1" in result.stderr


def test_quiet_is_quiet_but_for_the_result(tmp_path: Path, topic: StoredTopic) -> None:
    topic.add(range(4))
    assert call(tmp_path, "--quiet").stderr == ""


def test_a_dry_run_shows_what_would_be_merged(tmp_path: Path, topic: StoredTopic) -> None:
    topic.add(range(4))
    result = call(tmp_path, "--dry-run", "--metrics-file", str(tmp_path / "compaction.prom"))
    assert result.exit_code == 0
    assert "planned" in result.stdout
    assert len(topic.tip().live) == 4
    assert not (tmp_path / "compaction.prom").exists()


def test_a_root_that_is_not_there_ends_in_1_and_says_what_to_do(tmp_path: Path) -> None:
    result = call(tmp_path, "--metrics-file", str(tmp_path / "compaction.prom"))
    assert result.exit_code == 1
    assert "the directory does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "tarry_compaction_exit_status 1.0" in (tmp_path / "compaction.prom").read_text()
    (tmp_path / "root").mkdir()
    assert "FORMAT is missing" in call(tmp_path).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "store.paht=x"], "store.paht"),
        (["--target-bytes", "much"], "is not a size such as"),
        (["--deadline", "soon"], "is not a duration such as"),
        (["--max-sources", "1"], "--max-sources"),
        (["--min-sources", "9", "--max-sources", "8"], "--min-sources 9 is above"),
        (["--master", "local[2]"], "--engine spark"),
        (["--store", "gs://bucket"], "s3://bucket/prefix"),
    ],
)
def test_a_wrong_option_ends_in_2_and_is_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = call(tmp_path, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_help_teaches() -> None:
    group, command = (CliRunner().invoke(cli, [*words, "--help"]).stdout for words in ([], ["compact"]))
    assert "Merge small neighbouring buckets" in group
    for taught in ("--dry-run", "75", "Examples:", "64M", "15m", "TARRY_SECTION__KEY", "s3://"):
        assert taught in command


def test_sigterm_ends_the_command_after_the_commit_under_way(tmp_path: Path, topic: StoredTopic) -> None:
    topic.add(range(40))
    before = topic.waiting()
    command = ["compact", "--store", str(tmp_path / "root"), "--engine", "local", "--parallelism", "1", "--json"]
    stopped = subprocess.run(
        [sys.executable, "-c", _SIGNALLED, *command, "--max-sources", "4"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    summary: dict[str, Any] = json.loads(stopped.stdout)
    assert (summary["status"], summary["runs"]["committed"], summary["runs"]["left"]) == ("stopped", 1, 9)
    assert topic.waiting() == before


_SIGNALLED = """
import os, signal
from batch.cli import entry
from storage_backends import crash_points
def hook(name):
    if name == "compaction.before_commit":
        os.kill(os.getpid(), signal.SIGTERM)
if __name__ == "__main__":
    with crash_points.intercepted(hook):
        entry.main()
"""


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1000", 1000), ("1K", 1024), ("64M", 64 << 20), ("64MiB", 64 << 20), ("2gb", 2 << 30)]
)
def test_sizes_have_units_of_1024(text: str, size_bytes: int) -> None:
    assert Size().convert(text, None, None) == size_bytes


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0)])
def test_durations_have_units_and_are_seconds_without(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("wrong", ["", "-1", "0", "5X", "M"])
def test_what_is_no_size_is_refused(wrong: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(wrong, None, None)


def test_an_interruption_before_the_job_begins_ends_in_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(store: object) -> Root:
        raise KeyboardInterrupt

    (tmp_path / "root").mkdir()
    monkeypatch.setattr(Root, "open", staticmethod(interrupted))
    result = call(tmp_path)
    assert (result.exit_code, result.stdout) == (130, "")
